"""Compilation of grammars by llguidance, and a trial process for it. Imports no other module of this project.

llguidance's compiler may run for minutes and take gigabytes (for example for the intersection of hundreds of
expressions), and none of its limits prevents that. A thread cannot be killed, but a process can. So each grammar is
first compiled in a trial process, with a vocabulary of bytes, and then for the model in this process.
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
"""A fifth of llguidance's default. One step of `b(a{1000}){1000}` takes 0.25 s, and seconds with the default."""
STEP_MAX_ITEMS = 20_000
"""Max parser items per mask; llguidance's default is 50,000. An ambiguous grammar may use all of them: 0.2 s per
step."""
MAX_LEXER_STATES = 30_000
"""Max lexer states per sequence, 1 to 2 KB each; llguidance's default is 250,000."""
THREAD_STACK_BYTES = 256 << 20
"""Stack size of compiling threads (address space, not memory). A chain of references takes up to 7 KB per link; its
length is bounded by `max_grammar_bytes`."""
_MAX_MEMORY_BYTES = 2 << 30
_START_TIMEOUT_S = 60.0
_REGEX_SPECIAL_CHARACTERS = re.compile(r"[\\.+*?()|\[\]{}^$#&~/-]")

_stack_size_lock = threading.Lock()


def make_matcher(vocabulary: Any, kind: str, text: str, whitespace: str | None) -> tuple[Any, bytes]:
    """Compile a grammar within the limits above. Returns its matcher and first mask. Raises `ValueError`: it cannot be
    compiled.

    Args:
        whitespace: pattern of white space between JSON tokens; None: no white space.
    """
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
    """Convert the grammar to llguidance's format. Raises `ValueError`."""
    from llguidance import LLMatcher

    if kind in ("json", "json_object"):
        if whitespace is None:
            return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_flexible": False})
        return LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": whitespace})
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        # One regular expression, because thousands of rules would exceed the parser's limit per step.
        return LLMatcher.grammar_from_regex(
            "|".join(_REGEX_SPECIAL_CHARACTERS.sub(r"\\\g<0>", one) for one in json.loads(text))
        )
    return LLMatcher.grammar_from_lark(text)


def start_thread(work: Callable[[], None]) -> threading.Thread:
    """Start a daemon thread with a stack of `THREAD_STACK_BYTES`. The size is a process-wide setting, hence the
    lock."""
    thread = threading.Thread(target=work, name="grammar", daemon=True)
    with _stack_size_lock:
        before = threading.stack_size(THREAD_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return thread


class TrialCompilerError(Exception):
    """A grammar cannot be compiled; the message has the reason."""


class GrammarCheckProcess:
    """Compiles grammars in a process that may be killed, to find out whether they compile. For one thread at a time."""

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
            raise TrialCompilerError(f"compilation takes more than {_MAX_MEMORY_BYTES >> 30} GiB of memory")
        problem = json.loads(answer)
        if problem is not None:
            raise TrialCompilerError(problem)

    def close(self) -> None:
        """Kill the process, if any. The next `check_grammar` starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def _start_process(self) -> subprocess.Popen[str]:
        # -P: do not import modules from the script's directory, whose names may shadow others.
        command = [sys.executable, "-P", str(Path(__file__))]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._process = process
        if not _read_line(process, _START_TIMEOUT_S):
            self.close()
            raise TrialCompilerError("the compiler's trial process could not be started; see the replica's log")
        return process


def _read_line(process: subprocess.Popen[str], timeout_s: float) -> str:
    """Read the next line from the process; empty if it has ended. Raises `TimeoutError`."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], timeout_s)[0]:
        raise TimeoutError
    return process.stdout.readline()


def main() -> None:
    """Read one grammar per line of standard input, and write null or its error as JSON."""
    from llguidance import LLTokenizer

    with suppress(ValueError, OSError):  # macOS cannot limit address space; there only the time is limited
        resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    byte_vocabulary = LLTokenizer("byte")
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for line in sys.stdin:
        problems: list[str | None] = []

        def compile_request(request: str = line, found: list[str | None] = problems) -> None:
            try:
                make_matcher(byte_vocabulary, *json.loads(request))
            except ValueError as error:
                found.append(str(error) or "the grammar cannot be parsed")
            else:
                found.append(None)

        start_thread(compile_request).join()
        if not problems:
            break
        sys.stdout.write(json.dumps(problems[0]) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
