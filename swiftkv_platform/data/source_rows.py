"""Read the rows of sources: open hub data sets, local files, stored objects and built-in data as tables, sample their
rows, and parse the columns as texts and conversations.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from swiftkv_platform.contract.attempts import FILE_SUFFIX, StoredFile
from swiftkv_platform.data.files import READERS, FileReader, NumberedRow, Row, Table, find_reader, make_row_error
from swiftkv_platform.data.formats import (
    FORMAT_COLUMNS,
    FORMATS,
    Content,
    NonEmptyColumns,
    RowFormat,
    RowReader,
    find_row_reader,
)
from swiftkv_platform.data.messages import RowError
from swiftkv_platform.data.packing import IntArray
from swiftkv_platform.data.repositories import read_hub_dataset, read_hub_repository, read_saved_dataset
from swiftkv_platform.data.traffic import select_requests
from swiftkv_platform.errors import DataError, InvalidInputError
from swiftkv_platform.sources import (
    UNRESTRICTED,
    Access,
    Boundary,
    BuiltinSource,
    FileSource,
    HubSource,
    PathSource,
    S3Source,
    TrafficSource,
)
from swiftkv_platform.sources.builtin_data import (
    make_chat_prompts,
    make_constraint_prompts,
    make_long_recall_prompts,
    make_recall_prompts,
    make_unseen_chat_prompts,
    read_standard_library,
)
from swiftkv_platform.sources.layout import (
    ACCEPTED_FILES,
    check_builtin,
    check_single_file,
    check_subset,
    check_traffic,
    find_data_suffix,
    is_hub_layout,
    is_saved_dataset,
    list_source_files,
    select_split_files,
)
from swiftkv_platform.sources.names import refuse_shadowed_id
from swiftkv_platform.specs import (
    BUILTIN_CHATS,
    BUILTIN_CONSTRAINTS,
    BUILTIN_LONG_RECALL,
    BUILTIN_RECALL,
    DataSourceSpec,
)


@dataclass(frozen=True)
class RemoteFile:
    """An object of a store."""

    store: str
    """Address of the store, such as `s3://bucket`."""
    key: str
    """Key in the store, unescaped."""

    @property
    def origin(self) -> str:
        return f"{self.store}/{self.key}"


class RemoteFiles(Protocol):
    """Lists and downloads objects of stores."""

    def list_files(self, source: S3Source) -> Sequence[RemoteFile]:
        """Return the object that `source` names, or those below it, sorted. Raises `DataError` if there are none."""

    def fetch_file(self, file: RemoteFile) -> Path:
        """Download an object unless its copy exists, and return the copy's path."""

    def fetch_traffic(self, uri: str, since: float, until: float) -> Path:
        """Download the captured requests below `uri` that ended within [since, until), in Unix seconds, unless their
        copy exists. Return the path of the copy, JSON Lines of `CapturedRequest`. Deleted requests are left out."""


def open_source(
    source: DataSourceSpec, *, source_field: str, remote: RemoteFiles | None, access: Access = UNRESTRICTED
) -> list[Table]:
    """Open a source other than captured traffic, which has no tables. Rows are read lazily, when its tables are
    iterated.

    Args:
        source_field: JSON path of the source in the spec, e.g. `data.sources[0]`, for error messages.
        remote: required for `s3://` sources and uploaded files only.
        access: sources that may be read; every file is checked before it is opened.

    Raises:
        DataError: the source does not exist, cannot be read, or leads to files that may not be read.
        InvalidInputError: `remote` is required and missing, or the tenant may not read the source.
        StorageError: the hub is unavailable.
    """
    field = f"{source_field}.name_or_path"
    named = access.parse_data(source.name_or_path, field)
    assert not isinstance(named, TrafficSource), "`read_source_rows` reads captured traffic"
    match named:
        case BuiltinSource():
            return _open_builtin(source, source_field)
        case FileSource(name):
            assert access.files is not None, "`Access` refuses files without an entry"
            check_single_file(source, source_field)
            return [_open_upload(_require_remote(remote, name, field), access.files[name], name, field)]
        case S3Source(name):
            return _open_objects(_require_remote(remote, name, field), named, source, source_field)
        case PathSource(name, location):
            if not location.exists():
                raise DataError.for_field(field, name, ": no such file or directory")
            # links may lead out of allowed directories
            boundary = access.boundary
            location = boundary.check_path(location, field)
            if location.is_dir():
                boundary.check_tree(location, field)
                if is_saved_dataset(location):
                    check_subset(source, source_field)
                    return [read_saved_dataset(location, source, source_field, boundary)]
                if is_hub_layout(location):
                    return [read_hub_dataset(str(location), source, source_field, boundary)]
            return _open_local_files(location, source, source_field, boundary)
        case HubSource(name):
            if access.is_restricted:
                refuse_shadowed_id(name, field)
                return [read_hub_repository(source, source_field)]
            return [read_hub_dataset(name, source, source_field)]


def _require_remote(remote: RemoteFiles | None, name: str, field: str) -> RemoteFiles:
    if remote is None:
        raise InvalidInputError.for_field(
            field, name, ", but this process has no object store to fetch it from; use a local path"
        )
    return remote


def _open_upload(remote: RemoteFiles, stored: StoredFile, name: str, field: str) -> Table:
    """Return the table of an uploaded file. Raises `DataError` if its SHA-256 is not that of the upload."""
    store, _, key = stored.uri.rpartition("/")
    file = remote.fetch_file(RemoteFile(store, key))
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != stored.sha256:
        why = f", whose rows differ from those uploaded (SHA-256 {digest} instead of {stored.sha256})"
        raise DataError.for_field(field, name, f"{why}; upload the file again")
    return replace(_open_file(file, READERS[FILE_SUFFIX], field), origin=name)


_MAKE_PROMPTS_BY_SOURCE = {
    BUILTIN_CHATS: make_chat_prompts,
    BUILTIN_RECALL: make_recall_prompts,
    BUILTIN_LONG_RECALL: make_long_recall_prompts,
    BUILTIN_CONSTRAINTS: make_constraint_prompts,
}


def _open_builtin(source: DataSourceSpec, source_field: str) -> list[Table]:
    check_builtin(source, source_field)
    name = source.name_or_path
    if name in _MAKE_PROMPTS_BY_SOURCE:
        is_unseen, is_held_out = source.split == "unseen", source.split == "held_out"
        prompts = make_unseen_chat_prompts() if is_unseen else _MAKE_PROMPTS_BY_SOURCE[name](held_out=is_held_out)
        return [_make_prompt_table(name, "prompt", prompts)]
    modules = list(read_standard_library())
    return [
        _make_prompt_table(
            name, "text", [module.text for module in modules if module.is_held_out is held_out], held_out=held_out
        )
        for held_out in (False, True)
    ]


def _make_prompt_table(origin: str, column: str, texts: Sequence[str], *, held_out: bool | None = None) -> Table:
    def rows(_columns: Sequence[str] | None) -> Iterator[NumberedRow]:
        return enumerate(({column: text} for text in texts), start=1)

    return Table(origin, (column,), rows, lambda: len(texts), held_out=held_out)


def _open_local_files(location: Path, source: DataSourceSpec, source_field: str, boundary: Boundary) -> list[Table]:
    name, field = source.name_or_path, f"{source_field}.name_or_path"
    files = [boundary.check_path(file, field) for file in list_source_files(location, source, source_field)]
    readers = [(file, find_reader(file, field)) for file in files]
    tables = [_open_file(file, reader, field) for file, reader in readers if reader is not None]
    if not tables:
        why = "a directory without readable files" if location.is_dir() else "not a readable file"
        raise DataError.for_field(field, name, f", {why}; {ACCEPTED_FILES}")
    return tables


def _open_file(file: Path, reader: FileReader, field: str) -> Table:
    return Table(
        str(file),
        reader.read_columns(file, field) if file.stat().st_size else None,
        lambda columns: reader.read_rows(file, columns, field) if file.stat().st_size else iter(()),
        lambda: reader.count_rows(file, field) if file.stat().st_size else 0,
        reader.unit,
    )


def _open_objects(remote: RemoteFiles, named: S3Source, source: DataSourceSpec, source_field: str) -> list[Table]:
    """Return one table per object. Each is downloaded when read; a streamed source's copies are deleted afterwards."""
    field = f"{source_field}.name_or_path"
    objects = {file.key.removeprefix(named.key).lstrip("/"): file for file in remote.list_files(named)}
    if list(objects) == [""]:
        check_single_file(source, source_field)
        chosen = [file for file in objects.values() if find_data_suffix(file.key) is not None]
    else:
        chosen = [objects[name] for name in select_split_files(list(objects), source, source_field)]
    if not chosen:
        raise DataError.for_field(field, named.name, f", which has no readable objects; {ACCEPTED_FILES}")
    return [_open_object(remote, file, field, keep=not source.streaming) for file in chosen]


def _open_object(remote: RemoteFiles, file: RemoteFile, field: str, *, keep: bool) -> Table:
    def download() -> Table:
        copy = remote.fetch_file(file)
        reader = find_reader(copy, field)
        assert reader is not None, "the key ends like a readable file"
        return _open_file(copy, reader, field)

    def rows(columns: Sequence[str] | None) -> Iterator[NumberedRow]:
        copy = download()
        try:
            yield from copy.read_rows(columns)
        finally:
            if not keep:
                Path(copy.origin).unlink(missing_ok=True)

    unit = READERS[find_data_suffix(file.key) or ""].unit
    return Table(file.origin, None, rows, lambda: download().count_rows(), unit)


_NUM_SEARCHED_ROWS = 10_000
"""Rows of a streamed source that are searched for non-empty columns, to find the format."""
_MAX_CACHED_READERS = 256
"""Max cached readers, by set of columns, of a file whose rows have different columns."""


@dataclass(frozen=True)
class SourceRow:
    """Content and location of one row."""

    content: Content
    """Text or conversation; may be empty."""
    format: str
    origin: str
    unit: str
    number: int
    held_out: bool | None
    """Whether the source holds the row out; None if the source has no splits."""
    unread_columns: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    """Values of the requested other columns, without those that the row lacks; of a captured text its prompt and
    completion."""
    conversation: int | None = None
    """Key of a captured request's conversation, all of which belongs to one split; None for rows of other sources."""

    @property
    def is_captured(self) -> bool:
        """Whether the row is a captured request. One that cannot be used is no error, since nobody can correct it."""
        return self.conversation is not None

    def make_error(self, why: RowError, source_field: str) -> DataError:
        return make_row_error(source_field, self.origin, self.number, f", read as {self.format}: {why}", unit=self.unit)


def read_source_rows(
    source: DataSourceSpec,
    index: int,
    *,
    seed: int,
    remote: RemoteFiles | None,
    access: Access = UNRESTRICTED,
    formats: Sequence[RowFormat] = FORMATS,
    source_field: str | None = None,
    other_columns: Sequence[str] = (),
    left_out: Counter[str] | None = None,
) -> Iterator[SourceRow]:
    """Yield the rows of a source: all, or `sample_count` of them, chosen by the seed (the first ones of a streamed
    source, whose length is unknown). The source's own held-out rows come in addition. Raises as `prepare_data`, and
    `DataError` with the line for a row that the format cannot parse.

    Args:
        source_field: JSON path of the source in the spec; None: `data.sources[index]`.
        other_columns: columns to read besides those of the format.
        left_out: gets the number of captured requests that are not used, by reason.
    """
    source_field = f"data.sources[{index}]" if source_field is None else source_field
    named = access.parse_data(source.name_or_path, f"{source_field}.name_or_path")
    if isinstance(named, TrafficSource):
        counts = Counter[str]() if left_out is None else left_out
        key = (seed, index)
        yield from _read_traffic(named, source, source_field, key, remote=remote, access=access, left_out=counts)
        return
    tables = open_source(source, source_field=source_field, remote=remote, access=access)
    training = [table for table in tables if not table.held_out]
    parser = _RowParser(source, source_field, formats, other_columns)
    yield from _read_sample(training, source, (seed, index), parser)
    for table in tables:
        if table.held_out:
            yield from parser.parse_rows(table, None)


def _read_traffic(
    named: TrafficSource,
    source: DataSourceSpec,
    source_field: str,
    key: tuple[int, int],
    *,
    remote: RemoteFiles | None,
    access: Access,
    left_out: Counter[str],
) -> Iterator[SourceRow]:
    check_traffic(source, source_field)
    assert access.traffic is not None, "`Access.check_source` refuses traffic that `Access.traffic` lacks"
    uri = access.traffic[named.deployment_id].uri
    file = _require_remote(remote, named.name, f"{source_field}.name_or_path").fetch_traffic(uri, *source.window)
    requests = select_requests(file, with_answers=source.complete is None)
    left_out.update(requests.left_out)
    hashes = requests.hashes
    if source.sample_count is not None:
        [chosen] = _draw_row_indices([len(hashes)], source.sample_count, key)
        hashes = hashes if chosen is None else hashes[chosen]
    for row in requests.read_rows(hashes):
        yield SourceRow(
            row.content,
            row.format,
            named.name,
            "request",
            row.number,
            None,
            values=row.texts,
            conversation=row.conversation,
        )


def _read_sample(
    tables: Sequence[Table], source: DataSourceSpec, key: tuple[int, int], parser: _RowParser
) -> Iterator[SourceRow]:
    count = source.sample_count
    if count is None or source.streaming:
        yield from islice(chain.from_iterable(parser.parse_rows(table, None) for table in tables), count)
        return
    indices = _draw_row_indices([table.count_rows() for table in tables], count, key)
    for table, chosen in zip(tables, indices, strict=True):
        yield from parser.parse_rows(table, chosen)


def _draw_row_indices(lengths: Sequence[int], count: int, key: tuple[int, int]) -> list[IntArray | None]:
    """Choose `count` rows from tables of `lengths` rows. Returns indices for each table, None for all of its rows."""
    total = sum(lengths)
    if count >= total:
        return [None] * len(lengths)
    chosen = np.sort(np.random.default_rng(key).choice(total, size=count, replace=False))
    begins = np.cumsum([0, *lengths])
    return [chosen[(begin <= chosen) & (chosen < end)] - begin for begin, end in pairwise(begins)]


@dataclass(frozen=True)
class _RowParser:
    """Parses rows of tables, by the format that matches their columns."""

    source: DataSourceSpec
    source_field: str
    formats: Sequence[RowFormat]
    other_columns: Sequence[str]

    def parse_rows(self, table: Table, chosen: IntArray | None) -> Iterator[SourceRow]:
        """Yield the rows of a table; only those at the indices `chosen` (from 0, ascending) if it is not None."""
        find = partial(
            find_row_reader,
            self.source.format,
            source_field=self.source_field,
            formats=self.formats,
            non_empty=NonEmptyColumns(partial(self._read_format_columns, table)),
        )
        # one reader for the table, or one for each set of columns
        fixed = None if table.columns is None else find(table.columns, origin=table.origin)
        readers: dict[tuple[str, ...], RowReader] = {}
        columns = None
        if fixed is not None:
            others = (name for name in self.other_columns if name in (table.columns or ()))
            columns = tuple(dict.fromkeys((*fixed.columns, *others)))
        for number, row in _select_rows(table.read_rows(columns), chosen):
            reader = fixed or readers.get(tuple(row))
            if reader is None:
                reader = find(tuple(row), origin=f"{table.origin}, {table.unit} {number},")
                if len(readers) < _MAX_CACHED_READERS:
                    readers[tuple(row)] = reader
            try:
                content = reader(row)
            except RowError as error:
                why = f", read as {reader.format.name}: {error}"
                raise make_row_error(self.source_field, table.origin, number, why, unit=table.unit) from error
            yield SourceRow(
                content,
                reader.format.name,
                table.origin,
                table.unit,
                number,
                table.held_out,
                reader.unread_columns,
                {name: row[name] for name in self.other_columns if name in row},
            )

    def _read_format_columns(self, table: Table) -> Iterator[Row]:
        """Return all rows, only the first ones of a streamed source, with just the columns that decide the format."""
        columns = None if table.columns is None else [name for name in table.columns if name in FORMAT_COLUMNS]
        rows = (row for _, row in table.read_rows(columns))
        return islice(rows, _NUM_SEARCHED_ROWS if self.source.streaming else None)


def _select_rows(rows: Iterator[NumberedRow], positions: IntArray | None) -> Iterator[NumberedRow]:
    if positions is None:
        yield from rows
        return
    position = -1
    for selected in positions.tolist():
        yield next(islice(rows, selected - position - 1, None))
        position = selected
