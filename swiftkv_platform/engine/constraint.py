"""Tokens that may come next in a constrained answer. Knows tokens and a compiled grammar, no tensor and no request.

The state is a function of the answer's tokens: asked about any continuation, the matcher goes back to where it agrees
with it, and on from there. So drafts are tried and dropped, and a preempted sequence goes on, without a word to it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from swiftkv_platform.errors import RateLimitedError
from swiftkv_platform.web.rate_limits import Clock, TokenBucket

FIRST_S = 0.1
"""CPU seconds that following one request's grammar may take, all its answers together, before its tokens count."""
TOKEN_S = 0.002
"""CPU seconds that each token adds; grammars as they are meant take a tenth of it."""
CALLER_S = 1.0
"""CPU seconds that all grammars of one caller may take at once, beyond `CALLER_TOKEN_S` a token: 64 schemas of some
10 ms at their first token do."""
CALLER_S_PER_MINUTE = 6
"""Those that it gets back in a minute: what it can take of everybody's time for long is a tenth."""
CALLER_TOKEN_S = 0.0005
SLOW_S = 0.02
"""CPU seconds of a caller's, beyond `CALLER_TOKEN_S` a token, after which its grammars that take more take turns."""
SPARED_S = 0.05
"""CPU seconds of a request that goes on though its caller's are spent: others than it spent them."""


class Allowance:
    """CPU time of one caller's grammars together: many requests at once, or one after another, win none."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._bucket = TokenBucket(CALLER_S_PER_MINUTE, clock, capacity=CALLER_S)
        self._lock = threading.Lock()  # the engine's thread spends, the event loop asks

    @property
    def is_spent(self) -> bool:
        with self._lock:
            return self._bucket.level <= 0.0

    @property
    def spent_s(self) -> float:
        """CPU seconds that it has not got back."""
        with self._lock:
            return CALLER_S - self._bucket.level

    def spend(self, seconds: float) -> None:
        """Negative gives back."""
        with self._lock:
            self._bucket.take(seconds)

    def check(self, name: str) -> None:
        """Raise `RateLimitedError` where nothing is left. `name`: the request's field with a grammar."""
        if self.is_spent:
            with self._lock:
                wait = self._bucket.seconds_until(CALLER_S / 2)
            raise RateLimitedError(
                f"{name} is not followed now: this caller's grammars have taken all the time that they may, "
                f"{CALLER_S:g} s, {CALLER_S_PER_MINUTE} s a minute and {1e3 * CALLER_TOKEN_S:g} ms a token; write "
                f"them without ambiguity, and try again in {wait:.0f} s",
                field=name,
                retry_after_s=wait,
            )


class Work:
    """CPU time that the grammar of one request takes of whoever follows it, where all requests wait meanwhile."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.num_tokens = 0
        self.turn_s = SLOW_S
        """CPU seconds of its last turn; of the first it is expected to take all that there is."""
        self.allowance: Allowance | None = None
        """Its caller's; None where there is one caller alone."""
        self._charged_s = 0.0
        self._is_exhausted = False

    @property
    def is_exhausted(self) -> bool:
        """Whether it may take no more; what once was stays so, whatever its caller gets back."""
        if not self._is_exhausted:
            too_much = self.spent_s > FIRST_S + TOKEN_S * self.num_tokens
            allowance = self.allowance
            by_caller = allowance is not None and self._charged_s > SPARED_S and allowance.is_spent
            self._is_exhausted = too_much or by_caller
        return self._is_exhausted

    @property
    def is_slow(self) -> bool:
        """True where it takes more than grammars as they are meant, of a caller whose grammars have taken too long."""
        return self._charged_s > 0.0 and (self.allowance is None or self.allowance.spent_s > SLOW_S)

    @contextmanager
    def counted(self) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            self._charge(time.thread_time() - began)

    def _charge(self, seconds: float) -> None:
        self.spent_s += seconds
        charge = max(self.spent_s - CALLER_TOKEN_S * self.num_tokens, 0.0)
        if self.allowance is not None:
            self.allowance.spend(charge - self._charged_s)
        self._charged_s = charge


class Constraint:
    """A grammar, and how far one answer has come in it. `matcher`: an `llguidance.LLMatcher`."""

    def __init__(self, matcher: Any, name: str, first: bytes, work: Work | None = None) -> None:
        self._matcher = matcher
        self.name = name
        """The request's field that it comes from."""
        self._first = first
        """Tokens that may begin an answer, as `allowed` returns them."""
        self.work = Work() if work is None else work
        """Time that following it has taken, shared by all answers of its request."""
        self._consumed: list[int] = []

    def fresh(self, name: str) -> Constraint:
        """The same grammar for another request, under the name that it has there."""
        assert not self._consumed, "a constraint in use is no template"
        return Constraint(self._matcher.deep_copy(), name, self._first)

    def sibling(self) -> Constraint:
        """The same grammar for another answer of the same request."""
        assert not self._consumed, "a constraint in use is no template"
        return Constraint(self._matcher.deep_copy(), self.name, self._first, self.work)

    def charge(self, allowance: Allowance) -> None:
        """Count its work as that of a caller, too."""
        self.work.allowance = allowance

    @property
    def failure(self) -> str | None:
        """Message where nothing can follow: the grammar takes more work than is allowed, in a step or in all."""
        if self._matcher.is_error():
            return f"{self.name} is too complex to be followed further: {self._matcher.get_error().splitlines()[0]}"
        if self.work.is_exhausted:
            return (
                f"{self.name} is too complex to be followed further: it has taken {self.work.spent_s:.1f} s for "
                f"{self.work.num_tokens} tokens, where {FIRST_S:g} s with {TOKEN_S:g} s a token are accepted, and of "
                f"all of a caller {CALLER_S:g} s with {CALLER_TOKEN_S:g} s a token; write it without ambiguity, with "
                "fewer choices at a time"
            )
        return None

    def allowed(self, answer: Sequence[int]) -> bytes:
        """The tokens that may follow `answer`, one bit each, the lowest first. Where the grammar is at its end, or has
        failed, these are the ends of sequence alone."""
        if not answer:
            return self._first
        with self.work.counted():
            self._go_to(answer)
            # What is exhausted gives no token, so any mask will do.
            return self._first if self.work.is_exhausted else self._matcher.compute_bitmask()

    def num_allowed(self, answer: Sequence[int], drafted: Sequence[int]) -> int:
        """Return how many of `drafted`, the first ones, may follow `answer` one after another."""
        with self.work.counted():
            self._go_to(answer)
            return 0 if self.work.is_exhausted else self._matcher.validate_tokens(list(drafted))

    def forced(self, answer: Sequence[int]) -> tuple[int, ...]:
        """Tokens of the text that must follow `answer`: the keys of an object, say. Other tokens may spell it too."""
        with self.work.counted():
            self._go_to(answer)
            return () if self.work.is_exhausted else tuple(self._matcher.compute_ff_tokens())

    def is_complete(self, answer: Sequence[int]) -> bool:
        """Whether nothing but the end of sequence may follow `answer`."""
        with self.work.counted():
            self._go_to(answer)
        return self._matcher.is_stopped() and self.failure is None

    def _go_to(self, answer: Sequence[int]) -> None:
        if self._matcher.is_error() or self.work.is_exhausted:
            return
        answer, known = list(answer), self._consumed
        agreed = len(known)
        if answer[:agreed] != known:
            agreed = _num_agreed(known, answer)
            self._matcher.rollback(len(known) - agreed)
        following = answer[agreed:]
        num_consumed = self._matcher.try_consume_tokens(following) if following else 0
        self._consumed = answer[: agreed + num_consumed]
        self.work.num_tokens += max(len(self._consumed) - len(known), 0)


def _num_agreed(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
