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

# Files of models
TOKENIZER_BYTES = Limit(Scope.REQUEST, "bytes of a model's `tokenizer_config.json`", 2 * MIB)


def all_limits() -> tuple[Limit, ...]:
    """Return every limit of this module, in the order of the file."""
    return tuple(value for value in globals().values() if isinstance(value, Limit))
