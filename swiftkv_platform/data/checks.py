"""Early checks that data sources exist, are not empty and have columns that a row format reads, and checks of every row
of an uploaded file.

Checks of sources read first rows only, within the bounds of a `Budget`. They report obvious mistakes before a cluster
is used; the worker reads the same sources in full and decides. Checks of uploads hold one row in memory at a time.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from swiftkv_platform.data.files import (
    Row,
    bad_file,
    bad_row,
    csv_columns,
    opened,
    parse_line,
    reader_for,
    reads_zstandard,
)
from swiftkv_platform.data.formats import (
    FORMATS,
    PROMPT_FORMATS,
    Holdings,
    content_digest,
    describe_mismatch,
    find_format,
    match_format,
)
from swiftkv_platform.data.messages import RowError
from swiftkv_platform.errors import DataError, find_lone_surrogate
from swiftkv_platform.limits import (
    CHECKED_BYTES,
    CHECKED_ENTRIES,
    CHECKED_FILES,
    CHECKED_SECONDS,
    CHECKED_SOURCE_FILES,
    UPLOAD_ROW_BYTES,
    UPLOAD_ROW_VALUES,
)
from swiftkv_platform.sources import OPEN, Access, BuiltinSource, FileSource, PathSource
from swiftkv_platform.sources.cards import check_laid_out, check_saved
from swiftkv_platform.sources.layout import (
    ACCEPTED,
    check_builtin,
    check_whole,
    compression_of,
    is_hub_layout,
    is_saved_dataset,
    kind_of,
    source_files,
)
from swiftkv_platform.specs import BUILTIN_DATA, DataSourceSpec
from swiftkv_platform.web.safe_json import exceeds_limits

_TEXT = "text"
_TEXT_FILES = frozenset({".txt", ".py"})
_HEAD_BYTES = (1 << 14, 1 << 17, 1 << 20)
"""Bytes read at the beginning of a JSON or CSV file: more if the first row is longer."""
_FOOTER_BYTES = 16 << 20
"""Longest footer of a Parquet file that is parsed, in bytes."""


class _SpentError(Exception):
    """Tells which bound of a budget is reached."""


@dataclass
class Budget:
    """Amounts that one check of sources may still read. The estimate names the files that are not checked for it."""

    num_files: int = CHECKED_FILES.default
    """Files whose first rows are read."""
    num_bytes: int = CHECKED_BYTES.default
    """Decompressed bytes of rows."""
    num_entries: int = CHECKED_ENTRIES.default
    """Entries of directories."""
    seconds: float = CHECKED_SECONDS.default
    """CPU time of this thread."""

    def __post_init__(self) -> None:
        self._end = time.thread_time() + self.seconds

    def check_time(self) -> None:
        if time.thread_time() > self._end:
            raise _SpentError(f"a check reads no more files after {self.seconds:g} s of CPU time")

    def take_file(self) -> None:
        self.check_time()
        if not self.num_files:
            raise _SpentError(f"a check reads at most {CHECKED_FILES.default} files")
        self.num_files -= 1

    def take_bytes(self, amount: int) -> None:
        if amount > self.num_bytes:
            raise _SpentError(f"a check reads at most {CHECKED_BYTES.default} bytes of rows")
        self.num_bytes -= amount

    def read(self, stream: BinaryIO, size: int) -> bytes:
        """Read at most `size` bytes and count them."""
        self.take_bytes(size)
        data = stream.read(size)
        self.num_bytes += size - len(data)
        return data

    def take_entries(self, directory: Path) -> None:
        """Count all entries below a directory. Links to directories are followed once."""
        pending, seen = [directory], set[str]()
        while pending:
            real = os.path.realpath(pending.pop())
            if real in seen:
                continue
            seen.add(real)
            self.check_time()
            with os.scandir(real) as entries:
                for entry in entries:
                    if not self.num_entries:
                        raise _SpentError(f"a check lists at most {CHECKED_ENTRIES.default} entries of directories")
                    self.num_entries -= 1
                    if entry.is_dir():
                        pending.append(Path(entry.path))


@dataclass(frozen=True)
class SourceEstimate:
    """Size and formats of a data source, as far as known; None for a source that is not on this machine."""

    name_or_path: str
    num_files: int | None = None
    num_bytes: int | None = None
    formats: tuple[str, ...] = ()
    """Row formats of the first rows of its files."""
    not_checked: str | None = None
    """Files whose rows were not read, and why; None if the first row of every file was read, or only workers can read
    the source."""


def check_sources(
    sources: Sequence[DataSourceSpec], access: Access = OPEN, budget: Budget | None = None
) -> tuple[SourceEstimate, ...]:
    """Check sources and estimate their size. Raises `DataError` for the first one that cannot be used or read."""
    budget = Budget() if budget is None else budget
    found: list[SourceEstimate] = []
    for index, source in enumerate(sources):
        share = max(budget.num_files // (len(sources) - index), 1)  # at least one file of every source
        found.append(_check_source(source, f"data.sources[{index}]", access, budget, share))
    return tuple(found)


def _check_source(
    source: DataSourceSpec, where: str, access: Access, budget: Budget, most_files: int
) -> SourceEstimate:
    name, field = source.name_or_path, f"{where}.name_or_path"
    match access.data(name, field):
        case BuiltinSource():
            check_builtin(source, where)
            return SourceEstimate(name, formats=("text" if name == BUILTIN_DATA else "prompt_completion",))
        case FileSource():
            assert access.files is not None, "a file without an entry there is refused by `Access.data`"
            check_whole(source, where)
            stored = access.files[name]
            found = _format_of(stored.columns, "it", source, where)
            return SourceEstimate(name, num_files=1, num_bytes=stored.size, formats=(found,))
        case PathSource(path=path):
            try:
                real = access.boundary.check(path, field)
                return _check_path(real, source, where, access, budget, most_files)
            except _SpentError as spent:
                return SourceEstimate(name, not_checked=f"none of its files were read: {spent}")
            except OSError as error:  # it may exist, but not for this user
                raise _unusable(where, name, f"it cannot be read ({error.strerror})") from error
        case _:
            return SourceEstimate(name)


def _check_path(
    path: Path, source: DataSourceSpec, where: str, access: Access, budget: Budget, most_files: int
) -> SourceEstimate:
    name, field = source.name_or_path, f"{where}.name_or_path"
    if not path.exists():
        raise _unusable(where, name, "no such file or directory")
    budget.check_time()
    if path.is_dir():
        budget.take_entries(path)
        access.boundary.check_tree(path, field)
        if is_saved_dataset(path) or is_hub_layout(path):
            if access.is_restricted:
                (check_saved if is_saved_dataset(path) else check_laid_out)(path, field)
            return SourceEstimate(name)
    found = [file for file in source_files(path, source, where) if kind_of(file.name) is not None]
    if not found:
        raise _unusable(where, name, f"it has no file in a known format; {ACCEPTED}")
    filled = [file for file in found if file.stat().st_size]
    if not filled:
        raise _unusable(where, name, "it is empty; at least one row is needed")
    formats, not_checked = _find_formats(filled, source, where, budget, most_files)
    return SourceEstimate(
        name,
        num_files=len(filled),
        num_bytes=sum(file.stat().st_size for file in filled),
        formats=tuple(dict.fromkeys(formats)),
        not_checked=not_checked,
    )


def _find_formats(
    files: Sequence[Path], source: DataSourceSpec, where: str, budget: Budget, most_files: int
) -> tuple[list[str], str | None]:
    """Return the row formats of the files' first rows, and which files were not read."""
    most = min(most_files, CHECKED_SOURCE_FILES.default)
    formats: list[str] = []
    for index, file in enumerate(files[:most]):
        try:
            found = _find_format(file, source, where, budget)
        except _SpentError as spent:
            return formats, _not_checked(files, index, str(spent))
        if found is not None:
            formats.append(found)
    if len(files) <= most:
        return formats, None
    why = f"a check reads at most {CHECKED_SOURCE_FILES.default} files of a source and {CHECKED_FILES.default} in total"
    return formats, _not_checked(files, most, why)


def _not_checked(files: Sequence[Path], num_read: int, why: str) -> str:
    return f"the rows of {len(files) - num_read} of {len(files)} files were not read: {why}"


def _find_format(file: Path, source: DataSourceSpec, where: str, budget: Budget) -> str | None:
    """Return the row format of the file's first row; None if its columns cannot be read here."""
    kind = kind_of(file.name)
    if kind in _TEXT_FILES:
        return _TEXT
    budget.take_file()
    if _is_closed(file):
        return None
    if kind in (".csv", ".tsv", ".parquet"):
        columns = (_parquet_columns if kind == ".parquet" else _csv_columns)(file, f"{where}.name_or_path", budget)
        return None if columns is None else _format_of(columns, file.name, source, where)
    row = _json_row(file, source, where, budget)
    return None if row is None else _format_of(row, file.name, source, where, Holdings(lambda: iter([row])))


def _format_of(
    columns: Collection[str], origin: str, source: DataSourceSpec, where: str, holdings: Holdings | None = None
) -> str:
    """Return the name of the row format that reads these columns. Raises `DataError`."""
    formats = FORMATS if source.complete is None else PROMPT_FORMATS
    wanted = [each for each in formats if source.format in ("auto", each.name)]
    matched = match_format(columns, wanted, holdings)
    if matched is None:
        raise _unusable(where, source.name_or_path, describe_mismatch(origin, columns, wanted))
    return matched[0].name


def _json_row(file: Path, source: DataSourceSpec, where: str, budget: Budget) -> Row | None:
    """Return the first row; None if there is none, or if it is longer than the last of `_HEAD_BYTES`."""
    for head, is_whole in _heads(file, f"{where}.name_or_path", budget):
        # The last character may be cut in two.
        text = head.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n").removeprefix("[").lstrip()
        if is_whole and text.rstrip() in {"", "]"}:  # without rows; other files may have some
            return None
        try:
            row, _ = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError) as error:
            if is_whole:
                why = f"the first row of {file.name} is not JSON ({error})"
                raise _unusable(where, source.name_or_path, why) from error
            continue
        if not isinstance(row, dict):
            raise _unusable(where, source.name_or_path, f"the first row of {file.name} is not an object with columns")
        return row
    return None


def _csv_columns(file: Path, field: str, budget: Budget) -> Collection[str] | None:
    """Return the columns that the first line names; None if it is longer than the last of `_HEAD_BYTES`."""
    return next(
        (
            csv_columns(BytesIO(head), file, field)
            for head, is_whole in _heads(file, field, budget)
            if is_whole or b"\n" in head
        ),
        None,
    )


def _heads(file: Path, field: str, budget: Budget) -> Iterator[tuple[bytes, bool]]:
    """Yield the first bytes of a file, more each time, and whether they are the whole file."""
    head = b""
    with opened(file, field) as stream:
        for size in _HEAD_BYTES:
            head += budget.read(stream, size - len(head))
            yield head, len(head) < size
            if len(head) < size:
                return


def _parquet_columns(file: Path, field: str, budget: Budget) -> Collection[str] | None:
    """Return the columns of every row; None if the footer, which lists them, is longer than `_FOOTER_BYTES`."""
    size = _footer_bytes(file)
    if _FOOTER_BYTES < size <= file.stat().st_size:
        return None
    budget.take_bytes(min(size, file.stat().st_size))
    reader = reader_for(file, field)
    assert reader is not None, "only files with a reader are looked at"
    return reader.columns(file, field)


def _is_closed(file: Path) -> bool:
    """Whether no installed package reads the file, as in the control plane's image."""
    if compression_of(file.name) == ".zst":
        return not reads_zstandard()
    return kind_of(file.name) == ".parquet" and find_spec("pyarrow") is None


def _footer_bytes(file: Path) -> int:
    """Return the footer length in bytes recorded at the end of a Parquet file."""
    with file.open("rb") as stream:
        stream.seek(-min(8, file.stat().st_size), os.SEEK_END)
        return int.from_bytes(stream.read(4), "little")


def _unusable(where: str, name: str, why: str) -> DataError:
    return DataError.for_field(f"{where}.name_or_path", name, f": {why}")


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
    """Check every row of the file at `path`, which messages call `name`. Raises `DataError` if a row is not an object
    or no format reads it (with its line), for no rows or too many, and for a file of another kind."""
    _check_kind(path, name, field)
    rows, format_, columns = 0, "", tuple[str, ...]()
    holdings = Holdings(lambda: (row for _, row in _rows(path, name, field)))
    for rows, (number, row) in enumerate(_rows(path, name, field), start=1):
        if rows > max_rows:
            raise bad_file(field, name, f"has more than {max_rows} rows, which is the limit; use several files")
        found = _check_row(row, name, number, field, holdings)
        if rows == 1:
            format_, columns = found, tuple(row)
    if not rows:
        raise bad_file(field, name, "has no rows; at least one is needed")
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return UploadedRows(path.stat().st_size, digest, rows, format_, columns)


def _check_kind(path: Path, name: str, field: str) -> None:
    with path.open("rb") as stream:
        head = stream.read(8)
    kind = next((kind for magic, kind in _OTHERS.items() if head.startswith(magic)), None)
    if kind is not None:
        raise bad_file(field, name, f"is {kind}; plain JSON Lines, one object a line, is accepted")


def _rows(path: Path, name: str, field: str) -> Iterator[tuple[int, Row]]:
    """Yield the rows, each with the number of its line. Raises as `parse_line`, and for long lines and too many values:
    they are counted before a row is parsed, since as objects a text of brackets takes twenty times its length."""
    with path.open("rb") as stream:
        number = 0
        while line := stream.readline(LONGEST_ROW + 1):
            number += 1
            if len(line) > LONGEST_ROW:
                why = f" has more than {LONGEST_ROW} bytes, which is the limit of a row"
                raise bad_row(field, name, number, f"{why}; one object a line (JSON Lines) is accepted")
            if len(line) > _MOST_VALUES and exceeds_limits(line, _MOST_VALUES, _MOST_VALUES):
                why = f" has more than {_MOST_VALUES} JSON values or strings, which is the limit of a row"
                raise bad_row(field, name, number, f"{why}; split it into several rows")
            if not line.isspace():
                yield number, parse_line(line, name, number, field)


def _check_row(row: Row, name: str, number: int, field: str, holdings: Holdings) -> str:
    """Return the name of the format that reads a row. Raises `DataError`."""
    if len(row) > _MOST_COLUMNS or any(len(column) > _LONGEST_COLUMN for column in row):
        accepted = f"at most {_MOST_COLUMNS}, with names of at most {_LONGEST_COLUMN} characters, are accepted"
        raise bad_row(field, name, number, f" has {len(row)} columns; {accepted}")
    columns = tuple(row)
    unusable = next((each for each in columns if find_lone_surrogate(each) is not None or "\0" in each), None)
    if unusable is not None:
        why = f" has the column {unusable!a}, which is not valid text; use whole characters other than NUL"
        raise bad_row(field, name, number, why)
    prompts = _are_prompts(columns, holdings)
    formats = PROMPT_FORMATS if prompts else FORMATS
    origin = f"{name}, line {number},"
    reader = find_format("auto", columns, origin=origin, path=field, formats=formats, holdings=holdings, field=field)
    try:
        content_digest(reader(row))
    except (RowError, RecursionError) as error:  # the latter from describing a deeply nested value
        raise bad_row(field, name, number, f", read as {reader.format.name}: {error}") from error
    return _PROMPTS if prompts else reader.format.name


def _are_prompts(columns: tuple[str, ...], holdings: Holdings) -> bool:
    """Whether rows with these columns are prompts for the teacher: their columns for answers are missing or empty."""
    whole, prompts = (match_format(columns, formats, holdings) for formats in (FORMATS, PROMPT_FORMATS))
    if whole is None:
        return True
    return not whole[2] and prompts is not None and prompts[2]
