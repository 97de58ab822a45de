"""Compilation of grammars by llguidance, and a process that tries it first. As a script it imports nothing of ours.

Some grammars make llguidance's compiler run for minutes and take gigabytes, which none of its limits prevents: for
example hundreds of expressions that must hold together. A thread that does so cannot be stopped, but a process can. So
each grammar is first compiled in a process, over the vocabulary of bytes, before it is compiled for use.
"""

from __future__ import annotations

import json
import re
import resource
import select
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

INITIAL_LEXER_FUEL = 200_000
"""A fifth of llguidance's default, with which one step of `b(a{1000}){1000}` takes seconds; with this, 0.25."""
STEP_MAX_ITEMS = 20_000
"""Parser items of a mask; llguidance's default is 50,000. An ambiguous grammar may use all in each step: 0.2 s."""
MAX_LEXER_STATES = 30_000
"""Lexer states of each answer, of 1 to 2 KB each; llguidance's default is 250,000."""
THREAD_STACK_BYTES = 256 << 20
"""Stack of a compiling thread; address space, not memory. A chain of references takes up to 7 KB per link: see
`max_grammar_bytes`."""
_MAX_MEMORY_BYTES = 2 << 30
_START_TIMEOUT_S = 60.0
_REGEX_SPECIAL_CHARACTERS = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")

_stack_lock = threading.Lock()


def make_matcher(vocabulary: Any, kind: str, text: str, whitespace: str | None) -> tuple[Any, bytes]:
    """Compile a grammar within this project's limits; returns its matcher and first mask. `whitespace`: pattern between
    the tokens of JSON; None allows none. Raises `ValueError`: it cannot be compiled."""
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(
        initial_lexer_fuel=INITIAL_LEXER_FUEL,
        step_max_items=STEP_MAX_ITEMS,
        max_lexer_states=MAX_LEXER_STATES,
        verbose_errors=False,
    )
    made = LLMatcher(vocabulary, _convert_grammar(kind, text, whitespace), log_level=0, limits=limits)
    # The first step is often the most expensive, and shows whether the grammar matches any text.
    first = b"" if made.is_error() else made.compute_bitmask()
    if made.is_error():
        raise ValueError(made.get_error().removesuffix("<non-verbose/>").strip())
    return made, first


def _convert_grammar(kind: str, text: str, whitespace: str | None) -> str:
    """Return the grammar in llguidance's terms. Raises `ValueError`."""
    from llguidance import LLMatcher

    if kind in ("json", "json_object"):
        if whitespace is None:
            return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": whitespace})
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        # One regular expression: thousands of separate rules would exceed the parser's limit per step.
        return LLMatcher.grammar_from_regex(
            "|".join(_REGEX_SPECIAL_CHARACTERS.sub(r"\\\g<0>", one) for one in json.loads(text))
        )
    return LLMatcher.grammar_from_lark(text)


def start_thread(work: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread with `THREAD_STACK_BYTES` of stack, a setting of the process that is read when a thread
    starts."""
    thread = threading.Thread(target=work, name="grammar", daemon=True)
    with _stack_lock:
        before = threading.stack_size(THREAD_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


class TrialCompilerError(Exception):
    """A grammar was refused, for the reason in the message."""


class TrialCompiler:
    """A process that tries to compile grammars. Only one thread at a time may use it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def check_grammar(self, kind: str, text: str, whitespace: str | None, timeout_s: float) -> None:
        """Raise `TrialCompilerError` if the grammar cannot be compiled, or `TimeoutError` if it takes more than
        `timeout_s`."""
        process = self._process or self._start_process()
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps([kind, text, whitespace]) + "\n")
            process.stdin.flush()
            answer = _read_line(process, timeout_s)
        except (OSError, TimeoutError) as error:
            self.close()
            if isinstance(error, TimeoutError):
                raise
            answer = ""
        if not answer:  # out of memory, or of stack
            self.close()
            raise TrialCompilerError("compiling it takes more memory than is allowed")
        problem = json.loads(answer)
        if problem is not None:
            raise TrialCompilerError(problem)

    def close(self) -> None:
        """End the process, if there is one; the next check starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start_process(self) -> subprocess.Popen[str]:
        # -P: do not import modules from its own directory, whose names may hide others.
        command = [sys.executable, "-P", str(Path(__file__))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._process = process
        if not _read_line(process, _START_TIMEOUT_S):
            self.close()
            raise TrialCompilerError("the process that compiles it first could not be started; its log says more")
        return process


def _read_line(process: subprocess.Popen[str], timeout_s: float) -> str:
    """Read the next line from the process; empty if it has ended. Raises `TimeoutError`."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], timeout_s)[0]:
        raise TimeoutError
    return process.stdout.readline()


def main() -> None:
    """Answer each line of standard input, a grammar, with null or its error as JSON."""
    from llguidance import LLTokenizer

    with suppress(ValueError, OSError):  # macOS cannot limit address space; there only the time is limited
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    byte_vocabulary = LLTokenizer("byte")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        problems: list[str | None] = []

        def work(request: str = line, found: list[str | None] = problems) -> None:
            try:
                make_matcher(byte_vocabulary, *json.loads(request))
            except ValueError as error:
                found.append(str(error) or "it cannot be parsed")
            else:
                found.append(None)

        start_thread(work).join()
        if not problems:
            break
        sys.stdout.write(json.dumps(problems[0]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
