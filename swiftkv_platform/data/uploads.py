"""Check uploaded files: every line of the JSON Lines must be a row that a row format reads. Holds one row in memory at
a time. Knows no store and no tenant.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swiftkv_platform.data.files import parse_line
from swiftkv_platform.data.formats import (
    FORMATS,
    PROMPT_FORMATS,
    Holdings,
    Row,
    content_digest,
    find_format,
    match_format,
)
from swiftkv_platform.data.messages import RowError
from swiftkv_platform.errors import DataError, lone_surrogate
from swiftkv_platform.limits import UPLOAD_ROW_BYTES, UPLOAD_ROW_VALUES
from swiftkv_platform.web.hostile_json import exceeds

LONGEST_ROW = UPLOAD_ROW_BYTES.default
"""Max bytes of a line; rows for a model with a context of a million tokens fit."""
_MOST_VALUES = UPLOAD_ROW_VALUES.default
"""Max JSON values of a row, and max strings; rows have a few per message."""
_MOST_COLUMNS = 64
_LONGEST_COLUMN = 128
_OTHERS = {
    b"\x1f\x8b": "gzip-compressed",
    b"(\xb5/\xfd": "zstd-compressed",
    b"\xfd7zXZ": "xz-compressed",
    b"BZh": "bzip2-compressed",
    b"PK\x03\x04": "a ZIP archive, as .xlsx files are",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
}
"""Kinds of files that are often uploaded instead, by their first bytes."""
_PROMPTS = "prompts"
"""Format name of rows with prompts only, for the teacher to answer."""


@dataclass(frozen=True)
class UploadedRows:
    """Size, digest and format of a checked file."""

    size: int
    """Bytes."""
    sha256: str
    rows: int
    format: str
    """Row format of its first row; `prompts` for rows that the teacher has to answer."""
    columns: tuple[str, ...]
    """Columns of its first row."""


def check_upload(path: Path, name: str, *, field: str, max_rows: int) -> UploadedRows:
    """Check every row of a file.

    Args:
        path: file with the content.
        name: name of the file in messages.
        field: field of the request that messages name.
        max_rows: most rows that are accepted.

    Raises:
        DataError: a row is not an object or no format reads it (with its line), there are no rows or too many, or the
            file is of another kind.
    """
    _check_kind(path, name, field)
    digest, size, rows = hashlib.sha256(), 0, 0
    format_, columns = "", tuple[str, ...]()
    holdings = Holdings(lambda: _rows(path, name, field))
    for number, line in _lines(path, name, field):
        digest.update(line)
        size += len(line)
        if line.isspace():
            continue
        rows += 1
        if rows > max_rows:
            raise DataError(
                f"{field}: {name} has more than {max_rows} rows, which is the limit; use several files",
                field=field,
                value=name,
            )
        row = _parse(line, name, number, field)
        found = _check_row(row, name, number, field, holdings)
        if rows == 1:
            format_, columns = found, tuple(row)
    if not rows:
        raise DataError(f"{field}: {name} has no rows; at least one is needed", field=field, value=name)
    return UploadedRows(size, digest.hexdigest(), rows, format_, columns)


def _check_kind(path: Path, name: str, field: str) -> None:
    with path.open("rb") as stream:
        head = stream.read(8)
    kind = next((kind for magic, kind in _OTHERS.items() if head.startswith(magic)), None)
    if kind is not None:
        message = f"{field}: {name} is {kind}; plain JSON Lines, one object a line, is accepted"
        raise DataError(message, field=field, value=name)


def _lines(path: Path, name: str, field: str) -> Iterator[tuple[int, bytes]]:
    with path.open("rb") as stream:
        number = 0
        while line := stream.readline(LONGEST_ROW + 1):
            number += 1
            if len(line) > LONGEST_ROW:
                raise DataError(
                    f"{field}: {name}, line {number} has more than {LONGEST_ROW} bytes, which is the limit of a row; "
                    "one object a line (JSON Lines) is accepted",
                    field=field,
                    value=f"{name}:{number}",
                )
            yield number, line


def _parse(line: bytes, name: str, number: int, field: str) -> Row:
    """Return the row in a line. Raises as `parse_line`, and for too many values: they are counted before the row is
    parsed, since as objects a text of brackets takes twenty times its length."""
    if len(line) > _MOST_VALUES and exceeds(line, _MOST_VALUES, _MOST_VALUES):
        raise DataError(
            f"{field}: {name}, line {number} has more than {_MOST_VALUES} JSON values or strings, which is the limit "
            "of a row; split it into several rows",
            field=field,
            value=f"{name}:{number}",
        )
    return parse_line(line, name, number, field)


def _rows(path: Path, name: str, field: str) -> Iterator[Row]:
    return (_parse(line, name, number, field) for number, line in _lines(path, name, field) if not line.isspace())


def _check_row(row: Row, name: str, number: int, field: str, holdings: Holdings) -> str:
    """Return the name of the format that reads a row. Raises `DataError`."""
    place = f"{field}: {name}, line {number}"
    if len(row) > _MOST_COLUMNS or any(len(column) > _LONGEST_COLUMN for column in row):
        raise DataError(
            f"{place} has {len(row)} columns; at most {_MOST_COLUMNS}, with names of at most {_LONGEST_COLUMN} "
            "characters, are accepted",
            field=field,
            value=f"{name}:{number}",
        )
    columns = tuple(row)
    unusable = next((each for each in columns if lone_surrogate(each) is not None or "\0" in each), None)
    if unusable is not None:
        raise DataError(
            f"{place} has the column {unusable!a}, which is not valid text; use whole characters other than NUL",
            field=field,
            value=f"{name}:{number}",
        )
    prompts = _are_prompts(columns, holdings)
    try:
        reader = find_format(
            "auto",
            columns,
            origin=f"{name}, line {number},",
            path=field,
            formats=PROMPT_FORMATS if prompts else FORMATS,
            holdings=holdings,
        )
    except DataError as error:
        raise DataError(error.message, field=field, value=error.value) from error
    try:
        content_digest(reader(row))
    except (RowError, RecursionError) as error:  # the latter from describing a deeply nested value
        message = f"{place}, read as {reader.format.name}: {error}"
        raise DataError(message, field=field, value=f"{name}:{number}") from error
    return _PROMPTS if prompts else reader.format.name


def _are_prompts(columns: tuple[str, ...], holdings: Holdings) -> bool:
    """Whether rows with these columns are prompts for the teacher: their columns for answers are missing or empty."""
    whole, prompts = (match_format(columns, formats, holdings) for formats in (FORMATS, PROMPT_FORMATS))
    if whole is None:
        return True
    return not whole[2] and prompts is not None and prompts[2]
