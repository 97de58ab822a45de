"""Early exit of a decode token after layer l - 1. Frozen options, chosen by request; imports no torch.

Source: paper, appendix E (threshold mode).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, get_args

from swiftkv_platform.errors import InvalidInputError

EarlyExitMode = Literal["off", "threshold", "lossless"]
_BY_MODE: Any = None
"""Placeholder for the default threshold, which depends on the mode."""


@dataclass(frozen=True)
class EarlyExit:
    """Raises `InvalidInputError` for a value out of range."""

    mode: EarlyExitMode = "off"
    """`off`: every token goes through all layers. `threshold`: a token exits if the exit head is sure enough.
    `lossless`: the exit head drafts and the upper layers verify; the text is the same as with `off`."""
    threshold: float = _BY_MODE
    """Least probability of the exit head's most likely token, at temperature 1, from 0 to 1: to exit with `threshold`
    (default 0.95; 0 always exits), to go on drafting with `lossless` (default 0: drafts as long as it pays)."""
    num_draft_tokens: int = 4
    """Most tokens that `lossless` drafts before it verifies them."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(EarlyExitMode):
            raise _refusal("mode", self.mode, "off, threshold or lossless")
        if self.threshold is _BY_MODE:
            object.__setattr__(self, "threshold", 0.0 if self.mode == "lossless" else 0.95)
        number = isinstance(self.threshold, int | float) and not isinstance(self.threshold, bool)
        if not (number and 0.0 <= self.threshold <= 1.0):
            raise _refusal("threshold", self.threshold, "a number from 0 to 1")
        whole = isinstance(self.num_draft_tokens, int) and not isinstance(self.num_draft_tokens, bool)
        if not (whole and self.num_draft_tokens >= 1):
            raise _refusal("num_draft_tokens", self.num_draft_tokens, "a whole number of at least 1")

    @classmethod
    def parse(cls, value: str | Mapping[str, Any] | Self | None) -> Self:
        """Parse a mode's name, the fields by name, or the options themselves; None means off. Raises
        `InvalidInputError`, which names the field and what it accepts."""
        if isinstance(value, cls):
            return value
        if value is None:
            return cls()
        if isinstance(value, str):
            return cls(mode=value)  # type: ignore[arg-type]  # checked above
        known = [field.name for field in fields(cls)]
        if not isinstance(value, Mapping) or not set(value) <= set(known):
            raise InvalidInputError.of(
                "early_exit", value, f"; it must be off, threshold, lossless, or some of {', '.join(known)} by name"
            )
        return cls(**value)


def _refusal(field: str, value: Any, accepted: str) -> InvalidInputError:
    return InvalidInputError(
        f"early_exit.{field} is {value!r}; it must be {accepted}", field=f"early_exit.{field}", value=value
    )
