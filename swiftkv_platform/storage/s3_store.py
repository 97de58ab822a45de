"""An object store in a bucket of S3 or of a server that speaks its protocol. Endpoint, region and keys come from the
environment (`AWS_*`) and boto3's own credential chain; none of them appears in an address, a log or an error.

Conditional writes (`put_bytes(if_absent=True)`) are atomic where the server honours `If-None-Match` (AWS, MinIO, Ceph,
moto). On one that ignores it, such as `rclone serve s3`, an existing object is still noticed, but of two writers in the
same instant both may succeed, and the later one stays.
"""

from __future__ import annotations

import builtins
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import boto3.session
import botocore.session
from boto3.exceptions import Boto3Error
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.loaders import Loader, create_loader

from swiftkv_platform.errors import ConflictError, InvalidInputError, ObjectNotFoundError, StorageError
from swiftkv_platform.storage.object_store import (
    CHUNK_SIZE,
    PROBE_KEY,
    TEMPORARY_PREFIX,
    ObjectInfo,
    join_key,
    validate_key,
    validate_prefix,
)
from swiftkv_platform.storage.s3_errors import describe, error_code, is_missing, retries_made

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef

_PATIENT_ATTEMPTS = 7
"""Tries per request with pauses between them of 0..1, 0..2, ... 0..32 s: 32 s on average."""

_IMPATIENT_ATTEMPTS = 3
"""1.5 s on average."""

_CONNECTIONS = 32
_PARALLEL_PARTS = TransferConfig(max_concurrency=4)
"""Parts of one large file that travel at the same time."""

_STREAM_ATTEMPTS = 5
"""Times in a row that a download may break without having brought a chunk."""

_DELETE_BATCH = 1000
"""Keys per DeleteObjects request, the protocol's maximum."""


class S3ObjectStore:
    """Objects below `prefix` of a bucket. Thread-safe; do not share it between processes."""

    def __init__(self, bucket: str, prefix: str = "", *, patient: bool = True) -> None:
        self._bucket = bucket
        self._prefix = validate_prefix(prefix)
        self._client = _client(attempts=_PATIENT_ATTEMPTS if patient else _IMPATIENT_ATTEMPTS, timeout_s=60)

    @property
    def uri(self) -> str:
        return f"s3://{self._bucket}/{self._prefix}".removesuffix("/")

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        if not if_absent:
            with self._errors("write", key):
                self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=data)
            return
        if self.head(key) is not None:
            raise self._exists(key)
        with self._errors("write", key):
            try:
                self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=data, IfNoneMatch="*")
            except ClientError as error:
                if error_code(error) not in {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}:
                    raise
                # The first try may have arrived although its answer did not: then the object is our own.
                if not (retries_made(error) and self.get_bytes(key) == data):
                    raise self._exists(key) from error

    def get_bytes(self, key: str) -> bytes:
        return b"".join(self.stream(key))

    def head(self, key: str) -> ObjectInfo | None:
        with self._errors("inspect", key):
            try:
                answer = self._client.head_object(Bucket=self._bucket, Key=self._key(key))
            except ClientError as error:
                if is_missing(error):
                    return None
                raise
            return ObjectInfo(key, answer["ContentLength"])

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        directory = self._directory(prefix)
        start = self._key(start_after) if start_after is not None else directory
        with self._errors("list", prefix):
            paginator = self._client.get_paginator("list_objects_v2")
            for page in paginator.paginate(Bucket=self._bucket, Prefix=directory, StartAfter=start):
                for entry in page.get("Contents", ()):
                    # A key that ends in a slash is the directory marker of some other tool.
                    if entry["Key"] > start and not entry["Key"].endswith("/"):
                        yield ObjectInfo(self._relative(entry["Key"]), entry["Size"])

    def list_directories(self, prefix: str) -> builtins.list[str]:
        directory = self._directory(prefix)
        names: set[str] = set()
        with self._errors("list", prefix):
            paginator = self._client.get_paginator("list_objects_v2")
            for page in paginator.paginate(Bucket=self._bucket, Prefix=directory, Delimiter="/"):
                names.update(entry["Prefix"][len(directory) : -1] for entry in page.get("CommonPrefixes", ()))
        return sorted(names)

    def upload_file(self, path: Path, key: str) -> None:
        with self._errors("upload", key), path.open("rb") as file:
            self._client.upload_fileobj(file, self._bucket, self._key(key), Config=_PARALLEL_PARTS)

    def download_file(self, key: str, path: Path) -> None:
        with self._errors("download", key):
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(prefix=TEMPORARY_PREFIX, dir=path.parent, delete=False) as file:
                temporary = Path(file.name)
                try:
                    file.writelines(self.stream(key))
                    file.close()
                    temporary.chmod(0o644)
                    temporary.replace(path)
                finally:
                    temporary.unlink(missing_ok=True)

    def stream(
        self, key: str, chunk_size: int = CHUNK_SIZE, *, start: int = 0, stop: int | None = None
    ) -> Iterator[bytes]:
        """A connection that breaks is opened again at the next byte of the same version of the object."""
        if (start or stop is not None) and (info := self.head(key)) is not None:
            stop = info.size if stop is None else min(stop, info.size)
            if start >= stop:
                return  # a range must begin within the object
        received, failures = start, 0
        version: str | None = None
        with self._errors("read", key):
            while True:
                answer = self._open(key, received, stop)
                version = version or answer["ETag"]
                # Checked here and not by If-Match, which some servers ignore.
                if answer["ETag"] != version:
                    raise StorageError(f"object {key!r} in {self.uri} was replaced while it was read; read it again")
                end = received + answer["ContentLength"]
                try:
                    for chunk in answer["Body"].iter_chunks(chunk_size):
                        received, failures = received + len(chunk), 0
                        yield chunk
                    return
                except BotoCoreError:
                    failures += 1
                    if received == end:
                        return
                    if failures == _STREAM_ATTEMPTS:
                        raise

    def _open(self, key: str, start: int, stop: int | None) -> GetObjectOutputTypeDef:
        if not start and stop is None:  # an empty object has no byte 0 to start a range at
            return self._client.get_object(Bucket=self._bucket, Key=self._key(key))
        end = "" if stop is None else stop - 1
        return self._client.get_object(Bucket=self._bucket, Key=self._key(key), Range=f"bytes={start}-{end}")

    def delete(self, key: str) -> None:
        with self._errors("delete", key):
            self._client.delete_object(Bucket=self._bucket, Key=self._key(key))

    def delete_many(self, keys: builtins.list[str]) -> None:
        for start in range(0, len(keys), _DELETE_BATCH):
            batch = keys[start : start + _DELETE_BATCH]
            with self._errors("delete", batch[0]):
                answer = self._client.delete_objects(
                    Bucket=self._bucket, Delete={"Objects": [{"Key": self._key(key)} for key in batch], "Quiet": True}
                )
            for failed in answer.get("Errors", ()):
                raise StorageError(f"cannot delete {failed.get('Key')!r} in {self.uri}: {failed.get('Code')}")

    def delete_prefix(self, prefix: str) -> None:
        if not validate_prefix(prefix):
            raise InvalidInputError("delete_prefix needs a prefix that is not empty", field="prefix", value=prefix)
        self.delete_many([info.key for info in self.list(prefix)])

    def presigned_url(self, key: str, expires_s: int) -> str | None:
        with self._errors("presign", key):
            return self._client.generate_presigned_url(
                "get_object", Params={"Bucket": self._bucket, "Key": self._key(key)}, ExpiresIn=expires_s
            )

    def ping(self) -> None:
        name = self._key(PROBE_KEY)
        with self._errors("use", PROBE_KEY):
            self._probe.put_object(Bucket=self._bucket, Key=name, Body=b"ok")
            self._probe.get_object(Bucket=self._bucket, Key=name)["Body"].read()
            self._probe.delete_object(Bucket=self._bucket, Key=name)

    @cached_property
    def _probe(self) -> S3Client:
        """A client that says at once that the server is away."""
        return _client(attempts=1, timeout_s=5)

    def _key(self, key: str) -> str:
        return join_key(self._prefix, validate_key(key))

    def _directory(self, prefix: str) -> str:
        """The bucket's own prefix of everything below `prefix`: empty, or with a trailing slash."""
        below = validate_prefix(prefix)
        directory = join_key(self._prefix, below) if below else self._prefix
        return f"{directory}/" if directory else ""

    def _relative(self, name: str) -> str:
        return name[len(self._prefix) + 1 :] if self._prefix else name

    def _exists(self, key: str) -> ConflictError:
        return ConflictError(f"object {key!r} exists already in {self.uri}", field="key", value=key)

    @contextmanager
    def _errors(self, action: str, key: str) -> Iterator[None]:
        try:
            yield
        except (BotoCoreError, ClientError, Boto3Error, OSError) as error:
            if isinstance(error, ClientError) and is_missing(error):
                raise ObjectNotFoundError(
                    f"there is no object {key!r} in {self.uri}", field="key", value=key
                ) from error
            why = describe(error, bucket=self._bucket)
            raise StorageError(f"cannot {action} {key!r} in {self.uri}: {why}", field="key", value=key) from error


def _client(*, attempts: int, timeout_s: int) -> S3Client:
    """A client of its own session, since boto3's default session is not thread-safe.

    Retries are those of boto3's "legacy" mode: in "standard" the pauses add up to less than a second, and after some 35
    failures nothing is retried until something succeeds, so that a few parallel uploads end at any outage of the
    server. Checksums are sent only where the protocol requires them: other servers do not know boto3's trailing ones.
    """
    endpoint = _endpoint()
    core = botocore.session.get_session()
    core.register_component("data_loader", _api_descriptions())
    session = boto3.session.Session(botocore_session=core)
    try:
        return session.client(
            "s3",
            region_name=os.environ.get("AWS_REGION") or session.region_name or "us-east-1",
            config=Config(
                signature_version="s3v4",
                retries={"mode": "legacy", "total_max_attempts": attempts},
                s3={"addressing_style": "path" if endpoint else "auto"},
                connect_timeout=min(timeout_s, 10),
                read_timeout=timeout_s,
                max_pool_connections=_CONNECTIONS,
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
    except (ValueError, BotoCoreError) as error:
        raise StorageError(f"cannot set up an S3 client: {error}") from error


@cache
def _api_descriptions() -> Loader:
    """boto3's description of S3; parsing it takes most of the time of setting up a client."""
    return create_loader()


def _endpoint() -> str | None:
    """`AWS_ENDPOINT_URL` or its S3-only form; boto3 reads them by itself. Raises `InvalidInputError` if malformed."""
    name = "AWS_ENDPOINT_URL_S3" if os.environ.get("AWS_ENDPOINT_URL_S3") else "AWS_ENDPOINT_URL"
    endpoint = os.environ.get(name)
    if not endpoint:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.username is not None:
        raise InvalidInputError(
            f"{name} must be http://host:port or https://host:port, without credentials",
            field=name,
            value=parts.hostname,
        )
    return endpoint
