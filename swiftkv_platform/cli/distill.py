"""`swiftkv distill` and `evaluate`: run a job or an evaluation locally, without a control plane."""

from __future__ import annotations

import json as jsonlib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftkv_platform.cli.context import (
    Json,
    OptionalSpecFile,
    PrefillLayers,
    SpecChanges,
    parse_spec_change,
    read_text_file,
    validate_options,
)
from swiftkv_platform.cli.jobs import load_spec
from swiftkv_platform.cli.output import (
    GATE_EXIT_CODE,
    Columns,
    configure_logs,
    get_error_console,
    print_fields,
    print_items,
    print_json,
    print_line,
    print_result,
    print_table,
    require_extra,
    show_activity,
)
from swiftkv_platform.errors import ConflictError, InvalidInputError, SwiftKVError, TrainingError

if TYPE_CHECKING:
    from swiftkv_platform.evaluation.report import Report
    from swiftkv_platform.specs import JobSpec


def distill(
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Directory for the model: new, empty or of an interrupted run.",
        ),
    ],
    file: OptionalSpecFile = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model", "-m", help="Teacher: directory, .gguf file, builtin:python-5m or hub id. Replaces --file."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", "-d", help="With --model: training text (file, directory or data set). Repeatable."),
    ] = None,
    gpus: Annotated[
        int | None,
        typer.Option(min=0, help="With --model: number of GPUs, one per worker. Default: 0, which uses CPUs."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="With --model: training steps. Default: 200 on CPUs, 2 epochs on GPUs.")
    ] = None,
    num_key_value_layers: Annotated[
        int | None,
        typer.Option(
            "--num-key-value-layers",
            "-l",
            min=1,
            help="With --model: number of layers that prompts run (l). Default: half.",
        ),
    ] = None,
    prefill_layers: PrefillLayers = None,
    key_value_group_size: Annotated[
        int | None,
        typer.Option(
            "--key-value-group-size",
            "-g",
            min=1,
            help="With --model: skipped layers per KV-cache layer (g). Default: 1.",
        ),
    ] = None,
    set_: SpecChanges = None,
    json: Json = False,
) -> None:
    """Distill a model on this machine, using a temporary local Ray.

    Takes a job spec (--file), or --model and --data, from which a spec is made and saved as DIR.yaml. The same command
    resumes an interrupted run. The exit code is 2 if the model does not meet a quality gate.
    """
    import yaml

    from swiftkv_platform.contract.verdicts import describe_undecided_gates, summarize_quality
    from swiftkv_platform.specs import JobSpec
    from swiftkv_platform.specs.documents import apply_changes
    from swiftkv_platform.student_shape import parse_layers

    output = output.expanduser().resolve()
    if (file is None) == (model is None) or (model is None) != (not data):
        raise InvalidInputError("use either --file, or --model together with --data", field="file")
    if model is None:
        _refuse_options_of_model(
            {
                ("gpus", "resources.gpus_per_worker"): gpus,
                ("steps", "training.max_steps"): steps,
                ("num_key_value_layers", "swiftkv.num_key_value_layers"): num_key_value_layers,
                ("prefill_layers", "swiftkv.prefill_layers"): prefill_layers,
                ("key_value_group_size", "swiftkv.key_value_group_size"): key_value_group_size,
            }
        )
        spec = load_spec(file, None, set_)
    else:
        document = build_job_spec(
            model,
            data or (),
            name=output.name,
            gpus=gpus or 0,
            steps=steps,
            num_key_value_layers=num_key_value_layers,
            prefill_layers=None if prefill_layers is None else parse_layers(prefill_layers),
            key_value_group_size=key_value_group_size or 1,
        )
        document = apply_changes(document, dict(map(parse_spec_change, set_ or ())))
        spec = validate_options(JobSpec, document)
        save_spec(output, yaml.safe_dump(document, sort_keys=False, allow_unicode=True))
    artifact = _run_job(spec, output)
    evaluation = jsonlib.loads((artifact / "evaluation.json").read_text(encoding="utf-8"))
    distilled, teacher = evaluation["distilled"], evaluation["teacher"]
    line = (
        f"{artifact}: perplexity {distilled['perplexity']:.2f} (teacher {teacher['perplexity']:.2f}), "
        f"KL {distilled['kl']:.4f} nats, top-1 agreement {distilled['top1_agreement']:.1%}."
    )
    if open_gates := describe_undecided_gates(evaluation):
        line += f" Inconclusive for lack of samples: {'; '.join(open_gates)}."
    if verdict := summarize_quality(evaluation):
        line += f" {verdict}"
    line += f" To serve it: `swiftkv serve {artifact}`."
    print_result({"output": str(artifact), "verdict": verdict, **evaluation}, line, json=json)


def _refuse_options_of_model(options: Mapping[tuple[str, str], object]) -> None:
    """Raise `InvalidInputError` for the first used one of `options`, which --file does not take; the keys are option
    and spec field."""
    for (option, field), value in options.items():
        if value is not None:
            name = f"--{option.replace('_', '-')}"
            message = f"{name} is {value!r}, which needs --model; with --file, use --set {field}=VALUE instead"
            raise InvalidInputError(message, field=option, value=value)


def _run_job(spec: JobSpec, output: Path) -> Path:
    with require_extra("swiftkv distill", alternative=", or use `swiftkv jobs submit` to run the job on a cluster"):
        from swiftkv_platform.jobs.failures import explain_failure
        from swiftkv_platform.local.training import run_job_locally
    from swiftkv_platform.cli.sources import check_local_sources
    from swiftkv_platform.contract.cures import advise_on_failure
    from swiftkv_platform.local.terminal import JobDisplay

    check_local_sources(spec)
    configure_logs()
    try:
        with JobDisplay(get_error_console()) as display:
            return run_job_locally(spec, output, on_event=display.show_event)
    except ConflictError:  # another run has the directory
        raise
    except SwiftKVError:
        _print_kept_results(output)
        raise
    except Exception as error:
        _print_kept_results(output)
        failure = explain_failure(error)
        if failure.code == SwiftKVError.code:
            raise  # an unexpected error shows its traceback
        cure = advise_on_failure(failure.code, failure.field, spec, value=failure.value)
        raise TrainingError(f"{failure.code}: {failure.message}. {cure}".rstrip(), field=failure.field) from error
    except BaseException:  # Ctrl-C, or a signal
        _print_kept_results(output)
        raise


def _print_kept_results(output: Path) -> None:
    """Print what a failed run has left in `output`, if anything."""
    from swiftkv_platform.local.training import LOCAL_FAILURE, LOCAL_MODEL

    if not (output / LOCAL_FAILURE).is_file():
        return
    if (output / LOCAL_MODEL).is_dir():
        hint = f"The trained model is in {output / LOCAL_MODEL}. The same command evaluates it again without training; "
        hint += "if `evaluation` or `publish` caused the failure, correct it in the spec first."
    else:
        hint = f"The checkpoints are in {output}. The same command resumes from the last one."
    get_error_console().print(hint, highlight=False, markup=False, soft_wrap=True)


def evaluate(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="Directory of the student.")
    ],
    teacher: Annotated[
        str | None,
        typer.Option(
            help="Teacher: hub id, directory or .gguf file. Default: the one in the student's files, or of the "
            "student's job."
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Task of lm-evaluation-harness: name, .yaml file, builtin:mmlu, builtin:gsm8k, "
            "builtin:humaneval, builtin:ifeval, builtin:tool-calls, or paper (table B.1). Repeatable. Default: the "
            "tasks of the student's job."
        ),
    ] = None,
    task_data: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Directory with the files of all tasks, or with one directory for each task."),
    ] = None,
    task_limit: Annotated[int | None, typer.Option(min=1, help="Max samples per task. Default: all.")] = None,
    rows: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="YAML or JSON file with a list in the format of evaluation.rows. Default: that of the student's job.",
        ),
    ] = None,
    row_results: Annotated[
        Path | None, typer.Option(file_okay=False, help="Directory for the results of single rows, as JSON Lines.")
    ] = None,
    allow_code_tasks: Annotated[
        bool,
        typer.Option(
            "--allow-code-tasks",
            envvar="SWIFTKV_ALLOW_CODE_TASKS",
            help="Allow tasks that run the model's answers as code with your permissions, such as builtin:humaneval.",
        ),
    ] = False,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Evaluation text: file, directory or data set. Repeatable. Default: the job's held-out text."
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=64, help="Max held-out tokens to measure.")] = None,
    needle_length: Annotated[
        list[int] | None, typer.Option(min=128, help="Tokens per needle-in-a-haystack prompt. Repeatable.")
    ] = None,
    needle_samples: Annotated[int | None, typer.Option(min=1, help="Needle prompts per length.")] = None,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Also write the report as an HTML page.")] = None,
    json: Json = False,
) -> None:
    """Evaluate a student against its teacher.

    The exit code is 2 unless all quality gates of the job's spec pass. Inconclusive gates count as failures.
    """
    options = {
        "tasks": [{"name": name, "data_dir": task_data} for name in tasks or ()] or None,
        "task_limit": task_limit,
        "rows": None if rows is None else _load_evaluation_rows(rows),
        "max_tokens": max_tokens,
        "needle_lengths": needle_length or None,
        "needle_samples": needle_samples,
    }
    changes = {name: value for name, value in options.items() if value is not None}
    configure_logs()
    with show_activity("Loading libraries") as show:
        with require_extra("swiftkv evaluate"):
            from swiftkv_platform.jobs.worker.measure import evaluate_directory
        report, lineage = evaluate_directory(
            directory,
            data=data or (),
            teacher=teacher,
            evaluation=changes,
            allows_code_tasks=allow_code_tasks,
            row_results=row_results,
            progress=show,
        )
    document = report.model_dump(mode="json")
    if html is not None:
        from swiftkv_platform.reports.pages import render_evaluation_page

        html.write_text(render_evaluation_page(document, lineage), encoding="utf-8")
    if json:
        print_json(document)
    else:
        _print_report(report)
    if not all(gate.passed for gate in report.gates):
        raise typer.Exit(GATE_EXIT_CODE)


def _load_evaluation_rows(file: Path) -> list[Any]:
    """Return the entries of a file with a list like `evaluation.rows`. Raises `InvalidInputError`."""
    import yaml

    from swiftkv_platform.specs import EvaluationSpec
    from swiftkv_platform.specs.documents import load_yaml

    try:
        entries = load_yaml(read_text_file(file, "rows"))
    except yaml.YAMLError as error:
        raise InvalidInputError(f"--rows is {str(file)!r}, which is not YAML: {error}", field="rows") from error
    return validate_options(EvaluationSpec, {"rows": entries}).model_dump(mode="json")["rows"]  # type: ignore[no-any-return]


def _make_interval_row(report: Report) -> tuple[str, ...]:
    """Return the table row of 95% intervals. The perplexity's interval is its ratio's times the teacher's value."""
    found, teacher = report.intervals, report.teacher.perplexity
    if found is None:
        return ()
    perplexity = tuple(teacher * ratio for ratio in found.perplexity_ratio)
    intervals = ((perplexity, ".3f"), (found.kl, ".4f"), (found.top1_agreement, ".1%"))
    shown = (f"{low:{form}} to {high:{form}}" for (low, high), form in intervals)
    return (f"95% interval, {found.num_units:,} {found.unit}s", *shown)


def _print_report(report: Report) -> None:
    distilled = report.distilled
    rows = [
        ("teacher", f"{report.teacher.perplexity:.3f}", "", ""),
        ("student", f"{distilled.perplexity:.3f}", f"{distilled.kl:.4f}", f"{distilled.top1_agreement:.1%}"),
        _make_interval_row(report),
    ]
    print_table(("held-out text", "perplexity", "KL (nats)", "top-1 agreement"), filter(None, rows), empty="")
    found = report.continuations
    print_fields(
        {
            "positions": f"{report.num_positions:,}",
            "greedy completions": None if found is None else f"{found.matched:.1%} of the teacher's tokens matched",
            "prefill FLOPs": f"{report.prefill_flops_ratio:.3f} of the teacher's",
            "KV bytes": f"{report.kv_bytes_ratio:.3f} of the teacher's",
        }
    )
    if report.tasks:
        columns: Columns = {
            "task": "task",
            "metric": "metric",
            "samples": "num_samples",
            "teacher": lambda each: f"{each.teacher:.4f}",
            "student": lambda each: f"{each.student:.4f}",
            "points lost": lambda each: f"{each.drop:+.2f}",
        }
        print_items(report.tasks, columns, empty="")
    for gate in report.gates:  # worst first
        needed = "" if gate.samples_needed is None else f"; needs {gate.samples_needed:,} samples"
        of = f" ({gate.subject}, 95% {gate.interval[0]:.4g} to {gate.interval[1]:.4g})" if gate.interval else ""
        print_line(f"{gate.field} {gate.limit:g}: {gate.value:.4g}{of}, {gate.outcome}{needed}")


_MAX_CPU_ROW_LENGTH, _MAX_GPU_ROW_LENGTH = 512, 4096
"""Max tokens per row."""
_DEFAULT_CPU_STEPS = 200


def build_job_spec(
    model: str,
    data: Sequence[str],
    *,
    name: str,
    gpus: int,
    steps: int | None,
    num_key_value_layers: int | None,
    prefill_layers: Sequence[int] | None = None,
    key_value_group_size: int,
) -> dict[str, Any]:
    """Return a job spec that distills `model` on `data` with this machine's resources.

    Max row length is the model's context, capped at 512 tokens on CPUs and 4,096 on GPUs. Quality is reported without
    gates. Paths are absolute, so that the spec works from any directory.

    Args:
        data: files, directories or hub data sets.
        gpus: number of GPUs, one worker each; 0 trains on all CPUs in one worker.
        steps: training steps. None: 200 on CPUs, 2 epochs on GPUs.

    Raises:
        InvalidInputError: invalid name of a model or data set.
        ModelError: the model's configuration cannot be read.
    """
    from swiftkv_platform.cli.sources import read_model_config
    from swiftkv_platform.planning.config import ConfigFields
    from swiftkv_platform.sources.names import make_absolute
    from swiftkv_platform.sources.recipes import adapt_dtype_to_cpu

    context = ConfigFields(read_model_config(model)).get_optional_count("max_position_embeddings", "n_positions")
    max_length = _MAX_GPU_ROW_LENGTH if gpus else _MAX_CPU_ROW_LENGTH
    shape = {"num_key_value_layers": num_key_value_layers, "prefill_layers": prefill_layers}
    layers = {name: value for name, value in shape.items() if value is not None}
    document: dict[str, Any] = {
        "name": re.sub(r"[^A-Za-z0-9._-]+", "-", name).lstrip("._-")[:100] or "student",
        "model": {"name_or_path": make_absolute(model, "model", "model"), "dtype": "bfloat16"},
        "swiftkv": {**layers, "key_value_group_size": key_value_group_size},
        "data": {
            "sources": [{"name_or_path": make_absolute(each, "data", "data")} for each in data],
            "max_length": max_length if context is None else min(max_length, context),
            "train_on": "assistant",
            "validation_fraction": 0.05,
        },
        "training": {} if steps is None else {"max_steps": steps},
        "evaluation": {"max_tokens": 16384, "max_kl": None, "min_top1_agreement": None, "max_needle_drop": None},
    }
    if gpus:
        document["training"] |= {"gradient_checkpointing": prefill_layers is None}
        document["sharding"] = {"strategy": "ddp" if gpus == 1 else "fsdp2"}
        document["resources"] = {"num_workers": gpus, "gpus_per_worker": 1, "cpus_per_worker": 1}
    else:
        document = adapt_dtype_to_cpu(document)
        document["training"] |= {"max_steps": steps or _DEFAULT_CPU_STEPS, "batch_size": 4, "micro_batch_size": 4}
        document["evaluation"] |= {"needle_lengths": []}  # 100 needle prompts take minutes on CPUs
        document["sharding"] = {"strategy": "ddp"}
        document["resources"] = {"num_workers": 1, "cpus_per_worker": os.cpu_count() or 1}
    return document


def save_spec(output: Path, text: str) -> Path:
    """Write the spec to `{output}.yaml` and return that path. Raises `ConflictError` if the file has another spec."""
    path = output.with_name(f"{output.name}.yaml")
    if path.exists() and read_text_file(path, "output") != text:
        raise ConflictError(
            f"{path} contains another spec; use another --output, or --file {path.name} to run that spec",
            field="output",
            value=str(output),
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
