"""URIs of object stores: directories and buckets. No I/O."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote, urlsplit

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.sources.names import BUCKET_NAME, BUCKET_NAME_RULE, find_key_fault
from swiftkv_platform.storage.object_store import LocalObjectStore, ObjectStore

_BUCKET_SCHEMES = {"s3", "gs", "az"}
_URI_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.-]*)://")


def open_store(uri: str, *, patient: bool = True) -> ObjectStore:
    """Return the store at `uri`: a directory, `file:///directory`, or `s3://`, `gs://` or `az://` with bucket and
    prefix. No I/O; `ping` checks whether the store is available.

    A patient store retries for about 30 seconds while its server is unavailable, as workers need. Otherwise it fails
    within seconds, as servers need.

    Raises `InvalidInputError` for any other address.
    """
    scheme = _URI_SCHEME.match(uri)
    name = scheme.group(1).lower() if scheme else "file"
    if name in _BUCKET_SCHEMES:
        from swiftkv_platform.storage.bucket_store import BucketStore

        bucket, prefix = _parse_bucket(uri)
        return BucketStore(name, bucket, prefix, patient=patient)
    if name == "file" and uri:
        return LocalObjectStore(_parse_file(uri) if scheme else Path(uri).expanduser())
    raise _make_error(uri, "its scheme is unknown" if uri else "it is empty")


def _parse_bucket(uri: str) -> tuple[str, str]:
    parts = urlsplit(uri)
    if parts.query or parts.fragment:
        raise _make_error(uri, "it has a query; set the endpoint by AWS_ENDPOINT_URL")
    if not BUCKET_NAME.fullmatch(parts.netloc):
        raise _make_error(uri, f"it names no bucket ({BUCKET_NAME_RULE})")
    prefix = parts.path.strip("/")
    fault = find_key_fault(prefix) if prefix else None
    if fault is not None:
        raise _make_error(uri, f"its prefix {fault}")
    return parts.netloc, prefix


def _parse_file(uri: str) -> Path:
    parts = urlsplit(uri)
    if parts.netloc not in {"", "localhost"} or not parts.path.startswith("/"):
        raise _make_error(uri, "a file URI has no host and an absolute path")
    return Path(unquote(parts.path))


def _make_error(uri: str, why: str) -> InvalidInputError:
    shown = re.sub(r"//[^/@]*@", "//", uri)
    return InvalidInputError(
        f"object store address {shown!r} is not valid: {why}; use a directory, file:///directory, "
        "s3://bucket/prefix, gs://bucket/prefix or az://container/prefix",
        field="storage_uri",
        value=shown,
    )
