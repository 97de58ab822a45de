"""Check of the object store: a small object is written, read back, listed and deleted."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ulid import ULID

from swiftkv_platform.cli.doctor.disk import existing, why_not_writable
from swiftkv_platform.cli.doctor.findings import Finding, Surroundings, one_line
from swiftkv_platform.errors import InvalidInputError, StorageError

if TYPE_CHECKING:
    from swiftkv_platform.storage.object_store import ObjectStore

_CONTENT = b"swiftkv doctor"


def examine_object_store(surroundings: Surroundings) -> Finding:
    """Try the store under a name that nothing else uses."""
    from swiftkv_platform.storage.addresses import open_store

    uri = surroundings.settings.resolved_storage_uri
    directory = None if "://" in uri else Path(uri).expanduser()
    if directory is not None and not directory.is_dir():
        return _to_be_made(directory)
    try:
        store = open_store(uri, patient=False)
        _try(store)
    except InvalidInputError as error:
        return Finding("failed", one_line(error), "correct SWIFTKV_STORAGE_URI")
    except StorageError as error:
        return Finding("failed", f"{uri}: {one_line(error)}.", _remedy(one_line(error), uri))
    return Finding("ok", f"{store.uri} takes, gives back, lists and deletes an object.")


def _try(store: ObjectStore) -> None:
    """Raises `StorageError` for a step that fails, or whose outcome is another than it should be."""
    place = f".swiftkv-doctor-{ULID()}"
    try:
        _round_trip(store, place, f"{place}/probe")
    except StorageError:
        with suppress(StorageError):  # the first error says more
            store.delete_prefix(place)
        raise
    store.delete_prefix(place)  # of a store in a directory, the place itself is left


def _round_trip(store: ObjectStore, place: str, key: str) -> None:
    store.put_bytes(key, _CONTENT)
    if store.get_bytes(key) != _CONTENT:
        raise StorageError("what was written came back with another content")
    if [each.key for each in store.list(place)] != [key]:
        raise StorageError("what was written is not listed")
    store.delete(key)
    if store.head(key) is not None:
        raise StorageError("what was deleted is still there")


def _to_be_made(directory: Path) -> Finding:
    above = existing(directory)
    reason = why_not_writable(above) if above.is_dir() else "Not a directory"
    if reason is None:
        return Finding("ok", f"{directory} is made by the first job.")
    message = f"{directory} is not there, and cannot be made in {above} ({reason})."
    return Finding("failed", message, "let SWIFTKV_STORAGE_URI name a directory that you may write to")


def _remedy(text: str, uri: str) -> str:
    from swiftkv_platform.storage.buckets import SERVICES

    if "://" not in uri or uri.startswith("file:"):
        return "let SWIFTKV_STORAGE_URI name a directory that you may write to"
    if "does not exist" in text:
        return "create the bucket, or name another in SWIFTKV_STORAGE_URI"
    service = SERVICES[uri.partition("://")[0].lower()]
    if "credentials" in text:
        return f"set {service.credentials} of a user who may read, write, list and delete there"
    return f"start the server, or correct {service.endpoint}"
