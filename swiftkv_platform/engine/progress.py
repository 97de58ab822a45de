"""A progress bar for a terminal. Knows no engine."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar(total: int, *, shown: bool | None) -> Iterator[Callable[[], None]]:
    """Yield what counts one answer; `shown` None draws the bar, on the error stream, where that is a terminal."""
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not (sys.stderr.isatty() if shown is None else shown)
    with Progress(*columns, console=Console(stderr=True), disable=hidden) as progress:
        task = progress.add_task("", total=total)
        yield lambda: progress.advance(task)
