"""Whether a model is instruction-tuned, as its tokenizer tells, and the default limits for such models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from swiftkv_platform.planning.gates import NEEDLE_LENGTHS
from swiftkv_platform.specs import EvaluationSpec

MAX_KL = 0.2
MIN_TOP1_AGREEMENT = 0.8


def is_instruction_tuned(tokenizer: Any) -> bool:
    """Whether the chat template contains added tokens of the vocabulary, so that the model was trained on turns.
    Templates lent to a base model, or with markers in plain text, contain none."""
    templates = tokenizer.chat_template
    if not templates:
        return False
    text = "".join(templates.values()) if isinstance(templates, dict) else str(templates)
    return any(token.content in text for token in tokenizer.added_tokens_decoder.values() if token.content.strip())


@dataclass(frozen=True)
class Limits:
    """Limits of `EvaluationSpec` with `auto` resolved for the model."""

    max_kl: float | None
    max_perplexity_ratio: float | None
    min_top1_agreement: float | None
    max_drop: float | Literal["auto"] | None
    """`auto` and None as in the spec: the default of a task follows from its samples, see `planning.gates`."""
    max_needle_drop: float | Literal["auto"] | None

    @classmethod
    def of(cls, spec: EvaluationSpec, *, instruct: bool) -> Limits:
        def settle(value: float | Literal["auto"] | None, default: float) -> float | None:
            if value == "auto":
                return default if instruct else None
            return value

        return cls(
            max_kl=settle(spec.max_kl, MAX_KL),
            max_perplexity_ratio=spec.max_perplexity_ratio,
            min_top1_agreement=settle(spec.min_top1_agreement, MIN_TOP1_AGREEMENT),
            max_drop=spec.max_drop,
            max_needle_drop=spec.max_needle_drop,
        )


def needle_lengths(spec: EvaluationSpec, *, instruct: bool, context_length: int) -> tuple[int, ...]:
    """Return the lengths of the needle prompts in tokens: the spec's, or for instruction-tuned models those of
    `NEEDLE_LENGTHS` that fit into the model's context."""
    if spec.needle_lengths is not None:
        return spec.needle_lengths
    return tuple(length for length in NEEDLE_LENGTHS if length <= context_length) if instruct else ()
