"""Early checks that data sources exist, are not empty and have columns that a row format reads, and checks of every row
of an uploaded file.

Checks of sources read first rows only, within a `ReadBudget`. They report obvious mistakes before a cluster is used;
the worker later reads the same sources in full. Checks of uploads hold one row in memory at a time.
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

from swiftkv_platform.data.evaluation_rows import compile_schema, get_row_formats
from swiftkv_platform.data.files import (
    Row,
    can_read_zstandard,
    find_reader,
    make_file_error,
    make_row_error,
    open_file,
    parse_csv_columns,
    parse_line,
    refuse_duplicate_keys,
)
from swiftkv_platform.data.formats import (
    FORMATS,
    PROMPT_FORMATS,
    NonEmptyColumns,
    RowFormat,
    RowReader,
    find_row_reader,
    hash_content,
    list_unread_columns,
    match_format,
)
from swiftkv_platform.data.messages import RowError
from swiftkv_platform.errors import DataError
from swiftkv_platform.limits import (
    CHECKED_BYTES,
    CHECKED_ENTRIES,
    CHECKED_FILES,
    CHECKED_SECONDS,
    CHECKED_SOURCE_FILES,
    UPLOAD_ROW_BYTES,
    UPLOAD_ROW_VALUES,
)
from swiftkv_platform.sources import UNRESTRICTED, Access, BuiltinSource, FileSource, PathSource, TrafficSource
from swiftkv_platform.sources.cards import check_hub_layout, check_saved_dataset
from swiftkv_platform.sources.layout import (
    ACCEPTED_FILES,
    check_builtin,
    check_single_file,
    check_traffic,
    find_compression,
    find_data_suffix,
    is_hub_layout,
    is_saved_dataset,
    list_source_files,
)
from swiftkv_platform.specs import BUILTIN_DATA, DataSourceSpec, RowTaskSpec
from swiftkv_platform.specs.base import find_lone_surrogate
from swiftkv_platform.web.safe_json import exceeds_limits

_TEXT_COLUMN = "text"
_TEXT_FILE_SUFFIXES = frozenset({".txt", ".py"})
_HEAD_SIZES = (1 << 14, 1 << 17, 1 << 20)
"""Bytes read at the beginning of a JSON or CSV file: more if the first row is longer."""
_MAX_FOOTER_BYTES = 16 << 20
"""Max bytes of a Parquet footer; a longer one is not parsed."""


class _BudgetExceededError(Exception):
    """The message names the exhausted limit."""


@dataclass
class ReadBudget:
    """Remaining reads of one check of sources. The estimate reports the files that it leaves unread."""

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
            raise _BudgetExceededError(f"a check reads no more files after {self.seconds:g} s of CPU time")

    def spend_file(self) -> None:
        self.check_time()
        if not self.num_files:
            raise _BudgetExceededError(f"a check reads at most {CHECKED_FILES.default} files")
        self.num_files -= 1

    def spend_bytes(self, amount: int) -> None:
        if amount > self.num_bytes:
            raise _BudgetExceededError(f"a check reads at most {CHECKED_BYTES.default} bytes of rows")
        self.num_bytes -= amount

    def read_bytes(self, stream: BinaryIO, size: int) -> bytes:
        """Read at most `size` bytes and count them."""
        self.spend_bytes(size)
        data = stream.read(size)
        self.num_bytes += size - len(data)
        return data

    def count_entries(self, directory: Path) -> None:
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
                        raise _BudgetExceededError(
                            f"a check lists at most {CHECKED_ENTRIES.default} entries of directories"
                        )
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
    """Row formats of the first rows of the source's files."""
    unread_columns: tuple[str, ...] = ()
    """Columns of these rows that their formats do not read."""
    not_checked: str | None = None
    """Files whose rows were not read, and why; None if the first row of every file was read, or only workers can read
    the source."""


def check_sources(
    sources: Sequence[DataSourceSpec], access: Access = UNRESTRICTED, budget: ReadBudget | None = None
) -> tuple[SourceEstimate, ...]:
    """Check sources and estimate their size. Raises `DataError` for the first one that cannot be used or read."""
    budget = ReadBudget() if budget is None else budget
    found: list[SourceEstimate] = []
    for index, source in enumerate(sources):
        max_files = max(budget.num_files // (len(sources) - index), 1)  # at least one file of every source
        formats = FORMATS if source.complete is None else PROMPT_FORMATS
        found.append(_SourceCheck(source, f"data.sources[{index}]", access, budget, max_files, formats).estimate())
    return tuple(found)


def check_row_sources(tasks: Sequence[RowTaskSpec], access: Access = UNRESTRICTED) -> None:
    """Check the sources and schemas of own rows to evaluate. Raises `DataError` for the first one that cannot be
    used."""
    budget = ReadBudget()
    for index, task in enumerate(tasks):
        field = f"evaluation.rows[{index}]"
        if task.json_schema is not None:
            try:
                compile_schema(task.json_schema)
            except RowError as error:
                raise DataError(f"{field}.json_schema: {error}", field=f"{field}.json_schema") from error
        max_files = max(budget.num_files // (len(tasks) - index), 1)
        _SourceCheck(task.source, f"{field}.source", access, budget, max_files, get_row_formats(task)).estimate()


@dataclass(frozen=True)
class _SourceCheck:
    """Check of one source. Every method raises `DataError` for an unusable source."""

    source: DataSourceSpec
    source_field: str
    access: Access
    budget: ReadBudget
    max_files: int
    formats: Sequence[RowFormat]

    @property
    def field(self) -> str:
        return f"{self.source_field}.name_or_path"

    def estimate(self) -> SourceEstimate:
        name = self.source.name_or_path
        match self.access.parse_data(name, self.field):
            case BuiltinSource():
                check_builtin(self.source, self.source_field)
                return SourceEstimate(name, formats=("text" if name == BUILTIN_DATA else "prompt_completion",))
            case FileSource():
                assert self.access.files is not None, "`Access` refuses files without an entry"
                check_single_file(self.source, self.source_field)
                stored = self.access.files[name]
                reader = self._find_reader(stored.columns, "it")
                return SourceEstimate(
                    name,
                    num_files=1,
                    num_bytes=stored.size,
                    formats=(reader.format.name,),
                    unread_columns=reader.unread_columns,
                )
            case TrafficSource(deployment_id=deployment_id):
                return self._estimate_traffic(deployment_id)
            case PathSource(path=path):
                try:
                    return self._estimate_path(self.access.boundary.check_path(path, self.field))
                except _BudgetExceededError as spent:
                    return SourceEstimate(name, not_checked=f"none of its files were read: {spent}")
                except OSError as error:  # it may exist, but not for this user
                    raise self._make_error(f"it cannot be read ({error.strerror})") from error
            case _:
                return SourceEstimate(name)

    def _estimate_traffic(self, deployment_id: str) -> SourceEstimate:
        """Return the bytes of the parts that may have requests of the window."""
        check_traffic(self.source, self.source_field)
        assert self.access.traffic is not None, "`Access` refuses captured traffic without an entry"
        traffic = self.access.traffic[deployment_id]
        size = traffic.window_sizes[self.source.window]
        if not size:
            window = f"from {self.source.since or 'the beginning'} until {self.source.until}"
            days = f"days with requests: {', '.join(traffic.days)}"
            hint = days if traffic.days else "none is captured; set `capture` of the deployment, and send requests"
            raise self._make_error(f"it has no captured requests {window}; {hint}")
        return SourceEstimate(self.source.name_or_path, num_bytes=size)

    def _estimate_path(self, path: Path) -> SourceEstimate:
        name = self.source.name_or_path
        # 1. check the path, and directories that `datasets` reads
        if not path.exists():
            raise self._make_error("no such file or directory")
        self.budget.check_time()
        if path.is_dir():
            self.budget.count_entries(path)
            self.access.boundary.check_tree(path, self.field)
            if is_saved_dataset(path) or is_hub_layout(path):
                if self.access.is_restricted:
                    (check_saved_dataset if is_saved_dataset(path) else check_hub_layout)(path, self.field)
                return SourceEstimate(name)
        # 2. select the files of the split
        files = list_source_files(path, self.source, self.source_field)
        found = [file for file in files if find_data_suffix(file.name) is not None]
        if not found:
            raise self._make_error(f"it has no file in a known format; {ACCEPTED_FILES}")
        filled = [file for file in found if file.stat().st_size]
        if not filled:
            raise self._make_error("it is empty; at least one row is needed")
        # 3. match the formats of their first rows
        readers, not_checked = self._find_readers(filled)
        return SourceEstimate(
            name,
            num_files=len(filled),
            num_bytes=sum(file.stat().st_size for file in filled),
            formats=tuple(dict.fromkeys(reader.format.name for reader in readers)),
            unread_columns=list_unread_columns(column for reader in readers for column in reader.unread_columns),
            not_checked=not_checked,
        )

    def _find_readers(self, files: Sequence[Path]) -> tuple[list[RowReader], str | None]:
        """Return (readers of the files' first rows, description of unread files or None)."""
        limit, readers = min(self.max_files, CHECKED_SOURCE_FILES.default), list[RowReader]()
        for index, file in enumerate(files[:limit]):
            try:
                found = self._find_file_reader(file)
            except _BudgetExceededError as spent:
                return readers, _describe_unread_files(files, index, str(spent))
            if found is not None:
                readers.append(found)
        if len(files) <= limit:
            return readers, None
        limits = f"{CHECKED_SOURCE_FILES.default} files of a source and {CHECKED_FILES.default} in total"
        return readers, _describe_unread_files(files, limit, f"a check reads at most {limits}")

    def _find_file_reader(self, file: Path) -> RowReader | None:
        """Return the reader of the file's first row, which is parsed if it is JSON; None if its columns cannot be read
        here."""
        kind = find_data_suffix(file.name)
        if kind in _TEXT_FILE_SUFFIXES:
            return self._find_reader((_TEXT_COLUMN,), file.name)
        self.budget.spend_file()
        if _is_reader_missing(file):
            return None
        if kind in (".csv", ".tsv", ".parquet"):
            columns = self._read_parquet_columns(file) if kind == ".parquet" else self._read_csv_columns(file)
            return None if columns is None else self._find_reader(columns, file.name)
        row = self._read_first_json_row(file)
        if row is None:
            return None
        reader = self._find_reader(row, file.name, NonEmptyColumns(lambda: iter([row])))
        try:
            reader(row)
        except RowError as error:
            raise self._make_error(f"the first row of {file.name}, read as {reader.format.name}: {error}") from error
        return reader

    def _find_reader(
        self, columns: Collection[str], origin: str, non_empty: NonEmptyColumns | None = None
    ) -> RowReader:
        return find_row_reader(
            self.source.format,
            tuple(columns),
            origin=f"{self.source.name_or_path}: {origin}",
            source_field=self.field,
            formats=self.formats,
            non_empty=non_empty,
            field=self.field,
            value=self.source.name_or_path,
        )

    def _read_first_json_row(self, file: Path) -> Row | None:
        """Return the first row; None if there is none, or if it is longer than the last of `_HEAD_SIZES`."""
        for head, is_whole in self._read_heads(file):
            # The last character may be cut in two.
            text = head.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n").removeprefix("[").lstrip()
            if is_whole and text.rstrip() in {"", "]"}:  # without rows; other files may have some
                return None
            try:
                row, _ = json.JSONDecoder(object_pairs_hook=refuse_duplicate_keys).raw_decode(text)
            except (ValueError, RecursionError) as error:
                if is_whole:
                    raise self._make_error(f"the first row of {file.name} is not JSON ({error})") from error
                continue
            if not isinstance(row, dict):
                raise self._make_error(f"the first row of {file.name} is not an object with columns")
            return row
        return None

    def _read_csv_columns(self, file: Path) -> Collection[str] | None:
        """Return the columns in the first line; None if it is longer than the last of `_HEAD_SIZES`."""
        heads = (head for head, is_whole in self._read_heads(file) if is_whole or b"\n" in head)
        return next((parse_csv_columns(BytesIO(head), file, self.field) for head in heads), None)

    def _read_heads(self, file: Path) -> Iterator[tuple[bytes, bool]]:
        """Yield (first bytes of the file, whether they are the whole file), with more bytes each time."""
        head = b""
        with open_file(file, self.field) as stream:
            for size in _HEAD_SIZES:
                head += self.budget.read_bytes(stream, size - len(head))
                yield head, len(head) < size
                if len(head) < size:
                    return

    def _read_parquet_columns(self, file: Path) -> Collection[str] | None:
        """Return the columns of every row; None if the footer, which lists them, exceeds `_MAX_FOOTER_BYTES`."""
        size = _read_footer_size(file)
        if _MAX_FOOTER_BYTES < size <= file.stat().st_size:
            return None
        self.budget.spend_bytes(min(size, file.stat().st_size))
        reader = find_reader(file, self.field)
        assert reader is not None, "only files with a reader get here"
        return reader.read_columns(file, self.field)

    def _make_error(self, why: str) -> DataError:
        return DataError.for_field(self.field, self.source.name_or_path, f": {why}")


def _describe_unread_files(files: Sequence[Path], num_read: int, why: str) -> str:
    return f"the rows of {len(files) - num_read} of {len(files)} files were not read: {why}"


def _is_reader_missing(file: Path) -> bool:
    """Whether the package that reads the file is not installed, as in the control plane's image."""
    if find_compression(file.name) == ".zst":
        return not can_read_zstandard()
    return find_data_suffix(file.name) == ".parquet" and find_spec("pyarrow") is None


def _read_footer_size(file: Path) -> int:
    with file.open("rb") as stream:
        stream.seek(-min(8, file.stat().st_size), os.SEEK_END)
        return int.from_bytes(stream.read(4), "little")


MAX_ROW_BYTES = UPLOAD_ROW_BYTES.default
"""Max bytes of a line; rows for a model with a context of a million tokens fit."""
_MAX_ROW_VALUES = UPLOAD_ROW_VALUES.default
"""Max JSON values of a row, and max strings; rows have a few per message."""
_MAX_COLUMNS = 64
_MAX_COLUMN_NAME_LENGTH = 128
_UNSUPPORTED_UPLOADS = {
    b"\x1f\x8b": "gzip-compressed",
    b"(\xb5/\xfd": "zstd-compressed",
    b"\xfd7zXZ": "xz-compressed",
    b"BZh": "bzip2-compressed",
    b"PK\x03\x04": "a ZIP archive, as .xlsx files are",
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
}
"""Kinds of unsupported uploads by their first bytes."""
_PROMPTS_FORMAT = "prompts"
"""Format name of rows with prompts only, which the teacher completes."""


@dataclass(frozen=True)
class UploadedRows:
    """Size, digest and format of a checked file."""

    size: int
    sha256: str
    rows: int
    format: str
    """Format of the file's first row; `prompts` for rows that the teacher completes."""
    columns: tuple[str, ...]


def check_upload(path: Path, name: str, *, field: str, max_rows: int) -> UploadedRows:
    """Check every row of the file at `path`, which messages call `name`. Raises `DataError` if a row is not an object
    or no format reads it (with its line), for no rows or too many, and for a file of another kind."""
    _check_file_signature(path, name, field)
    rows, format_, columns = 0, "", tuple[str, ...]()
    non_empty = NonEmptyColumns(lambda: (row for _, row in _read_rows(path, name, field)))
    for rows, (number, row) in enumerate(_read_rows(path, name, field), start=1):
        if rows > max_rows:
            raise make_file_error(field, name, f"has more than {max_rows} rows, which is the limit; use several files")
        found = _check_row(row, name, number, field, non_empty)
        if rows == 1:
            format_, columns = found, tuple(row)
    if not rows:
        raise make_file_error(field, name, "has no rows; at least one is needed")
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return UploadedRows(path.stat().st_size, digest, rows, format_, columns)


def _check_file_signature(path: Path, name: str, field: str) -> None:
    with path.open("rb") as stream:
        head = stream.read(8)
    kind = next((kind for magic, kind in _UNSUPPORTED_UPLOADS.items() if head.startswith(magic)), None)
    if kind is not None:
        raise make_file_error(field, name, f"is {kind}; plain JSON Lines, one object a line, is accepted")


def _read_rows(path: Path, name: str, field: str) -> Iterator[tuple[int, Row]]:
    """Yield (line number, row). Raises as `parse_line`, and for long lines and too many values:
    they are counted before a row is parsed, since as objects a text of brackets takes twenty times its length."""
    with path.open("rb") as stream:
        number = 0
        while line := stream.readline(MAX_ROW_BYTES + 1):
            number += 1
            if len(line) > MAX_ROW_BYTES:
                why = f" has more than {MAX_ROW_BYTES} bytes, which is the limit of a row"
                raise make_row_error(field, name, number, f"{why}; one object a line (JSON Lines) is accepted")
            if len(line) > _MAX_ROW_VALUES and exceeds_limits(line, _MAX_ROW_VALUES, _MAX_ROW_VALUES):
                why = f" has more than {_MAX_ROW_VALUES} JSON values or strings, which is the limit of a row"
                raise make_row_error(field, name, number, f"{why}; split it into several rows")
            if not line.isspace():
                yield number, parse_line(line, name, number, field)


def _check_row(row: Row, name: str, number: int, field: str, non_empty: NonEmptyColumns) -> str:
    if len(row) > _MAX_COLUMNS or any(len(column) > _MAX_COLUMN_NAME_LENGTH for column in row):
        accepted = f"at most {_MAX_COLUMNS}, with names of at most {_MAX_COLUMN_NAME_LENGTH} characters, are accepted"
        raise make_row_error(field, name, number, f" has {len(row)} columns; {accepted}")
    columns = tuple(row)
    unusable = next((each for each in columns if find_lone_surrogate(each) is not None or "\0" in each), None)
    if unusable is not None:
        why = f" has the column {unusable!a}, which is not valid text; use whole characters other than NUL"
        raise make_row_error(field, name, number, why)
    prompts = _has_only_prompts(columns, non_empty)
    formats = PROMPT_FORMATS if prompts else FORMATS
    origin = f"{name}, line {number},"
    reader = find_row_reader(
        "auto", columns, origin=origin, source_field=field, formats=formats, non_empty=non_empty, field=field
    )
    try:
        hash_content(reader(row))
    except (RowError, RecursionError) as error:  # the latter from describing a deeply nested value
        raise make_row_error(field, name, number, f", read as {reader.format.name}: {error}") from error
    return _PROMPTS_FORMAT if prompts else reader.format.name


def _has_only_prompts(columns: tuple[str, ...], non_empty: NonEmptyColumns) -> bool:
    """Whether rows with these columns are prompts for the teacher: their completion columns are missing or empty."""
    whole, prompts = (match_format(columns, formats, non_empty) for formats in (FORMATS, PROMPT_FORMATS))
    if whole is None:
        return True
    return not whole[2] and prompts is not None and prompts[2]
