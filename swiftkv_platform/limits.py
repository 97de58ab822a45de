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

# Connections of an HTTP server: the control plane and `swiftkv serve`
CONNECTIONS = Limit(Scope.CONTROL_PLANE, "connections", 4096, "SWIFTKV_MAX_CONNECTIONS")
HEAD_SECONDS = Limit(Scope.REQUEST, "seconds for a head to come", 10, "SWIFTKV_REQUEST_HEAD_TIMEOUT_S")
HEAD_BYTES = Limit(Scope.REQUEST, "bytes of a head, or of a chunked body's framing", 32 << 10)
HEAD_FIELDS = Limit(Scope.REQUEST, "header fields and trailers", 128)
LATE_BODY_BYTES = Limit(Scope.REQUEST, "bytes of a body that come after the answer", 2 * MIB)
PIPELINED_REQUESTS = Limit(Scope.REQUEST, "requests sent on a connection before the first answer", 64)
KEEP_ALIVE_SECONDS = Limit(Scope.ADDRESS, "seconds between two requests of a connection", 75)
UNREAD_SECONDS = Limit(Scope.REQUEST, "seconds without reading an answer", 60)

# A replica of a model: the native engine and vLLM, of a deployment and of `swiftkv serve`
REPLICA_BODY_BYTES = Limit(Scope.REQUEST, "bytes of a replica's body, at most", 16 * MIB, "max_body_bytes")
REPLICA_BODY_STRINGS = Limit(Scope.REQUEST, "JSON strings of a replica's body", 1 << 15)
REPLICA_BODY_VALUES = Limit(Scope.REQUEST, "JSON values of a replica's body, beside token ids", 1 << 16)
REPLICA_TOKEN_IDS = Limit(Scope.REQUEST, "token ids of a replica's body, or one context", 1 << 18)
REPLICA_BODIES_BYTES = Limit(Scope.REPLICA, "bytes of bodies at a time; half by a tenant, a quarter by a key", 64 * MIB)
WAITING_SEQUENCES = Limit(
    Scope.KEY, "waiting sequences of a replica; less by half of what others hold", 64, "engine.max_num_waiting"
)
COMPILING_GRAMMARS = Limit(Scope.KEY, "grammars of a replica that are compiled or wait for it", 8)
GRAMMAR_SECONDS_PER_MINUTE = Limit(Scope.KEY, "CPU seconds of grammars a minute on a replica", 6)


def all_limits() -> tuple[Limit, ...]:
    """Return every limit of this module, in the order of the file."""
    return tuple(value for value in globals().values() if isinstance(value, Limit))
