"""The loss curve as a picture. Needs matplotlib (extra `plot`), which nothing else in the demo does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from swiftkv_platform.client import MetricPoint


def plot_loss(points: Sequence[MetricPoint], path: Path) -> str | None:
    """Draw the logits loss over the tokens trained on into a PNG.

    Returns None, or the reason why there is no picture.
    """
    measured = [(point.tokens, point.logits_loss) for point in points if point.tokens and point.logits_loss]
    if not measured:
        return "the job reported no loss"
    try:
        # The figure alone, without pyplot: no display, no global state.
        from matplotlib.figure import Figure
    except ImportError:
        return "matplotlib is not installed (pip install 'swiftkv-platform[plot]')"
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*measured, strict=True), linewidth=1.2)
    axes.set_xlabel("tokens")
    axes.set_ylabel("logits loss (temperature 2)")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    return None
