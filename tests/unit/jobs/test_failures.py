"""Ray's exceptions in the words of an `error` event."""

from __future__ import annotations

import pickle

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError
from ray.train import ControllerError, WorkerGroupError

from jobs.failures import Failure, explain, root_cause
from swiftkv_platform.errors import DataError, LossNotFiniteError, QualityGateError, StorageError, SwiftKVError


def _from_task(error: Exception) -> Exception:
    """`error` as `ray.get` raises it."""
    raised = RayTaskError("prepare", "traceback", error).as_instanceof_cause()
    assert isinstance(raised, Exception)
    return raised


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

    causes = [torch.OutOfMemoryError("CUDA out of memory")]
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    causes.append(caught.value)

    for cause in causes:
        failure = explain(WorkerGroupError("workers failed", {0: cause}))
        assert (failure.code, failure.field, failure.retryable) == ("out_of_memory", "training.micro_batch_size", False)
        assert "training.gradient_checkpointing" in failure.message


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
