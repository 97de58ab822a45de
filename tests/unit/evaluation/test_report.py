"""Report and gates from given figures: no model."""

import json
import math
import re
from typing import Any

import numpy as np
import pytest

from swiftkv_platform.contract.row_results import compute_mean_loss_interval
from swiftkv_platform.contract.verdicts import describe_undecided_gates, find_worst_verdict, summarize_quality
from swiftkv_platform.errors import QualityGateError
from swiftkv_platform.evaluation.harness.run import TaskResults, TaskScore
from swiftkv_platform.evaluation.prefill_cost import ModeCost, PrefillCost
from swiftkv_platform.evaluation.quality import NUM_EXIT_BINS, ExitCounts, HeldOutTotals, SampleSums
from swiftkv_platform.evaluation.report import ParentTotals, Report
from swiftkv_platform.planning.gates import (
    NEEDLE_LENGTHS,
    WORSE_STUDENT_LOSS,
    compute_false_pass_probability,
    compute_min_detectable_drop,
    find_min_samples_to_exclude,
    forecast_gates,
)
from swiftkv_platform.specs import EvaluationSpec, load_spec
from swiftkv_platform.specs.evaluation import compute_points_lost
from tests.support.recipes import RECIPES

COST = PrefillCost(128, ModeCost(100.0, 64.0, 4.0), ModeCost(60.0, 48.0, 3.0))


TEXTS = 12


def totals(kl: float, *, exit_head: ExitCounts | None = None, spread: float = 0.0, texts: int = TEXTS) -> HeldOutTotals:
    """Sums of texts of ten positions each, whose KL is `kl` more or less `spread`."""
    samples = tuple(
        SampleSums(i, i, 10, 10.0, 11.0, 10 * (kl + spread * (i % 2 * 2 - 1)), 8 - round(8 * spread) * (i % 2))
        for i in range(texts)
    )
    sums = (sum(getattr(one, name) for one in samples) for name in ("teacher_nll", "student_nll", "kl", "agreements"))
    return HeldOutTotals(10 * texts, *sums, exit_head=exit_head or ExitCounts(), samples=samples)


def report(
    kl: float = 0.25, *tasks: TaskScore, instruct: bool = False, measured: HeldOutTotals | None = None, **limits: Any
) -> Report:
    spec, scores = EvaluationSpec(**limits), TaskResults(tasks)
    return Report.build(spec, distilled=measured or totals(kl), cost=COST, tasks=scores, instruct=instruct)


def outcomes(*arguments: Any, **options: Any) -> dict[str, str]:
    gates = report(*arguments, **options).gates
    return {gate.field.removeprefix("evaluation."): gate.outcome for gate in gates}


def task(name: str, teacher: float, student: float, interval: tuple[float, float] | None, **changes: Any) -> TaskScore:
    """A score of `teacher` and `student` with the interval of the points lost."""
    fields = {"metric": "acc", "num_fewshot": 0, "chat_template": False, "num_samples": 100, **changes}
    scores = {"teacher": teacher, "student": student, "teacher_stderr": 0.05, "student_stderr": None}
    return TaskScore(task=name, **fields, **scores, drop_interval=interval)


def score(teacher: float, student: float, *, margin: float | None = 0.0, higher_is_better: bool = True) -> TaskScore:
    """A score whose points lost are known to within `margin`; None: without an interval."""
    drop = compute_points_lost(teacher, student, higher_is_better=higher_is_better)
    interval = None if margin is None else (drop - margin, drop + margin)
    return task("trivia", teacher, student, interval, higher_is_better=higher_is_better)


def needle(teacher: float, student: float, num_samples: int = 400) -> TaskScore:
    lost = round((teacher - student) * num_samples)
    low, high = compute_mean_loss_interval([1.0] * lost + [0.0] * (num_samples - lost))
    return task("needle_1024", teacher, student, (100 * low, 100 * high), metric="found", num_samples=num_samples)


@pytest.mark.parametrize(
    ("parent", "student", "limit", "spread", "outcome"),
    [
        (0.4, 0.2, 0.3, 0.0, "passed"),
        (0.4, 0.2, 0.6, 0.0, "failed"),
        (0.2, 0.4, 0.0, 0.0, "failed"),
        (0.2, 0.4, -1.0, 0.0, "passed"),
        (0.4, 0.39, 0.0, 0.3, "undecided"),
        (0.0, 0.0, 0.0, 0.0, "passed"),
    ],
)
@pytest.mark.parametrize("texts", [2, TEXTS])
def test_a_student_is_compared_with_its_parent_on_the_same_texts(
    parent: float, student: float, limit: float, spread: float, outcome: str, texts: int
) -> None:
    before, after = totals(parent, texts=texts), totals(student, texts=texts, spread=spread)
    spec = EvaluationSpec(min_kl_reduction=limit, max_kl=None, min_top1_agreement=None)
    built = Report.build(spec, distilled=after, parent=ParentTotals(before), cost=COST)
    [gate] = built.gates
    assert (gate.field, gate.outcome) == ("evaluation.min_kl_reduction", outcome)
    assert gate.value == pytest.approx(1 - student / parent if parent else 0.0)
    assert built.parent is not None
    assert built.parent.kl == pytest.approx(parent)
    assert Report.build(spec, distilled=after, cost=COST).gates == (), "it has no parent"


def test_the_report_has_the_published_keys() -> None:
    stages = {"rewired": totals(1.0), "calibrated": totals(0.5), "distilled": totals(0.25)}
    built = Report.build(EvaluationSpec(), **stages, cost=COST, tokens_trained=99)
    close = pytest.approx
    assert json.loads(built.model_dump_json()) == {
        "teacher": {"perplexity": close(math.e)},
        **{
            name: {"perplexity": close(math.exp(1.1)), "kl": close(of.kl / 120), "top1_agreement": close(0.8)}
            for name, of in stages.items()
        },
        "parent": None,
        "parent_tasks": [],
        "perplexity_ratio": close(math.exp(0.1)),
        "kl_recovered": close(0.75),
        "num_positions": 120,
        "intervals": {
            "unit": "text",
            "num_units": TEXTS,
            "kl": close([0.25, 0.25]),
            "top1_agreement": close([0.8, 0.8]),
            "perplexity_ratio": close([math.exp(0.1)] * 2),
        },
        "prefill_flops_ratio": 0.6,
        "kv_bytes_ratio": 0.75,
        "prompt_length": 128,
        "prefill_flops_per_token": {"dense": 100.0, "swiftkv": 60.0},
        "kv_bytes_per_token": {"dense": 64.0, "swiftkv": 48.0},
        "ttft_ms": {"dense": 4.0, "swiftkv": 3.0},
        "tokens_trained": 99,
        **dict.fromkeys(("training", "continuations", "exit_head")),
        **{name: [] for name in ("by_position", "by_prompt_length", "tasks", "tasks_left_out", "gates")},
    }
    assert Report.model_validate_json(built.model_dump_json()) == built
    nothing_lost = Report.build(EvaluationSpec(), rewired=totals(0.0), distilled=totals(0.0), cost=COST)
    assert (nothing_lost.kl_recovered, nothing_lost.calibrated) == (0.0, None)


def test_the_exit_head_by_confidence() -> None:
    counts = ExitCounts((2, *[0] * (NUM_EXIT_BINS - 2), 6), (1, *[0] * (NUM_EXIT_BINS - 2), 6))
    head = Report.build(EvaluationSpec(), distilled=totals(0.1, exit_head=counts), cost=COST).exit_head
    bins = [(each.low, each.high, each.share, each.agreement) for each in head or ()]
    assert (bins[0], bins[1][2:], bins[-1]) == ((0.0, 0.05, 0.25, 0.5), (0.0, None), (0.95, 1.0, 0.75, 1.0))


@pytest.mark.parametrize(
    ("limits", "kl", "message"),
    [
        ({"max_kl": 0.2}, 0.25, r"held-out KL in nats is 0.25, and the limit evaluation.max_kl is 0.2"),
        ({"max_kl": 0.2}, math.nan, "KL in nats is nan"),
        ({"max_perplexity_ratio": 1.1}, 0.1, r"relative to the teacher's is 1.105, and .* is 1.1"),
        (
            {"min_top1_agreement": 0.81},
            0.1,
            "top-1 agreement is 0.8, and the limit evaluation.min_top1_agreement is 0.81",
        ),
    ],
)
def test_a_gate_refuses_with_the_figures(limits: dict[str, float], kl: float, message: str) -> None:
    report(kl).check_gates()
    with pytest.raises(QualityGateError, match=message + r".*perplexity 3.004 .*2.718.*80.0%") as caught:
        report(kl, **limits).check_gates()
    assert caught.value.field == f"evaluation.{next(iter(limits))}"


def test_limits_that_are_kept_pass_and_every_failed_gate_is_named() -> None:
    built = report(0.2, score(0.5, 0.49), max_kl=0.21, max_perplexity_ratio=1.11, min_top1_agreement=0.79)
    built.check_gates()
    kept = ("max_kl", "max_perplexity_ratio", "max_drop", "min_top1_agreement")
    assert {gate.field: gate.passed for gate in built.gates} == {f"evaluation.{field}": True for field in kept}
    named = (
        r"the limit evaluation.max_kl is 0.1 .*; .*points lost on trivia is 2, and the limit evaluation.max_drop is 1"
    )
    with pytest.raises(QualityGateError, match=named):
        report(0.25, score(0.50, 0.48), max_kl=0.1, max_drop=1.0).check_gates()


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
        (math.inf, math.inf, False, None),
    ],
)
def test_what_is_lost_is_points_of_shares_and_percent_of_other_scores(
    teacher: float, student: float, higher_is_better: bool, lost: float | None
) -> None:
    """A score that is not a number passes no gate."""
    scored = score(teacher, student, higher_is_better=higher_is_better)
    assert lost is None or scored.drop == lost
    (gate,) = report(0.25, scored, max_drop=1.0).gates
    assert gate.passed == (lost is not None and lost <= 1.0)
    assert report(0.25, scored, max_drop=None).gates == ()


@pytest.mark.parametrize(
    ("student", "margin", "outcome", "samples"),
    [
        (0.495, 0.4, "passed", None),
        (0.495, 40.0, "undecided", 651_294),
        (0.495, 2.0, "undecided", 460),
        (0.495, None, "undecided", None),
        (0.48, 0.9, "failed", None),
        (0.48, 1.1, "undecided", 196),
    ],
)
def test_points_lost_are_judged_only_with_samples_enough(
    student: float, margin: float | None, outcome: str, samples: int | None
) -> None:
    """An undecided gate refuses no model; it keeps it from being promoted (`routes/test_registry.py`)."""
    built = report(0.25, score(0.5, student, margin=margin), max_drop=1.0)
    (gate,) = built.gates
    assert (gate.outcome, gate.passed, gate.samples_needed) == (outcome, outcome == "passed", samples)
    if outcome == "undecided":
        said = "the 95% interval is unknown" if samples is None else f"use {samples:,} samples"
        assert re.search(f"undecided, .*{said}", gate.reason)
        built.check_gates()
    assert find_worst_verdict(built.model_dump(mode="json")) == outcome
    assert bool(describe_undecided_gates(built.model_dump())) == (outcome == "undecided")


@pytest.mark.parametrize(
    ("limit", "outcome"), [(0.01, "failed"), (0.19, "undecided"), (0.25, "undecided"), (0.4, "passed")]
)
def test_figures_of_held_out_text_are_judged_by_their_intervals(limit: float, outcome: str) -> None:
    """12 texts with a KL of 0.1 or 0.3 do not show that the mean over all texts is 0.2."""
    built = report(measured=totals(0.2, spread=0.1), max_kl=limit)
    (gate,) = built.gates
    assert built.intervals is not None
    assert (gate.outcome, gate.interval) == (outcome, built.intervals.kl)
    assert gate.interval[0] < 0.2 < gate.interval[1]
    other = {"failed": 0.999, "undecided": 0.76, "passed": 0.5}[outcome]
    assert outcomes(measured=totals(0.2, spread=0.1), min_top1_agreement=other) == {"min_top1_agreement": outcome}


def test_a_single_text_has_no_interval_and_decides_nothing() -> None:
    alone = report(measured=totals(0.1, texts=1), max_kl=0.2)
    assert (alone.intervals, alone.gates[0].outcome) == (None, "undecided")
    assert outcomes(measured=totals(math.nan, texts=1), max_kl=0.2) == {"max_kl": "failed"}


def test_the_worst_gate_comes_first() -> None:
    tasks = (score(0.5, 0.5), score(0.5, 0.495, margin=1.0), score(0.5, 0.4))
    gates = report(0.15, *tasks, max_kl=0.2, min_top1_agreement=0.79, max_drop=1.0).gates
    closest_first = [("passed", pytest.approx(0.8)), ("passed", pytest.approx(0.15)), ("passed", 0.0)]
    assert [(gate.outcome, gate.value) for gate in gates] == [("failed", 10.0), ("undecided", 0.5), *closest_first]


def test_reports_of_before_outcomes_still_open() -> None:
    document = json.loads(report(max_kl=0.1).model_dump_json())
    for key in ("outcome", "interval", "samples_needed"):
        del document["gates"][0][key]
    assert [(gate.passed, gate.outcome) for gate in Report.model_validate(document).gates] == [(False, "failed")]


def test_instruction_tuned_models_have_limits_that_others_have_not() -> None:
    assert outcomes(0.3, instruct=True) == {"max_kl": "failed", "min_top1_agreement": "passed"}
    assert outcomes(0.3) == {}
    assert outcomes(math.nan, instruct=True)["max_kl"] == "failed"
    assert outcomes(0.3, instruct=True, max_kl=None, min_top1_agreement=None) == {}
    assert outcomes(0.3, instruct=True, max_kl=0.4)["max_kl"] == "passed"


def test_a_length_judges_only_where_the_teacher_finds_its_needles() -> None:
    found = {
        scores: outcomes(0.1, needle(*scores), max_needle_drop=5.0)
        for scores in ((0.9, 0.9), (0.9, 0.8), (1.0, 0.95, 20), (0.79, 0.1))
    }
    assert [each.get("max_needle_drop") for each in found.values()] == ["passed", "failed", "undecided", None]
    assert "max_drop" not in found[0.9, 0.9]


SIZES = {"gsm8k": 1319, "winogrande": 1267, "builtin:ifeval": 541}
RECIPE_SPECS = [load_spec(path) for path in RECIPES]
OF_RECIPES = {spec.evaluation for spec in RECIPE_SPECS if spec.evaluation.tasks}
JUDGED = {
    **{f"recipe {spec.max_drop}": spec for spec in OF_RECIPES},
    **{f"recipe {spec.max_drop}, auto": spec.model_copy(update={"max_drop": "auto"}) for spec in OF_RECIPES},
    **{name: EvaluationSpec(tasks=(name,)) for name in SIZES},
}
DRAWS = 200
ALONE = {"builtin:ifeval"}
"""Tasks with too few samples to tell a loss of three points from none; their forecast says so."""


def pass_rate(spec: EvaluationSpec, lost: float) -> float:
    """Share of `DRAWS` random evaluations that pass all gates, for a student that loses `lost` of the samples of each
    task; 8% of the samples differ, or more if `lost` is more. Needles are as by default."""
    rng, discordant = np.random.default_rng(7), max(0.08, lost)
    sizes = [(each.task, each.num_samples or 0) for each in forecast_gates(spec)]
    sizes += [(f"needle_{length}", spec.needle_samples) for length in NEEDLE_LENGTHS]
    passed = 0
    for _ in range(DRAWS):
        scores = []
        for name, size in sizes:
            shares = [(discordant + lost) / 2, (discordant - lost) / 2, 1 - discordant]
            worse, better, _ = rng.multinomial(size, shares)
            low, high = compute_mean_loss_interval([1.0] * worse + [-1.0] * better + [0.0] * (size - worse - better))
            student = 0.85 - (worse - better) / size
            scores.append(task(name, 0.85, student, (100 * low, 100 * high), num_samples=size))
        built = report(0.0, *scores, tasks=spec.tasks, max_drop=spec.max_drop)
        passed += all(gate.passed for gate in built.gates)
    return passed / DRAWS


@pytest.mark.parametrize("name", JUDGED)
def test_a_student_without_a_loss_passes_and_one_three_points_worse_does_not(name: str) -> None:
    assert pass_rate(JUDGED[name], 0.0) >= 0.95
    worse = pass_rate(JUDGED[name], WORSE_STUDENT_LOSS / 100.0)
    said = compute_false_pass_probability([each.model_dump() for each in forecast_gates(JUDGED[name])])
    assert worse == pytest.approx(said, abs=0.05)
    assert {worse > 0.05, (said or 0.0) > 0.05} == {name in ALONE}


def test_recipes_without_tasks_have_no_gate_on_tasks_to_pass() -> None:
    without = [spec for spec in RECIPE_SPECS if spec.evaluation not in OF_RECIPES]
    assert len(without) == 16
    assert [spec.name for spec in without if forecast_gates(spec.evaluation)] == []
    assert compute_false_pass_probability(()) is None


def test_what_samples_can_exclude_is_told_before_the_job_and_is_the_limit_after_it() -> None:
    spec = EvaluationSpec(tasks=("builtin:ifeval", "own_task"), needle_lengths=(512,), task_limit=None)
    found = {each.task: each for each in forecast_gates(spec)}
    assert (found["own_task"].num_samples, found["own_task"].limit) == (None, None)
    gates = report(
        0.0,
        task("ifeval", 0.5, 0.5, (-1.0, 1.0), num_samples=541),
        task("needle_512", 0.9, 0.9, (-1.0, 1.0), num_samples=60),
        tasks=spec.tasks,
        needle_lengths=spec.needle_lengths,
    ).gates
    assert sorted(gate.limit for gate in gates) == sorted(
        limit for limit in (found["builtin:ifeval"].limit, found["needle_512"].limit) if limit
    )
    narrow = forecast_gates(EvaluationSpec(tasks=("gsm8k",), max_drop=1.0, needle_lengths=()))[0]
    assert narrow.samples_needed is not None
    assert (
        compute_min_detectable_drop(narrow.samples_needed)
        <= 1.0
        < compute_min_detectable_drop(narrow.samples_needed - 1)
    )
    assert compute_min_detectable_drop(0) <= 100.0
    assert find_min_samples_to_exclude(0.0) is None


MEASURED: dict[str, Any] = {
    "prompt_length": 2048,
    "ttft_ms": {"dense": 190.0, "swiftkv": 100.0},
    "perplexity_ratio": 1.0503,
    "tasks": [
        {"task": "needle_512", "num_samples": 20, "student": 0.9, "teacher": 1.0},
        {"task": "hellaswag", "num_samples": 20, "student": 0.4, "teacher": 0.5},
    ],
}
FAST = "Prefills prompts of 2,048 tokens 1.9x as fast as its teacher"
CLOSE = "perplexity on held-out text is 1.05x the teacher's"
FOUND = "finds 18 of 20 numbers hidden in prompts of 512 tokens (teacher: 20)"


@pytest.mark.parametrize(
    ("left_out", "said"),
    [
        ((), f"{FAST}; {CLOSE}; {FOUND}."),
        (("ttft_ms",), f"P{CLOSE[1:]}; {FOUND}."),
        (("perplexity_ratio", "tasks"), f"{FAST}."),
        (tuple(MEASURED), None),
    ],
)
def test_a_verdict_says_what_was_measured_and_nothing_else(left_out: tuple[str, ...], said: str | None) -> None:
    assert summarize_quality({name: value for name, value in MEASURED.items() if name not in left_out}) == said


def test_own_rows_have_gates_like_tasks() -> None:
    """A forecast needs the number of rows; a likelihood is no share, so its limit is a percentage from the start."""
    source = {"name_or_path": "rows.jsonl", "sample_count": 1000}
    own = {"name": "own", "metric": "contains", "source": source}
    spec = EvaluationSpec.model_validate(
        {
            "tasks": ["builtin:gsm8k"],
            "rows": [
                own,
                own | {"name": "all", "source": {"name_or_path": "rows.jsonl"}},
                own | {"name": "likely", "metric": "likelihood"},
            ],
            "task_limit": 500,
        }
    )
    assert spec.has_gate
    assert EvaluationSpec(rows=spec.rows).has_gate
    gsm8k, rows, unknown, likely = forecast_gates(spec)
    assert (rows.task, rows.num_samples, rows.limit) == ("own", 500, gsm8k.limit)
    assert rows.excluded == round(compute_min_detectable_drop(500, num_gates=4), 2), "all four are gates"
    assert [(each.num_samples, each.limit) for each in (unknown, likely)] == [(None, None)] * 2
    score = TaskScore(
        task="likely",
        metric="likelihood",
        num_fewshot=0,
        chat_template=False,
        num_samples=500,
        teacher=-1.0,
        student=-1.03,
        teacher_stderr=None,
        student_stderr=None,
        drop_interval=(2.0, 4.0),
    )
    report = Report.build(
        spec, distilled=HeldOutTotals(1, 1.0, 1.0, 0.1, 1), cost=COST, tasks=TaskResults((score,)), instruct=False
    )
    [gate] = report.gates
    assert (gate.value, gate.limit, gate.outcome) == (3.0, 1.0, "failed"), "three percent of the teacher's score"
