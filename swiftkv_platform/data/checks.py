"""Early checks that data sources exist, are not empty and have columns that a row format reads. Reads first rows only.

They report obvious mistakes before a cluster is used; the worker reads the same sources in full and decides.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from swiftkv_platform.data.decompression import opened, reads_zstandard
from swiftkv_platform.data.files import reader_for
from swiftkv_platform.data.formats import FORMATS, PROMPT_FORMATS, Holdings, Row, match_format
from swiftkv_platform.errors import DataError
from swiftkv_platform.sources import OPEN, Access, BuiltinSource, FileSource, PathSource
from swiftkv_platform.sources.cards import check_laid_out, check_saved
from swiftkv_platform.sources.layout import (
    ACCEPTED,
    check_subset,
    check_whole,
    compression_of,
    is_hub_layout,
    is_saved_dataset,
    kind_of,
    source_files,
)
from swiftkv_platform.specs import BUILTIN_DATA, BUILTIN_PROMPTS, DataSourceSpec

_TEXT = "text"
_TEXT_FILES = frozenset({".txt", ".py"})
_HEAD_BYTES = 1 << 20
"""Bytes read at the beginning of a JSON file."""
_FOOTER_BYTES = 16 << 20
"""Longest footer of a Parquet file that is parsed, in bytes."""
_MOST_LOOKED_AT = 100
"""Most files of a source whose first rows are read."""


@dataclass(frozen=True)
class SourceEstimate:
    """Size and formats of a data source, as far as known; None for a source that is not on this machine."""

    name_or_path: str
    num_files: int | None = None
    num_bytes: int | None = None
    formats: tuple[str, ...] = ()
    """Row formats of the first rows of its files."""


def check_sources(sources: Sequence[DataSourceSpec], access: Access = OPEN) -> tuple[SourceEstimate, ...]:
    """Check sources and estimate their size. Raises `DataError` for the first one that cannot be used or read."""
    return tuple(_check_source(source, f"data.sources[{index}]", access) for index, source in enumerate(sources))


def _check_source(source: DataSourceSpec, where: str, access: Access) -> SourceEstimate:
    name, field = source.name_or_path, f"{where}.name_or_path"
    match access.data(name, field):
        case BuiltinSource():
            if name not in (BUILTIN_DATA, *BUILTIN_PROMPTS):
                known = ", ".join((BUILTIN_DATA, *BUILTIN_PROMPTS))
                raise _unusable(where, name, f"the built-in data sets are {known}")
            if name in BUILTIN_PROMPTS and source.complete is None:
                raise _unusable(where, name, "its rows are requests that the teacher has to answer; add complete: {}")
            check_subset(source, where)
            return SourceEstimate(name, formats=("text" if name == BUILTIN_DATA else "prompt_completion",))
        case FileSource():
            assert access.files is not None, "a file without an entry there is refused by `Access.data`"
            check_whole(source, where)
            stored = access.files[name]
            found = _format_of(stored.columns, "it", source, where)
            return SourceEstimate(name, num_files=1, num_bytes=stored.size, formats=(found,))
        case PathSource(path=path):
            try:
                return _check_path(access.boundary.check(path, field), source, where, access)
            except OSError as error:  # it may exist, but not for this user
                raise _unusable(where, name, f"it cannot be read ({error.strerror})") from error
        case _:
            return SourceEstimate(name)


def _check_path(path: Path, source: DataSourceSpec, where: str, access: Access) -> SourceEstimate:
    name, field = source.name_or_path, f"{where}.name_or_path"
    if not path.exists():
        raise _unusable(where, name, "no such file or directory")
    if path.is_dir():
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
    looked_at = filled[:_MOST_LOOKED_AT]
    formats = [_TEXT if kind_of(file.name) in _TEXT_FILES else _find_format(file, source, where) for file in looked_at]
    return SourceEstimate(
        name,
        num_files=len(filled),
        num_bytes=sum(file.stat().st_size for file in filled),
        formats=tuple(dict.fromkeys(found for found in formats if found is not None)),
    )


def _find_format(file: Path, source: DataSourceSpec, where: str) -> str | None:
    """Return the row format of the file's first row; None if its columns cannot be read here."""
    if kind_of(file.name) in (".csv", ".tsv", ".parquet"):
        columns = _columns(file, f"{where}.name_or_path")
        return None if columns is None else _format_of(columns, file.name, source, where)
    if _is_closed(file):
        return None
    row = _json_row(file, source, where)
    return None if row is None else _format_of(row, file.name, source, where, Holdings(lambda: iter([row])))


def _format_of(
    columns: Collection[str], origin: str, source: DataSourceSpec, where: str, holdings: Holdings | None = None
) -> str:
    """Return the name of the row format that reads these columns. Raises `DataError`."""
    formats = FORMATS if source.complete is None else PROMPT_FORMATS
    wanted = [each for each in formats if source.format in ("auto", each.name)]
    matched = match_format(columns, wanted, holdings)
    if matched is not None:
        return matched[0].name
    accepted = "; ".join(
        f"{each.name}: {' or '.join(' + '.join(sorted(group)) for group in each.columns)}" for each in wanted
    )
    shown = ", ".join(sorted(columns)) or "none"
    raise _unusable(where, source.name_or_path, f"{origin} has the columns {shown}; these are accepted: {accepted}")


def _json_row(file: Path, source: DataSourceSpec, where: str) -> Row | None:
    """Return the first row; None if there is none, or if it is longer than `_HEAD_BYTES`."""
    with opened(file, f"{where}.name_or_path") as stream:
        head = stream.read(_HEAD_BYTES)
    # The last character may be cut in two.
    text = head.decode("utf-8", errors="replace").lstrip("\ufeff \t\r\n").removeprefix("[").lstrip()
    if text.rstrip() in {"", "]"}:  # without rows; other files may have some
        return None
    try:
        row, _ = json.JSONDecoder().raw_decode(text)
    except (ValueError, RecursionError) as error:
        if len(head) == _HEAD_BYTES:
            return None
        raise _unusable(where, source.name_or_path, f"the first row of {file.name} is not JSON ({error})") from error
    if not isinstance(row, dict):
        raise _unusable(where, source.name_or_path, f"the first row of {file.name} is not an object with columns")
    return row


def _columns(file: Path, field: str) -> Collection[str] | None:
    """Return the columns of every row of a file; None if no installed package reads it, as in the control plane's
    image, or if reading them would take too long."""
    if _is_closed(file) or _is_described_at_length(file):
        return None
    reader = reader_for(file, field)
    assert reader is not None, "only files with a reader are looked at"
    return reader.columns(file, field)


def _is_closed(file: Path) -> bool:
    """Whether a package that is needed to read the file is not installed."""
    if compression_of(file.name) == ".zst":
        return not reads_zstandard()
    return kind_of(file.name) == ".parquet" and find_spec("pyarrow") is None


def _is_described_at_length(file: Path) -> bool:
    """Whether a Parquet file's footer, which lists its columns, is longer than `_FOOTER_BYTES`."""
    if kind_of(file.name) != ".parquet" or compression_of(file.name):
        return False
    return _FOOTER_BYTES < _footer_bytes(file) <= file.stat().st_size


def _footer_bytes(file: Path) -> int:
    """Return the footer length in bytes recorded at the end of a Parquet file."""
    with file.open("rb") as stream:
        stream.seek(-min(8, file.stat().st_size), os.SEEK_END)
        return int.from_bytes(stream.read(4), "little")


def _unusable(where: str, name: str, why: str) -> DataError:
    field = f"{where}.name_or_path"
    return DataError(f"{field} is {name!r}: {why}", field=field, value=name)
