"""`evaluation.html` and `sweep.html`, from the templates in this package: escaped, and complete without network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from swiftkv_platform.contract.sweeps import Point, SweepReport
from swiftkv_platform.contract.verdicts import verdict_of
from swiftkv_platform.reports.charts import as_svg, exit_head_chart, frontier_chart, loss_chart, task_chart
from swiftkv_platform.specs.evaluation import points_lost

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def render(template: str, **values: Any) -> str:
    """Render a page from `template` and `values`; the template decides which values are HTML."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader(__package__),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


STAGES = {
    "rewired": "student, projections copied",
    "calibrated": "student, projections calibrated",
    "distilled": "student, distilled",
}
"""Keys of `evaluation.json` that hold a student's quality, in order of time."""


_DESCRIPTIONS = {
    "tasks": "Scores of teacher and student by task; the table below has the figures",
    "exit_head": "Exit head by confidence: share of positions and agreement with the student",
    "losses": "Training losses over tokens; they fall from left to right",
}
_ORIGIN = ("job_id", "attempt", "teacher", "revision", "data_fingerprint", "code_version", "trial")
"""Keys of an artifact's lineage that the page shows."""


def evaluation_page(
    report: Mapping[str, Any], lineage: Mapping[str, Any], points: Sequence[Mapping[str, float]] = ()
) -> str:
    """The page of one model.

    Args:
        report: `evaluation.json`.
        lineage: lineage in the artifact's manifest; empty if the model's origin is unknown.
        points: metrics of training steps for the loss curve; a sample of them for a long run.
    """
    spec = lineage.get("spec", {})
    return render(
        "evaluation.html",
        title=f"Evaluation of {spec.get('name', 'SwiftKV model')}",
        lead=_lead(report, lineage),
        report=report,
        stages=STAGES,
        plots=_plots(report, points),
        points_lost=_points_lost,
        num_steps=int(points[-1]["step"]) if points else 0,
        last_loss=points[-1].get("loss", float("nan")) if points else None,
        lineage=lineage,
        origin=_ORIGIN,
        spec=json.dumps(spec, indent=2, ensure_ascii=False),
    )


def evaluation_charts(report: Mapping[str, Any]) -> dict[str, Figure]:
    """The plots of the page, for trackers."""
    charts = {}
    if report["tasks"]:
        charts["tasks"] = task_chart(report["tasks"])
    if report["exit_head"] is not None:
        charts["exit_head"] = exit_head_chart(report["exit_head"])
    return charts


def _plots(report: Mapping[str, Any], points: Sequence[Mapping[str, float]]) -> dict[str, str]:
    charts = {**evaluation_charts(report), "losses": loss_chart(points)}
    return {name: as_svg(chart, _DESCRIPTIONS[name]) for name, chart in charts.items() if chart is not None}


def _lead(report: Mapping[str, Any], lineage: Mapping[str, Any]) -> str:
    parts = [f"teacher {lineage['teacher']}"] if lineage.get("teacher") else []
    if report["gates"]:
        worst = report["gates"][0]
        figures = f"{worst['value']:.4g} (limit {worst['limit']:g}, {verdict_of(worst)})"
        parts.insert(0, f"worst measure: {worst['subject']} {figures}")
    parts.append(f"{report['num_positions']:,} held-out positions")
    if report["tokens_trained"] is not None:
        parts.append(f"{report['tokens_trained']:,} tokens trained")
    training = report.get("training")  # missing in older reports
    if training is not None:
        why = " (chosen by held-out KL)" if training["reason"] == "lowest_held_out_kl" else ""
        parts.append(f"state of step {training['step']:,}{why}")
    return ", ".join(parts)


def _points_lost(task: Mapping[str, Any]) -> float:
    more_is_better = task.get("higher_is_better", True)  # missing in older reports, where higher is always better
    return points_lost(task["teacher"], task["student"], higher_is_better=more_is_better)


def sweep_page(name: str, sweep: SweepReport) -> str:
    """The page of a sweep: the frontier of quality and compute, every trial, and the one to take."""
    measured = [point for point in sweep.points if point.report is not None]
    chosen = "none within the budget" if sweep.recommended is None else f"{sweep.recommended} recommended"
    return render(
        "sweep.html",
        title=f"Sweep {name}",
        lead=f"{len(sweep.points)} trials, {chosen}",
        plot=_plot(sweep, measured),
        points=sweep.points,
        failed=[point for point in sweep.points if point.report is None],
        gates=next((point.report["gates"] for point in measured if point.report), []),
    )


def _plot(sweep: SweepReport, measured: list[Point]) -> str | None:
    if not measured:
        return None
    rows = [
        {
            "name": point.name,
            "key_value_group_size": point.key_value_group_size,
            "prefill_flops_ratio": point.cost[0],
            "kl": point.cost[2],
            "on_frontier": point.on_frontier,
            "recommended": point.name == sweep.recommended,
        }
        for point in measured
    ]
    return as_svg(
        frontier_chart(rows), "Held-out KL over prefill compute of every trial; the table below has the figures"
    )
