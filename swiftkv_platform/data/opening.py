"""Open sources as tables that are read row by row: hub data sets, local files, stored objects and built-in data. Knows
no tokenizer and no row format.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from swiftkv_platform.contract.attempts import SUFFIX, StoredFile
from swiftkv_platform.data.files import READERS, FileReader, NumberedRow, Row, Table, reader_for
from swiftkv_platform.data.repositories import read_laid_out, read_repository, read_saved
from swiftkv_platform.errors import DataError, InvalidInputError
from swiftkv_platform.sources import OPEN, Access, Boundary, BuiltinSource, FileSource, HubSource, PathSource, S3Source
from swiftkv_platform.sources.chat_prompts import chat_prompts, unseen_chat_prompts
from swiftkv_platform.sources.corpus import standard_library_modules
from swiftkv_platform.sources.layout import (
    ACCEPTED,
    check_subset,
    check_whole,
    choose,
    is_hub_layout,
    is_saved_dataset,
    kind_of,
    source_files,
)
from swiftkv_platform.sources.names import refuse_shadowed
from swiftkv_platform.sources.recall_prompts import long_recall_prompts, recall_prompts
from swiftkv_platform.specs import BUILTIN_CHATS, BUILTIN_DATA, BUILTIN_LONG_RECALL, BUILTIN_RECALL, DataSourceSpec


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
                raise DataError(f"{field} is {name!r}: no such file or directory", field=field, value=name)
            boundary = access.boundary
            location = boundary.check(location, field)
            if location.is_dir():
                boundary.check_tree(location, field)
                if (saved := _saved(location, source, path, boundary)) is not None:
                    return saved
            return _local(location, source, path, boundary)
        case HubSource(name):
            if access.is_restricted:
                refuse_shadowed(name, field)
                return [read_repository(source, path)]
            return [read_laid_out(name, source, path)]


def _needed(remote: RemoteFiles | None, name: str, field: str) -> RemoteFiles:
    if remote is None:
        raise InvalidInputError.of(
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
        raise DataError(
            f"{field} is {name!r}, whose rows differ from those uploaded (SHA-256 {digest} instead of "
            f"{stored.sha256}); upload the file again",
            field=field,
            value=name,
        )
    return replace(_file_table(file, READERS[SUFFIX], field), origin=name)


_MADE = {BUILTIN_CHATS: chat_prompts, BUILTIN_RECALL: recall_prompts, BUILTIN_LONG_RECALL: long_recall_prompts}
_PROMPTS: Mapping[str, dict[str, Callable[[], list[str]]]] = {
    name: {"train": partial(made, held_out=False), "held_out": partial(made, held_out=True)}
    for name, made in _MADE.items()
}
"""Functions that return the prompts of each split of a built-in source."""
_PROMPTS[BUILTIN_CHATS]["unseen"] = unseen_chat_prompts


def _builtin(source: DataSourceSpec, path: str) -> list[Table]:
    check_subset(source, path)
    if source.name_or_path in _PROMPTS:
        return [_prompts(source, path)]
    if source.name_or_path != BUILTIN_DATA:
        raise DataError.of(
            f"{path}.name_or_path",
            source.name_or_path,
            f"; the built-in data sets are {', '.join((BUILTIN_DATA, *_PROMPTS))}",
        )
    if source.split != "train":
        raise DataError.of(
            f"{path}.split", source.split, f"; {BUILTIN_DATA} offers 'train' and evaluates on its held-out modules"
        )
    modules = list(standard_library_modules())
    return [
        _listed(BUILTIN_DATA, [{"text": module.text} for module in modules if module.held_out is side], held_out=side)
        for side in (False, True)
    ]


def _prompts(source: DataSourceSpec, path: str) -> Table:
    """Return the prompts of a split of a built-in source, which only the teacher answers."""
    if source.complete is None:
        raise DataError(
            f"{path} is {source.name_or_path} without complete: its rows are requests, which the teacher answers; "
            "add complete: {}",
            field=f"{path}.name_or_path",
            value=source.name_or_path,
        )
    splits = _PROMPTS[source.name_or_path]
    if source.split not in splits:
        raise DataError.of(f"{path}.split", source.split, f"; {source.name_or_path} has {' and '.join(splits)}")
    rows = [{"prompt": prompt} for prompt in splits[source.split]()]
    return Table(source.name_or_path, ("prompt",), lambda _columns: enumerate(rows, start=1), lambda: len(rows))


def _listed(origin: str, rows: Sequence[Row], *, held_out: bool) -> Table:
    return Table(origin, ("text",), lambda _columns: enumerate(rows, start=1), lambda: len(rows), held_out=held_out)


def _local(location: Path, source: DataSourceSpec, path: str, boundary: Boundary) -> list[Table]:
    name, field = source.name_or_path, f"{path}.name_or_path"
    files = [boundary.check(file, field) for file in source_files(location, source, path)]
    readers = [(file, reader_for(file, field)) for file in files]
    tables = [_file_table(file, reader, field) for file, reader in readers if reader is not None]
    if not tables:
        what = "a directory without readable files" if location.is_dir() else "not a readable file"
        raise DataError(f"{field} is {name!r}, {what}; {ACCEPTED}", field=field, value=name)
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
        raise DataError.of(field, named.name, f", which has no readable objects; {ACCEPTED}")
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


def _saved(location: Path, source: DataSourceSpec, path: str, boundary: Boundary) -> list[Table] | None:
    """Return the split of a directory in the layout of `datasets` or the hub; None for any other directory."""
    if is_saved_dataset(location):
        check_subset(source, path)
        return [read_saved(location, source, path, boundary)]
    return [read_laid_out(str(location), source, path, boundary)] if is_hub_layout(location) else None
