"""Check of the directories where artifacts, caches and temporary files go: writable, and with room."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from swiftkv_platform.cli.doctor.findings import Finding, Surroundings, worst
from swiftkv_platform.settings import Settings

GIB = 1 << 30


def examine_disk(surroundings: Surroundings) -> Finding:
    """Look at each directory, or where it is to be made."""
    places = list(_places(surroundings.settings))
    return worst([_examine(what, path, surroundings.min_free_bytes) for what, path in places])


def existing(path: Path) -> Path:
    """The path itself, or the nearest directory above it that is there."""
    path = path.expanduser().absolute()
    return next(each for each in (path, *path.parents) if each.exists())


def why_not_writable(directory: Path) -> str | None:
    """Reason that no file can be made in a directory that is there; None where one can. It leaves none."""
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _places(settings: Settings) -> Iterator[tuple[str, Path]]:
    yield "SWIFTKV_HOME", settings.home
    if "://" not in settings.resolved_storage_uri:
        yield "SWIFTKV_STORAGE_URI", Path(settings.resolved_storage_uri)
    cache = Path.home() / ".cache"
    yield "SWIFTKV_KERNEL_CACHE", Path(os.environ.get("SWIFTKV_KERNEL_CACHE") or cache / "swiftkv" / "kernels")
    yield "HF_HOME", Path(os.environ.get("HF_HOME") or cache / "huggingface")
    yield "TMPDIR", Path(tempfile.gettempdir())


def _examine(variable: str, path: Path, min_free_bytes: int) -> Finding:
    directory = existing(path)
    if (reason := why_not_writable(directory)) is not None:
        return Finding(
            "failed",
            f"Nothing can be written below {directory} ({reason}), where {variable} has {path}.",
            f"let {variable} name a directory that you may write to",
        )
    free = shutil.disk_usage(directory).free
    if free < min_free_bytes:
        return Finding(
            "failed",
            f"{directory} ({variable}) has {free / GIB:.1f} GiB free, and {min_free_bytes / GIB:.1f} are asked for.",
            f"make room, or let {variable} name a directory on a larger disk",
        )
    return Finding("ok", f"{free / GIB:.1f} GiB free for {variable}")
