"""Explanations of Ray's exceptions, for `error` events."""

import errno
import pickle
import re
from typing import Any

import pytest
import torch
from ray.exceptions import ActorDiedError, OutOfMemoryError, RayActorError, RayTaskError
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.worker_group.poll import WorkerGroupPollStatus, WorkerStatus
from torch.distributed.checkpoint.api import CheckpointException

from swiftkv_platform import errors
from swiftkv_platform.contract.cures import CURES, advise_on_failure, find_cure
from swiftkv_platform.contract.events import ReasonCode
from swiftkv_platform.errors import DataError, LossNotFiniteError, QualityGateError, StorageError, SwiftKVError
from swiftkv_platform.jobs.failures import Failure, explain_failure, find_root_cause
from swiftkv_platform.specs import JobSpec

NO_MEMORY = "Task was killed due to the node running low on memory."
LOST = "workers were lost repeatedly"


def from_task(error: Exception) -> Any:
    """`error` as `ray.get` raises it."""
    return RayTaskError("prepare", "traceback", error).as_instanceof_cause()


def group(*failures: Any) -> Any:
    """The failures of ranks 0, 1, ..., as a driver gets them from Ray Train."""
    workers = {rank: WorkerStatus(running=False, error=failure) for rank, failure in enumerate(failures)}
    return pickle.loads(pickle.dumps(WorkerGroupPollStatus(workers).get_worker_group_error()))


def raised(error: BaseException, traceback: str = "Traceback") -> Any:
    """Ray Train's error for an exception of a worker's training function."""
    return UserExceptionWithTraceback(error, traceback_str=traceback)


def died(error: Exception) -> Any:
    """Ray Train's error for a worker that no longer answers."""
    return WorkerHealthCheckFailedError("A worker health check failed.\nWorker info: ...", error)


CLOSED = RuntimeError("Connection closed by peer")


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
    assert explain_failure(error) == expected
    assert explain_failure(from_task(pickle.loads(pickle.dumps(error)))) == expected
    assert explain_failure(ControllerError(from_task(error))) == expected, (
        "also from a controller that cannot start workers"
    )


@pytest.mark.parametrize(
    ("failed", "code", "retryable"),
    [
        (WorkerGroupError("failed", {0: CLOSED, 1: RayActorError()}), "worker_lost", True),
        (WorkerGroupError("failed", {0: RayActorError(), 1: OutOfMemoryError(NO_MEMORY)}), "out_of_memory", True),
        (WorkerGroupError("failed", {0: KeyError("lm_head"), 1: CLOSED}), "internal_error", False),
        (WorkerGroupError("failed", {0: CLOSED, 1: StorageError("the store is away")}), "storage_error", True),
        (group(raised(CLOSED), died(OutOfMemoryError(NO_MEMORY))), "out_of_memory", True),
    ],
    ids=["a-lost-worker", "no-memory", "a-defect-before-peers", "our-error-after-peers", "health-check-of-no-memory"],
)
def test_the_error_of_one_worker_counts_more_than_its_peers_lost_connections(
    failed: Any, code: str, retryable: bool
) -> None:
    failure = explain_failure(failed)
    assert (failure.code, failure.retryable) == (code, retryable)
    assert getattr(find_root_cause(failed), "code", None) == ("storage_error" if code == "storage_error" else None)
    assert code != "out_of_memory" or failure.message.endswith(NO_MEMORY)


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
    failure = explain_failure(group(raised(error)))
    assert (failure.code, failure.field, failure.retryable) == ("out_of_memory", "training.micro_batch_size", False)
    assert failure.message.startswith("a worker ran out of memory: ")
    assert failure.message.endswith(line)


def test_a_lost_worker_is_told_by_how_it_died_or_by_the_first_error() -> None:
    death = "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR"
    actor = RayActorError(error_msg=f"{RayActorError.BASE_ERROR_MSG}\n\tclass_name: RayTrainWorker\n{death}\n")
    nccl = raised(RuntimeError("NCCL error in: init.cpp\nncclSystemError"))
    told = [
        (group(raised(CLOSED), died(actor)), death),
        (group(raised(CLOSED), died(ActorDiedError())), "The actor died unexpectedly before finishing this task."),
        (group(nccl), "NCCL error in: init.cpp"),
    ]
    assert [explain_failure(error) for error, _ in told] == [
        Failure("worker_lost", f"{LOST}: {how}") for _, how in told
    ]


def test_a_full_disk_is_named_wherever_it_was_met() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/tmp/checkpoint-x/__0_0.distcp")
    for error in (
        from_task(full),
        group(raised(full)),
        group(raised(CheckpointException("save", {0: (full, None)}))),  # as torch.distributed.checkpoint wraps it
        group(raised(RuntimeError("writing failed"), traceback=f"OSError: {full}\nRuntimeError: writing failed")),
    ):
        failure = explain_failure(error)
        assert (failure.code, failure.retryable) == ("disk_full", True)
        assert failure.message.endswith("No space left on device: '/tmp/checkpoint-x/__0_0.distcp'")


def test_anything_else_is_named_by_its_type() -> None:
    failure = explain_failure(ZeroDivisionError("division by zero"))
    assert failure == Failure("internal_error", "ZeroDivisionError: division by zero", retryable=False)
    assert explain_failure(from_task(KeyError("lm_head"))) == Failure(
        "internal_error", "KeyError: 'lm_head'", retryable=False
    )
    assert explain_failure(from_task(OSError("disk full"))) == Failure("internal_error", "OSError: disk full")
    assert find_root_cause(ZeroDivisionError()) is None
    assert explain_failure(DataError("bad", value=("a", 1))).value == "('a', 1)", (
        "a value that JSON does not know is text"
    )


LIVE = {"waiting_for_resources", "waiting_for_turn", "cost_cap", "paused", "resumed", "cancelled"}
"""Reasons of statuses that are no failures."""


def test_every_kind_of_failure_has_a_cure_that_names_fields_of_the_spec() -> None:
    ours = {*ReasonCode} - LIVE
    ours |= {each.code for each in vars(errors).values() if isinstance(each, type) and issubclass(each, SwiftKVError)}
    ours -= {SwiftKVError.code, "generation_failed", "engine_dead", "loading"}
    defect = CURES[SwiftKVError.code]
    assert sorted(code for code in ours if find_cure(code) is defect) == []
    assert find_cure("of a newer worker") is defect
    spec = JobSpec(name="test").model_dump(by_alias=True)
    for cure in CURES.values():
        for path in cure.changes or {}:
            section, field = path.split(".")
            assert field in spec[section], path


@pytest.mark.parametrize(
    ("failure", "changes", "told"),
    [
        (
            explain_failure(too_large()),
            {"training": {"micro_batch_size": 6, "batch_size": 12}},
            "training.micro_batch_size is 6: use 3; or data.max_length is 8192: use 4096; or "
            "training.gradient_checkpointing is false: use true. More workers",
        ),
        (explain_failure(too_large()), {}, "data.max_length is 8192: use 4096; or"),
        (
            explain_failure(LossNotFiniteError("step 3", field="optimizer.learning_rate", value=0.03)),
            {"optimizer": {"learning_rate": 0.03}, "model": {"dtype": "float32"}},
            "optimizer.learning_rate is 0.03: use 0.003. If",
        ),
        (
            explain_failure(QualityGateError("too far", field="evaluation.max_kl", value=0.3)),
            {"evaluation": {"max_kl": 0.2}, "swiftkv": {"num_key_value_layers": 6}},
            "evaluation.max_kl is 0.2: a limit of 0.3 would accept this student; or training.num_epochs is 2: use 4; "
            "or swiftkv.num_key_value_layers is 6: use 7 or more. ",
        ),
        (
            explain_failure(DataError("no rows", field="data.sources[0].name_or_path", value="x.jsonl")),
            {"data": {"sources": [{"name_or_path": "org/x"}]}},
            'data.sources[0].name_or_path is "org/x": use a valid value. Correct',
        ),
        (explain_failure(DataError("no rows", field="data.sources[3].colour")), {}, "Correct the spec"),
        (explain_failure(StorageError("away")), {}, "fault_tolerance.max_retries is 3: use 6. Check"),
        (explain_failure(group(died(ActorDiedError()))), {}, "fault_tolerance.max_retries is 3: use 6. The job's log"),
        (explain_failure(OSError(errno.ENOSPC, "No space left on device")), {}, "Checkpoints and data pass"),
        (Failure("not_placed", ""), {"resources": {"num_workers": 4}}, "resources.num_workers is 4: use 2. Or"),
        (Failure("not_placed", "", "resources"), {"resources": {"num_workers": {"min": 1, "max": 2}}}, "Or add nodes"),
        (Failure("quota_exceeded", "", "resources.num_workers"), {}, "resources.num_workers is 2: use 1. Clone"),
        (Failure("protocol_mismatch", "", "spec.training.momentum"), {}, "Update the Ray cluster's image"),
        (explain_failure(KeyError("lm_head")), {}, "This is a bug in the program"),
    ],
)  # fmt: skip
def test_a_cure_names_field_value_and_what_to_use_instead(failure: Failure, changes: dict[str, Any], told: str) -> None:
    spec = JobSpec.model_validate({"name": "test", **changes})
    advice = advise_on_failure(failure.code, failure.field, spec, value=failure.value, job_id="job_1")
    assert advice.startswith(told)


@pytest.mark.parametrize(
    ("field", "value", "changes", "told"),
    [
        ("evaluation.max_kl", 9.6, {"evaluation": {"max_kl": 0.2}, "training": {"max_steps": 2}}, "use 96;"),
        ("evaluation.max_kl", 0.21, {"evaluation": {"max_kl": 0.2}, "training": {"max_steps": 2}}, "use 4;"),
        ("evaluation.max_kl", 1e6, {"evaluation": {"max_kl": 0.2}, "training": {"max_steps": 2}}, "use 200;"),
        ("evaluation.min_top1_agreement", 0.5, {"evaluation": {"min_top1_agreement": 0.9}}, "num_epochs is 2: use 10;"),
        ("evaluation.max_kl", 1.6, {"evaluation": {"max_kl": 0.2}, "swiftkv": {"num_key_value_layers": 6}}, "use 9 or"),
    ],
)
def test_cures_of_a_quality_gate_grow_with_the_gap(
    field: str, value: float, changes: dict[str, Any], told: str
) -> None:
    spec = JobSpec.model_validate({"name": "test", **changes})
    assert told in advise_on_failure("quality_gate", field, spec, value=value)


def test_no_advice_has_a_placeholder_for_the_job() -> None:
    spec = JobSpec.model_validate({"name": "test"})
    for code in CURES:
        assert re.search(r"\bJOB\b", advise_on_failure(code, None, spec, job_id="job_1")) is None
        local = advise_on_failure(code, None, spec)
        assert re.search(r"\bJOB\b|lone the job", local) is None, local
