"""Uploaded files: rows that a tenant keeps for its jobs to train on, and where jobs find them. Knows no store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from swiftkv_platform.contract.attempts import StoredFile, file_key
from swiftkv_platform.control_plane.base import Clock, Page, Slice
from swiftkv_platform.errors import QuotaExceededError
from swiftkv_platform.sources.access import file_ids
from swiftkv_platform.specs import JobSpec

Purpose = Literal["fine-tune"]


@dataclass(frozen=True)
class File:
    """An uploaded file. Times are Unix seconds."""

    id: str
    tenant: str
    created_by: str
    created_at: int
    filename: str
    """Name as it was uploaded, for people."""
    purpose: Purpose
    size: int
    """Bytes."""
    rows: int
    sha256: str
    format: str
    """Row format of its first row; `prompts` for rows that only the teacher's answers complete."""
    columns: tuple[str, ...]
    """Columns of its first row."""
    expires_at: int | None = None
    """From then on no new job may use it, and it is deleted once no job does."""

    @property
    def key(self) -> str:
        return file_key(self.tenant, self.id)


class FileRepository(Protocol):
    """Rows of files. Each method is one transaction."""

    def add(self, file: File, *, max_bytes: int | None = None) -> File:
        """Store a new file. `max_bytes`: bytes of the tenant's files together, this one included. Raises
        `QuotaExceededError`."""
        ...

    def get(self, file_id: str, *, tenant: str) -> File:
        """Raises `NotFoundError`, also for another tenant's file."""
        ...

    def list(self, page: Page, *, tenant: str) -> Slice[File]:
        """Raises `InvalidInputError` if `page.after` names no file of the tenant."""
        ...

    def find(self, ids: Sequence[str], *, tenant: str) -> Mapping[str, File]:
        """Those of the ids that are the tenant's."""
        ...

    def used_bytes(self, tenant: str) -> int:
        """Bytes of the tenant's files and imported models together."""
        ...

    def remove(self, file_id: str, *, tenant: str) -> File:
        """Remove a file's row. Raises `NotFoundError`, and `ConflictError` while a job that has not ended uses it."""
        ...

    def expired(self, now: float, *, limit: int) -> Sequence[File]:
        """Files of all tenants whose time is over, the longest first."""
        ...

    def known(self, ids: Sequence[str]) -> set[str]:
        """Those of the ids that have a row, of whichever tenant."""
        ...


def check_quota(tenant: str, used: int, added: int, most: int) -> None:
    """Raises `QuotaExceededError` where what a tenant brought would have more than `most` bytes together."""
    if used + added > most:
        raise QuotaExceededError(
            f"files and imported models of tenant {tenant!r} have {used} bytes, and with {added} more would exceed "
            f"its quota max_stored_bytes, {most}; delete some, or ask for more",
            field="max_stored_bytes",
            value=used + added,
        )


FilesOf = Callable[[JobSpec, str], Mapping[str, StoredFile]]
"""(spec, tenant) -> the uploaded files that the spec names and the tenant has, by id."""


def no_files(_spec: JobSpec, _tenant: str) -> Mapping[str, StoredFile]:
    """Return no file."""
    return {}


def files_of(files: FileRepository, store_uri: str, *, usable_at: Clock | None = None) -> FilesOf:
    """Return the lookup of files. `store_uri`: the object store, as workers open it. `usable_at`: files that have
    expired by its time are left out; None: for jobs that were accepted before."""

    def find(spec: JobSpec, tenant: str) -> Mapping[str, StoredFile]:
        ids = file_ids(spec)
        if not ids:
            return {}
        now = None if usable_at is None else usable_at()
        return {
            file.id: StoredFile(uri=f"{store_uri}/{file.key}", sha256=file.sha256, size=file.size, columns=file.columns)
            for file in files.find(ids, tenant=tenant).values()
            if now is None or file.expires_at is None or file.expires_at > now
        }

    return find
