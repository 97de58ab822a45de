"""`swiftkv deployments` and `swiftkv traffic`: deployed models and the requests that they have captured."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftkv_platform.cli.access import parse_duration
from swiftkv_platform.cli.context import (
    DeploymentId,
    JobId,
    Json,
    Limit,
    Reason,
    Url,
    connect,
    find_deployment_id,
    find_job_id,
    parse_spec_change,
)
from swiftkv_platform.cli.output import (
    Columns,
    format_local_time,
    print_json,
    print_result,
    print_schema,
    print_table,
    print_table_result,
    shorten,
)
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.local.formats import format_duration, format_size, pluralize

if TYPE_CHECKING:
    from swiftkv_platform.client import Resource

deployments_app = typer.Typer(no_args_is_help=True, add_completion=False)


@deployments_app.command("list")
def list_deployments(url: Url = None, json: Json = False) -> None:
    """List deployments, newest first."""
    with connect(url) as client:
        found = client.deployments.list()
    columns: Columns = {
        "deployment": "id",
        "model": "model",
        "status": _format_status,
        "replicas": _format_replicas,
        "url": "url",
    }
    empty = "No deployments. Create one with `swiftkv deploy MODEL`; `swiftkv models list` shows the models."
    print_table_result(found, {**columns, "message": "message"}, empty=empty, json=json)


@deployments_app.command()
def get(deployment_id: DeploymentId, url: Url = None, json: Json = False) -> None:
    """Show details of a deployment."""
    with connect(url) as client:
        deployment_id = find_deployment_id(client, deployment_id)
        found = client.deployments.get(deployment_id)
    print_result(found, _format_deployment(found), json=json)


@deployments_app.command()
def update(
    deployment_id: DeploymentId,
    changes: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Change an option, e.g. capture.share=0.1. Repeatable."),
    ],
    url: Url = None,
    json: Json = False,
) -> None:
    """Change options of a deployment; the others stay. `null` removes or resets one."""
    from swiftkv_platform.specs.documents import apply_changes

    values = apply_changes({}, dict(map(parse_spec_change, changes)))
    with connect(url) as client:
        deployment_id = find_deployment_id(client, deployment_id)
        deployment = client.deployments.update(deployment_id, **values)
    print_result(deployment, f"{deployment_id} is {deployment.status}, version {deployment.version}.", json=json)


@deployments_app.command()
def metrics(deployment_id: DeploymentId, url: Url = None, json: Json = False) -> None:
    """Show the metrics of each replica, counted since its start."""
    with connect(url) as client:
        deployment_id = find_deployment_id(client, deployment_id)
        found = client.deployments.metrics(deployment_id)
    if json:
        print_json(found)
        return
    rows = [_make_metrics_row(replica) for replica in found.replicas]
    columns = ("replica", "requests", "prompt tokens", "tokens", "exited", "TTFT ms", "KV usage", "running", "waiting")
    print_table(columns, rows, empty="No running replicas.")


@deployments_app.command()
def rollouts(deployment_id: DeploymentId, url: Url = None, json: Json = False) -> None:
    """List the rollouts of jobs' models to a deployment, newest first."""
    with connect(url) as client:
        deployment_id = find_deployment_id(client, deployment_id)
        found = client.deployments.rollouts(deployment_id)
    columns: Columns = {
        "job": "job_id",
        "model": "model",
        "status": "status",
        "since": lambda rollout: format_local_time(rollout.steps[-1]["at"]),
        "promotion": lambda rollout: format_local_time(rollout.promote_at),
        "message": lambda rollout: rollout.steps[-1]["message"],
    }
    empty = "No rollouts. A job replaces this deployment's model step by step if its spec has the section `rollout`."
    print_table_result(found, columns, empty=empty, json=json)


@deployments_app.command()
def rollback(deployment_id: DeploymentId, job_id: JobId, reason: Reason, url: Url = None, json: Json = False) -> None:
    """Undo the rollout of a job's model: remove the candidate, or serve the previous model again."""
    with connect(url) as client:
        deployment_id, job_id = find_deployment_id(client, deployment_id), find_job_id(client, job_id)
        rollout = client.deployments.roll_back(deployment_id, job_id, reason=reason)
    print_result(rollout, f"Rolled back the rollout of {job_id}.", json=json)


@deployments_app.command()
def delete(deployment_id: DeploymentId, url: Url = None, json: Json = False) -> None:
    """Delete a deployment; replicas finish their running requests."""
    with connect(url) as client:
        deployment_id = find_deployment_id(client, deployment_id)
        client.deployments.delete(deployment_id)
    print_result({"id": deployment_id, "status": "deleting"}, f"{deployment_id} is being deleted.", json=json)


@deployments_app.command()
def schema() -> None:
    """Print the JSON schema of a deployment (the body of `POST /deployments`)."""

    from swiftkv_platform.specs.deployment import DeploymentSpec

    print_schema(DeploymentSpec)


def _format_deployment(deployment: Resource) -> dict[str, Any]:
    candidate = deployment.candidate
    return {
        "deployment": deployment.id,
        "model": f"{deployment.model} (alias {deployment.alias})" if deployment.alias else deployment.model,
        "status": _format_status(deployment),
        "message": deployment.message,
        "url": deployment.url,
        "replicas": _format_replicas(deployment),
        "cold start": _format_cold_start(deployment.load_seconds),
        "scaling": _format_scaling(deployment),
        "engine": ", ".join(f"{name} {value}" for name, value in (deployment.engine or {}).items()),
        "candidate": f"{candidate['model']}, {candidate['share']:.1%} of requests" if candidate else None,
        "capture": f"{deployment.capture['share']:.1%} of requests" if deployment.capture else None,
        "adapters": ", ".join(each["name"] or each["model"] for each in deployment.adapters or ()) or None,
        "artifact": deployment.artifact_uri,
        "version": deployment.version,
        "created": format_local_time(deployment.created_at),
    }


def _format_status(deployment: Resource) -> str:
    """Return the status, as the last known one while Ray Serve reports none."""
    since = format_local_time(deployment.unknown_since)
    return str(deployment.status) if since is None else f"unknown since {since} (last known: {deployment.status})"


def _format_replicas(deployment: Resource) -> str | None:
    """Return e.g. `1 (min 1, max 4)`; None if the control plane does not report it."""
    if deployment.min_replicas is None or deployment.max_replicas is None:
        return None
    return f"{deployment.replicas or 0} (min {deployment.min_replicas}, max {deployment.max_replicas})"


def _format_cold_start(seconds: Mapping[str, float] | None) -> str | None:
    """Return e.g. `2.53 s (fetch 1.20, load 1.31, check 0.02)`; None until a replica reports it."""
    if not seconds:
        return None
    phases = ", ".join(f"{phase} {value:.2f}" for phase, value in seconds.items())
    return f"{sum(seconds.values()):.2f} s ({phases})"


def _format_scaling(deployment: Resource) -> str | None:
    if deployment.min_replicas == deployment.max_replicas or deployment.upscale_delay_s is None:
        return None
    target = deployment.target_ongoing_requests
    load = "" if target is None else f"target {pluralize(target, 'concurrent request')} per replica, "
    up, down = format_duration(deployment.upscale_delay_s), format_duration(deployment.downscale_delay_s)
    return f"{load}scale up after {up}, down after {down}"


def _make_metrics_row(replica: dict[str, Any]) -> tuple[str, ...]:
    values = replica["values"]
    count, tokens = values.get("time_to_first_token_seconds_count", 0.0), values.get("generation_tokens_total", 0.0)
    return (
        replica["replica"],
        f"{values.get('request_success_total', 0.0):g}",
        f"{values.get('prompt_tokens_total', 0.0):g}",
        f"{tokens:g}",
        f"{values.get('tokens_exited_total', 0.0) / tokens:.1%}" if tokens else "",
        f"{1000 * values['time_to_first_token_seconds_sum'] / count:.0f}" if count else "",
        f"{values['kv_cache_usage_perc']:.1%}" if "kv_cache_usage_perc" in values else "",
        f"{values.get('num_requests_running', 0.0):g}",
        f"{values.get('num_requests_waiting', 0.0):g}",
    )


if TYPE_CHECKING:
    from swiftkv_platform.client import Resource

traffic_app = typer.Typer(no_args_is_help=True, add_completion=False)

_User = Annotated[str | None, typer.Option(help="End user, as callers name them (`user`, `metadata.user_id`).")]


@traffic_app.command("show")
def show_traffic(deployment_id: DeploymentId, url: Url = None, json: Json = False) -> None:
    """Show the settings of captured traffic, its size by day, and pending deletions."""
    with connect(url) as client:
        found = client.deployments.traffic(find_deployment_id(client, deployment_id))
    print_result(found, _format_traffic(found), json=json)


@traffic_app.command("rows")
def list_captured_requests(
    deployment_id: DeploymentId,
    user: _User = None,
    within: Annotated[
        int | None,
        typer.Option(parser=parse_duration, metavar="TIME", help="Show only requests of this period, e.g. 7d."),
    ] = None,
    limit: Limit = 20,
    url: Url = None,
    json: Json = False,
) -> None:
    """List captured requests, newest first. The audit trail records it."""
    since = None if within is None else time.time() - within
    with connect(url) as client:
        deployment_id = find_deployment_id(client, deployment_id)
        found = client.deployments.captured_requests(deployment_id, user=user, since=since, limit=limit)
    columns: Columns = {
        "request": "id",
        "time": lambda row: format_local_time(row.time),
        **{name: name for name in ("path", "user")},
        "tokens": lambda row: f"{row.prompt_tokens} + {row.completion_tokens}",
        "asked": lambda row: shorten(row.prompt if row.messages is None else _find_question(row.messages)),
        "answered": lambda row: shorten(row.completion if row.messages is None else row.messages[-1].get("content")),
    }
    print_table_result(found, columns, empty="No captured requests.", json=json)


@traffic_app.command("delete")
def delete_traffic(
    deployment_id: DeploymentId,
    user: _User = None,
    request_id: Annotated[str | None, typer.Option(help="Id of a response.")] = None,
    older_than: Annotated[
        int | None,
        typer.Option(parser=parse_duration, metavar="TIME", help="Delete requests older than this, e.g. 7d."),
    ] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Delete captured requests that match all given options."""
    if user is None and request_id is None and older_than is None:
        raise InvalidInputError("Set --user, --request-id or --older-than to select the requests to delete.")
    before = None if older_than is None else time.time() - older_than
    with connect(url) as client:
        deployment_id = find_deployment_id(client, deployment_id)
        deletion = client.deployments.delete_traffic(deployment_id, user=user, request_id=request_id, before=before)
    print_result(
        deletion,
        "Deleted. The requests are hidden now, and removed from storage within minutes.",
        json=json,
    )


def _format_traffic(traffic: Resource) -> dict[str, Any]:
    capture = traffic.capture
    settings = None
    if capture is not None:
        settings = (
            f"{capture['share']:.1%} of requests, for {pluralize(capture['retention_days'], 'day')}, "
            f"at most {format_size(capture['max_bytes'])}"
        )
    fields = {
        "capture": settings or "off",
        "redacted": capture and (", ".join(capture["redact"]) or "nothing"),
        "stored": format_size(traffic.bytes),
        "pending deletions": len(traffic.pending_deletions) or None,
    }
    return fields | {day["day"]: format_size(day["bytes"]) for day in traffic.days}


def _find_question(messages: list[dict[str, Any]]) -> str:
    """Return the text of the last message before the answer that has one."""
    return next((message["content"] for message in reversed(messages[:-1]) if message.get("content")), "")
