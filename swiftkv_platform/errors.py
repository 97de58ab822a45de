"""All exceptions of this project. The API maps them to HTTP (`web/problems.py`).

SwiftKVError
├── InvalidInputError          input that the caller can correct; names field, value and accepted values
│   ├── DataError              data set unreadable, empty or without the needed columns
│   ├── ModelError             checkpoint or configuration not usable
│   ├── ContextLengthError     prompt longer than the model's context
│   └── ProtocolError          workers of another version do not know the request
├── UnauthenticatedError       missing or unknown API key
├── ForbiddenError             the key does not grant this
│   └── OverQuotaError             more than the tenant's quota; never succeeds
├── QuotaExceededError         quota in use; the same request may succeed later
├── NotFoundError              no such job, model, deployment or object
│   └── ModelNotFoundError         the requested model is not served
├── ConflictError              valid request, but not in the current state
│   ├── IllegalTransitionError     status change not allowed
│   ├── StaleVersionError          another writer has changed the row
│   ├── LeaseLostError             another control plane is the leader now
│   ├── PreconditionFailedError    the version is not that of `If-Match`
│   ├── IdempotencyConflictError   `Idempotency-Key` used before with another body
│   └── UnreadableRowError         row written by another version of this program
├── StorageError               object store failed
│   ├── ObjectNotFoundError
│   ├── BucketError                bucket missing, or access denied
│   └── ArtifactCorruptError       file differs from its manifest
├── ClusterUnavailableError    Ray is unavailable
├── DatabaseUnavailableError   the database is unavailable
├── OverloadedError            overloaded; retry the same request after `retry_after_s`
│   ├── RateLimitedError           the key's requests per minute are used up
│   └── QueueFullError             the engine's waiting queue is full
├── DeadlineExceededError      no response before the caller's deadline
├── EngineDeadError            the engine's loop has failed
│   └── LoadingError               the model is still loading
├── GenerationError            the model's logits for a request are NaN
└── TrainingError              training cannot continue
    ├── LossNotFiniteError
    └── QualityGateError
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, Self

_DEFAULT_RETRY_AFTER_S = 1.0


class SwiftKVError(Exception):
    """Base class of all errors of this project."""

    code: str = "internal_error"
    """Stable error code; `status_reason.code` of a failed job."""

    def __init__(self, message: str, *, field: str | None = None, value: Any = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        """Dotted path of the invalid field, e.g. `swiftkv.num_key_value_layers`."""
        self.value = value

    @classmethod
    def for_field(cls, field: str, value: Any, why: str) -> Self:
        """Return an error with the message "`field` is `value`" + `why`; `why` starts with its punctuation."""
        return cls(f"{field} is {value!r}{why}", field=field, value=value)

    def rename_fields(self, rename: Callable[[str], str]) -> None:
        """Make the error name the fields of the caller's request. `rename`: as in `rename_fields_in_text`."""
        self.message = rename_fields_in_text(self.message, self.field, rename)
        self.field = None if self.field is None else rename(self.field)


class InvalidInputError(SwiftKVError):
    code = "invalid_input"


class DataError(InvalidInputError):
    code = "data_error"


class ModelError(InvalidInputError):
    code = "model_error"


class ContextLengthError(InvalidInputError):
    """A prompt is too long. Code and message match OpenAI's API, which routers parse.

    Args:
        max_tokens: max tokens of prompt and answer together.
    """

    code = "context_length_exceeded"

    def __init__(self, message: str, *, field: str | None = None, value: Any = None, max_tokens: int) -> None:
        text = f"{message}. This model's maximum context length is {max_tokens} tokens"
        super().__init__(text, field=field, value=value)
        self._short_message, self._max_tokens = message, max_tokens

    def with_field(self, field: str) -> Self:
        """Return a copy of this error for another field of the request."""
        message = self._short_message.replace(f"{self.field} has", f"{field} has", 1)
        return type(self)(message, field=field, value=self.value, max_tokens=self._max_tokens)


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
    """The bucket is missing or access is denied; a retry does not help."""


class ArtifactCorruptError(StorageError):
    code = "artifact_corrupt"


class ClusterUnavailableError(SwiftKVError):
    code = "cluster_unavailable"


class DatabaseUnavailableError(SwiftKVError):
    code = "database_unavailable"


class OverloadedError(SwiftKVError):
    """All slots are in use.

    Args:
        retry_after_s: expected wait; None or 0: unknown.
    """

    code = "overloaded"

    def __init__(
        self, message: str, *, field: str | None = None, value: Any = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message, field=field, value=value)
        self.retry_after_s = retry_after_s or _DEFAULT_RETRY_AFTER_S
        """Seconds until a retry is expected to succeed."""


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


_QUOTED_OR_WORD = re.compile(r"(?<!\w)'[^']*'|(?<![\w./-])[A-Za-z]\w*(?:\.\w+|\[\d+\])*")


def rename_fields_in_text(text: str, field: str | None, rename: Callable[[str], str]) -> str:
    """Rename the fields in an error's message. Quoted values stay, and so do words that may be ordinary ones, such as
    `stop`, unless they are the invalid field.

    Args:
        field: the invalid field.
        rename: converts a field's path to that in the caller's request; returns other words unchanged.
    """

    def convert(found: re.Match[str]) -> str:
        is_field = found[0] == field or (found[0][0] != "'" and {*"._"} & {*found[0]})
        return rename(found[0]) if is_field else found[0]

    return _QUOTED_OR_WORD.sub(convert, text)


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return ` (did you mean NAME?)` with the closest known name, or an empty string."""
    near = get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]}?)" if near else ""
