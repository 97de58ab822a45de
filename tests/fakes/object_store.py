"""An object store in a dictionary. Passes the contract suite of the real ones (tests/contract/test_object_store.py)."""

from __future__ import annotations

import builtins
import threading
from collections.abc import Iterator
from pathlib import Path

from swiftkv_platform.errors import ConflictError, InvalidInputError, ObjectNotFoundError
from swiftkv_platform.storage.object_store import CHUNK_SIZE, ObjectInfo, validate_key, validate_prefix


class InMemoryObjectStore:
    """Thread-safe; shared by all that hold the object. `uri` names it in messages but cannot be opened."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @property
    def uri(self) -> str:
        return "memory://test"

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        with self._lock:
            if if_absent and validate_key(key) in self._objects:
                raise ConflictError(f"object {key!r} exists already", field="key", value=key)
            self._objects[validate_key(key)] = bytes(data)

    def get_bytes(self, key: str) -> bytes:
        with self._lock:
            if validate_key(key) not in self._objects:
                raise ObjectNotFoundError(f"there is no object {key!r}", field="key", value=key)
            return self._objects[key]

    def head(self, key: str) -> ObjectInfo | None:
        with self._lock:
            data = self._objects.get(validate_key(key))
        return None if data is None else ObjectInfo(key, len(data))

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        trimmed = validate_prefix(prefix)
        with self._lock:
            found = sorted(
                (ObjectInfo(key, len(data)) for key, data in self._objects.items()), key=lambda info: info.key
            )
        for info in found:
            if (not trimmed or info.key.startswith(f"{trimmed}/")) and (start_after is None or info.key > start_after):
                yield info

    def list_directories(self, prefix: str) -> builtins.list[str]:
        trimmed = validate_prefix(prefix)
        start = len(trimmed) + 1 if trimmed else 0
        below = [info.key[start:].split("/") for info in self.list(prefix)]
        return sorted({segments[0] for segments in below if len(segments) > 1})

    def upload_file(self, path: Path, key: str) -> None:
        self.put_bytes(key, path.read_bytes())

    def download_file(self, key: str, path: Path) -> None:
        data = self.get_bytes(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def stream(
        self, key: str, chunk_size: int = CHUNK_SIZE, *, start: int = 0, stop: int | None = None
    ) -> Iterator[bytes]:
        data = self.get_bytes(key)[:stop]
        for offset in range(start, len(data), chunk_size):
            yield data[offset : offset + chunk_size]

    def delete(self, key: str) -> None:
        with self._lock:
            self._objects.pop(validate_key(key), None)

    def delete_many(self, keys: builtins.list[str]) -> None:
        for key in keys:
            self.delete(key)

    def delete_prefix(self, prefix: str) -> None:
        if not validate_prefix(prefix):
            raise InvalidInputError("delete_prefix needs a prefix that is not empty", field="prefix", value=prefix)
        for info in self.list(prefix):
            self.delete(info.key)

    def presigned_url(self, key: str, expires_s: int) -> str | None:
        validate_key(key)
        return None

    def ping(self) -> None:
        """A dictionary is always there."""
