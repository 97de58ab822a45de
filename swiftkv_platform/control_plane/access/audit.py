"""The audit trail: entries, and what they are selected by. No I/O."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AuditEntry:
    """A request that changed something, or was to, or was refused access."""

    id: str
    created_at: float
    """Unix seconds."""
    request_id: str
    """Value of the answer's `X-Request-ID`."""
    actor: str | None
    """Name of the caller; None where none was known."""
    credential: str | None
    """Id of the key, or issuer and subject of the token."""
    tenant: str | None
    address: str
    method: str
    route: str
    """Template of the route, such as `/jobs/{job_id}/cancel`."""
    object: str | None
    """Id of what the request was about."""
    status: int
    """HTTP status of the answer."""
    left_out: int = 0
    """Refusals before this one that were not written, since there were too many."""


@dataclass(frozen=True)
class AuditFilter:
    """Values that entries have; None: any."""

    tenant: str | None = None
    actor: str | None = None
    credential: str | None = None
    address: str | None = None
    route: str | None = None
    object: str | None = None
    request_id: str | None = None
    status: int | None = None
    since: float | None = None
    """Unix seconds, inclusive."""
    until: float | None = None
    """Unix seconds, exclusive."""
