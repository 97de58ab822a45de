"""An object store in a bucket of S3, Google Cloud Storage or Azure, or of a server that speaks one of their protocols.

Conditional writes (`put_bytes(if_absent=True)`) are atomic if the server honours `If-None-Match` (the three clouds,
MinIO, Ceph, SeaweedFS). On one that ignores it, such as `rclone serve s3`, an existing object is still noticed, but two
writers at the same instant may both succeed, and the later one's object stays.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, InvalidPathError

from swiftkv_platform.errors import BucketError, ConflictError, InvalidInputError, ObjectNotFoundError, StorageError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.storage.buckets import describe, has_answer, is_missing, is_refused, open_bucket, was_repeated
from swiftkv_platform.storage.object_store import (
    CHUNK_SIZE,
    PROBE_KEY,
    ObjectInfo,
    temporary_beside,
    validate_key,
    validate_prefix,
)

_PATIENT_RETRIES, _IMPATIENT_RETRIES = 10, 2
"""On average half a minute and a second of retries."""
_PART_SIZE, _MOST_PARTS = 8 << 20, 10_000
"""Bytes of a part of a large file, and most parts that S3 accepts; four are uploaded at a time."""
_PAGE = 1000
"""Keys in one page of S3's list."""


class BucketStore:
    """Objects below `prefix` of a bucket. Thread-safe; not to be used in a forked process."""

    def __init__(self, scheme: str, bucket: str, prefix: str = "", *, patient: bool = True) -> None:
        self._place = scheme, bucket, validate_prefix(prefix)
        self._retries = _PATIENT_RETRIES if patient else _IMPATIENT_RETRIES
        self._client = open_bucket(*self._place, retries=self._retries)
        self._may_sign = True

    @property
    def uri(self) -> str:
        scheme, bucket, prefix = self._place
        return f"{scheme}://{bucket}/{prefix}".removesuffix("/")

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        validate_key(key)
        with self._errors("write", key):
            if if_absent:
                self._create(key, data)
            else:
                self._client.put(key, data)

    def _create(self, key: str, data: bytes) -> None:
        """Write an object unless it exists. A request that failed may have succeeded; an equal object is then ours."""
        if self.head(key) is not None:
            raise self._exists(key)
        for again in (False, True):
            try:
                self._client.put(key, data, mode="create")
                return
            except AlreadyExistsError as error:
                if (again or was_repeated(error)) and self.get_bytes(key) == data:
                    return
                raise self._exists(key) from error
            except BaseError as error:
                # The client does not retry a conditional write whose connection broke, since it may have succeeded.
                if again or has_answer(error) or was_repeated(error):
                    raise

    def get_bytes(self, key: str) -> bytes:
        return b"".join(self.stream(key))

    def head(self, key: str) -> ObjectInfo | None:
        try:
            return ObjectInfo(key, self._head(key)["size"])
        except ObjectNotFoundError:
            return None

    def _head(self, key: str) -> Any:
        with self._errors("inspect", key):
            return self._client.head(validate_key(key))

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        directory = validate_prefix(prefix)
        with self._errors("list", prefix):
            for page in self._client.list(directory or None, offset=start_after, chunk_size=_PAGE):
                for entry in page:
                    info = ObjectInfo(entry["path"], entry["size"])
                    if (start_after is None or info.key > start_after) and not self._is_directory(info):
                        yield info

    def _is_directory(self, info: ObjectInfo) -> bool:
        """Whether the object is another tool's directory marker: its key ends with a slash, which obstore removes."""
        return info.size == 0 and (not info.key or self.head(info.key) is None)

    def list_directories(self, prefix: str) -> builtins.list[str]:
        directory = validate_prefix(prefix)
        with self._errors("list", prefix):
            found = self._client.list_with_delimiter(directory or None)["common_prefixes"]
        return sorted(path.rpartition("/")[2] for path in found)

    def upload_file(self, path: Path, key: str) -> None:
        with self._errors("upload", key):
            self._put(path, key, path.stat().st_size)

    def upload_pieces(self, pieces: Iterator[bytes], key: str, size: int) -> None:
        failure: list[BaseException] = []

        def watched() -> Iterator[bytes]:
            try:
                yield from pieces
            except BaseException as error:
                failure.append(error)
                raise

        with self._errors("upload", key):
            try:
                self._put(watched(), key, size)
            except Exception:
                if failure:  # which the client reports as its own error
                    raise failure[0] from None
                raise

    def free_bytes(self) -> int | None:
        return None

    def _put(self, content: Path | Iterator[bytes], key: str, size: int) -> None:
        part_size = max(_PART_SIZE, -(-size // _MOST_PARTS))
        self._client.put(validate_key(key), content, chunk_size=part_size, max_concurrency=4)

    def download_file(self, key: str, path: Path) -> None:
        with self._errors("download", key), temporary_beside(path) as temporary:
            with temporary.open("wb") as file:
                file.writelines(self.stream(key))
            temporary.replace(path)

    def stream(
        self, key: str, chunk_size: int = CHUNK_SIZE, *, start: int = 0, stop: int | None = None
    ) -> Iterator[bytes]:
        """Stream the object. After a broken connection, continue at the next byte of the same version of the object."""
        bounds: tuple[int, int] | None = None
        if start or stop is not None:
            size = self._head(key)["size"]
            bounds = start, size if stop is None else min(stop, size)
            if start >= bounds[1]:
                return  # servers refuse a range that begins beyond the object
        with self._errors("read", key):
            for block in self._blocks(key, chunk_size, bounds):
                yield from (block[at : at + chunk_size] for at in range(0, len(block), chunk_size))

    def _blocks(self, key: str, size: int, bounds: tuple[int, int] | None) -> Iterator[bytes]:
        """Yield blocks of at least `size` bytes. After a broken connection, the client continues at the next byte."""
        try:
            found = self._client.get(validate_key(key), options={"range": bounds} if bounds else {})
        except BaseError as error:
            if bounds is None or "non-partial" not in str(error):
                raise
            yield self._unmarked_range(key, *bounds)
            return
        try:
            yield from found.stream(size)
        except BaseError as error:
            if self._head(key)["e_tag"] == found.meta["e_tag"]:
                raise
            raise StorageError(f"object {key!r} in {self.uri} was replaced while it was read; read it again") from error

    def _unmarked_range(self, key: str, start: int, stop: int) -> bytes:
        """Read a range from a server that answers it with status 200 (rclone, lakeFS), which obstore refuses."""
        # This client must not resume after a broken connection: it would count from the object's beginning.
        client = open_bucket(*self._place, retries=0, headers={"Range": f"bytes={start}-{stop - 1}"})
        for left in reversed(range(self._retries)):
            try:
                data: bytes = client.get(key).bytes().to_bytes()
            except BaseError:
                if not left:
                    raise
                continue
            if len(data) == stop - start:
                return data
        raise StorageError(f"the server of {self.uri} does not support range requests", field="key", value=key)

    def delete(self, key: str) -> None:
        with self._errors("delete", key):
            self._delete(validate_key(key))

    def delete_many(self, keys: builtins.list[str]) -> None:
        with self._errors("delete", ", ".join(keys[:1])):
            try:
                self._client.delete([validate_key(key) for key in keys])
            except FileNotFoundError:  # on servers where a missing object is an error, others may not have been deleted
                for key in keys:
                    self._delete(key)

    def _delete(self, key: str) -> None:
        try:
            self._client.delete(key)
        except FileNotFoundError as error:
            if not is_missing(error):
                raise

    def delete_prefix(self, prefix: str) -> None:
        if not validate_prefix(prefix):
            raise InvalidInputError("delete_prefix needs a prefix that is not empty", field="prefix", value=prefix)
        self.delete_many([info.key for info in self.list(prefix)])

    def presigned_url(self, key: str, expires_s: int) -> str | None:
        """Return a signed URL; None if the credentials may not sign. A pod's identity needs a role of its own to have
        its cloud sign; after a refusal it is not asked again."""
        validate_key(key)
        if not self._may_sign:
            return None
        try:
            return obstore.sign(self._client, "GET", key, timedelta(seconds=expires_s))
        except BaseError as error:
            self._may_sign = not has_answer(error)
            get_logger().warning("objects pass through this process", reason=describe(error, *self._place[:2]))
            return None

    def ping(self) -> None:
        client = open_bucket(*self._place, retries=0, timeout_s=5)
        with self._errors("use", PROBE_KEY):
            client.put(PROBE_KEY, b"ok")
            client.get(PROBE_KEY).bytes()
            client.delete(PROBE_KEY)

    def _exists(self, key: str) -> ConflictError:
        return ConflictError(f"object {key!r} already exists in {self.uri}", field="key", value=key)

    @contextmanager
    def _errors(self, action: str, key: str) -> Iterator[None]:
        try:
            yield
        except InvalidPathError as error:  # of any object below the prefix; the client then lists none
            why = str(error).partition("\n")[0]
            raise InvalidInputError(
                f"cannot {action} {key!r} in {self.uri}: {why}; keys without empty, '.' and '..' segments are "
                "accepted: copy it to such a key, or name other objects",
                field="key",
                value=key,
            ) from error
        except (BaseError, OSError) as error:
            if is_missing(error):
                raise ObjectNotFoundError(
                    f"there is no object {key!r} in {self.uri}", field="key", value=key
                ) from error
            why = describe(error, *self._place[:2])
            kind = BucketError if is_refused(error) else StorageError
            raise kind(f"cannot {action} {key!r} in {self.uri}: {why}", field="key", value=key) from error
