"""Directories within which files must lie once links are resolved. Knows no tenant and no spec."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from swiftkv_platform.errors import DataError, InvalidInputError
from swiftkv_platform.sources.small_files import open_without_waiting


@dataclass(frozen=True)
class Boundary:
    """Directories within which files may lie. Check every file before opening it, and open the path that `check`
    returns."""

    directories: tuple[str, ...] | None
    """Real paths of the directories; None allows every path."""

    @classmethod
    def of(cls, *directories: str | Path) -> Boundary:
        """Return the boundary of everything below these directories, which may be links."""
        return cls(tuple(os.path.realpath(directory) for directory in directories))

    def contains(self, path: str | Path) -> bool:
        """Whether `path`, with links resolved, lies within."""
        if self.directories is None:
            return True
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(directory) for directory in self.directories)

    def check(self, path: Path, field: str, *, error: type[InvalidInputError] = DataError) -> Path:
        """Return the path to open instead of `path`, with links resolved if there is a bound. Raises `error` if it lies
        outside, or is neither file nor directory (a pipe would block its reader forever)."""
        if self.directories is None:
            return path
        if not self.contains(path):
            raise error(
                f"{field}: {path.name!r} leads to a place that the job may not read; use a file of the source itself",
                field=field,
                value=path.name,
            )
        real = Path(os.path.realpath(path))
        if real.exists() and not (real.is_file() or real.is_dir()):
            raise error(f"{field}: {path.name!r} is not a regular file", field=field, value=path.name)
        return real

    @contextmanager
    def open(self, path: Path, field: str, *, error: type[InvalidInputError] = DataError) -> Iterator[BufferedReader]:
        """Open a file, and check the opened file itself: `path` may have become a link meanwhile. Raises as `check`."""
        with open(self.check(path, field, error=error), "rb", opener=open_without_waiting) as stream:
            opened = Path(f"/proc/self/fd/{stream.fileno()}")
            if opened.exists():  # on Linux
                self.check(opened, field, error=error)
            yield stream

    def check_tree(self, directory: Path, field: str, *, error: type[InvalidInputError] = DataError) -> None:
        """Check everything below `directory`, following links to directories. Raises as `check`."""
        if self.directories is not None:
            self.check(directory, field, error=error)
            for path in _entries(directory):
                self.check(path, field, error=error)


UNBOUNDED = Boundary(None)


def _entries(directory: Path) -> Iterator[Path]:
    """Yield all files and directories below; a directory comes before its entries."""
    pending, seen = [directory], set[tuple[int, int]]()
    while pending:
        for entry in os.scandir(pending.pop()):
            yield Path(entry.path)
            try:
                status = entry.stat()
            except OSError:  # a broken link
                continue
            identity = status.st_dev, status.st_ino
            if stat.S_ISDIR(status.st_mode) and identity not in seen:
                seen.add(identity)
                pending.append(Path(entry.path))
