"""Teachers and base models by name, brought to this machine as far as their reader may have them. Knows names and the
rules of `sources`, little of what models hold; an object store is its caller's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.gguf import gguf_directory
from swiftkv_platform.sources import OPEN, UNBOUNDED, Access, Boundary, BuiltinSource, HubSource, PathSource, S3Source
from swiftkv_platform.sources.gguf import SUFFIX, read_gguf_config
from swiftkv_platform.sources.hub import local_directory
from swiftkv_platform.sources.models import check_model_files
from swiftkv_platform.sources.names import refuse_shadowed
from swiftkv_platform.sources.teacher_config import SPEC_FIELD, builtin_teacher

Download = Callable[[str], Path]
"""Function that brings everything below an `s3://` address to a directory, held to the rules. Raises `ModelError`."""


def model_directory(
    name: str,
    revision: str | None = None,
    *,
    access: Access = OPEN,
    download: Download | None = None,
    field: str = SPEC_FIELD,
) -> str:
    """Return a name that transformers can load: a directory, or, where sources have no rules, a hub id as it came. A
    GGUF file becomes a directory of this machine's cache.

    Args:
        revision: hub revision.
        access: what may be read; a directory is held to it with everything in it.
        download: reader of `s3://` addresses; None: they are refused.
        field: what messages call `name`.

    Raises:
        ModelError: an unknown built-in teacher, an address with nothing below it, or a model that asks for code or for
            what may not be read.
        InvalidInputError: a name that is closed, or a hub id that this machine's working directory shadows.
    """
    match access.model(name, field):
        case BuiltinSource(name):
            return str(_directory(builtin_teacher(name, field=field), name, field))
        case S3Source(name):
            if download is None:
                raise ModelError(
                    f"{field} is {name!r}, which this loader does not fetch; use a directory that holds its files, or "
                    "`swiftkv export` of the adapter",
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
            check_model_files(directory, Boundary.of(directory.parents[1]), field)  # so loaders read what was checked
            return str(directory)


def _directory(path: Path, name: str, field: str, boundary: Boundary = UNBOUNDED) -> Path:
    """The directory `path`, or the one that a GGUF file becomes; its header is checked before `gguf` trusts it."""
    if path.suffix != SUFFIX:
        return path
    config = read_gguf_config(path, name, field=field, boundary=boundary)
    return gguf_directory(boundary.check(path, field, error=ModelError), config, field=field)
