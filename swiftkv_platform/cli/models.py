"""`swiftkv models`: distilled models, their aliases and promotions; `swiftkv compare`: two models side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftkv_platform.cli.context import (
    Json,
    Limit,
    ModelName,
    Reason,
    SpecChanges,
    Url,
    complete_model,
    connect,
    find_job_id,
    find_model_id,
    parse_spec_change,
)
from swiftkv_platform.cli.jobs import print_submitted, watch_job
from swiftkv_platform.cli.output import (
    Columns,
    format_local_time,
    print_deleted,
    print_items,
    print_json,
    print_line,
    print_result,
    print_table_result,
    shorten,
)
from swiftkv_platform.errors import InvalidInputError, NotFoundError
from swiftkv_platform.local.formats import format_size

if TYPE_CHECKING:
    from swiftkv_platform.client import Client, Job

_CHANGEABLE_SECTIONS = ("evaluation", "resources", "metadata")
"""Spec sections that `swiftkv models create` can change."""

AliasName = Annotated[str, typer.Option("--alias", help="Alias, e.g. production. Deployments of an alias follow it.")]


models_app = typer.Typer(no_args_is_help=True, add_completion=False)


@models_app.command("list")
def list_models(limit: Limit = 20, url: Url = None, json: Json = False) -> None:
    """List models, newest first."""
    with connect(url) as client:
        models = client.models.list(limit=limit)
    columns: Columns = {
        "model": "id",
        "name": "name",
        "KL": lambda model: _format_kl(model.metrics),
        "job": lambda model: model.job_id or "imported",
    }
    empty = "No models. Submit a job with `swiftkv jobs submit`."
    print_table_result(models, {**columns, "created": "created_at"}, empty=empty, json=json)


def _format_kl(metrics: Mapping[str, Any] | None) -> str | None:
    """Return the model's held-out KL in nats; None if it was not evaluated."""
    kl = ((metrics or {}).get("distilled") or {}).get("kl")
    return None if kl is None else f"{kl:.4g}"


@models_app.command("get")
def get_model(model: ModelName, url: Url = None, json: Json = False) -> None:
    """Show details of a model, with lineage and quality report."""
    with connect(url) as client:
        found = client.models.get(model)
    fields = found.model_dump(mode="json", exclude={"object"})
    fields["created_at"] = format_local_time(found.created_at)
    if fields.get("size") is not None:
        fields["size"] = format_size(fields["size"])
    print_result(found, fields, json=json)


@models_app.command("import")
def import_model(
    source: Annotated[str, typer.Argument(metavar="DIR|URL", help="Student: directory or s3://bucket/prefix.")],
    name: Annotated[
        str | None, typer.Option(help="Model name. Default: the name in its spec, or the directory's.")
    ] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Import a student made by `swiftkv distill` or `swiftkv convert`.

    The control plane reads the source: a directory on its machine or a bucket, allowed by SWIFTKV_SOURCE_ROOTS.
    """
    from swiftkv_platform.sources.names import make_absolute

    with connect(url) as client:
        model = client.models.import_(make_absolute(source, "location", "source"), name=name)
    line = f"Imported {model.name} as {model.id}. To deploy it: `swiftkv deploy {model.id}`."
    print_result(model, line, json=json)


@models_app.command()
def create(
    from_checkpoint: Annotated[
        str,
        typer.Option("--from-checkpoint", metavar="JOB:STEP", help="Checkpoint (see `swiftkv jobs checkpoints JOB`)."),
    ],
    name: Annotated[str | None, typer.Option(help="Model name. Default: job name and step.")] = None,
    set_: SpecChanges = None,
    wait: Annotated[bool, typer.Option(help="Wait for the job to finish.")] = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Submit a job that evaluates a checkpoint and makes it a model, without training."""
    with connect(url) as client:
        job_id, colon, step = from_checkpoint.rpartition(":")
        if colon:
            from_checkpoint = f"{find_job_id(client, job_id)}:{step}"
        job = client.models.create(from_checkpoint=from_checkpoint, name=name, **_parse_section_changes(set_ or ()))
        _print_or_watch(client, job, wait=wait, json=json)


@models_app.command()
def publish(
    model: ModelName,
    to: Annotated[
        str, typer.Option("--to", metavar="TARGET", help="hf://organization/name, s3://bucket/prefix or directory.")
    ],
    public: Annotated[bool, typer.Option("--public", help="Make a new hub repository public.")] = False,
    wait: Annotated[bool, typer.Option(help="Wait for the job to finish.")] = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Submit a job that copies a model and its card to a hub repository, bucket or directory.

    The operator allows targets with SWIFTKV_PUBLISH_TARGETS.
    """
    with connect(url) as client:
        _print_or_watch(client, client.models.publish(model, to=to, private=not public), wait=wait, json=json)


@models_app.command()
def lineage(model: ModelName, url: Url = None, json: Json = False) -> None:
    """Show a model's data, teacher, parent models, aliases and deployments."""
    with connect(url) as client:
        found = client.models.lineage(model)
    print_result(found, found.model_dump(mode="json", exclude={"object", "spec"}), json=json)


@models_app.command()
def promote(
    model: ModelName,
    reason: Reason,
    alias: AliasName = "production",
    accept_undecided: Annotated[
        bool, typer.Option("--accept-undecided", help="Promote even if a quality gate is inconclusive.")
    ] = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Point an alias to a model. Deployments of the alias swap to it."""
    with connect(url) as client:
        promotion = client.models.promote(model, alias=alias, reason=reason, accept_undecided=accept_undecided)
    print_result(promotion, f"Promoted {promotion.model} to {promotion.alias}.", json=json)


@models_app.command()
def rollback(reason: Reason, alias: AliasName = "production", url: Url = None, json: Json = False) -> None:
    """Roll an alias back to its previous model."""
    with connect(url) as client:
        promotion = client.models.rollback(alias, reason=reason)
    print_result(promotion, f"Rolled {promotion.alias} back to {promotion.model}.", json=json)


@models_app.command()
def delete(model_id: ModelName, url: Url = None, json: Json = False) -> None:
    """Delete a model but keep its job. Fails while it is deployed, promoted or used by a job."""
    with connect(url) as client:
        model_id = find_model_id(client, model_id)
        client.models.delete(model_id)
    print_deleted(model_id, json=json)


@models_app.command()
def aliases(
    alias: Annotated[str | None, typer.Option("--alias", help="Show only this alias.")] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """List aliases with their promotion history."""
    with connect(url) as client:
        found = client.models.aliases() if alias is None else [client.models.alias(alias)]
    if json:
        print_json(found)
        return
    columns = {"alias": "alias", "action": "action", "model": "model", "time": "created_at", "caller": "by"}
    promotions = [item for each in found for item in each.history]
    print_items(
        promotions, {**columns, "reason": "reason"}, empty="No aliases. Promote a model with `swiftkv models promote`."
    )


def _print_or_watch(client: Client, job: Job, *, wait: bool, json: bool) -> None:
    """Follow a submitted job until it ends, or print its id."""
    if wait:
        watch_job(client, job, json=json)
    else:
        print_submitted(job, json=json)


def _parse_section_changes(texts: Sequence[str]) -> dict[str, Any]:
    """Return changed spec sections from `--set` options. Raises `InvalidInputError` for other sections."""
    from swiftkv_platform.specs.documents import apply_changes

    changes = dict(map(parse_spec_change, texts))
    for path in changes:
        if path.partition(".")[0] not in _CHANGEABLE_SECTIONS:
            raise InvalidInputError(
                f"--set is {path!r}, but this command can change only {', '.join(_CHANGEABLE_SECTIONS)}; "
                "use `swiftkv jobs clone` with training.from to change other fields",
                field=path,
            )
    return apply_changes({}, changes)


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
                    f"--task is {name!r}, but only tasks with rows of both models can be compared: {known}",
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
        text += f" (not compared: {task['num_only_a']:,} rows that only a has, {task['num_only_b']:,} that only b has)"
    return text


def _format_result(result: Mapping[str, Any]) -> str:
    answer = shorten(result["answer"])
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
    "prompt": lambda row: shorten(row.prompt),
    "expected": lambda row: shorten(row.expected),
    "a": lambda row: _format_result(row.a),
    "b": lambda row: _format_result(row.b),
}
