"""Callers by what they show: a key of the key file, or a token of an issuer. Knows no HTTP route."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from swiftkv_platform.errors import UnauthenticatedError
from swiftkv_platform.security.keys import KEY_PREFIX, KeyRing
from swiftkv_platform.security.principals import Principal

if TYPE_CHECKING:
    from swiftkv_platform.security.tokens import TokenVerifier


class Credentials:
    """Keys, tokens, or both."""

    def __init__(self, key_ring: KeyRing | None, tokens: TokenVerifier | None) -> None:
        self._key_ring = key_ring
        self._tokens = tokens

    @property
    def operator_files(self) -> Mapping[str, Callable[[], bool]]:
        """Whether the newest version of each file holds, by name."""
        files: dict[str, Callable[[], bool]] = {}
        key_ring, tokens = self._key_ring, self._tokens
        if key_ring is not None:
            files["keys"] = lambda: key_ring.is_usable
        if tokens is not None:
            files["oidc"] = lambda: tokens.is_usable
        return files

    def authenticate(self, authorization: str | None) -> Principal:
        """The caller. One with a token may wait for its issuer. Raises `UnauthenticatedError`."""
        if self._tokens is not None and shows_token(authorization):
            token = _bearer(authorization)
            if self._key_ring is None or self._key_ring.find(token) is None:
                return self._tokens.authenticate(token)
        if self._key_ring is None:
            raise UnauthenticatedError(
                "send `Authorization: Bearer <token>`, a token of a trusted issuer", field="Authorization"
            )
        return self._key_ring.authenticate(authorization)


def open_credentials(
    api_keys_file: Path | None, oidc_file: Path | None, *, clock: Callable[[], float] = time.time
) -> Credentials | None:
    """Credentials by the operator's files; None where there are none, and all callers are let in.

    Raises `InvalidInputError` for a file that cannot be used.
    """
    if api_keys_file is None and oidc_file is None:
        return None
    tokens = None
    if oidc_file is not None:
        from swiftkv_platform.security.tokens import TokenVerifier  # key files do without its libraries

        tokens = TokenVerifier(oidc_file)
    return Credentials(None if api_keys_file is None else KeyRing(api_keys_file, clock=clock), tokens)


def shows_token(authorization: str | None) -> bool:
    """Whether a header has the form of a token, whose issuer may have to be asked."""
    token = _bearer(authorization)
    return token.count(".") == 2 and not token.startswith(KEY_PREFIX)


def _bearer(authorization: str | None) -> str:
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
