"""`swiftkv up`, `down`, `status` and `demo` for the platform on this machine; `prune`, `backup` and `restore` for
operators, on the database and store of the settings.
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
from swiftkv_platform.local.stack import Stack, StackOptions
from swiftkv_platform.local.terminal import format_size
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.addresses import open_store

if TYPE_CHECKING:
    from swiftkv_platform.control_plane.database.session import Database


def up(
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Control plane's port; 0 takes any free one.")
    ] = None,
    num_cpus: Annotated[int | None, typer.Option(min=1, help="CPUs that Ray has. Default: all, at least 4.")] = None,
    object_store_mib: Annotated[int, typer.Option(min=80, help="Shared memory of Ray's object store, MiB.")] = 200,
    json: Json = False,
) -> None:
    """Start Ray and the control plane on this machine. Running parts are kept; parts that died are restarted."""
    stack = Stack(load_settings())
    options = StackOptions(port=port, num_cpus=num_cpus, object_store_memory=object_store_mib << 20)
    console = get_error_console()
    # On SIGTERM, which `timeout` and service managers send, stop what was started, as on Ctrl-C.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with console.status("Starting") as spinner:

        def report(line: str) -> None:
            spinner.update(line)
            console.print(escape(line), highlight=False, soft_wrap=True)

        try:
            state = stack.up(options, report)
        except SystemExit:
            report("Terminated (SIGTERM) before everything was up; what this call had started is stopped again.")
            raise
    print_result(state, f"Ready: {state.url} (home {stack.home})", json=json)


def down(json: Json = False) -> None:
    """Stop everything that `swiftkv up` started, including child processes."""
    with get_error_console().status("Stopping"):
        count = Stack(load_settings()).down()
    print_result(
        {"stopped_processes": count}, f"Stopped {count} processes." if count else "Nothing was running.", json=json
    )


def status(json: Json = False) -> None:
    """Show the state of each part. The exit code is 1 unless Ray and the control plane are ready."""
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
        typer.Option(help="Teacher instead of the built-in one: hub id, directory, or smollm2 (a real LLM, an hour)."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="File for the report. Default: demo-report.json; demo-llm-report.json.", dir_okay=False),
    ] = None,
    home: Annotated[
        Path | None,
        typer.Option(
            help="Directory for database, store and logs. Default: .demo; .demo-llm, where an interrupted "
            "run continues."
        ),
    ] = None,
    short: Annotated[bool, typer.Option("--short", help="With smollm2: take minutes, with too few steps.")] = False,
    keep_running: Annotated[bool, typer.Option("--keep-running", help="Leave everything running.")] = False,
    json: Json = False,
) -> None:
    """Distil a small model, deploy it, generate with it and write a report, on a temporary stack."""
    from swiftkv_platform.local.demo import LLM_NAMES, run_demo

    is_llm = model in LLM_NAMES
    if short and not is_llm:
        raise InvalidInputError(f"--short needs --model {LLM_NAMES[0]}; leave it out", field="short", value=True)
    name = "demo-llm" if is_llm else "demo"
    target, place = (output or Path(f"{name}-report.json")).resolve(), home or Path(f".{name}")
    console = get_error_console() if json else get_console()
    report = run_demo(model, target, place, console, short=short, keep_running=keep_running)
    if json:
        print_json(report)


Directory = Annotated[Path, typer.Argument(metavar="DIR", file_okay=False)]


@contextmanager
def _open_database(chosen: Settings, *, new: bool = False) -> Iterator[Database]:
    """Open the settings' database. `new`: upgrade an SQLite file to this program's schema first. Raises
    `InvalidInputError` for another schema.
    """
    from swiftkv_platform.control_plane.database.session import open_database  # other commands need no SQL

    with closing(open_database(chosen)) as database:
        if new and database.is_sqlite:
            database.upgrade()
        database.check_schema()
        yield database


def prune(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    json: Json = False,
) -> None:
    """Delete rows and objects past their retention (SWIFTKV_RETENTION_*), as the control plane does every hour."""
    from swiftkv_platform.control_plane.retention import (
        RemovedAmount,
        RetentionRepository,
        RetentionStore,
        RetentionSweeper,
    )

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
    columns = {"would be removed" if dry_run else "removed": "kind", "rows": "rows", "objects": "objects"}
    print_items(found, {**columns, "size": "bytes"}, empty="Nothing is past its retention.")


def sweep(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list what would be removed.")] = False,
    json: Json = False,
) -> None:
    """Earlier name of `swiftkv prune`."""
    get_error_console().print(
        "`swiftkv sweep` is now called `swiftkv prune`; use that name.", highlight=False, soft_wrap=True
    )
    prune(dry_run=dry_run, json=json)


def backup(
    directory: Directory,
    objects: Annotated[
        bool,
        typer.Option(help="Copy the store's objects, or only list them, for a bucket that is backed up separately."),
    ] = True,
    json: Json = False,
) -> None:
    """Copy database and object store to a new directory, while everything runs."""
    from swiftkv_platform.local.backup import back_up

    chosen = load_settings()
    with _open_database(chosen) as database, get_error_console().status("Copying"):
        made = back_up(database, open_store(chosen.resolved_storage_uri), directory, objects=objects)
    rows = sum(table.lines for table in made.tables.values())
    copied = "copied" if made.has_objects else "listed"
    line = (
        f"{directory} holds {rows} rows; {made.objects.lines} objects ({format_size(made.object_bytes)}) are {copied}."
    )
    if keys := chosen.api_keys_file:
        line += f" API keys are not in it: copy {keys} as well."
    print_result(made, line, json=json)


def restore(
    directory: Directory,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Restore although listed objects are not in the store.")
    ] = False,
    json: Json = False,
) -> None:
    """Restore a backup: objects to the store, rows to an empty database. Control planes must be stopped."""
    from swiftkv_platform.local.backup import restore as put_back

    chosen = load_settings()
    with _open_database(chosen, new=True) as database, get_error_console().status("Restoring"):
        store = open_store(chosen.resolved_storage_uri)
        found = put_back(database, store, directory, allow_missing=allow_missing)
    rows = sum(table.lines for table in found.tables.values())
    print_result(found, f"{rows} rows and {found.objects.lines} objects are restored.", json=json)
