"""`swiftkv jobs`: submit, inspect, follow and control distillation jobs, and download their outputs;
`swiftkv recipes`: the job specs that ship with the package."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.console import Console

from swiftkv_platform.cli.context import (
    JobId,
    Json,
    Limit,
    OptionalSpecFile,
    SpecChanges,
    SpecFile,
    Url,
    connect,
    find_job_id,
    parse_spec_change,
    read_spec,
    validate_options,
)
from swiftkv_platform.cli.output import (
    Columns,
    format_local_time,
    get_console,
    get_error_console,
    print_deleted,
    print_items,
    print_json,
    print_line,
    print_result,
    print_schema,
    print_table,
    print_table_result,
)
from swiftkv_platform.errors import ConflictError, InvalidInputError, NotFoundError, SwiftKVError
from swiftkv_platform.local.formats import format_count, format_duration, format_size

if TYPE_CHECKING:
    from swiftkv_platform.client import Client, Job
    from swiftkv_platform.client.models import Resource
    from swiftkv_platform.specs import JobSpec
    from swiftkv_platform.tracking.recorded import RecordedRun

IdempotencyKey = Annotated[str | None, typer.Option(help="Key that prevents submitting the same job twice.")]

jobs_app = typer.Typer(no_args_is_help=True, add_completion=False)


@jobs_app.command()
def submit(
    file: OptionalSpecFile = None,
    recipe_: Annotated[
        str | None, typer.Option("--recipe", metavar="NAME", help="Recipe to submit (see `swiftkv recipes list`).")
    ] = None,
    set_: SpecChanges = None,
    follow_: Annotated[bool, typer.Option("--follow", help="Follow the job until it ends.")] = False,
    idempotency_key: IdempotencyKey = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Submit a job from a spec file or a recipe."""
    spec = load_spec(file, recipe_, set_)
    with connect(url) as client:
        job = client.jobs.create(spec, idempotency_key)
        if follow_:
            if not json:
                print_line(f"Submitted {job.id}")
            watch_job(client, job, json=json)
        else:
            print_submitted(job, json=json)


@jobs_app.command()
def clone(
    job_id: JobId, set_: SpecChanges = None, idempotency_key: IdempotencyKey = None, url: Url = None, json: Json = False
) -> None:
    """Submit a new job with the spec of another job, changed by --set."""
    changes = dict(map(parse_spec_change, set_ or ()))
    with connect(url) as client:
        job_id = find_job_id(client, job_id)
        job = client.jobs.clone(job_id, changes, idempotency_key)
    print_submitted(job, json=json)


@jobs_app.command()
def validate(
    file: SpecFile,
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE_OR_DIR",
            exists=True,
            help="config.json of a teacher on the hub, to check layers and estimate memory offline.",
        ),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            envvar="SWIFTKV_URL",
            show_envvar=True,
            help="Control plane that validates the spec and its files. Default: validate locally, offline.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Validate a job spec, and estimate its student, memory, time and cost. Submits nothing."""
    from swiftkv_platform.cli.estimates import estimate_job, print_estimate

    spec = read_spec(file)
    if config is not None or url is None:
        estimate = estimate_job(spec, config=config)
    else:
        with connect(url) as client:
            estimate = client.jobs.validate(spec)
    if json:
        print_json(estimate)
    else:
        print_line(f"{file} is valid.")
        print_estimate(estimate, spec, _get_local_memory(url))


@jobs_app.command("list")
def list_jobs(
    status: Annotated[str | None, typer.Option(help="Show only jobs with this status.")] = None,
    limit: Limit = 20,
    url: Url = None,
    json: Json = False,
) -> None:
    """List jobs, newest first."""
    with connect(url) as client:
        jobs = client.jobs.list(status=status, limit=limit)
    columns: Columns = {
        "job": "id",
        "name": "name",
        "status": lambda job: ", ".join(filter(None, (job.status, describe_phase(job), describe_queue_position(job)))),
        "steps": _format_steps,
        "attempt": "attempt",
        "created": "created_at",
    }
    print_table_result(jobs, columns, empty="No jobs.", json=json)


@jobs_app.command()
def recipes(url: Url = None, json: Json = False) -> None:
    """List the control plane's example job specs."""
    with connect(url) as client:
        found = client.jobs.recipes()
    if json:
        print_json(found)
    else:
        print_recipes([describe_recipe(each.id, each.description, each.spec) for each in found])


@jobs_app.command()
def get(job_id: JobId, url: Url = None, json: Json = False) -> None:
    """Show details of a job."""
    with connect(url) as client:
        job_id = find_job_id(client, job_id)
        _print_job(client.jobs.get(job_id), json=json)


@jobs_app.command()
def watch(job_id: JobId, url: Url = None, json: Json = False) -> None:
    """Follow a job until it ends. The exit code is 1 unless it succeeded. Ctrl-C does not stop the job."""
    with connect(url) as client:
        job_id = find_job_id(client, job_id)
        watch_job(client, client.jobs.get(job_id), json=json)


@jobs_app.command()
def logs(
    job_id: JobId,
    follow_: Annotated[bool, typer.Option("--follow", help="Print new lines until the job ends.")] = False,
    tail: Annotated[int | None, typer.Option(min=1, help="Print only the last lines of the newest attempt.")] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Print a job's logs. With --json, print one object per line."""
    with connect(url) as client:
        job_id = find_job_id(client, job_id)
        for line in client.jobs.logs(job_id, follow_, tail_lines=tail):
            if json:
                print_json({"line": line})
            else:
                typer.echo(line)


@jobs_app.command()
def cancel(job_id: JobId, url: Url = None, json: Json = False) -> None:
    """Cancel a job and free its workers."""
    with connect(url) as client:
        job_id = find_job_id(client, job_id)
        _print_status(client.jobs.cancel(job_id), json=json)


@jobs_app.command()
def pause(job_id: JobId, url: Url = None, json: Json = False) -> None:
    """Pause a job: save a checkpoint and free its workers."""
    with connect(url) as client:
        job_id = find_job_id(client, job_id)
        _print_status(client.jobs.pause(job_id), json=json)


@jobs_app.command()
def resume(
    job_id: JobId,
    cost_cap: Annotated[float | None, typer.Option(help="New cost cap, for a job that its cost cap paused.")] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Resume a paused job from its last checkpoint."""
    with connect(url) as client:
        job_id = find_job_id(client, job_id)
        _print_status(client.jobs.resume(job_id, cost_cap=cost_cap), json=json)


@jobs_app.command()
def delete(job_id: JobId, url: Url = None, json: Json = False) -> None:
    """Delete a finished job with its model, checkpoints and logs. Fails while one of these is in use."""
    with connect(url) as client:
        job_id = find_job_id(client, job_id)
        client.jobs.delete(job_id)
    print_deleted(job_id, json=json)


@jobs_app.command()
def schema() -> None:
    """Print the JSON schema of a job spec, for completion and validation in editors."""
    from swiftkv_platform.specs import JobSpec

    print_schema(JobSpec)


_METRIC_COLUMNS = ("step", "tokens", "loss", "lr", "grad_norm", "tokens_per_second")


@jobs_app.command()
def events(
    job_id: JobId,
    after: Annotated[
        str | None, typer.Option(metavar="EVENT", help="Show only events after this id (evt_...).")
    ] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """List the events of a job. Use `swiftkv jobs watch` to follow them."""
    with connect(url) as client:
        job_id = find_job_id(client, job_id)
        found = list(client.jobs.events(job_id, follow=False, after=after))
    columns = {"time": "created_at", "type": "type", "level": "level", "message": "message"}
    print_table_result(found, columns, empty="No events.", json=json)


@jobs_app.command()
def metrics(job_id: JobId, url: Url = None, json: Json = False) -> None:
    """List the main training metrics by step. With --json, print all metrics."""
    with connect(url) as client:
        job_id = find_job_id(client, job_id)
        points = client.jobs.metrics(job_id)
    columns = {name: partial(_format_number, name=name, form="g") for name in _METRIC_COLUMNS}
    print_table_result(points, columns, empty="No training steps.", json=json)


@jobs_app.command()
def checkpoints(job_id: JobId, url: Url = None, json: Json = False) -> None:
    """List a job's checkpoints, with held-out KL and the models made from them."""
    with connect(url) as client:
        job_id = find_job_id(client, job_id)
        found = client.jobs.checkpoints(job_id)
    columns: Columns = {
        "checkpoint": lambda item: f"{job_id}:{item.step}",
        "step": "step",
        "attempt": "attempt",
        "held-out KL": partial(_format_number, name="held_out_kl", form=".4g"),
        "model": "distilled_model",
        "size": "size",
        "key": "key",
    }
    print_table_result(found, columns, empty="No checkpoints.", json=json)


def _format_number(item: Resource, name: str, form: str) -> str | None:
    """Format a field that may be absent."""
    value = getattr(item, name)
    return None if value is None else format(value, form)


@jobs_app.command()
def artifacts(job_id: JobId, url: Url = None, json: Json = False) -> None:
    """List the files of a job's model. Use `swiftkv jobs download` to download them."""
    with connect(url) as client:
        job_id = find_job_id(client, job_id)
        found = client.jobs.artifacts(job_id)
    columns = {"file": "path", "size": "size", "sha256": "sha256"}
    print_table_result(found, columns, empty="No files: only succeeded jobs have a model.", json=json)


@jobs_app.command()
def download(
    job_id: JobId,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="New or empty directory.")],
    file: Annotated[
        list[str] | None,
        typer.Option("--file", metavar="PATH", help="Download only this file. Repeatable. Default: all."),
    ] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Download the files of a job's model and verify their SHA-256 digests."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        message = f"{output} already exists; use a new or empty directory"
        raise InvalidInputError(message, field="output", value=str(output))
    with connect(url) as client:
        job_id = find_job_id(client, job_id)
        present = {item.path: item for item in client.jobs.artifacts(job_id)}
        unknown = next((path for path in file or () if path not in present), None)
        if not present or unknown is not None:
            raise NotFoundError(
                f"{job_id} has no artifact file{'s' if unknown is None else f' {unknown!r}'}; "
                f"list them with `swiftkv jobs artifacts {job_id}`, or see its status with `swiftkv jobs get {job_id}`",
                field="file",
                value=unknown,
            )
        for path in file or present:
            with get_error_console().status(f"Fetching {path}"):
                client.jobs.download(job_id, path, output / path, sha256=present[path].sha256)
    fetched = list(file or present)
    print_result({"output": str(output), "files": fetched}, f"Downloaded {len(fetched)} files to {output}.", json=json)


@jobs_app.command()
def wandb_sync(
    job_id: JobId,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs without uploading them.")] = False,
    url: Url = None,
    json: Json = False,
) -> None:
    """Upload offline W&B runs of a job.

    Uses WANDB_API_KEY or ~/.netrc, and WANDB_BASE_URL for a self-hosted server. Steps that W&B already has are skipped.
    """
    from swiftkv_platform.tracking.recorded import RecordedRun

    with connect(url) as client, tempfile.TemporaryDirectory(prefix="swiftkv-wandb-") as workspace:
        job_id = find_job_id(client, job_id)
        wandb = client.jobs.get(job_id).spec["tracking"]["wandb"]
        files = client.jobs.list_tracking_files(job_id)
        directories = {PurePosixPath(file.path).parent for file in files if file.path.endswith(".wandb")}
        runs = [RecordedRun(Path(workspace) / directory) for directory in directories]
        parts = sorted(runs, key=lambda part: part.start_time)
        pages: dict[str, str | None] = {}
        if not dry_run:
            for file in files:
                with get_error_console().status(f"Fetching {file.path}"):
                    client.jobs.download_tracking_file(job_id, file.path, Path(workspace) / file.path)
            pages = _upload_runs(parts, wandb["project"], wandb["entity"])
    if json:
        print_json({"runs": [{"run_id": part.run_id, "part": part.path.name} for part in parts], "pages": pages})
        return
    rows = [(part.run_id, part.path.name, pages.get(part.run_id) or "") for part in parts]
    print_table(("run", "part", "page"), rows, empty="No offline runs to upload.")


def _upload_runs(parts: Sequence[RecordedRun], project: str, entity: str | None) -> dict[str, str | None]:
    """Upload the parts. Returns the pages of their runs, by run id."""
    from swiftkv_platform.tracking.recorded import drop_steps, fetch_last_step, upload_run

    pages: dict[str, str | None] = {}
    steps: dict[str, int] = {}
    for part in parts:
        if part.run_id not in steps:
            steps[part.run_id] = fetch_last_step(project, entity, part.run_id)
        steps[part.run_id] = drop_steps(part, steps[part.run_id])
        with get_error_console().status(f"Uploading {part.path.name}"):
            pages[part.run_id] = upload_run(part)
    return pages


def load_spec(file: Path | None, recipe_: str | None, changes: Sequence[str] | None) -> JobSpec:
    """Load the spec of a file or a recipe, with changes. Raises `InvalidInputError` unless exactly one is given."""
    from swiftkv_platform.sources.recipes import find_recipe
    from swiftkv_platform.specs import JobSpec
    from swiftkv_platform.specs.documents import apply_changes

    if (file is None) == (recipe_ is None):
        raise InvalidInputError("use either --file SPEC or --recipe NAME", field="file")
    spec = read_spec(file if recipe_ is None else find_recipe(recipe_))  # type: ignore[arg-type]
    if not changes:
        return spec
    document = spec.model_dump(mode="json", exclude_unset=True)
    return validate_options(JobSpec, apply_changes(document, dict(map(parse_spec_change, changes))))


def print_submitted(job: Job, *, json: bool) -> None:
    print_result(job, f"Submitted {job.id}. To follow it: `swiftkv jobs watch {job.id}`.", json=json)


def _print_status(job: Job, *, json: bool) -> None:
    print_result(job, f"{job.id} is {job.status}.", json=json)


def watch_job(client: Client, job: Job, *, json: bool) -> None:
    """Follow a job until it ends, as text or as JSON events. Raises `typer.Exit(1)` unless it succeeded."""
    from swiftkv_platform.local.terminal import show_events

    stream = client.jobs.events(job.id)
    try:
        if json:
            for event in stream:
                print_json(event)
        else:
            console = get_console()
            with print_wait_reasons(client, job, console):
                show_events(stream, console)
    except KeyboardInterrupt:
        hint = (
            f"{job.id} keeps running. To follow it: `swiftkv jobs watch {job.id}`. To cancel it: "
            f"`swiftkv jobs cancel {job.id}`."
        )
        get_error_console().print(hint, highlight=False, soft_wrap=True)
        raise
    job = client.jobs.get(job.id)
    _print_job(job, json=json)
    if job.status != "succeeded":
        raise typer.Exit(1)


def _get_local_memory(url: str | None) -> int | None:
    """Return this machine's memory in bytes if the control plane (and so probably the workers) runs on it, else
    None."""
    import psutil

    host = None if url is None else urlsplit(url).hostname
    return psutil.virtual_memory().total if host in (None, "localhost", "127.0.0.1", "::1") else None


def _print_job(job: Job, *, json: bool) -> None:
    error, reason = job.error, job.status_reason
    fields = {
        "cause": f"{error.code}: {error.message}" if error else None,
        "fix": error.cure if error else None,
        "job": job.id,
        "name": job.name,
        "status": job.status,
        "phase": describe_phase(job),
        "reason": f"{reason.code}: {reason.message}" if reason and not error else None,
        "queue": describe_queue(job),
        "attempt": job.attempt,
        "steps": _format_steps(job, details=True),
        "created": format_local_time(job.created_at),
        "started": format_local_time(job.started_at),
        "finished": _format_end_time(job),
        "expected end": format_local_time(job.estimated_finish),
        "cost": _format_cost(job),
        "quality": _format_quality(job.result),
        "verdict": job.verdict,
        "model": job.distilled_model,
        "artifact": job.artifact_uri,
        "tracking": _format_tracking(job.tracking),
    }
    print_result(job, fields, json=json)


def _format_end_time(job: Job) -> str | None:
    when = format_local_time(job.finished_at)
    if when is None or job.finished_at is None or job.started_at is None:
        return when
    return f"{when}, after {format_duration(job.finished_at - job.started_at)}"


def _format_cost(job: Job) -> str | None:
    if job.cost is None:
        return None
    expected = "" if job.finished or job.estimated_cost is None else f" ({job.estimated_cost:,.2f} estimated in total)"
    return f"{job.cost:,.2f}{expected}"


def _format_quality(result: Mapping[str, Any] | None) -> str | None:
    """Describe the quality of student and teacher; None if the report has no quality, e.g. a sweep's report."""
    distilled, teacher = (result or {}).get("distilled"), (result or {}).get("teacher")
    if not distilled or not teacher:
        return None
    return (
        f"perplexity {distilled['perplexity']:.2f} (teacher {teacher['perplexity']:.2f}), "
        f"KL {distilled['kl']:.3f} nats, top-1 agreement {distilled['top1_agreement']:.1%}"
    )


def _format_tracking(tracking: Mapping[str, Any] | None) -> str | None:
    if not tracking:
        return None
    return f"{tracking.get('provider')} run {tracking.get('run_id')}, {tracking.get('url') or tracking.get('mode')}"


def _format_steps(job: Job, *, details: bool = False) -> str:
    """Return e.g. `40/100`, or with details `40/100, 327,680 tokens, 2 min 10 s left`."""
    progress = job.progress
    if progress is None or not progress.total_steps:
        return ""
    parts = [f"{progress.step}/{progress.total_steps}"]
    if details:
        parts.append(f"{format_count(progress.tokens)} tokens")
        if progress.seconds_remaining and not job.finished:
            parts.append(f"{format_duration(progress.seconds_remaining)} left")
    return ", ".join(parts)


_POLL_INTERVAL_S = 5.0
_SECONDS_LEFT = re.compile(r"[\d.]+ s\b")
"""Matches remaining seconds, which change at each poll."""


@contextmanager
def print_wait_reasons(client: Client, job: Job, console: Console) -> Iterator[None]:
    """Print the wait reason or phase of `job`, now and at each change, until the context ends."""
    done = threading.Event()
    last_reason = _print_wait_reason(job, console, None)
    thread = threading.Thread(target=_poll_wait_reason, args=(client, job.id, console, last_reason, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _poll_wait_reason(
    client: Client, job_id: str, console: Console, last_reason: str | None, done: threading.Event
) -> None:
    while not done.wait(_POLL_INTERVAL_S):
        try:
            last_reason = _print_wait_reason(client.jobs.get(job_id), console, last_reason)
        except SwiftKVError:  # the event stream reports it
            continue


def _print_wait_reason(job: Job, console: Console, last_reason: str | None) -> str | None:
    """Print why the job is queued, or its phase, unless the text equals `last_reason`. Returns the text."""
    if job.status == "queued":
        reason = job.status_reason.message if job.status_reason else "no reason reported"
        line = ": ".join(filter(None, ("queued", describe_queue(job), reason)))
    elif job.phase is None or job.finished:
        return None
    else:
        reason = line = f"phase: {job.phase}"
    if last_reason is None or _SECONDS_LEFT.sub("", last_reason) != _SECONDS_LEFT.sub("", reason):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return reason


def describe_phase(job: Job) -> str | None:
    """Return the phase of a job and its progress, e.g. `calibrate, layers 3 of 32, 20 s left`; None without a phase."""
    progress = job.phase_progress
    if job.phase is None or progress is None:
        return job.phase
    format_number = format_size if progress.part == "bytes" else format_count
    done = f"{progress.part} {format_number(progress.done)} of {format_number(progress.total)}"
    left = f"{format_duration(progress.seconds_remaining)} left" if progress.seconds_remaining else None
    return ", ".join(filter(None, (job.phase, done, left)))


def describe_queue(job: Job) -> str | None:
    """Describe a queued job's queue position, and since when it waits for resources."""
    since = format_local_time(job.waiting_since)
    return (
        ", ".join(filter(None, (describe_queue_position(job), since and f"waiting for resources since {since}")))
        or None
    )


def describe_queue_position(job: Job) -> str | None:
    """Return a queued job's position in its tenant's queue; None if unknown."""
    return f"queue position {job.queue_place}" if job.queue_place else None


if TYPE_CHECKING:
    from swiftkv_platform.specs import JobSpec

recipes_app = typer.Typer(no_args_is_help=True, add_completion=False)

_SCHEMA_COMMENT = "# yaml-language-server: $schema="


def describe_recipe(name: str, description: str, spec: Mapping[str, Any] | JobSpec) -> dict[str, str]:
    """Return name, teacher, GPUs, expected time and purpose of a recipe."""
    from swiftkv_platform.sources.recipes import split_description
    from swiftkv_platform.specs import JobSpec

    job = JobSpec.model_validate(spec)
    resources = job.resources
    gpus = resources.max_workers * resources.gpus_per_worker
    kind = resources.accelerator_type or "any"
    purpose, time = split_description(description)
    return {
        "recipe": name,
        "teacher": job.model.name_or_path,
        "GPUs": f"{gpus:g} ({kind})" if gpus else "none",
        "time": time,
        "purpose": purpose,
    }


def print_recipes(recipes: list[dict[str, str]]) -> None:
    columns: Columns = {name: name for name in ("recipe", "teacher", "GPUs", "time", "purpose")}
    print_items(recipes, columns, empty="No recipes.")


@recipes_app.command("list")
def list_recipes(json: Json = False) -> None:
    """List the recipes with teacher, GPUs, expected time and purpose; docs/training.md has their known results."""
    import yaml

    from swiftkv_platform.sources.recipes import find_recipes, read_description

    texts = {name: path.read_text(encoding="utf-8") for name, path in find_recipes().items()}
    found = [describe_recipe(name, read_description(text), yaml.safe_load(text)) for name, text in texts.items()]
    if json:
        print_json({"recipes": found})
    else:
        print_recipes(found)


@recipes_app.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Recipe, as `swiftkv recipes list` shows it.")],
    to: Annotated[
        Path | None, typer.Argument(metavar="FILE", dir_okay=False, help="New file. Default: NAME.yaml.")
    ] = None,
    json: Json = False,
) -> None:
    """Copy a recipe, including its comments, to a new file. Editors find the spec's schema by its first line."""
    from swiftkv_platform.sources.recipes import JOB_SCHEMA, find_recipe, remove_editor_comment

    target = to or Path(f"{name}.yaml")
    text = remove_editor_comment(find_recipe(name).read_text(encoding="utf-8"))
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(f"{_SCHEMA_COMMENT}{JOB_SCHEMA.as_uri()}\n{text}")
    except FileExistsError as error:
        raise ConflictError(f"{target} already exists; use another FILE", field="file", value=str(target)) from error
    print_result(
        {"recipe": name, "file": str(target)},
        f"Copied {name} to {target}. Edit it, then run `swiftkv jobs submit -f {target}` or `swiftkv distill`.",
        json=json,
    )
