"""Constraints of answers: their compilation to grammars by llguidance, and the tokens that may come next, both within
limits of size and time.

The state of a constraint depends only on the answer's tokens: for any continuation, the matcher rolls back to the
tokens that agree with it and goes on from there. So drafts can be tried and dropped, and preempted sequences resumed,
without any calls.

A grammar may be malicious. Its text is limited. It is tried in a process that is killed if it takes too long or too
much memory (`grammar_trial.py`). Then it is compiled, and its first step taken, in a thread with a stack that the
longest text cannot exhaust; the caller waits for a limited time, and at most `MAX_COMPILING` compile at once. The cost
of later steps is limited by llguidance's limits on lexer and parser, and that of all steps of a request by `Work`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from swiftkv_platform.engine.grammar_trial import Trial, TrialError, matcher, started
from swiftkv_platform.errors import InvalidInputError, QueueFullError, RateLimitedError
from swiftkv_platform.limits import GRAMMAR_SECONDS_PER_MINUTE
from swiftkv_platform.specs.engine import EngineConfig
from swiftkv_platform.specs.structured_outputs import WHITESPACE, StructuredOutputs
from swiftkv_platform.web.limiters import Clock, TokenBucket

if TYPE_CHECKING:
    from swiftkv_platform.engine.loading import ModelDescription

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
            self._bucket.consume(seconds)

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
        self._first = first
        """Tokens that may begin an answer, in the format of `allowed`."""
        self.work = Work() if work is None else work
        """CPU time of following the grammar, shared by all answers of the request."""
        self._consumed: list[int] = []

    def copy(self, name: str, work: Work | None = None) -> Constraint:
        """Return an unused constraint with the same grammar, for the field `name`. `work`: that of other answers of the
        same request; None: it is for another request."""
        assert not self._consumed, "a constraint in use is no template"
        return Constraint(self._matcher.deep_copy(), name, self._first, work)

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


Key = tuple[str, str, bool]

MAX_COMPILING = 2
_places = threading.Semaphore(MAX_COMPILING)
_trials = [Trial() for _ in range(MAX_COMPILING)]
"""Idle trials, one for each place. Their processes start when they are needed, and end with this one."""
MAX_KEPT = 64
"""Number of compiled grammars that are cached for later requests with the same grammar."""


class GrammarCompiler:
    """Compiler of grammars for one model, for use from any thread."""

    def __init__(self, model: ModelDescription, config: EngineConfig) -> None:
        self._tokenizer = model.tokenizer
        self._vocab_size: int = model.config.get_text_config().vocab_size
        self._eos_token_ids = model.eos_token_ids
        self._max_bytes = config.max_grammar_bytes
        self._timeout_s = config.grammar_timeout_s
        self._kept: OrderedDict[Key, Constraint] = OrderedDict()
        self._kept_lock = threading.Lock()
        self._vocabulary: Any = None
        self._vocabulary_lock = threading.Lock()

    def find(self, wanted: StructuredOutputs) -> Constraint | None:
        """Return a constraint for an answer if its grammar is cached, else None. Returns at once."""
        with self._kept_lock:
            template = self._kept.get(_key(wanted))
            if template is None:
                return None
            self._kept.move_to_end(_key(wanted))
            return template.copy(wanted.name)

    def compile(self, wanted: StructuredOutputs) -> Constraint:
        """Compile a constraint for an answer. Blocks.

        Raises:
            InvalidInputError: the grammar is too long, invalid, not supported or too slow to compile; the model lacks a
                tokenizer or an end-of-sequence token.
            QueueFullError: other grammars are still being compiled.
        """
        found = self.find(wanted)
        if found is not None:
            return found
        size = len(wanted.text.encode())
        if size > self._max_bytes:
            raise wanted.make_error(f"has {size} bytes; max_grammar_bytes is {self._max_bytes}")
        vocabulary = self.vocabulary(wanted)
        template = self._compile_aside(wanted, vocabulary)
        with self._kept_lock:
            self._kept[_key(wanted)] = template
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return template.copy(wanted.name)

    def _compile_aside(self, wanted: StructuredOutputs, vocabulary: Any) -> Constraint:
        """Compile in another thread, after a trial in a process, and wait for at most `grammar_timeout_s`."""
        if not _places.acquire(timeout=self._timeout_s):
            raise QueueFullError(f"{MAX_COMPILING} grammars are being compiled; try again later")
        outcome: list[Constraint | Exception] = []

        def work() -> None:
            try:
                outcome.append(_compile(wanted, vocabulary))
            except Exception as error:
                outcome.append(error)
            finally:
                _places.release()

        try:
            self._try(wanted)
            thread = started(work)
        except BaseException:
            _places.release()
            raise
        thread.join(self._timeout_s)
        if not outcome:
            raise self._too_slow(wanted)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def _try(self, wanted: StructuredOutputs) -> None:
        """Raise `InvalidInputError` if the grammar cannot be compiled, or takes too long."""
        trial = _trials.pop()
        try:
            trial.check(wanted.kind, wanted.text, _whitespace(wanted), self._timeout_s)
        except TimeoutError as error:
            raise self._too_slow(wanted) from error
        except TrialError as error:
            raise wanted.make_error(f"cannot be compiled: {error}") from error
        finally:
            _trials.append(trial)

    def _too_slow(self, wanted: StructuredOutputs) -> InvalidInputError:
        return wanted.make_error(f"took longer to compile than grammar_timeout_s, {self._timeout_s:g} s; simplify it")

    def vocabulary(self, wanted: StructuredOutputs) -> Any:
        """Return llguidance's tokenizer, made once: with a large vocabulary that takes a second. Raises
        `InvalidInputError`: the model lacks a tokenizer or an end-of-sequence token."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._new_vocabulary(wanted)
            return self._vocabulary

    def _new_vocabulary(self, wanted: StructuredOutputs) -> Any:
        if self._tokenizer is None:
            raise wanted.make_error("needs a tokenizer, which this model's directory lacks")
        if not self._eos_token_ids:
            raise wanted.make_error("needs an end-of-sequence token, which this model's configuration does not name")
        try:
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError as error:
            raise wanted.make_error("needs llguidance, of the extra `serve`, where the model is served") from error
        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._eos_token_ids))
        except ValueError as error:
            raise wanted.make_error(f"cannot be served with this model's tokenizer: {error}") from error


def _key(wanted: StructuredOutputs) -> Key:
    return wanted.kind, wanted.text, wanted.disable_any_whitespace


def _whitespace(wanted: StructuredOutputs) -> str | None:
    return None if wanted.disable_any_whitespace else WHITESPACE


def _compile(wanted: StructuredOutputs, vocabulary: Any) -> Constraint:
    try:
        made, first = matcher(vocabulary, wanted.kind, wanted.text, _whitespace(wanted))
    except ValueError as error:
        raise wanted.make_error(f"cannot be compiled: {error}") from error
    if made.is_stopped():
        raise wanted.make_error("leaves no text to generate")
    return Constraint(made, wanted.name, first)
