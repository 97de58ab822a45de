"""Where samples come from: a hub data set, local files, fetched objects or the standard library, as tables of rows.
Knows no tokenizer and no row format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from swiftkv_platform.demo.corpus import standard_library_modules
from swiftkv_platform.errors import DataError, InvalidInputError, StorageError
from swiftkv_platform.specs import BUILTIN_DATA, DataSourceSpec

if TYPE_CHECKING:
    from datasets import Dataset

Fetch = Callable[[str], Path]
"""Brings an `s3://` object or prefix to this machine and returns its local path."""

Row = dict[str, Any]

_BUILDERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text", ".py": "text"}
_SUFFIXES = ", ".join(_BUILDERS)
_ROWS_PER_CHUNK = 512


@dataclass(frozen=True)
class Table:
    """Rows with the same columns."""

    origin: str
    """What messages call it: a hub id, or the file or directory."""
    files: tuple[Path, ...]
    """The local files the rows were read from, where there are any."""
    rows: Dataset
    held_out: bool | None = None
    """The side of the hold-out the source itself puts these rows on; None leaves it to `validation_fraction`."""

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.rows.column_names)

    def chunks(
        self, columns: Sequence[str], indices: npt.NDArray[np.int64] | None, *, path: str
    ) -> Iterator[tuple[int, list[Row]]]:
        """Yield (offset of the first row, rows) over the rows `indices`, or all; rows hold `columns` only.

        Raises:
            DataError: a string is not UTF-8, which the reader of JSON and Parquet does not look at.
        """
        rows = self.rows.select_columns(list(columns))
        if indices is not None:
            rows = rows.select(indices)
        offset = 0
        try:
            for chunk in rows.iter(batch_size=_ROWS_PER_CHUNK):
                values = [dict(zip(chunk, row, strict=True)) for row in zip(*chunk.values(), strict=True)]
                yield offset, values
                offset += len(values)
        except UnicodeDecodeError as error:
            for file in self.files:
                if _BUILDERS[file.suffix] == "json":
                    check_json(file, path)
            raise DataError(
                f"{path}: {self.origin} holds text that is not UTF-8 ({error.reason}); UTF-8 text would do",
                field=path,
                value=self.origin,
            ) from error


def read_source(source: DataSourceSpec, *, path: str, fetch: Fetch | None) -> list[Table]:
    """Open a source.

    Args:
        path: the source's place in the spec, e.g. `data.sources[0]`, for error messages.
        fetch: needed for `s3://` alone.

    Raises:
        DataError: nothing is there, or it cannot be read.
        InvalidInputError: an `s3://` source without `fetch`.
        StorageError: the hub does not answer.
    """
    name, field = source.name_or_path, f"{path}.name_or_path"
    if name.startswith("builtin:"):
        tables = _builtin(source, path)
    elif name.startswith("s3://"):
        if fetch is None:
            raise InvalidInputError(
                f"{field} is {name!r}, but this process has no object store to fetch it from; a local path would do",
                field=field,
                value=name,
            )
        tables = _local(fetch(name), name, field)
    elif Path(name).expanduser().exists():
        tables = _local(Path(name).expanduser(), name, field)
    elif _looks_like_a_path(name):
        raise DataError(f"{field} is {name!r}: no such file or directory", field=field, value=name)
    else:
        tables = _hub(source, path)
    if not any(len(table.rows) for table in tables if not table.held_out):
        raise DataError(f"{field} is {name!r}, which holds no rows; at least one is needed", field=field, value=name)
    return tables


def _looks_like_a_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or name.count("/") > 1 or Path(name).suffix in _BUILDERS


def _builtin(source: DataSourceSpec, path: str) -> list[Table]:
    from datasets import Dataset

    if source.name_or_path != BUILTIN_DATA:
        raise DataError(
            f"{path}.name_or_path is {source.name_or_path!r}; the only built-in data set is {BUILTIN_DATA!r}",
            field=f"{path}.name_or_path",
            value=source.name_or_path,
        )
    if source.split != "train":
        raise DataError(
            f"{path}.split is {source.split!r}; {BUILTIN_DATA} offers 'train' and evaluates on its held-out modules",
            field=f"{path}.split",
            value=source.split,
        )
    modules = list(standard_library_modules())
    return [
        Table(
            BUILTIN_DATA,
            (),
            Dataset.from_dict({"text": [module.text for module in modules if module.held_out is held_out]}),
            held_out,
        )
        for held_out in (False, True)
    ]


def _hub(source: DataSourceSpec, path: str) -> list[Table]:
    import datasets

    name = source.name_or_path
    try:
        rows = datasets.load_dataset(name, split=source.split)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(
            f"{path}.name_or_path is {name!r}: no such path here and no such data set on the hub ({error})",
            field=f"{path}.name_or_path",
            value=name,
        ) from error
    except ConnectionError as error:
        raise StorageError(
            f"{path}.name_or_path is {name!r}: no such path here, and the hub does not answer ({error})",
            field=f"{path}.name_or_path",
            value=name,
        ) from error
    except (ValueError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{path} cannot be read: data set {name!r}, split {source.split!r}: {error}", field=path, value=name
        ) from error
    return [Table(name, (), rows)]


def _local(location: Path, name: str, field: str) -> list[Table]:
    files = sorted(p for p in location.rglob("*") if p.suffix in _BUILDERS) if location.is_dir() else [location]
    if not files or files[0].suffix not in _BUILDERS:
        what = "a directory without readable files" if location.is_dir() else "not a readable file"
        raise DataError(f"{field} is {name!r}, {what}; {_SUFFIXES} would do", field=field, value=name)
    tables = []
    for builder in ("json", "parquet", "text"):
        group = tuple(file for file in files if _BUILDERS[file.suffix] == builder)
        if group:
            origin = str(group[0]) if len(group) == 1 else str(location)
            rows = _read_text(group, field) if builder == "text" else _load(builder, group, field)
            tables.append(Table(origin, group, rows))
    return tables


def _read_text(files: Sequence[Path], field: str) -> Dataset:
    from datasets import Dataset

    texts = []
    for file in files:
        try:
            texts.append(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise not_utf8(file, None, error, field) from error
    return Dataset.from_dict({"text": texts})


def _load(builder: str, files: Sequence[Path], field: str) -> Dataset:
    """Read `files` of one kind, which must agree on their columns."""
    import datasets

    filled = [str(file) for file in files if not _is_empty(file)]
    if not filled:
        return datasets.Dataset.from_dict({})
    options = {"parse_agent_traces": False} if builder == "json" else {}
    try:
        return datasets.load_dataset(builder, data_files=filled, split="train", **options)
    except (ValueError, datasets.exceptions.DatasetsError) as error:
        if builder == "json":
            for file in files:
                check_json(file, field)
        raise DataError(
            f"{field}: {_name(files)} cannot be read as {builder}: {error.__cause__ or error}",
            field=field,
            value=_name(files),
        ) from error


def _is_empty(file: Path) -> bool:
    """No rows, in ways that the reader of JSON takes for damage."""
    return file.stat().st_size < 64 and file.read_bytes().strip() in {b"", b"[]"}


def _name(files: Sequence[Path]) -> str:
    return str(files[0]) if len(files) == 1 else f"{files[0]} and {len(files) - 1} more"


def check_json(file: Path, field: str) -> None:
    """Raise the DataError that names the first undecodable place of a JSON or JSON Lines file, if there is one."""
    with file.open("rb") as stream:
        is_array = stream.read(1024).lstrip().startswith(b"[")
        stream.seek(0)
        for number, text in enumerate([stream.read()] if is_array else stream, start=1):
            try:
                if text.strip():
                    json.loads(text.rstrip())
            except UnicodeDecodeError as error:
                raise not_utf8(file, None if is_array else number, error, field) from error
            except json.JSONDecodeError as error:
                line, column = (error.lineno, error.colno) if is_array else (number, error.colno)
                raise DataError(
                    f"{field}: {file}, line {line}, column {column} is not JSON: {error.msg}; "
                    "one object a line, or one array of objects, would do",
                    field=field,
                    value=f"{file}:{line}",
                ) from error


def not_utf8(file: Path, line: int | None, error: UnicodeDecodeError, field: str) -> DataError:
    """The error for a file in another encoding."""
    place = f"{file}, line {line}" if line else str(file)
    return DataError(
        f"{field}: {place}, byte {error.start} is not UTF-8 ({error.reason}); UTF-8 text would do",
        field=field,
        value=f"{file}:{line}" if line else str(file),
    )
