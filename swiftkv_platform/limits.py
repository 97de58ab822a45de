"""Default limits of one request, key, tenant, client address, replica or control plane, in one table.

The code that enforces a limit, and the setting or quota that changes it, use the default from here.
`tests/unit/test_limits.py` compares the table in SECURITY.md with this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Scope(StrEnum):
    """What a limit applies to."""

    REQUEST = "request"
    KEY = "key"
    TENANT = "tenant"
    ADDRESS = "client address"
    REPLICA = "replica"
    CONTROL_PLANE = "control plane"


@dataclass(frozen=True)
class Limit:
    scope: Scope
    resource: str
    """Limited resource and its unit, as in SECURITY.md."""
    default: int
    setting: str | None = None
    """Environment variable (`SWIFTKV_...`), tenants file field or engine option that changes it; None: fixed."""


MIB = 1 << 20

# Bodies of requests
BODY_BYTES = Limit(Scope.REQUEST, "bytes of a request body", MIB, "SWIFTKV_MAX_REQUEST_BYTES")
BODY_VALUES = Limit(Scope.REQUEST, "JSON values of a request body", 1 << 14)
BODY_STRINGS = Limit(Scope.REQUEST, "JSON strings of a request body", 1 << 14)
BODY_KEYS = Limit(Scope.REQUEST, "keys per JSON object of a request body", 1024)
BODY_SECONDS = Limit(Scope.REQUEST, "seconds to receive a request body", 60)
CONCURRENT_BODY_BYTES = Limit(
    Scope.CONTROL_PLANE,
    "bytes of concurrent request bodies; a quarter per tenant, an eighth per key",
    32 * MIB,
    "SWIFTKV_MAX_BODY_BYTES_AT_ONCE",
)

# Requests and streams
REQUESTS_PER_MINUTE = Limit(
    Scope.KEY, "requests per minute, in bursts of at most a tenth of that", 3000, "SWIFTKV_REQUESTS_PER_MINUTE"
)
SIGN_INS_PER_MINUTE = Limit(Scope.ADDRESS, "dashboard sign-ins per minute, for callers without a key", 30)
SIGN_IN_BURST = Limit(Scope.ADDRESS, "burst of dashboard sign-ins, for callers without a key", 10)
CONCURRENT_FETCHES = Limit(Scope.TENANT, "concurrent requests that read the object store or the cluster", 4)
CONCURRENT_REQUESTS = Limit(Scope.TENANT, "concurrent requests of any other kind", 1)
QUEUED_REQUESTS = Limit(Scope.TENANT, "queued requests of each kind", 128)
_STREAMS = "concurrent streams: events, logs, downloads, responses of deployments"
STREAMS_OF_KEY = Limit(Scope.KEY, _STREAMS, 64, "SWIFTKV_MAX_STREAMS_OF_KEY")
STREAMS_OF_TENANT = Limit(Scope.TENANT, _STREAMS, 128, "SWIFTKV_MAX_STREAMS_OF_TENANT")
STREAMS = Limit(Scope.CONTROL_PLANE, _STREAMS, 512, "SWIFTKV_MAX_STREAMS")
FOLLOWED_LOGS_OF_KEY = Limit(Scope.KEY, "followed logs", 16, "SWIFTKV_MAX_FOLLOWED_LOGS_OF_KEY")
FOLLOWED_LOGS_OF_TENANT = Limit(Scope.TENANT, "followed logs", 32, "SWIFTKV_MAX_FOLLOWED_LOGS_OF_TENANT")
FOLLOWED_LOGS = Limit(Scope.CONTROL_PLANE, "followed logs", 64, "SWIFTKV_MAX_FOLLOWED_LOGS")
TIME_SLICE_SECONDS = Limit(
    Scope.TENANT, "seconds of a job's time slice, if another tenant waits for the slot", 14_400, "SWIFTKV_TURN_S"
)

# Uploaded files
FILE_BYTES = Limit(Scope.REQUEST, "bytes of an uploaded file", 512 * MIB, "SWIFTKV_MAX_FILE_BYTES")
FILE_ROWS = Limit(Scope.REQUEST, "rows of an uploaded file", 1_000_000, "SWIFTKV_MAX_FILE_ROWS")

# What a tenant stores
UNFINISHED_JOBS = Limit(Scope.TENANT, "unfinished jobs", 1000, "max_unfinished_jobs")
STORED_JOBS = Limit(Scope.TENANT, "stored jobs, including ended ones", 100_000, "max_stored_jobs")
DEPLOYMENTS = Limit(Scope.TENANT, "deployments", 100, "max_deployments")
IMPORTED_MODELS = Limit(Scope.TENANT, "imported models", 1000, "max_imported_models")
ALIASES = Limit(Scope.TENANT, "aliases", 100, "max_aliases")
ALIAS_CHANGES = Limit(Scope.TENANT, "changes in the history of an alias", 1000, "max_alias_changes")
FILES = Limit(Scope.TENANT, "uploaded files", 10_000, "max_files")
STORED_BYTES = Limit(Scope.TENANT, "bytes of files, models and captured traffic", 10 << 40, "max_stored_bytes")
PENDING_DELIVERIES = Limit(Scope.TENANT, "pending webhook deliveries", 10_000, "max_pending_deliveries")
KEPT_CHECKPOINTS = Limit(Scope.REQUEST, "checkpoints kept per job (`checkpoint.keep`)", 100)
RESUMPTIONS = Limit(Scope.REQUEST, "resumes of a job", 1000)
SESSIONS = Limit(Scope.KEY, "browser sessions; a new one ends the oldest", 100)

# Lists and stored documents
PAGE_BYTES = Limit(Scope.REQUEST, "bytes of a page of a list, unless its first object is larger", MIB >> 1)
MANIFEST_BYTES = Limit(Scope.REQUEST, "bytes of an artifact's manifest.json", 16 * MIB)
MANIFEST_VALUES = Limit(Scope.REQUEST, "JSON values of a manifest.json", 1 << 18)
MANIFEST_STRINGS = Limit(Scope.REQUEST, "JSON strings of a manifest.json, keys included", 1 << 19)
MODEL_METADATA_BYTES = Limit(Scope.REQUEST, "bytes of a model's lineage and report, as JSON", 2 * MIB)
MODEL_METADATA_VALUES = Limit(Scope.REQUEST, "JSON values of a model's lineage and report, strings included", 1 << 16)
MODEL_METADATA_DEPTH = Limit(Scope.REQUEST, "nested objects and lists of a model's lineage or report", 32)
EVENT_BYTES = Limit(Scope.REQUEST, "bytes of an event of a job's worker", MIB)
EVENT_POINTS = Limit(Scope.REQUEST, "metric points shown per listed event", 4096)

# Imports of models
IMPORT_BYTES = Limit(Scope.REQUEST, "bytes of an imported model", 1 << 40, "SWIFTKV_MAX_IMPORT_BYTES")
IMPORT_FILES = Limit(Scope.REQUEST, "files of an imported model", 4096)
IMPORT_DEPTH = Limit(Scope.REQUEST, "directory depth of an imported model", 8)
IMPORT_SMALL_FILE_BYTES = Limit(Scope.REQUEST, "bytes of one file of an imported model, except *.safetensors", 64 * MIB)
IMPORT_SMALL_FILES_BYTES = Limit(
    Scope.REQUEST,
    "bytes of an imported model copied to /tmp: all files except *.safetensors",
    256 * MIB,
)
IMPORTS_OF_TENANT = Limit(Scope.TENANT, "concurrent imports of models", 2)
IMPORTS = Limit(Scope.CONTROL_PLANE, "concurrent imports of models", 4)

# Parsing of tenants' files, in parser processes (`control_plane/parsing.py`)
CHECKED_FILES = Limit(Scope.REQUEST, "files read to validate a spec", 1000)
CHECKED_SOURCE_FILES = Limit(Scope.REQUEST, "files of one source read to validate a spec", 100)
CHECKED_BYTES = Limit(Scope.REQUEST, "bytes of rows decoded to validate a spec", 32 * MIB)
CHECKED_ENTRIES = Limit(Scope.REQUEST, "directory entries listed to validate a spec", 50_000)
CHECKED_SECONDS = Limit(Scope.REQUEST, "seconds of CPU time after which validating a spec reads no more sources", 2)
CHECK_CPU_SECONDS = Limit(Scope.REQUEST, "seconds of CPU time to validate a spec", 10)
CHECK_SECONDS = Limit(Scope.REQUEST, "seconds to validate a spec", 60)
CHECKS = Limit(Scope.CONTROL_PLANE, "specs validated concurrently", 4)
UPLOAD_ROW_BYTES = Limit(Scope.REQUEST, "bytes of an uploaded row", 4 * MIB)
UPLOAD_ROW_VALUES = Limit(Scope.REQUEST, "JSON values of an uploaded row, strings included", 1 << 16)
UPLOAD_CPU_SECONDS = Limit(Scope.REQUEST, "seconds of CPU time to validate an upload", 600)
UPLOAD_SECONDS = Limit(Scope.REQUEST, "seconds of an upload", 1800)
UPLOADS_OF_KEY = Limit(Scope.KEY, "concurrent uploads", 2)
UPLOADS_OF_TENANT = Limit(Scope.TENANT, "concurrent uploads", 2)
UPLOADS = Limit(Scope.CONTROL_PLANE, "concurrent uploads", 8)
UPLOAD_CHECKS = Limit(Scope.CONTROL_PLANE, "uploads validated concurrently", 4)
PARSER_BYTES = Limit(Scope.REQUEST, "bytes of address space of a parser process", 1024 * MIB)

# Files of models
TOKENIZER_BYTES = Limit(Scope.REQUEST, "bytes of a model's `tokenizer_config.json`", 2 * MIB)

# Connections of an HTTP server: the control plane and `swiftkv serve`
CONNECTIONS = Limit(Scope.CONTROL_PLANE, "connections", 4096, "SWIFTKV_MAX_CONNECTIONS")
REQUEST_HEAD_SECONDS = Limit(
    Scope.REQUEST, "seconds to receive the request line and headers", 10, "SWIFTKV_REQUEST_HEAD_TIMEOUT_S"
)
REQUEST_HEAD_BYTES = Limit(
    Scope.REQUEST, "bytes of the request line and headers, or of a chunked body's framing", 32 << 10
)
REQUEST_HEAD_FIELDS = Limit(Scope.REQUEST, "header fields and trailers", 128)
DRAINED_BODY_BYTES = Limit(Scope.REQUEST, "bytes of a request body read after the response", 2 * MIB)
PIPELINED_REQUESTS = Limit(Scope.REQUEST, "pipelined requests of a connection", 64)
KEEP_ALIVE_SECONDS = Limit(Scope.ADDRESS, "idle seconds of a connection", 75)
STALLED_CLIENT_SECONDS = Limit(Scope.REQUEST, "seconds in which a client reads none of its response", 60)

# A replica of a model: the native engine and vLLM, of a deployment and of `swiftkv serve`
REPLICA_BODY_BYTES = Limit(Scope.REQUEST, "bytes of a request body to a replica", 16 * MIB, "max_body_bytes")
REPLICA_BODY_STRINGS = Limit(Scope.REQUEST, "JSON strings of a request body to a replica", 1 << 15)
REPLICA_BODY_VALUES = Limit(Scope.REQUEST, "JSON values of a request body to a replica, without token ids", 1 << 16)
REPLICA_TOKEN_IDS = Limit(Scope.REQUEST, "token ids of a request body to a replica, or one context if longer", 1 << 18)
REPLICA_BODIES_BYTES = Limit(
    Scope.REPLICA, "bytes of concurrent request bodies; half per tenant, a quarter per key", 64 * MIB
)
WAITING_SEQUENCES = Limit(
    Scope.KEY, "waiting sequences of a replica, minus half of those of other keys", 64, "engine.max_num_waiting"
)
UNDELAYED_REFUSALS = Limit(
    Scope.KEY, "error responses of a replica per minute without delay, in bursts of at most a thirtieth", 600
)
PENDING_GRAMMARS = Limit(Scope.KEY, "grammars compiling or waiting to be compiled on a replica", 8)
GRAMMAR_SECONDS_PER_MINUTE = Limit(Scope.KEY, "CPU seconds per minute to compile grammars on a replica", 6)


def list_limits() -> tuple[Limit, ...]:
    """Return every limit of this module, in the order of the file."""
    return tuple(value for value in globals().values() if isinstance(value, Limit))
