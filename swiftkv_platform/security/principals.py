"""Authenticated callers and their scopes. Knows neither files nor tokens."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Protocol

from pydantic import Field

from swiftkv_platform.errors import ForbiddenError
from swiftkv_platform.frozen import FrozenModel

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
"""Names of keys, tenants and issuers."""
MAX_TIME = 253_402_300_799
"""The last second of the year 9999."""


class Scope(StrEnum):
    """Scope of an API key."""

    JOBS_READ = "jobs:read"
    """Read jobs, models, deployments and their outputs."""
    JOBS_WRITE = "jobs:write"
    """Submit, pause, resume, cancel."""
    DEPLOY = "deploy"
    """Deploy models and delete deployments."""
    GENERATE = "generate"
    """Send requests to a served model."""
    ADMIN = "admin"
    """All of these."""


class Principal(FrozenModel):
    """A caller, authenticated by a key or a token."""

    name: str
    """Owner, as recorded with jobs and in the audit trail."""
    tenant: Annotated[str, Field(pattern=NAME_PATTERN)] = "default"
    """Principals of one tenant see the same jobs, models and deployments, and no other tenant's."""
    scopes: frozenset[Scope]
    operator: bool = False
    """Whether it may read the audit trail of all tenants; the scope `admin` alone gives its own tenant's."""
    expires_at: Annotated[int, Field(ge=0, le=MAX_TIME)] | None = None
    """Unix seconds from which it is refused; None: never."""
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Requests that a replica answers in a minute; None: no limit."""
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Prompt and completion tokens together that a replica allows in a minute; None: no limit."""
    max_priority: int = 0
    """Highest priority that its requests may ask a replica for: the lowest number, since lower goes first."""

    @property
    def credential(self) -> str:
        """Id of the key, or name of the token's caller; it grants no access."""
        raise NotImplementedError

    @property
    def can_read_audit(self) -> bool:
        """Whether it may read the audit trail, at least of its own tenant."""
        return self.operator or Scope.ADMIN in self.scopes

    def require(self, scope: Scope) -> None:
        """Raise `ForbiddenError` unless the caller has `scope` or `admin`."""
        if scope not in self.scopes and Scope.ADMIN not in self.scopes:
            held = ", ".join(sorted(self.scopes)) or "none"
            raise ForbiddenError(f"key {self.name!r} has the scopes {held}; this needs {scope}", field="Authorization")


class Authenticator(Protocol):
    """Identifies callers by their `Authorization` header."""

    def authenticate(self, authorization: str | None) -> Principal:
        """Return the caller. Raises `UnauthenticatedError`."""
        ...
