"""`sweep.html`: the trials of a sweep side by side. Knows the keys of `sweep.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swiftkv_platform.contract.sweeps import Point, SweepReport
from swiftkv_platform.reports.charts import as_svg, frontier_chart
from swiftkv_platform.reports.page import figure, page, paragraph, section, table, verdict

_COLUMNS = (
    "trial",
    "prefill compute",
    "KV bytes",
    "perplexity ratio",
    "KL (nats)",
    "top-1 agreement",
    "tokens trained",
    "frontier",
    "gates",
)


def sweep_page(name: str, sweep: SweepReport) -> str:
    """The page of a sweep: the frontier of quality and compute, every trial, and the one to take."""
    measured = [point for point in sweep.points if point.report is not None]
    chosen = "none is within the budget" if sweep.recommended is None else f"{sweep.recommended} is taken"
    return page(
        f"Sweep {name}",
        f"{len(sweep.points)} trials, {chosen}",
        [
            section("Quality and compute", _plot(sweep, measured), _table(sweep), _failures(sweep)),
            section(
                "The choice",
                paragraph(
                    "Taken is the trial with the least prefill compute, then the smallest cache, then the lowest KL, "
                    "of those that pass every gate. On the frontier are the trials that no other one beats in compute "
                    "or KL without losing in the other."
                ),
                _gates(sweep),
            ),
        ],
    )


def _plot(sweep: SweepReport, measured: list[Point]) -> str:
    if not measured:
        return ""
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
    svg = as_svg(
        frontier_chart(rows), "Held-out KL over prefill compute of every trial; the table below has the figures"
    )
    return figure(svg, "Lower and further left is better; g is the number of layers that share a KV cache layer")


def _table(sweep: SweepReport) -> str:
    rows = []
    for point in sweep.points:
        if point.report is None:
            rows.append((point.name, *[""] * 7, "not measured"))
            continue
        rows.append(
            (point.name, *_figures(point.report), "yes" if point.on_frontier else "", verdict(point.within_budget))
        )
    return table("Every trial, relative to the teacher", _COLUMNS, rows)


def _failures(sweep: SweepReport) -> str:
    rows = [(point.name, point.error) for point in sweep.points if point.report is None]
    return table("Trials that could not be trained", ("trial", "why"), rows) if rows else ""


def _figures(report: Mapping[str, Any]) -> tuple[str, ...]:
    distilled = report["distilled"]
    return (
        f"{report['prefill_flops_ratio']:.3f}",
        f"{report['kv_bytes_ratio']:.3f}",
        f"{report['perplexity_ratio']:.3f}",
        f"{distilled['kl']:.4f}",
        f"{distilled['top1_agreement']:.1%}",
        f"{report['tokens_trained']:,}",
    )


def _gates(sweep: SweepReport) -> str:
    gates: list[dict[str, Any]] = next((point.report["gates"] for point in sweep.points if point.report), [])
    rows = [(gate["subject"], f"{gate['limit']:g}", gate["field"]) for gate in gates]
    return table("The accuracy budget", ("what is limited", "limit", "field"), rows) if rows else ""
