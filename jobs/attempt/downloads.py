"""Teachers and data sets by name, brought to this machine, as far as the attempt may read them. Knows addresses and
files, little of what they hold.
"""

from __future__ import annotations

import builtins
from pathlib import Path

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.data.opening import RemoteFile
from swiftkv_platform.errors import DataError
from swiftkv_platform.sources import OPEN, Access, S3Source
from swiftkv_platform.specs import ModelSpec
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.downloads import download_model, keys_below

_MODEL = "model.name_or_path"


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
    from swiftkv_platform.model.bases import model_directory  # imports torch

    def download(uri: str) -> Path:
        target = workspace / "teacher"
        return download_model(uri, target, access=access, field=_MODEL) if fetch else target

    return model_directory(model.name_or_path, model.revision, access=access, download=download, field=_MODEL)


class StoreFiles:
    """Objects of stores as files below `workspace`: the `RemoteFiles` of data sources."""

    def __init__(self, workspace: Path) -> None:
        self._workspace = workspace

    def list(self, source: S3Source) -> builtins.list[RemoteFile]:
        """Raises `DataError` if there is no object at `source` and none below it."""
        address = f"s3://{source.bucket}"
        store = open_store(address)
        if source.key and store.head(source.key) is not None:
            return [RemoteFile(address, source.key)]
        return [RemoteFile(address, key) for key in keys_below(store, source, DataError, field="data.sources")]

    def fetch(self, file: RemoteFile) -> Path:
        """Download one object, unless it is there."""
        path = self.path(file)
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            open_store(file.store).download_file(file.key, path)
        return path

    def path(self, file: RemoteFile) -> Path:
        """Local path of an object, or of what lies below its key."""
        return self._workspace / file.store.removeprefix("s3://").strip("/") / file.key


def fetch_data(uri: str, workspace: Path) -> Path:
    """The file or directory that an `s3://` address becomes below `workspace`. Raises `DataError`: nothing is there."""
    files, source = StoreFiles(workspace), S3Source(uri)
    for file in files.list(source):
        files.fetch(file)
    return files.path(RemoteFile(f"s3://{source.bucket}", source.key))
