"""Directories that files must lie in, after links are followed. Knows no tenant and no spec."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swiftkv_platform.errors import DataError, InvalidInputError


@dataclass(frozen=True)
class Boundary:
    """Directories in which files may lie. Every file is checked before it is opened, and opened by the path that was
    checked."""

    directories: tuple[str, ...] | None
    """Real paths; None bounds nothing."""

    @classmethod
    def of(cls, *directories: str | Path) -> Boundary:
        """Everything below these directories, which may be links themselves."""
        return cls(tuple(os.path.realpath(directory) for directory in directories))

    def contains(self, path: str | Path) -> bool:
        """Whether `path` leads to a place within."""
        if self.directories is None:
            return True
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(directory) for directory in self.directories)

    def check(self, path: Path, field: str, *, error: type[InvalidInputError] = DataError) -> Path:
        """The path to open in the place of `path`: without links, where there is a bound. Raises ``error``: it leads
        out, or to what is neither file nor directory (a pipe would block its reader for ever)."""
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
            raise error(f"{field}: {path.name!r} is no regular file", field=field, value=path.name)
        return real

    def check_tree(self, directory: Path, field: str, *, error: type[InvalidInputError] = DataError) -> None:
        """Check everything below `directory`, links to directories followed. Raises as `check`."""
        if self.directories is not None:
            self.check(directory, field, error=error)
            for path in _entries(directory):
                self.check(path, field, error=error)


UNBOUNDED = Boundary(None)


def _entries(directory: Path) -> Iterator[Path]:
    """Files and directories below; a directory is yielded before it is entered."""
    pending, seen = [directory], set[tuple[int, int]]()
    while pending:
        for entry in os.scandir(pending.pop()):
            yield Path(entry.path)
            try:
                status = entry.stat()
            except OSError:  # a link that leads nowhere
                continue
            identity = status.st_dev, status.st_ino
            if stat.S_ISDIR(status.st_mode) and identity not in seen:
                seen.add(identity)
                pending.append(Path(entry.path))
