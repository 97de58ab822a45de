"""Teachers and data sets by name, brought to this machine. Knows addresses and files, nothing of what they hold."""

from __future__ import annotations

import hashlib
from pathlib import Path

import swiftkv_platform.demo
from swiftkv_platform.errors import DataError, InvalidInputError, ModelError
from swiftkv_platform.specs import BUILTIN_TEACHER
from swiftkv_platform.storage.object_store import ObjectStore, open_store


def teacher_path(name_or_path: str, workspace: Path, *, fetch: bool = True) -> str:
    """What transformers can load: a directory, or a hub id as it came.

    Args:
        workspace: where an `s3://` teacher goes.
        fetch: download it; else it is only told where it will be, for processes that share a machine.

    Raises:
        ModelError: an unknown built-in teacher, or an address with nothing below it.
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
        return name_or_path
    target = workspace / "teacher"
    if fetch:
        _download_below(name_or_path, target, ModelError, field="model.name_or_path")
    return str(target)


def fetch_data(uri: str, workspace: Path) -> Path:
    """The file or directory that an `s3://` data source becomes below `workspace`.

    Raises:
        DataError: nothing is there.
    """
    target = workspace / hashlib.sha256(uri.encode()).hexdigest()[:16]
    parent, _, name = uri.rstrip("/").rpartition("/")
    if parent != "s3:/":
        store = open_store(parent)
        if store.head(name) is not None:
            _download(store, [name], target)
            return target / name
    _download_below(uri, target, DataError, field="data.sources")
    return target


def _download_below(uri: str, target: Path, missing: type[InvalidInputError], *, field: str) -> None:
    store = open_store(uri.rstrip("/"))
    keys = [info.key for info in store.list("")]
    if not keys:
        raise missing(f"{field}: there is no object at {uri!r} and none below it", field=field, value=uri)
    _download(store, keys, target)


def _download(store: ObjectStore, keys: list[str], target: Path) -> None:
    for key in keys:
        path = target / key
        path.parent.mkdir(parents=True, exist_ok=True)
        store.download_file(key, path)
