"""Open sources as tables that are read row by row: hub data sets, local files, stored objects and built-in data. Choose
rows, and interpret their columns as texts and conversations. Knows no tokenizer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from swiftkv_platform.contract.attempts import FILE_SUFFIX, StoredFile
from swiftkv_platform.data.files import READERS, FileReader, NumberedRow, Row, Table, bad_row, reader_for
from swiftkv_platform.data.formats import COLUMNS, FORMATS, Content, Holdings, RowFormat, RowReader, find_format
from swiftkv_platform.data.messages import RowError
from swiftkv_platform.data.packing import IntArray
from swiftkv_platform.data.repositories import read_laid_out, read_repository, read_saved
from swiftkv_platform.errors import DataError, InvalidInputError
from swiftkv_platform.sources import OPEN, Access, Boundary, BuiltinSource, FileSource, HubSource, PathSource, S3Source
from swiftkv_platform.sources.builtin_data import (
    chat_prompts,
    long_recall_prompts,
    recall_prompts,
    standard_library_modules,
    unseen_chat_prompts,
)
from swiftkv_platform.sources.layout import (
    ACCEPTED,
    check_builtin,
    check_subset,
    check_whole,
    choose,
    is_hub_layout,
    is_saved_dataset,
    kind_of,
    source_files,
)
from swiftkv_platform.sources.names import refuse_shadowed
from swiftkv_platform.specs import BUILTIN_CHATS, BUILTIN_LONG_RECALL, BUILTIN_RECALL, DataSourceSpec


@dataclass(frozen=True)
class RemoteFile:
    """An object of a store."""

    store: str
    """Address of the store, such as `s3://bucket`."""
    key: str
    """Key in the store, unescaped."""

    @property
    def origin(self) -> str:
        """Name of the object in messages."""
        return f"{self.store}/{self.key}"


class RemoteFiles(Protocol):
    """Lists and downloads objects of stores."""

    def list(self, source: S3Source) -> Sequence[RemoteFile]:
        """Return the object that `source` names, or those below it, sorted. Raises `DataError` if there are none."""

    def fetch(self, file: RemoteFile) -> Path:
        """Download an object unless its copy exists, and return the copy's path."""


def read_source(source: DataSourceSpec, *, path: str, remote: RemoteFiles | None, access: Access = OPEN) -> list[Table]:
    """Open a source. Rows are read lazily, when its tables are iterated.

    Args:
        path: the source's place in the spec, e.g. `data.sources[0]`, for error messages.
        remote: needed for `s3://` sources and uploaded files only.
        access: what may be read; every file is checked before it is opened.

    Raises:
        DataError: the source does not exist, cannot be read, or leads to files that may not be read.
        InvalidInputError: `remote` is needed and missing, or the name is not one that the tenant may read.
        StorageError: the hub does not answer.
    """
    field = f"{path}.name_or_path"
    named = access.data(source.name_or_path, field)
    match named:
        case BuiltinSource():
            return _builtin(source, path)
        case FileSource(name):
            assert access.files is not None, "a file without an entry there is refused by `Access.data`"
            check_whole(source, path)
            return [_uploaded(_needed(remote, name, field), access.files[name], name, field)]
        case S3Source(name):
            return _remote(_needed(remote, name, field), named, source, path)
        case PathSource(name, location):
            if not location.exists():
                raise DataError.for_field(field, name, ": no such file or directory")
            boundary = access.boundary
            location = boundary.check(location, field)
            if location.is_dir():
                boundary.check_tree(location, field)
                if is_saved_dataset(location):
                    check_subset(source, path)
                    return [read_saved(location, source, path, boundary)]
                if is_hub_layout(location):
                    return [read_laid_out(str(location), source, path, boundary)]
            return _local(location, source, path, boundary)
        case HubSource(name):
            if access.is_restricted:
                refuse_shadowed(name, field)
                return [read_repository(source, path)]
            return [read_laid_out(name, source, path)]


def _needed(remote: RemoteFiles | None, name: str, field: str) -> RemoteFiles:
    if remote is None:
        raise InvalidInputError.for_field(
            field, name, ", but this process has no object store to fetch it from; use a local path"
        )
    return remote


def _uploaded(remote: RemoteFiles, stored: StoredFile, name: str, field: str) -> Table:
    """Return the table of an uploaded file. Raises `DataError` if its SHA-256 is not that of the upload."""
    store, _, key = stored.uri.rpartition("/")
    file = remote.fetch(RemoteFile(store, key))
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != stored.sha256:
        why = f", whose rows differ from those uploaded (SHA-256 {digest} instead of {stored.sha256})"
        raise DataError.for_field(field, name, f"{why}; upload the file again")
    return replace(_file_table(file, READERS[FILE_SUFFIX], field), origin=name)


_PROMPTS = {BUILTIN_CHATS: chat_prompts, BUILTIN_RECALL: recall_prompts, BUILTIN_LONG_RECALL: long_recall_prompts}


def _builtin(source: DataSourceSpec, path: str) -> list[Table]:
    check_builtin(source, path)
    name = source.name_or_path
    if name in _PROMPTS:
        is_unseen, is_held_out = source.split == "unseen", source.split == "held_out"
        prompts = unseen_chat_prompts() if is_unseen else _PROMPTS[name](held_out=is_held_out)
        return [_listed(name, "prompt", prompts)]
    modules = list(standard_library_modules())
    return [
        _listed(name, "text", [module.text for module in modules if module.held_out is side], held_out=side)
        for side in (False, True)
    ]


def _listed(origin: str, column: str, texts: Sequence[str], *, held_out: bool | None = None) -> Table:
    def rows(_columns: Sequence[str] | None) -> Iterator[NumberedRow]:
        return enumerate(({column: text} for text in texts), start=1)

    return Table(origin, (column,), rows, lambda: len(texts), held_out=held_out)


def _local(location: Path, source: DataSourceSpec, path: str, boundary: Boundary) -> list[Table]:
    name, field = source.name_or_path, f"{path}.name_or_path"
    files = [boundary.check(file, field) for file in source_files(location, source, path)]
    readers = [(file, reader_for(file, field)) for file in files]
    tables = [_file_table(file, reader, field) for file, reader in readers if reader is not None]
    if not tables:
        what = "a directory without readable files" if location.is_dir() else "not a readable file"
        raise DataError.for_field(field, name, f", {what}; {ACCEPTED}")
    return tables


def _file_table(file: Path, reader: FileReader, field: str) -> Table:
    return Table(
        str(file),
        reader.columns(file, field) if file.stat().st_size else None,
        lambda columns: reader.rows(file, columns, field) if file.stat().st_size else iter(()),
        lambda: reader.count(file, field) if file.stat().st_size else 0,
        reader.unit,
    )


def _remote(remote: RemoteFiles, named: S3Source, source: DataSourceSpec, path: str) -> list[Table]:
    """Return one table per object. Each is fetched when it is read, and of a streamed source deleted afterwards."""
    field = f"{path}.name_or_path"
    objects = {file.key.removeprefix(named.key).lstrip("/"): file for file in remote.list(named)}
    if list(objects) == [""]:
        check_whole(source, path)
        chosen = [file for file in objects.values() if kind_of(file.key) is not None]
    else:
        chosen = [objects[name] for name in choose(list(objects), source, path)]
    if not chosen:
        raise DataError.for_field(field, named.name, f", which has no readable objects; {ACCEPTED}")
    return [_object_table(remote, file, field, keep=not source.streaming) for file in chosen]


def _object_table(remote: RemoteFiles, file: RemoteFile, field: str, *, keep: bool) -> Table:
    def table() -> Table:
        copy = remote.fetch(file)
        reader = reader_for(copy, field)
        assert reader is not None, "the key ends like a readable file"
        return _file_table(copy, reader, field)

    def rows(columns: Sequence[str] | None) -> Iterator[NumberedRow]:
        opened = table()
        try:
            yield from opened.rows(columns)
        finally:
            if not keep:
                Path(opened.origin).unlink(missing_ok=True)

    return Table(file.origin, None, rows, lambda: table().count(), READERS[kind_of(file.key) or ""].unit)


_ROWS_LOOKED_AT = 10_000
"""First rows of a streamed source that are searched for columns that are not empty, in order to decide the format."""
_LAYOUTS_KEPT = 256
"""Most readers cached, by set of columns, for a file in which each row has its own columns."""


@dataclass(frozen=True)
class SourceRow:
    """Content of one row, and its place."""

    content: Content
    """Text or conversation; empty if the row holds none."""
    format: str
    origin: str
    unit: str
    number: int
    held_out: bool | None
    """Whether the source itself marks the row as held out; None if it does not say."""

    def error(self, why: RowError, path: str) -> DataError:
        """Return the error for a row that cannot be used. `path`: place of its source in the spec."""
        return bad_row(path, self.origin, self.number, f", read as {self.format}: {why}", unit=self.unit)


def source_rows(
    source: DataSourceSpec,
    index: int,
    *,
    seed: int,
    remote: RemoteFiles | None,
    access: Access = OPEN,
    formats: Sequence[RowFormat] = FORMATS,
) -> Iterator[SourceRow]:
    """Yield the rows of `data.sources[index]`: all, or `sample_count` of them, chosen by the seed (the first ones of a
    streamed source, whose length is unknown). Rows that the source itself holds out come in addition. Raises as
    `prepare_data`, and `DataError` with the line for a row that the format cannot read."""
    path = f"data.sources[{index}]"
    tables = read_source(source, path=path, remote=remote, access=access)
    training = [table for table in tables if not table.held_out]
    yield from _sample(training, source, (seed, index), _Interpreter(source, path, formats))
    for table in tables:
        if table.held_out:
            yield from _Interpreter(source, path, formats).rows(table, None)


def _sample(
    tables: Sequence[Table], source: DataSourceSpec, key: tuple[int, int], interpreter: _Interpreter
) -> Iterator[SourceRow]:
    count = source.sample_count
    if count is None or source.streaming:
        yield from islice(chain.from_iterable(interpreter.rows(table, None) for table in tables), count)
        return
    for table, chosen in zip(tables, _choose([table.count() for table in tables], count, key), strict=True):
        yield from interpreter.rows(table, chosen)


def _choose(lengths: Sequence[int], count: int, key: tuple[int, int]) -> list[IntArray | None]:
    """Choose `count` rows from tables of `lengths` rows. Returns indices for each table, None for all of its rows."""
    total = sum(lengths)
    if count >= total:
        return [None] * len(lengths)
    chosen = np.sort(np.random.default_rng(key).choice(total, size=count, replace=False))
    begins = np.cumsum([0, *lengths])
    return [chosen[(begin <= chosen) & (chosen < end)] - begin for begin, end in pairwise(begins)]


class _Interpreter:
    """Reads rows of tables, in the format that their columns decide."""

    def __init__(self, source: DataSourceSpec, path: str, formats: Sequence[RowFormat]) -> None:
        self._source = source
        self._path = path
        self._formats = formats

    def rows(self, table: Table, chosen: IntArray | None) -> Iterator[SourceRow]:
        """Yield the rows of a table; only those at the indices `chosen` (from 0, ascending) if it is not None."""
        holdings = Holdings(partial(self._first_rows, table))
        fixed = None if table.columns is None else self._reader(table.columns, table.origin, holdings)
        readers: dict[tuple[str, ...], RowReader] = {}
        for number, row in _at(table.rows(None if fixed is None else fixed.columns), chosen):
            reader = fixed or readers.get(tuple(row))
            if reader is None:
                reader = self._reader(tuple(row), f"{table.origin}, {table.unit} {number},", holdings)
                if len(readers) < _LAYOUTS_KEPT:
                    readers[tuple(row)] = reader
            try:
                content = reader(row)
            except RowError as error:
                why = f", read as {reader.format.name}: {error}"
                raise bad_row(self._path, table.origin, number, why, unit=table.unit) from error
            yield SourceRow(content, reader.format.name, table.origin, table.unit, number, table.held_out)

    def _reader(self, columns: tuple[str, ...], origin: str, holdings: Holdings) -> RowReader:
        return find_format(
            self._source.format, columns, origin=origin, path=self._path, formats=self._formats, holdings=holdings
        )

    def _first_rows(self, table: Table) -> Iterator[Row]:
        """Return all rows, only the first ones of a streamed source, with just the columns that decide the format."""
        columns = None if table.columns is None else [name for name in table.columns if name in COLUMNS]
        rows = (row for _, row in table.rows(columns))
        return islice(rows, _ROWS_LOOKED_AT if self._source.streaming else None)


def _at(rows: Iterator[NumberedRow], places: IntArray | None) -> Iterator[NumberedRow]:
    if places is None:
        yield from rows
        return
    place = -1
    for wanted in places.tolist():
        yield next(islice(rows, wanted - place - 1, None))
        place = wanted
