"""Uploaded files as control plane and workers know them: their ids, and where their rows lie. No I/O."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import Field
from ulid import ULID

from swiftkv_platform.frozen import FrozenModel

PREFIX = "files"
"""Prefix of all tenants' files in the object store."""
SUFFIX = ".jsonl"
_ID = re.compile(r"file-[0-7][0-9A-HJKMNP-TV-Z]{25}")


class StoredFile(FrozenModel):
    """Rows of an uploaded file in the object store."""

    uri: str
    """Address of the object."""
    sha256: str
    size: Annotated[int, Field(ge=1)]
    """Bytes."""
    columns: tuple[str, ...] = ()
    """Columns of its first row."""


def new_file_id() -> str:
    """A fresh id; ids sort by the time they were made."""
    return f"file-{ULID()}"


def is_file_id(name: str) -> bool:
    """Whether a name has the form of an uploaded file's id, which no repository of the hub is given."""
    return _ID.fullmatch(name) is not None


def file_key(tenant: str, file_id: str) -> str:
    """Key of a file's rows."""
    return f"{PREFIX}/{tenant}/{file_id}{SUFFIX}"


def made_at(file_id: str) -> float:
    """Unix seconds at which an id was made."""
    return float(ULID.from_str(file_id.removeprefix("file-")).timestamp)
