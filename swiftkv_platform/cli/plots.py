"""Pictures of reports. Needs matplotlib (extra `plot`), which nothing else does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from swiftkv_platform.errors import InvalidInputError

if TYPE_CHECKING:
    from swiftkv_platform.evaluation.analysis import Analysis


def require_matplotlib() -> None:
    """Raises `InvalidInputError` where it is not installed: before the work, not after it."""
    if find_spec("matplotlib") is None:
        raise InvalidInputError(
            "a picture needs matplotlib; pip install 'swiftkv-platform[plot]' would do", field="plot"
        )


def plot_analysis(analysis: Analysis, path: Path) -> None:
    """SimScore by layer (paper, figure 2) and, where it was measured, the KL of each depth; PNG or SVG by the suffix.

    Raises:
        InvalidInputError: a suffix that matplotlib does not write.
    """
    # The figure alone, without pyplot: no display, no global state.
    from matplotlib.figure import Figure

    measured = [(depth.num_key_value_layers, depth.kl) for depth in analysis.depths if depth.kl is not None]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(len(analysis.sim_scores)), analysis.sim_scores, "o-", color="C0", label="SimScore")
    axes.set_xlabel("l: layers below the cut (SimScore: input of layer l)")
    axes.set_ylabel("SimScore", color="C0")
    axes.set_xticks(range(0, analysis.num_hidden_layers, max(1, analysis.num_hidden_layers // 16)))
    axes.set_ylim(top=1.0)
    axes.grid(alpha=0.3)
    if measured:
        right = axes.twinx()
        right.plot(*zip(*measured, strict=True), "s--", color="C1")
        right.set_ylabel(f"KL of the calibrated start, nats (g = {analysis.key_value_group_size})", color="C1")
        right.set_ylim(bottom=0)
    if analysis.recommended_num_key_value_layers is not None:
        axes.axvline(analysis.recommended_num_key_value_layers, color="0.5", linestyle=":")
    axes.set_title(f"{analysis.model}, {analysis.num_tokens:,} tokens", fontsize="medium")
    try:
        figure.savefig(path, dpi=100)
    except ValueError as error:
        raise InvalidInputError(f"plot is {str(path)!r}: {error}", field="plot", value=str(path)) from error
