"""Callers that a key or a token names, and what is open to them. Knows neither files nor tokens."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Protocol

from pydantic import Field

from swiftkv_platform.errors import ForbiddenError
from swiftkv_platform.frozen import FrozenModel

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
"""Names of keys, tenants and issuers."""
LATEST = 253_402_300_799
"""The last second of the year 9999."""


class Scope(StrEnum):
    """Scope of an API key."""

    JOBS_READ = "jobs:read"
    """Jobs, models, deployments and what they leave, to look at."""
    JOBS_WRITE = "jobs:write"
    """Submit, pause, resume, cancel."""
    DEPLOY = "deploy"
    """Put models into service and take them out."""
    GENERATE = "generate"
    """Ask a served model."""
    ADMIN = "admin"
    """All of these."""


class Principal(FrozenModel):
    """A caller, by whatever it has shown."""

    name: str
    """Owner; jobs and the audit trail carry it."""
    tenant: Annotated[str, Field(pattern=NAME_PATTERN)] = "default"
    """Principals of one tenant see the same jobs, models and deployments, and no other tenant's."""
    scopes: frozenset[Scope]
    operator: bool = False
    """Whether it reads the audit trail of all tenants; with the scope `admin` alone it reads its own tenant's."""
    expires_at: Annotated[int, Field(ge=0, le=LATEST)] | None = None
    """Unix seconds from which it is refused; None: never."""
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Requests that a replica answers in a minute; None: no limit."""
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Tokens, of prompts and answers together; None: no limit."""
    max_priority: int = 0
    """Highest priority that its requests may ask a replica for: the lowest number, since lower goes first."""

    @property
    def credential(self) -> str:
        """Id of the key or token; it opens nothing."""
        raise NotImplementedError

    @property
    def reads_audit(self) -> bool:
        """Whether it reads the audit trail, be it of its own tenant alone."""
        return self.operator or Scope.ADMIN in self.scopes

    def require(self, scope: Scope) -> None:
        """Raises `ForbiddenError` if `scope` is not open."""
        if scope not in self.scopes and Scope.ADMIN not in self.scopes:
            held = ", ".join(sorted(self.scopes)) or "none"
            raise ForbiddenError(f"key {self.name!r} has the scopes {held}; this needs {scope}", field="Authorization")


class Authenticator(Protocol):
    """Knows callers by their `Authorization` header."""

    def authenticate(self, authorization: str | None) -> Principal:
        """The caller. Raises `UnauthenticatedError`."""
        ...
