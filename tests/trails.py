"""Files of ours that a running program enters, and the tables of docs/architecture.md that list them."""

import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
ROOMS = ("jobs", "serve", "swiftkv_platform")


def section(heading: str) -> str:
    """Text below a heading of docs/architecture.md."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    return text.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]


def tables(page: str) -> list[list[str]]:
    """Files in the first column of each table."""
    found = [re.findall(r"^\| `([^`]+\.py)` \|", table, re.MULTILINE) for table in page.split("|---|---|")[1:]]
    return [table for table in found if table]


@cache
def file_of_ours(path: str) -> str | None:
    """Path of a source file from the top of the repository; None for a file of a test or a library."""
    resolved = Path(path).resolve()
    ours = resolved.is_file() and any(resolved.is_relative_to(ROOT / room) for room in ROOMS)
    return str(resolved.relative_to(ROOT)) if ours else None


class Entered:
    """Our files whose functions run while `recording`, in the order of their first call."""

    def __init__(self, until: str = "") -> None:
        """`until`: the `FILE:FUNCTION` whose return ends the recording."""
        self.files: dict[str, None] = {}
        self.recording = False
        self._until = until

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        if not self.recording or (file := file_of_ours(frame.f_code.co_filename)) is None:
            return
        if event == "call" and frame.f_code.co_name != "<module>":
            self.files.setdefault(file)
        elif event == "return" and f"{file}:{frame.f_code.co_name}" == self._until:
            self.recording = False

    def apart(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that the files it enters are not recorded."""

        def run(*arguments: Any, **options: Any) -> Any:
            self.recording = False
            try:
                return function(*arguments, **options)
            finally:
                self.recording = True

        return run


@contextmanager
def traced(entered: Entered) -> Iterator[None]:
    """Report every call in this thread, and in threads that begin meanwhile, to `entered`."""
    sys.setprofile(entered)
    threading.setprofile(entered)
    try:
        yield
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
