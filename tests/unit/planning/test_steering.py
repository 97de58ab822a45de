"""Schedule of a run that is steered by its held-out KL: measurements and saves, counted as a run would make them."""

from __future__ import annotations

from typing import Any

import pytest

from swiftkv_platform.planning.steering import RunSchedule, num_measured_rows, searches_rate
from swiftkv_platform.specs import JobSpec, ValidationSpec
from swiftkv_platform.specs.defaults import resolve_defaults


def job(**sections: Any) -> JobSpec:
    training = {"batch_size": 32, **sections.pop("training", {})}
    return JobSpec.model_validate({"name": "steered", "training": training, **sections})


@pytest.mark.parametrize("total_steps", [0, 1, 7, 60, 400, 1221])
@pytest.mark.parametrize(
    "checkpoint", [{}, {"every_steps": 7}, {"every_steps": 60, "best_every_steps": 50}, {"best_every_steps": 10**6}]
)
@pytest.mark.parametrize("validation", [None, {}, {"every_steps": 1}, {"every_steps": 40}])
def test_measurements_and_saves_are_those_of_a_run_that_only_gets_better(
    validation: dict[str, Any] | None, checkpoint: dict[str, Any], total_steps: int
) -> None:
    schedule = RunSchedule.of(job(training={"validation": validation}, checkpoint=checkpoint), total_steps)
    steps = range(1, total_steps + 1)
    measured = [step for step in steps if schedule.is_measured(step)]
    best = {step for step in measured if schedule.may_be_best(step)}
    saved = best | {step for step in steps if schedule.is_due(step)}
    starts = validation is not None and total_steps > 0
    assert schedule.num_measurements == len(measured) + starts
    assert schedule.num_saves == len(saved) + starts


def test_bests_are_as_far_apart_as_the_spec_says() -> None:
    """Rounded up to what is measured: of a run measured every 62 steps each second one."""
    schedule = RunSchedule.of(job(checkpoint={"every_steps": 10**6, "best_every_steps": 100}), 1221)
    assert schedule.measured_every == 62
    kept = [step for step in range(1, 1221) if schedule.is_measured(step) and schedule.may_be_best(step)]
    assert kept == list(range(124, 1221, 124))


def test_measured_rows_are_a_tenth_of_those_trained_on_between() -> None:
    assert num_measured_rows(ValidationSpec(), 8192, 1600) == 2, "of 16,384 tokens"
    assert num_measured_rows(ValidationSpec(max_tokens=10**6), 100, 300) == 30
    assert num_measured_rows(ValidationSpec(), 8192, 5) == 1


@pytest.mark.parametrize(
    ("sections", "searches"),
    [
        ({}, True),
        ({"optimizer": {"rate_search": False}}, False),
        ({"optimizer": {"learning_rate": 1e-3}}, False),
        ({"optimizer": {"learning_rate": 1e-3, "rate_search": True}}, True),
        ({"training": {"validation": None}}, False),
        ({"training": {"max_steps": 106}}, False),
        ({"training": {"max_steps": 107}}, True),
    ],
)
def test_a_rate_is_searched_where_it_is_measured_and_there_is_time(sections: dict[str, Any], searches: bool) -> None:
    assert searches_rate(resolve_defaults(job(**sections), context_length=512, hidden_size=64)) == searches
