"""`swiftkv convert` makes a student from a teacher; `swiftkv export` writes a student for serving or as an adapter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from swiftkv_platform.cli.context import Json, PrefillLayers
from swiftkv_platform.cli.output import (
    configure_logs,
    get_error_console,
    print_json,
    print_line,
    print_result,
    require_extra,
    show_activity,
)
from swiftkv_platform.errors import InvalidInputError

if TYPE_CHECKING:
    from swiftkv_platform.model.conversion import ConversionResult
    from swiftkv_platform.model.weights.writing import Progress as ProgressCallback

_MIB = 1 << 20
OutputDirectory = Annotated[Path, typer.Argument(metavar="OUTPUT", help="A new or empty directory.")]
CopyOption = Annotated[bool, typer.Option("--copy", help="Copy unchanged weight files instead of hard-linking them.")]
CalibrationTokens = Annotated[int, typer.Option(min=64, help="Max calibration tokens.")]


def convert(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Teacher: directory, .gguf, hub id or builtin:python-5m.")
    ],
    output: OutputDirectory,
    num_key_value_layers: Annotated[
        int | None,
        typer.Option("--num-key-value-layers", "-l", help="Number of layers that prompts run (l). Default: half."),
    ] = None,
    prefill_reduction: Annotated[
        float | None, typer.Option(help="Share of the layers that prefill skips, e.g. 0.5. Replaces -l.")
    ] = None,
    prefill_layers: PrefillLayers = None,
    key_value_group_size: Annotated[
        int, typer.Option("--key-value-group-size", "-g", help="Skipped layers per KV-cache layer (g).")
    ] = 1,
    sharing: Annotated[
        Literal["gqa", "mqa", "mha"],
        typer.Option(help="KV heads of skipped layers: as the teacher (gqa), one (mqa), or one per query head (mha)."),
    ] = "gqa",
    early_exit: Annotated[bool, typer.Option("--early-exit", help="Add an exit head at layer l.")] = False,
    own_output_projection: Annotated[
        bool, typer.Option("--own-output-projection", help="Train a separate output projection in skipped layers.")
    ] = False,
    decode_key_value: Annotated[
        Literal["shared", "own"],
        typer.Option(
            help="Input of K and V of generated tokens in layers >= l: the hidden state of each group's first layer "
            "(own), or the output of layer l - 1 as in the paper (shared)."
        ),
    ] = "own",
    deep_tail: Annotated[
        int,
        typer.Option(min=1, help="Tokens at a prompt's end that run all layers; above 1 needs --decode-key-value own."),
    ] = 1,
    calibration: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Calibration text: file, directory or data set. Repeatable."),
    ] = None,
    calibration_tokens: CalibrationTokens = 16384,
    copy: CopyOption = False,
    json: Json = False,
) -> None:
    """Convert a teacher's checkpoint to an untrained student.

    The new KV projections are copies of the teacher's; --calibration fits them to text, which loads the teacher.
    """
    if num_key_value_layers is not None and prefill_reduction is not None:
        message = "use either --num-key-value-layers or --prefill-reduction"
        raise InvalidInputError(message, field="prefill_reduction", value=prefill_reduction)
    configure_logs()
    with show_activity("Loading libraries"), require_extra("swiftkv convert"):
        from swiftkv_platform.distillation.calibration_text import read_calibration_text
        from swiftkv_platform.model import convert_checkpoint
    from swiftkv_platform.cli.sources import resolve_model_path
    from swiftkv_platform.student_shape import format_layers, parse_layers

    path = resolve_model_path(model)
    with _show_progress("Calibrating" if calibration else "Converting") as report:
        converted = convert_checkpoint(
            path,
            output.expanduser(),
            num_key_value_layers=num_key_value_layers,
            prefill_reduction=prefill_reduction,
            key_value_group_size=key_value_group_size,
            sharing=sharing,
            early_exit=early_exit,
            own_output_projection=own_output_projection,
            decode_key_value=decode_key_value,
            prefill_layers=None if prefill_layers is None else parse_layers(prefill_layers),
            deep_tail=deep_tail,
            calibration=read_calibration_text(path, calibration, calibration_tokens) if calibration else None,
            files="copy" if copy else "link",
            progress=report,
        )
    document, listed = _describe_student(converted), ""
    if layers := document["swiftkv_prefill_layers"]:
        listed = f", prompts run layers {format_layers(layers)}"
    if json:
        print_json(document)
        return
    print_line(
        "Wrote {output}: l = {num_key_value_layers} of {num_hidden_layers} layers{listed}, g = {key_value_group_size}. "
        "KV cache: {kv_bytes_ratio:.1%} of the teacher's. New weights: {new_tensors} tensors, {size:,.1f} MiB.".format(
            **document, listed=listed, size=converted.new_bytes / _MIB
        )
    )
    if document["equal_cache_group_size"] not in (None, key_value_group_size):
        print_line(
            "To match the KV cache size of gqa with g = {key_value_group_size}, use --key-value-group-size "
            "{equal_cache_group_size} with {sharing}.".format(**document, sharing=sharing)
        )


def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="SwiftKV model or adapter: directory or hub id.")],
    output: OutputDirectory,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write only the tensors that differ from the base model.")
    ] = False,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Base model. Default: the teacher of a job artifact, or the base model of an adapter."
        ),
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Hub revision of --base.")] = None,
    teacher: Annotated[
        bool, typer.Option("--teacher/--no-teacher", help="Keep the weights that only teacher mode uses.")
    ] = False,
    prefill_only: Annotated[
        bool, typer.Option("--prefill-only", help="Write only the weights that a vLLM prefill server uses.")
    ] = False,
    quantize: Annotated[
        Literal["int8", "int4", "mixed"] | None,
        typer.Option(
            help="Quantize layer weights in compressed-tensors format: int8 = W8A8, int4 = W4A16, mixed = W4A16 with "
            "W8A8 for Q, K and V projections."
        ),
    ] = None,
    calibration: Annotated[
        list[str] | None,
        typer.Option(metavar="TEXT", help="Calibration text for --quantize. Repeatable. Default: round to nearest."),
    ] = None,
    calibration_tokens: CalibrationTokens = 16384,
    copy: CopyOption = False,
    json: Json = False,
) -> None:
    """Export a student for serving: without the weights that only its teacher uses, or as an adapter."""
    configure_logs()
    with show_activity("Loading libraries"), require_extra("swiftkv export"):
        from swiftkv_platform.distillation.calibration_text import read_calibration_text
        from swiftkv_platform.model import export as run
    from swiftkv_platform.cli.sources import open_base_model, read_adapter_base, resolve_model_path

    model = resolve_model_path(model)
    target = output.expanduser()
    if adapter and prefill_only:
        message = "use either --adapter or --prefill-only"
        raise InvalidInputError(message, field="prefill_only", value=True)
    if adapter:
        for field, value in (("quantize", quantize), ("calibration", calibration)):
            if value:
                raise InvalidInputError.for_field(field, value, ", which --adapter does not support; omit one of them")
        _export_adapter(model, target, base, revision, json=json)
        return
    with (
        open_base_model(base or read_adapter_base(model), revision) as base_model,
        _show_progress("Exporting") as report,
    ):
        rows = None
        if calibration:
            rows = read_calibration_text(model, calibration, calibration_tokens, train_on="assistant")
        run(
            model,
            target,
            teacher=teacher,
            prefill_only=prefill_only,
            quantize=quantize,
            calibration=rows,
            files="copy" if copy else "link",
            base_model=base_model,
            progress=report,
        )
    size = _sum_weight_bytes(target)
    line = f"Wrote {target}: {size / _MIB:,.1f} MiB of weights, {'with' if teacher else 'without'} teacher mode"
    line += "." if quantize is None else f", projections in {quantize}."
    if quantize in ("int4", "mixed") and not calibration:
        line += " Weights are rounded to nearest; --calibration TEXT preserves more quality."
    print_result(
        {"output": str(target), "teacher": teacher, "quantize": quantize, "weight_bytes": size}, line, json=json
    )


def _export_adapter(model: str, target: Path, base: str | None, revision: str | None, *, json: bool) -> None:
    from swiftkv_platform.cli.sources import open_base_model, read_artifact_teacher
    from swiftkv_platform.model import export_adapter

    name = base
    if name is None:
        name, revision = read_artifact_teacher(model)
    with open_base_model(name, revision) as directory, _show_progress("Comparing") as report:
        found = str(Path(name).resolve()) if Path(name).is_dir() else name
        written = export_adapter(
            model, target, base=directory or name, name_or_path=found, revision=revision, progress=report
        )
    size = _sum_weight_bytes(target)
    fields = {"output": str(target), "base": found, "revision": revision, "digest": written.base.digest}
    counts = {name: len(getattr(written, name)) for name in ("added", "replaced", "dropped")}
    line = (
        f"Wrote {target}: {size / _MIB:,.1f} MiB of weights. Compared with {found}: {len(written.added)} tensors "
        f"added, {len(written.replaced)} replaced."
    )
    print_result({**fields, **counts, "weight_bytes": size}, line, json=json)


def _sum_weight_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))


@contextmanager
def _show_progress(title: str) -> Iterator[ProgressCallback]:
    """Show a progress bar if stderr is a terminal, else lines. Yields a callback for (done, total)."""
    console = get_error_console()
    if not console.is_terminal:
        with show_activity(title) as show:
            yield lambda done, total: show(f"{title}: {done} of {total}")
        return
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _describe_student(converted: ConversionResult) -> dict[str, Any]:
    from swiftkv_platform.student_shape import equal_cache_group_size

    config = converted.config
    layer_map, heads = config.layer_map, getattr(config, "num_key_value_heads", 1)
    cached = [config.get_cache_num_key_value_heads(i) for i in range(layer_map.num_kv_cache_layers)]
    equal = None
    if config.num_key_value_heads_swiftkv is not None:
        equal = equal_cache_group_size(
            config.num_hidden_layers - config.num_key_value_layers,
            num_key_value_heads=heads,
            num_key_value_heads_swiftkv=config.num_key_value_heads_swiftkv,
            key_value_group_size=config.key_value_group_size,
        )
    return {
        "output": str(converted.path),
        "model_type": config.model_type,
        "num_hidden_layers": config.num_hidden_layers,
        **config.shape.to_config(),
        "num_kv_cache_layers": layer_map.num_kv_cache_layers,
        "kv_bytes_ratio": sum(cached) / (config.num_hidden_layers * heads),
        "equal_cache_group_size": equal,
        "new_tensors": converted.num_new_tensors,
        "new_bytes": converted.new_bytes,
    }
