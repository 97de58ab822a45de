"""Waiting for a condition, and for a program to answer."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def eventually(condition: Callable[[], Any], what: str, *, seconds: float = 60.0) -> Any:
    """Return the first true value of `condition()`; fail with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.05)
    return value


def wait_until_up(
    is_up: Callable[[], bool], process: subprocess.Popen[bytes], log: Path, *, seconds: float = 180.0
) -> None:
    """Wait until a program answers; fail with its log if it ends before. A busy machine takes long to start one."""
    deadline = time.monotonic() + seconds
    while not is_up():
        assert process.poll() is None, log.read_text(errors="replace")
        assert time.monotonic() < deadline, log.read_text(errors="replace")
        time.sleep(0.05)
