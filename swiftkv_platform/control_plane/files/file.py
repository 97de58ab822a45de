"""Uploaded files: rows that a tenant keeps for its jobs to train on, and where jobs find them. Knows no store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from swiftkv_platform.contract.attempts import StoredFile, file_key
from swiftkv_platform.errors import QuotaExceededError
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
