"""Ray's exceptions in the words of an `error` event."""

import errno
import pickle
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RayTaskError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus
from torch.distributed.checkpoint.api import CheckpointException

from swiftkv_platform.errors import DataError, LossNotFiniteError, QualityGateError, StorageError, SwiftKVError
from swiftkv_platform.jobs.failures import Failure, explain, root_cause

NO_MEMORY = "Task was killed due to the node running low on memory."
LOST = "workers were lost again and again"


def from_task(error: Exception) -> Any:
    """`error` as `ray.get` raises it."""
    return RayTaskError("prepare", "traceback", error).as_instanceof_cause()


def group(*failures: Any) -> Any:
    """The failures of ranks 0, 1, ..., as a driver gets them from Ray Train."""
    workers = {rank: WorkerStatus(running=False, error=failure) for rank, failure in enumerate(failures)}
    return pickle.loads(pickle.dumps(WorkerGroupPollStatus(workers).get_worker_group_error()))


def raised(error: BaseException, traceback: str = "Traceback") -> Any:
    """By the training function of a worker."""
    return UserExceptionWithTraceback(error, traceback_str=traceback)


def died(error: Exception) -> Any:
    """Ray Train's error for a worker that it cannot ask any more."""
    return WorkerHealthCheckFailedError("A worker health check failed.\nWorker info: ...", error)


PEER = raised(RuntimeError("Connection closed by peer"))


@pytest.mark.parametrize(
    ("error", "retryable"),
    [
        (DataError("no rows", field="data.sources[0]", value="x.jsonl"), False),
        (LossNotFiniteError("step 3", field="optimizer.learning_rate", value=1.0), False),
        (QualityGateError("too far", field="evaluation.max_kl", value=0.5), False),
        (StorageError("the store is away"), True),
    ],
)
def test_our_own_errors_keep_their_words_through_a_task(error: SwiftKVError, retryable: bool) -> None:
    expected = Failure(error.code, error.message, error.field, error.value, retryable)
    assert explain(error) == expected
    assert explain(from_task(pickle.loads(pickle.dumps(error)))) == expected
    assert explain(ControllerError(from_task(error))) == expected, "of a controller that cannot start workers"


def test_the_error_of_one_worker_counts_more_than_its_peers_lost_connections() -> None:
    ours = StorageError("the store is away")
    failed = WorkerGroupError("workers failed", {0: RuntimeError("connection closed by peer"), 1: ours})
    assert (explain(failed).code, root_cause(failed)) == ("storage_error", ours)


@pytest.mark.parametrize(
    ("failures", "code", "retryable"),
    [
        ({0: RuntimeError("connection closed by peer"), 1: RayActorError()}, "worker_lost", True),
        ({0: RayActorError(), 1: OutOfMemoryError("node ran low on memory")}, "out_of_memory", True),
        ({0: KeyError("lm_head"), 1: RuntimeError("connection closed by peer")}, "internal_error", False),
    ],
)
def test_a_lost_worker_is_worth_another_try(failures: dict[int, Exception], code: str, retryable: bool) -> None:
    failure = explain(WorkerGroupError("workers failed", failures))
    assert (failure.code, failure.retryable) == (code, retryable)


def too_large() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    return caught.value


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), "CUDA out of memory"),
        (too_large(), ""),
        (MemoryError("Unable to allocate 3 GiB"), "Unable to allocate 3 GiB"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might come late"), "CUDA error: out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
        (RuntimeError("of a convolution\ncuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_a_batch_that_does_not_fit_the_device_is_not(error: Exception, line: str) -> None:
    failure = explain(group(raised(error)))
    assert (failure.code, failure.field, failure.retryable) == ("out_of_memory", "training.micro_batch_size", False)
    assert "training.gradient_checkpointing" in failure.message
    assert failure.message.endswith(line)


def test_ray_s_killing_of_a_worker_for_memory_is_seen_through_the_failed_health_check() -> None:
    failure = explain(group(PEER, died(OutOfMemoryError(NO_MEMORY))))
    assert (failure.code, failure.retryable) == ("out_of_memory", True)
    assert failure.message.endswith(NO_MEMORY)


def test_a_lost_worker_is_told_by_how_it_died_or_by_the_first_error() -> None:
    death = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"
    actor = RayActorError(error_msg=f"{RayActorError.BASE_ERROR_MSG}\n\tclass_name: RayTrainWorker\n{death}\n")
    nccl = raised(RuntimeError("NCCL error in: init.cpp\nncclSystemError"))
    told = [
        (group(PEER, died(actor)), death),
        (group(PEER, died(ActorDiedError())), "The actor died unexpectedly before finishing this task."),
        (group(nccl), "NCCL error in: init.cpp"),
    ]
    assert [explain(error) for error, _ in told] == [Failure("worker_lost", f"{LOST}: {how}") for _, how in told]


def test_a_full_disk_is_named_wherever_it_was_met() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/tmp/checkpoint-x/__0_0.distcp")
    for error in (
        from_task(full),
        group(raised(full)),
        group(raised(CheckpointException("save", {0: (full, None)}))),  # as from elsewhere
        group(raised(RuntimeError("writing failed"), traceback=f"OSError: {full}\nRuntimeError: writing failed")),
    ):
        failure = explain(error)
        assert (failure.code, failure.retryable) == ("worker_lost", True)
        assert failure.message.endswith("No space left on device: '/tmp/checkpoint-x/__0_0.distcp'")


def test_anything_else_is_named_by_its_type() -> None:
    failure = explain(ZeroDivisionError("division by zero"))
    assert failure == Failure("internal_error", "ZeroDivisionError: division by zero", retryable=False)
    assert explain(from_task(KeyError("lm_head"))) == Failure("internal_error", "KeyError: 'lm_head'", retryable=False)
    assert explain(from_task(OSError("disk full"))) == Failure("internal_error", "OSError: disk full")
    assert root_cause(ZeroDivisionError()) is None


def test_a_value_that_json_does_not_know_is_told_as_text() -> None:
    assert explain(DataError("bad", value=("a", 1))).value == "('a', 1)"
