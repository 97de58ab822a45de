"""`swiftkv jobs events`, `metrics`, `checkpoints`, `artifacts`, `download` and `wandb-sync`: outputs of a job."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from swiftkv_platform.cli.context import JobId, Json, Url, connect
from swiftkv_platform.cli.output import err, local_time, print_json, print_table, tell, tell_table
from swiftkv_platform.client.models import Resource
from swiftkv_platform.errors import InvalidInputError, NotFoundError
from swiftkv_platform.local.terminal import size
from swiftkv_platform.tracking.recorded import RecordedRun, drop_steps, last_step, upload

_SHOWN = ("step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second")


def events(
    job_id: JobId,
    after: Annotated[str | None, typer.Option(metavar="EVENT", help="Only events after this one (evt_...).")] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """List the events of a job; `swiftkv jobs watch` follows them."""
    with connect(url) as client:
        found = list(client.jobs.events(job_id, follow=False, after=after))
    tell_table(
        found,
        ("time", "type", "level", "message"),
        lambda event: (local_time(event.created_at), event.type, event.level, event.message),
        empty="No events yet.",
        json=json,
    )


def metrics(job_id: JobId, url: Url = None, json: Json = False) -> None:
    """List the main metrics of each step; with --json all of them."""
    with connect(url) as client:
        points = client.jobs.metrics(job_id)
    tell_table(
        points,
        _SHOWN,
        lambda point: ["" if (value := getattr(point, name)) is None else f"{value:g}" for name in _SHOWN],
        empty="No steps yet.",
        json=json,
    )


def checkpoints(job_id: JobId, url: Url = None, json: Json = False) -> None:
    """List the complete checkpoints of all attempts, with held-out KL and the model made from one."""
    with connect(url) as client:
        found = client.jobs.checkpoints(job_id)
    tell_table(
        found,
        ("checkpoint", "step", "attempt", "held-out KL", "model", "size", "key"),
        lambda item: (
            f"{job_id}:{item.step}",
            item.step,
            item.attempt,
            None if item.held_out_kl is None else f"{item.held_out_kl:.4g}",
            item.distilled_model,
            size(item.size),
            item.key,
        ),
        empty="No complete checkpoint.",
        json=json,
    )


def artifacts(job_id: JobId, url: Url = None, json: Json = False) -> None:
    """List the files of a job's model; `swiftkv jobs download` fetches them."""
    with connect(url) as client:
        found = client.jobs.artifacts(job_id)
    tell_table(
        found,
        ("file", "size", "sha256"),
        lambda item: (item.path, size(item.size), item.sha256),
        empty="No files: only a job that succeeded has them.",
        json=json,
    )


def download(
    job_id: JobId,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="A new or empty directory.")],
    file: Annotated[
        list[str] | None, typer.Option("--file", metavar="PATH", help="Only this file; may be repeated. Default: all.")
    ] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Download a job's model, or some of its files, and check their digests."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        message = f"{output} already exists; use a new or empty directory"
        raise InvalidInputError(message, field="output", value=str(output))
    with connect(url) as client:
        present = {item.path: item for item in client.jobs.artifacts(job_id)}
        unknown = next((path for path in file or () if path not in present), None)
        if not present or unknown is not None:
            raise NotFoundError(
                f"{job_id} has no artifact file{'s' if unknown is None else f' {unknown!r}'}; "
                f"`swiftkv jobs artifacts {job_id}` lists them, `swiftkv jobs get {job_id}` shows its status",
                field="file",
                value=unknown,
            )
        for path in file or present:
            with err().status(f"Fetching {path}"):
                client.jobs.download(job_id, path, output / path, sha256=present[path].sha256)
    fetched = list(file or present)
    tell({"output": str(output), "files": fetched}, f"{len(fetched)} files are in {output}.", json=json)


def wandb_sync(
    job_id: JobId,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be uploaded.")] = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Upload runs to W&B that were recorded offline or while it did not answer.

    Uses WANDB_API_KEY, and WANDB_BASE_URL for a server of your own. May be repeated: steps that W&B has are skipped.
    """
    with connect(url) as client, tempfile.TemporaryDirectory(prefix="swiftkv-wandb-") as workspace:
        wandb = client.jobs.get(job_id).spec["tracking"]["wandb"]
        files = client.jobs.tracking_files(job_id)
        parts = _recorded_runs(files, Path(workspace))
        pages: dict[str, str | None] = {}
        if not dry_run:
            for file in files:
                with err().status(f"Fetching {file.path}"):
                    client.jobs.download_tracking_file(job_id, file.path, Path(workspace) / file.path)
            pages = _upload(parts, wandb["project"], wandb["entity"])
    if json:
        print_json({"runs": [{"run_id": part.run_id, "part": part.path.name} for part in parts], "pages": pages})
        return
    rows = [(part.run_id, part.path.name, pages.get(part.run_id) or "") for part in parts]
    print_table(("run", "part", "page"), rows, empty="W&B has everything that was recorded.")


def _recorded_runs(files: Sequence[Resource], workspace: Path) -> list[RecordedRun]:
    """Return the recorded parts in the order of their start."""
    directories = {PurePosixPath(file.path).parent for file in files if file.path.endswith(".wandb")}
    return sorted((RecordedRun(workspace / directory) for directory in directories), key=lambda part: part.started)


def _upload(parts: Sequence[RecordedRun], project: str, entity: str | None) -> dict[str, str | None]:
    """Upload the parts. Returns the pages of their runs, by run id."""
    pages: dict[str, str | None] = {}
    steps: dict[str, int] = {}
    for part in parts:
        if part.run_id not in steps:
            steps[part.run_id] = last_step(project, entity, part.run_id)
        steps[part.run_id] = drop_steps(part, steps[part.run_id])
        with err().status(f"Uploading {part.path.name}"):
            pages[part.run_id] = upload(part)
    return pages
