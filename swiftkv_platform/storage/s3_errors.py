"""Meaning of boto3's errors, in words that name no key, secret or signed URL. Does no I/O."""

from __future__ import annotations

from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
)
from botocore.exceptions import (
    ConnectionError as S3ConnectionError,
)

_MISSING = {"NoSuchKey", "NotFound", "404"}
_REFUSED = {
    "AccessDenied",
    "403",
    "Forbidden",
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "ExpiredToken",
    "InvalidToken",
}
_BROKEN_CONNECTION = (S3ConnectionError, ConnectionClosedError, HTTPClientError)


def error_code(error: ClientError) -> str:
    return error.response.get("Error", {}).get("Code", "unknown")


def is_missing(error: ClientError) -> bool:
    """The object, rather than the bucket, is not there. (HEAD has no body: there a missing bucket looks the same.)"""
    return error_code(error) in _MISSING


def retries_made(error: ClientError) -> int:
    return error.response.get("ResponseMetadata", {}).get("RetryAttempts", 0)


def describe(error: Exception, *, bucket: str) -> str:
    """Return the reason that a request failed and what would do."""
    if isinstance(error, (NoCredentialsError, PartialCredentialsError)):
        return "no complete S3 credentials found; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
    if isinstance(error, ClientError):
        code = error_code(error)
        if code == "NoSuchBucket":
            return f"bucket {bucket!r} does not exist; create it, or name another one"
        if code in _REFUSED:
            return f"the server refuses the credentials ({code}); check AWS_ACCESS_KEY_ID and what it may do"
        return f"the server answered {code} to {error.operation_name}"
    if isinstance(error, _BROKEN_CONNECTION):
        return f"the endpoint does not answer ({type(error).__name__}); check AWS_ENDPOINT_URL and the network"
    if isinstance(error, OSError):
        return f"{type(error).__name__}: {error}"
    return type(error).__name__
