"""`swiftkv analyze`: at which layer to cut a model, from what it makes of real text."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from swiftkv_platform.cli.context import Json
from swiftkv_platform.cli.output import err, out, print_json, print_table
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
        from swiftkv_platform.cli.plots import plot_analysis, require_matplotlib

        require_matplotlib()
    config = model_config(model)
    path = model_path(model)
    try:
        from swiftkv_platform.evaluation.analysis import AnalysisOptions
        from swiftkv_platform.evaluation.analysis import analyze as run
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"Analysing here needs {error.name}; pip install 'swiftkv-platform[train]' would do"
        ) from error
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
        plot_analysis(analysis, plot)
    if json:
        print_json(analysis)
    else:
        _print(analysis)


def _print(analysis: Analysis) -> None:
    measured = [depth for depth in analysis.depths if depth.kl is not None]
    columns = ["l", "SimScore", "prefill FLOPs"]
    columns += ["KL (nats)", "perplexity", "top-1 agreement"] if measured else []
    columns += ["needles found"] if analysis.needle_length else []
    rows = []
    for depth in measured or analysis.depths:
        row = [
            depth.num_key_value_layers,
            "" if depth.sim_score is None else f"{depth.sim_score:.3f}",
            f"{depth.prefill_flops_ratio:.1%}",
        ]
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
