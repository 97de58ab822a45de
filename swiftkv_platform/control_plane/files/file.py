"""Uploaded files: training data that a tenant keeps, and where its jobs find them. Knows no store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swiftkv_platform.contract.attempts import file_key
from swiftkv_platform.data.checks import UploadedRows

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
