"""Why an attempt failed, in the words of an `error` event, from whatever was raised. Knows Ray's exceptions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ray.exceptions import NodeDiedError, OutOfMemoryError, RayActorError, RayTaskError, WorkerCrashedError
from ray.train import ControllerError, WorkerGroupError

from swiftkv_platform.errors import InvalidInputError, SwiftKVError, TrainingError

_DEFECTS = (ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError)
"""What a mistake in a program raises: another attempt would make it again."""

_LESS_MEMORY = (
    "what takes less: a smaller training.micro_batch_size or data.max_length, training.gradient_checkpointing, "
    "sharding.strategy fsdp2 or deepspeed with zero_stage 3 over more workers, sharding.cpu_offload; "
    "`swiftkv plan` says how much"
)


@dataclass(frozen=True)
class Failure:
    """The `data` of an `error` event, and its message."""

    code: str
    message: str
    field: str | None = None
    value: Any = None
    retryable: bool = True


def explain(error: BaseException) -> Failure:
    """The most telling cause of `error`: an error of ours, else a lack of memory, else a lost worker."""
    ours = root_cause(error)
    if ours is not None:
        # The same input, and a run that repeats itself step by step, would fail again.
        retryable = not isinstance(ours, InvalidInputError | TrainingError)
        return Failure(ours.code, ours.message, ours.field, _plain(ours.value), retryable)
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, OutOfMemoryError):
            return Failure("out_of_memory", f"the machine ran out of memory; {_LESS_MEMORY}: {_first_line(cause)}")
        # torch's on a device, and what its allocator raises on a CPU
        if type(cause).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator" in str(cause):
            message = f"a worker ran out of memory; {_LESS_MEMORY}: {_first_line(cause)}"
            return Failure("out_of_memory", message, "training.micro_batch_size", retryable=False)
    for cause in causes:
        if isinstance(cause, _DEFECTS):
            return Failure(SwiftKVError.code, f"{type(cause).__name__}: {_first_line(cause)}", retryable=False)
    for cause in causes:
        if isinstance(cause, WorkerGroupError | RayActorError | WorkerCrashedError | NodeDiedError):
            return Failure("worker_lost", f"workers were lost again and again: {_first_line(cause)}")
    return Failure(SwiftKVError.code, f"{type(causes[0]).__name__}: {_first_line(causes[0])}")


def root_cause(error: BaseException) -> SwiftKVError | None:
    """The error of ours that Ray has wrapped in `error`, if there is one."""
    return next((cause for cause in _causes(error) if isinstance(cause, SwiftKVError)), None)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """`error` and everything Ray has wrapped in it."""
    if isinstance(error, RayTaskError):
        yield error.cause
    elif isinstance(error, WorkerGroupError):
        # Workers that lose a peer fail too, so every worker's failure is looked at.
        for failure in error.worker_failures.values():
            yield from _causes(failure)
        yield error
    elif isinstance(error, ControllerError):
        yield from _causes(error.controller_failure)
    else:
        yield error


def _plain(value: Any) -> Any:
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
