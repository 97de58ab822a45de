"""Rows of a source as texts and conversations: choose the rows and interpret their columns. Knows no tokenizer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, pairwise

import numpy as np

from swiftkv_platform.data.files import NumberedRow, Table
from swiftkv_platform.data.formats import COLUMNS, FORMATS, Content, Holdings, Row, RowFormat, RowReader, find_format
from swiftkv_platform.data.messages import RowError
from swiftkv_platform.data.opening import RemoteFiles, read_source
from swiftkv_platform.data.packing import IntArray
from swiftkv_platform.errors import DataError
from swiftkv_platform.sources import OPEN, Access
from swiftkv_platform.specs import DataSourceSpec

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
        return _bad_row(self.origin, self.unit, self.number, self.format, why, path)


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
                raise _bad_row(table.origin, table.unit, number, reader.format.name, error, self._path) from error
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


def _bad_row(origin: str, unit: str, number: int, format_: str, why: RowError, path: str) -> DataError:
    return DataError(
        f"{path}: {origin}, {unit} {number}, read as {format_}: {why}", field=path, value=f"{origin}:{number}"
    )
