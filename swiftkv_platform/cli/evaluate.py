"""`swiftkv evaluate`: how close a student directory is to its teacher, measured here."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftkv_platform.cli.context import Json
from swiftkv_platform.cli.output import print_fields, print_json, print_table, say
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.reports.evaluation import evaluation_page

if TYPE_CHECKING:
    from swiftkv_platform.evaluation.report import Report


def evaluate(
    directory: Annotated[Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="A student.")],
    teacher: Annotated[
        str | None,
        typer.Option(
            help="The model that the student was made of: name, directory or .gguf file. Default: the student's own "
            "teacher mode, or the teacher of the job that made it."
        ),
    ] = None,
    tasks: Annotated[
        list[str] | None,
        typer.Option(
            help="Task of lm-evaluation-harness: a name, a .yaml file, builtin:mmlu, builtin:gsm8k, "
            "builtin:ifeval, builtin:tool-calls, or paper (table B.1). Repeatable. Default: those of the job that made "
            "the model."
        ),
    ] = None,
    task_data: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where the files of a built-in task, or of a .yaml, lie.")
    ] = None,
    task_limit: Annotated[int | None, typer.Option(min=1, help="Samples of each task. Default: all.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to measure on: file, directory or data set. Repeatable. Default: what the job held out."
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(min=64, help="Held-out tokens measured.")] = None,
    needle_length: Annotated[
        list[int] | None,
        typer.Option(min=128, help="Tokens of prompts in which a number has to be found. Repeatable."),
    ] = None,
    needle_samples: Annotated[int | None, typer.Option(min=1, help="Prompts of each such length.")] = None,
    html: Annotated[Path | None, typer.Option(dir_okay=False, help="Write the report as a page, too.")] = None,
    json: Json = False,
) -> None:
    """Measure a student against its teacher. The exit code is 1 unless every limit of its job's spec is
    kept; a limit that the samples cannot decide is not."""
    try:
        from swiftkv_platform.jobs.worker.evaluate_directory import (
            evaluate_directory,  # not before the command runs: torch takes seconds
        )
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"Evaluating needs {error.name}; pip install 'swiftkv-platform[train]' would do"
        ) from error

    changes: dict[str, Any] = {}
    if tasks:
        changes["tasks"] = [{"name": name, "data_dir": task_data} for name in tasks]
    if task_limit is not None:
        changes["task_limit"] = task_limit
    if max_tokens is not None:
        changes["max_tokens"] = max_tokens
    if needle_length:
        changes["needle_lengths"] = needle_length
    if needle_samples is not None:
        changes["needle_samples"] = needle_samples
    report, lineage = evaluate_directory(directory, data=data or (), teacher=teacher, evaluation=changes)
    document = report.model_dump(mode="json")
    if html is not None:
        html.write_text(evaluation_page(document, lineage), encoding="utf-8")
    if json:
        print_json(document)
    else:
        _print(report)
    if not all(gate.passed for gate in report.gates):
        raise typer.Exit(1)


def _print(report: Report) -> None:
    distilled = report.distilled
    print_table(
        ("held-out text", "perplexity", "KL (nats)", "top-1 agreement"),
        [
            ("teacher", f"{report.teacher.perplexity:.3f}", "", ""),
            ("student", f"{distilled.perplexity:.3f}", f"{distilled.kl:.4f}", f"{distilled.top1_agreement:.1%}"),
        ],
        empty="",
    )
    found = report.continuations
    print_fields(
        {
            "positions": f"{report.num_positions:,}",
            "greedy continuations": None if found is None else f"{found.matched:.1%} of the teacher's tokens matched",
            "prefill FLOPs": f"{report.prefill_flops_ratio:.3f} of the teacher's",
            "KV bytes": f"{report.kv_bytes_ratio:.3f} of the teacher's",
        }
    )
    if report.tasks:
        rows = [
            (
                score.task,
                score.metric,
                score.num_samples,
                f"{score.teacher:.4f}",
                f"{score.student:.4f}",
                f"{score.drop:+.2f}",
            )
            for score in report.tasks
        ]
        print_table(("task", "metric", "samples", "teacher", "student", "points lost"), rows, empty="")
    for gate in report.gates:  # the worst first
        needed = "" if gate.samples_needed is None else f"; {gate.samples_needed:,} samples would do"
        of = f" ({gate.subject}, 95% {gate.interval[0]:.4g} to {gate.interval[1]:.4g})" if gate.interval else ""
        say(f"{gate.field} {gate.limit:g}: {gate.value:.4g}{of}, {gate.outcome}{needed}")
