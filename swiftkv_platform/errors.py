"""The whole exception tree: codes, messages and fields. The API maps errors to HTTP (`web/problems.py`).

SwiftKVError
├── InvalidInputError          input that the caller can correct: names the field, its value and what is accepted
│   ├── DataError              a data set that cannot be read, is empty or lacks columns
│   ├── ModelError             a checkpoint or configuration that cannot be used
│   ├── ContextLengthError     a prompt that is longer than the model's context
│   └── ProtocolError          a request that workers of another version do not understand
├── UnauthenticatedError       no key, or an unknown one
├── ForbiddenError             a key that does not open this
│   └── OverQuotaError             more than the tenant is ever granted
├── QuotaExceededError         more than the tenant is granted at a time; the same request may succeed later
├── NotFoundError              no such job, model, deployment or object
│   └── ModelNotFoundError         a request for another model than the one that is served
├── ConflictError              legal request, wrong moment
│   ├── IllegalTransitionError     a status that cannot follow the present one
│   ├── StaleVersionError          another writer changed the row first
│   ├── LeaseLostError             another control plane leads now, so this one must not change jobs
│   ├── PreconditionFailedError    not the version that the caller named
│   ├── IdempotencyConflictError   the same key with another body
│   └── UnreadableRowError         a row that another version of this program has written
├── StorageError               the object store failed
│   ├── ObjectNotFoundError
│   ├── BucketError                a bucket that is not there, or closed to this program
│   └── ArtifactCorruptError       a file differs from its manifest
├── ClusterUnavailableError    Ray does not answer
├── DatabaseUnavailableError   the database does not answer
├── OverloadedError            no room now; retry the same request after `retry_after_s`
│   ├── RateLimitedError           a key has used up its requests per minute
│   └── QueueFullError             the engine's waiting queue is full
├── DeadlineExceededError      the answer did not come within the time the caller gave it
├── EngineDeadError            the engine's loop has failed and answers no more requests
│   └── LoadingError               no model is loaded yet
├── GenerationError            the model's logits for one request are not numbers
└── TrainingError              a run that cannot go on
    ├── LossNotFiniteError
    └── QualityGateError
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, Self

_SHORT_WAIT_S = 1.0
"""`OverloadedError.retry_after_s` if no wait is known."""


class SwiftKVError(Exception):
    """Base of every error this project raises on purpose."""

    code: str = "internal_error"
    """Stable machine-readable name; `status_reason.code` of a failed job."""

    def __init__(self, message: str, *, field: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        """Dotted path of the offending field, e.g. `swiftkv.num_key_value_layers`."""
        self.value = value

    @classmethod
    def for_field(cls, field: str, value: Any, why: str) -> Self:
        """Return an error with the message "`field` is `value`" followed by `why`, which brings its own punctuation."""
        return cls(f"{field} is {value!r}{why}", field=field, value=value)


class InvalidInputError(SwiftKVError):
    """Bad input; the message says what would be accepted."""

    code = "invalid_input"


class DataError(InvalidInputError):
    code = "data_error"


class ModelError(InvalidInputError):
    code = "model_error"


class ContextLengthError(InvalidInputError):
    """Refusal of a prompt that is too long, with the code and the sentence of OpenAI's API, which routers look for.

    Args:
        most: maximum number of tokens of prompt and answer together.
    """

    code = "context_length_exceeded"

    def __init__(self, message: str, *, field: str | None = None, value: Any = None, most: int) -> None:
        super().__init__(f"{message}. This model's maximum context length is {most} tokens", field=field, value=value)
        self._given = message, most

    def renamed(self, field: str) -> Self:
        """Return a copy of this error about another field of the request."""
        message, most = self._given
        return type(self)(
            message.replace(f"{self.field} has", f"{field} has", 1), field=field, value=self.value, most=most
        )


class ProtocolError(InvalidInputError):
    code = "protocol_mismatch"


class UnauthenticatedError(SwiftKVError):
    code = "unauthenticated"


class ForbiddenError(SwiftKVError):
    code = "forbidden"


class OverQuotaError(ForbiddenError):
    code = "over_quota"


class QuotaExceededError(SwiftKVError):
    code = "quota_exceeded"


class NotFoundError(SwiftKVError):
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


class ConflictError(SwiftKVError):
    code = "conflict"


class IllegalTransitionError(ConflictError):
    code = "illegal_transition"


class StaleVersionError(ConflictError):
    code = "stale_version"


class LeaseLostError(ConflictError):
    code = "lease_lost"


class PreconditionFailedError(ConflictError):
    code = "precondition_failed"


class IdempotencyConflictError(ConflictError):
    code = "idempotency_key_reused"


class UnreadableRowError(ConflictError):
    code = "unreadable_row"


class StorageError(SwiftKVError):
    code = "storage_error"


class ObjectNotFoundError(StorageError):
    code = "object_not_found"


class BucketError(StorageError):
    """Refusal of a whole bucket, which stays one however often it is asked."""


class ArtifactCorruptError(StorageError):
    code = "artifact_corrupt"


class ClusterUnavailableError(SwiftKVError):
    code = "cluster_unavailable"


class DatabaseUnavailableError(SwiftKVError):
    code = "database_unavailable"


class OverloadedError(SwiftKVError):
    """Refusal because there is no room now.

    Args:
        retry_after_s: expected wait; None or 0: unknown.
    """

    code = "overloaded"

    def __init__(
        self, message: str, *, field: str | None = None, value: Any = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, field=field, value=value)
        self.retry_after_s = retry_after_s or _SHORT_WAIT_S
        """Seconds after which the same request is accepted, if no other takes the room first."""


class RateLimitedError(OverloadedError):
    code = "rate_limited"


class QueueFullError(OverloadedError):
    code = "queue_full"


class DeadlineExceededError(SwiftKVError):
    code = "deadline_exceeded"


class EngineDeadError(SwiftKVError):
    code = "engine_dead"


class LoadingError(EngineDeadError):
    code = "loading"


class GenerationError(SwiftKVError):
    code = "generation_failed"


class TrainingError(SwiftKVError):
    code = "training_error"


class LossNotFiniteError(TrainingError):
    code = "loss_not_finite"


class QualityGateError(TrainingError):
    code = "quality_gate"


def lone_surrogate(text: str) -> int | None:
    """Return the index of the first lone surrogate in `text`, or None. JSON can escape one; UTF-8 cannot encode it."""
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean ...?)` with the closest known name, or an empty string if none is close."""
    near = get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
