"""Structured outputs: compilation of grammars by llguidance, and the tokens that a grammar allows next. Both have
limits of size and time.

The state of a constraint depends only on the generated tokens: for any continuation, the matcher rolls back to the
common prefix and continues from there. So drafts can be tried and dropped, and preempted sequences resumed, without
further calls.

A grammar may be malicious. These limits protect the engine:
1. its text has at most `max_grammar_bytes`
2. a trial process compiles it first, and is killed if that takes too long or too much memory (`grammar_trial.py`)
3. then a thread with a large stack compiles it, and the caller waits at most `grammar_timeout_s`; at most
   `MAX_CONCURRENT_COMPILATIONS` grammars are compiled at once
4. llguidance's limits on lexer and parser bound each step, and `GrammarCpuTime` bounds all steps of a request
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from swiftkv_platform.engine.grammar_trial import GrammarCheckProcess, TrialCompilerError, make_matcher, start_thread
from swiftkv_platform.errors import InvalidInputError, QueueFullError, RateLimitedError
from swiftkv_platform.limits import GRAMMAR_SECONDS_PER_MINUTE
from swiftkv_platform.specs.engine import EngineConfig
from swiftkv_platform.specs.structured_outputs import WHITESPACE, StructuredOutputs
from swiftkv_platform.web.limiters import TokenBucket

if TYPE_CHECKING:
    from swiftkv_platform.engine.loading import ModelDescription

BASE_S_PER_REQUEST = 0.1
"""CPU seconds that a request's grammar may take for all its samples, plus `MAX_S_PER_TOKEN` per token."""
MAX_S_PER_TOKEN = 0.002
"""CPU seconds that each token adds to the limit; ordinary grammars take a tenth of it."""
CALLER_BURST_S = 1.0
"""CPU seconds that a caller's grammars may take in a burst, beyond `FREE_S_PER_TOKEN`: enough for the first tokens of
64 schemas, about 10 ms each."""
CALLER_S_PER_MINUTE = GRAMMAR_SECONDS_PER_MINUTE.default
"""CPU seconds that a caller's budget regains per minute, which limits its long-term share of the engine's time to
10%."""
FREE_S_PER_TOKEN = 0.0005
"""CPU seconds per token that are not charged to the caller."""
SLOW_CALLER_S = 0.02
"""CPU seconds charged to a caller above which its slow grammars are throttled."""
GRACE_S_PER_REQUEST = 0.05
"""CPU seconds charged for a request up to which it continues although its caller's budget is exhausted."""


class GrammarBudget:
    """CPU time of all grammars of a caller, so that many small requests get no more than a large one."""

    def __init__(self) -> None:
        self._bucket = TokenBucket(CALLER_S_PER_MINUTE, time.monotonic, capacity=CALLER_BURST_S)
        self._lock = threading.Lock()  # the engine's thread spends, the event loop reads

    @property
    def is_exhausted(self) -> bool:
        with self._lock:
            return self._bucket.level <= 0.0

    @property
    def spent_s(self) -> float:
        """CPU seconds that were spent and not yet regained."""
        with self._lock:
            return CALLER_BURST_S - self._bucket.level

    def spend_seconds(self, seconds: float) -> None:
        """Spend CPU seconds; a negative number returns them."""
        with self._lock:
            self._bucket.consume(seconds)

    def raise_if_exhausted(self, name: str) -> None:
        """Raise `RateLimitedError` if the budget is exhausted. `name`: the request's field with the grammar."""
        if self.is_exhausted:
            with self._lock:
                wait = self._bucket.seconds_until(CALLER_BURST_S / 2)
            raise RateLimitedError(
                f"{name} cannot be enforced now: this caller's grammars have used up their CPU time of "
                f"{CALLER_BURST_S:g} s plus {CALLER_S_PER_MINUTE} s per minute and {1e3 * FREE_S_PER_TOKEN:g} ms per "
                f"token; write grammars without ambiguity, and try again in {wait:.0f} s",
                field=name,
                retry_after_s=wait,
            )


class GrammarCpuTime:
    """CPU time that a request's grammar takes in the engine's steps, during which all requests wait."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        self.num_tokens = 0
        self.last_step_s = SLOW_CALLER_S
        """CPU seconds of the grammar in the sequence's last step; before the first step, a high estimate."""
        self.budget: GrammarBudget | None = None
        """Budget of the grammar's caller; None if there is only one caller."""
        self._charged_s = 0.0
        self._is_exhausted = False

    @property
    def is_exhausted(self) -> bool:
        """Whether the grammar may take no more time. Stays True even if the caller's budget regains time."""
        if not self._is_exhausted:
            too_much = self.spent_s > BASE_S_PER_REQUEST + MAX_S_PER_TOKEN * self.num_tokens
            budget = self.budget
            by_caller = budget is not None and self._charged_s > GRACE_S_PER_REQUEST and budget.is_exhausted
            self._is_exhausted = too_much or by_caller
        return self._is_exhausted

    @property
    def is_slow(self) -> bool:
        """Whether the grammar takes more time than ordinary ones, and all grammars of its caller take more than
        `SLOW_CALLER_S`."""
        return self._charged_s > 0.0 and (self.budget is None or self.budget.spent_s > SLOW_CALLER_S)

    @contextmanager
    def measure_time(self) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            self._charge_seconds(time.thread_time() - began)

    def _charge_seconds(self, seconds: float) -> None:
        self.spent_s += seconds
        charge = max(self.spent_s - FREE_S_PER_TOKEN * self.num_tokens, 0.0)
        if self.budget is not None:
            self.budget.spend_seconds(charge - self._charged_s)
        self._charged_s = charge


class Constraint:
    """A grammar and the state of a sequence in it. `matcher`: an `llguidance.LLMatcher`."""

    def __init__(self, matcher: Any, name: str, first_mask: bytes, cpu_time: GrammarCpuTime | None = None) -> None:
        self._matcher = matcher
        self.name = name
        self._first_mask = first_mask
        """Mask of the tokens allowed at the beginning, in the format of `compute_allowed_mask`."""
        self.cpu_time = GrammarCpuTime() if cpu_time is None else cpu_time
        """CPU time of the grammar, shared by all samples of the request."""
        self._consumed: list[int] = []
        self.has_rejected_token = False
        """Whether a generated token contradicts the grammar although its mask allowed it: llguidance writes text that a
        grammar requires as the special token of this text, and then does not accept the token."""

    def copy(self, name: str, cpu_time: GrammarCpuTime | None = None) -> Constraint:
        """Return a new constraint with the same grammar, for the field `name`. `cpu_time`: shared with other samples of
        the request; None: for another request."""
        assert not self._consumed, "a constraint in use cannot be copied"
        return Constraint(self._matcher.deep_copy(), name, self._first_mask, cpu_time)

    @property
    def failure(self) -> str | None:
        """Error message if the grammar exceeded a limit, in a step or in total; else None."""
        if self._matcher.is_error():
            return f"{self.name} is too complex to be enforced further: {self._matcher.get_error().splitlines()[0]}"
        if self.has_rejected_token:
            why = "requires text that is a special token of this model, which cannot be enforced; leave it out"
            return f"{self.name} {why}"
        if self.cpu_time.is_exhausted:
            return (
                f"{self.name} is too complex to be enforced further: it has taken {self.cpu_time.spent_s:.1f} s for "
                f"{self.cpu_time.num_tokens} tokens; the limit is {BASE_S_PER_REQUEST:g} s and {MAX_S_PER_TOKEN:g} s "
                f"per token for a request, and {CALLER_BURST_S:g} s and {FREE_S_PER_TOKEN:g} s per token for all "
                "grammars of a caller; write a grammar without ambiguity, with fewer choices per step"
            )
        return None

    def compute_allowed_mask(self, output_token_ids: Sequence[int]) -> bytes:
        """Return the tokens that may follow `output_token_ids`, as a bit mask, lowest bit first. If the grammar is
        complete or has failed, only end-of-sequence tokens are allowed."""
        if not output_token_ids:
            return self._first_mask
        with self.cpu_time.measure_time():
            self._advance_matcher(output_token_ids)
            # The request ends when its CPU time is exhausted, so any mask will do.
            return self._first_mask if self.cpu_time.is_exhausted else self._matcher.compute_bitmask()

    def count_allowed_tokens(self, output_token_ids: Sequence[int], drafted: Sequence[int]) -> int:
        """Return how many tokens of `drafted`, from its start, the grammar allows after `output_token_ids`."""
        with self.cpu_time.measure_time():
            self._advance_matcher(output_token_ids)
            return 0 if self.cpu_time.is_exhausted else self._matcher.validate_tokens(list(drafted))

    def get_forced_tokens(self, output_token_ids: Sequence[int]) -> tuple[int, ...]:
        """Return tokens of the text that must follow `output_token_ids`, e.g. an object's keys. Other tokenizations are
        possible."""
        with self.cpu_time.measure_time():
            self._advance_matcher(output_token_ids)
            return () if self.cpu_time.is_exhausted else tuple(self._matcher.compute_ff_tokens())

    def is_complete(self, output_token_ids: Sequence[int]) -> bool:
        """Whether only the end of sequence may follow `output_token_ids`."""
        with self.cpu_time.measure_time():
            self._advance_matcher(output_token_ids)
        return self._matcher.is_stopped() and self.failure is None

    def _advance_matcher(self, output_token_ids: Sequence[int]) -> None:
        if self._matcher.is_error() or self.cpu_time.is_exhausted:
            return
        output_token_ids, known = list(output_token_ids), self._consumed
        agreed = len(known)
        if output_token_ids[:agreed] != known:
            agreed = _count_common_prefix(known, output_token_ids)
            self._matcher.rollback(len(known) - agreed)
        following = output_token_ids[agreed:]
        num_consumed = self._matcher.try_consume_tokens(following) if following else 0
        self._consumed = output_token_ids[: agreed + num_consumed]
        self.has_rejected_token = num_consumed < len(following) and not self._matcher.is_stopped()
        self.cpu_time.num_tokens += max(len(self._consumed) - len(known), 0)


def _count_common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


GrammarKey = tuple[str, str, bool]
"""Key of a cached grammar: its kind, its text, and whether white space is forbidden."""

MAX_CONCURRENT_COMPILATIONS = 2
_compile_slots = threading.Semaphore(MAX_CONCURRENT_COMPILATIONS)
_idle_trial_compilers = [GrammarCheckProcess() for _ in range(MAX_CONCURRENT_COMPILATIONS)]
"""Idle trial compilers, one per slot. Their processes start on demand and end with this process."""
MAX_CACHED_GRAMMARS = 64
"""Max number of compiled grammars that are cached for later requests."""


class GrammarCompiler:
    """Compiler of grammars for one model, for use from any thread."""

    def __init__(self, model: ModelDescription, config: EngineConfig) -> None:
        self._tokenizer = model.tokenizer
        self._vocab_size: int = model.config.get_text_config().vocab_size
        self._eos_token_ids = model.eos_token_ids
        self._max_bytes = config.max_grammar_bytes
        self._timeout_s = config.grammar_timeout_s
        self._cache: OrderedDict[GrammarKey, Constraint] = OrderedDict()
        self._cache_lock = threading.Lock()
        self._vocabulary: Any = None
        self._vocabulary_lock = threading.Lock()

    def find_cached(self, structured_outputs: StructuredOutputs) -> Constraint | None:
        """Return a new constraint if its grammar is cached, else None. Does not block."""
        with self._cache_lock:
            template = self._cache.get(_make_key(structured_outputs))
            if template is None:
                return None
            self._cache.move_to_end(_make_key(structured_outputs))
            return template.copy(structured_outputs.name)

    def compile(self, structured_outputs: StructuredOutputs) -> Constraint:
        """Compile the grammar, and return a new constraint. Blocks.

        Raises:
            InvalidInputError: the grammar is too long, invalid, not supported or too slow to compile; the model lacks a
                tokenizer or an end-of-sequence token.
            QueueFullError: no slot became free within `grammar_timeout_s`.
        """
        found = self.find_cached(structured_outputs)
        if found is not None:
            return found
        size = len(structured_outputs.text.encode())
        if size > self._max_bytes:
            raise structured_outputs.make_error(f"has {size} bytes; max_grammar_bytes is {self._max_bytes}")
        vocabulary = self.get_vocabulary(structured_outputs)
        template = self._compile_in_thread(structured_outputs, vocabulary)
        with self._cache_lock:
            self._cache[_make_key(structured_outputs)] = template
            if len(self._cache) > MAX_CACHED_GRAMMARS:
                self._cache.popitem(last=False)
            return template.copy(structured_outputs.name)

    def _compile_in_thread(self, structured_outputs: StructuredOutputs, vocabulary: Any) -> Constraint:
        """Compile the grammar in a trial process, then in a thread. Wait at most `grammar_timeout_s` for each."""
        if not _compile_slots.acquire(timeout=self._timeout_s):
            raise QueueFullError(f"{MAX_CONCURRENT_COMPILATIONS} grammars are being compiled; try again later")
        outcome: list[Constraint | Exception] = []

        def compile_grammar() -> None:
            try:
                outcome.append(_compile_grammar(structured_outputs, vocabulary))
            except Exception as error:
                outcome.append(error)
            finally:
                _compile_slots.release()

        try:
            self._check_in_trial_process(structured_outputs)
            thread = start_thread(compile_grammar)
        except BaseException:
            _compile_slots.release()
            raise
        thread.join(self._timeout_s)
        if not outcome:
            raise self._make_timeout_error(structured_outputs)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def _check_in_trial_process(self, structured_outputs: StructuredOutputs) -> None:
        """Raise `InvalidInputError` if the grammar cannot be compiled, or takes too long."""
        trial = _idle_trial_compilers.pop()
        try:
            trial.check_grammar(
                structured_outputs.kind,
                structured_outputs.text,
                _get_whitespace_pattern(structured_outputs),
                self._timeout_s,
            )
        except TimeoutError as error:
            raise self._make_timeout_error(structured_outputs) from error
        except TrialCompilerError as error:
            raise structured_outputs.make_error(f"cannot be compiled: {error}") from error
        finally:
            _idle_trial_compilers.append(trial)

    def _make_timeout_error(self, structured_outputs: StructuredOutputs) -> InvalidInputError:
        return structured_outputs.make_error(
            f"took longer to compile than grammar_timeout_s, {self._timeout_s:g} s; simplify it"
        )

    def get_vocabulary(self, structured_outputs: StructuredOutputs) -> Any:
        """Return llguidance's tokenizer. It is made once, since that takes a second with a large vocabulary. Raises
        `InvalidInputError`: the model lacks a tokenizer or an end-of-sequence token."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary(structured_outputs)
            return self._vocabulary

    def _make_vocabulary(self, structured_outputs: StructuredOutputs) -> Any:
        if self._tokenizer is None:
            raise structured_outputs.make_error("needs a tokenizer, which this model's directory lacks")
        if not self._eos_token_ids:
            raise structured_outputs.make_error(
                "needs an end-of-sequence token, which this model's configuration does not name"
            )
        try:
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError as error:
            raise structured_outputs.make_error(
                "needs llguidance; install the extra `serve` where the model is served"
            ) from error
        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._eos_token_ids))
        except ValueError as error:
            raise structured_outputs.make_error(f"cannot be served with this model's tokenizer: {error}") from error


def _make_key(structured_outputs: StructuredOutputs) -> GrammarKey:
    return structured_outputs.kind, structured_outputs.text, structured_outputs.disable_any_whitespace


def _get_whitespace_pattern(structured_outputs: StructuredOutputs) -> str | None:
    return None if structured_outputs.disable_any_whitespace else WHITESPACE


def _compile_grammar(structured_outputs: StructuredOutputs, vocabulary: Any) -> Constraint:
    try:
        made, first = make_matcher(
            vocabulary, structured_outputs.kind, structured_outputs.text, _get_whitespace_pattern(structured_outputs)
        )
    except ValueError as error:
        raise structured_outputs.make_error(f"cannot be compiled: {error}") from error
    if made.is_stopped():
        raise structured_outputs.make_error("leaves no text to generate")
    return Constraint(made, structured_outputs.name, first)
