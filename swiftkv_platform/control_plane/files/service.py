"""Uploading and deleting files: a row and its object, or neither. Rows of data are checked by `data.checks`.

The object is written before its row, so that a row always has its object. A crash between the two leaves an object
without a row, which the sweeper removes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import IO

from swiftkv_platform.contract.attempts import FILE_SUFFIX, FILES_PREFIX, is_file_id, new_file_id, parse_file_time
from swiftkv_platform.control_plane.base import Caller, Clock
from swiftkv_platform.control_plane.components import Components
from swiftkv_platform.control_plane.files.repository import File, FileRepository, Purpose
from swiftkv_platform.control_plane.parsing import ParserPool
from swiftkv_platform.data.checks import check_upload
from swiftkv_platform.errors import ConflictError, DatabaseUnavailableError, InvalidInputError, NotFoundError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.private_directories import open_workspace
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.object_store import ObjectStore
from swiftkv_platform.web.limiters import Client

_SWEEP_INTERVAL_S = 600.0
_MAX_FILES_PER_QUERY = 500
_MAX_UPLOAD_AGE_S = 3600.0
"""Age in seconds from which an object without a row cannot belong to a running upload."""


@dataclass
class FileService:
    """Operations of the file routes."""

    parts: Components
    settings: Settings

    def check_quota(self, caller: Caller, announced: int) -> None:
        """Check whether an upload of `announced` bytes can be stored, before reading it.

        Raises `InvalidInputError` for a file that is too large, and `QuotaExceededError`.
        """
        policy = self.parts.policies.get(caller.tenant)
        most = min(self.settings.max_file_bytes, policy.max_file_bytes or self.settings.max_file_bytes)
        if announced > most:
            raise InvalidInputError(
                f"file has {announced} bytes; the max for tenant {caller.tenant!r} is {most}; split it into "
                "several files",
                field="file",
                value=announced,
            )
        self.parts.files.check_quota(caller.tenant, announced, policy)

    def upload(
        self,
        content: IO[bytes],
        *,
        filename: str,
        purpose: Purpose,
        expires_after_s: int | None,
        caller: Caller,
        client: Client,
        parsers: ParserPool,
    ) -> File:
        """Check every row in a parser process, and store the file's object and row, or nothing.

        Raises `DataError` with the line of an invalid row, `StorageError` and `DatabaseUnavailableError` if it is
        not stored, and as `check_quota`.
        """
        # 1. copy the upload to disk  2. check size, quota and rows  3. upload the object  4. insert the row
        policy, now = self.parts.policies.get(caller.tenant), int(self.parts.clock())
        max_rows = min(self.settings.max_file_rows, policy.max_file_rows or self.settings.max_file_rows)
        with open_workspace() as directory:
            path = directory / f"rows{FILE_SUFFIX}"
            with path.open("wb") as copy:
                shutil.copyfileobj(content, copy)
            self.check_quota(caller, path.stat().st_size)
            found = parsers.run(client, check_upload, path, filename, field="file", max_rows=max_rows)
            file = File(
                **vars(found),
                id=new_file_id(),
                tenant=caller.tenant,
                created_by=caller.name,
                created_at=now,
                filename=filename,
                purpose=purpose,
                expires_at=None if expires_after_s is None else now + expires_after_s,
            )
            self.parts.objects.upload_file(path, file.object_key)
        try:
            return self.parts.files.add(file, policy=policy)
        except DatabaseUnavailableError:
            raise  # The row may be stored although no answer came; without it, the sweeper removes the object.
        except Exception:
            self.parts.objects.delete(file.object_key)
            raise

    def open_content(self, file_id: str, caller: Caller) -> tuple[File, Iterator[bytes]]:
        """Return (the file's row, stream of its bytes). Raises `NotFoundError`."""
        file = self.parts.files.get(file_id, tenant=caller.tenant)
        return file, self.parts.objects.stream(file.object_key)

    def delete(self, file_id: str, caller: Caller) -> None:
        """Delete a file. Raises `NotFoundError`, and `ConflictError` while an unfinished job uses it."""
        file = self.parts.files.remove(file_id, tenant=caller.tenant)
        self.parts.objects.delete(file.object_key)


@dataclass
class FileSweeper:
    """Deletes expired unused files, and objects left by interrupted uploads."""

    files: FileRepository
    objects: ObjectStore
    clock: Clock
    _next: float = field(default=0.0, init=False)

    def tick(self) -> None:
        """Sweep every ten minutes. Raises as the repository and the store do."""
        now = self.clock()
        if now < self._next:
            return
        self._next = now + _SWEEP_INTERVAL_S
        for file in self.files.list_expired(now, limit=_MAX_FILES_PER_QUERY):
            self._delete_expired_file(file)
        self._remove_orphans(now)

    def _delete_expired_file(self, file: File) -> None:
        try:
            self.files.remove(file.id, tenant=file.tenant)
        except (ConflictError, NotFoundError) as error:  # in use, or deleted meanwhile
            get_logger().info("expired file kept", file=file.id, reason=error.message)
            return
        self.objects.delete(file.object_key)
        get_logger().info("file expired", file=file.id, tenant=file.tenant)

    def _remove_orphans(self, now: float) -> None:
        old: dict[str, str] = {}
        for entry in self.objects.list(FILES_PREFIX):
            name = entry.key.rpartition("/")[2].removesuffix(FILE_SUFFIX)
            if is_file_id(name) and parse_file_time(name) < now - _MAX_UPLOAD_AGE_S:
                old[name] = entry.key
            if len(old) == _MAX_FILES_PER_QUERY:
                self._remove_objects_without_row(old)
                old = {}
        self._remove_objects_without_row(old)

    def _remove_objects_without_row(self, keys: Mapping[str, str]) -> None:
        for file_id in keys.keys() - self.files.list_existing_ids(list(keys)):
            self.objects.delete(keys[file_id])
            get_logger().info("object without a file row removed", key=keys[file_id])
