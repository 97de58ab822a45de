"""Report and gates from given figures: no model."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from swiftkv_platform.errors import QualityGateError
from swiftkv_platform.evaluation.harness.run import TaskResults, TaskScore
from swiftkv_platform.evaluation.prefill_cost import ModeCost, PrefillCost
from swiftkv_platform.evaluation.quality import NUM_EXIT_BINS, ExitCounts, Totals
from swiftkv_platform.evaluation.report import Report
from swiftkv_platform.specs import EvaluationSpec
from swiftkv_platform.specs.evaluation import points_lost

COST = PrefillCost(128, ModeCost(100.0, 64.0, 4.0), ModeCost(60.0, 48.0, 3.0))


def totals(kl: float, *, exit_head: ExitCounts | None = None) -> Totals:
    return Totals(
        num_positions=10,
        teacher_nll=10.0,
        student_nll=11.0,
        kl=kl * 10,
        agreements=8,
        exit_head=exit_head or ExitCounts(),
    )


def report(kl: float = 0.25, *, tasks: tuple[TaskScore, ...] = (), **limits: Any) -> Report:
    return Report.build(EvaluationSpec(**limits), distilled=totals(kl), cost=COST, tasks=TaskResults(tasks))


def score(teacher: float, student: float, *, higher_is_better: bool = True, margin: float | None = 0.0) -> TaskScore:
    """A score whose points lost are known to within `margin`; None: without an interval."""
    drop = points_lost(teacher, student, higher_is_better=higher_is_better)
    return TaskScore(
        task="trivia",
        metric="acc",
        num_fewshot=0,
        chat_template=False,
        num_samples=100,
        teacher=teacher,
        student=student,
        teacher_stderr=0.05,
        student_stderr=None,
        higher_is_better=higher_is_better,
        drop_interval=None if margin is None else (drop - margin, drop + margin),
    )


def test_the_report_has_the_published_keys() -> None:
    built = Report.build(
        EvaluationSpec(),
        rewired=totals(1.0),
        calibrated=totals(0.5),
        distilled=totals(0.25),
        cost=COST,
        tokens_trained=99,
    )

    def student(kl: float) -> Any:
        return {"perplexity": pytest.approx(math.exp(1.1)), "kl": pytest.approx(kl), "top1_agreement": 0.8}

    assert json.loads(built.model_dump_json()) == {
        "teacher": {"perplexity": pytest.approx(math.e)},
        "rewired": student(1.0),
        "calibrated": student(0.5),
        "distilled": student(0.25),
        "perplexity_ratio": pytest.approx(math.exp(0.1)),
        "kl_recovered": pytest.approx(0.75),
        "num_positions": 10,
        "prefill_flops_ratio": 0.6,
        "kv_bytes_ratio": 0.75,
        "prompt_length": 128,
        "prefill_flops_per_token": {"dense": 100.0, "swiftkv": 60.0},
        "kv_bytes_per_token": {"dense": 64.0, "swiftkv": 48.0},
        "ttft_ms": {"dense": 4.0, "swiftkv": 3.0},
        "tokens_trained": 99,
        "training": None,
        "continuations": None,
        "by_position": [],
        "by_prompt_length": [],
        "exit_head": None,
        "tasks": [],
        "tasks_left_out": [],
        "gates": [],
    }
    assert Report.model_validate_json(built.model_dump_json()) == built


def test_nothing_lost_is_nothing_to_recover() -> None:
    built = Report.build(EvaluationSpec(), rewired=totals(0.0), distilled=totals(0.0), cost=COST)
    assert built.kl_recovered == 0.0
    assert built.calibrated is None


def test_the_exit_head_by_confidence() -> None:
    counts = ExitCounts((2, *[0] * (NUM_EXIT_BINS - 2), 6), (1, *[0] * (NUM_EXIT_BINS - 2), 6))
    built = Report.build(EvaluationSpec(), distilled=totals(0.1, exit_head=counts), cost=COST)
    assert built.exit_head is not None
    first, second, *_, last = built.exit_head
    assert (first.low, first.high, first.share, first.agreement) == (0.0, 0.05, 0.25, 0.5)
    assert (second.share, second.agreement) == (0.0, None)
    assert (last.low, last.share, last.agreement) == (0.95, 0.75, 1.0)


@pytest.mark.parametrize(
    ("limits", "kl", "message"),
    [
        ({"max_kl": 0.2}, 0.25, r"held-out KL in nats is 0.25, evaluation.max_kl asks for 0.2"),
        ({"max_kl": 0.2}, math.nan, "KL in nats is nan"),
        ({"max_perplexity_ratio": 1.1}, 0.1, r"relative to the teacher's is 1.105, .* asks for 1.1"),
        ({"min_top1_agreement": 0.81}, 0.1, "top-1 agreement is 0.8, evaluation.min_top1_agreement asks for 0.81"),
    ],
)
def test_a_gate_refuses_with_the_figures(limits: dict[str, float], kl: float, message: str) -> None:
    report(kl).check_gates()
    with pytest.raises(QualityGateError, match=message + r".*perplexity 3.004 .*2.718.*80.0%") as caught:
        report(kl, **limits).check_gates()
    (field,) = limits
    assert caught.value.field == f"evaluation.{field}"


def test_limits_that_are_kept_are_reported_as_passed() -> None:
    built = report(0.2, max_kl=0.2, max_perplexity_ratio=1.11, min_top1_agreement=0.8, tasks=(score(0.5, 0.49),))
    built.check_gates()
    assert {gate.field: gate.passed for gate in built.gates} == {
        "evaluation.max_kl": True,
        "evaluation.max_perplexity_ratio": True,
        "evaluation.max_drop": True,
        "evaluation.min_top1_agreement": True,
    }


def test_points_lost_on_a_task_fail_the_gate_unless_it_is_off() -> None:
    lost = (score(0.50, 0.48),)
    with pytest.raises(QualityGateError, match=r"points lost on trivia is 2, evaluation.max_drop asks for 1"):
        report(tasks=lost).check_gates()
    report(tasks=lost, max_drop=2.5).check_gates()
    report(tasks=lost, max_drop=None).check_gates()
    report(tasks=(score(0.48, 0.50),), max_drop=0.0).check_gates()


@pytest.mark.parametrize(
    ("teacher", "student", "higher_is_better", "lost"),
    [
        (0.50, 0.49, True, 1.0),
        (0.0, 0.01, True, -1.0),
        (40.0, 39.0, True, 2.5),
        (-2.0, -2.1, True, 5.0),
        (4.0, 160.0, False, 3900.0),
        (10.0, 9.0, False, -10.0),
        (0.2, 0.21, False, 5.0),
        (0.0, 0.02, False, 2.0),
        (4.0, math.inf, False, math.inf),
    ],
)
def test_what_is_lost_is_points_of_shares_and_percent_of_other_scores(
    teacher: float, student: float, higher_is_better: bool, lost: float
) -> None:
    scored = score(teacher, student, higher_is_better=higher_is_better)
    assert scored.drop == lost
    (gate,) = report(tasks=(scored,)).gates
    assert gate.passed == (lost <= 1.0)


def test_a_score_that_is_no_number_passes_no_gate() -> None:
    (gate,) = report(tasks=(score(math.inf, math.inf, higher_is_better=False),)).gates
    assert not gate.passed


@pytest.mark.parametrize(
    ("margin", "outcome", "samples"),
    [(0.4, "passed", None), (40.0, "undecided", 651_294), (2.0, "undecided", 460), (None, "undecided", None)],
)
def test_half_a_point_lost_passes_only_with_samples_enough(
    margin: float | None, outcome: str, samples: int | None
) -> None:
    built = report(tasks=(score(0.500, 0.495, margin=margin),))
    (gate,) = built.gates
    assert (gate.outcome, gate.passed, gate.samples_needed) == (outcome, outcome == "passed", samples)
    if outcome == "undecided":
        said = "its samples give no interval" if samples is None else f"{samples:,} samples are needed"
        with pytest.raises(QualityGateError, match=f"undecided, .*{said}.*; use more samples or a wider limit"):
            built.check_gates()


def test_points_lost_are_a_failure_once_the_whole_interval_says_so() -> None:
    assert [report(tasks=(score(0.5, 0.48, margin=margin),)).gates[0].outcome for margin in (0.9, 1.1)] == [
        "failed",
        "undecided",
    ]


def test_the_worst_gate_comes_first() -> None:
    tasks = (score(0.5, 0.5), score(0.5, 0.495, margin=1.0), score(0.5, 0.4))
    built = report(0.15, tasks=tasks, max_kl=0.2, min_top1_agreement=0.79)
    assert [(gate.outcome, gate.value) for gate in built.gates] == [
        ("failed", 10.0),
        ("undecided", 0.5),
        ("passed", 0.8),  # closest to its limit
        ("passed", pytest.approx(0.15)),
        ("passed", 0.0),
    ]


def test_reports_of_before_outcomes_still_open() -> None:
    document = json.loads(report(max_kl=0.1).model_dump_json())
    for key in ("outcome", "interval", "samples_needed"):
        del document["gates"][0][key]
    opened = Report.model_validate(document)
    assert [(gate.passed, gate.outcome) for gate in opened.gates] == [(False, "failed")]


def test_every_failed_gate_is_named() -> None:
    with pytest.raises(QualityGateError, match=r"evaluation.max_kl asks for 0.1; .*evaluation.max_perplexity_ratio"):
        report(max_kl=0.1, max_perplexity_ratio=1.0).check_gates()
