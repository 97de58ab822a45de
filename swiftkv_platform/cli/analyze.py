"""`swiftkv analyze`: at which layer to cut a model, from what it makes of real text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from swiftkv_platform.cli.context import Json
from swiftkv_platform.cli.output import err, needs_extra, out, print_json, print_table
from swiftkv_platform.cli.sources import model_config, model_path
from swiftkv_platform.errors import InvalidInputError

if TYPE_CHECKING:
    from swiftkv_platform.evaluation.analysis import Analysis


def analyze(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Teacher: directory, .gguf, hub id or builtin:python-5m.")
    ],
    text: Annotated[
        list[str], typer.Option(help="Text: file, directory, hub data set or builtin:python-stdlib; repeatable.")
    ],
    max_tokens: Annotated[int, typer.Option(min=64, help="Tokens to look at, and to measure on.")] = 16384,
    max_length: Annotated[int, typer.Option(min=16, help="Tokens per sequence.")] = 1024,
    measure: Annotated[
        bool, typer.Option("--measure", help="Rewire at each l, calibrate, and measure KL on held-out text.")
    ] = False,
    depth: Annotated[
        list[int] | None, typer.Option("--depth", "-l", help="An l to measure; repeatable. Default: all.")
    ] = None,
    key_value_group_size: Annotated[
        int, typer.Option("--key-value-group-size", "-g", min=1, help="g of the measured students.")
    ] = 1,
    max_kl: Annotated[float, typer.Option(help="Nats; what --measure recommends starts within this.")] = 0.2,
    needle_length: Annotated[
        int | None, typer.Option(min=128, help="Tokens of prompts in which --measure has a number looked for.")
    ] = None,
    needle_samples: Annotated[int, typer.Option(min=1, help="Prompts of that length.")] = 20,
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="Of the weights; auto: as stored.")] = (
        "auto"
    ),
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Draw a picture (needs matplotlib).")] = None,
    json: Json = False,
) -> None:
    """SimScore of each layer's input over real text (paper, equation 1), and which l to cut at."""
    if plot is not None:
        with needs_extra("a picture", "plot"):  # before the work, not after it
            import matplotlib  # noqa: F401
    config = model_config(model)
    path = model_path(model)
    with needs_extra("Analysing here"):
        from swiftkv_platform.evaluation.analysis import AnalysisOptions
        from swiftkv_platform.evaluation.analysis import analyze as run
    options = AnalysisOptions(
        max_tokens=max_tokens,
        max_length=max_length,
        measure=measure,
        depths=tuple(depth or ()),
        key_value_group_size=key_value_group_size,
        max_kl=max_kl,
        needle_length=needle_length,
        needle_samples=needle_samples,
    )
    with err().status("Loading") as spinner:
        analysis = run(model, config, path, text, options, dtype=dtype, progress=spinner.update)
    if plot is not None:
        _plot(analysis, plot)
    if json:
        print_json(analysis)
    else:
        _print(analysis)


def _print(analysis: Analysis) -> None:
    measured = [depth for depth in analysis.depths if depth.kl is not None]
    columns = ["l", "SimScore", "prefill FLOPs"]
    columns += ["KL (nats)", "perplexity", "top-1 agreement"] if measured else []
    columns += ["needles found"] if analysis.needle_length else []
    rows: list[list[object]] = []
    for depth in measured or analysis.depths:
        sim_score = "" if depth.sim_score is None else f"{depth.sim_score:.3f}"
        row = [depth.num_key_value_layers, sim_score, f"{depth.prefill_flops_ratio:.1%}"]
        if measured:
            row += [f"{depth.kl:.3f}", f"{depth.perplexity:.2f}", f"{depth.top1_agreement:.1%}"]
        if depth.needles_found is not None:
            row.append(f"{depth.needles_found:.0%}")
        rows.append(row)
    print_table(columns, rows, empty="")
    lines = [f"{analysis.model}, {analysis.num_hidden_layers} layers, {analysis.num_tokens:,} tokens."]
    if measured:
        lines.append(
            f"Calibrated starts with g = {analysis.key_value_group_size}, before any training; "
            f"the teacher's perplexity is {analysis.teacher_perplexity:.2f}."
        )
    if analysis.needle_length:
        lines.append(
            f"Needles in {analysis.needle_length:,} tokens: the teacher finds {analysis.teacher_needles_found:.0%}."
        )
    chosen = analysis.recommended_num_key_value_layers
    lines.append(f"Recommended l: {'none of these' if chosen is None else chosen} ({analysis.rule}).")
    out().print("\n".join(lines), highlight=False, soft_wrap=True)


def _plot(analysis: Analysis, path: Path) -> None:
    """SimScore by layer (paper, figure 2) and, where it was measured, the KL of each depth; PNG or SVG by suffix."""
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
