"""Uploaded files: training data that a tenant keeps, and where its jobs find them. Knows no store."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from swiftkv_platform.contract.attempts import StoredFile, file_key
from swiftkv_platform.data.checks import UploadedRows
from swiftkv_platform.errors import QuotaExceededError
from swiftkv_platform.specs import JobSpec

Purpose = Literal["fine-tune"]


@dataclass(frozen=True)
class File(UploadedRows):
    """An uploaded file. Times are Unix seconds."""

    id: str
    tenant: str
    created_by: str
    created_at: int
    filename: str
    """Name of the upload, for display."""
    purpose: Purpose
    expires_at: int | None = None
    """Time from which no new job may use it; it is deleted once no job does."""

    @property
    def key(self) -> str:
        return file_key(self.tenant, self.id)


def check_quota(tenant: str, used: int, most: int | None) -> None:
    """Raise `QuotaExceededError` if a tenant's files and models have, or would have, more than `most` bytes. None: no
    limit."""
    if most is not None and used > most:
        raise QuotaExceededError(
            f"files and models of tenant {tenant!r} come to {used} bytes; its quota max_stored_bytes is {most}; delete "
            "some, whose bytes are free within minutes, or ask the operator for more",
            field="max_stored_bytes",
            value=used,
        )


FilesOf = Callable[[JobSpec, str], Mapping[str, StoredFile]]
"""(spec, tenant) -> those uploaded files of the tenant that the spec names, by id."""


def no_files(_spec: JobSpec, _tenant: str) -> Mapping[str, StoredFile]:
    """Return no file."""
    return {}
