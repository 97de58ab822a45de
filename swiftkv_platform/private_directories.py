"""Directories that only this process's user and root can change: caches whose files are loaded unchecked, and temporary
ones, which are removed even if their process dies: at the latest when the next one starts.

A process holds a lock on each of its temporary directories, which the kernel releases when the process ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_OTHERS_WRITE = 0o022


def private_directory(path: Path) -> Path:
    """Return `path`, created for this user alone (mode 0700) if it does not exist. One of this user that others may
    read is closed to them; one of root is accepted if only root may write to it.

    Raises `PermissionError` if another user owns it, or placed a link there, since its files could be anyone's, and
    other `OSError`s if it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        status, link = os.fstat(descriptor), path.lstat()
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(descriptor, 0o700)
        elif not _is_trusted(status):
            raise _changeable(path, status.st_uid)
    finally:
        os.close(descriptor)
    if link.st_uid not in (os.geteuid(), 0):
        raise _changeable(path, link.st_uid)
    return path


def is_private(path: Path) -> bool:
    """Whether a file or directory exists, is no link, and can be changed by this user and root only."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return not stat.S_ISLNK(status.st_mode) and _is_trusted(status)


def _is_trusted(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & _OTHERS_WRITE


def _changeable(path: Path, owner: int) -> PermissionError:
    return PermissionError(
        f"{path} belongs to user {owner}, and not only user {os.geteuid()} may change its files; use a new directory"
    )


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
