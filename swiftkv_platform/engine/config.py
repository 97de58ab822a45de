"""What an engine and a request may be told. Frozen; knows no tensor and reads no file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from swiftkv_platform.errors import InvalidInputError

MAX_SEED = (1 << 63) - 1
"""Largest seed a request or an engine accepts."""


class EngineConfig(BaseModel):
    """How a model is loaded and run. Unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights in memory; `auto` keeps the checkpoint's."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; `auto` takes the GPU where there is one."""
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Tokens of prompt and answer together; None is the model's own context, which it may not exceed."""
    max_num_waiting: Annotated[int, Field(ge=0)] = 64
    """Requests that may wait for their turn in `AsyncLLMEngine`; one more is refused at once."""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] | None = None
    """Where requests without a seed of their own draw one from; None draws differently in every process."""
    num_threads: Annotated[int, Field(ge=1)] | None = None
    """Threads of one CPU operator; None leaves torch's setting (one thread per core, or `OMP_NUM_THREADS`)."""


@dataclass(frozen=True)
class SamplingParams:
    """How one request chooses its tokens and where it ends. Raises `InvalidInputError` for a value out of range."""

    max_tokens: int = 16
    """Most tokens to generate; the context may end the answer earlier."""
    temperature: float = 1.0
    """0 takes the most probable token; above, logits are divided by it."""
    top_p: float = 1.0
    """Samples among the fewest tokens whose probabilities sum to at least this; 1 keeps all."""
    top_k: int = 0
    """Samples among the k most probable tokens; 0 keeps all."""
    seed: int | None = None
    """Makes the answer repeatable; None draws one from the engine's."""
    stop: tuple[str, ...] = ()
    """Strings that end the answer, and are not part of its text. One string, or a sequence of them."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer beside the model's end of sequence; counted, but not part of the text."""
    ignore_eos: bool = False
    """Generate on past the model's end of sequence."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _checked_stop(self.stop))
        object.__setattr__(self, "stop_token_ids", _checked_token_ids(self.stop_token_ids))
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("top_k", self.top_k, 0, None)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, MAX_SEED)
        if not (_is_number(self.temperature) and 0.0 <= self.temperature < math.inf):
            raise _refusal("temperature", self.temperature, "a finite number of at least 0")
        if not (_is_number(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise _refusal("top_p", self.top_p, "a number above 0 and at most 1")
        if not isinstance(self.ignore_eos, bool):
            raise _refusal("ignore_eos", self.ignore_eos, "true or false")


def _checked_stop(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)) or not all(isinstance(string, str) and string for string in strings):
        raise _refusal("stop", stop, "a non-empty string or a list of them")
    return tuple(strings)


def _checked_token_ids(token_ids: object) -> tuple[int, ...]:
    if not isinstance(token_ids, (list, tuple)) or not all(_is_int(token) and token >= 0 for token in token_ids):
        raise _refusal("stop_token_ids", token_ids, "a list of token ids, whole numbers of at least 0")
    return tuple(token_ids)


def _check_int(field: str, value: object, at_least: int, at_most: int | None) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least or (at_most and value > at_most):
        accepted = f"of at least {at_least}" if at_most is None else f"from {at_least} to {at_most}"
        raise _refusal(field, value, f"a whole number {accepted}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _refusal(field: str, value: Any, accepted: str) -> InvalidInputError:
    return InvalidInputError(f"{field} is {value!r}; it must be {accepted}", field=field, value=value)
