"""`swiftkv plan` estimates a student from a config.json or job spec; `swiftkv analyze` measures a teacher on text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from swiftkv_platform.cli.context import Json, read_spec
from swiftkv_platform.cli.output import (
    configure_logs,
    get_console,
    print_json,
    print_line,
    print_table,
    require_extra,
    show_activity,
)
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.local.formats import format_size

if TYPE_CHECKING:
    from swiftkv_platform.evaluation.analysis import Analysis, DepthReport, UntrainedReport
    from swiftkv_platform.planning import Components, Plan


_HEADERS = ("vocab", "K,V", "Q,O", "MLP", "attn", "total", "rel.", "executed", "KV layers", "KV bytes/token", "rel.")
_TABLE_DESCRIPTION = """\
{model_type}, {num_hidden_layers} layers, prompt of {sequence_length:,} tokens, {kv_cache_dtype} cache.
The first column "rel." counts the logits of every token, as in the paper's table 1. The column "executed" counts only \
the logits of the last token, as in serving."""


def plan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_CONFIG",
            help="Model (directory, .gguf, config.json, hub id or builtin:python-5m) or job spec (.yaml, .yml).",
        ),
    ],
    num_key_value_layers: Annotated[
        list[int] | None,
        typer.Option(
            "--num-key-value-layers", "-l", help="Number of layers that prompts run (l); repeatable. Default: half."
        ),
    ] = None,
    prefill_layers: Annotated[
        list[str] | None,
        typer.Option(metavar="LAYERS", help="Layers that prompts run, e.g. 0-2,4,6-16; repeatable. Replaces -l."),
    ] = None,
    key_value_group_size: Annotated[
        list[int] | None,
        typer.Option(
            "--key-value-group-size", "-g", help="Skipped layers per KV-cache layer (g); repeatable. Default: 1."
        ),
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option("--sequence-length", "-s", help="Prompt tokens. Default: the model's context length.")
    ] = None,
    kv_cache_dtype: Annotated[str, typer.Option(help="float32, bfloat16, float16, fp8 or int8.")] = "bfloat16",
    deep_tail: Annotated[
        int | None, typer.Option(min=1, help="Tokens at a prompt's end that run all layers. Default: 1.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Run a job spec's phases on fake tensors; print memory and collectives per worker."
        ),
    ] = False,
    config: Annotated[
        str | None, typer.Option(metavar="FILE_OR_DIR", help="config.json of a job spec's teacher on the hub.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens per epoch, for job data that only workers can read.")
    ] = None,
    json: Json = False,
) -> None:
    """Estimate prefill FLOPs (paper, table 1) and KV cache bytes of students and their teacher.

    For a job spec, estimate the student and the job's memory, time, cost and quality gates.
    """
    from swiftkv_platform.cli.sources import read_model_config
    from swiftkv_platform.planning import plan as make_plan
    from swiftkv_platform.student_shape import parse_layers

    if dry_run:
        _print_dry_run(model, config, json=json)
        return
    if Path(model).suffix in (".yaml", ".yml"):
        from swiftkv_platform.cli.estimates import estimate_job, print_estimate

        spec = read_spec(Path(model))
        estimate = estimate_job(spec, config=None if config is None else Path(config), num_tokens=tokens)
        if json:
            print_json(estimate)
        else:
            print_estimate(estimate, spec, machine_bytes=None)
        return
    with show_activity(f"Reading the configuration of {model}"):
        values = read_model_config(model)
    shapes: list[dict[str, Any]] = [{"num_key_value_layers": layers} for layers in num_key_value_layers or ()]
    shapes += [{"prefill_layers": parse_layers(listed)} for listed in prefill_layers or ()]
    group_sizes: Sequence[int | None] = key_value_group_size or (None,)
    prompt: dict[str, Any] = {
        "sequence_length": sequence_length,
        "kv_cache_dtype": kv_cache_dtype,
        "deep_tail": deep_tail,
    }
    plans = [
        make_plan(values, **layers, key_value_group_size=group_size, **prompt)
        for layers in shapes or [{}]
        for group_size in group_sizes
    ]
    if json:
        print_json(plans[0] if len(plans) == 1 else {"plans": [each.model_dump(mode="json") for each in plans]})
        return
    _print_plans(plans)
    get_console().print(_TABLE_DESCRIPTION.format(**dict(plans[0])), highlight=False, soft_wrap=True)
    for each in plans:
        print_line(_describe_savings(each))


def _format_student(plan: Plan) -> str:
    """Return e.g. `l = 6, g = 2`, with the layers that prompts run if these are not the first l."""
    from swiftkv_platform.student_shape import format_layers

    bypasses = len(plan.prefill_layers) < plan.num_key_value_layers
    listed = f" ({format_layers(plan.prefill_layers)})" if bypasses else ""
    return f"l = {plan.num_key_value_layers}{listed}, g = {plan.key_value_group_size}"


def _describe_savings(plan: Plan) -> str:
    """Return a sentence on prefill FLOPs and KV cache of one prompt."""
    tokens = plan.sequence_length
    cached, dense = (
        format_size(tokens * per_token) for per_token in (plan.kv_bytes_per_token, plan.dense_kv_bytes_per_token)
    )
    cache = f"{cached} instead of {dense}" if cached != dense else f"unchanged ({dense})"
    ratio = plan.executed_prefill_flops_ratio
    return f"{_format_student(plan)}: prefill takes {ratio:.1%} of the FLOPs; KV cache per prompt: {cache}."


def _print_plans(plans: Sequence[Plan]) -> None:
    """Print the paper's table 1 with KV cache bytes: one row for the teacher and one per student."""
    first = plans[0]
    dense = first.prefill["paper"].dense
    unit, scale = ("GFLOPs", 1e9) if dense.total >= 1e9 else ("MFLOPs", 1e6)

    def components(flops: Components) -> list[str]:
        query_output = flops.query + flops.output
        parts = (flops.vocabulary, flops.key_value, query_output, flops.mlp, flops.attention, flops.total)
        return [f"{part / scale:.3g}" for part in parts]

    teacher = f"{first.num_hidden_layers}", f"{first.dense_kv_bytes_per_token:,.0f}", "100.0%"
    rows = [("dense", *components(dense), "100.0%", "100.0%", *teacher)]
    rows += [
        (
            _format_student(each),
            *components(each.prefill["paper"].swiftkv),
            f"{each.prefill_flops_ratio:.1%}",
            f"{each.executed_prefill_flops_ratio:.1%}",
            f"{each.num_kv_cache_layers}",
            f"{each.kv_bytes_per_token:,.0f}",
            f"{each.kv_bytes_ratio:.1%}",
        )
        for each in plans
    ]
    print_table((f"{unit} per prompt token", *_HEADERS), rows, empty="")


_MEMORY_COLUMNS = ("GiB per worker", "peak", "parameters", "gradients", "optimizer", "activations, buffers")


def _print_dry_run(recipe: str, config: str | None, *, json: bool) -> None:
    from swiftkv_platform.cli.sources import read_model_config

    spec = read_spec(Path(recipe))
    values = read_model_config(config or spec.model.name_or_path)
    with require_extra("--dry-run"):
        from swiftkv_platform.jobs.dry_run import dry_run
    found = dry_run(spec, values)
    if json:
        print_json(found)
        return
    print_line(
        f"{found.num_workers} workers; {found.num_parameters:,} parameters, {found.num_trained_parameters:,} trainable"
    )
    phases = {"calibrate, 1 worker": found.calibrate, "train": found.train, "evaluate, 1 worker": found.evaluate}
    rows = []
    for name, used in phases.items():
        if used is not None:
            parts = (used.peak, used.parameters, used.gradients, used.optimizer, used.passing + used.remembered)
            rows.append((name, *map(_format_gib, parts)))
    print_table(_MEMORY_COLUMNS, rows, empty="")
    calls = [(each.name, each.calls, _format_gib(each.num_bytes)) for each in found.collectives]
    print_table(("collectives per step", "calls", "GiB"), calls, empty="No collectives.")
    print_line("Excludes kernel workspaces and memory cached by the allocator.")


def _format_gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.3f}"


def analyze(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Teacher: directory, .gguf, hub id or builtin:python-5m.")
    ],
    text: Annotated[
        list[str], typer.Option(help="Text: file, directory, hub data set or builtin:python-stdlib. Repeatable.")
    ],
    max_tokens: Annotated[int, typer.Option(min=64, help="Max tokens to analyze and to measure on.")] = 16384,
    max_length: Annotated[int, typer.Option(min=16, help="Max tokens per sequence.")] = 1024,
    measure: Annotated[
        bool, typer.Option("--measure", help="Make a calibrated student at each l; measure its KL on held-out text.")
    ] = False,
    depth: Annotated[
        list[int] | None, typer.Option("--depth", "-l", help="Value of l to measure. Repeatable. Default: all.")
    ] = None,
    num_prefill_layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of layers that prompts run. At each -l, the layers below l that they can skip are measured.",
        ),
    ] = None,
    key_value_group_size: Annotated[
        int, typer.Option("--key-value-group-size", "-g", min=1, help="Skipped layers per KV-cache layer (g).")
    ] = 1,
    max_kl: Annotated[float, typer.Option(help="Max KL of the recommended l, in nats; with --measure.")] = 0.2,
    needle_length: Annotated[
        int | None, typer.Option(min=128, help="Tokens per needle-in-a-haystack prompt; with --measure.")
    ] = None,
    needle_samples: Annotated[int, typer.Option(min=1, help="Number of needle-in-a-haystack prompts.")] = 20,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"], typer.Option(help="Data type of the weights; auto: as stored.")
    ] = "auto",
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Save a plot, .png or .svg.")] = None,
    json: Json = False,
) -> None:
    """Measure the SimScore of each layer's input on text (paper, equation 1), and recommend l.

    With --num-prefill-layers, recommend which layers prompts run.
    """
    if plot is not None:
        with require_extra("--plot", "plot"):  # fail before the measurement
            import matplotlib  # noqa: F401
    from swiftkv_platform.cli.sources import read_model_config, resolve_model_path

    configure_logs()
    with show_activity(f"Reading the configuration of {model}"):
        config = read_model_config(model)
    with show_activity("Loading libraries"), require_extra("swiftkv analyze"):
        from swiftkv_platform.evaluation.analysis import AnalysisOptions
        from swiftkv_platform.evaluation.analysis import analyze as run
    path = resolve_model_path(model)
    options = AnalysisOptions(
        max_tokens=max_tokens,
        max_length=max_length,
        measure=measure,
        depths=tuple(depth or ()),
        num_prefill_layers=num_prefill_layers,
        key_value_group_size=key_value_group_size,
        max_kl=max_kl,
        needle_length=needle_length,
        needle_samples=needle_samples,
    )
    with show_activity("Loading") as show:
        analysis = run(model, config, path, text, options, dtype=dtype, progress=show)
    if plot is not None:
        _save_plot(analysis, plot)
    if json:
        print_json(analysis)
    elif analysis.lists:
        _print_layer_lists(analysis)
    else:
        _print_analysis(analysis)


def _list_quality_columns(analysis: Analysis) -> list[str]:
    needles = [] if analysis.needle_length is None else ["needles found"]
    return ["KL (nats)", "perplexity", "top-1 agreement", *needles]


def _format_quality(each: DepthReport | UntrainedReport) -> list[str]:
    """Return the cells of a calibrated start below `_list_quality_columns`."""
    found = [] if each.needles_found is None else [f"{each.needles_found:.0%}"]
    return [f"{each.kl:.3f}", f"{each.perplexity:.2f}", f"{each.top1_agreement:.1%}", *found]


def _print_layer_lists(analysis: Analysis) -> None:
    """Print the KL of skipping each layer, and the measured lists of layers."""
    from swiftkv_platform.student_shape import format_layers

    chosen = analysis.recommended_prefill_layers
    assert chosen is not None, "a list was measured"
    bypassed = [(i, f"{kl:.4f}") for i, kl in enumerate(analysis.bypass_kl)]
    print_table(("skipped layer", "KL (nats)"), bypassed, empty="")
    columns = ["prompts run", *_list_quality_columns(analysis)]
    rows = [[format_layers(each.prefill_layers), *_format_quality(each)] for each in analysis.lists]
    print_table(columns, rows, empty="")
    lines = [
        f"{analysis.model}: calibrated students with g = {analysis.key_value_group_size}, before training, measured on "
        f"text after a prompt. Teacher perplexity: {analysis.teacher_perplexity:.2f}.",
        *_describe_needles(analysis),
        f"Recommended: --prefill-layers {format_layers(chosen)} (same number of layers as -l {len(chosen)}).",
    ]
    get_console().print("\n".join(lines), highlight=False, soft_wrap=True)


def _describe_needles(analysis: Analysis) -> list[str]:
    if not analysis.needle_length:
        return []
    return [
        f"Needles in prompts of {analysis.needle_length:,} tokens: "
        f"the teacher finds {analysis.teacher_needles_found:.0%}."
    ]


def _print_analysis(analysis: Analysis) -> None:
    measured = [depth for depth in analysis.depths if depth.kl is not None]
    columns = ["l", "SimScore", "prefill FLOPs", *(_list_quality_columns(analysis) if measured else ())]
    rows = []
    for depth in measured or analysis.depths:
        sim_score = "" if depth.sim_score is None else f"{depth.sim_score:.3f}"
        cells = [f"{depth.num_key_value_layers}", sim_score, f"{depth.prefill_flops_ratio:.1%}"]
        rows.append([*cells, *(_format_quality(depth) if measured else ())])
    print_table(columns, rows, empty="")
    lines = [f"{analysis.model}, {analysis.num_hidden_layers} layers, {analysis.num_tokens:,} tokens."]
    if measured:
        lines.append(
            f"Calibrated students with g = {analysis.key_value_group_size}, before training. "
            f"Teacher perplexity: {analysis.teacher_perplexity:.2f}."
        )
    lines += _describe_needles(analysis)
    chosen = analysis.recommended_num_key_value_layers
    lines.append(f"Recommended l: {'none' if chosen is None else chosen} ({analysis.rule}).")
    get_console().print("\n".join(lines), highlight=False, soft_wrap=True)


def _save_plot(analysis: Analysis, path: Path) -> None:
    """Plot the SimScore by layer (paper, figure 2), and the KL by l if measured. PNG or SVG by suffix."""
    # `Figure` instead of pyplot: no display, no global state.
    from matplotlib.figure import Figure

    measured = [(depth.num_key_value_layers, depth.kl) for depth in analysis.depths if depth.kl is not None]
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(range(len(analysis.sim_scores)), analysis.sim_scores, "o-", color="C0", label="SimScore")
    axes.set_xlabel("l: number of layers that prompts run (SimScore: input of layer l)")
    axes.set_ylabel("SimScore", color="C0")
    axes.set_xticks(range(0, analysis.num_hidden_layers, max(1, analysis.num_hidden_layers // 16)))
    axes.set_ylim(top=1.0)
    axes.grid(alpha=0.3)
    if measured:
        right = axes.twinx()
        right.plot(*zip(*measured, strict=True), "s--", color="C1")
        right.set_ylabel(f"KL of the calibrated student, nats (g = {analysis.key_value_group_size})", color="C1")
        right.set_ylim(bottom=0)
    if analysis.recommended_num_key_value_layers is not None:
        axes.axvline(analysis.recommended_num_key_value_layers, color="0.5", linestyle=":")
    axes.set_title(f"{analysis.model}, {analysis.num_tokens:,} tokens", fontsize="medium")
    try:
        figure.savefig(path, dpi=100)
    except ValueError as error:
        raise InvalidInputError(f"plot is {str(path)!r}: {error}", field="plot", value=str(path)) from error
