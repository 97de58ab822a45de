"""Code, message and retryability of an attempt's failure, from its exception."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError

from swiftkv_platform.contract.events import ReasonCode
from swiftkv_platform.errors import InvalidInputError, SwiftKVError, TrainingError

_PROGRAM_ERRORS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError)
"""Exceptions of defective programs: another attempt would fail in the same way."""

_WORKER_LOST_ERRORS = (RayActorError, WorkerCrashedError, NodeDiedError)
"""Ray's exceptions for a lost process or node. The peers of a lost worker may raise any exception."""

_OUT_OF_MEMORY_MESSAGES = ("DefaultCPUAllocator", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")
"""Messages of torch's CPU allocator and of CUDA, cuBLAS and cuDNN about a failed allocation."""

_NO_SPACE_MESSAGE = os.strerror(errno.ENOSPC)


@dataclass(frozen=True)
class Failure:
    """Message and `data` of an `error` event."""

    code: str
    message: str
    field: str | None = None
    value: Any = None
    retryable: bool = True


def explain_failure(error: BaseException) -> Failure:
    """Explain `error` by its most specific cause."""
    # 1. our own errors
    swiftkv_error = find_root_cause(error)
    if swiftkv_error is not None:
        # Bad input and deterministic training steps would fail again.
        retryable = not isinstance(swiftkv_error, InvalidInputError | TrainingError)
        return Failure(
            swiftkv_error.code,
            swiftkv_error.message,
            swiftkv_error.field,
            _to_json_value(swiftkv_error.value),
            retryable,
        )
    # 2. out of memory
    causes = list(_iter_causes(error))
    for cause in causes:
        if isinstance(cause, OutOfMemoryError):
            message = f"the machine ran out of memory: {_get_first_line(cause)}"
            return Failure(ReasonCode.OUT_OF_MEMORY, message)
        line = _find_line(cause, *_OUT_OF_MEMORY_MESSAGES)
        # torch's error is matched by name, because the driver does not import torch
        if line is None and (isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError"):
            line = _get_first_line(cause)
        if line is not None:
            message = f"a worker ran out of memory: {line}"
            return Failure(ReasonCode.OUT_OF_MEMORY, message, "training.micro_batch_size", retryable=False)
    # 3. disk full
    for cause in causes:
        line = _find_line(cause, _NO_SPACE_MESSAGE)
        if line is not None:
            return Failure(ReasonCode.DISK_FULL, f"a disk is full: {line}")
    # 4. defects
    for cause in causes:
        if isinstance(cause, _PROGRAM_ERRORS):
            return Failure(SwiftKVError.code, f"{type(cause).__name__}: {_get_first_line(cause)}", retryable=False)
    # 5. lost workers
    lost = next((cause for cause in causes if isinstance(cause, _WORKER_LOST_ERRORS)), None)
    if lost is not None or _is_ray_train_error(causes[-1], "WorkerGroupError"):
        return Failure(ReasonCode.WORKER_LOST, f"workers were lost repeatedly: {_get_first_line(lost or causes[0])}")
    return Failure(SwiftKVError.code, f"{type(causes[0]).__name__}: {_get_first_line(causes[0])}")


def find_root_cause(error: BaseException) -> SwiftKVError | None:
    """Return the `SwiftKVError` that Ray has wrapped in `error`, if any."""
    return next((cause for cause in _iter_causes(error) if isinstance(cause, SwiftKVError)), None)


def _iter_causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that Ray and torch have wrapped in `error`, or `error` itself. The error of a worker group comes
    last: its text has details that pickling drops from the workers' errors, such as their causes."""
    wrapped = _list_causes(error)
    for cause in wrapped:
        yield from _iter_causes(cause)
    if not wrapped or _is_ray_train_error(error, "WorkerGroupError"):
        yield error


def _list_causes(error: Any) -> list[BaseException]:
    if isinstance(error, RayTaskError):
        return [error.cause]
    if _is_ray_train_error(error, "WorkerGroupError"):
        # The peers of a lost worker fail too, so every worker's failure counts.
        return [*error.worker_failures.values()]
    if _is_ray_train_error(error, "ControllerError"):
        return [error.controller_failure]
    if type(error).__name__ == "CheckpointException":  # from torch
        return [cause for cause, _trace in getattr(error, "failures", {}).values()]
    unhealthy = getattr(error, "health_check_failure", None)  # of a worker that Ray Train can no longer reach
    return [] if unhealthy is None else [unhealthy]


def _is_ray_train_error(error: Any, name: str) -> bool:
    """Whether `error` is Ray Train's error `name`. Ray Train takes seconds to import, so it is not imported here."""
    ray_train = sys.modules.get("ray.train")
    return ray_train is not None and isinstance(error, getattr(ray_train, name))


def _to_json_value(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _get_first_line(error: BaseException) -> str:
    """Return the first informative line: for a dead actor, the line after a heading and indented names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    heading = getattr(error, "BASE_ERROR_MSG", None)
    return next((line for line in lines if line != heading), heading or type(error).__name__)


def _find_line(error: BaseException, *texts: str) -> str | None:
    """Return the first line that contains one of `texts`; None if no line does."""
    return next((line.strip() for line in str(error).splitlines() if any(text in line for text in texts)), None)
