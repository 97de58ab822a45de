"""Directories that only this process's user and root can change: caches of trusted files, and workspaces.

A workspace is a temporary directory that its process locks. The kernel releases the lock when the process dies, so the
next process can remove abandoned workspaces.
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

_WRITABLE_BY_OTHERS = 0o022


def ensure_private_directory(path: Path) -> Path:
    """Create the directory with mode 0700 if it does not exist, and return it. An existing directory of this user gets
    mode 0700; one of root is accepted if only root can write to it.

    Raises `PermissionError` if another user owns the directory or a link to it, and other `OSError`s if it cannot be
    created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        status, link = os.fstat(descriptor), path.lstat()
        if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(descriptor, 0o700)
        elif not _is_trusted(status):
            raise _make_ownership_error(path, status.st_uid)
    finally:
        os.close(descriptor)
    if link.st_uid not in (os.geteuid(), 0):
        raise _make_ownership_error(path, link.st_uid)
    return path


def is_private(path: Path) -> bool:
    """Whether a file or directory exists, is not a link, and can be changed only by this user and root."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return not stat.S_ISLNK(status.st_mode) and _is_trusted(status)


def _is_trusted(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & _WRITABLE_BY_OTHERS


def _make_ownership_error(path: Path, owner: int) -> PermissionError:
    return PermissionError(
        f"{path} belongs to user {owner}, not to {os.geteuid()}, so its files are not trusted; use a new directory"
    )


_DIRECTORY_PREFIX = "swiftkv-work-"


@contextmanager
def open_workspace() -> Iterator[Path]:
    """Yield a new temporary directory, and remove it at the end."""
    new = Path(tempfile.mkdtemp(prefix=f".{_DIRECTORY_PREFIX}"))
    directory = new.with_name(new.name.removeprefix("."))
    descriptor = os.open(new, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        new.rename(directory)  # visible to `remove_abandoned_workspaces` only once locked
        yield directory
    finally:
        for path in (new, directory):
            shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned_workspaces() -> None:
    """Remove this user's workspaces of processes that have died."""
    for path in Path(tempfile.gettempdir()).glob(f"{_DIRECTORY_PREFIX}*"):
        with suppress(OSError):  # of another user, locked by a live process, or removed meanwhile
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(descriptor)
