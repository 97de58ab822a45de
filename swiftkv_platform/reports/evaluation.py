"""`evaluation.html`: what `evaluation.json` says, for people. Knows its keys, not how they came about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from swiftkv_platform.reports.charts import as_svg, exit_head_chart, loss_chart, task_chart
from swiftkv_platform.reports.page import details, document, figure, page, paragraph, section, table, verdict
from swiftkv_platform.specs.evaluation import points_lost

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STAGES = {
    "rewired": "student, projections copied",
    "calibrated": "student, projections calibrated",
    "distilled": "student, distilled",
}
"""Keys of `evaluation.json` that hold a student's quality, in order of time."""


def evaluation_page(
    report: Mapping[str, Any], lineage: Mapping[str, Any], points: Sequence[Mapping[str, float]] = ()
) -> str:
    """The page of one model.

    Args:
        report: `evaluation.json`.
        lineage: of the artifact's manifest; empty where nothing is known of the model's origin.
        points: metrics of the training steps, for the loss curve.
    """
    name = lineage.get("spec", {}).get("name", "SwiftKV model")
    return page(
        f"Evaluation of {name}",
        _lead(report, lineage),
        [
            section("Quality gates", _gates(report)),
            section("Held-out text", _quality(report), _continuations(report)),
            section("Tasks", *_tasks(report)),
            section("Exit head", *_exit_head(report)),
            section("Cost", _cost(report)),
            section("Training", _training(points)),
            section("Origin", _origin(lineage)),
        ],
    )


def evaluation_charts(report: Mapping[str, Any]) -> dict[str, Figure]:
    """The plots of the page, for trackers."""
    charts = {}
    if report["tasks"]:
        charts["tasks"] = task_chart(report["tasks"])
    if report["exit_head"] is not None:
        charts["exit_head"] = exit_head_chart(report["exit_head"])
    return charts


def _lead(report: Mapping[str, Any], lineage: Mapping[str, Any]) -> str:
    parts = [f"teacher {lineage['teacher']}"] if lineage.get("teacher") else []
    parts.append(f"{report['num_positions']:,} held-out positions")
    if report["tokens_trained"] is not None:
        parts.append(f"{report['tokens_trained']:,} tokens trained")
    return ", ".join(parts)


def _gates(report: Mapping[str, Any]) -> str:
    if not report["gates"]:
        return paragraph("No limit was set: the model was published whatever its quality.")
    rows = [
        (gate["subject"], f"{gate['value']:.4g}", f"{gate['limit']:g}", verdict(gate["passed"]), gate["field"])
        for gate in report["gates"]
    ]
    return table("Limits of the spec", ("what is limited", "measured", "limit", "verdict", "field"), rows)


def _quality(report: Mapping[str, Any]) -> str:
    teacher = report["teacher"]["perplexity"]
    rows: list[tuple[str, ...]] = [("teacher", f"{teacher:.3f}", "1.000", "0", "100%")]
    for key, label in STAGES.items():
        stage = report[key]
        if stage is not None:
            ratio = f"{stage['perplexity'] / teacher:.3f}"
            rows.append(
                (label, f"{stage['perplexity']:.3f}", ratio, f"{stage['kl']:.4f}", f"{stage['top1_agreement']:.1%}")
            )
    columns = ("model", "perplexity", "relative to the teacher's", "KL (nats)", "top-1 agreement")
    return table("Against the teacher, position by position", columns, rows)


def _continuations(report: Mapping[str, Any]) -> str:
    found = report["continuations"]
    if found is None:
        return ""
    return paragraph(
        f"Greedy continuations of {found['num_prompts']} held-out prompts of {found['prompt_length']} tokens, "
        f"{found['num_tokens']} tokens each: the student writes {found['matched']:.1%} of the teacher's tokens before "
        f"it first differs, and continues {found['identical']:.1%} of the prompts exactly as the teacher does."
    )


def _tasks(report: Mapping[str, Any]) -> tuple[str, ...]:
    tasks, left_out = report["tasks"], report.get("tasks_left_out", ())
    missing = (paragraph(f"Not measured within evaluation.max_minutes: {', '.join(left_out)}."),) if left_out else ()
    if not tasks:
        return missing
    rows = [
        (
            task["task"],
            task["metric"],
            task["num_fewshot"],
            f"{task['num_samples']:,}",
            _score(task, "teacher"),
            _score(task, "student"),
            f"{_points_lost(task):+.2f}",
        )
        for task in tasks
    ]
    columns = ("task", "metric", "shots", "samples", "teacher", "student", "points lost")
    svg = as_svg(task_chart(tasks), "Scores of teacher and student by task; the table below has the figures")
    caption = (
        "Scores with standard errors; where a score is outside 0..1, or less of it is better, what is lost is percent "
        "of the teacher's"
    )
    return *missing, figure(svg, "Bars: score; lines: standard error"), table(caption, columns, rows)


def _points_lost(task: Mapping[str, Any]) -> float:
    more_is_better = task.get("higher_is_better", True)  # reports of before this key know no other metrics
    return points_lost(task["teacher"], task["student"], higher_is_better=more_is_better)


def _score(task: Mapping[str, Any], who: str) -> str:
    error = task[f"{who}_stderr"]
    return f"{task[who]:.4f}" + ("" if error is None else f" ± {error:.4f}")


def _exit_head(report: Mapping[str, Any]) -> tuple[str, ...]:
    bins = report["exit_head"]
    if bins is None:
        return ()
    rows = [
        (
            f"{b['low']:.2f} to {b['high']:.2f}",
            f"{b['share']:.2%}",
            "" if b["agreement"] is None else f"{b['agreement']:.1%}",
        )
        for b in bins
    ]
    svg = as_svg(exit_head_chart(bins), "Exit head by confidence: share of positions and agreement with the student")
    columns = ("largest probability", "share of positions", "agreement with the student")
    return (
        figure(
            svg, "How sure the exit head is, and how often it then agrees with the whole student (paper, figure D.1)"
        ),
        details("The figures", table("Exit head by confidence", columns, rows)),
    )


def _cost(report: Mapping[str, Any]) -> str:
    ttft = report["ttft_ms"]
    rows = [
        ("prefill FLOPs a token", f"{report['prefill_flops_ratio']:.3f}"),
        ("KV cache bytes a token", f"{report['kv_bytes_ratio']:.3f}"),
        (
            f"time to first token ({ttft['dense']:.1f} ms dense, {ttft['swiftkv']:.1f} ms SwiftKV)",
            f"{ttft['swiftkv'] / ttft['dense']:.3f}",
        ),
    ]
    return table("SwiftKV relative to dense, measured on one prompt", ("what", "ratio"), rows)


def _training(points: Sequence[Mapping[str, float]]) -> str:
    chart = loss_chart(points)
    if chart is None:
        return ""
    last = points[-1]
    caption = f"{len(points):,} steps; the last at {last.get('loss', float('nan')):.4f}"
    return figure(as_svg(chart, "Training losses over tokens; they fall from left to right"), caption)


def _origin(lineage: Mapping[str, Any]) -> str:
    if not lineage:
        return ""
    names = ("job_id", "attempt", "teacher", "revision", "data_fingerprint", "code_version", "trial")
    rows = [(name.replace("_", " "), lineage[name]) for name in names if lineage.get(name) is not None]
    return table("Where the model comes from", ("what", "value"), rows) + details(
        "The job's spec", document(lineage.get("spec", {}))
    )
