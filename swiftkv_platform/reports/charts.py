"""Plots of reports as matplotlib figures, and their conversion to SVG and PNG."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from itertools import cycle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INK = "#13579b"
"""Placeholder for the page's text colour, which follows the reader's light or dark theme."""
_PALETTE = ("#3b82c4", "#d9822b", "#4d9f63", "#b0569f", "#c7514a", "#7a6fd0")
"""Colours of medium lightness, visible on both white and near black."""
_PREFIX = re.compile(r'(<svg[^>]*?) width="[^"]*" height="[^"]*"')


def as_svg(figure: Figure, description: str) -> str:
    """Return an `<svg>` element with the page's width and text colour; `description` is for screen readers."""
    import matplotlib as mpl

    buffer = io.StringIO()
    # Text stays text, and the output is reproducible.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": description}):
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    return _PREFIX.sub(rf'\1 role="img" aria-label="{escape(description)}"', text, count=1)


def as_png(figure: Figure) -> bytes:
    """Draw a figure on white, for viewers without themes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def loss_chart(points: Sequence[Mapping[str, float]]) -> Figure | None:
    """Plot losses over the tokens trained on; None if there are none."""
    names = sorted({name for point in points for name in point if name.endswith("_loss")}) or ["loss"]
    figure, axes = _figure()
    for colour, name in zip(_PALETTE, names, strict=False):
        series = [(point["tokens"], point[name]) for point in points if name in point and "tokens" in point]
        if series:
            axes.plot(*zip(*series, strict=True), color=colour, linewidth=1.2, label=name.replace("_", " "))
    if not axes.lines:
        return None
    axes.set_xlabel("tokens trained")
    axes.set_ylabel("mean over counted positions (nats)")
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def exit_head_chart(bins: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot figure D.1 of the paper: the distribution of the exit head's confidence, and its agreement with the
    student."""
    figure, axes = _figure()
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
    _style(right)
    return figure


def task_chart(tasks: Sequence[Mapping[str, Any]]) -> Figure:
    """Scores of teacher and student, with their standard errors."""
    figure, axes = _figure(height=1.2 + 0.55 * len(tasks))
    for offset, colour, who in ((-0.18, _PALETTE[0], "teacher"), (0.18, _PALETTE[1], "student")):
        axes.barh(
            [i + offset for i in range(len(tasks))],
            [task[who] for task in tasks],
            height=0.34,
            xerr=[task[f"{who}_stderr"] or 0.0 for task in tasks],
            color=colour,
            ecolor=_INK,
            label=who,
        )
    axes.set_yticks(range(len(tasks)), [task["task"] for task in tasks])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("score")
    _legend(axes)
    return figure


def frontier_chart(points: Sequence[Mapping[str, Any]]) -> Figure:
    """Plot held-out KL over prefill compute, with a marker for every trial and the frontier as a line.

    Points have `name`, `key_value_group_size`, `prefill_flops_ratio`, `kl`, `on_frontier` and `recommended`.
    """
    figure, axes = _figure(height=4.2)
    frontier = sorted((p["prefill_flops_ratio"], p["kl"]) for p in points if p["on_frontier"])
    axes.plot(*zip(*frontier, strict=True), color=_INK, linewidth=1.0, linestyle="--", label="frontier", zorder=1)
    groups = sorted({p["key_value_group_size"] for p in points})
    for colour, marker, group in zip(cycle(_PALETTE), cycle("os^Dv*P"), groups, strict=False):
        members = [p for p in points if p["key_value_group_size"] == group]
        axes.scatter(
            [p["prefill_flops_ratio"] for p in members],
            [p["kl"] for p in members],
            color=colour,
            marker=marker,
            s=44,
            label=f"g = {group}",
            zorder=2,
        )
    for p in points:
        if p["recommended"]:
            place = p["prefill_flops_ratio"], p["kl"]
            axes.scatter(*place, s=170, facecolors="none", edgecolors=_INK, linewidths=1.6, label=f"taken: {p['name']}")
    axes.set_xlabel("prefill compute relative to the teacher")
    axes.set_ylabel("held-out KL (nats)")
    axes.set_ylim(bottom=0)
    _legend(axes)
    return figure


def _figure(*, height: float = 3.4) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure  # without pyplot: no display, no global state

    figure = Figure(figsize=(7.2, height), layout="constrained")
    axes = figure.add_subplot()
    _style(axes)
    axes.grid(alpha=0.25)
    return figure, axes


def _style(axes: Axes) -> None:
    for spine in axes.spines.values():
        spine.set_color(_INK)
    axes.tick_params(colors=_INK)
    axes.xaxis.label.set_color(_INK)
    axes.yaxis.label.set_color(_INK)


def _legend(axes: Axes) -> None:
    """Draw the legend above the plot, where it covers nothing."""
    axes.legend(
        frameon=False, labelcolor=_INK, loc="lower left", bbox_to_anchor=(0, 1), ncols=5, columnspacing=1.2, borderpad=0
    )
