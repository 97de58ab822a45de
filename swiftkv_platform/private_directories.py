"""Directories that only this process's user can change: caches whose files are loaded without another check."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def private_directory(path: Path) -> Path:
    """Return `path`, created for this user alone (mode 0700) if it does not exist. One of this user that others may
    read is closed to them.

    Raises `PermissionError` if another user owns it, or placed a link there, since its files could be anyone's, and
    other `OSError`s if it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        status = os.fstat(descriptor)
        for owner in (status.st_uid, path.lstat().st_uid):  # of the directory, and of a link to it
            if owner != os.geteuid():
                raise PermissionError(
                    f"{path} belongs to user {owner}, who could replace its files; use a directory of user "
                    f"{os.geteuid()}, such as a new one below it"
                )
        if stat.S_IMODE(status.st_mode) & 0o077:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return path


def is_private(path: Path) -> bool:
    """Whether a file or directory exists, is no link, and belongs to this user alone."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return False
    return not stat.S_ISLNK(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022
