"""Compilation of constraints to grammars, by llguidance, within limits of size and time.

A grammar may be malicious. Its text is limited. It is tried in a process that is killed if it takes too long or too
much memory (`grammar_trial.py`). Then it is compiled, and its first step taken, in a thread with a stack that the
longest text cannot exhaust; the caller waits for a limited time, and at most `MAX_COMPILING` compile at once. The cost
of later steps is limited by llguidance's limits on lexer and parser, and that of all steps of a request by
`constraint.Work`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from swiftkv_platform.engine.constraint import Constraint
from swiftkv_platform.engine.grammar_trial import Trial, TrialError, matcher, started
from swiftkv_platform.engine.loading import ModelDescription
from swiftkv_platform.errors import InvalidInputError, QueueFullError
from swiftkv_platform.specs.engine import EngineConfig
from swiftkv_platform.specs.structured_outputs import WHITESPACE, StructuredOutputs

Key = tuple[str, str, bool]

MAX_COMPILING = 2
"""Maximum number of grammars that are compiled at the same time."""
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
            return template.fresh(wanted.name)

    def prepare(self, wanted: StructuredOutputs) -> None:
        """Make what all grammars need. Blocks, the first time for up to a second. Raises `InvalidInputError`: the model
        lacks a tokenizer or an end-of-sequence token."""
        self._llguidance_tokenizer(wanted)

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
            raise wanted.refusal(f"has {size} bytes; max_grammar_bytes is {self._max_bytes}")
        vocabulary = self._llguidance_tokenizer(wanted)
        template = self._compile_aside(wanted, vocabulary)
        with self._kept_lock:
            self._kept[_key(wanted)] = template
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return template.fresh(wanted.name)

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
            raise wanted.refusal(f"cannot be compiled: {error}") from error
        finally:
            _trials.append(trial)

    def _too_slow(self, wanted: StructuredOutputs) -> InvalidInputError:
        return wanted.refusal(f"took longer to compile than grammar_timeout_s, {self._timeout_s:g} s; simplify it")

    def _llguidance_tokenizer(self, wanted: StructuredOutputs) -> Any:
        """Return llguidance's tokenizer, made once: with a large vocabulary that takes a second."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = self._new_vocabulary(wanted)
            return self._vocabulary

    def _new_vocabulary(self, wanted: StructuredOutputs) -> Any:
        if self._tokenizer is None:
            raise wanted.refusal("needs a tokenizer, which this model's directory lacks")
        if not self._eos_token_ids:
            raise wanted.refusal("needs an end-of-sequence token, which this model's configuration does not name")
        try:
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError as error:
            raise wanted.refusal("needs llguidance, of the extra `serve`, where the model is served") from error
        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._eos_token_ids))
        except ValueError as error:
            raise wanted.refusal(f"cannot be served with this model's tokenizer: {error}") from error


def _key(wanted: StructuredOutputs) -> Key:
    return wanted.kind, wanted.text, wanted.disable_any_whitespace


def _whitespace(wanted: StructuredOutputs) -> str | None:
    return None if wanted.disable_any_whitespace else WHITESPACE


def _compile(wanted: StructuredOutputs, vocabulary: Any) -> Constraint:
    """Compile a grammar. Raises `InvalidInputError`."""
    try:
        made, first = matcher(vocabulary, wanted.kind, wanted.text, _whitespace(wanted))
    except ValueError as error:
        raise wanted.refusal(f"cannot be compiled: {error}") from error
    if made.is_stopped():
        raise wanted.refusal("leaves no text to generate")
    return Constraint(made, wanted.name, first)
