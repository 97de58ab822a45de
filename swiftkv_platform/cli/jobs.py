"""`swiftkv jobs`: submit, look at, follow and end distillation jobs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from swiftkv_platform.cli import job_outputs
from swiftkv_platform.cli.context import Json, SpecFile, Url, connect, read_spec
from swiftkv_platform.cli.ids import JobId
from swiftkv_platform.cli.output import err, local_time, out, print_fields, print_json, print_schema, print_table, say
from swiftkv_platform.client import Client, Estimate, Job
from swiftkv_platform.local.terminal import follow
from swiftkv_platform.orchestration.validation import validate as validate_spec
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.addresses import open_store

jobs_app = typer.Typer(no_args_is_help=True, help="Distillation jobs.")
jobs_app.command()(job_outputs.events)
jobs_app.command()(job_outputs.metrics)
jobs_app.command()(job_outputs.checkpoints)
jobs_app.command()(job_outputs.artifacts)
jobs_app.command()(job_outputs.download)


@jobs_app.command()
def submit(
    file: SpecFile,
    follow_: Annotated[bool, typer.Option("--follow", help="Show the job until it has finished.")] = False,
    idempotency_key: Annotated[str | None, typer.Option(help="The same key submits the same job only once.")] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Submit a job."""
    spec = read_spec(file)
    with connect(url) as client:
        job = client.jobs.create(spec, idempotency_key)
        if follow_:
            if not json:
                say(f"Submitted {job.id}")
            _watch(client, job, json=json)
        elif json:
            print_json(job)
        else:
            say(f"Submitted {job.id}. `swiftkv jobs watch {job.id}` follows it.")


@jobs_app.command()
def validate(
    file: SpecFile,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE_OR_DIR",
            exists=True,
            help="The teacher's config.json, for a teacher on the hub: then l and g are checked here, without network.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            envvar="SWIFTKV_URL",
            show_envvar=True,
            help="Control plane that is to check it, with the files it sees. Default: this process, without network.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check a spec as `submit` would, and say what it would make of the teacher; nothing is stored."""
    spec = read_spec(file)
    if config is not None or url is None:
        found = validate_spec(spec, _read_object, config=config)
        estimate = Estimate.model_validate({"object": "distillation.estimate", **asdict(found)})
    else:
        with connect(url) as client:
            estimate = client.jobs.validate(spec)
    if json:
        print_json(estimate)
    else:
        say(f"{file} is accepted.")
        print_fields(estimate.model_dump(mode="json"))


@jobs_app.command("list")
def list_jobs(
    status: Annotated[str | None, typer.Option(help="Only jobs of this status.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many, newest first.")] = 20,
    url: Url = None,
    json: Json = False,
) -> None:
    """List jobs, newest first."""
    with connect(url) as client:
        jobs = client.jobs.list(status=status, limit=limit)
    if json:
        print_json(jobs)
        return
    rows = [(job.id, job.name, job.status, _steps(job), job.attempt, local_time(job.created_at)) for job in jobs]
    print_table(("job", "name", "status", "steps", "attempt", "created"), rows, empty="No jobs.")


@jobs_app.command()
def get(job_id: JobId, url: Url = None, json: Json = False) -> None:
    """Show a job."""
    with connect(url) as client:
        _print_job(client.jobs.get(job_id), json=json)


@jobs_app.command()
def watch(job_id: JobId, url: Url = None, json: Json = False) -> None:
    """Follow a job until it has finished; the exit code is not 0 unless it succeeded. Ctrl-C leaves the job alone."""
    with connect(url) as client:
        _watch(client, client.jobs.get(job_id), json=json)


@jobs_app.command()
def logs(
    job_id: JobId,
    follow_: Annotated[bool, typer.Option("--follow", help="Go on as lines are written.")] = False,
    tail: Annotated[int | None, typer.Option(min=1, help="Only so many lines, the newest attempt's last.")] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Print a job's log; with --json one object a line."""
    with connect(url) as client:
        for line in client.jobs.logs(job_id, follow_, tail_lines=tail):
            if json:
                print_json({"line": line})
            else:
                typer.echo(line)


@jobs_app.command()
def cancel(job_id: JobId, url: Url = None, json: Json = False) -> None:
    """End a job; its workers are freed."""
    with connect(url) as client:
        _print_status(client.jobs.cancel(job_id), json=json)


@jobs_app.command()
def pause(job_id: JobId, url: Url = None, json: Json = False) -> None:
    """Let a job checkpoint and free its workers, until it is resumed."""
    with connect(url) as client:
        _print_status(client.jobs.pause(job_id), json=json)


@jobs_app.command()
def resume(
    job_id: JobId,
    cost_cap: Annotated[float | None, typer.Option(help="What it may cost now, if its cost had paused it.")] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Queue a paused job again; it goes on from its last checkpoint."""
    with connect(url) as client:
        _print_status(client.jobs.resume(job_id, cost_cap=cost_cap), json=json)


@jobs_app.command()
def schema() -> None:
    """Print the JSON schema of a job spec, for editors that complete and check YAML as it is written."""
    print_schema(JobSpec)


def _print_status(job: Job, *, json: bool) -> None:
    if json:
        print_json(job)
    else:
        say(f"{job.id} is {job.status}.")


def _read_object(store: str, key: str) -> bytes:
    return open_store(store, patient=False).get_bytes(key)


def _watch(client: Client, job: Job, *, json: bool) -> None:
    """Follow to the end; raises `typer.Exit` with 1 unless the job succeeded. With JSON: its events, then the job."""
    events = client.jobs.events(job.id)
    try:
        if json:
            for event in events:
                print_json(event)
        else:
            follow(events, out())
    except KeyboardInterrupt:
        hint = f"{job.id} goes on. `swiftkv jobs watch {job.id}` follows, `swiftkv jobs cancel {job.id}` ends it."
        err().print(hint, highlight=False, soft_wrap=True)
        raise
    job = client.jobs.get(job.id)
    _print_job(job, json=json)
    if job.status != "succeeded":
        raise typer.Exit(1)


def _print_job(job: Job, *, json: bool) -> None:
    if json:
        print_json(job)
        return
    reason = job.error or job.status_reason
    print_fields(
        {
            "job": job.id,
            "name": job.name,
            "status": job.status,
            "reason": f"{reason.code}: {reason.message}" if reason else None,
            "attempt": job.attempt,
            "steps": _steps(job),
            "created": local_time(job.created_at),
            "started": local_time(job.started_at),
            "finished": local_time(job.finished_at),
            "expected end": local_time(job.estimated_finish),
            "model": job.distilled_model,
            "artifact": job.artifact_uri,
            "tracking": job.tracking,
        }
    )


def _steps(job: Job) -> str:
    if job.progress is None or not job.progress.total_steps:
        return ""
    return f"{job.progress.step}/{job.progress.total_steps}"
