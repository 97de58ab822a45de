"""An object store in a bucket of S3, Google Cloud Storage or Azure, or of a compatible server.

Endpoint, region and credentials come from the environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`), and with boto3 from
`~/.aws`. Error messages contain no key, secret or signed URL.

Conditional writes (`put_bytes(if_absent=True)`) are atomic if the server supports `If-None-Match` (the three clouds,
MinIO, Ceph, SeaweedFS). Other servers, such as `rclone serve s3`, detect existing objects, but of two concurrent
writers both may succeed, and the later object stays.
"""

from __future__ import annotations

import builtins
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, InvalidPathError
from obstore.store import AzureStore, GCSStore, S3Store

from swiftkv_platform.errors import BucketError, ConflictError, InvalidInputError, ObjectNotFoundError, StorageError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.storage.object_store import (
    CHUNK_SIZE,
    PROBE_KEY,
    ObjectInfo,
    open_temporary,
    validate_object_key,
    validate_prefix,
)

if TYPE_CHECKING:
    from obstore.store import S3Credential

_ERROR_CODE = re.compile(r"<Code>(\w+)</Code>")
_HTTP_STATUS = re.compile(r"status code: (\d{3})")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|container does not exist")
_MISSING_CREDENTIALS_ERROR = re.compile(r"http://(169\.254\.|metadata)|session\.get_credentials")
"""Errors without credentials: requests to metadata servers, and boto3's message."""
_REFUSED_CODES = {
    "401",
    "403",
    "AccessDenied",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
}


class Service(NamedTuple):
    """A client class, and its environment variables for error messages."""

    client: Any
    credentials: str
    endpoint: str


SERVICES = {
    "s3": Service(S3Store, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"),
    "gs": Service(GCSStore, "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_BASE_URL"),
    "az": Service(AzureStore, "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ENDPOINT"),
}
"""Services by URI scheme."""


def make_bucket_client(
    scheme: str,
    bucket: str,
    prefix: str,
    *,
    retries: int,
    timeout_s: int = 60,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Return a client for the objects below `prefix`. No I/O. Raises `InvalidInputError` for an invalid endpoint, and
    `StorageError` for missing settings."""
    options = {
        "allow_http": True,  # if the endpoint is http://
        "connect_timeout": timedelta(seconds=min(timeout_s, 10)),
        "read_timeout": timedelta(seconds=timeout_s),
        "timeout": timedelta(days=1),  # a large object may take any time
        "default_headers": dict(headers or {}),
    }
    pauses = {"init_backoff": timedelta(seconds=0.5), "max_backoff": timedelta(seconds=6), "base": 3}
    retry = {"max_retries": retries, "retry_timeout": timedelta(hours=1), "backoff": pauses}
    service = SERVICES[scheme]
    try:
        more = _make_s3_options(bucket, options) if scheme == "s3" else {}
        return service.client(bucket, prefix=prefix or None, client_options=options, retry_config=retry, **more)
    except (BaseError, OSError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise StorageError(f"cannot open {scheme}://{bucket} ({why}); set {service.credentials}") from error


def _make_s3_options(bucket: str, client_options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that boto3 reads from the environment and obstore does not."""
    options: dict[str, Any] = {}
    if endpoint := _read_s3_endpoint():
        options["aws_endpoint_url_s3"] = endpoint
    elif "." not in bucket:  # the server's certificate does not cover names with dots
        options["virtual_hosted_style_request"] = True
    if bundle := os.environ.get("AWS_CA_BUNDLE"):
        client_options["root_certificate"] = Path(bundle).read_bytes()
    if not os.environ.get("AWS_ACCESS_KEY_ID") and find_spec("boto3"):  # without boto3: roles, but no profiles
        from boto3.session import Session
        from obstore.auth.boto3 import Boto3CredentialProvider

        session = Session()
        options["region"] = os.environ.get("AWS_REGION") or session.region_name or "us-east-1"

        def credentials() -> S3Credential:
            return Boto3CredentialProvider(session, ttl=timedelta(minutes=10))()

        options["credential_provider"] = credentials  # called to sign requests
    return options


def _read_s3_endpoint() -> str | None:
    """Return `AWS_ENDPOINT_URL_S3` or `AWS_ENDPOINT_URL`, None if unset. Raises `InvalidInputError` if malformed."""
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


def has_response(error: Exception) -> bool:
    """Whether the server responded to the failed request."""
    return _HTTP_STATUS.search(str(error)) is not None


def was_retried(error: Exception) -> bool:
    """Whether the client sent the request more than once."""
    return " retries, max_retries" in str(error)


def is_missing_object_error(error: Exception) -> bool:
    """Whether the object is missing, rather than the bucket (which HEAD requests cannot distinguish)."""
    return isinstance(error, FileNotFoundError) and error.errno is None and not _NO_BUCKET.search(str(error))


def is_bucket_error(error: Exception) -> bool:
    """Whether the bucket is missing, or access is denied."""
    text = str(error)
    found = _ERROR_CODE.search(text)
    return bool(_NO_BUCKET.search(text) or (found and found[1] in _REFUSED_CODES) or "status code: 403" in text)


def describe_error(error: Exception, scheme: str, bucket: str) -> str:
    """Return why a request failed and what to do about it."""
    service, text = SERVICES[scheme], str(error)
    found = _ERROR_CODE.search(text) or _HTTP_STATUS.search(text)
    code = found.group(1) if found else None
    if isinstance(error, OSError) and error.errno is not None:  # of this machine's file
        return f"{type(error).__name__}: {error}"
    if _NO_BUCKET.search(text):
        return f"bucket {bucket!r} does not exist; create it, or use another one"
    if _MISSING_CREDENTIALS_ERROR.search(text):
        return f"no complete credentials found; set {service.credentials}"
    if code in _REFUSED_CODES or "status code: 403" in text:
        return f"the server refuses the credentials ({code}); check {service.credentials}"
    if code:
        return f"the server returned {code}"
    if "configured region" in text:
        return f"bucket {bucket!r} is in another region; set AWS_REGION"
    if "HTTP error" in text:
        return f"the endpoint is unavailable; check {service.endpoint} and the network"
    return text.partition("\n")[0]


_PATIENT_RETRIES, _IMPATIENT_RETRIES = 10, 2
"""About 30 seconds, and 1 second, of retries."""
_PART_SIZE, _MAX_PARTS = 8 << 20, 10_000
"""Min bytes per part of a multipart upload, and S3's max parts; four are uploaded concurrently."""
_KEYS_PER_PAGE = 1000
"""Keys in one page of S3's list."""


class BucketStore:
    """Objects below `prefix` of a bucket. Thread-safe, but not usable after a fork."""

    def __init__(self, scheme: str, bucket: str, prefix: str = "", *, patient: bool = True) -> None:
        self._location = scheme, bucket, validate_prefix(prefix)
        self._retries = _PATIENT_RETRIES if patient else _IMPATIENT_RETRIES
        self._client = make_bucket_client(*self._location, retries=self._retries)
        self._may_sign = True

    @property
    def uri(self) -> str:
        scheme, bucket, prefix = self._location
        return f"{scheme}://{bucket}/{prefix}".removesuffix("/")

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        validate_object_key(key)
        with self._translate_errors("write", key):
            if if_absent:
                self._create(key, data)
            else:
                self._client.put(key, data)

    def _create(self, key: str, data: bytes) -> None:
        """Write an object unless it exists. After a failed request, an equal object counts as written by it."""
        if self.head(key) is not None:
            raise self._make_exists_error(key)
        for again in (False, True):
            try:
                self._client.put(key, data, mode="create")
                return
            except AlreadyExistsError as error:
                if (again or was_retried(error)) and self.get_bytes(key) == data:
                    return
                raise self._make_exists_error(key) from error
            except BaseError as error:
                # The client does not retry conditional writes after connection errors.
                if again or has_response(error) or was_retried(error):
                    raise

    def get_bytes(self, key: str) -> bytes:
        return b"".join(self.stream(key))

    def head(self, key: str) -> ObjectInfo | None:
        try:
            return ObjectInfo(key, self._head(key)["size"])
        except ObjectNotFoundError:
            return None

    def _head(self, key: str) -> Any:
        with self._translate_errors("inspect", key):
            return self._client.head(validate_object_key(key))

    def list(self, prefix: str, *, start_after: str | None = None) -> Iterator[ObjectInfo]:
        directory = validate_prefix(prefix)
        with self._translate_errors("list", prefix):
            for page in self._client.list(directory or None, offset=start_after, chunk_size=_KEYS_PER_PAGE):
                for entry in page:
                    info = ObjectInfo(entry["path"], entry["size"])
                    if (start_after is None or info.key > start_after) and not self._is_directory(info):
                        yield info

    def _is_directory(self, info: ObjectInfo) -> bool:
        """Whether the object is another tool's directory marker: its key ends with a slash, which obstore removes."""
        return info.size == 0 and (not info.key or self.head(info.key) is None)

    def list_directories(self, prefix: str) -> builtins.list[str]:
        directory = validate_prefix(prefix)
        with self._translate_errors("list", prefix):
            found = self._client.list_with_delimiter(directory or None)["common_prefixes"]
        return sorted(path.rpartition("/")[2] for path in found)

    def upload_file(self, path: Path, key: str) -> None:
        with self._translate_errors("upload", key):
            self._put(path, key, path.stat().st_size)

    def upload_chunks(self, pieces: Iterator[bytes], key: str, size: int) -> None:
        failure: list[BaseException] = []

        def record_failure() -> Iterator[bytes]:
            try:
                yield from pieces
            except BaseException as error:
                failure.append(error)
                raise

        with self._translate_errors("upload", key):
            try:
                self._put(record_failure(), key, size)
            except Exception:
                if failure:  # the client wraps it
                    raise failure[0] from None
                raise

    def free_bytes(self) -> int | None:
        return None

    def _put(self, content: Path | Iterator[bytes], key: str, size: int) -> None:
        part_size = max(_PART_SIZE, -(-size // _MAX_PARTS))
        self._client.put(validate_object_key(key), content, chunk_size=part_size, max_concurrency=4)

    def download_file(self, key: str, path: Path) -> None:
        with self._translate_errors("download", key), open_temporary(path) as temporary:
            with temporary.open("wb") as file:
                file.writelines(self.stream(key))
            temporary.replace(path)

    def stream(
        self, key: str, chunk_size: int = CHUNK_SIZE, *, start: int = 0, stop: int | None = None
    ) -> Iterator[bytes]:
        """Stream the object. After a connection error, continue at the next byte of the same version."""
        bounds: tuple[int, int] | None = None
        if start or stop is not None:
            size = self._head(key)["size"]
            bounds = start, size if stop is None else min(stop, size)
            if start >= bounds[1]:
                return  # servers refuse ranges beyond the end
        with self._translate_errors("read", key):
            for block in self._stream_blocks(key, chunk_size, bounds):
                yield from (block[at : at + chunk_size] for at in range(0, len(block), chunk_size))

    def _stream_blocks(self, key: str, size: int, bounds: tuple[int, int] | None) -> Iterator[bytes]:
        """Yield blocks of at least `size` bytes; the client continues after connection errors."""
        try:
            found = self._client.get(validate_object_key(key), options={"range": bounds} if bounds else {})
        except BaseError as error:
            if bounds is None or "non-partial" not in str(error):
                raise
            yield self._read_range_from_200_response(key, *bounds)
            return
        try:
            yield from found.stream(size)
        except BaseError as error:
            if self._head(key)["e_tag"] == found.meta["e_tag"]:
                raise
            raise StorageError(f"object {key!r} in {self.uri} was replaced while it was read; retry") from error

    def _read_range_from_200_response(self, key: str, start: int, stop: int) -> bytes:
        """Read a range from a server that returns it with status 200 (rclone, lakeFS), which obstore refuses."""
        # No retries by the client, which would resume at a wrong offset.
        client = make_bucket_client(*self._location, retries=0, headers={"Range": f"bytes={start}-{stop - 1}"})
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
        with self._translate_errors("delete", key):
            self._delete(validate_object_key(key))

    def delete_many(self, keys: builtins.list[str]) -> None:
        with self._translate_errors("delete", ", ".join(keys[:1])):
            try:
                self._client.delete([validate_object_key(key) for key in keys])
            except FileNotFoundError:  # a missing object may have stopped the deletion of others
                for key in keys:
                    self._delete(key)

    def _delete(self, key: str) -> None:
        try:
            self._client.delete(key)
        except FileNotFoundError as error:
            if not is_missing_object_error(error):
                raise

    def delete_prefix(self, prefix: str) -> None:
        if not validate_prefix(prefix):
            raise InvalidInputError("delete_prefix needs a prefix that is not empty", field="prefix", value=prefix)
        self.delete_many([info.key for info in self.list(prefix)])

    def create_presigned_url(self, key: str, expires_s: int) -> str | None:
        """Return a signed URL; None if the credentials cannot sign, which is remembered. Workload identities need a
        separate permission."""
        validate_object_key(key)
        if not self._may_sign:
            return None
        try:
            return obstore.sign(self._client, "GET", key, timedelta(seconds=expires_s))
        except BaseError as error:
            self._may_sign = not has_response(error)
            get_logger().warning(
                "cannot sign URLs; downloads pass through this process",
                reason=describe_error(error, *self._location[:2]),
            )
            return None

    def ping(self) -> None:
        client = make_bucket_client(*self._location, retries=0, timeout_s=5)
        with self._translate_errors("use", PROBE_KEY):
            client.put(PROBE_KEY, b"ok")
            client.get(PROBE_KEY).bytes()
            client.delete(PROBE_KEY)

    def _make_exists_error(self, key: str) -> ConflictError:
        return ConflictError(f"object {key!r} already exists in {self.uri}", field="key", value=key)

    @contextmanager
    def _translate_errors(self, action: str, key: str) -> Iterator[None]:
        try:
            yield
        except InvalidPathError as error:  # one invalid key fails the whole list
            why = str(error).partition("\n")[0]
            raise InvalidInputError(
                f"cannot {action} {key!r} in {self.uri}: {why}; keys must not contain empty, '.' and '..' "
                "segments: rename the object, or use other objects",
                field="key",
                value=key,
            ) from error
        except (BaseError, OSError) as error:
            if is_missing_object_error(error):
                raise ObjectNotFoundError(
                    f"there is no object {key!r} in {self.uri}", field="key", value=key
                ) from error
            why = describe_error(error, *self._location[:2])
            kind = BucketError if is_bucket_error(error) else StorageError
            raise kind(f"cannot {action} {key!r} in {self.uri}: {why}", field="key", value=key) from error
