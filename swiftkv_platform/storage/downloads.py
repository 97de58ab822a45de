"""Objects below an `s3://` address as files of this machine. Knows addresses and keys, little of what they hold."""

from __future__ import annotations

from pathlib import Path

from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.sources import Access, Boundary
from swiftkv_platform.sources.models import check_model_files
from swiftkv_platform.storage.addresses import open_store


def download_model(uri: str, target: Path, *, access: Access, field: str) -> Path:
    """The model below `uri` as the directory `target`; where sources have rules, held to its own files.

    Raises:
        ModelError: nothing is there, or a model that asks for code or for what may not be read.
    """
    download_below(uri, target, ModelError, field=field)
    if access.is_restricted:
        check_model_files(target, Boundary.of(target), field)
    return target


def download_below(uri: str, target: Path, missing: type[InvalidInputError], *, field: str) -> None:
    """Download every object below `uri` to `target`. Raises `missing` where there is none."""
    store = open_store(uri.rstrip("/"))
    for key in keys_below(uri, missing, field=field):
        path = target / key
        path.parent.mkdir(parents=True, exist_ok=True)
        store.download_file(key, path)


def keys_below(uri: str, missing: type[InvalidInputError], *, field: str) -> list[str]:
    """Keys of the objects below `uri`, relative to it. Raises `missing` where there is none."""
    keys = [info.key for info in open_store(uri.rstrip("/")).list("")]
    if not keys:
        raise missing(f"{field}: there is no object at {uri!r} and none below it", field=field, value=uri)
    return keys
