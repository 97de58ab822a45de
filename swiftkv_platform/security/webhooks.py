"""Signatures of webhooks (standardwebhooks.com, version 1), for sender and receiver. No I/O.

A message is `POST`ed with the headers `webhook-id`, `webhook-timestamp` (Unix seconds) and `webhook-signature`: `v1,`
and the base64 of HMAC-SHA256 over `{id}.{timestamp}.{body}`. The timestamp is signed, so old messages are refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Mapping
from typing import Self

from swiftkv_platform.errors import InvalidInputError, UnauthenticatedError

ID_HEADER = "webhook-id"
TIMESTAMP_HEADER = "webhook-timestamp"
SIGNATURE_HEADER = "webhook-signature"
_SIGNATURE_VERSION = "v1"
_BASE64_PREFIX = "whsec_"
_MIN_SECRET_BYTES = 16


class Secret:
    """A signing secret, hidden in `repr`."""

    def __init__(self, value: bytes) -> None:
        self._value = value

    @classmethod
    def parse(cls, text: str, *, name: str) -> Self:
        """Parse a secret file: `whsec_` and base64, or plain text.

        Raises `InvalidInputError`, without the secret's value, if it is invalid or too short.
        """
        text = text.strip()
        try:
            value = (
                base64.b64decode(text.removeprefix(_BASE64_PREFIX), validate=True)
                if text.startswith(_BASE64_PREFIX)
                else None
            )
        except binascii.Error as error:
            raise InvalidInputError(
                f"secret {name!r} is not base64 after {_BASE64_PREFIX!r}", field="secret_ref"
            ) from error
        value = text.encode() if value is None else value
        if len(value) < _MIN_SECRET_BYTES:
            raise InvalidInputError(
                f"secret {name!r} has {len(value)} bytes; use {_MIN_SECRET_BYTES} or more",
                field="secret_ref",
                value=name,
            )
        return cls(value)

    def __repr__(self) -> str:
        return "Secret(...)"

    def sign(self, message_id: str, timestamp: int, body: bytes) -> str:
        """Return the `webhook-signature` header of a message."""
        signed = f"{message_id}.{timestamp}.".encode() + body
        digest = hmac.new(self._value, signed, hashlib.sha256).digest()
        return f"{_SIGNATURE_VERSION},{base64.b64encode(digest).decode()}"


def verify(headers: Mapping[str, str], body: bytes, secret: str, *, now: float, tolerance_s: float = 300.0) -> None:
    """Raise `UnauthenticatedError` unless `body` was signed with `secret` within `tolerance_s` seconds of `now`.
    `headers`: of the request, with lower-case names. `body`: raw bytes as received."""
    missing = [name for name in (ID_HEADER, TIMESTAMP_HEADER, SIGNATURE_HEADER) if name not in headers]
    if missing:
        raise UnauthenticatedError(f"header {missing[0]} is missing", field=missing[0])
    stamp = headers[TIMESTAMP_HEADER]
    if not stamp.isdecimal() or len(stamp) > 15 or abs(now - int(stamp)) > tolerance_s:
        raise UnauthenticatedError(
            f"header {TIMESTAMP_HEADER} differs from this machine's clock by more than {tolerance_s:g} s",
            field=TIMESTAMP_HEADER,
            value=stamp,
        )
    expected = Secret.parse(secret, name="secret").sign(headers[ID_HEADER], int(stamp), body)
    given = headers[SIGNATURE_HEADER].split(" ")
    if not any(hmac.compare_digest(expected, each) for each in given):
        raise UnauthenticatedError("the signature does not match the body", field=SIGNATURE_HEADER)
