"""Temporary directories that are removed even if their process dies: at the latest when the next one starts.

A process holds a lock on each of its directories, which the kernel releases when the process ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PREFIX = "swiftkv-work-"


@contextmanager
def workspace() -> Iterator[Path]:
    """Yield a new directory of this process, below the system's directory for temporary files."""
    fresh = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
    directory = fresh.with_name(fresh.name.removeprefix("."))
    held = os.open(fresh, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        fresh.rename(directory)  # from now on, others may look at it: it is locked
        yield directory
    finally:
        for path in (fresh, directory):
            shutil.rmtree(path, ignore_errors=True)
        os.close(held)


def remove_abandoned_workspaces() -> None:
    """Remove the workspaces of processes that have died. Directories of other users stay."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, locked by a live process, or gone
            held = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(held)
