"""Clients of the services that keep buckets, and their errors in words that name no key, secret or signed URL.

Endpoint, region and credentials come from the environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError
from obstore.store import AzureStore, GCSStore, S3Store

from swiftkv_platform.errors import InvalidInputError, StorageError

_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound"}
_REFUSED = {"AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"}
_METADATA_SERVERS = ("http://169.254.169.254", "http://metadata")
"""Asked for credentials when the environment has none."""


class _Service(NamedTuple):
    client: Any
    credentials: str
    endpoint: str


_SERVICES = {
    "s3": _Service(S3Store, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"),
    "gs": _Service(GCSStore, "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_BASE_URL"),
    "az": _Service(AzureStore, "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ENDPOINT"),
}
"""Clients and the variables that they read, by the scheme of an address."""


def open_bucket(
    scheme: str,
    bucket: str,
    prefix: str,
    *,
    retries: int,
    timeout_s: int = 60,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """A client of what lies below `prefix`.

    Raises:
        InvalidInputError: an endpoint that is no URL.
        StorageError: the environment lacks what the client needs.
    """
    options = {
        "allow_http": True,  # where the endpoint says so
        "connect_timeout": timedelta(seconds=min(timeout_s, 10)),
        "read_timeout": timedelta(seconds=timeout_s),
        "timeout": timedelta(days=1),  # a large object takes as long as it takes
        "default_headers": dict(headers or {}),
    }
    pauses = {"init_backoff": timedelta(seconds=0.5), "max_backoff": timedelta(seconds=15), "base": 3}
    retry = {"max_retries": retries, "retry_timeout": timedelta(hours=1), "backoff": pauses}
    service = _SERVICES[scheme]
    more = _s3_options(bucket, options) if scheme == "s3" else {}
    try:
        return service.client(bucket, prefix=prefix or None, client_options=options, retry_config=retry, **more)
    except (BaseError, ValueError) as error:
        raise StorageError(
            f"cannot open {scheme}://{bucket}: {_first_line(error)}; see {service.credentials}"
        ) from error


def _s3_options(bucket: str, client_options: dict[str, Any]) -> dict[str, Any]:
    """What boto3 would do of itself."""
    options: dict[str, Any] = {}
    if bundle := os.environ.get("AWS_CA_BUNDLE"):
        client_options["root_certificate"] = Path(bundle).read_bytes()
    if endpoint := _s3_endpoint():
        options["aws_endpoint_url_s3"] = endpoint
    elif "." not in bucket:  # a dot does not fit the certificate
        options["virtual_hosted_style_request"] = True
    if not os.environ.get("AWS_ACCESS_KEY_ID"):
        with suppress(ModuleNotFoundError, ValueError):  # boto3 is not there, or finds none
            from obstore.auth.boto3 import Boto3CredentialProvider

            options["credential_provider"] = Boto3CredentialProvider(ttl=timedelta(minutes=10))
    return options


def _s3_endpoint() -> str | None:
    """`AWS_ENDPOINT_URL` or its S3-only form. Raises `InvalidInputError` if malformed."""
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


def has_answer(error: Exception) -> bool:
    """Whether the server has answered the request that failed."""
    return _STATUS.search(str(error)) is not None


def was_repeated(error: Exception) -> bool:
    """Whether the client has sent the request more than once."""
    return " retries, max_retries" in str(error)


def is_missing(error: Exception) -> bool:
    """The object, rather than the bucket, is not there. (HEAD has no body: there a missing bucket looks the same.)"""
    return isinstance(error, FileNotFoundError) and error.errno is None and _found(_CODE, error) not in _NO_BUCKET


def describe(error: Exception, scheme: str, bucket: str) -> str:
    """Return the reason that a request failed and what to do about it."""
    service, text = _SERVICES[scheme], str(error)
    code, status = _found(_CODE, error), _found(_STATUS, error)
    if isinstance(error, OSError) and error.errno is not None:  # of this machine's file
        return f"{type(error).__name__}: {error}"
    if code in _NO_BUCKET:
        return f"bucket {bucket!r} does not exist; create it, or name another one"
    if any(server in text for server in _METADATA_SERVERS):
        return f"no complete credentials found; set {service.credentials}"
    if code in _REFUSED or isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in {"401", "403"}:
        return (
            f"the server refuses the credentials ({code or status}); check {service.credentials}, and what they may do"
        )
    if code or status:
        return f"the server answered {code or status}"
    if "HTTP error" in text:
        return f"the endpoint does not answer; check {service.endpoint} and the network"
    return _first_line(error)  # such as a redirect: "this normally indicates an incorrectly configured region"


def _found(pattern: re.Pattern[str], error: Exception) -> str | None:
    match = pattern.search(str(error))
    return match.group(1) if match else None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
