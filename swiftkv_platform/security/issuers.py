"""OpenID Connect issuers that an operator trusts, and the rights that claims grant. Verifies no token."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, Field, model_validator

from swiftkv_platform.frozen import FiniteModel
from swiftkv_platform.security.principals import NAME_PATTERN, Scope
from swiftkv_platform.specs.documents import load_yaml

Algorithm = Literal["RS256", "ES256", "EdDSA"]
"""Public-key signature algorithms. `none` and shared secrets (`HS*`) cannot be allowed."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_TENANT = re.compile(NAME_PATTERN)


def _address(url: str) -> str:
    parts = urlsplit(url)
    if parts.query or parts.fragment or parts.username or not parts.hostname:
        raise ValueError(f"{url!r} is not a plain URL; use https://host/path")
    if parts.scheme != "https" and not (parts.scheme == "http" and parts.hostname in _LOOPBACK):
        raise ValueError(f"{url!r} is not encrypted; use https://, or http:// on loopback")
    return url


Address = Annotated[str, AfterValidator(_address)]


class Issuer(FiniteModel):
    """A trusted issuer, and how its claims map to tenant and scopes."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    """Prefix of its callers' names: `{name}:{subject}`."""
    issuer: Address
    """Value of `iss`, and the base URL of `.well-known/openid-configuration`."""
    audiences: Annotated[tuple[str, ...], Field(min_length=1)]
    """Accepted values of `aud`; a token needs one of them. List this platform's own, not those of other programs."""
    algorithms: Annotated[tuple[Algorithm, ...], Field(min_length=1)] = ("RS256", "ES256", "EdDSA")
    jwks_uri: Address | None = None
    """URL of its keys; None: taken from its discovery document."""
    leeway_s: Annotated[int, Field(ge=0, le=300)] = 60
    """Seconds that its clock may differ from ours."""
    keys_max_age_s: Annotated[int, Field(ge=1, le=86_400)] = 3600
    """Seconds after which its keys are fetched again; a withdrawn key is accepted until then."""
    keys_stale_s: Annotated[int, Field(ge=0, le=7 * 86_400)] = 86_400
    """Seconds beyond `keys_max_age_s` for which keys stay valid while the issuer does not answer."""
    subject_claim: str = "sub"
    tenant: Annotated[str, Field(pattern=NAME_PATTERN)] | None = None
    """Tenant of all its callers."""
    tenant_claim: str | None = None
    """Claim with the caller's tenant, instead of `tenant`; `a.b` is `b` in `a`."""
    tenants: Mapping[str, Annotated[str, Field(pattern=NAME_PATTERN)]] | None = None
    """Tenants by value of `tenant_claim`; other values are refused. None: the value is the tenant's name."""
    scopes_claim: str = "scope"
    """Claim with roles: a list, or a space-separated string."""
    scopes: Mapping[str, frozenset[Scope]]
    """Scopes by role; a role that is not listed grants nothing."""
    operators: frozenset[str] = frozenset()
    """Roles that may read the audit trail of all tenants."""
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Limits of each caller at a replica; see the fields of the same names in `Principal`."""
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    max_priority: int = 0

    @model_validator(mode="after")
    def _one_way_to_a_tenant(self) -> Self:
        if (self.tenant is None) == (self.tenant_claim is None):
            raise ValueError("give either tenant or tenant_claim, not both")
        if self.tenants is not None and self.tenant_claim is None:
            raise ValueError("tenants maps the values of tenant_claim, which is not given")
        return self

    def tenant_of(self, claims: Mapping[str, Any]) -> str | None:
        """Return the tenant of a token; None if its claim is missing, is not a valid name, or is not in `tenants`."""
        if self.tenant_claim is None:
            return self.tenant
        value = _claim(claims, self.tenant_claim)
        if not isinstance(value, str):
            return None
        if self.tenants is not None:
            return self.tenants.get(value)
        return value if _TENANT.fullmatch(value) else None

    def roles_of(self, claims: Mapping[str, Any]) -> frozenset[str]:
        value = _claim(claims, self.scopes_claim)
        words = value.split() if isinstance(value, str) else value
        return frozenset(word for word in words if isinstance(word, str)) if isinstance(words, list) else frozenset()

    def subject_of(self, claims: Mapping[str, Any]) -> object:
        return _claim(claims, self.subject_claim)

    def scopes_of(self, roles: frozenset[str]) -> frozenset[Scope]:
        return frozenset().union(*(self.scopes.get(role, frozenset()) for role in roles))


class Issuers(FiniteModel):
    """Content of the file at `SWIFTKV_OIDC_FILE`."""

    issuers: Annotated[tuple[Issuer, ...], Field(min_length=1)]

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        for field in ("name", "issuer"):
            values = [getattr(issuer, field) for issuer in self.issuers]
            if len(set(values)) < len(values):
                raise ValueError(f"issuers have the same {field}; each needs its own")
        return self


def parse_issuers(content: bytes) -> Issuers:
    """Read the YAML of an issuers file. Raises `ValueError`."""
    try:
        return Issuers.model_validate(load_yaml(content))
    except yaml.YAMLError as error:
        raise ValueError(f"it cannot be read as YAML: {error}") from error


def _claim(claims: Mapping[str, Any], name: str) -> Any:
    """Return a claim by its name, which may contain dots, or else by a dotted path; None if missing."""
    if name in claims:
        return claims[name]
    value: Any = claims
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value
