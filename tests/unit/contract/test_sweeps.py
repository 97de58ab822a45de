"""Trials, frontier and choice of a sweep from given figures, and the autoscaling policy on metrics from Serve."""

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError

from swiftkv_platform.contract.autoscaling import KV_CACHE_USAGE, WAITING_STEPS, replicas_by_load
from swiftkv_platform.contract.sweeps import TrialResult, expand_sweep, make_trial_result, summarize_trials
from swiftkv_platform.specs import JobSpec


def spec(sweep: dict[str, Any] | None, **sections: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "n", "evaluation": {"max_kl": 0.2}, "sweep": sweep, **sections})


def test_trials_are_every_combination_and_differ_in_nothing_else() -> None:
    sweep = {"num_key_value_layers": [4, 9], "key_value_group_size": [2, 1], "learning_rate": [1e-3]}
    job = spec(sweep, swiftkv={"prefill_reduction": 0.5, "early_exit": True})
    trials = expand_sweep(job)
    assert [trial.name for trial in trials] == ["l9-g1-lr0.001", "l9-g2-lr0.001", "l4-g1-lr0.001", "l4-g2-lr0.001"]
    assert [trial.index for trial in trials] == [0, 1, 2, 3]
    last = trials[-1].spec
    assert (last.swiftkv.num_key_value_layers, last.swiftkv.key_value_group_size) == (4, 2)
    assert (last.swiftkv.prefill_reduction, last.swiftkv.early_exit) == (None, True)
    assert (last.optimizer.learning_rate, last.sweep, last.name) == (1e-3, None, "n-l4-g2-lr0.001")
    assert JobSpec.model_validate(last.model_dump()) == last
    assert last.data == job.data


def test_values_that_differ_late_have_names_of_their_own() -> None:
    trials = expand_sweep(spec({"learning_rate": [0.00123456789, 0.00123457]}))
    assert [trial.name for trial in trials] == ["lr0.00123456789", "lr0.00123457"]


def test_what_is_not_swept_stays() -> None:
    trials = expand_sweep(spec({"learning_rate": [3e-4, 1e-3]}, swiftkv={"prefill_reduction": 0.25}))
    assert [trial.name for trial in trials] == ["lr0.0003", "lr0.001"]
    assert {trial.spec.swiftkv.prefill_reduction for trial in trials} == {0.25}
    job = spec(None)
    assert [trial.spec for trial in expand_sweep(job)] == [job]


@pytest.mark.parametrize(
    ("sweep", "evaluation", "message"),
    [
        ({}, {"max_kl": 1.0}, "its lists result in 1 trials"),
        ({"learning_rate": [1e-3]}, {"max_kl": 1.0}, "its lists result in 1 trials"),
        ({"key_value_group_size": [1, 1]}, {"max_kl": 1.0}, "key_value_group_size has a duplicate value"),
        ({"key_value_group_size": [0, 1]}, {"max_kl": 1.0}, "1 to 10,000"),
        ({"key_value_group_size": [1, 2]}, {}, "needs a quality gate"),
        ({"key_value_group_size": [1, 2]}, {"tasks": ["gsm8k"], "max_drop": None}, "needs a quality gate"),
    ],
)
def test_a_sweep_that_cannot_choose_is_refused(sweep: dict[str, Any], evaluation: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        spec(sweep, evaluation=evaluation)


def test_points_lost_on_tasks_are_a_budget() -> None:
    assert spec({"key_value_group_size": [1, 2]}, evaluation={"tasks": ["gsm8k"]}).sweep is not None


def measured(name: str, prefill: float, cache: float, kl: float, *, passed: bool = True) -> TrialResult:
    report = {
        "prefill_flops_ratio": prefill,
        "kv_bytes_ratio": cache,
        "distilled": {"kl": kl},
        "gates": [{"passed": passed}],
    }
    trial = expand_sweep(spec({"key_value_group_size": [1, 2]}))[0]
    return make_trial_result(trial, report=report).model_copy(update={"name": name})


def test_the_cheapest_point_within_the_budget_is_taken() -> None:
    report = summarize_trials(
        [
            measured("dear", 0.8, 0.9, 0.05),
            measured("fits", 0.5, 0.75, 0.15),
            measured("fits, smaller cache", 0.5, 0.5, 0.19),
            measured("fits, same cache, worse", 0.5, 0.5, 0.2),
            measured("too far", 0.4, 0.5, 0.4, passed=False),
            make_trial_result(expand_sweep(spec({"learning_rate": [1.0, 2.0]}))[0], error="the loss is nan"),
        ]
    )
    assert report.recommended == "fits, smaller cache"
    assert report.recommended_result == report.points[2]
    assert [item.on_frontier for item in report.points] == [True, True, False, False, True, False]
    assert [item.has_passed_gates for item in report.points] == [True, True, True, True, False, False]


def test_where_none_passes_the_closest_undecided_point_is_taken() -> None:
    points = [measured("near", 0.8, 0.9, 0.05, passed=False), measured("far", 0.5, 0.5, 0.3, passed=False)]
    for each in points:
        assert each.report is not None
        each.report["gates"][0]["outcome"] = "undecided"
    failed = measured("failed", 0.4, 0.5, 0.01, passed=False)
    assert summarize_trials([*points, failed]).recommended == "near"
    assert summarize_trials([*points, failed, measured("fits", 0.9, 0.9, 0.9)]).recommended == "fits"


def test_without_a_point_within_the_budget_none_is_taken() -> None:
    report = summarize_trials([measured("a", 0.5, 0.5, 0.3, passed=False)])
    assert report.recommended is None
    assert report.recommended_result is None
    assert report.points[0].on_frontier


@pytest.mark.parametrize(
    ("loads", "running", "requests", "wanted"),
    [
        ([(0.0, 0.1)], 1, 1.0, 1),
        ([(4.0, 0.1)], 1, 1.0, 1),
        ([(8.0, 0.1)], 1, 1.0, 2),  # twice the waiting prompt tokens that one replica should have
        ([(0.0, 0.9)], 1, 1.0, 2),  # nothing waits, but the cache is nearly full
        ([(6.0, 0.1), (6.0, 0.1)], 2, 1.0, 3),
        ([(0.0, 0.1), (0.0, 0.1)], 2, 1.0, 1),
        ([(8.0, 0.1)], 2, 1.0, 4),  # the other replica has not reported yet, and counts as this one
        ([], 0, 1.0, 1),  # without reports, requests decide
        ([], 0, 17.0, 3),
        ([], 0, 0.0, 0),
        ([(0.0, 0.0)], 1, 0.0, 0),
        ([(0.0, 0.0)], 1, 1.0, 1),
    ],
)
def test_what_waits_and_what_is_held_decide(
    loads: list[tuple[float, float]], running: int, requests: float, wanted: int
) -> None:
    """Loads: steps of waiting prompts, and share of the cache in use, of each replica."""
    metrics = {
        WAITING_STEPS: {number: waiting for number, (waiting, _) in enumerate(loads)},
        KV_CACHE_USAGE: {number: usage for number, (_, usage) in enumerate(loads)},
    }
    context = SimpleNamespace(
        aggregated_metrics=metrics if loads else {}, total_num_requests=requests, current_num_replicas=running
    )
    assert replicas_by_load(context)[0] == wanted
