"""Files that the operator edits while servers run: keys, issuers, tenants. Independent of their format.

An invalid, missing or unreadable version is logged once with path and reason, and the last valid version stays in use.
Callers never see the file's content.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import ValidationError

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.logs import get_logger

Content = TypeVar("Content")
FileStamp = tuple[int, int, int, int] | None


class ReloadedFile(Generic[Content]):
    """The last valid version of a file, reloaded when it changes. Raises `InvalidInputError` if its first version is
    invalid.

    Args:
        parse: raises `ValueError` for invalid content.
        field: setting with the path of the file, for errors.
        hint: accepted content, for errors.
    """

    def __init__(self, path: Path, parse: Callable[[bytes], Content], *, field: str, hint: str) -> None:
        self._path = path
        self._parse = parse
        self._field = field
        self._hint = hint
        self._lock = threading.Lock()
        self._logged: tuple[FileStamp, str] | None = None
        """Stamp and error of the invalid version that was logged last; None while the newest version is in use."""
        self._read_stamp: FileStamp = _read_stamp(path)
        self._content = self._load()

    @property
    def content(self) -> Content:
        stamp = _read_stamp(self._path)
        if stamp is None or stamp != self._read_stamp:
            with self._lock:
                self._refresh(stamp)
        return self._content

    @property
    def is_usable(self) -> bool:
        """Whether the file's newest version is the one in use."""
        _ = self.content
        return self._logged is None

    def _refresh(self, stamp: FileStamp) -> None:
        if stamp is not None and stamp == self._read_stamp:
            return  # reloaded by another thread
        try:
            self._content = self._load()
        except InvalidInputError as error:
            # Keep the old stamp, so that the file is tried again: the cause may be temporary.
            if self._logged != (stamp, error.message):
                self._logged = stamp, error.message
                get_logger().warning("file not usable; its last valid version stays in use", reason=error.message)
        else:
            self._read_stamp, self._logged = stamp, None

    def _load(self) -> Content:
        try:
            return self._parse(self._path.read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            raise InvalidInputError(
                f"the file {str(self._path)!r} cannot be used: {_describe_error(error)}; {self._hint}",
                field=self._field,
                value=str(self._path),
            ) from error


def _read_stamp(path: Path) -> FileStamp:
    """Return a value that changes with the file's content and permissions; None without a file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ctime_ns, status.st_size, status.st_ino


def _describe_error(error: Exception) -> str:
    """Describe the error without values of the file."""
    if not isinstance(error, ValidationError):
        return str(error)
    items = error.errors(include_url=False, include_input=False, include_context=False)
    problems = [(".".join(map(str, item["loc"])), item["msg"]) for item in items]
    return "; ".join(f"{place}: {message}" if place else message for place, message in problems)
