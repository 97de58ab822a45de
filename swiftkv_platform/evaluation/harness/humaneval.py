"""HumanEval (Chen et al., 2021) from its authors' file: functions that the model completes, scored by their tests.

The harness's own task scores with a metric that is downloaded from the hub.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

MAX_CODE_TOKENS = 512
_PROBLEM = "```python\n{{prompt}}"
# Text and start of the answer are those of the harness's `humaneval_instruct`.
CODE_PROMPT = {
    "doc_to_text": "Write a solution to the following problem and make sure that it passes the tests:\n"
    f"{_PROBLEM}\n```\n",
    "gen_prefix": f"Here is the completed function:\n{_PROBLEM}",
    "target_delimiter": "",
}
"""Fields of the harness's configuration that make the prompt."""
ENDS_OF_FUNCTION = ("```", "\nclass", "\ndef", "\n#", "\nif", "\nprint")
"""Texts that only come after the function's end."""

_CPU_SECONDS = 10
_ELAPSED_SECONDS = 60.0
_MEMORY_BYTES = 1 << 30
_OUTPUT_BYTES = 1 << 20
_LIMITED_RUN = f"""
import resource, sys
for kind, most in (
    (resource.RLIMIT_CPU, {_CPU_SECONDS}),
    (resource.RLIMIT_AS, {_MEMORY_BYTES}),
    (resource.RLIMIT_FSIZE, {_OUTPUT_BYTES}),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(kind, (most, most))
exec(compile(sys.stdin.read(), "program", "exec"), {{"__name__": "__main__"}})
"""
"""A program that limits its own process, and then runs the one that it reads."""


def score_code(document: Mapping[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Score whether the problem's tests pass with the model's completion of the function."""
    program = f"{document['prompt']}{results[0]}\n\n{document['test']}\n\ncheck({document['entry_point']})\n"
    return {"pass@1": float(runs_to_completion(program))}


def runs_to_completion(program: str) -> bool:
    """Whether a program runs to its end within limits of time, memory and output, in its own process and directory.

    The limits stop mistakes, not attacks: a program may read what this process may read, and use the network.
    """
    # A program that ends early, whatever its exit code, does not write the token.
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _LIMITED_RUN],
            cwd=directory,
            env={"HOME": directory, "TMPDIR": directory},
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        with suppress(subprocess.TimeoutExpired):
            process.communicate(f"{program}\nprint({token!r})\n".encode(), _ELAPSED_SECONDS)
        with suppress(ProcessLookupError):  # the group has ended
            os.killpg(process.pid, signal.SIGKILL)  # with what the program has started
        process.wait()
        output.seek(0)
        return output.read().rstrip().endswith(token.encode())
