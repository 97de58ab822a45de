"""Back up database and object store to a directory, and restore them. SQLite and PostgreSQL can be exchanged.

    backup.json             summary with a checksum per list; written last, so it marks a complete backup
    tables/{name}.jsonl     rows of one database snapshot
    objects.jsonl           key, size and SHA-256 of each object
    objects/{key}           the objects, unless only listed

The database is copied first: objects are stored before rows refer to them, so no referenced object is missing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError
from sqlalchemy import Table, func, insert, select
from sqlalchemy.orm import Session

from swiftkv_platform.control_plane.database.session import Database, get_current_revision
from swiftkv_platform.control_plane.database.tables import Base, LeaseRow, SessionRow
from swiftkv_platform.errors import (
    ArtifactCorruptError,
    ConflictError,
    InvalidInputError,
    ObjectNotFoundError,
    StorageError,
)
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.storage.object_store import CHUNK_SIZE, PROBE_KEY, ObjectInfo, ObjectStore

_SUMMARY_FILE = "backup.json"
_OBJECT_LIST_FILE = "objects.jsonl"
_MAX_NAMED_OBJECTS = 3
"""Max missing objects that an error message names."""
_ROWS_PER_BATCH = 500
"""Rows per SELECT or INSERT batch."""
_TABLES_WITHOUT_BACKUP = {LeaseRow.__tablename__, SessionRow.__tablename__}
"""Tables with short-lived rows: leases and sessions."""


class ListedFile(FrozenBaseModel):
    """Line count and checksum of a file in the backup."""

    lines: int
    sha256: str


class Backup(FrozenBaseModel):
    """Summary of a backup."""

    format_version: Literal[1] = 1
    created_at: float
    """Unix seconds."""
    schema_revision: str
    store_uri: str
    tables: dict[str, ListedFile]
    objects: ListedFile
    object_bytes: int
    has_objects: bool
    """Whether the objects are in the backup, or only listed."""


class ListedObject(FrozenBaseModel):
    key: str
    size: int
    sha256: str | None = None
    """None if the backup holds no objects."""


def back_up(database: Database, store: ObjectStore, directory: Path, *, objects: bool = True) -> Backup:
    """Copy all rows and objects to a new or empty directory.

    Args:
        objects: copy the objects; False only lists them, for a store with its own backups.

    Raises:
        ConflictError: the directory is not empty.
        StorageError: the store failed, or the directory is not writable.
        DatabaseUnavailableError: the database is unavailable.
    """
    with _convert_file_errors(directory):
        if directory.exists() and any(directory.iterdir()):
            raise ConflictError(
                f"{directory} is not empty; use a new directory", field="directory", value=str(directory)
            )
        # 1. copy the rows of one snapshot
        (directory / "tables").mkdir(parents=True)
        listed: dict[str, ListedFile] = {}
        with database.begin_read() as session:
            if not database.is_sqlite:
                session.connection(execution_options={"isolation_level": "REPEATABLE READ"})  # one view of all tables
            schema = get_current_revision(session.connection()) or "none"
            for table in list_tables():
                path = _get_table_path(directory, table.name)
                number = _write_rows(session, table, path)
                listed[table.name] = ListedFile(lines=number, sha256=_compute_sha256(path))
        # 2. copy or list the objects
        number, size = _copy_objects(store, directory, objects=objects)
        # 3. write the summary, which marks the backup as complete
        backup = Backup(
            created_at=time.time(),
            schema_revision=schema,
            store_uri=store.uri,
            tables=listed,
            objects=ListedFile(lines=number, sha256=_compute_sha256(directory / _OBJECT_LIST_FILE)),
            object_bytes=size,
            has_objects=objects,
        )
        (directory / _SUMMARY_FILE).write_text(backup.model_dump_json(indent=2))
    return backup


def restore(database: Database, store: ObjectStore, directory: Path, *, allow_missing: bool = False) -> Backup:
    """Copy a backup's objects to the store, then its rows to an empty database. Safe to repeat after a failure.

    Args:
        allow_missing: continue if listed objects are missing in the store.

    Raises:
        InvalidInputError: the directory has no complete backup, or a backup of another schema.
        ArtifactCorruptError: a checksum does not match, or objects are missing.
        ConflictError: the database is not empty.
        StorageError, DatabaseUnavailableError: as `back_up`.
    """
    with _convert_file_errors(directory):
        # 1. verify checksums, schema and the empty database, before any write
        backup = _read_summary(directory)
        _verify_checksums(directory, backup)
        with database.begin_read() as session:
            present = get_current_revision(session.connection())
        if present != backup.schema_revision:
            raise InvalidInputError(
                f"the backup has schema {backup.schema_revision}, the database has {present or 'none'}; restore with "
                "the version that made the backup, then upgrade",
                field="directory",
                value=backup.schema_revision,
            )
        _insert_rows(database, {})  # raises unless the database is empty
        # 2. copy the objects
        missing = [item for item in _read_objects(directory) if not _restore_object(store, directory, backup, item)]
        if missing and not allow_missing:
            names = ", ".join(item.key for item in missing[:_MAX_NAMED_OBJECTS])
            raise ArtifactCorruptError(
                f"{len(missing)} listed objects are missing or changed in {store.uri} ({names}); copy them there "
                "first, or use --allow-missing",
                field="directory",
                value=missing[0].key,
            )
        # 3. insert the rows
        replace_uri = partial(_replace_store_uri, old=backup.store_uri, new=store.uri)
        _insert_rows(
            database,
            {
                table.name: map(replace_uri, _read_rows(_get_table_path(directory, table.name)))
                for table in list_tables()
            },
        )
    return backup


def _copy_objects(store: ObjectStore, directory: Path, *, objects: bool) -> tuple[int, int]:
    """Copy or list all objects; return (number of objects, their bytes). Skips objects deleted during the copy."""
    number = size = 0
    with (directory / _OBJECT_LIST_FILE).open("w", encoding="utf-8") as file:
        for info in store.list(""):
            if info.key == PROBE_KEY:
                continue
            try:
                item = _copy_object(store, info, directory) if objects else ListedObject(key=info.key, size=info.size)
            except ObjectNotFoundError:
                continue
            file.write(item.model_dump_json() + "\n")
            number, size = number + 1, size + item.size
    return number, size


def _copy_object(store: ObjectStore, info: ObjectInfo, directory: Path) -> ListedObject:
    path = directory / "objects" / info.key
    store.download_file(info.key, path)
    return ListedObject(key=info.key, size=path.stat().st_size, sha256=_compute_sha256(path))


def _read_summary(directory: Path) -> Backup:
    try:
        return Backup.model_validate_json((directory / _SUMMARY_FILE).read_bytes())
    except (FileNotFoundError, ValidationError) as error:
        raise InvalidInputError(
            f"{directory} is not a complete backup ({_SUMMARY_FILE}: {error}); use a directory from `swiftkv backup`",
            field="directory",
            value=str(directory),
        ) from error


def _verify_checksums(directory: Path, backup: Backup) -> None:
    for path, listed in [
        (directory / _OBJECT_LIST_FILE, backup.objects),
        *((_get_table_path(directory, name), listed) for name, listed in backup.tables.items()),
    ]:
        if _compute_sha256(path) != listed.sha256:
            raise _make_checksum_error(path)


def _read_objects(directory: Path) -> Iterator[ListedObject]:
    with (directory / _OBJECT_LIST_FILE).open(encoding="utf-8") as file:
        for line in file:
            yield ListedObject.model_validate_json(line)


def _restore_object(store: ObjectStore, directory: Path, backup: Backup, item: ListedObject) -> bool:
    """Copy an object to the store if the backup has it. Returns whether the store has it afterwards."""
    present = store.head(item.key)
    if not backup.has_objects:
        return present is not None and present.size == item.size
    if present is not None and present.size == item.size and _compute_object_sha256(store, item.key) == item.sha256:
        return True
    path = directory / "objects" / item.key
    if _compute_sha256(path) != item.sha256:
        raise _make_checksum_error(path)
    store.upload_file(path, item.key)
    return True


def _replace_store_uri(value: Any, old: str, new: str) -> Any:
    """Replace the prefix `old` of every nested `artifact_uri` by `new`."""
    if isinstance(value, list):
        return [_replace_store_uri(item, old, new) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: new + item.removeprefix(old)
        if key == "artifact_uri" and isinstance(item, str) and item.startswith(f"{old}/")
        else _replace_store_uri(item, old, new)
        for key, item in value.items()
    }


def _get_table_path(directory: Path, table: str) -> Path:
    return directory / "tables" / f"{table}.jsonl"


def list_tables() -> list[Table]:
    """Return the tables of a backup, in order of foreign keys."""
    return [table for table in Base.metadata.sorted_tables if table.name not in _TABLES_WITHOUT_BACKUP]


def _write_rows(session: Session, table: Table, path: Path) -> int:
    """Write a table's rows to a file, one JSON object per line. Returns the number of rows."""
    number = 0
    query = select(table).order_by(*table.primary_key.columns).execution_options(yield_per=_ROWS_PER_BATCH)
    with path.open("w", encoding="utf-8") as file:
        for row in session.execute(query):
            file.write(json.dumps(dict(row._mapping), ensure_ascii=False) + "\n")
            number += 1
    return number


def _read_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _insert_rows(database: Database, rows: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
    """Insert rows by table into an empty database, in one transaction. Raises `ConflictError` if it is not empty."""
    with database.begin_write() as session:
        for table in list_tables():
            number = session.scalar(select(func.count()).select_from(table)) or 0
            if number:
                message = f"the database has {number} rows in {table.name}; restore into an empty database"
                raise ConflictError(message, field="database_url")
        for table in list_tables():
            left = iter(rows.get(table.name, ()))
            while batch := [dict(row) for row in islice(left, _ROWS_PER_BATCH)]:
                session.execute(insert(table), batch)
            if not database.is_sqlite:
                _set_id_sequence(session, table)


def _set_id_sequence(session: Session, table: Table) -> None:
    """Set PostgreSQL's sequence to the highest inserted number; SQLite needs no such step."""
    column = table.autoincrement_column
    highest = None if column is None else session.scalar(select(func.max(column)))
    if column is not None and highest is not None:
        session.execute(select(func.setval(func.pg_get_serial_sequence(table.name, column.name), highest)))


def _compute_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _compute_object_sha256(store: ObjectStore, key: str) -> str:
    digest = hashlib.sha256()
    for piece in store.stream(key, CHUNK_SIZE):
        digest.update(piece)
    return digest.hexdigest()


def _make_checksum_error(path: Path) -> ArtifactCorruptError:
    return ArtifactCorruptError(
        f"{path} does not match its checksum, and was not restored; use another copy of the backup",
        field="directory",
        value=str(path),
    )


@contextmanager
def _convert_file_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise ArtifactCorruptError(
            f"the backup has no {error.filename}; use another copy of the backup",
            field="directory",
            value=str(directory),
        ) from error
    except OSError as error:
        raise StorageError(
            f"cannot read or write {directory}: {error}", field="directory", value=str(directory)
        ) from error
