"""Agreement of an engine with PyTorch: errors of its log-probabilities, compared with those of PyTorch in low
precision.

The engine answers greedily, and a float32 forward pass of the reference implementation scores its tokens. The engine
agrees if the root mean square error of its log-probabilities is at most 1.3 times that of PyTorch's forward pass in the
engine's dtype, and if no chosen token is further below the best one than three times PyTorch's largest error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from swiftkv_platform.engine import LLMEngine, RequestOutput, SamplingParams

MOST_OF_PYTORCH = 1.3
"""Largest accepted root mean square error, relative to PyTorch's."""
MOST_GAP = 3.0
"""Distance of a chosen token from the best one, in units of PyTorch's largest error."""
FLOAT32_ERROR = 1e-4
"""Error in nats due to another order of summation, in float32 and for models of this size."""


@dataclass(frozen=True)
class Answer:
    """Tokens that an engine chose greedily, with its own log-probabilities in nats."""

    prompt: list[int]
    token_ids: list[int]
    logprobs: list[float]


@dataclass(frozen=True)
class Scores:
    """A forward pass over the tokens of all answers, each tensor [num_tokens], in nats."""

    chosen: torch.Tensor
    """Log-probability of each token of the answers."""
    best: torch.Tensor
    """Largest log-probability at each position."""


def engine_answers(engine: LLMEngine, prompts: Sequence[list[int]], num_tokens: int) -> list[Answer]:
    """Answers of our own engine."""
    return answers_of(engine.generate(prompts, greedy(num_tokens), progress=False))


def greedy(num_tokens: int) -> SamplingParams:
    """Parameters of an answer of `num_tokens` tokens with their log-probabilities."""
    return SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True, logprobs=0)


def answers_of(outputs: Sequence[RequestOutput]) -> list[Answer]:
    """Convert greedy outputs of our own engine, which must include log-probabilities."""
    return [
        Answer(
            list(output.prompt_token_ids),
            output.token_ids,
            [row[token] for row, token in zip(output.logprobs or (), output.token_ids, strict=True)],
        )
        for output in outputs
    ]


def score(directory: Path, answers: Sequence[Answer], dtype: torch.dtype, device: str) -> Scores:
    """Scores by the reference implementation: transformers' own classes, or this project's for a student."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).to(device).eval()
    chosen, best = [], []
    with torch.no_grad():
        for answer in answers:
            token_ids = torch.tensor([answer.prompt + answer.token_ids], device=device)
            num_tokens = len(answer.token_ids)
            logits = model(token_ids, logits_to_keep=num_tokens + 1).logits[0, :-1]
            logprobs = logits.float().log_softmax(-1)
            chosen.append(logprobs.gather(-1, token_ids[0, -num_tokens:, None])[:, 0].cpu())
            best.append(logprobs.amax(-1).cpu())
    return Scores(torch.cat(chosen), torch.cat(best))


def judge(directory: Path, answers: Sequence[Answer], dtype: torch.dtype, device: str) -> dict[str, Any]:
    """Comparison of answers that were computed in `dtype` with PyTorch; see `compare`."""
    exact, own = (score(directory, answers, each, device) for each in (torch.float32, dtype))
    return compare(answers, exact, own)


def compare(answers: Sequence[Answer], exact: Scores, own: Scores) -> dict[str, Any]:
    """Errors in nats, and whether they are small enough.

    Args:
        exact: scores in float32.
        own: PyTorch's scores in the engine's dtype.
    """
    served = torch.tensor([logprob for answer in answers for logprob in answer.logprobs])
    error, pytorch_error = _rms(served - exact.chosen), _rms(own.chosen - exact.chosen)
    gap, pytorch_most = float((exact.best - exact.chosen).max()), float((own.chosen - exact.chosen).abs().max())
    return {
        "num_tokens": len(served),
        "error": error,
        "pytorch_error": pytorch_error,
        "max_gap_to_best": gap,
        "agrees": error <= MOST_OF_PYTORCH * pytorch_error + FLOAT32_ERROR
        and gap <= MOST_GAP * pytorch_most + FLOAT32_ERROR,
    }


def _rms(errors: torch.Tensor) -> float:
    return float(errors.square().mean().sqrt())


def table(found: Mapping[str, dict[str, Any]]) -> str:
    """A line for each model."""
    lines = ["| model | tokens | RMS error (nats) | PyTorch's | gap to the best | agrees |", "|---" * 6 + "|"]
    for model, row in found.items():
        figures = (f"{row[name]:.4f}" for name in ("error", "pytorch_error", "max_gap_to_best"))
        cells = [model, str(row["num_tokens"]), *figures, "yes" if row["agrees"] else "NO"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
