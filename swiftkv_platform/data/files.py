"""Tables of rows, and streaming readers of local files: JSON Lines, JSON arrays, CSV, Parquet and plain text,
compressed or not. Zstandard requires an optional package. No reader holds a whole file in memory.
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import io
import json
import lzma
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from swiftkv_platform.errors import DataError
from swiftkv_platform.sources.layout import find_compression, find_data_suffix


@contextmanager
def open_file(file: Path, field: str) -> Iterator[BinaryIO]:
    """Open a file for reading. Raises `DataError`, on opening or within the context, if the file cannot be read or
    decompressed."""
    compression = find_compression(file.name)
    if compression == ".zst" and not can_read_zstandard():
        why = "is compressed with Zstandard, but no reader is installed; install zstandard, or decompress it (zstd -d)"
        raise make_file_error(field, file, why)
    try:
        with _OPEN[compression](file) as stream:
            yield stream
    except _list_damage_errors() as error:
        how = "cannot be read" if compression is None else f"cannot be decompressed as {compression}"
        raise make_file_error(field, file, f"{how}: {str(error) or type(error).__name__}") from error


def make_file_error(field: str, file: Path | str, why: str) -> DataError:
    return DataError(f"{field}: {file} {why}", field=field, value=str(file))


def make_row_error(field: str, file: Path | str, number: int, why: str, *, unit: str = "line") -> DataError:
    """Return the error for line or row `number` of a file; `why` brings its own punctuation."""
    return DataError(f"{field}: {file}, {unit} {number}{why}", field=field, value=f"{file}:{number}")


def can_read_zstandard() -> bool:
    """Whether a package that reads Zstandard is installed: `zstandard`, or `pyarrow`."""
    return any(find_spec(package) is not None for package in ("zstandard", "pyarrow"))


def _open_zstandard(file: Path) -> Any:
    if find_spec("zstandard") is None:
        return io.BufferedReader(import_module("pyarrow").input_stream(str(file), compression="zstd"))
    decompressor = import_module("zstandard").ZstdDecompressor()
    return io.BufferedReader(decompressor.stream_reader(file.open("rb"), read_across_frames=True))


def _list_damage_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that readers raise for damaged files."""
    package = sys.modules.get("zstandard")
    known = OSError, EOFError, lzma.LZMAError, zlib.error
    return known if package is None else (*known, package.ZstdError)


_OPEN: dict[str | None, Callable[[Path], Any]] = {
    None: lambda file: file.open("rb"),
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
}


Row = dict[str, Any]
NumberedRow = tuple[int, Row]
"""(line or row number in the file from 1, row)"""


@dataclass(frozen=True)
class Table:
    """Rows of one origin, read from the beginning each time, in the same order."""

    origin: str
    """Name of the origin in messages: a hub id, or a file."""
    columns: tuple[str, ...] | None
    """Columns of every row; None if each row has its own columns."""
    read_rows: Callable[[Sequence[str] | None], Iterator[NumberedRow]]
    """(columns, or None for all) -> the rows with these columns."""
    count_rows: Callable[[], int]
    """Return the number of rows; not called for a streamed source."""
    unit: str = "row"
    """Unit of row numbers: `line` or `row`."""
    held_out: bool | None = None
    """Whether the source holds these rows out; None: `validation_fraction` decides."""


MAX_DOCUMENT_CHARACTERS = 1 << 24
"""A text file longer than this becomes several documents, cut at line ends."""
_BYTES_PER_READ = 1 << 20
_MAX_ELEMENT_LENGTH = 1 << 26
"""Max characters of an element of a JSON array; a longer one is treated as damage."""
_MAX_LINE_LENGTH = 1 << 26
"""Max bytes of a line; a longer one is treated as damage, such as an archive that decompresses endlessly."""
_ROWS_PER_BATCH = 512
_JSON_WHITESPACE = " \t\r\n"
_CSV_DELIMITERS = {".csv": ",;\t|", ".tsv": "\t"}
"""Possible cell delimiters by file suffix."""


@dataclass(frozen=True)
class FileReader:
    """Reader of files of one kind. Every function raises `DataError` about `field`, with file and line."""

    unit: str
    """Unit of row numbers: `line` or `row`."""
    read_rows: Callable[[Path, Sequence[str] | None, str], Iterator[NumberedRow]]
    """(file, columns or None for all, field) -> rows"""
    count_rows: Callable[[Path, str], int]
    read_columns: Callable[[Path, str], tuple[str, ...] | None]
    """Function: (file, field) -> columns of every row, or None if each row has its own columns."""


def find_reader(file: Path, field: str) -> FileReader | None:
    """Return the reader for a file by its suffix, and for JSON by its first character; None for other files. Raises
    `DataError` if the file cannot be read or decompressed."""
    reader = READERS.get(find_data_suffix(file.name) or "")
    if reader is _JSON_LINES and _is_json_array(file, field):
        return _JSON_ARRAY
    return reader


def _is_json_array(file: Path, field: str) -> bool:
    with open_file(file, field) as stream:
        return stream.read(1024).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _read_lines(file: Path, field: str) -> Iterator[tuple[int, bytes]]:
    """Yield (line number, line) of non-blank lines."""
    with open_file(file, field) as stream:
        number = 0
        while line := stream.readline(_MAX_LINE_LENGTH + 1):
            number += 1
            if len(line) > _MAX_LINE_LENGTH:
                raise _make_json_error(file, number, 1, f"the line is longer than {_MAX_LINE_LENGTH} bytes", field)
            if not line.isspace():
                yield number, line


def _read_json_lines(file: Path, _columns: Sequence[str] | None, field: str) -> Iterator[NumberedRow]:
    for number, line in _read_lines(file, field):
        yield number, parse_line(line, file, number, field)


def refuse_duplicate_keys(pairs: list[tuple[str, Any]]) -> Row:
    """Return an object of JSON. Raises `ValueError` for a key that it has twice, of which Python would use the last
    and other readers the first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        key = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"an object has the key {key!r} more than once; use each key once")
    return found


def parse_line(line: bytes, file: Path | str, number: int, field: str) -> Row:
    """Return the row in line `number`, from 1, of JSON Lines. Raises `DataError`, which names `file`."""
    try:
        row = json.loads(
            line.rstrip().removeprefix(codecs.BOM_UTF8).decode("utf-8"), object_pairs_hook=refuse_duplicate_keys
        )
    except UnicodeDecodeError as error:
        raise _make_encoding_error(file, number, error.start, error.reason, field) from error
    except json.JSONDecodeError as error:
        raise _make_json_error(file, number, error.colno, error.msg, field) from error
    except (ValueError, RecursionError) as error:  # a key twice, a number of thousands of digits, or nested as deeply
        raise _make_json_error(file, number, 1, str(error), field) from error
    return _require_object(row, file, number, "line", field)


def _require_object(row: Any, file: Path | str, number: int, unit: str, field: str) -> Row:
    if not isinstance(row, dict):
        why = f" is {row!r:.80}, a {type(row).__name__}; an object with columns is accepted"
        raise make_row_error(field, file, number, why, unit=unit)
    return row


def _count_lines(file: Path, field: str) -> int:
    return sum(1 for _ in _read_lines(file, field))


def _read_json_array(file: Path, _columns: Sequence[str] | None, field: str) -> Iterator[NumberedRow]:
    for number, row in enumerate(_parse_json_array(file, field), start=1):
        yield number, _require_object(row, file, number, "row", field)


def _parse_json_array(file: Path, field: str) -> Iterator[Any]:
    parser = _JsonParser(file, field)
    parser.expect_character("[")
    if parser.peek() == "]":
        parser.expect_character("]")
    else:
        while True:
            yield parser.parse_element()
            if parser.peek() != ",":
                break
            parser.expect_character(",")
        parser.expect_character("]")
    if parser.peek():
        raise parser.make_error("Extra data")


class _JsonParser:
    """Incremental parser of a JSON file; holds the text that is read but not yet parsed."""

    def __init__(self, file: Path, field: str) -> None:
        self._file = file
        self._field = field
        self._chunks = _read_text_chunks(file, field)
        self._text = ""
        self._offset = 0
        self._line = 1
        self._column = 1
        self._decoder = json.JSONDecoder(object_pairs_hook=refuse_duplicate_keys)

    def peek(self) -> str:
        """Return the next character that is not white space; "" at the end."""
        while True:
            begin = self._offset
            while begin < len(self._text) and self._text[begin] in _JSON_WHITESPACE:
                begin += 1
            self._advance_to(begin)
            if self._offset < len(self._text):
                return self._text[self._offset]
            if not self._read_chunk():
                return ""

    def expect_character(self, character: str) -> None:
        if self.peek() != character:
            raise self.make_error(f"Expecting {character!r}")
        self._advance_to(self._offset + 1)

    def parse_element(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._offset)
            except json.JSONDecodeError as error:
                offset = error.pos - self._offset
                if len(self._text) - self._offset > _MAX_ELEMENT_LENGTH or not self._read_chunk():
                    self._advance_to(self._offset + offset)
                    raise self.make_error(error.msg) from error
            except (ValueError, RecursionError) as error:  # as in `parse_line`
                raise self.make_error(str(error)) from error
            else:
                # A number at the end of the window may continue.
                if end == len(self._text) and self._read_chunk():
                    continue
                self._advance_to(end)
                return value

    def make_error(self, why: str) -> DataError:
        return _make_json_error(self._file, self._line, self._column, why, self._field)

    def _advance_to(self, end: int) -> None:
        passed = self._text[self._offset : end]
        breaks = passed.count("\n")
        self._line += breaks
        self._column = len(passed) - passed.rfind("\n") if breaks else self._column + len(passed)
        self._offset = end

    def _read_chunk(self) -> bool:
        chunk = next(self._chunks, "")
        self._text, self._offset = self._text[self._offset :] + chunk, 0
        return bool(chunk)


def _read_text_chunks(file: Path, field: str) -> Iterator[str]:
    """Yield the file's text in chunks of about a million bytes, with every line end as "\\n"."""
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    line, size = 1, 0
    with open_file(file, field) as stream:
        while True:
            chunk = stream.read(_BYTES_PER_READ)
            size += len(chunk)
            pending = len(decoder.getstate()[0])
            begin = size - len(chunk) - pending
            try:
                text = decoder.decode(chunk, final=not chunk)
            except UnicodeDecodeError as error:
                line += chunk[: max(error.start - pending, 0)].count(b"\n")
                raise _make_encoding_error(file, line, begin + error.start, error.reason, field) from error
            line += text.count("\n")
            if text:
                yield text
            if not chunk:
                return


def _make_row_counter(
    read: Callable[[Path, Sequence[str] | None, str], Iterator[NumberedRow]],
) -> Callable[[Path, str], int]:
    return lambda file, field: sum(1 for _ in read(file, None, field))


def _read_text(file: Path, _columns: Sequence[str] | None, field: str) -> Iterator[NumberedRow]:
    """Yield the file as one document, or as several if it is longer than `MAX_DOCUMENT_CHARACTERS`."""
    number, pieces, size = 1, list[str](), 0
    for chunk in _read_text_chunks(file, field):
        pieces.append(chunk)
        size += len(chunk)
        if size >= MAX_DOCUMENT_CHARACTERS:
            text = "".join(pieces)
            end = text.rfind("\n") + 1 or len(text)
            yield number, {"text": text[:end]}
            number, pieces, size = number + 1, [text[end:]], len(text) - end
    if size or number == 1:
        yield number, {"text": "".join(pieces)}


def _read_csv(delimiters: str, file: Path, columns: Sequence[str] | None, field: str) -> Iterator[NumberedRow]:
    """Yield rows named by the first record, all cells as text, each with the line on which it ends."""
    with open_file(file, field) as stream:
        records = _parse_csv_records(stream, file, delimiters, field)
        _, header = next(records, (0, []))
        if len(set(header)) < len(header):
            why = f"has a duplicate column in its first line ({', '.join(header)}); unique names are accepted"
            raise make_file_error(field, file, why)
        wanted = [(column, name) for column, name in enumerate(header) if columns is None or name in columns]
        for line, cells in records:
            if len(cells) != len(header):
                raise _make_csv_error(file, line, f"it has {len(cells)} cells, and the first line {len(header)}", field)
            yield line, {name: cells[column] for column, name in wanted}


def _parse_csv_records(stream: BinaryIO, file: Path, delimiters: str, field: str) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the record's last line, cells). The delimiter is the first of `delimiters` in the first line."""
    csv.field_size_limit(_MAX_ELEMENT_LENGTH)  # process-wide; the default is too short for texts
    text = io.TextIOWrapper(stream, "utf-8-sig", newline="")

    def read_lines() -> Iterator[str]:
        while line := text.readline(_MAX_LINE_LENGTH + 1):
            if len(line) > _MAX_LINE_LENGTH:
                raise csv.Error(f"it is longer than {_MAX_LINE_LENGTH} characters")
            yield line

    reader = csv.reader(())
    try:
        first = next(found := read_lines(), "")
        delimiter = next((each for each in delimiters if each in first), delimiters[0])
        reader = csv.reader(chain([first], found), delimiter=delimiter, strict=True)
        for cells in reader:
            if cells:
                yield reader.line_num, cells
    except UnicodeDecodeError as error:
        line = reader.line_num + 1
        raise _make_csv_error(
            file, line, f"it, or a line soon after it, is not UTF-8 ({error.reason})", field
        ) from error
    except csv.Error as error:
        raise _make_csv_error(file, reader.line_num, str(error), field) from error


def _read_csv_columns(file: Path, field: str) -> tuple[str, ...] | None:
    with open_file(file, field) as stream:
        return parse_csv_columns(stream, file, field)


def parse_csv_columns(stream: BinaryIO, file: Path, field: str) -> tuple[str, ...] | None:
    """Return the columns of a CSV file from its first line at least; None if it is empty. Raises `DataError`."""
    delimiters = _CSV_DELIMITERS[find_data_suffix(file.name) or ""]
    _, header = next(_parse_csv_records(stream, file, delimiters, field), (0, None))
    return None if header is None else tuple(header)


def _make_csv_error(file: Path, line: int, why: str, field: str) -> DataError:
    accepted = "UTF-8 text is accepted, with column names in the first line and one record per line after it"
    return make_row_error(field, file, line, f" cannot be read: {why}; {accepted}")


def _make_csv_reader(delimiters: str) -> FileReader:
    rows = partial(_read_csv, delimiters)
    return FileReader("line", rows, _make_row_counter(rows), _read_csv_columns)


def _read_parquet(file: Path, columns: Sequence[str] | None, field: str) -> Iterator[NumberedRow]:
    number = 1
    try:
        for batch in _open_parquet(file, field).iter_batches(batch_size=_ROWS_PER_BATCH, columns=columns):
            for row in batch.to_pylist():
                yield number, row
                number += 1
    except UnicodeDecodeError as error:
        why = f" or one of the {_ROWS_PER_BATCH} after it, has text that is not UTF-8 ({error.reason})"
        raise make_row_error(field, file, number, f"{why}; UTF-8 text is accepted", unit="row") from error
    except (ValueError, OSError) as error:
        raise make_file_error(field, file, f"cannot be read as parquet: {error}") from error


def _open_parquet(file: Path, field: str) -> Any:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file)
    except (ValueError, OSError) as error:
        raise make_file_error(field, file, f"cannot be read as parquet: {error}") from error


def _make_json_error(file: Path | str, line: int, column: int, why: str, field: str) -> DataError:
    accepted = "one object a line, or one array of objects, is accepted"
    return make_row_error(field, file, line, f", column {column} is not JSON: {why}; {accepted}")


def _make_encoding_error(file: Path | str, line: int, byte: int, reason: str, field: str) -> DataError:
    return make_row_error(field, file, line, f", byte {byte} is not UTF-8 ({reason}); UTF-8 text is accepted")


_JSON_LINES = FileReader("line", _read_json_lines, _count_lines, lambda _file, _field: None)
_JSON_ARRAY = FileReader("row", _read_json_array, _make_row_counter(_read_json_array), lambda _file, _field: None)
_PARQUET = FileReader(
    "row",
    _read_parquet,
    lambda file, field: int(_open_parquet(file, field).metadata.num_rows),
    lambda file, field: tuple(_open_parquet(file, field).schema_arrow.names),
)
_TEXT_READER = FileReader("row", _read_text, _make_row_counter(_read_text), lambda _file, _field: ("text",))
READERS = {
    ".jsonl": _JSON_LINES,
    ".ndjson": _JSON_LINES,
    ".json": _JSON_LINES,
    **{kind: _make_csv_reader(delimiters) for kind, delimiters in _CSV_DELIMITERS.items()},
    ".parquet": _PARQUET,
    ".txt": _TEXT_READER,
    ".py": _TEXT_READER,
}
"""Readers by `layout.find_data_suffix` of a file's name."""
