"""OpenID Connect: trusted issuers, mapping of claims to tenant and scopes, and verification of bearer tokens.
Independent of HTTP routes.

Error messages contain nothing of the token. An issuer's public keys are cached and fetched on a separate thread, one
fetch at a time. A known key is returned at once. An unknown key id starts a fetch, at most once per
`REFETCH_INTERVAL_S`, and a bounded number of callers wait for it.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import httpx
import jwt
import yaml
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey
from pydantic import AfterValidator, Field, model_validator

from swiftkv_platform.errors import UnauthenticatedError
from swiftkv_platform.frozen import FiniteBaseModel
from swiftkv_platform.logs import get_logger
from swiftkv_platform.security.operator_files import ReloadedFile
from swiftkv_platform.security.principals import MAX_TIME, NAME_PATTERN, Principal, Scope
from swiftkv_platform.specs.documents import load_yaml

Algorithm = Literal["RS256", "ES256", "EdDSA"]
"""Signature algorithms with public keys; `none` and shared secrets (`HS*`) are never accepted."""
_LOOPBACK_HOSTS = ("127.0.0.1", "localhost", "::1")
_TENANT_NAME = re.compile(NAME_PATTERN)


def _validate_address(url: str) -> str:
    parts = urlsplit(url)
    if parts.query or parts.fragment or parts.username or not parts.hostname:
        raise ValueError(f"{url!r} is not a valid URL; use https://host/path")
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK_HOSTS):
        raise ValueError(f"{url!r} is not encrypted; use https://, or http:// on loopback")
    return url


IssuerAddress = Annotated[str, AfterValidator(_validate_address)]


class Issuer(FiniteBaseModel):
    """A trusted issuer, and the mapping of its claims to tenant and scopes."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    """Name of the issuer, and prefix of its callers' names: `{name}:{subject}`."""
    issuer: IssuerAddress
    """Value of `iss`, and the base URL of `.well-known/openid-configuration`."""
    audiences: Annotated[tuple[str, ...], Field(min_length=1)]
    """Accepted values of `aud`; a token must have one. List only audiences of this platform."""
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = ("RS256", "ES256", "EdDSA")
    jwks_uri: IssuerAddress | None = None
    """URL of the issuer's keys; None: as in the issuer's discovery document."""
    leeway_s: Annotated[int, Field(ge=0, le=300)] = 60
    """Max clock difference in seconds."""
    keys_max_age_s: Annotated[int, Field(ge=1, le=86_400)] = 3600
    """Seconds after which the issuer's keys are fetched again; a removed key is accepted until then."""
    keys_stale_s: Annotated[int, Field(ge=0, le=7 * 86_400)] = 86_400
    """Seconds beyond `keys_max_age_s` for which cached keys are used while the issuer is unavailable."""
    subject_claim: str = "sub"
    tenant: Annotated[str, Field(pattern=NAME_PATTERN)] | None = None
    """Tenant of all callers of the issuer."""
    tenant_claim: str | None = None
    """Claim with the caller's tenant, instead of `tenant`; `a.b` is `b` in `a`."""
    tenants: Mapping[str, Annotated[str, Field(pattern=NAME_PATTERN)]] | None = None
    """Tenant by value of `tenant_claim`; other values are refused. None: the value is the tenant."""
    scopes_claim: str = "scope"
    """Claim with roles: a list, or a space-separated string."""
    scopes: Mapping[str, frozenset[Scope]]
    """Scopes by role; other roles grant nothing."""
    operators: frozenset[str] = frozenset()
    """Roles that can read the audit trail of all tenants."""
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Limits per caller and replica, as in `Principal`."""
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    max_priority: int = 0

    @model_validator(mode="after")
    def _validate_tenant(self) -> Self:
        if (self.tenant is None) == (self.tenant_claim is None):
            raise ValueError("set either tenant or tenant_claim, not both")
        if self.tenants is not None and self.tenant_claim is None:
            raise ValueError("tenants needs tenant_claim, whose values it maps")
        return self

    def find_tenant(self, claims: Mapping[str, Any]) -> str | None:
        """Return the tenant of a token; None if its claim is missing, is not a valid name, or is not in `tenants`."""
        if self.tenant_claim is None:
            return self.tenant
        value = _find_claim(claims, self.tenant_claim)
        if not isinstance(value, str):
            return None
        if self.tenants is not None:
            return self.tenants.get(value)
        return value if _TENANT_NAME.fullmatch(value) else None

    def find_roles(self, claims: Mapping[str, Any]) -> frozenset[str]:
        value = _find_claim(claims, self.scopes_claim)
        words = value.split() if isinstance(value, str) else value
        return frozenset(word for word in words if isinstance(word, str)) if isinstance(words, list) else frozenset()


class Issuers(FiniteBaseModel):
    """Content of the file at `SWIFTKV_OIDC_FILE`."""

    issuers: Annotated[tuple[Issuer, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _validate_distinct(self) -> Self:
        for field in ("name", "issuer"):
            values = [getattr(issuer, field) for issuer in self.issuers]
            if len(set(values)) < len(values):
                raise ValueError(f"issuers have the same {field}; it must be unique")
        return self


def _find_claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return a claim by name, or else by dotted path; None if missing."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value


REFETCH_INTERVAL_S = 30.0
"""Min seconds between two fetches of one issuer's keys."""
_FETCH_TIMEOUT_S = 5.0
_WAIT_TIMEOUT_S = 2 * _FETCH_TIMEOUT_S
_MAX_WAITING_CALLERS = 8
"""Max callers that wait for a fetch; others are refused at once, so that unknown ids cannot block all threads."""
_MAX_DOCUMENT_BYTES = 1 << 18
_MAX_KEYS = 100
_MIN_RSA_BITS = 2048
_ALGORITHMS = {("RSA", None): "RS256", ("EC", "P-256"): "ES256", ("OKP", "Ed25519"): "EdDSA"}
_ALGORITHM_ALIASES = {"Ed25519": "EdDSA"}

KeysById = Mapping[str, jwt.PyJWK]
Clock = Callable[[], float]


class SigningKeys:
    """Cache of one issuer's public keys. `clock`: monotonic seconds."""

    def __init__(self, issuer: Issuer, *, clock: Clock = time.monotonic) -> None:
        self._issuer = issuer
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: KeysById = {}
        self._fetched_at: float | None = None
        self._last_fetch_at: float | None = None
        self._fetching: threading.Event | None = None
        self._waiting = threading.BoundedSemaphore(_MAX_WAITING_CALLERS)

    def find_key(self, key_id: str) -> jwt.PyJWK | None:
        """Return the key with this id; None if the issuer does not have it, or fetching failed."""
        known = self._get_valid_keys().get(key_id)
        if known is None:
            self._wait_for_fetch(self._refresh())
            return self._get_valid_keys().get(key_id)
        if self._compute_age() >= self._issuer.keys_max_age_s:
            self._refresh()
        return known

    def _get_valid_keys(self) -> KeysById:
        """Return the cached keys; empty if they are too old."""
        return self._keys if self._compute_age() <= self._issuer.keys_max_age_s + self._issuer.keys_stale_s else {}

    def _compute_age(self) -> float:
        return float("inf") if self._fetched_at is None else self._clock() - self._fetched_at

    def _refresh(self) -> threading.Event | None:
        """Start a fetch unless one runs or the last was too recent. Returns an event that is set when the fetch
        ends."""
        with self._lock:
            if self._fetching is not None:
                return self._fetching
            now = self._clock()
            if self._last_fetch_at is not None and 0.0 <= now - self._last_fetch_at < REFETCH_INTERVAL_S:
                return None
            self._last_fetch_at = now
            self._fetching = done = threading.Event()
        threading.Thread(target=self._fetch, args=(done,), name="signing-keys", daemon=True).start()
        return done

    def _wait_for_fetch(self, done: threading.Event | None) -> None:
        if done is None or not self._waiting.acquire(blocking=False):
            return
        try:
            done.wait(_WAIT_TIMEOUT_S)
        finally:
            self._waiting.release()

    def _fetch(self, done: threading.Event) -> None:
        try:
            keys = fetch_keys(self._issuer)
            with self._lock:
                self._keys, self._fetched_at = keys, self._clock()
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, RecursionError) as error:
            reason = str(error) or type(error).__name__
            get_logger().warning("fetching keys of an issuer failed", issuer=self._issuer.name, reason=reason)
        finally:
            with self._lock:
                self._fetching = None
            done.set()


def fetch_keys(issuer: Issuer) -> KeysById:
    """Fetch an issuer's supported keys by id. Raises `ValueError`, `httpx.HTTPError` and `httpx.InvalidURL`."""
    uri = issuer.jwks_uri
    if uri is None:
        document = _fetch_document(f"{issuer.issuer.rstrip('/')}/.well-known/openid-configuration")
        if document.get("issuer") != issuer.issuer:
            raise ValueError("its discovery document has another issuer")
        uri = document.get("jwks_uri")
        if not isinstance(uri, str) or urlsplit(uri).scheme != urlsplit(issuer.issuer).scheme:
            raise ValueError("its discovery document has no jwks_uri with the issuer's scheme")
    listed = _fetch_document(uri).get("keys")
    if not isinstance(listed, list):
        raise ValueError("its key set has no list of keys")  # noqa: TRY004  # the response is invalid
    found: dict[str, jwt.PyJWK] = {}
    for each in listed[:_MAX_KEYS]:
        key = _parse_key(each)
        if key is not None:
            found.setdefault(str(key.key_id), key)
    if not found:
        raise ValueError(
            "its key set has no supported key; use RSA of at least 2048 bits, P-256 or Ed25519, with a `kid`"
        )
    return found


def _parse_key(listed: Any) -> jwt.PyJWK | None:
    """Parse a key of a key set; None for private keys, other uses or algorithms, and invalid keys."""
    if not isinstance(listed, dict) or not isinstance(listed.get("kid"), str) or "d" in listed:
        return None
    kind, curve, named = listed.get("kty"), listed.get("crv"), listed.get("alg")
    algorithm = _ALGORITHMS.get((str(kind), None if curve is None else str(curve)))
    if algorithm is None or listed.get("use", "sig") != "sig":
        return None
    if named is not None and _ALGORITHM_ALIASES.get(str(named), named) != algorithm:
        return None
    try:
        key = jwt.PyJWK.from_dict(listed, algorithm=algorithm)
    except (jwt.PyJWTError, ValueError, TypeError, AttributeError) as error:
        get_logger().warning("key of an issuer ignored", reason=type(error).__name__)
        return None
    if isinstance(key.key, RSAPublicKey) and key.key.key_size < _MIN_RSA_BITS:
        return None
    return key


def _fetch_document(url: str) -> dict[str, Any]:
    """Fetch a JSON object, limited in size and time, without redirects."""
    began, content = time.monotonic(), b""
    with (
        httpx.Client(
            timeout=_FETCH_TIMEOUT_S, follow_redirects=False, trust_env=urlsplit(url).scheme == "https"
        ) as client,
        client.stream("GET", url, headers={"Accept": "application/json"}) as answer,
    ):
        if answer.status_code != httpx.codes.OK:
            raise ValueError(f"{url} returned status {answer.status_code}")
        for piece in answer.iter_bytes():
            content += piece
            if len(content) > _MAX_DOCUMENT_BYTES or time.monotonic() - began > _FETCH_TIMEOUT_S:
                raise ValueError(
                    f"{url} sent more than {_MAX_DOCUMENT_BYTES} bytes, or took more than {_FETCH_TIMEOUT_S:g} s"
                )
    document = json.loads(content)
    if not isinstance(document, dict):
        raise ValueError(f"{url} did not return a JSON object")  # noqa: TRY004
    return document


_MAX_TOKEN_LENGTH = 8192
_MAX_NAME_LENGTH = 200
"""Max characters of a caller's name, `{issuer}:{subject}`."""
_MALFORMED_ERRORS = (jwt.PyJWTError, ValueError, TypeError, OverflowError, RecursionError)


class TokenHolder(Principal):
    """A caller authenticated by a token."""

    @property
    def credential(self) -> str:
        return self.name


class JWTVerifier:
    """Verifies tokens of the issuers in the last valid version of a file.

    Raises `InvalidInputError` if its first version is invalid. An issuer is contacted only when its first token
    arrives.

    Args:
        clock: monotonic seconds, for the age of keys.
    """

    def __init__(self, path: Path, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._keys: dict[tuple[Any, ...], SigningKeys] = {}
        self._file = ReloadedFile(
            path, self._parse, field="oidc_file", hint="it must contain a list `issuers` (docs/operations.md)"
        )

    @property
    def is_usable(self) -> bool:
        return self._file.is_usable

    def authenticate(self, token: str) -> Principal:
        """Return the caller of a token. May wait seconds for its issuer. Raises `UnauthenticatedError`."""
        if len(token) > _MAX_TOKEN_LENGTH:
            raise _make_error(f"the token has more than {_MAX_TOKEN_LENGTH} characters")
        try:
            header = jwt.get_unverified_header(token)
            issuer_claim = jwt.decode(token, options={"verify_signature": False}).get("iss")
        except _MALFORMED_ERRORS as error:
            raise _make_error("the token is not a signed JSON Web Token") from error
        issuer, keys = self._file.content.get(issuer_claim if isinstance(issuer_claim, str) else "", (None, None))
        if issuer is None or keys is None:
            raise _make_error("the token's issuer is not trusted here")
        return _make_principal(_verify_jwt(token, header, issuer, keys), issuer)

    def _parse(self, content: bytes) -> dict[str, tuple[Issuer, SigningKeys]]:
        try:
            issuers = Issuers.model_validate(load_yaml(content)).issuers
        except yaml.YAMLError as error:
            raise ValueError(f"it is not valid YAML: {error}") from error
        return {issuer.issuer: (issuer, self._get_signing_keys(issuer)) for issuer in issuers}

    def _get_signing_keys(self, issuer: Issuer) -> SigningKeys:
        """Return the issuer's key cache, which survives changes of other fields."""
        cache_key = (issuer.issuer, issuer.jwks_uri, issuer.keys_max_age_s, issuer.keys_stale_s)
        if cache_key not in self._keys:
            self._keys[cache_key] = SigningKeys(issuer, clock=self._clock)
        return self._keys[cache_key]


def _verify_jwt(token: str, header: dict[str, Any], issuer: Issuer, keys: SigningKeys) -> dict[str, Any]:
    """Check signature, times and audience of a token and return its claims. Raises `UnauthenticatedError`."""
    algorithm, key_id = header.get("alg"), header.get("kid")
    if algorithm not in issuer.algorithms:
        raise _make_error(f"the token's algorithm is not accepted; use {', '.join(issuer.algorithms)}")
    if "crit" in header or not isinstance(key_id, str) or not key_id:
        raise _make_error("the token's header has no `kid`, or extensions (`crit`)")
    key = keys.find_key(key_id)
    if key is None or key.algorithm_name != algorithm:
        raise _make_error("the token's signing key is unknown; retry in a minute if the issuer has just rotated it")
    try:
        claims: dict[str, Any] = jwt.decode(
            token,
            key.key,
            algorithms=[algorithm],
            audience=list(issuer.audiences),
            issuer=issuer.issuer,
            leeway=issuer.leeway_s,
            options={"require": ["exp", "iss", "aud"]},
        )
    except jwt.ExpiredSignatureError as error:
        raise _make_error("the token has expired; request a new one from its issuer") from error
    except jwt.InvalidAudienceError as error:
        raise _make_error("the token's audience is not this platform") from error
    except (jwt.ImmatureSignatureError, jwt.InvalidIssuedAtError) as error:
        raise _make_error("the token is not valid yet, by this machine's clock") from error
    except _MALFORMED_ERRORS as error:
        raise _make_error("the token's signature or claims are not valid") from error
    return claims


def _make_principal(claims: dict[str, Any], issuer: Issuer) -> Principal:
    subject, tenant, roles = (
        _find_claim(claims, issuer.subject_claim),
        issuer.find_tenant(claims),
        issuer.find_roles(claims),
    )
    if not isinstance(subject, str) or not subject.isprintable() or not subject.strip():
        raise _make_error(f"the token has no subject (claim {issuer.subject_claim!r})")
    name = f"{issuer.name}:{subject}"
    if len(name) > _MAX_NAME_LENGTH:
        raise _make_error(f"the token's subject has more than {_MAX_NAME_LENGTH - len(issuer.name) - 1} characters")
    if tenant is None:
        raise _make_error(f"the token has no tenant of this platform (claim {issuer.tenant_claim!r})")
    return TokenHolder(
        name=name,
        tenant=tenant,
        scopes=frozenset().union(*(issuer.scopes.get(role, frozenset()) for role in roles)),
        operator=not roles.isdisjoint(issuer.operators),
        expires_at=min(max(int(claims["exp"]), 0), MAX_TIME),
        requests_per_minute=issuer.requests_per_minute,
        tokens_per_minute=issuer.tokens_per_minute,
        max_priority=issuer.max_priority,
    )


def _make_error(reason: str) -> UnauthenticatedError:
    return UnauthenticatedError(reason, field="Authorization")
