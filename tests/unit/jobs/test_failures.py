"""Ray's exceptions in the words of an `error` event."""

from __future__ import annotations

import errno
import pickle

import pytest
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RayTaskError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus

from swiftkv_platform.errors import DataError, LossNotFiniteError, QualityGateError, StorageError, SwiftKVError
from swiftkv_platform.jobs.failures import Failure, explain, root_cause


def _from_task(error: Exception) -> Exception:
    """`error` as `ray.get` raises it."""
    raised = RayTaskError("prepare", "traceback", error).as_instanceof_cause()
    assert isinstance(raised, Exception)
    return raised


def _group(*failures: Exception) -> WorkerGroupError:
    """The failures of ranks 0, 1, ..., as a driver gets them from Ray Train."""
    workers = {rank: WorkerStatus(running=False, error=failure) for rank, failure in enumerate(failures)}
    group = pickle.loads(pickle.dumps(WorkerGroupPollStatus(workers).get_worker_group_error()))
    assert isinstance(group, WorkerGroupError)
    return group


def _raised(error: BaseException, traceback: str = "Traceback") -> Exception:
    """By the training function of a worker."""
    failure = UserExceptionWithTraceback(error, traceback_str=traceback)
    assert isinstance(failure, Exception)
    return failure


def _died(error: Exception) -> Exception:
    """Ray Train's error for a worker that it cannot ask any more."""
    failure = WorkerHealthCheckFailedError("A worker health check failed.\nWorker info: ...", error)
    assert isinstance(failure, Exception)
    return failure


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
    assert explain(_from_task(pickle.loads(pickle.dumps(error)))) == expected


def test_the_error_of_one_worker_counts_more_than_its_peers_lost_connections() -> None:
    ours = StorageError("the store is away")
    group = WorkerGroupError("workers failed", {0: RuntimeError("connection closed by peer"), 1: ours})

    assert explain(group).code == "storage_error"
    assert root_cause(group) is ours


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


def test_a_batch_that_does_not_fit_the_device_is_not() -> None:
    import torch

    causes: list[Exception] = [torch.OutOfMemoryError("CUDA out of memory")]
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    causes.append(caught.value)

    for cause in causes:
        failure = explain(WorkerGroupError("workers failed", {0: cause}))
        assert (failure.code, failure.field, failure.retryable) == ("out_of_memory", "training.micro_batch_size", False)
        assert "training.gradient_checkpointing" in failure.message


def test_ray_s_killing_of_a_worker_for_memory_is_seen_through_the_failed_health_check() -> None:
    peer = _raised(RuntimeError("Connection closed by peer"))
    failure = explain(_group(peer, _died(OutOfMemoryError("Task was killed due to the node running low on memory."))))

    assert (failure.code, failure.retryable) == ("out_of_memory", True)
    assert failure.message.endswith("Task was killed due to the node running low on memory.")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError("Unable to allocate 3 GiB"), "Unable to allocate 3 GiB"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might come late"), "CUDA error: out of memory"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), "CUDA error: CUBLAS_STATUS_ALLOC_FAILED"),
        (RuntimeError("of a convolution\ncuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_memory_that_torch_s_own_error_does_not_cover_is_memory_too(error: Exception, line: str) -> None:
    failure = explain(_group(_raised(error)))

    assert (failure.code, failure.field, failure.retryable) == ("out_of_memory", "training.micro_batch_size", False)
    assert failure.message.endswith(line)


def test_a_lost_worker_is_told_by_how_it_died() -> None:
    death = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"
    actor = RayActorError(error_msg=f"{RayActorError.BASE_ERROR_MSG}\n\tclass_name: RayTrainWorker\n{death}\n")
    peer = _raised(RuntimeError("Connection closed by peer"))

    expected = Failure("worker_lost", f"workers were lost again and again: {death}")
    assert explain(_group(peer, _died(actor))) == expected
    unexplained = explain(_group(peer, _died(ActorDiedError())))
    assert unexplained.message.endswith(": The actor died unexpectedly before finishing this task.")


def test_workers_that_none_of_ray_s_errors_explain_are_told_by_the_first_of_them() -> None:
    failure = explain(_group(_raised(RuntimeError("NCCL error in: init.cpp\nncclSystemError"))))
    assert failure == Failure("worker_lost", "workers were lost again and again: NCCL error in: init.cpp")


def test_a_full_disk_is_named_wherever_it_was_met() -> None:
    from torch.distributed.checkpoint.api import CheckpointException

    full = OSError(errno.ENOSPC, "No space left on device", "/tmp/checkpoint-x/__0_0.distcp")
    for error in (
        _from_task(full),
        _group(_raised(full)),
        _group(_raised(CheckpointException("save", {0: (full, None)}))),  # type: ignore[dict-item]  # as from elsewhere
        _group(_raised(RuntimeError("writing failed"), traceback=f"OSError: {full}\nRuntimeError: writing failed")),
    ):
        failure = explain(error)
        assert (failure.code, failure.retryable) == ("worker_lost", True)
        assert failure.message.endswith("No space left on device: '/tmp/checkpoint-x/__0_0.distcp'")


def test_a_controller_that_cannot_start_workers_is_seen_through() -> None:
    assert explain(ControllerError(_from_task(DataError("no rows")))).code == "data_error"


def test_anything_else_is_named_by_its_type() -> None:
    failure = explain(ZeroDivisionError("division by zero"))
    assert failure == Failure("internal_error", "ZeroDivisionError: division by zero", retryable=False)
    assert explain(_from_task(KeyError("lm_head"))) == Failure("internal_error", "KeyError: 'lm_head'", retryable=False)
    assert explain(_from_task(OSError("disk full"))) == Failure("internal_error", "OSError: disk full")
    assert root_cause(ZeroDivisionError()) is None


def test_a_value_that_json_does_not_know_is_told_as_text() -> None:
    assert explain(DataError("bad", value=("a", 1))).value == "('a', 1)"
