"""Sources of rows: hub data sets, local files, objects of a store, the standard library, each as tables that are
read row by row. Knows no tokenizer and no row format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from swiftkv_platform.closed_paths import refuse_shadowed
from swiftkv_platform.data_layout import SUFFIXES, data_files, is_hub_layout, is_saved_dataset
from swiftkv_platform.demo.corpus import standard_library_modules
from swiftkv_platform.distillation.data_files import READERS, FileReader, NumberedRow, Row, reader_for
from swiftkv_platform.errors import DataError, InvalidInputError, StorageError
from swiftkv_platform.specs import BUILTIN_DATA, DataSourceSpec, looks_like_a_path

_SUFFIXES = ", ".join(SUFFIXES)
_ROWS_PER_BATCH = 512


class RemoteFiles(Protocol):
    """Objects at `s3://` addresses, brought to this machine."""

    def list(self, uri: str) -> Sequence[str]:
        """Addresses of the object at `uri`, or of those below it, sorted. Raises `DataError` if there are none."""

    def fetch(self, uri: str) -> Path:
        """Download one object; the same address again finds it there."""


@dataclass(frozen=True)
class Table:
    """Rows of one origin, read from the beginning each time, in the same order."""

    origin: str
    """Name in messages: a hub id, or a file."""
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


def read_source(source: DataSourceSpec, *, path: str, remote: RemoteFiles | None) -> list[Table]:
    """Open a source; rows are read when tables are asked for them.

    Args:
        path: the source's place in the spec, e.g. `data.sources[0]`, for error messages.
        remote: needed for `s3://` alone.

    Raises:
        DataError: nothing is there, or it cannot be read.
        InvalidInputError: an `s3://` source without `remote`.
        StorageError: the hub does not answer.
    """
    name, field = source.name_or_path, f"{path}.name_or_path"
    if name.startswith("builtin:"):
        return _builtin(source, path)
    if name.startswith("s3://"):
        if remote is None:
            raise InvalidInputError(
                f"{field} is {name!r}, but this process has no object store to fetch it from; a local path would do",
                field=field,
                value=name,
            )
        return _remote(remote, source, field)
    refuse_shadowed(name, field)
    location = Path(name).expanduser()
    if location.is_dir() and (saved := _saved(location, source, path)) is not None:
        return saved
    if location.exists():
        return _local(location, name, field)
    if looks_like_a_path(name, READERS):
        raise DataError(f"{field} is {name!r}: no such file or directory", field=field, value=name)
    return _hub(name, source, path)


def _builtin(source: DataSourceSpec, path: str) -> list[Table]:
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
        _listed(BUILTIN_DATA, [{"text": module.text} for module in modules if module.held_out is side], held_out=side)
        for side in (False, True)
    ]


def _listed(origin: str, rows: Sequence[Row], *, held_out: bool) -> Table:
    return Table(origin, ("text",), lambda _columns: enumerate(rows, start=1), lambda: len(rows), held_out=held_out)


def _local(location: Path, name: str, field: str) -> list[Table]:
    readers = [(file, reader_for(file)) for file in data_files(location)]
    tables = [_file_table(file, reader, field) for file, reader in readers if reader is not None]
    if not tables:
        what = "a directory without readable files" if location.is_dir() else "not a readable file"
        raise DataError(f"{field} is {name!r}, {what}; {_SUFFIXES} would do", field=field, value=name)
    return tables


def _file_table(file: Path, reader: FileReader, field: str) -> Table:
    return Table(
        str(file),
        reader.columns(file, field) if file.stat().st_size else None,
        lambda columns: reader.rows(file, columns, field) if file.stat().st_size else iter(()),
        lambda: reader.count(file, field) if file.stat().st_size else 0,
        reader.unit,
    )


def _remote(remote: RemoteFiles, source: DataSourceSpec, field: str) -> list[Table]:
    """One table an object. A streamed one is fetched when it is read and deleted when that is done."""
    name = source.name_or_path
    uris = [uri for uri in remote.list(name) if Path(uri).suffix in READERS]
    if not uris:
        raise DataError(
            f"{field} is {name!r}, which has no readable objects; {_SUFFIXES} would do", field=field, value=name
        )
    return [_object_table(remote, uri, field, keep=not source.streaming) for uri in uris]


def _object_table(remote: RemoteFiles, uri: str, field: str, *, keep: bool) -> Table:
    def table() -> Table:
        file = remote.fetch(uri)
        reader = reader_for(file)
        assert reader is not None, "the address ends like a readable file"
        return _file_table(file, reader, field)

    def rows(columns: Sequence[str] | None) -> Iterator[NumberedRow]:
        opened = table()
        try:
            yield from opened.rows(columns)
        finally:
            if not keep:
                Path(opened.origin).unlink(missing_ok=True)

    return Table(uri, None, rows, lambda: table().count(), READERS[Path(uri).suffix].unit)


def _saved(location: Path, source: DataSourceSpec, path: str) -> list[Table] | None:
    """The split of a directory that `datasets` or the hub laid out; None for any other directory."""
    if is_saved_dataset(location):
        return _from_disk(location, source, path)
    return _hub(str(location), source, path) if is_hub_layout(location) else None


def _from_disk(location: Path, source: DataSourceSpec, path: str) -> list[Table]:
    import datasets

    name = str(location)
    try:
        found = datasets.load_from_disk(name)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: data set {name!r}: {error}", field=path, value=name) from error
    if isinstance(found, datasets.DatasetDict):
        if source.split not in found:
            raise DataError(
                f"{path}.split is {source.split!r}; {name} has {', '.join(found)}",
                field=f"{path}.split",
                value=source.split,
            )
        found = found[source.split]
    return [_dataset_table(name, found, path)]


def _hub(name: str, source: DataSourceSpec, path: str) -> list[Table]:
    """A split of a hub data set, or of a directory laid out like one."""
    import datasets

    try:
        found = datasets.load_dataset(name, source.subset, split=source.split, streaming=source.streaming)
    except datasets.exceptions.DatasetNotFoundError as error:
        raise DataError(
            f"{path}.name_or_path is {name!r}: no such path here and no such data set on the hub ({error})",
            field=f"{path}.name_or_path",
            value=name,
        ) from error
    except ConnectionError as error:
        raise StorageError(
            f"{path}.name_or_path is {name!r}: no such path here, and the hub does not answer ({error}); a local copy "
            "of the data set's directory would do",
            field=f"{path}.name_or_path",
            value=name,
        ) from error
    except (ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise DataError(
            f"{path} cannot be read: data set {name!r}, subset {source.subset!r}, split {source.split!r}: "
            f"{error.__cause__ or error}; of several configurations {path}.subset names one",
            field=path,
            value=name,
        ) from error
    return [_dataset_table(name, found, path)]


def _dataset_table(name: str, dataset: Any, path: str) -> Table:
    """The table of a `Dataset`, or of an `IterableDataset`, whose rows come as they are read."""
    columns = dataset.column_names or tuple(next(iter(dataset), {}))
    return Table(name, tuple(columns), partial(_dataset_rows, dataset, name, path), lambda: len(dataset))


def _dataset_rows(dataset: Any, name: str, path: str, columns: Sequence[str] | None) -> Iterator[NumberedRow]:
    number = 1
    try:
        for batch in (dataset if columns is None else dataset.select_columns(list(columns))).iter(_ROWS_PER_BATCH):
            for values in zip(*batch.values(), strict=True):
                yield number, dict(zip(batch, values, strict=True))
                number += 1
    except ConnectionError as error:
        raise StorageError(f"{path}: the hub stopped answering after row {number - 1} of {name!r} ({error})") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}: {name}, row {number} or one soon after it, holds text that is not UTF-8 ({error.reason}); UTF-8 "
            "text would do",
            field=path,
            value=f"{name}:{number}",
        ) from error
