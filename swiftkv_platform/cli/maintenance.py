"""`swiftkv sweep`, `backup` and `restore`: an operator's work on database and store, which the settings name."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swiftkv_platform.cli.context import Json, settings
from swiftkv_platform.cli.output import err, print_json, print_table, say
from swiftkv_platform.local.units import size
from swiftkv_platform.orchestration.retention import Swept
from swiftkv_platform.orchestration.sweeper import Sweeper
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.sweeping import StoredObjects

if TYPE_CHECKING:
    from swiftkv_platform.database.session import Database

Directory = Annotated[Path, typer.Argument(metavar="DIR", file_okay=False)]


@contextmanager
def _database(chosen: Settings, *, new: bool = False) -> Iterator[Database]:
    """The database that the settings name, at this program's schema. Raises `InvalidInputError` for another one.

    Args:
        new: make the schema where the database is an SQLite file.
    """
    from swiftkv_platform.database.session import Database  # other commands do without SQL

    with closing(Database(chosen.resolved_database_url)) as database:
        if new and database.is_sqlite:
            database.upgrade()
        database.check_schema()
        yield database


def sweep(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing; tell what would go.")] = False,
    json: Json = False,
) -> None:
    """Remove what is kept no longer (SWIFTKV_RETENTION_*), as the control plane does every hour."""
    from swiftkv_platform.api.dependencies import retention
    from swiftkv_platform.database.retention import SqlRetention

    chosen = settings()
    removed: dict[str, Swept] = {}
    with _database(chosen) as database, err().status("Sweeping"):
        objects = StoredObjects(open_store(chosen.resolved_storage_uri, patient=False))
        sweeper = Sweeper(SqlRetention(database), objects, retention(chosen), time.time)
        for swept in sweeper.round(dry_run=dry_run):
            removed[swept.kind] = removed.get(swept.kind, Swept(swept.kind)) + swept
    found = [each for each in removed.values() if each != Swept(each.kind)]
    if json:
        print_json({"dry_run": dry_run, "removed": {each.kind: _figures(each) for each in found}})
        return
    rows = [(each.kind, each.rows, each.objects, size(each.bytes)) for each in found]
    columns = ("would go" if dry_run else "gone", "rows", "objects", "size")
    print_table(columns, rows, empty="Nothing is older than it may be.")


def backup(
    directory: Directory,
    objects: Annotated[
        bool,
        typer.Option(help="Copy the store's objects; else only list them, for a bucket that is copied otherwise."),
    ] = True,
    json: Json = False,
) -> None:
    """Copy database and store to a new directory, while everything runs."""
    from swiftkv_platform.local.backup import back_up

    chosen = settings()
    with _database(chosen) as database, err().status("Copying"):
        made = back_up(database, open_store(chosen.resolved_storage_uri), directory, objects=objects)
    if json:
        print_json(made)
        return
    rows = sum(table.lines for table in made.tables.values())
    what = "copied" if made.has_objects else "listed"
    say(f"{directory} holds {rows} rows; {made.objects.lines} objects ({size(made.object_bytes)}) are {what}.")


def restore(
    directory: Directory,
    allow_missing: Annotated[
        bool, typer.Option("--allow-missing", help="Go on where listed objects are not in the store.")
    ] = False,
    json: Json = False,
) -> None:
    """Put a backup back: objects into the store, rows into an empty database. Control planes must be stopped."""
    from swiftkv_platform.local.backup import restore as put_back

    chosen = settings()
    with _database(chosen, new=True) as database, err().status("Restoring"):
        store = open_store(chosen.resolved_storage_uri)
        found = put_back(database, store, directory, allow_missing=allow_missing)
    if json:
        print_json(found)
    else:
        rows = sum(table.lines for table in found.tables.values())
        say(f"{rows} rows and {found.objects.lines} objects are restored.")


def _figures(swept: Swept) -> dict[str, int]:
    return {"rows": swept.rows, "objects": swept.objects, "bytes": swept.bytes}
