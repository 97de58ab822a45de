"""`sweep.html`: the trials of a sweep side by side. Knows the keys of `sweep.json`."""

from __future__ import annotations

from swiftkv_platform.contract.sweeps import Point, SweepReport
from swiftkv_platform.reports.charts import as_svg, frontier_chart
from swiftkv_platform.reports.page import render


def sweep_page(name: str, sweep: SweepReport) -> str:
    """The page of a sweep: the frontier of quality and compute, every trial, and the one to take."""
    measured = [point for point in sweep.points if point.report is not None]
    chosen = "none is within the budget" if sweep.recommended is None else f"{sweep.recommended} is taken"
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
