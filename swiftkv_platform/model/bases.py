"""Teachers and base models by name: resolve a name under the access rules of `sources`, and download the model. The
caller passes the function that downloads from an object store.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.gguf import gguf_directory
from swiftkv_platform.sources import OPEN, UNBOUNDED, Access, Boundary, BuiltinSource, HubSource, PathSource, S3Source
from swiftkv_platform.sources.gguf import SUFFIX
from swiftkv_platform.sources.model_directories import check_model_files, local_directory
from swiftkv_platform.sources.names import refuse_shadowed
from swiftkv_platform.sources.teacher_config import SPEC_FIELD, builtin_teacher

Download = Callable[[str], Path]
"""Function that downloads everything below an `s3://` address to a directory, under the rules. Raises `ModelError`."""


def model_directory(
    name: str,
    revision: str | None = None,
    *,
    access: Access = OPEN,
    download: Download | None = None,
    field: str = SPEC_FIELD,
) -> str:
    """Return a name that transformers can load: a directory, or an unchanged hub id if access is unrestricted. A GGUF
    file becomes a directory in this machine's cache.

    Args:
        revision: hub revision.
        access: rules on what may be read; they apply to a directory and to every file in it.
        download: function for `s3://` addresses; None: they are refused.
        field: name of the input in error messages.

    Raises:
        ModelError: the built-in teacher is unknown, nothing is below the address, or the model needs remote code or
            files that may not be read.
        InvalidInputError: the name is not allowed, or a path in the working directory shadows the hub id.
    """
    match access.model(name, field):
        case BuiltinSource(name):
            return str(_directory(builtin_teacher(name, field=field), name, field))
        case S3Source(name):
            if download is None:
                raise ModelError(
                    f"{field} is {name!r}, which this loader does not download; use a directory that holds its files, "
                    "or `swiftkv export` the adapter",
                    field=field,
                    value=name,
                )
            return str(download(name))
        case PathSource(name, path):
            if path.suffix == SUFFIX:
                return str(_directory(path, name, field, access.boundary))
            if not access.is_restricted:
                return str(path) if path.exists() else name
            directory = access.boundary.check(path, field, error=ModelError)
            if not directory.is_dir():
                raise ModelError(f"{field} is {name!r}: no such directory", field=field, value=name)
            check_model_files(directory, access.boundary, field)
            return str(directory)
        case HubSource(name):
            if not access.is_restricted:
                return name
            refuse_shadowed(name, field)
            directory = local_directory(name, revision, field=field)
            check_model_files(directory, Boundary.of(directory.parents[1]), field)  # loaders read these files
            return str(directory)


def _directory(path: Path, name: str, field: str, boundary: Boundary = UNBOUNDED) -> Path:
    """Return `path` if it is a directory, or the directory made of a GGUF file."""
    if path.suffix != SUFFIX:
        return path
    return gguf_directory(path, name, field=field, boundary=boundary)
