"""The JSON of uploaded files, as OpenAI's clients read it. Knows no route and no database."""

from __future__ import annotations

from typing import Literal, Self

from swiftkv_platform.api.schemas import Answer
from swiftkv_platform.orchestration.files import File, Purpose


class FileAnswer(Answer):
    """An uploaded file. Times are Unix seconds."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    filename: str
    """Name as it was uploaded."""
    purpose: Purpose
    status: Literal["processed"] = "processed"
    """Every row has been looked at before the file was kept."""
    expires_at: int | None
    """From then on no new job may use the file; it is deleted once no job does."""
    sha256: str
    rows: int
    format: str
    """Row format of its first row; `prompts` for rows that only the teacher's answers complete."""

    @classmethod
    def of(cls, file: File) -> Self:
        return cls(
            id=file.id,
            bytes=file.size,
            created_at=file.created_at,
            filename=file.filename,
            purpose=file.purpose,
            expires_at=file.expires_at,
            sha256=file.sha256,
            rows=file.rows,
            format=file.format,
        )


class FileDeletedAnswer(Answer):
    """Confirmation that a file is deleted."""

    id: str
    object: Literal["file"] = "file"
    deleted: Literal[True] = True
