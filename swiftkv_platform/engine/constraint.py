"""Tokens that may come next in a constrained answer. Knows tokens and a compiled grammar, no tensor and no request.

The state is a function of the answer's tokens: asked about any continuation, the matcher goes back to where it agrees
with it, and on from there. So drafts are tried and dropped, and a preempted sequence goes on, without a word to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self


class Matcher(Protocol):
    """The part of `llguidance.LLMatcher` that is used."""

    def deep_copy(self) -> Self: ...
    def try_consume_tokens(self, tokens: list[int]) -> int: ...
    def validate_tokens(self, tokens: list[int]) -> int: ...
    def rollback(self, num_tokens: int) -> bool: ...
    def compute_bitmask(self) -> bytes: ...
    def compute_ff_tokens(self) -> list[int]: ...
    def is_stopped(self) -> bool: ...
    def is_error(self) -> bool: ...
    def get_error(self) -> str: ...


class Constraint:
    """A grammar, and how far one answer has come in it."""

    def __init__(self, matcher: Matcher, name: str) -> None:
        self._matcher = matcher
        self.name = name
        """The request's field that it comes from."""
        self._consumed: list[int] = []

    def fresh(self, name: str | None = None) -> Constraint:
        """The same grammar for another answer, under another name if one is given."""
        assert not self._consumed, "a constraint in use is no template"
        return Constraint(self._matcher.deep_copy(), name or self.name)

    @property
    def failure(self) -> str | None:
        """Message where nothing can follow: the grammar takes more work in a step than is allowed."""
        if not self._matcher.is_error():
            return None
        return f"{self.name} is too complex to be followed further: {self._matcher.get_error().splitlines()[0]}"

    def allowed(self, answer: Sequence[int]) -> bytes:
        """The tokens that may follow `answer`, one bit each, the lowest first. Where the grammar is at its end, or has
        failed, these are the ends of sequence alone."""
        self._go_to(answer)
        return self._matcher.compute_bitmask()

    def num_allowed(self, answer: Sequence[int], drafted: Sequence[int]) -> int:
        """Return how many of `drafted`, the first ones, may follow `answer` one after another."""
        self._go_to(answer)
        return self._matcher.validate_tokens(list(drafted))

    def forced(self, answer: Sequence[int]) -> tuple[int, ...]:
        """Tokens of the text that must follow `answer`: the keys of an object, say. Other tokens may spell it too."""
        self._go_to(answer)
        return tuple(self._matcher.compute_ff_tokens())

    def is_complete(self, answer: Sequence[int]) -> bool:
        """Whether nothing but the end of sequence may follow `answer`."""
        self._go_to(answer)
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _go_to(self, answer: Sequence[int]) -> None:
        if self._matcher.is_error():
            return
        answer, known = list(answer), self._consumed
        agreed = len(known)
        if answer[:agreed] != known:
            agreed = _num_agreed(known, answer)
            self._matcher.rollback(len(known) - agreed)
        following = answer[agreed:]
        num_consumed = self._matcher.try_consume_tokens(following) if following else 0
        self._consumed = answer[: agreed + num_consumed]


def _num_agreed(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
