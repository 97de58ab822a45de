"""Verification of OpenID Connect bearer tokens: signature, claims and the caller they name. Knows no HTTP route.

The text of a refusal depends only on its cause and the issuer, and repeats nothing of the token.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt

from swiftkv_platform.errors import UnauthenticatedError
from swiftkv_platform.security.issuers import Issuer, parse_issuers
from swiftkv_platform.security.operator_files import OperatorFile
from swiftkv_platform.security.principals import LATEST, Principal
from swiftkv_platform.security.signing_keys import Clock, SigningKeys

_LONGEST = 8192
"""Most characters of a token."""
_LONGEST_NAME = 200
"""Most characters of a caller's name, which is `{issuer}:{subject}`."""
_MALFORMED = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)


class TokenHolder(Principal):
    """A caller authenticated by a token."""

    @property
    def credential(self) -> str:
        return self.name


@dataclass(frozen=True)
class _Trusted:
    issuer: Issuer
    keys: SigningKeys


class TokenVerifier:
    """Verifies tokens of the issuers listed in the last good version of a file.

    Raises `InvalidInputError` if the file cannot be used when it is opened. No issuer is contacted before its first
    token.

    Args:
        clock: monotonic seconds, for the age of keys.
    """

    def __init__(self, path: Path, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._keys: dict[tuple[Any, ...], SigningKeys] = {}
        self._file = OperatorFile(
            path, self._parse, field="oidc_file", hint="it must hold a list `issuers` (docs/operations.md)"
        )

    @property
    def is_usable(self) -> bool:
        """Whether the file's newest version is the one in use."""
        return self._file.is_usable

    def authenticate(self, token: str) -> Principal:
        """Return the caller that a token names. May wait seconds for its issuer. Raises `UnauthenticatedError`."""
        if len(token) > _LONGEST:
            raise _refusal(f"the token has more than {_LONGEST} characters")
        try:
            header = jwt.get_unverified_header(token)
            issuer_named = jwt.decode(token, options={"verify_signature": False}).get("iss")
        except _MALFORMED as error:
            raise _refusal("the token is not a signed JSON Web Token") from error
        trusted = self._file.content.get(issuer_named) if isinstance(issuer_named, str) else None
        if trusted is None:
            raise _refusal("the token's issuer is not trusted here")
        return _principal(_verified(token, header, trusted), trusted.issuer)

    def _parse(self, content: bytes) -> dict[str, _Trusted]:
        issuers: tuple[Issuer, ...] = parse_issuers(content).issuers
        return {issuer.issuer: _Trusted(issuer, self._keys_of(issuer)) for issuer in issuers}

    def _keys_of(self, issuer: Issuer) -> SigningKeys:
        """Return the issuer's key cache, which is kept when other fields of the file change."""
        place = (issuer.issuer, issuer.jwks_uri, issuer.keys_max_age_s, issuer.keys_stale_s)
        if place not in self._keys:
            self._keys[place] = SigningKeys(issuer, clock=self._clock)
        return self._keys[place]


def _verified(token: str, header: dict[str, Any], trusted: _Trusted) -> dict[str, Any]:
    """Check signature, times and audience of a token and return its claims. Raises `UnauthenticatedError`."""
    algorithm, key_id = header.get("alg"), header.get("kid")
    if algorithm not in trusted.issuer.algorithms:
        raise _refusal(f"the token's algorithm is not accepted; accepted are {', '.join(trusted.issuer.algorithms)}")
    if "crit" in header or not isinstance(key_id, str) or not key_id:
        raise _refusal("the token's header has no `kid`, or extensions (`crit`)")
    key = trusted.keys.find(key_id)
    if key is None or key.algorithm_name != algorithm:
        raise _refusal("the token's signing key is not known; try again in a minute if the issuer has just changed it")
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            key.key,
            algorithms=[algorithm],
            audience=list(trusted.issuer.audiences),
            issuer=trusted.issuer.issuer,
            leeway=trusted.issuer.leeway_s,
            options={"require": ["exp", "iss", "aud"]},
        )
    except jwt.ExpiredSignatureError as error:
        raise _refusal("the token has expired; ask its issuer for another") from error
    except jwt.InvalidAudienceError as error:
        raise _refusal("the token's audience is not this platform") from error
    except (jwt.ImmatureSignatureError, jwt.InvalidIssuedAtError) as error:
        raise _refusal("the token is not valid yet by this machine's clock") from error
    except _MALFORMED as error:
        raise _refusal("the token's signature or claims are not valid") from error
    return claims


def _principal(claims: dict[str, Any], issuer: Issuer) -> Principal:
    subject, tenant, roles = issuer.subject_of(claims), issuer.tenant_of(claims), issuer.roles_of(claims)
    if not isinstance(subject, str) or not subject.isprintable() or not subject.strip():
        raise _refusal(f"the token names no subject (claim {issuer.subject_claim!r})")
    name = f"{issuer.name}:{subject}"
    if len(name) > _LONGEST_NAME:
        raise _refusal(f"the token's subject has more than {_LONGEST_NAME - len(issuer.name) - 1} characters")
    if tenant is None:
        raise _refusal(f"the token names no tenant of this platform (claim {issuer.tenant_claim!r})")
    return TokenHolder(
        name=name,
        tenant=tenant,
        scopes=issuer.scopes_of(roles),
        operator=not roles.isdisjoint(issuer.operators),
        expires_at=min(max(int(claims["exp"]), 0), LATEST),
        requests_per_minute=issuer.requests_per_minute,
        tokens_per_minute=issuer.tokens_per_minute,
        max_priority=issuer.max_priority,
    )


def _refusal(reason: str) -> UnauthenticatedError:
    return UnauthenticatedError(reason, field="Authorization")
