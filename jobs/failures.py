"""Explanation of an attempt's failure for its `error` event, from what was raised. Knows Ray's exceptions."""

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
"""Exceptions that a mistake in a program raises: another attempt would make it again."""

_LOST = (RayActorError, WorkerCrashedError, NodeDiedError)
"""Ray's exceptions for a process or a machine that is gone; the peers of a lost worker raise what they like."""

_NO_MEMORY = ("DefaultCPUAllocator", "CUDA error: out of memory", "_STATUS_ALLOC_FAILED")
"""Texts of torch's CPU allocator, and of CUDA, cuBLAS and cuDNN, about memory that torch has not got."""

_NO_SPACE = os.strerror(errno.ENOSPC)


@dataclass(frozen=True)
class Failure:
    """The `data` of an `error` event, and its message."""

    code: str
    message: str
    field: str | None = None
    value: Any = None
    retryable: bool = True


def explain(error: BaseException) -> Failure:
    """The most telling cause of `error`: an error of ours, else a lack of memory or of disk, else a lost worker."""
    ours = root_cause(error)
    if ours is not None:
        # The same input, and a run that repeats itself step by step, would fail again.
        retryable = not isinstance(ours, InvalidInputError | TrainingError)
        return Failure(ours.code, ours.message, ours.field, _plain(ours.value), retryable)
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, OutOfMemoryError):
            message = f"the machine ran out of memory: {_first_line(cause)}"
            return Failure(ReasonCode.OUT_OF_MEMORY, message)
        line = _line_with(cause, *_NO_MEMORY)
        # torch's goes by its name: the driver imports no torch
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
        return Failure(ReasonCode.WORKER_LOST, f"workers were lost again and again: {_first_line(lost or causes[0])}")
    return Failure(SwiftKVError.code, f"{type(causes[0]).__name__}: {_first_line(causes[0])}")


def root_cause(error: BaseException) -> SwiftKVError | None:
    """The error of ours that Ray has wrapped in `error`, if there is one."""
    return next((cause for cause in _causes(error) if isinstance(cause, SwiftKVError)), None)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield what Ray and torch have wrapped in `error`, else `error`. A group of workers follows the failures of each:
    its text has what pickling takes from them, e.g. what they were raised from."""
    wrapped = _wrapped(error)
    for cause in wrapped:
        yield from _causes(cause)
    if not wrapped or _is_ray_trains(error, "WorkerGroupError"):
        yield error


def _wrapped(error: Any) -> list[BaseException]:
    if isinstance(error, RayTaskError):
        return [error.cause]
    if _is_ray_trains(error, "WorkerGroupError"):
        # Workers that lose a peer fail too, so every worker's failure is looked at.
        return [*error.worker_failures.values()]
    if _is_ray_trains(error, "ControllerError"):
        return [error.controller_failure]
    if type(error).__name__ == "CheckpointException":  # torch's
        return [cause for cause, _trace in getattr(error, "failures", {}).values()]
    unhealthy = getattr(error, "health_check_failure", None)  # of a worker that Ray Train cannot ask any more
    return [] if unhealthy is None else [unhealthy]


def _is_ray_trains(error: Any, name: str) -> bool:
    """Whether it is an error of that name of Ray Train, which an attempt imports, for seconds, when it needs it."""
    ray_train = sys.modules.get("ray.train")
    return ray_train is not None and isinstance(error, getattr(ray_train, name))


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _first_line(error: BaseException) -> str:
    """The first line that tells something: how an actor died stands below a heading and its indented names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    heading = getattr(error, "BASE_ERROR_MSG", None)
    return next((line for line in lines if line != heading), heading or type(error).__name__)


def _line_with(error: BaseException, *texts: str) -> str | None:
    """The first line that has one of `texts` in it."""
    return next((line.strip() for line in str(error).splitlines() if any(text in line for text in texts)), None)
