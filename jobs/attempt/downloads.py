"""Teachers and data sets by name, brought to this machine, as far as the attempt may read them. Knows addresses and
files, little of what they hold.
"""

from __future__ import annotations

import builtins
from pathlib import Path

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.errors import DataError, InvalidInputError, ModelError
from swiftkv_platform.sources import OPEN, UNBOUNDED, Access, Boundary, BuiltinSource, HubSource, PathSource, S3Source
from swiftkv_platform.sources.gguf import SUFFIX, read_gguf_config
from swiftkv_platform.sources.models import check_model_files
from swiftkv_platform.sources.names import refuse_shadowed
from swiftkv_platform.sources.teacher_config import builtin_teacher
from swiftkv_platform.specs import ModelSpec
from swiftkv_platform.storage.addresses import open_store

_MODEL = "model.name_or_path"
_NEEDED = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja", "LICENSE*", "NOTICE*"]
_NOT_NEEDED = ["*.bin.index.json", "original/*", "onnx/*", "consolidated*"]
"""Patterns of a hub model's files to fetch and to leave out: no code, no pickles, no second copies of the weights."""


def access_of(request: AttemptRequest) -> Access:
    """Sources that an attempt may read."""
    return Access(request.allowed_roots, request.hub_organizations, request.code_tasks, files=request.files)


def teacher_path(model: ModelSpec, workspace: Path, *, access: Access = OPEN, fetch: bool = True) -> str:
    """Return a name that transformers can load: a directory, or, where sources have no rules, a hub id as it came. A
    GGUF file becomes a directory of this machine's cache.

    Args:
        workspace: where an `s3://` teacher goes.
        access: what may be read; a directory is held to it with everything in it.
        fetch: download an `s3://` teacher; else it is only told where it will be, for processes that share a machine.

    Raises:
        ModelError: an unknown built-in teacher, an address with nothing below it, or a model that asks for code or for
            what may not be read.
        InvalidInputError: a name that is closed, or a hub id that this machine's working directory shadows.
    """
    match access.model(model.name_or_path, _MODEL):
        case BuiltinSource(name):
            return str(_directory(builtin_teacher(name), name))
        case S3Source(name):
            target = workspace / "teacher"
            if fetch:
                _download_below(name, target, ModelError, field=_MODEL)
                if access.is_restricted:
                    check_model_files(target, Boundary.of(target), _MODEL)
            return str(target)
        case PathSource(name, path):
            if path.suffix == SUFFIX:
                return str(_directory(path, name, access.boundary))
            if not access.is_restricted:
                return str(path) if path.exists() else name
            directory = access.boundary.check(path, _MODEL, error=ModelError)
            if not directory.is_dir():
                raise ModelError(f"{_MODEL} is {name!r}: no such directory", field=_MODEL, value=name)
            check_model_files(directory, access.boundary, _MODEL)
            return str(directory)
        case HubSource(name):
            if not access.is_restricted:
                return name
            refuse_shadowed(name, _MODEL)
            return str(_snapshot(name, model.revision))


def _directory(path: Path, name: str, boundary: Boundary = UNBOUNDED) -> Path:
    """The directory `path`, or the one that a GGUF file becomes; its header is checked before `gguf` trusts it."""
    if path.suffix != SUFFIX:
        return path
    config = read_gguf_config(path, name, field=_MODEL, boundary=boundary)

    from swiftkv_platform.model.gguf import gguf_directory

    return gguf_directory(boundary.check(path, _MODEL, error=ModelError), config, field=_MODEL)


def _snapshot(name: str, revision: str | None) -> Path:
    """A hub model's directory in the hub's cache, checked as a local one is, so that loaders read what was checked."""
    from huggingface_hub import snapshot_download

    try:
        directory = Path(
            snapshot_download(name, revision=revision, allow_patterns=_NEEDED, ignore_patterns=_NOT_NEEDED)
        )
    except (OSError, ValueError) as error:  # the hub's errors are OSErrors
        raise ModelError(
            f"cannot read a model at {name!r}: give a directory or a hub id that this machine can reach "
            f"({str(error).splitlines()[0]})",
            field=_MODEL,
            value=name,
        ) from error
    check_model_files(directory, Boundary.of(directory.parents[1]), _MODEL)
    return directory


class StoreFiles:
    """Objects of stores as files below `workspace`: the `RemoteFiles` of data sources."""

    def __init__(self, workspace: Path) -> None:
        self._workspace = workspace

    def list(self, uri: str) -> builtins.list[str]:
        """Raises `DataError` if there is no object at `uri` and none below it."""
        parent, _, name = uri.rstrip("/").rpartition("/")
        if parent != "s3:/" and open_store(parent).head(name) is not None:
            return [uri.rstrip("/")]
        return [f"{uri.rstrip('/')}/{key}" for key in _keys_below(uri, DataError, field="data.sources")]

    def fetch(self, uri: str) -> Path:
        """Download one object, unless it is there."""
        parent, _, name = uri.rpartition("/")
        store, path = open_store(parent), self.path(uri)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            store.download_file(name, path)
        return path

    def path(self, uri: str) -> Path:
        """Local path of the object at `uri`, or of what lies below it."""
        return self._workspace / uri.removeprefix("s3://").strip("/")


def fetch_data(uri: str, workspace: Path) -> Path:
    """The file or directory that an `s3://` address becomes below `workspace`.

    Raises:
        DataError: nothing is there.
    """
    files = StoreFiles(workspace)
    for address in files.list(uri):
        files.fetch(address)
    return files.path(uri)


def _download_below(uri: str, target: Path, missing: type[InvalidInputError], *, field: str) -> None:
    store = open_store(uri.rstrip("/"))
    for key in _keys_below(uri, missing, field=field):
        path = target / key
        path.parent.mkdir(parents=True, exist_ok=True)
        store.download_file(key, path)


def _keys_below(uri: str, missing: type[InvalidInputError], *, field: str) -> list[str]:
    keys = [info.key for info in open_store(uri.rstrip("/")).list("")]
    if not keys:
        raise missing(f"{field}: there is no object at {uri!r} and none below it", field=field, value=uri)
    return keys
