"""`swiftkv traffic`: captured requests of deployments."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swiftkv_platform.cli.access import parse_duration
from swiftkv_platform.cli.context import DeploymentId, Json, Limit, Url, connect, find_deployment_id
from swiftkv_platform.cli.output import Columns, format_local_time, print_result, print_table_result
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.local.formats import format_size, pluralize

if TYPE_CHECKING:
    from swiftkv_platform.client import Resource

traffic_app = typer.Typer(no_args_is_help=True, add_completion=False)

_EXCERPT_CHARS = 60

User = Annotated[str | None, typer.Option(help="End user, as callers name them (`user`, `metadata.user_id`).")]


@traffic_app.command()
def show(deployment_id: DeploymentId, url: Url = None, json: Json = False) -> None:
    """Show the settings of captured traffic, its size by day, and pending deletions."""
    with connect(url) as client:
        found = client.deployments.traffic(find_deployment_id(client, deployment_id))
    print_result(found, _format_traffic(found), json=json)


@traffic_app.command()
def rows(
    deployment_id: DeploymentId,
    user: User = None,
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
        "asked": lambda row: _shorten(row.prompt if row.messages is None else _find_question(row.messages)),
        "answered": lambda row: _shorten(row.completion if row.messages is None else row.messages[-1].get("content")),
    }
    print_table_result(found, columns, empty="No captured requests.", json=json)


@traffic_app.command()
def delete(
    deployment_id: DeploymentId,
    user: User = None,
    request_id: Annotated[str | None, typer.Option(help="Id of a response.")] = None,
    older_than: Annotated[
        int | None,
        typer.Option(parser=parse_duration, metavar="TIME", help="Delete requests of before this period, e.g. 7d."),
    ] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Delete captured requests that match all given options."""
    if user is None and request_id is None and older_than is None:
        raise InvalidInputError("Give --user, --request-id or --older-than: which requests to delete.")
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


def _shorten(text: str | None) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join((text or "").split())
    return line if len(line) <= _EXCERPT_CHARS else f"{line[:_EXCERPT_CHARS]}..."
