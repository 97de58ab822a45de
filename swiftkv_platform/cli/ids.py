"""Parameters that take an id, which the shell completes with what the control plane has.

A shell that waits, or that prints an error into the line being typed, is worse than one that completes nothing: where
no answer comes in time, there is nothing to offer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Annotated

import typer

from swiftkv_platform.cli.context import connect
from swiftkv_platform.client import Client
from swiftkv_platform.errors import SwiftKVError

TIMEOUT_S = 1.0
"""Longest that a shell waits for ids."""
_MOST = 100
"""Newest ids that are asked for."""

Offers = list[tuple[str, str]]
"""Ids, each with words on it, which some shells show."""


def complete_job(ctx: typer.Context, incomplete: str) -> Offers:
    """Ids of the newest jobs."""
    jobs = _asked(ctx, lambda client: [(job.id, f"{job.name}, {job.status}") for job in client.jobs.list(limit=_MOST)])
    return _begun(jobs, incomplete)


def complete_model(ctx: typer.Context, incomplete: str) -> Offers:
    """Ids of the newest models."""
    models = _asked(ctx, lambda client: [(model.id, model.name or "") for model in client.models.list(limit=_MOST)])
    return _begun(models, incomplete)


def complete_deployment(ctx: typer.Context, incomplete: str) -> Offers:
    """Ids of deployments."""
    found = _asked(
        ctx, lambda client: [(each.id, f"{each.model}, {each.status}") for each in client.deployments.list()]
    )
    return _begun(found, incomplete)


def complete_file(ctx: typer.Context, incomplete: str) -> Offers:
    """Ids of the newest files."""
    files = _asked(ctx, lambda client: [(each.id, each.filename) for each in client.files.list(limit=_MOST)])
    return _begun(files, incomplete)


JobId = Annotated[str, typer.Argument(metavar="JOB", help="Id of the job (job_...).", autocompletion=complete_job)]
ModelId = Annotated[
    str, typer.Argument(metavar="MODEL", help="Id of the model (mdl_...).", autocompletion=complete_model)
]
FileId = Annotated[str, typer.Argument(metavar="FILE", help="Id of the file (file-...).", autocompletion=complete_file)]
DeploymentId = Annotated[
    str,
    typer.Argument(metavar="DEPLOYMENT", help="Id of the deployment (dep_...).", autocompletion=complete_deployment),
]


def _asked(ctx: typer.Context, ask: Callable[[Client], Offers]) -> Offers:
    answer: SimpleQueue[Offers] = SimpleQueue()
    url = ctx.params.get("url")
    threading.Thread(target=lambda: answer.put(_answer(url, ask)), daemon=True).start()
    try:
        return answer.get(timeout=TIMEOUT_S)
    except Empty:
        return []


def _answer(url: str | None, ask: Callable[[Client], Offers]) -> Offers:
    try:
        with connect(url, max_retries=0) as client:
            return ask(client)
    except SwiftKVError:  # the command itself will say what is wrong
        return []


def _begun(offers: Offers, incomplete: str) -> Offers:
    return [(identifier, words) for identifier, words in offers if identifier.startswith(incomplete)]
