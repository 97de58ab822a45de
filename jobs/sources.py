"""Teachers and data sets by name, brought to this machine. Knows addresses and files, nothing of what they hold."""

from __future__ import annotations

import builtins
from pathlib import Path

import swiftkv_platform.demo
from swiftkv_platform.closed_paths import refuse_shadowed
from swiftkv_platform.errors import DataError, InvalidInputError, ModelError
from swiftkv_platform.specs import BUILTIN_TEACHER
from swiftkv_platform.storage.object_store import open_store


def teacher_path(name_or_path: str, workspace: Path, *, fetch: bool = True) -> str:
    """Return what transformers can load: a directory, or a hub id as it came.

    Args:
        workspace: where an `s3://` teacher goes.
        fetch: download it; else it is only told where it will be, for processes that share a machine.

    Raises:
        ModelError: an unknown built-in teacher, or an address with nothing below it.
        InvalidInputError: a hub id that this machine's working directory shadows, where relative paths are closed.
    """
    if name_or_path.startswith("builtin:"):
        if name_or_path != BUILTIN_TEACHER:
            raise ModelError(
                f"model.name_or_path is {name_or_path!r}; the only built-in teacher is {BUILTIN_TEACHER!r}",
                field="model.name_or_path",
                value=name_or_path,
            )
        return str(Path(swiftkv_platform.demo.__path__[0]) / "teacher")
    if not name_or_path.startswith("s3://"):
        refuse_shadowed(name_or_path, "model.name_or_path")
        return name_or_path
    target = workspace / "teacher"
    if fetch:
        _download_below(name_or_path, target, ModelError, field="model.name_or_path")
    return str(target)


class StoreFiles:
    """Objects at `s3://` addresses as files below `workspace`: the `RemoteFiles` of data sources."""

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
        return self._workspace / uri.removeprefix("s3://").rstrip("/")


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
