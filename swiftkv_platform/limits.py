"""Default limits of one request, key, tenant, client address, replica or control plane, in one table.

The code that enforces a limit, and the setting or quota that changes it, take the default from here. The table of
SECURITY.md is compared with this one by `tests/unit/test_limits.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """The party or process that a limit applies to."""

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
    """The resource that is limited, with its unit, in the words of SECURITY.md."""
    default: int
    setting: str | None = None
    """Environment variable (`SWIFTKV_...`), tenants file field or engine option that changes it; None: fixed."""


MIB = 1 << 20

# Bodies of requests
BODY_BYTES = Limit(Scope.REQUEST, "bytes of a body", MIB, "SWIFTKV_MAX_REQUEST_BYTES")
BODY_VALUES = Limit(Scope.REQUEST, "JSON values of a body", 1 << 14)
BODY_STRINGS = Limit(Scope.REQUEST, "JSON strings of a body", 1 << 14)
BODY_KEYS = Limit(Scope.REQUEST, "keys of a JSON object of a body", 1024)
BODY_SECONDS = Limit(Scope.REQUEST, "seconds for a body to come", 60)
BODY_BYTES_AT_ONCE = Limit(
    Scope.CONTROL_PLANE,
    "bytes of bodies at a time; a quarter for a tenant, an eighth for a key",
    32 * MIB,
    "SWIFTKV_MAX_BODY_BYTES_AT_ONCE",
)

# Requests and streams
REQUESTS_PER_MINUTE = Limit(
    Scope.KEY, "requests per minute; a tenth of them at once", 3000, "SWIFTKV_REQUESTS_PER_MINUTE"
)
SIGN_INS_PER_MINUTE = Limit(Scope.ADDRESS, "sign-ins to the dashboard per minute, without a key", 30)
SIGN_INS_AT_ONCE = Limit(Scope.ADDRESS, "sign-ins to the dashboard at once, without a key", 10)
FETCHES_AT_ONCE = Limit(Scope.TENANT, "concurrent requests that ask a store or the cluster", 4)
REQUESTS_AT_ONCE = Limit(Scope.TENANT, "concurrent requests of each other kind", 1)
QUEUED_REQUESTS = Limit(Scope.TENANT, "queued requests of each kind", 128)
_STREAMS = "concurrent streams: events, logs, downloads, answers of deployments"
STREAMS_OF_KEY = Limit(Scope.KEY, _STREAMS, 64, "SWIFTKV_MAX_STREAMS_OF_KEY")
STREAMS_OF_TENANT = Limit(Scope.TENANT, _STREAMS, 128, "SWIFTKV_MAX_STREAMS_OF_TENANT")
STREAMS = Limit(Scope.CONTROL_PLANE, _STREAMS, 512, "SWIFTKV_MAX_STREAMS")
FOLLOWED_LOGS_OF_KEY = Limit(Scope.KEY, "followed logs", 16, "SWIFTKV_MAX_FOLLOWED_LOGS_OF_KEY")
FOLLOWED_LOGS_OF_TENANT = Limit(Scope.TENANT, "followed logs", 32, "SWIFTKV_MAX_FOLLOWED_LOGS_OF_TENANT")
FOLLOWED_LOGS = Limit(Scope.CONTROL_PLANE, "followed logs", 64, "SWIFTKV_MAX_FOLLOWED_LOGS")
TURN_SECONDS = Limit(
    Scope.TENANT, "seconds that a job holds a slot that another tenant's job waits for", 14_400, "SWIFTKV_TURN_S"
)

# Uploaded files
FILE_BYTES = Limit(Scope.REQUEST, "bytes of an uploaded file", 512 * MIB, "SWIFTKV_MAX_FILE_BYTES")
FILE_ROWS = Limit(Scope.REQUEST, "rows of an uploaded file", 1_000_000, "SWIFTKV_MAX_FILE_ROWS")

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

# Lists and stored documents
PAGE_BYTES = Limit(Scope.REQUEST, "bytes of a page of a list, or its first object if that is longer", MIB >> 1)
MANIFEST_BYTES = Limit(Scope.REQUEST, "bytes of an artifact's manifest.json", 16 * MIB)
MANIFEST_VALUES = Limit(Scope.REQUEST, "JSON values of a manifest.json", 1 << 18)
MANIFEST_STRINGS = Limit(Scope.REQUEST, "JSON strings of a manifest.json, keys included", 1 << 19)
MODEL_BYTES = Limit(Scope.REQUEST, "bytes of a model's lineage and report, as JSON", 2 * MIB)
MODEL_VALUES = Limit(Scope.REQUEST, "JSON values of a model's lineage and report, strings included", 1 << 16)
MODEL_DEPTH = Limit(Scope.REQUEST, "nested objects and lists of a model's lineage or report", 32)
EVENT_BYTES = Limit(Scope.REQUEST, "bytes of an event that a job's worker reports", MIB)
EVENT_POINTS = Limit(Scope.REQUEST, "metric points that a listed event shows", 4096)

# Imports of models
IMPORT_BYTES = Limit(Scope.REQUEST, "bytes of an imported model", 1 << 40, "SWIFTKV_MAX_IMPORT_BYTES")
IMPORT_FILES = Limit(Scope.REQUEST, "files of an imported model", 4096)
IMPORT_DEPTH = Limit(Scope.REQUEST, "nested directories of an imported model", 8)
IMPORT_SMALL_FILE_BYTES = Limit(
    Scope.REQUEST, "bytes of a file of an imported model other than *.safetensors", 64 * MIB
)
IMPORT_SMALL_FILES_BYTES = Limit(
    Scope.REQUEST,
    "bytes of all files of an imported model other than *.safetensors; they are copied to /tmp",
    256 * MIB,
)
IMPORTS_OF_TENANT = Limit(Scope.TENANT, "imports of models at a time", 2)
IMPORTS = Limit(Scope.CONTROL_PLANE, "imports of models at a time", 4)

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

# Files of models
TOKENIZER_BYTES = Limit(Scope.REQUEST, "bytes of a model's `tokenizer_config.json`", 2 * MIB)

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
SPARED_REFUSALS = Limit(
    Scope.KEY, "refusals of a replica per minute that are not delayed; a thirtieth of them at once", 600
)
COMPILING_GRAMMARS = Limit(Scope.KEY, "grammars of a replica that are compiled or wait for it", 8)
GRAMMAR_SECONDS_PER_MINUTE = Limit(Scope.KEY, "CPU seconds of grammars a minute on a replica", 6)


def all_limits() -> tuple[Limit, ...]:
    """Return every limit of this module, in the order of the file."""
    return tuple(value for value in globals().values() if isinstance(value, Limit))
