"""Sampling parameters of a request. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self, TypeGuard, get_args

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.specs.base import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_LOOKUP_TOKENS,
    MAX_N,
    MAX_SEED,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TEMPERATURE,
    MAX_TOP_K,
    MIN_TEMPERATURE,
)
from swiftkv_platform.specs.structured_outputs import StructuredOutputs

RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, MAX_TEMPERATURE),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""Accepted ranges: OpenAI's limits, within those of vLLM, so that both engines accept the same values."""
MAX_ABS_LOGIT_BIAS = 100.0
"""Max absolute value of a logit bias."""
_MIN_TOP_P = 1e-6
"""Min `top_p` passed to engines: equivalent to 0, which vLLM refuses."""

EarlyExitMode = Literal["off", "threshold", "lossless"]
_MODE_DEFAULT: Any = None
"""Placeholder: the default threshold depends on the mode."""


def _check_int(field: str, value: object, low: int, high: int | None) -> None:
    if not _is_int(value) or value < low or (high and value > high):
        accepted = f"of at least {low}" if high is None else f"from {low} to {high}"
        raise _make_error(field, value, f"a whole number {accepted}")


def _check_number(field: str, value: object, low: float, high: float) -> None:
    if not (_is_number(value) and low <= value <= high):
        raise _make_error(field, value, f"a number from {low:g} to {high:g}")


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _make_error(field: str, value: Any, accepted: str) -> InvalidInputError:
    return InvalidInputError(f"{field} is {value!r}; it must be {accepted}", field=field, value=value)


@dataclass(frozen=True)
class EarlyExit:
    """Early exit of decode tokens after layer l - 1 (`threshold`: paper, appendix E). Raises `InvalidInputError` for a
    value out of range."""

    mode: EarlyExitMode = "off"
    """`off`: all tokens run all layers. `threshold`: a token exits early if the exit head's probability is high enough.
    `lossless`: the exit head drafts tokens and layers >= l verify them, with the same text as `off`."""
    threshold: float = _MODE_DEFAULT
    """Min probability, 0 to 1, of the exit head's most likely token at temperature 1: to exit (`threshold`, default
    0.95; 0 always exits), or to draft another token (`lossless`, default 0: an adaptive number)."""
    num_draft_tokens: int = 4
    """Max drafted tokens per verification with `lossless`."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(EarlyExitMode):
            raise _make_error("early_exit.mode", self.mode, "off, threshold or lossless")
        if self.threshold is _MODE_DEFAULT:
            object.__setattr__(self, "threshold", 0.0 if self.mode == "lossless" else 0.95)
        _check_number("early_exit.threshold", self.threshold, 0.0, 1.0)
        _check_int("early_exit.num_draft_tokens", self.num_draft_tokens, 1, None)

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | Self | None) -> Self:
        """Parse a mode, a mapping of the fields, or an `EarlyExit`; None: off. Raises `InvalidInputError`."""
        if isinstance(value, cls):
            return value
        if value is None:
            return cls()
        if isinstance(value, str):
            return cls(mode=value)  # type: ignore[arg-type]  # checked above
        known = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping) or not set(value) <= set(known):
            raise InvalidInputError.for_field(
                "early_exit", value, f"; it must be off, threshold, lossless, or an object with {', '.join(known)}"
            )
        return cls(**value)


_NO_EARLY_EXIT = EarlyExit()


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request. Raises `InvalidInputError` for a value out of range.

    Logits are processed in this order: `logit_bias`, the penalties, `min_tokens`, `structured_outputs`, `temperature`,
    `top_k`, `top_p`, `min_p`.
    """

    max_tokens: int = 16
    """Max tokens to generate; the context length may end the answer earlier. 0: only process the prompt, e.g. for
    `prompt_logprobs`."""
    min_tokens: int = 0
    """Min tokens to generate: before that, end of sequence and `stop_token_ids` are not generated, and `stop` does not
    apply."""
    temperature: float = 1.0
    """Sampling temperature, up to 2; below 0.01: greedy."""
    top_p: float = 1.0
    """Nucleus sampling; 1 keeps all tokens, 0 only the most probable."""
    top_k: int = 0
    """Sample from the k most probable tokens; 0 and -1 keep all."""
    min_p: float = 0.0
    """Sample from tokens with at least this probability relative to the most probable one; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or answer; 0.01 to 100, 1: no effect."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens in the answer; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit per occurrence in the answer; -2 to 2."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to logits, by token id; -100 to 100."""
    n: int = 1
    """Number of answers, each with its own seed."""
    seed: int | None = None
    """Seed for a reproducible answer, regardless of other requests: 64 bits, sign bit ignored. None and -1: derived
    from the engine's seed."""
    stop: tuple[str, ...] = ()
    """Stop strings, which are not part of the text: a string or a sequence."""
    include_stop_str_in_output: bool = False
    """Include the stop string or the text of the stop token in the answer."""
    stop_token_ids: tuple[int, ...] = ()
    """Stop tokens in addition to the model's end of sequence; counted, but not part of the text."""
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these tokens are generated, and end of sequence only if listed; None: all tokens."""
    ignore_eos: bool = False
    """Continue after the model's end of sequence."""
    skip_special_tokens: bool = True
    """Remove special tokens from the text."""
    logprobs: int | None = None
    """Number of most probable tokens to return log-probabilities for, besides the generated token; None: none."""
    prompt_logprobs: int | None = None
    """`logprobs` for the prompt's tokens, which then run all layers."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many last tokens of the prompt; -1: as many as fit with `max_tokens`."""
    early_exit: EarlyExit = _NO_EARLY_EXIT
    """Early exit of generated tokens: a mode (`off`, `threshold`, `lossless`) or `EarlyExit(...)`."""

    num_lookup_tokens: int = 0
    """Max tokens drafted at a time by prompt lookup, or where structured outputs allow one token only. Drafts are
    verified and do not change the answer. 0: no drafts."""
    structured_outputs: StructuredOutputs | None = None
    """Constraint on the text: `StructuredOutputs(...)` or a mapping of its fields. `max_tokens` may truncate the
    answer."""

    @property
    def num_exit_drafts(self) -> int:
        """Max tokens that the exit head drafts at a time; 0 unless `early_exit` is `lossless`."""
        return self.early_exit.num_draft_tokens if self.early_exit.mode == "lossless" else 0

    @property
    def uses_exit_threshold(self) -> bool:
        """Whether tokens exit early at `exit_threshold`."""
        return self.early_exit.mode == "threshold"

    @property
    def exit_threshold(self) -> float:
        return self.early_exit.threshold

    def require_no_early_exit(self, why: str) -> None:
        """Raise `InvalidInputError` with `why` if the request uses early exit."""
        if self.early_exit.mode != "off":
            raise InvalidInputError.for_field("early_exit", self.early_exit.mode, why)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _validate_stop(self.stop))
        object.__setattr__(
            self, "stop_token_ids", _validate_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        )
        if self.allowed_token_ids is not None:
            allowed = _validate_token_ids("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS)
            if not allowed:
                raise _make_error(
                    "allowed_token_ids", self.allowed_token_ids, "a list of at least one token id, or left out"
                )
            object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "logit_bias", _validate_logit_bias(self.logit_bias))
        if self.early_exit is not _NO_EARLY_EXIT:
            object.__setattr__(self, "early_exit", EarlyExit.parse(self.early_exit))
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputs.parse(self.structured_outputs))
        _check_int("max_tokens", self.max_tokens, 0, None)
        _check_int("min_tokens", self.min_tokens, 0, None)
        if self.min_tokens > self.max_tokens:
            raise _make_error("min_tokens", self.min_tokens, f"at most max_tokens, {self.max_tokens}")
        if self.truncate_prompt_tokens not in (None, -1):
            _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, None)
        _check_int("n", self.n, 1, MAX_N)
        _check_int("top_k", self.top_k, -1, MAX_TOP_K)
        _check_int("num_lookup_tokens", self.num_lookup_tokens, 0, MAX_LOOKUP_TOKENS)
        if self.num_lookup_tokens and self.uses_exit_threshold:
            raise _make_error("num_lookup_tokens", self.num_lookup_tokens, "0 if early_exit is 'threshold'")
        if self.seed is not None:
            _check_int("seed", self.seed, ~MAX_SEED, MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, MAX_LOGPROBS)
        for name, (low, high) in RANGES.items():
            _check_number(name, getattr(self, name), low, high)
        self._normalize()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise _make_error(name, getattr(self, name), "true or false")
        if self.structured_outputs is not None:
            for name, accepted in (("ignore_eos", "false"), ("min_tokens", "0"), ("allowed_token_ids", "left out")):
                if value := getattr(self, name):
                    raise _make_error(
                        name,
                        value,
                        f"{accepted} with {self.structured_outputs.name}, which determines the end of the answer",
                    )

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    def _normalize(self) -> None:
        if self.temperature < MIN_TEMPERATURE:
            object.__setattr__(self, "temperature", 0.0)
        object.__setattr__(self, "top_p", max(self.top_p, _MIN_TOP_P))
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        if self.seed is not None:
            object.__setattr__(self, "seed", None if self.seed == -1 else self.seed & MAX_SEED)


def _validate_logit_bias(logit_bias: object) -> Mapping[int, float]:
    accepted = f"numbers from {-MAX_ABS_LOGIT_BIAS:g} to {MAX_ABS_LOGIT_BIAS:g} by token id"
    if not isinstance(logit_bias, Mapping):
        raise _make_error("logit_bias", logit_bias, accepted)
    _check_size("logit_bias", logit_bias, MAX_LOGIT_BIAS)
    if not all(
        _is_int(token) and token >= 0 and _is_number(bias) and abs(bias) <= MAX_ABS_LOGIT_BIAS
        for token, bias in logit_bias.items()
    ):
        raise _make_error("logit_bias", logit_bias, accepted)
    return dict(logit_bias)


def _validate_stop(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)):
        raise _make_error("stop", stop, "a non-empty string or a list of them")
    _check_size("stop", strings, MAX_STOP_STRINGS)
    if not all(isinstance(string, str) and string for string in strings):
        raise _make_error("stop", stop, "a non-empty string or a list of them")
    longest = max(map(len, strings), default=0)
    if longest > MAX_STOP_LENGTH:
        message = f"stop has a string of {longest} characters; at most {MAX_STOP_LENGTH} are accepted"
        raise InvalidInputError(message, field="stop", value=longest)
    return tuple(strings)


def _validate_token_ids(field: str, token_ids: object, high: int) -> tuple[int, ...]:
    accepted = "a list of token ids"
    if not isinstance(token_ids, (list, tuple)):
        raise _make_error(field, token_ids, accepted)
    _check_size(field, token_ids, high)
    if not all(_is_int(token) and token >= 0 for token in token_ids):
        raise _make_error(field, token_ids, accepted)
    return tuple(token_ids)


def _check_size(field: str, value: Sized, high: int) -> None:
    """Refuse too many entries, without repeating them in the message."""
    if len(value) > high:
        message = f"{field} has {len(value)} entries; a request accepts at most {high}"
        raise InvalidInputError(message, field=field, value=len(value))
