"""The paper's figures from the reports. Needs matplotlib (extra `plot`)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.serving.metrics import Figures

LABELS = {
    "dense": "dense",
    "merge_all_layers": "Merge-all-Layers",
    "hf_generate": "Hugging Face `generate`",
    "hf_generate_batch": "Hugging Face, continuous batching",
    "vllm": "vLLM, dense",
}
mpl.rcParams["svg.hashsalt"] = "serving"  # the same figure gives the same file


def label(system: str) -> str:
    if system in LABELS:
        return LABELS[system]
    group_size = system.removeprefix("swiftkv_g").removesuffix("_fp8")
    return f"SwiftKV, g = {group_size}" + (", FP8" if system.endswith("_fp8") else "")


def plot_lengths(report: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    _lines(axes, report["rows"], "num_input_tokens", "total_token_throughput")
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        [row["num_input_tokens"] for row in report["rows"]], [row["num_input_tokens"] for row in report["rows"]]
    )
    axes.set_xlabel("prompt tokens")
    axes.set_ylabel("input and output tokens/s")
    _save(figure, path)


def plot_rates(report: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("ttft", "tpot"), strict=True):
        _lines(axes, report["rows"], "request_rate", f"median_{name}_ms")
        axes.set_xlabel("requests/s")
        axes.set_ylabel(f"median {name.upper()} (ms)")
    _save(figure, path)


def plot_memory(report: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.add_subplot()
    rows, names = report["rows"], list(report["rows"][0]["results"])
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        at = [place + (number - (len(names) - 1) / 2) * width for place in range(len(rows))]
        axes.bar(at, [row["results"][name]["total_token_throughput"] for row in rows], width, label=label(name))
    axes.set_xticks(range(len(rows)), [f"{row['kv_cache_mib']} MiB" for row in rows])
    axes.set_xlabel("memory of the KV cache")
    axes.set_ylabel("input and output tokens/s")
    _save(figure, path)


PLOTS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "lengths": plot_lengths,
    "rates": plot_rates,
    "memory": plot_memory,
}


def _lines(axes: Any, rows: list[dict[str, Any]], x: str, y: str) -> None:
    for name in rows[0]["results"]:
        results: list[Figures] = [row["results"][name] for row in rows]
        axes.plot([row[x] for row in rows], [one[y] for one in results], marker="o", markersize=4, label=label(name))


def _save(figure: Figure, path: Path) -> None:
    for axes in figure.axes:
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[0].legend()
    figure.savefig(path, metadata={"Date": None})
