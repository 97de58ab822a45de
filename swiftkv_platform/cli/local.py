"""`swiftkv up`, `down`, `status` and `demo` run the local platform; `prune`, `backup` and `restore` maintain the
configured database and object store.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from swiftkv_platform.cli.context import Json, load_settings
from swiftkv_platform.cli.output import get_console, get_error_console, print_items, print_json, print_result
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.local.formats import format_size

if TYPE_CHECKING:
    from swiftkv_platform.control_plane.database.session import Database
    from swiftkv_platform.settings import Settings


def up(
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the control plane; 0 selects a free port.")
    ] = None,
    num_cpus: Annotated[int | None, typer.Option(min=1, help="Number of CPUs for Ray. Default: all, min 4.")] = None,
    object_store_mib: Annotated[int, typer.Option(min=80, help="Size of Ray's object store in MiB.")] = 200,
    json: Json = False,
) -> None:
    """Start Ray and the control plane on this machine. Running parts are kept; stopped parts are restarted."""
    from swiftkv_platform.local.stack import Stack, StackOptions

    stack = Stack(load_settings())
    options = StackOptions(port=port, num_cpus=num_cpus, object_store_memory=object_store_mib << 20)
    console = get_error_console()
    # On SIGTERM (`timeout`, service managers), stop the started parts, as on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with console.status("Starting") as spinner:

        def report(line: str) -> None:
            spinner.update(line)
            console.print(escape(line), highlight=False, soft_wrap=True)

        try:
            state = stack.up(options, report)
        except SystemExit:
            report("Terminated by SIGTERM before all parts were ready; stopped the parts that this command started.")
            raise
    print_result(state, f"Ready: {state.url} (home {stack.home})", json=json)


def down(json: Json = False) -> None:
    """Stop all processes that `swiftkv up` started."""
    from swiftkv_platform.local.stack import Stack

    with get_error_console().status("Stopping"):
        count = Stack(load_settings()).down()
    print_result(
        {"stopped_processes": count}, f"Stopped {count} processes." if count else "No running processes.", json=json
    )


def status(json: Json = False) -> None:
    """Show the status of Ray, the control plane and Ray Serve. The exit code is 1 unless the first two are ready."""
    from swiftkv_platform.local.stack import Stack

    parts = Stack(load_settings()).status()
    if json:
        print_json({"parts": [vars(part) for part in parts]})
    else:
        columns = {"part": "name", **{name: name for name in ("state", "pid", "address", "detail")}}
        print_items(parts, columns, empty="")
    if any(part.state in ("stopped", "not ready") for part in parts):
        raise typer.Exit(1)


def demo(
    model: Annotated[
        str | None,
        typer.Option(help="Teacher: hub id, directory, or smollm2 (135M; takes up to an hour). Default: built-in."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="Report file. Default: demo-report.json, or demo-llm-report.json with smollm2.", dir_okay=False
        ),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(
            help="Directory for database, object store and logs. Default: .demo, or .demo-llm with smollm2, which "
            "resumes an interrupted run."
        ),
    ] = None,
    short: Annotated[
        bool,
        typer.Option(
            "--short", help="With smollm2: run all steps in minutes on very little data; the student learns nothing."
        ),
    ] = False,
    keep_running: Annotated[bool, typer.Option("--keep-running", help="Keep the platform running.")] = False,
    json: Json = False,
) -> None:
    """Distill a small model, deploy it, generate text and write a report, on a temporary local platform."""
    from swiftkv_platform.local.demo import LLM_NAMES, run_demo

    is_llm = model in LLM_NAMES
    if short and not is_llm:
        raise InvalidInputError(f"--short needs --model {LLM_NAMES[0]}; omit it", field="short", value=True)
    name = "demo-llm" if is_llm else "demo"
    report_path, home = (output or Path(f"{name}-report.json")).resolve(), home or Path(f".{name}")
    console = get_error_console() if json else get_console()
    report = run_demo(model, report_path, home, console, short=short, keep_running=keep_running)
    if json:
        print_json(report)


Directory = Annotated[Path, typer.Argument(metavar="DIR", file_okay=False)]


@contextmanager
def _open_database(chosen: Settings, *, new: bool = False) -> Iterator[Database]:
    """Open the configured database. `new`: first upgrade an SQLite file to the current schema. Raises
    `InvalidInputError` for another schema.
    """
    from swiftkv_platform.control_plane.database.session import open_database  # other commands need no SQL

    with closing(open_database(chosen)) as database:
        if new and database.is_sqlite:
            database.upgrade()
        database.check_schema()
        yield database


def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the data without deleting it.")] = False,
    json: Json = False,
) -> None:
    """Delete data past its retention (SWIFTKV_RETENTION_*). The control plane does this every hour."""
    from swiftkv_platform.control_plane.retention import (
        RemovedAmount,
        RetentionRepository,
        RetentionStore,
        RetentionSweeper,
    )
    from swiftkv_platform.storage.object_store import open_store

    chosen = load_settings()
    removed: dict[str, RemovedAmount] = {}
    with _open_database(chosen) as database, get_error_console().status("Pruning"):
        objects = RetentionStore(open_store(chosen.resolved_storage_uri, patient=False))
        sweeper = RetentionSweeper(RetentionRepository(database), objects, chosen, time.time)
        for swept in sweeper.run_round(dry_run=dry_run):
            removed[swept.kind] = removed.get(swept.kind, RemovedAmount(swept.kind)) + swept
    found = [each for each in removed.values() if each != RemovedAmount(each.kind)]
    if json:
        figures = {each.kind: {"rows": each.rows, "objects": each.objects, "bytes": each.bytes} for each in found}
        print_json({"dry_run": dry_run, "removed": figures})
        return
    columns = {"would delete" if dry_run else "deleted": "kind", "rows": "rows", "objects": "objects"}
    print_items(found, {**columns, "size": "bytes"}, empty="No data is past its retention.")


def sweep(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the data without deleting it.")] = False,
    json: Json = False,
) -> None:
    """Deprecated: use `swiftkv prune`."""
    get_error_console().print("`swiftkv sweep` is deprecated; use `swiftkv prune`.", highlight=False, soft_wrap=True)
    prune(dry_run=dry_run, json=json)


def backup(
    directory: Directory,
    objects: Annotated[
        bool, typer.Option(help="Copy the objects, or only list them if the bucket is backed up separately.")
    ] = True,
    json: Json = False,
) -> None:
    """Back up the database and object store to a new directory. The platform can keep running."""
    from swiftkv_platform.local.backup import back_up
    from swiftkv_platform.storage.object_store import open_store

    chosen = load_settings()
    with _open_database(chosen) as database, get_error_console().status("Copying"):
        made = back_up(database, open_store(chosen.resolved_storage_uri), directory, objects=objects)
    rows = sum(table.lines for table in made.tables.values())
    copied, size = "copied" if made.has_objects else "listed", format_size(made.object_bytes)
    line = f"Wrote {rows} database rows to {directory} and {copied} {made.objects.lines} stored objects ({size})."
    if keys := chosen.api_keys_file:
        line += f" The backup has no API keys: also copy {keys}."
    print_result(made, line, json=json)


def restore(
    directory: Directory,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Restore even if listed objects are missing in the store.")
    ] = False,
    json: Json = False,
) -> None:
    """Restore a backup into an empty database and the object store. Stop all control planes first."""
    from swiftkv_platform.local.backup import restore as restore_backup
    from swiftkv_platform.storage.object_store import open_store

    chosen = load_settings()
    with _open_database(chosen, new=True) as database, get_error_console().status("Restoring"):
        store = open_store(chosen.resolved_storage_uri)
        found = restore_backup(database, store, directory, allow_missing=allow_missing)
    rows = sum(table.lines for table in found.tables.values())
    print_result(found, f"Restored {rows} database rows and {found.objects.lines} stored objects.", json=json)
