"""What one request, key, tenant, address or replica may use: all default limits in one table.

The code that enforces a limit, and the setting or quota that changes it, take the default from here. The table of
SECURITY.md is compared with this one by `tests/unit/test_limits.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """What a limit is counted for."""

    REQUEST = "request"
    KEY = "key"
    TENANT = "tenant"
    ADDRESS = "client address"
    REPLICA = "replica"
    CONTROL_PLANE = "control plane"


@dataclass(frozen=True)
class Limit:
    """One limit of the table."""

    scope: Scope
    resource: str
    """What is limited, with its unit, as SECURITY.md says it."""
    default: int
    setting: str | None = None
    """Environment variable (`SWIFTKV_...`), tenants file field or engine option that changes it; None: fixed."""


MIB = 1 << 20

# Bodies of requests
BODY_BYTES = Limit(Scope.REQUEST, "bytes of a body", MIB, "SWIFTKV_MAX_REQUEST_BYTES")
BODY_VALUES = Limit(Scope.REQUEST, "JSON values of a body", 1 << 14)
BODY_STRINGS = Limit(Scope.REQUEST, "JSON strings of a body", 1 << 14)

# What a tenant stores
UNFINISHED_JOBS = Limit(Scope.TENANT, "jobs that have not ended", 1000, "max_unfinished_jobs")
STORED_JOBS = Limit(Scope.TENANT, "jobs, including ended ones", 100_000, "max_stored_jobs")
DEPLOYMENTS = Limit(Scope.TENANT, "deployments", 100, "max_deployments")
IMPORTED_MODELS = Limit(Scope.TENANT, "imported models", 1000, "max_imported_models")
ALIASES = Limit(Scope.TENANT, "aliases", 100, "max_aliases")
ALIAS_CHANGES = Limit(Scope.TENANT, "changes in the history of each alias", 1000, "max_alias_changes")
FILES = Limit(Scope.TENANT, "uploaded files", 10_000, "max_files")
STORED_BYTES = Limit(Scope.TENANT, "bytes of files and models", 10 << 40, "max_stored_bytes")
PENDING_DELIVERIES = Limit(Scope.TENANT, "pending webhook deliveries", 10_000, "max_pending_deliveries")
KEPT_CHECKPOINTS = Limit(Scope.REQUEST, "checkpoints that a job keeps (`checkpoint.keep`)", 100)
RESUMPTIONS = Limit(Scope.REQUEST, "times that a job is resumed", 1000)
SESSIONS = Limit(Scope.KEY, "browser sessions; the oldest one ends", 100)


def all_limits() -> tuple[Limit, ...]:
    """Return every limit of this module, in the order of the file."""
    return tuple(value for value in globals().values() if isinstance(value, Limit))
