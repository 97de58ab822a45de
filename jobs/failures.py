"""Explain an attempt's failure, from the exception, for its `error` event."""

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

_DEFECTS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError)
"""Exceptions due to a defect in a program: another attempt would fail in the same way."""

_LOST = (RayActorError, WorkerCrashedError, NodeDiedError)
"""Ray's exceptions for a lost process or machine. The peers of a lost worker may raise any exception."""

_NO_MEMORY = ("DefaultCPUAllocator", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")
"""Messages of torch's CPU allocator and of CUDA, cuBLAS and cuDNN about a failed allocation."""

_NO_SPACE = os.strerror(errno.ENOSPC)


@dataclass(frozen=True)
class Failure:
    """Message and `data` of an `error` event."""

    code: str
    message: str
    field: str | None = None
    value: Any = None
    retryable: bool = True


def explain(error: BaseException) -> Failure:
    """Explain `error` by its most specific cause: one of our errors, then lack of memory or disk space, then a lost
    worker."""
    ours = root_cause(error)
    if ours is not None:
        # The same input, and a run whose steps are deterministic, would fail again.
        retryable = not isinstance(ours, InvalidInputError | TrainingError)
        return Failure(ours.code, ours.message, ours.field, _plain(ours.value), retryable)
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, OutOfMemoryError):
            message = f"the machine ran out of memory: {_first_line(cause)}"
            return Failure(ReasonCode.OUT_OF_MEMORY, message)
        line = _line_with(cause, *_NO_MEMORY)
        # torch's is matched by name: the driver imports no torch
        if line is None and (isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError"):
            line = _first_line(cause)
        if line is not None:
            message = f"a worker ran out of memory: {line}"
            return Failure(ReasonCode.OUT_OF_MEMORY, message, "training.micro_batch_size", retryable=False)
    for cause in causes:
        line = _line_with(cause, _NO_SPACE)
        if line is not None:
            return Failure(ReasonCode.DISK_FULL, f"a disk is full: {line}")
    for cause in causes:
        if isinstance(cause, _DEFECTS):
            return Failure(SwiftKVError.code, f"{type(cause).__name__}: {_first_line(cause)}", retryable=False)
    lost = next((cause for cause in causes if isinstance(cause, _LOST)), None)
    if lost is not None or _is_ray_trains(causes[-1], "WorkerGroupError"):
        return Failure(ReasonCode.WORKER_LOST, f"workers were lost repeatedly: {_first_line(lost or causes[0])}")
    return Failure(SwiftKVError.code, f"{type(causes[0]).__name__}: {_first_line(causes[0])}")


def root_cause(error: BaseException) -> SwiftKVError | None:
    """Return our own error that Ray has wrapped in `error`, if there is one."""
    return next((cause for cause in _causes(error) if isinstance(cause, SwiftKVError)), None)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors that Ray and torch have wrapped in `error`, or `error` itself. For a worker group the group
    error comes last: its text has what pickling drops from the workers' errors, such as their causes."""
    wrapped = _wrapped(error)
    for cause in wrapped:
        yield from _causes(cause)
    if not wrapped or _is_ray_trains(error, "WorkerGroupError"):
        yield error


def _wrapped(error: Any) -> list[BaseException]:
    if isinstance(error, RayTaskError):
        return [error.cause]
    if _is_ray_trains(error, "WorkerGroupError"):
        # Workers that lose a peer fail too, so every worker's failure counts.
        return [*error.worker_failures.values()]
    if _is_ray_trains(error, "ControllerError"):
        return [error.controller_failure]
    if type(error).__name__ == "CheckpointException":  # from torch
        return [cause for cause, _trace in getattr(error, "failures", {}).values()]
    unhealthy = getattr(error, "health_check_failure", None)  # of a worker that Ray Train can no longer reach
    return [] if unhealthy is None else [unhealthy]


def _is_ray_trains(error: Any, name: str) -> bool:
    """Whether `error` is Ray Train's error of that name. Ray Train takes seconds to import, so it is not imported
    here."""
    ray_train = sys.modules.get("ray.train")
    return ray_train is not None and isinstance(error, getattr(ray_train, name))


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _first_line(error: BaseException) -> str:
    """Return the first informative line: an actor's cause of death comes after a heading and indented names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    heading = getattr(error, "BASE_ERROR_MSG", None)
    return next((line for line in lines if line != heading), heading or type(error).__name__)


def _line_with(error: BaseException, *texts: str) -> str | None:
    """Return the first line that contains one of `texts`; None if there is none."""
    return next((line.strip() for line in str(error).splitlines() if any(text in line for text in texts)), None)
