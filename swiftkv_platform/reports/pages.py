"""`evaluation.html` and `sweep.html`: self-contained pages from this package's templates. Trackers get the same
plots."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from html import escape
from itertools import cycle
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from swiftkv_platform.contract.sweeps import SweepReport, TrialResult
from swiftkv_platform.contract.verdicts import read_gate_verdict
from swiftkv_platform.specs.evaluation import compute_points_lost

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def render_template(template: str, **values: Any) -> str:
    """Render a page. Values are escaped unless the template marks them as safe HTML."""
    return _get_environment().get_template(template).render(values)


@cache
def _get_environment() -> Environment:
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
    "parent": "student, before this training",
    "distilled": "student, distilled",
}
"""Labels of the student's quality in `evaluation.json`, in order of training."""


_PLOT_DESCRIPTIONS = {
    "tasks": "Scores of teacher and student by task; the table below has the values",
    "exit_head": "Exit head by confidence: share of positions and agreement with the student",
    "losses": "Training losses over tokens; they fall from left to right",
}
_LINEAGE_KEYS = ("job_id", "attempt", "teacher", "revision", "data_fingerprint", "code_version", "trial")
"""Lineage keys on the page."""


def render_evaluation_page(
    report: Mapping[str, Any], lineage: Mapping[str, Any], points: Sequence[Mapping[str, float]] = ()
) -> str:
    """Render a model's evaluation page.

    Args:
        report: `evaluation.json`.
        lineage: lineage in the artifact's manifest; empty if unknown.
        points: metrics of training steps for the loss curve, sampled in long runs.
    """
    spec = lineage.get("spec", {})
    return render_template(
        "evaluation.html",
        title=f"Evaluation of {spec.get('name', 'SwiftKV model')}",
        lead=_format_lead(report, lineage),
        report=report,
        stages=STAGES,
        plots=_render_plots(report, points),
        compute_points_lost=_compute_points_lost,
        num_steps=int(points[-1]["step"]) if points else 0,
        last_loss=points[-1].get("loss", float("nan")) if points else None,
        lineage=lineage,
        origin=_LINEAGE_KEYS,
        spec=json.dumps(spec, indent=2, ensure_ascii=False),
    )


def plot_evaluation(report: Mapping[str, Any]) -> dict[str, Figure]:
    """Plot tasks and exit head, by name."""
    charts = {}
    if report["tasks"]:
        charts["tasks"] = plot_tasks(report["tasks"])
    if report["exit_head"] is not None:
        charts["exit_head"] = plot_exit_head(report["exit_head"])
    return charts


def _render_plots(report: Mapping[str, Any], points: Sequence[Mapping[str, float]]) -> dict[str, str]:
    charts = {**plot_evaluation(report), "losses": plot_losses(points)}
    return {name: render_svg(chart, _PLOT_DESCRIPTIONS[name]) for name, chart in charts.items() if chart is not None}


def _format_lead(report: Mapping[str, Any], lineage: Mapping[str, Any]) -> str:
    parts = [f"teacher {lineage['teacher']}"] if lineage.get("teacher") else []
    if report["gates"]:
        worst = report["gates"][0]
        figures = f"{worst['value']:.4g} (limit {worst['limit']:g}, {read_gate_verdict(worst)})"
        parts.insert(0, f"worst metric: {worst['subject']} {figures}")
    parts.append(f"{report['num_positions']:,} held-out positions")
    if (deep_tail := ((lineage.get("spec") or {}).get("swiftkv") or {}).get("deep_tail", 1)) > 1:
        parts.append(f"the last {deep_tail:,} prompt tokens run all layers")
    if report["tokens_trained"] is not None:
        parts.append(f"{report['tokens_trained']:,} tokens trained")
    training = report.get("training")  # missing in older reports
    if training is not None:
        criterion = " (lowest held-out KL)" if training["reason"] == "lowest_held_out_kl" else ""
        parts.append(f"weights of step {training['step']:,}{criterion}")
    return ", ".join(parts)


def _compute_points_lost(task: Mapping[str, Any]) -> float:
    # Older reports have no `higher_is_better`; in these, higher is always better.
    return compute_points_lost(task["teacher"], task["student"], higher_is_better=task.get("higher_is_better", True))


def render_sweep_page(name: str, sweep: SweepReport) -> str:
    """Render a sweep's page: the frontier of quality and compute, all trials, and the recommended one."""
    measured = [point for point in sweep.points if point.report is not None]
    chosen = "none passes all gates" if sweep.recommended is None else f"{sweep.recommended} recommended"
    return render_template(
        "sweep.html",
        title=f"Sweep {name}",
        lead=f"{len(sweep.points)} trials, {chosen}",
        plot=_render_frontier(sweep, measured),
        points=sweep.points,
        failed=[point for point in sweep.points if point.report is None],
        gates=next((point.report["gates"] for point in measured if point.report), []),
    )


def _render_frontier(sweep: SweepReport, measured: list[TrialResult]) -> str | None:
    if not measured:
        return None
    chart = plot_frontier(measured, sweep.recommended)
    return render_svg(chart, "Held-out KL over prefill compute of all trials; the table below has the values")


_INK = "#13579b"
"""Placeholder for the page's text color, which follows the light or dark theme."""
_PALETTE = ("#3b82c4", "#d9822b", "#4d9f63", "#b0569f", "#c7514a", "#7a6fd0")
"""Colors visible on white and on near black."""
_SVG_SIZE = re.compile(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"')


def render_svg(figure: Figure, description: str) -> str:
    """Render an `<svg>` element with the page's width and text color; `description` is for screen readers."""
    import matplotlib as mpl

    buffer = io.StringIO()
    # Text stays text, and the output is reproducible.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": description}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    return _SVG_SIZE.sub(rf'\1 role="img" aria-label="{escape(description)}"', text, count=1)


def render_png(figure: Figure) -> bytes:
    """Render a PNG with a white background."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def plot_losses(points: Sequence[Mapping[str, float]]) -> Figure | None:
    """Plot losses over trained tokens; None without losses."""
    names = sorted({name for point in points for name in point if name.endswith("_loss")}) or ["loss"]
    figure, axes = _make_figure()
    for color, name in zip(_PALETTE, names, strict=False):
        series = [(point["tokens"], point[name]) for point in points if name in point and "tokens" in point]
        if series:
            axes.plot(*zip(*series, strict=True), color=color, linewidth=1.2, label=name.replace("_", " "))
    if not axes.lines:
        return None
    axes.set_xlabel("tokens trained")
    axes.set_ylabel("mean over counted positions (nats)")
    axes.set_ylim(bottom=0)
    _draw_legend(axes)
    return figure


def plot_exit_head(bins: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot the exit head's confidence and its agreement with the student (paper, figure D.1)."""
    figure, axes = _make_figure()
    width = bins[0]["high"] - bins[0]["low"]
    axes.bar(
        [b["low"] for b in bins], [b["share"] for b in bins], width * 0.92, align="edge", color=_PALETTE[0], alpha=0.6
    )
    axes.set_xlabel("largest probability of the exit head")
    axes.set_ylabel("share of positions (bars)")
    right = axes.twinx()
    filled = [b for b in bins if b["agreement"] is not None]
    middles = [(b["low"] + b["high"]) / 2 for b in filled]
    right.plot(middles, [b["agreement"] for b in filled], color=_PALETTE[1], marker="o", markersize=4)
    right.set_ylabel("agreement with the student (line)")
    right.set_ylim(0, 1.03)
    axes.set_xlim(0, 1)
    _style_axes(right)
    return figure


def plot_tasks(tasks: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot the scores of teacher and student, with standard errors."""
    figure, axes = _make_figure(height=1.2 + 0.55 * len(tasks))
    for offset, color, model in ((-0.18, _PALETTE[0], "teacher"), (0.18, _PALETTE[1], "student")):
        axes.barh(
            [i + offset for i in range(len(tasks))],
            [task[model] for task in tasks],
            height=0.34,
            xerr=[task[f"{model}_stderr"] or 0.0 for task in tasks],
            color=color,
            ecolor=_INK,
            label=model,
        )
    axes.set_yticks(range(len(tasks)), [task["task"] for task in tasks])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("score")
    _draw_legend(axes)
    return figure


def plot_frontier(points: Sequence[TrialResult], recommended: str | None) -> Figure:
    """Plot held-out KL over prefill compute: a marker per measured trial, and the frontier as a line."""
    figure, axes = _make_figure(height=4.2)
    at = {point.name: (point.ranking_key[0], point.ranking_key[2]) for point in points}
    frontier = sorted(at[point.name] for point in points if point.on_frontier)
    axes.plot(*zip(*frontier, strict=True), color=_INK, linewidth=1.0, linestyle="--", label="frontier", zorder=1)
    groups = sorted({point.key_value_group_size for point in points})
    for color, marker, group in zip(cycle(_PALETTE), cycle("os^Dv*P"), groups, strict=False):
        x, y = zip(*(at[point.name] for point in points if point.key_value_group_size == group), strict=True)
        axes.scatter(x, y, color=color, marker=marker, s=44, label=f"g = {group}", zorder=2)
    if recommended is not None:
        ring: dict[str, Any] = {"s": 170, "facecolors": "none", "edgecolors": _INK, "linewidths": 1.6}
        axes.scatter(*at[recommended], label=f"recommended: {recommended}", **ring)
    axes.set_xlabel("prefill compute relative to the teacher")
    axes.set_ylabel("held-out KL (nats)")
    axes.set_ylim(bottom=0)
    _draw_legend(axes)
    return figure


def _make_figure(*, height: float = 3.4) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(7.2, height), layout="constrained")
    axes = figure.add_subplot()
    _style_axes(axes)
    axes.grid(alpha=0.25)
    return figure, axes


def _style_axes(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set_color(_INK)
    axes.tick_params(colors=_INK)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)


def _draw_legend(axes: Axes) -> None:
    """Draw the legend above the plot."""
    axes.legend(
        frameon=False, labelcolor=_INK, loc="lower left", bbox_to_anchor=(0, 1), ncols=5, columnspacing=1.2, borderpad=0
    )
