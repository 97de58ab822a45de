"""`swiftkv compare`: two models side by side, with the rows that one of them answers better."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from swiftkv_platform.cli.context import Json, ModelName, Url, complete_model, connect
from swiftkv_platform.cli.output import Columns, print_items, print_json, print_line
from swiftkv_platform.errors import NotFoundError

_MAX_SHOWN_CHARACTERS = 60


def compare(
    model: ModelName,
    other: Annotated[
        str,
        typer.Argument(metavar="OTHER", help="Model id, job id, alias or unique name.", autocompletion=complete_model),
    ],
    task: Annotated[
        list[str] | None,
        typer.Option(help="Show changed rows of this evaluation task. Repeatable. Default: all tasks."),
    ] = None,
    rows: Annotated[int, typer.Option(min=0, max=10_000, help="Max changed rows per task; 0 shows none.")] = 10,
    url: Url = None,
    json: Json = False,
) -> None:
    """Compare two models: quality, prefill compute, KV cache, job specs, and evaluation tasks row by row."""
    with connect(url) as client:
        found = client.models.compare(model, other)
        tasks = {each["task"]: each for each in found.tasks or ()}
        for name in task or ():
            if name not in tasks:
                known = ", ".join(tasks) or "none"
                raise NotFoundError(
                    f"--task is {name!r}, which is no task with rows of both models; these are: {known}",
                    field="task",
                    value=name,
                )
        changed = {
            name: client.models.changed_rows(model, other, task=name, limit=rows) for name in task or tasks if rows
        }
    if json:
        shown = {name: [row.model_dump(mode="json") for row in found_rows] for name, found_rows in changed.items()}
        print_json({**found.model_dump(mode="json"), "changed_rows": shown})
        return
    print_line(f"a: {found.a}, b: {found.b}")
    figures = {"metric": "name", "a": "a", "b": "b", "better": "better"}
    print_items(found.figures, figures, empty="No metrics: neither model has been evaluated.")
    different = (*found.differences, *found.spec_differences)
    print_items(different, {"spec field": "name", "a": "a", "b": "b"}, empty="The job specs are equal.")
    print_items(tasks.values(), _TASK_COLUMNS, empty="No evaluation task with rows of both models.")
    for name, found_rows in changed.items():
        print_line(f"{name}: {_describe_rows(tasks[name], len(found_rows))}")
        print_items(found_rows, _ROW_COLUMNS, empty="All rows have the same score.")


def _format_interval(task: Mapping[str, Any]) -> str | None:
    interval = task["interval"]
    return None if interval is None else f"{interval[0]:+.4g} to {interval[1]:+.4g}"


def _format_score(score: float | None) -> str | None:
    return None if score is None else f"{score:.4g}"


def _describe_rows(task: Mapping[str, Any], num_shown: int) -> str:
    """Describe which of a task's rows are shown, and which only one model has answered."""
    total = task["num_worse"] + task["num_better"]
    text = f"{num_shown:,} of {total:,} rows with different scores"
    if task["num_only_a"] or task["num_only_b"]:
        text += f" ({task['num_only_a']:,} rows only of a and {task['num_only_b']:,} only of b are not compared)"
    return text


def _shorten(text: str | None) -> str:
    line = " ".join((text or "").split())
    return line if len(line) <= _MAX_SHOWN_CHARACTERS else f"{line[: _MAX_SHOWN_CHARACTERS - 1]}…"


def _format_result(result: Mapping[str, Any]) -> str:
    answer = _shorten(result["answer"])
    return f"{result['score']:.4g} {answer}".rstrip()


_TASK_COLUMNS: Columns = {
    "task": "task",
    "metric": "metric",
    "rows": "num_rows",
    "a": lambda task: _format_score(task["a"]),
    "b": lambda task: _format_score(task["b"]),
    "95% interval of b - a": _format_interval,
    "worse": "num_worse",
    "better": "num_better",
}
_ROW_COLUMNS: Columns = {
    "row": "id",
    "b is": "change",
    "prompt": lambda row: _shorten(row.prompt),
    "expected": lambda row: _shorten(row.expected),
    "a": lambda row: _format_result(row.a),
    "b": lambda row: _format_result(row.b),
}
