"""The operator's limits on how large a job may be are checked where it is submitted, and hold where it runs."""

from __future__ import annotations

from typing import Any

import pytest

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.orchestration.job import Attempt, Job, JobStatus
from swiftkv_platform.orchestration.limits import AttemptLimits, JobLimits
from swiftkv_platform.specs import JobSpec

LIMITS = JobLimits(max_workers=8, max_batch_size=64, max_runtime_s=3600)


def spec(**fields: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "test", **fields})


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"resources": {"num_workers": 9}}, "resources.num_workers", 9),
        ({"resources": {"num_workers": {"min": 1, "max": 9}}}, "resources.num_workers", 9),
        ({"training": {"batch_size": 66}}, "training.batch_size", 66),
        ({"training": {"micro_batch_size": 65}}, "training.micro_batch_size", 65),
        ({"limits": {"max_runtime_s": 3601}}, "limits.max_runtime_s", 3601),
        (
            {
                "sweep": {"learning_rate": [1e-3, 1e-4], "max_concurrent": 2},
                "evaluation": {"max_kl": 1.0},
                "resources": {"num_workers": 8},
            },
            "resources.num_workers",
            16,
        ),
    ],
)
def test_a_job_above_a_limit_is_refused(fields: dict[str, Any], field: str, value: int) -> None:
    with pytest.raises(InvalidInputError, match="operator's limit") as caught:
        LIMITS.check(spec(**fields))
    assert (caught.value.field, caught.value.value) == (field, value)


def test_a_job_at_its_limits_is_accepted() -> None:
    limits = {"max_runtime_s": 3600}
    LIMITS.check(spec(resources={"num_workers": 8}, training={"batch_size": 64, "micro_batch_size": 8}, limits=limits))


@pytest.mark.parametrize(("own", "operators", "most"), [(None, 100, 100), (50, 100, 50), (None, None, None)])
def test_the_lower_of_both_maximum_runtimes_counts(own: int | None, operators: int | None, most: int | None) -> None:
    limits = AttemptLimits(placement_s=1e9, max_runtime_s=operators)
    attempt = Attempt(submission_id="x", submitted_at=1000.0)
    job = Job("job_1", "acme", "ann", spec(limits={"max_runtime_s": own}), 1000, JobStatus.RUNNING, attempt=attempt)
    assert limits.exceeded(job, 1000.0 + (most or 1e6)) is None
    if most is not None:
        reason = limits.exceeded(job, 1001.0 + most)
        assert reason is not None
        assert reason.code == "max_runtime_exceeded"
        assert str(most) in reason.message
