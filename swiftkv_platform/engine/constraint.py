"""The tokens that may come next in a constrained answer, and limits on the CPU time of grammars.

The state depends only on the answer's tokens: for any continuation, the matcher rolls back to the tokens that agree
with it and goes on from there. So drafts can be tried and dropped, and preempted sequences resumed, without any calls.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from swiftkv_platform.errors import RateLimitedError
from swiftkv_platform.limits import GRAMMAR_SECONDS_PER_MINUTE
from swiftkv_platform.web.places import Clock, TokenBucket

FIRST_S = 0.1
"""CPU seconds that a request's grammar may take, for all its answers together, in addition to `TOKEN_S` a token."""
TOKEN_S = 0.002
"""CPU seconds that each token adds; ordinary grammars take a tenth of it."""
CALLER_S = 1.0
"""CPU seconds that a caller's grammars may take at once, beyond `CALLER_TOKEN_S` a token: enough for 64 schemas
of some 10 ms at their first token."""
CALLER_S_PER_MINUTE = GRAMMAR_SECONDS_PER_MINUTE.default
"""CPU seconds that a caller gets back per minute, which limits its long-term share of the engine's time to a tenth."""
CALLER_TOKEN_S = 0.0005
"""CPU seconds of each token that are not charged to the caller."""
SLOW_S = 0.02
"""CPU seconds charged to a caller after which its slow grammars take turns."""
SPARED_S = 0.05
"""CPU seconds charged for a request up to which it goes on even if its caller's allowance is spent."""


class Allowance:
    """CPU time allowed to all grammars of a caller together: splitting work into many requests gains nothing."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._bucket = TokenBucket(CALLER_S_PER_MINUTE, clock, capacity=CALLER_S)
        self._lock = threading.Lock()  # the engine's thread spends, the event loop reads

    @property
    def is_spent(self) -> bool:
        with self._lock:
            return self._bucket.level <= 0.0

    @property
    def spent_s(self) -> float:
        """CPU seconds spent and not yet returned."""
        with self._lock:
            return CALLER_S - self._bucket.level

    def spend(self, seconds: float) -> None:
        """Spend CPU seconds; a negative number returns them."""
        with self._lock:
            self._bucket.take(seconds)

    def check(self, name: str) -> None:
        """Raise `RateLimitedError` if nothing is left. `name`: the request's field with a grammar."""
        if self.is_spent:
            with self._lock:
                wait = self._bucket.seconds_until(CALLER_S / 2)
            raise RateLimitedError(
                f"{name} cannot be enforced now: this caller's grammars have used up their time, {CALLER_S:g} s, "
                f"{CALLER_S_PER_MINUTE} s a minute and {1e3 * CALLER_TOKEN_S:g} ms a token; write them without "
                f"ambiguity, and try again in {wait:.0f} s",
                field=name,
                retry_after_s=wait,
            )


class Work:
    """CPU time that following the grammar of a request takes, during which all requests wait."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.num_tokens = 0
        self.turn_s = SLOW_S
        """CPU seconds of its last turn; before the first one, the most that a turn may take."""
        self.allowance: Allowance | None = None
        """Allowance of its caller; None if there is only one caller."""
        self._charged_s = 0.0
        self._is_exhausted = False

    @property
    def is_exhausted(self) -> bool:
        """Whether it may take no more time. Once true it stays true, even if its caller gets time back."""
        if not self._is_exhausted:
            too_much = self.spent_s > FIRST_S + TOKEN_S * self.num_tokens
            allowance = self.allowance
            by_caller = allowance is not None and self._charged_s > SPARED_S and allowance.is_spent
            self._is_exhausted = too_much or by_caller
        return self._is_exhausted

    @property
    def is_slow(self) -> bool:
        """Whether it takes more time than ordinary grammars, and its caller's grammars together more than `SLOW_S`."""
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
    """A grammar and the position of an answer in it. `matcher`: an `llguidance.LLMatcher`."""

    def __init__(self, matcher: Any, name: str, first: bytes, work: Work | None = None) -> None:
        self._matcher = matcher
        self.name = name
        """Field of the request that contains the grammar."""
        self._first = first
        """Tokens that may begin an answer, in the format of `allowed`."""
        self.work = Work() if work is None else work
        """CPU time of following the grammar, shared by all answers of the request."""
        self._consumed: list[int] = []

    def fresh(self, name: str) -> Constraint:
        """Return a constraint with the same grammar for another request, whose field is `name`."""
        assert not self._consumed, "a constraint in use is no template"
        return Constraint(self._matcher.deep_copy(), name, self._first)

    def sibling(self) -> Constraint:
        """Return a constraint with the same grammar for another answer of the same request."""
        assert not self._consumed, "a constraint in use is no template"
        return Constraint(self._matcher.deep_copy(), self.name, self._first, self.work)

    def charge(self, allowance: Allowance) -> None:
        """Charge its work to a caller's allowance too."""
        self.work.allowance = allowance

    @property
    def failure(self) -> str | None:
        """Error message if the grammar took more work than allowed, in a step or in total; else None."""
        if self._matcher.is_error():
            return f"{self.name} is too complex to be enforced further: {self._matcher.get_error().splitlines()[0]}"
        if self.work.is_exhausted:
            return (
                f"{self.name} is too complex to be enforced further: it has taken {self.work.spent_s:.1f} s for "
                f"{self.work.num_tokens} tokens, where {FIRST_S:g} s and {TOKEN_S:g} s a token are accepted, and for "
                f"all grammars of a caller {CALLER_S:g} s and {CALLER_TOKEN_S:g} s a token; write it without "
                "ambiguity, with fewer choices at a time"
            )
        return None

    def allowed(self, answer: Sequence[int]) -> bytes:
        """Return the tokens that may follow `answer`, as a bit mask, lowest bit first. If the grammar is complete or
        has failed, only end-of-sequence tokens are allowed."""
        if not answer:
            return self._first
        with self.work.counted():
            self._go_to(answer)
            # An exhausted constraint yields no token, so any mask is fine.
            return self._first if self.work.is_exhausted else self._matcher.compute_bitmask()

    def num_allowed(self, answer: Sequence[int], drafted: Sequence[int]) -> int:
        """Return how many of the first tokens of `drafted` may follow `answer` one after another."""
        with self.work.counted():
            self._go_to(answer)
            return 0 if self.work.is_exhausted else self._matcher.validate_tokens(list(drafted))

    def forced(self, answer: Sequence[int]) -> tuple[int, ...]:
        """Return tokens of the text that must follow `answer`, such as an object's keys; others may spell it too."""
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
