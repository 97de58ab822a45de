"""Authenticated callers and their scopes. Independent of files and tokens."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Protocol

from pydantic import Field

from swiftkv_platform.errors import ForbiddenError
from swiftkv_platform.frozen import FrozenBaseModel

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
"""Pattern of the names of keys, tenants and issuers."""
MAX_TIME = 253_402_300_799
"""Last second of the year 9999."""


class Scope(StrEnum):
    """Permission of a caller."""

    JOBS_READ = "jobs:read"
    """Read jobs, models, deployments and their outputs."""
    JOBS_WRITE = "jobs:write"
    """Submit, pause, resume, cancel."""
    DEPLOY = "deploy"
    """Deploy models and delete deployments."""
    GENERATE = "generate"
    """Send requests to a served model."""
    ADMIN = "admin"
    """All scopes."""


class Principal(FrozenBaseModel):
    """A caller, authenticated by a key or a token."""

    name: str
    """Owner, as recorded with jobs and in the audit trail."""
    tenant: Annotated[str, Field(pattern=NAME_PATTERN)] = "default"
    """Callers see only the jobs, models and deployments of their tenant."""
    scopes: frozenset[Scope]
    operator: bool = False
    """Whether the caller can read the audit trail of all tenants; the scope `admin` grants the own tenant's only."""
    expires_at: Annotated[int, Field(ge=0, le=MAX_TIME)] | None = None
    """Unix seconds from which the credential is invalid; None: never."""
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Max requests per minute and replica; None: no limit."""
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Max prompt and completion tokens together per minute and replica; None: no limit."""
    max_priority: int = 0
    """Highest priority that requests may have: the min number, since lower numbers run first."""

    @property
    def credential(self) -> str:
        """Id of the key, or name in the token. Not secret."""
        raise NotImplementedError

    @property
    def can_read_audit(self) -> bool:
        """Whether the caller can read the audit trail, at least of the own tenant."""
        return self.operator or Scope.ADMIN in self.scopes

    def require_scope(self, scope: Scope) -> None:
        """Raise `ForbiddenError` unless the caller has `scope` or `admin`."""
        if scope not in self.scopes and Scope.ADMIN not in self.scopes:
            held = ", ".join(sorted(self.scopes)) or "none"
            raise ForbiddenError(
                f"key {self.name!r} has the scopes {held}; this request needs the scope {scope}", field="Authorization"
            )


class Authenticator(Protocol):
    """Authenticates callers by their `Authorization` header."""

    def authenticate(self, authorization: str | None) -> Principal:
        """Return the caller. Raises `UnauthenticatedError`."""
        ...
