"""`swiftkv models`: distilled models, their aliases and promotions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer

from swiftkv_platform.cli.context import Json, Limit, ModelId, ModelName, Url, complete_model, connect
from swiftkv_platform.cli.jobs import SpecChanges, parse_spec_change, print_submitted, watch_job
from swiftkv_platform.cli.output import (
    Columns,
    format_local_time,
    print_deleted,
    print_fields_result,
    print_items,
    print_json,
    print_result,
    print_table_result,
)
from swiftkv_platform.client import Client, Job
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.local.terminal import format_size
from swiftkv_platform.sources.names import make_absolute
from swiftkv_platform.specs.documents import apply_changes

_CHANGEABLE_SECTIONS = ("evaluation", "resources", "metadata")
"""Sections of a job's spec that may be changed for a model made from its checkpoint."""

AliasName = Annotated[str, typer.Option("--alias", help="Name that deployments follow.")]
Reason = Annotated[str, typer.Option("--reason", help="Reason, kept with caller and time.")]


models_app = typer.Typer(no_args_is_help=True, help="Distilled models.")


@models_app.command("list")
def list_models(limit: Limit = 20, url: Url = None, json: Json = False) -> None:
    """List models, newest first."""
    with connect(url) as client:
        models = client.models.list(limit=limit)
    columns: Columns = {"model": "id", "name": "name", "job": lambda model: model.job_id or "imported"}
    empty = "No models. `swiftkv jobs submit` makes one."
    print_table_result(models, {**columns, "created": "created_at"}, empty=empty, json=json)


@models_app.command("get")
def get_model(model: ModelName, url: Url = None, json: Json = False) -> None:
    """Show a model with its lineage and quality report."""
    with connect(url) as client:
        found = client.models.get(model)
    fields = found.model_dump(mode="json", exclude={"object"})
    fields["created_at"] = format_local_time(found.created_at)
    if fields.get("size") is not None:
        fields["size"] = format_size(fields["size"])
    print_fields_result(found, fields, json=json)


@models_app.command("import")
def import_model(
    source: Annotated[str, typer.Argument(metavar="DIR|URL", help="A student: directory or s3://bucket/prefix.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the model. Default: from its spec, or its directory's.")
    ] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Import a student made by `swiftkv distill` or `swiftkv convert`, to deploy, compare and publish it.

    The control plane reads the source itself: a directory on its machine, or a bucket, that its jobs may read.
    """
    with connect(url) as client:
        model = client.models.import_(make_absolute(source, "location", "source"), name=name)
    print_result(model, f"{model.id} is {model.name}. `swiftkv deploy {model.id}` serves it.", json=json)


@models_app.command()
def create(
    from_checkpoint: Annotated[
        str,
        typer.Option(
            "--from-checkpoint", metavar="JOB:STEP", help="A checkpoint, as `swiftkv jobs checkpoints JOB` lists it."
        ),
    ],
    name: Annotated[str | None, typer.Option(help="Name of the model. Default: the job's name and the step.")] = None,
    set_: SpecChanges = None,
    wait: Annotated[bool, typer.Option(help="Wait until the model exists.")] = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Evaluate a checkpoint and publish it as a model, in a new job without training."""
    with connect(url) as client:
        job = client.models.create(from_checkpoint=from_checkpoint, name=name, **_parse_section_changes(set_ or ()))
        _print_or_watch(client, job, wait=wait, json=json)


@models_app.command()
def publish(
    model: ModelName,
    to: Annotated[
        str, typer.Option("--to", metavar="PLACE", help="hf://organization/name, s3://bucket/prefix or a directory.")
    ],
    public: Annotated[bool, typer.Option("--public", help="Make a new hub repository public.")] = False,
    wait: Annotated[bool, typer.Option(help="Wait until it is published.")] = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Copy a model, with its card, to a hub repository, bucket or directory that the operator allows."""
    with connect(url) as client:
        _print_or_watch(client, client.models.publish(model, to=to, private=not public), wait=wait, json=json)


@models_app.command()
def lineage(model: ModelName, url: Url = None, json: Json = False) -> None:
    """Show data, teacher and ancestors of a model, and where it is in use."""
    with connect(url) as client:
        found = client.models.lineage(model)
    print_fields_result(found, found.model_dump(mode="json", exclude={"object", "spec"}), json=json)


@models_app.command()
def compare(
    model: ModelName,
    other: Annotated[
        str, typer.Argument(metavar="OTHER", help="Another model, named likewise.", autocompletion=complete_model)
    ],
    url: Url = None,
    json: Json = False,
) -> None:
    """Compare quality, prefill compute and KV cache of two models, and the specs of their jobs."""
    with connect(url) as client:
        found = client.models.compare(model, other)
    if json:
        print_json(found)
        return
    figures = {"figure": "name", "a": "a", "b": "b", "better": "better"}
    print_items(found.figures, figures, empty="Neither model has been measured.")
    different = (*found.differences, *found.spec_differences)
    print_items(different, {"made with": "name", "a": "a", "b": "b"}, empty="Both were made with the same spec.")


@models_app.command()
def promote(
    model: ModelName,
    reason: Reason,
    alias: AliasName = "production",
    accept_undecided: Annotated[
        bool, typer.Option("--accept-undecided", help="Promote even if a quality gate is undecided.")
    ] = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Point an alias to a model; deployments of the alias swap it in."""
    with connect(url) as client:
        promotion = client.models.promote(model, alias=alias, reason=reason, accept_undecided=accept_undecided)
    print_result(promotion, f"{promotion.alias} points to {promotion.model}.", json=json)


@models_app.command()
def rollback(reason: Reason, alias: AliasName = "production", url: Url = None, json: Json = False) -> None:
    """Point an alias back to its previous model."""
    with connect(url) as client:
        promotion = client.models.rollback(alias, reason=reason)
    print_result(promotion, f"{promotion.alias} points to {promotion.model} again.", json=json)


@models_app.command()
def delete(model_id: ModelId, url: Url = None, json: Json = False) -> None:
    """Delete a model but not its job; refused while it is deployed, promoted or read by a job."""
    with connect(url) as client:
        client.models.delete(model_id)
    print_deleted(model_id, json=json)


@models_app.command()
def aliases(
    alias: Annotated[str | None, typer.Option("--alias", help="Only this alias.")] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """List the promotions of aliases, with their models."""
    with connect(url) as client:
        found = client.models.aliases() if alias is None else [client.models.alias(alias)]
    if json:
        print_json(found)
        return
    columns = {"alias": "alias", "action": "action", "model": "model", "when": "created_at", "who": "by"}
    promotions = [item for each in found for item in each.history]
    print_items(promotions, {**columns, "why": "reason"}, empty="Nothing has been promoted.")


def _print_or_watch(client: Client, job: Job, *, wait: bool, json: bool) -> None:
    """Follow a submitted job, or print how to."""
    if wait:
        watch_job(client, job, json=json)
    else:
        print_submitted(job, json=json)


def _parse_section_changes(texts: Sequence[str]) -> dict[str, Any]:
    """Return sections of a spec from `--set` options. Raises `InvalidInputError`."""
    changes = dict(map(parse_spec_change, texts))
    for path in changes:
        if path.partition(".")[0] not in _CHANGEABLE_SECTIONS:
            raise InvalidInputError(
                f"--set is {path!r}, but a checkpoint's model is made with its job's spec, except for "
                f"{', '.join(_CHANGEABLE_SECTIONS)}; `swiftkv jobs clone` with training.from can change all of it",
                field=path,
            )
    return apply_changes({}, changes)
