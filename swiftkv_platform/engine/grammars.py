"""Constraints to compiled grammars, by llguidance, within bounds of size and time. Knows no sequence.

A caller may have written the grammar to hurt. Its text is limited; it is compiled, and its first step taken, in a
thread of its own with a stack that the longest text cannot exhaust; the caller waits for a limited time; and as many
compile at once as there are places. What a step may cost later is bounded by llguidance's fuel.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from swiftkv_platform.engine.constraint import Constraint
from swiftkv_platform.engine.loading import ModelDescription
from swiftkv_platform.errors import QueueFullError
from swiftkv_platform.specs.engine import EngineConfig
from swiftkv_platform.specs.structured_outputs import WHITESPACE, StructuredOutputs

Key = tuple[str, str, bool]

MAX_COMPILING = 2
"""Grammars that are compiled at the same time, abandoned ones included."""
MAX_KEPT = 64
"""Compiled grammars that are kept for the next request with the same."""
INITIAL_LEXER_FUEL = 200_000
"""llguidance's default is five times this, with which `b(a{1000}){1000}` takes one step of seconds; with this, 0.25."""
STACK_BYTES = 256 << 20
"""Address space, not memory. Chains of references take up to 7 KB of stack a link: see `max_grammar_bytes`."""

_stack_lock = threading.Lock()


class GrammarCompiler:
    """Compiles for one model. Any thread may ask."""

    def __init__(self, model: ModelDescription, config: EngineConfig) -> None:
        self._tokenizer = model.tokenizer
        self._vocab_size: int = model.config.get_text_config().vocab_size
        self._eos_token_ids = model.eos_token_ids
        self._max_bytes = config.max_grammar_bytes
        self._timeout_s = config.grammar_timeout_s
        self._places = threading.Semaphore(MAX_COMPILING)
        self._kept: OrderedDict[Key, Constraint] = OrderedDict()
        self._kept_lock = threading.Lock()
        self._vocabulary: Any = None
        self._vocabulary_lock = threading.Lock()

    def find(self, wanted: StructuredOutputs) -> Constraint | None:
        """A constraint for one answer, if it was compiled before and is kept. Takes no time."""
        with self._kept_lock:
            template = self._kept.get(_key(wanted))
            if template is None:
                return None
            self._kept.move_to_end(_key(wanted))
            return template.fresh(wanted.name)

    def compile(self, wanted: StructuredOutputs) -> Constraint:
        """A constraint for one answer. Blocks.

        Raises:
            InvalidInputError: a grammar that is too long, cannot be understood, asks for what is not supported, takes
                too long; a model without what constraints need.
            QueueFullError: others' grammars are still being compiled.
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
        """Compile in another thread, and wait for it no longer than is allowed."""
        if not self._places.acquire(timeout=self._timeout_s):
            raise QueueFullError(f"{MAX_COMPILING} grammars are being compiled; try again later")
        outcome: list[Constraint | Exception] = []

        def work() -> None:
            try:
                outcome.append(_compile(wanted, vocabulary))
            except Exception as error:
                outcome.append(error)
            finally:
                self._places.release()

        try:
            thread = _started(work)
        except BaseException:
            self._places.release()
            raise
        thread.join(self._timeout_s)
        if not outcome:
            raise wanted.refusal(f"took longer to compile than grammar_timeout_s, {self._timeout_s:g} s; simplify it")
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def _llguidance_tokenizer(self, wanted: StructuredOutputs) -> Any:
        """Made once; with a large vocabulary that takes a second, which is not the grammar's."""
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
            raise wanted.refusal("needs llguidance: pip install 'swiftkv-platform[serve]'") from error
        try:
            return from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=sorted(self._eos_token_ids))
        except ValueError as error:
            raise wanted.refusal(f"cannot be served with this model's tokenizer: {error}") from error


def _key(wanted: StructuredOutputs) -> Key:
    return wanted.kind, wanted.text, wanted.disable_any_whitespace


def _compile(wanted: StructuredOutputs, vocabulary: Any) -> Constraint:
    """Raises `InvalidInputError`."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(initial_lexer_fuel=INITIAL_LEXER_FUEL, verbose_errors=False)
    try:
        matcher = LLMatcher(vocabulary, _grammar(wanted), log_level=0, limits=limits)
    except ValueError as error:
        raise wanted.refusal(f"cannot be compiled: {error}") from error
    if not matcher.is_error():
        matcher.compute_bitmask()  # the first step is often the dearest, and tells whether there is any text
    if matcher.is_error():
        raise wanted.refusal(f"cannot be compiled: {matcher.get_error().removesuffix('<non-verbose/>').strip()}")
    if matcher.is_stopped():
        raise wanted.refusal("leaves no text to generate")
    return Constraint(matcher, wanted.name)


def _grammar(wanted: StructuredOutputs) -> str:
    """Return the grammar in llguidance's terms. Raises `ValueError`."""
    from llguidance import LLMatcher

    if wanted.kind in ("json", "json_object"):
        return LLMatcher.grammar_from_json_schema(
            wanted.text,
            overrides={"whitespace_flexible": False}
            if wanted.disable_any_whitespace
            else {"whitespace_pattern": WHITESPACE},
        )
    if wanted.kind == "regex":
        return LLMatcher.grammar_from_regex(wanted.text)
    if wanted.kind == "choice":
        return LLMatcher.grammar_from_lark(
            "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in wanted.choice or ())
        )
    return LLMatcher.grammar_from_lark(wanted.text)


def _started(work: Callable[[], None]) -> threading.Thread:
    """A daemon thread with `STACK_BYTES` of stack, which is a setting of the process at the time of its start."""
    thread = threading.Thread(target=work, name="grammar", daemon=True)
    with _stack_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread
