"""`swiftkv audit`: who changed what, and who was refused."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from swiftkv_platform.cli.context import Json, Url, connect
from swiftkv_platform.cli.keys import duration
from swiftkv_platform.cli.output import local_time, print_json, print_table

Text = Annotated[str | None, typer.Option(metavar="TEXT", help="Only entries with exactly this.")]


def audit(
    tenant: Text = None,
    actor: Text = None,
    credential: Text = None,
    address: Text = None,
    route: Text = None,
    about: Text = None,
    request_id: Text = None,
    status: Annotated[int | None, typer.Option(min=100, max=599, help="HTTP status of the answer.")] = None,
    within: Annotated[
        int | None, typer.Option(parser=duration, metavar="TIME", help="Only of this time until now, such as 7d.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most this many, newest first.")] = 100,
    url: Url = None,
    json: Json = False,
) -> None:
    """List the audit trail: what was changed, by whom and from where, and who was refused access."""
    with connect(url) as client:
        entries = client.audit(
            limit=limit,
            tenant=tenant,
            actor=actor,
            credential=credential,
            address=address,
            route=route,
            about=about,
            request_id=request_id,
            status=status,
            since=None if within is None else time.time() - within,
        )
    if json:
        print_json(entries)
        return
    rows = [
        (
            local_time(each.created_at),
            each.tenant,
            each.actor,
            each.credential,
            each.address,
            f"{each.method} {each.route}",
            each.about,
            each.status,
        )
        for each in entries
    ]
    columns = ("time", "tenant", "actor", "credential", "address", "request", "about", "status")
    print_table(columns, rows, empty="No entries.")
