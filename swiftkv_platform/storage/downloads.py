"""Download objects below an `s3://` address. Knows addresses and keys, little about contents."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from swiftkv_platform.errors import BucketError, InvalidInputError, ModelError
from swiftkv_platform.sources import Access, Boundary, S3Source
from swiftkv_platform.sources.models import check_model_files
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.object_store import ObjectInfo, ObjectStore


def download_model(uri: str, target: Path, *, access: Access, field: str) -> Path:
    """Download the model below `uri` to `target`. If sources are restricted, check that it names only its own files.

    Raises:
        ModelError: there is no object, or the model asks for code or for files that may not be read.
    """
    download_below(uri, target, ModelError, field=field)
    if access.is_restricted:
        check_model_files(target, Boundary.of(target), field)
    return target


def download_below(uri: str, target: Path, missing: type[InvalidInputError], *, field: str) -> None:
    """Download every object below `uri` to `target`. Raises `missing` if there is none."""
    source = S3Source(uri)
    with bucket_of(source, missing, field=field) as store:
        for key in keys_below(store, source, missing, field=field):
            path = target / key.removeprefix(source.key).lstrip("/")
            path.parent.mkdir(parents=True, exist_ok=True)
            store.download_file(key, path)


def keys_below(store: ObjectStore, source: S3Source, missing: type[InvalidInputError], *, field: str) -> list[str]:
    """Return the keys of the objects below `source`, in the bucket `store`. Raises `missing` if there is none."""
    return [info.key for info in objects_below(store, source, missing, field=field)]


def objects_below(
    store: ObjectStore, source: S3Source, missing: type[InvalidInputError], *, field: str
) -> Iterator[ObjectInfo]:
    """Yield the objects below `source`, in the bucket `store`. Raises `missing` if there is none."""
    listed = store.list(source.key)
    first = next(listed, None)
    if first is None:
        raise missing.of(field, source.name, "; there is no object at that address and none below it")
    yield first
    yield from listed


@contextmanager
def bucket_of(source: S3Source, missing: type[InvalidInputError], *, field: str) -> Iterator[ObjectStore]:
    """The bucket of `source`. Raises `missing` in place of `BucketError`: it is not there, or closed."""
    try:
        yield open_store(source.store)
    except BucketError as error:
        raise missing.of(field, source.name, f": {error.message}") from error
