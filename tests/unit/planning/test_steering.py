"""Schedule of a run that is steered by its held-out KL."""

from typing import Any

from swiftkv_platform.planning.training import (
    RunSchedule,
    compute_measurement_interval,
    count_measured_rows,
    has_rate_search,
)
from swiftkv_platform.specs import JobSpec, ValidationSpec
from swiftkv_platform.specs.job import resolve_model_defaults


def job(**sections: Any) -> JobSpec:
    training = {"batch_size": 32, **sections.pop("training", {})}
    return JobSpec.model_validate({"name": "steered", "training": training, **sections})


def test_bests_are_as_far_apart_as_the_spec_says() -> None:
    """The distance is rounded up to measured steps: 100 steps become 124 in a run measured every 62."""
    schedule = RunSchedule.from_spec(
        job(checkpoint={"every_steps": 10**6, "best_every_steps": 100}), 1221, measures=True
    )
    assert schedule.measurement_interval == 62
    kept = [step for step in range(1, 1221) if schedule.is_measured(step) and schedule.may_be_best(step)]
    assert kept == list(range(124, 1221, 124))


def test_a_run_is_measured_twenty_times_where_its_batches_have_the_rows() -> None:
    """A measurement takes a tenth of the rows trained on since the one before, and at most `max_tokens`."""
    for total_steps, batch_size, interval in ((400, 32, 20), (401, 32, 21), (20, 4, 10), (8, 1, 40)):
        assert compute_measurement_interval(ValidationSpec(), batch_size, total_steps) == interval
        assert compute_measurement_interval(ValidationSpec(every_steps=7), batch_size, total_steps) == 7
    assert count_measured_rows(ValidationSpec(), 8192, 1600) == 2, "rows of 16,384 tokens in all"
    assert count_measured_rows(ValidationSpec(max_tokens=10**6), 100, 300) == 30
    assert count_measured_rows(ValidationSpec(), 8192, 5) == 1


def test_a_rate_is_searched_where_it_is_measured_and_there_is_time() -> None:
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True),
        ({"optimizer": {"rate_search": False}}, False),
        ({"optimizer": {"learning_rate": 1e-3}}, False),
        ({"optimizer": {"learning_rate": 1e-3, "rate_search": True}}, True),
        ({"training": {"validation": None}}, False),
        ({"training": {"max_steps": 106}}, False),
        ({"training": {"max_steps": 107}}, True),
    ]
    for sections, searches in cases:
        spec = resolve_model_defaults(job(**sections), context_length=512, hidden_size=64)
        assert has_rate_search(spec) == searches, sections
