"""Authentication of callers by an API key, or by a token of an OIDC issuer. Independent of HTTP routes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from swiftkv_platform.errors import UnauthenticatedError
from swiftkv_platform.security.keys import KEY_PREFIX, KeyRing, parse_bearer_token
from swiftkv_platform.security.principals import Principal

if TYPE_CHECKING:
    from swiftkv_platform.security.tokens import TokenVerifier


@dataclass(frozen=True)
class Credentials:
    """Accepted credentials: API keys, OIDC tokens, or both."""

    key_ring: KeyRing | None
    tokens: TokenVerifier | None

    @property
    def operator_files(self) -> Mapping[str, Callable[[], bool]]:
        """For each file by name, a function that returns whether its newest version is in use."""
        files = {"keys": self.key_ring, "oidc": self.tokens}
        return {name: partial(getattr, file, "is_usable") for name, file in files.items() if file is not None}

    def authenticate(self, authorization: str | None) -> Principal:
        """Return the caller. May wait for a token's issuer. Raises `UnauthenticatedError`."""
        if self.tokens is not None and has_token(authorization):
            token = parse_bearer_token(authorization)
            if self.key_ring is None or self.key_ring.find(token) is None:
                return self.tokens.authenticate(token)
        if self.key_ring is None:
            raise UnauthenticatedError(
                "send `Authorization: Bearer <token>`, a token of a trusted issuer", field="Authorization"
            )
        return self.key_ring.authenticate(authorization)


def open_credentials(
    api_keys_file: Path | None, oidc_file: Path | None, *, clock: Callable[[], float] = time.time
) -> Credentials | None:
    """Open the operator's files. Returns None without files: then no authentication is required.

    Raises `InvalidInputError` for an invalid file.
    """
    if api_keys_file is None and oidc_file is None:
        return None
    tokens = None
    if oidc_file is not None:
        from swiftkv_platform.security.tokens import TokenVerifier  # imports libraries that only tokens need

        tokens = TokenVerifier(oidc_file)
    return Credentials(None if api_keys_file is None else KeyRing(api_keys_file, clock=clock), tokens)


def has_token(authorization: str | None) -> bool:
    """Whether a header contains a JSON Web Token rather than an API key."""
    token = parse_bearer_token(authorization)
    return token.count(".") == 2 and not token.startswith(KEY_PREFIX)
