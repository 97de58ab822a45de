"""Reports as the paper's figures (matplotlib, extra `plot`) and as the Markdown tables of the documentation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.common import format_markdown_table
from benchmarks.serving.loads import Figures

Report = dict[str, Any]
SYSTEM_LABELS = {"dense": "dense", "merge_all_layers": "Merge-all-Layers"}
mpl.rcParams["svg.hashsalt"] = "serving"  # makes the same figure give the same file


def format_label(system: str) -> str:
    if system in SYSTEM_LABELS:
        return SYSTEM_LABELS[system]
    group_size, *options = system.removeprefix("swiftkv_g").split("_")
    return ", ".join([f"SwiftKV, g = {group_size}", *({"fp8": "FP8", "own": "own K and V"}[one] for one in options)])


def plot_lengths(report: Report, path: Path) -> None:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    _plot_lines(axes, report["rows"], "num_input_tokens", "total_token_throughput")
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        [row["num_input_tokens"] for row in report["rows"]], [row["num_input_tokens"] for row in report["rows"]]
    )
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("input and output tokens/s")
    _save_figure(figure, path)


def plot_rates(report: Report, path: Path) -> None:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("ttft", "tpot"), strict=True):
        _plot_lines(axes, report["rows"], "request_rate", f"median_{name}_ms")
        axes.set_xlabel("requests/s")
        axes.set_ylabel(f"median {name.upper()} (ms)")
    _save_figure(figure, path)


def plot_memory(report: Report, path: Path) -> None:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    rows, names = report["rows"], list(report["rows"][0]["results"])
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        at = [place + (number - (len(names) - 1) / 2) * width for place in range(len(rows))]
        axes.bar(at, [row["results"][name]["total_token_throughput"] for row in rows], width, label=format_label(name))
    axes.set_xticks(range(len(rows)), [f"{row['kv_cache_mib']} MiB" for row in rows])
    axes.set_xlabel("memory of the KV cache")
    axes.set_ylabel("input and output tokens/s")
    _save_figure(figure, path)


PLOTTERS = {"lengths": plot_lengths, "rates": plot_rates, "memory": plot_memory}


def _plot_lines(axes: Any, rows: list[dict[str, Any]], x: str, y: str) -> None:
    for name in rows[0]["results"]:
        results: list[Figures] = [row["results"][name] for row in rows]
        axes.plot(
            [row[x] for row in rows], [one[y] for one in results], marker="o", markersize=4, label=format_label(name)
        )


def _save_figure(figure: Figure, path: Path) -> None:
    for axes in figure.axes:
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, metadata={"Date": None})


def format_lengths(report: Report) -> str:
    return format_rows(report, "num_input_tokens", "prompt tokens", ("total_token_throughput",))


def format_memory(report: Report) -> str:
    text = format_rows(report, "kv_cache_mib", "MiB of KV cache", ("total_token_throughput",))
    caches = [
        [
            format_label(name),
            f"{row['kv_cache_mib']}",
            str(cache["num_blocks"]),
            f"{cache['preemptions_per_round']:.1f}",
        ]
        for row in report["rows"]
        for name, cache in row["kv_cache"].items()
    ]
    return text + "\n\n" + format_markdown_table(["", "MiB", "KV blocks", "preemptions per round"], caches)


TABLE_FORMATTERS: dict[str, Callable[[Report], str]] = {"lengths": format_lengths, "memory": format_memory}


def format_rows(report: Report, key: str, title: str, figures: Sequence[str]) -> str:
    """Format a table with a column for each figure and system, and ratios to dense."""
    rows, names = report["rows"], list(report["rows"][0]["results"])
    units = {"total_token_throughput": "tokens/s", "median_ttft_ms": "TTFT", "median_tpot_ms": "TPOT"}
    head = [title, *(f"{format_label(name)}: {units[figure]}" for figure in figures for name in names)]
    return format_markdown_table(head, ([f"{row[key]:g}", *_format_cells(row, names, figures)] for row in rows))


def _format_cells(row: Report, names: Sequence[str], figures: Sequence[str]) -> list[str]:
    cells = []
    for figure in figures:
        for name in names:
            value = row["results"][name].get(figure)
            against = row["against_dense"][name].get(figure)
            unit = " ms" if figure.endswith("_ms") else ""
            ratio = "" if name == "dense" or against is None else f" ({against:.2f}x)"
            cells.append("" if value is None else f"{value:.0f}{unit}{ratio}")
    return cells
