"""Rows of a source as tables, whatever it is read with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from swiftkv_platform.data.files import NumberedRow


@dataclass(frozen=True)
class Table:
    """Rows of one origin, read from the beginning each time, in the same order."""

    origin: str
    """Name of the origin in messages: a hub id, or a file."""
    columns: tuple[str, ...] | None
    """Columns of every row; None where each row has its own."""
    rows: Callable[[Sequence[str] | None], Iterator[NumberedRow]]
    """The rows with these columns, or all."""
    count: Callable[[], int]
    """Number of rows; not asked of a streamed source."""
    unit: str = "row"
    """Unit that rows are counted in."""
    held_out: bool | None = None
    """The side of the hold-out the source itself puts these rows on; None leaves it to `validation_fraction`."""
