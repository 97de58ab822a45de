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

# Parsing of tenants' files, in parser processes (`control_plane/parsing.py`)
CHECKED_FILES = Limit(Scope.REQUEST, "files whose first rows are read to check a spec", 1000)
CHECKED_SOURCE_FILES = Limit(Scope.REQUEST, "files of one source whose first rows are read to check a spec", 100)
CHECKED_BYTES = Limit(Scope.REQUEST, "bytes of rows that are decoded to check a spec", 32 * MIB)
CHECKED_ENTRIES = Limit(Scope.REQUEST, "directory entries that are listed to check a spec", 50_000)
CHECKED_SECONDS = Limit(Scope.REQUEST, "seconds of CPU time after which no further source of a spec is read", 2)
CHECK_CPU_SECONDS = Limit(Scope.REQUEST, "seconds of CPU time that checking a spec takes", 10)
CHECK_SECONDS = Limit(Scope.REQUEST, "seconds that checking a spec takes", 60)
CHECKS = Limit(Scope.CONTROL_PLANE, "specs that are checked at a time", 4)
UPLOAD_ROW_BYTES = Limit(Scope.REQUEST, "bytes of a row of an upload", 4 * MIB)
UPLOAD_ROW_VALUES = Limit(Scope.REQUEST, "JSON values of a row of an upload, strings included", 1 << 16)
UPLOAD_CPU_SECONDS = Limit(Scope.REQUEST, "seconds of CPU time that checking an upload takes", 600)
UPLOAD_SECONDS = Limit(Scope.REQUEST, "seconds that an upload takes", 1800)
UPLOADS_OF_KEY = Limit(Scope.KEY, "uploads at a time", 2)
UPLOADS_OF_TENANT = Limit(Scope.TENANT, "uploads at a time", 2)
UPLOADS = Limit(Scope.CONTROL_PLANE, "uploads at a time", 8)
UPLOAD_CHECKS = Limit(Scope.CONTROL_PLANE, "uploads that are checked at a time", 4)
PARSER_BYTES = Limit(Scope.REQUEST, "bytes of address space of a parser process", 1024 * MIB)


def all_limits() -> tuple[Limit, ...]:
    """Return every limit of this module, in the order of the file."""
    return tuple(value for value in globals().values() if isinstance(value, Limit))
