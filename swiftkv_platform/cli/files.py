"""`swiftkv files`: uploaded training data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swiftkv_platform.cli.context import FileId, Json, Limit, Url, connect, find_file_id
from swiftkv_platform.cli.output import (
    format_local_time,
    get_error_console,
    print_deleted,
    print_result,
    print_table_result,
)
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.local.formats import format_size

files_app = typer.Typer(no_args_is_help=True, add_completion=False)

_DAY_S = 86400


@files_app.command()
def upload(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="JSON Lines file.", exists=True, dir_okay=False)],
    expires_in: Annotated[
        int | None, typer.Option(min=1, max=30, metavar="DAYS", help="Days until the file is deleted. Default: never.")
    ] = None,
    url: Url = None,
    json: Json = False,
) -> None:
    """Upload a JSON Lines file. Every row is validated before the file is stored."""
    with connect(url) as client, get_error_console().status(f"Uploading {path.name}"):
        file = client.files.upload(path, expires_after_s=None if expires_in is None else expires_in * _DAY_S)
    line = (
        f"Uploaded {file.id}: {file.rows} rows, format {file.format}. Use it as data.sources[].name_or_path in a job."
    )
    print_result(file, line, json=json)


@files_app.command("list")
def list_files(limit: Limit = 20, url: Url = None, json: Json = False) -> None:
    """List uploaded files, newest first."""
    with connect(url) as client:
        files = client.files.list(limit=limit)
    columns = {"file": "id", "name": "filename", "rows": "rows", "format": "format", "size": "bytes"}
    print_table_result(files, {**columns, "created": "created_at"}, empty="No files.", json=json)


@files_app.command()
def show(file_id: FileId, url: Url = None, json: Json = False) -> None:
    """Show details of an uploaded file."""
    with connect(url) as client:
        file_id = find_file_id(client, file_id)
        file = client.files.get(file_id)
    fields = {
        "file": file.id,
        "name": file.filename,
        "rows": f"{file.rows}, format {file.format}",
        "size": format_size(file.bytes),
        "sha256": file.sha256,
        "created": format_local_time(file.created_at),
        "expires": format_local_time(file.expires_at),
    }
    print_result(file, fields, json=json)


@files_app.command()
def download(
    file_id: FileId,
    output: Annotated[Path, typer.Argument(metavar="OUTPUT", help="New file.")],
    url: Url = None,
    json: Json = False,
) -> None:
    """Download an uploaded file and verify its SHA-256 digest."""
    if output.exists():
        message = f"{output} already exists; use another OUTPUT"
        raise InvalidInputError(message, field="output", value=str(output))
    with connect(url) as client:
        file_id = find_file_id(client, file_id)
        file = client.files.get(file_id)
        client.files.download(file_id, output, sha256=file.sha256)
    print_result({"output": str(output), "sha256": file.sha256}, f"Downloaded {file.rows} rows to {output}.", json=json)


@files_app.command()
def delete(file_id: FileId, url: Url = None, json: Json = False) -> None:
    """Delete an uploaded file. Fails while an unfinished job uses it."""
    with connect(url) as client:
        file_id = find_file_id(client, file_id)
        client.files.delete(file_id)
    print_deleted(file_id, json=json)
