"""Clients of S3, Google Cloud Storage and Azure, and error messages that reveal no key, secret or signed URL.

Endpoint, region and credentials come from the environment (`AWS_*`, `GOOGLE_*`, `AZURE_*`). Profiles and logins of
`~/.aws` are read by boto3 if it is installed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

from obstore.exceptions import BaseError
from obstore.store import AzureStore, GCSStore, S3Store

from swiftkv_platform.errors import InvalidInputError, StorageError

if TYPE_CHECKING:
    from obstore.store import S3Credential

_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|container does not exist")
_NO_CREDENTIALS = re.compile(r"http://(169\.254\.|metadata)|session\.get_credentials")
"""Metadata servers, which are asked for credentials if the environment has none, and boto3's message in that case."""
_REFUSED = {"401", "403", "AccessDenied", "ExpiredToken", "InvalidAccessKeyId", "InvalidToken", "SignatureDoesNotMatch"}


class Service(NamedTuple):
    """A client class, and the environment variables with its credentials and endpoint, for error messages."""

    client: Any
    credentials: str
    endpoint: str


SERVICES = {
    "s3": Service(S3Store, "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL"),
    "gs": Service(GCSStore, "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_BASE_URL"),
    "az": Service(AzureStore, "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ENDPOINT"),
}
"""Services by scheme of an address."""


def open_bucket(
    scheme: str,
    bucket: str,
    prefix: str,
    *,
    retries: int,
    timeout_s: int = 60,
    headers: Mapping[str, str] | None = None,
) -> Any:
    """Return a client of the objects below `prefix`. Does no I/O.

    Raises:
        InvalidInputError: the endpoint is not a URL.
        StorageError: the environment lacks a setting that the client needs.
    """
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
        more = _s3_options(bucket, options) if scheme == "s3" else {}
        return service.client(bucket, prefix=prefix or None, client_options=options, retry_config=retry, **more)
    except (BaseError, OSError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise StorageError(f"cannot open {scheme}://{bucket} ({why}); set {service.credentials}") from error


def _s3_options(bucket: str, client_options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that boto3 takes from the environment and obstore does not."""
    options: dict[str, Any] = {}
    if endpoint := _s3_endpoint():
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

        options["credential_provider"] = credentials  # called when a request is to be signed
    return options


def _s3_endpoint() -> str | None:
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


def has_answer(error: Exception) -> bool:
    """Whether the failed request got an answer from the server."""
    return _STATUS.search(str(error)) is not None


def was_repeated(error: Exception) -> bool:
    """Whether the client sent the request more than once."""
    return " retries, max_retries" in str(error)


def is_missing(error: Exception) -> bool:
    """Whether the object is missing, rather than the bucket. (A HEAD request cannot tell them apart.)"""
    return isinstance(error, FileNotFoundError) and error.errno is None and not _NO_BUCKET.search(str(error))


def is_refused(error: Exception) -> bool:
    """The server has answered that the bucket is not there, or not for these credentials."""
    text = str(error)
    found = _CODE.search(text)
    return bool(_NO_BUCKET.search(text) or (found and found[1] in _REFUSED) or "status code: 403" in text)


def describe(error: Exception, scheme: str, bucket: str) -> str:
    """Return why a request failed and what to do about it."""
    service, text = SERVICES[scheme], str(error)
    found = _CODE.search(text) or _STATUS.search(text)
    code = found.group(1) if found else None
    if isinstance(error, OSError) and error.errno is not None:  # of this machine's file
        return f"{type(error).__name__}: {error}"
    if _NO_BUCKET.search(text):
        return f"bucket {bucket!r} does not exist; create it, or use another one"
    if _NO_CREDENTIALS.search(text):
        return f"no complete credentials found; set {service.credentials}"
    if code in _REFUSED or "status code: 403" in text:
        return f"the server refuses the credentials ({code}); check {service.credentials}"
    if code:
        return f"the server answered {code}"
    if "configured region" in text:
        return f"bucket {bucket!r} is in another region; set AWS_REGION"
    if "HTTP error" in text:
        return f"the endpoint does not answer; check {service.endpoint} and the network"
    return text.partition("\n")[0]
