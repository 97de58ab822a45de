"""`demo-report.json`, its tables and its loss plot, made from the artifact's `evaluation.json`."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from swiftkv_platform.client import Resource
from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.installing import install_command
from swiftkv_platform.local.terminal import flops, size
from swiftkv_platform.planning.machines import describe_processor

_EVALUATION_KEYS = (
    "teacher",
    "rewired",
    "calibrated",
    "distilled",
    "perplexity_ratio",
    "kl_recovered",
    "num_positions",
    "intervals",
    "prefill_flops_ratio",
    "kv_bytes_ratio",
    "prompt_length",
    "prefill_flops_per_token",
    "kv_bytes_per_token",
    "ttft_ms",
    "tokens_trained",
)


def build_report(evaluation: Mapping[str, Any], observed: Mapping[str, Any]) -> dict[str, Any]:
    """Join the job's evaluation with the demo's observations (`demo`). Raises `SwiftKVError` if a figure is missing."""
    missing = [name for name in _EVALUATION_KEYS if name not in evaluation]
    if missing:
        raise SwiftKVError(f"evaluation.json of the artifact lacks {', '.join(missing)}")
    demo = {**observed, "machine": describe_machine()}
    return {**{name: evaluation[name] for name in _EVALUATION_KEYS}, "demo": demo}


def describe_machine() -> dict[str, Any]:
    """Return what a run's figures and times depend on. The built-in teacher's text is the running Python's library."""
    name, simd = describe_processor()
    return {
        "processor": name,
        "simd": simd,
        "num_cpus": os.cpu_count(),
        "torch": version("torch"),
        "python": platform.python_version(),
    }


def write_report(report: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def print_report(report: Mapping[str, Any], console: Console) -> None:
    """Print the quality of each stage, then the cost with and without SwiftKV."""
    console.print(_quality(report))
    console.print(_cost(report))


def _quality(report: Mapping[str, Any]) -> Table:
    table = Table("held-out text", "perplexity", "KL (nats)", "top-1 agreement", title="Quality")
    table.add_row("teacher", f"{report['teacher']['perplexity']:.2f}", "", "")
    stages = {
        "rewired": "rewired, projections copied",
        "calibrated": "rewired, projections calibrated",
        "distilled": "distilled",
    }
    for name, label in stages.items():
        stage = report[name]
        if stage is not None:
            table.add_row(label, f"{stage['perplexity']:.2f}", f"{stage['kl']:.4f}", f"{stage['top1_agreement']:.1%}")
    table.caption = f"{report['kl_recovered']:.0%} of the KL recovered with {report['tokens_trained']:,} tokens"
    return table


def _cost(report: Mapping[str, Any]) -> Table:
    prompt = f"prompt of {report['prompt_length']:,} tokens"
    table = Table(prompt, "dense", "SwiftKV", "ratio", title="Cost")
    figures = (
        ("prefill a token", "prefill_flops_per_token", flops),
        ("KV cache a token", "kv_bytes_per_token", size),
        ("time to first token", "ttft_ms", "{:.0f} ms".format),
    )
    for label, key, shown in figures:
        dense, swiftkv = report[key]["dense"], report[key]["swiftkv"]
        table.add_row(label, shown(dense), shown(swiftkv), f"{swiftkv / dense:.3f}")
    return table


def plot_loss(points: Sequence[Resource], path: Path) -> str | None:
    """Plot the logits loss over the tokens trained on to a PNG.

    Returns None, or the reason why there is no plot.
    """
    rows = [point.model_dump() for point in points]
    measured = [(row["tokens"], row["logits_loss"]) for row in rows if row.get("tokens") and row.get("logits_loss")]
    if not measured:
        return "the job reported no loss"
    try:
        # `Figure` instead of pyplot: no display, no global state.
        from matplotlib.figure import Figure
    except ImportError:
        return f"matplotlib is not installed ({install_command('plot')})"
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*measured, strict=True), linewidth=1.2)
    axes.set_xlabel("tokens")
    axes.set_ylabel("logits loss (temperature 2)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return None
