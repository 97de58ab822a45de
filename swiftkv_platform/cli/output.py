"""Command output: JSON or tables on stdout, errors and progress on stderr."""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeAlias

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperGroup

from swiftkv_platform.errors import InvalidInputError, QualityGateError, SwiftKVError
from swiftkv_platform.installing import make_install_command
from swiftkv_platform.local.formats import format_size

if TYPE_CHECKING:
    from pydantic import BaseModel

_JSON_FLAG_KEY = "swiftkv.json"
_NO_HOME_MESSAGE = "Could not determine home directory."
"""Message of `Path.expanduser` for a user without a home directory."""
_INTERRUPTED_EXIT_CODE = 130
GATE_EXIT_CODE = 2
"""Exit code of a command that worked, and whose model does not meet a quality gate."""
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_CONTROLS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Visible forms of control characters, with which texts of other people could change the terminal."""
_MAX_CELL_CHARS = 60
"""Max characters of a shortened text."""
_COLUMN_GAP = 2
"""Spaces between the columns of a table."""

Printable: TypeAlias = "BaseModel | Mapping[str, Any] | Iterable[BaseModel]"
Columns = Mapping[str, str | Callable[[Any], object]]
"""Columns by heading: a field's name, or a function of the item."""


def get_console() -> Console:
    """Return a console on stdout, for results. Created per call, since tests replace stdout."""
    return Console(emoji=False)


def get_error_console() -> Console:
    """Return a console on stderr, for progress and errors."""
    return Console(stderr=True, emoji=False)


def print_line(line: str) -> None:
    """Print a line without wrapping or markup, so that ids can be copied."""
    get_console().print(line.translate(_CONTROLS), markup=False, highlight=False, soft_wrap=True)


def _store_json_flag(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[_JSON_FLAG_KEY] = value
    return value


JSON_OPTION: Any = typer.Option("--json", help="Print JSON instead of text.", callback=_store_json_flag)


def print_json(value: Printable) -> None:
    """Print a JSON document on one line, so that line-based tools can read a stream of documents."""
    from pydantic import BaseModel  # other commands start without it

    if isinstance(value, BaseModel):
        document: Any = value.model_dump(mode="json")
    elif isinstance(value, Mapping):
        document = dict(value)
    else:
        document = [item.model_dump(mode="json") for item in value]
    typer.echo(json.dumps(document, ensure_ascii=False))


def print_schema(model: type[BaseModel]) -> None:
    """Print the JSON schema of a model, indented."""
    schema = {"$schema": "https://json-schema.org/draft/2020-12/schema", **model.model_json_schema()}
    typer.echo(json.dumps(schema, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, empty: str) -> None:
    """Print a table, or the text `empty` if it has no rows."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    cells = [["" if cell is None else str(cell).expandtabs().translate(_CONTROLS) for cell in row] for row in rows]
    console = get_console()
    if not cells:
        console.print(empty)
        return
    widths = _fit_column_widths([columns, *cells], console.width if console.is_terminal else None)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(column, width=width)
    for row in cells:
        table.add_row(*map(escape, row))
    console.width = max(console.width, sum(widths) + _COLUMN_GAP * (len(widths) - 1))
    console.print(table)


def _fit_column_widths(rows: Sequence[Sequence[str]], max_width: int | None) -> list[int]:
    """Return column widths that fit `max_width` characters if line breaks at spaces suffice; ids are never broken.
    Otherwise, and without `max_width` (a pipe), each row is one line.
    """
    by_column = list(zip(*rows, strict=True))
    widths = [max(cell_len(line) for cell in cells for line in cell.splitlines() or [""]) for cells in by_column]
    min_widths = [max(cell_len(word) for cell in cells for word in cell.split() or [""]) for cells in by_column]
    available = sum(widths) if max_width is None else max_width - _COLUMN_GAP * (len(widths) - 1)
    if sum(min_widths) <= available:
        while sum(widths) > available:
            shrinkable = (index for index, width in enumerate(widths) if width > min_widths[index])
            widths[max(shrinkable, key=widths.__getitem__)] -= 1
    return widths


def print_fields(fields: Mapping[str, object]) -> None:
    """Print one `name  value` line per non-empty field, without wrapping."""
    shown = {name: value for name, value in fields.items() if value not in (None, "", {}, [])}
    width = max((len(name) for name in shown), default=0)
    for name, value in shown.items():
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)
        text = escape(text.translate(_CONTROLS))
        get_console().print(f"[bold]{escape(name):<{width}}[/]  {text}", highlight=False, soft_wrap=True)


def print_result(result: Printable, text: str | Mapping[str, object], *, json: bool) -> None:
    """Print a result as JSON, or `text`: a line, or fields by name."""
    if json:
        print_json(result)
    elif isinstance(text, str):
        print_line(text)
    else:
        print_fields(text)


def print_table_result(result: Iterable[BaseModel], columns: Columns, *, empty: str, json: bool) -> None:
    """Print a list as JSON, or as a table with one row per item."""
    if json:
        print_json(result)
    else:
        print_items(result, columns, empty=empty)


def print_items(items: Iterable[Any], columns: Columns, *, empty: str) -> None:
    """Print a table with one row per object or dictionary, or `empty` without any."""
    print_table(
        tuple(columns), [[_format_cell(item, source) for source in columns.values()] for item in items], empty=empty
    )


def _format_cell(item: Any, source: str | Callable[[Any], object]) -> object:
    if callable(source):
        return source(item)
    value = item[source] if isinstance(item, Mapping) else getattr(item, source)
    return _FIELD_FORMATS[source](value) if source in _FIELD_FORMATS else value


def print_deleted(identifier: str, *, json: bool) -> None:
    print_result({"id": identifier, "deleted": True}, f"{identifier} deleted.", json=json)


def format_local_time(seconds: float | None) -> str | None:
    """Format Unix seconds as local time; None stays None."""
    return None if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


_FIELD_FORMATS: dict[str, Callable[[Any], object]] = {
    "created_at": format_local_time,
    "size": format_size,
    "bytes": format_size,
}
"""Formats of fields in tables."""


_STEP_INTERVAL_S = 3.0
"""Seconds between lines of progress if stderr is not a terminal; shorter commands print none."""


@contextmanager
def show_activity(first: str) -> Iterator[Callable[[str], None]]:
    """Show on stderr what a command is doing: a spinner in a terminal, else the newest text every 3 s if it has
    changed. Yields a function that replaces the text."""
    console = get_error_console()
    if console.is_terminal:
        with console.status(escape(first)) as spinner:
            yield lambda text: spinner.update(escape(text))
        return
    done, texts = threading.Event(), [first]

    def print_changes() -> None:
        shown = ""
        while not done.wait(_STEP_INTERVAL_S):
            if texts[-1] != shown:
                shown = texts[-1]
                console.print(shown, markup=False, highlight=False, soft_wrap=True)

    def show(text: str) -> None:
        texts[:] = [text]

    thread = threading.Thread(target=print_changes, daemon=True)
    thread.start()
    try:
        yield show
    finally:
        done.set()
        thread.join()


def configure_logs() -> None:
    """Send structured logs to stderr, and turn off progress bars and warnings of libraries before they are imported."""
    from swiftkv_platform.logs import configure_logging

    configure_logging()
    for name, value in _QUIET_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", module=r"(datasets|deepspeed|huggingface_hub|torch|transformers)\b")


_QUIET_ENVIRONMENT = {
    "DATASETS_VERBOSITY": "error",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_VERBOSITY": "error",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
}
"""Environment variables that silence libraries in this process and its workers."""


@contextmanager
def require_extra(command: str, extra: str = "train", *, alternative: str = "") -> Iterator[None]:
    """Convert a failed import within the context to `InvalidInputError`, whose message has the install command."""
    try:
        yield
    except ModuleNotFoundError as error:
        message = f"{command} needs {error.name}; run {make_install_command(extra)}{alternative}"
        raise InvalidInputError(message) from error


class ErrorReportingGroup(TyperGroup):
    """Prints expected errors (`SwiftKVError`, file errors, wrong usage) on stderr with exit code 1, or
    `GATE_EXIT_CODE`. Others show a traceback."""

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        try:
            return super().make_context(info_name, args, parent=parent, **extra)
        except typer.TyperException as error:
            error.exit_code = 1
            raise

    def invoke(self, ctx: Any) -> Any:
        wants_json = "--json" in ctx.args  # for errors before the option is parsed
        try:
            return super().invoke(ctx)
        except typer.TyperException as error:  # Typer's own exit code of wrong usage is `GATE_EXIT_CODE`
            error.exit_code = 1
            if not (wants_json and error.format_message()):
                raise
            ctx.meta[_JSON_FLAG_KEY] = True
            parameter = getattr(error, "param", None)
            field = None if parameter is None else parameter.name
            raise self._report_error(ctx, InvalidInputError(error.format_message(), field=field)) from error
        except SwiftKVError as error:
            raise self._report_error(ctx, error) from error
        except OSError as error:
            if error.filename is None and error.errno not in _DISK_FULL_ERRNOS:
                raise
            path = "cannot write the output" if error.filename is None else str(error.filename)
            file_error = InvalidInputError(f"{path}: {error.strerror}", field="file", value=error.filename)
            raise self._report_error(ctx, file_error) from error
        except RuntimeError as error:
            if str(error) != _NO_HOME_MESSAGE:
                raise
            home_error = InvalidInputError("cannot expand ~ in a path: no home directory found; use an absolute path")
            raise self._report_error(ctx, home_error) from error
        except KeyboardInterrupt as error:
            get_error_console().print("Interrupted.")
            raise typer.Exit(_INTERRUPTED_EXIT_CODE) from error

    def _report_error(self, ctx: Any, error: SwiftKVError) -> typer.Exit:
        _print_error(error, as_json=bool(ctx.meta.get(_JSON_FLAG_KEY)))
        return typer.Exit(GATE_EXIT_CODE if isinstance(error, QualityGateError) else 1)


def _print_error(error: SwiftKVError, *, as_json: bool) -> None:
    if not as_json:
        get_error_console().print(f"[bold red]Error:[/] {escape(error.message)}", soft_wrap=True, highlight=False)
        return
    from swiftkv_platform.client import APIError

    document: dict[str, Any] = {name: getattr(error, name) for name in ("code", "message", "field", "value")}
    if isinstance(error, APIError):
        document["status"] = error.status
        document["errors"] = [item.model_dump(mode="json") for item in error.errors]
    typer.echo(json.dumps({"error": document}, default=str, ensure_ascii=False), err=True)


def shorten(text: str | None) -> str:
    """Return the beginning of a text on one line."""
    line = " ".join((text or "").split())
    return line if len(line) <= _MAX_CELL_CHARS else f"{line[: _MAX_CELL_CHARS - 1]}…"
