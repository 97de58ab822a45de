"""API keys and their scopes. A file of hashed keys that the operator keeps; knows no HTTP and no database.

A key is 256 random bits, so its SHA-256 needs no salt, and the file gives nothing away but names and tenants. Control
plane and replicas read the same format; a file that has changed is read again at the next request.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swiftkv_platform.errors import (
    ConflictError,
    ForbiddenError,
    InvalidInputError,
    NotFoundError,
    UnauthenticatedError,
)

_PREFIX = "skv_"
_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"


class Scope(StrEnum):
    """Scope of an API key."""

    JOBS_READ = "jobs:read"
    """Jobs, models, deployments and what they leave, to look at."""
    JOBS_WRITE = "jobs:write"
    """Submit, pause, resume, cancel."""
    DEPLOY = "deploy"
    """Put models into service and take them out."""
    GENERATE = "generate"
    """Ask a served model."""
    ADMIN = "admin"
    """All of these."""


class ApiKey(BaseModel):
    """A line of the key file."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    name: Annotated[str, Field(pattern=_NAME_PATTERN)]
    """Owner; jobs and the audit log carry it. Unique in the file."""
    tenant: Annotated[str, Field(pattern=_NAME_PATTERN)] = "default"
    """Keys of one tenant see the same jobs, models and deployments, and no other tenant's."""
    scopes: Annotated[frozenset[Scope], Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the key."""
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Requests that a replica answers the key in a minute; None: no limit."""
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Tokens, of prompts and answers together; None: no limit."""

    def require(self, scope: Scope) -> None:
        """Raises `ForbiddenError` if the key does not open `scope`."""
        if scope not in self.scopes and Scope.ADMIN not in self.scopes:
            held = ", ".join(sorted(self.scopes))
            raise ForbiddenError(f"key {self.name!r} has the scopes {held}; this needs {scope}", field="Authorization")


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[ApiKey] = []


class KeyRing:
    """The keys in a file. Raises `InvalidInputError` where the file cannot be read or understood."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stamp: tuple[int, int, int] | None = None
        self._by_digest: dict[str, ApiKey] = {}
        self.read()

    def authenticate(self, authorization: str | None) -> ApiKey:
        """The key of an `Authorization: Bearer` header. Raises `UnauthenticatedError`."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise UnauthenticatedError("send `Authorization: Bearer <key>`", field="Authorization")
        self.read()
        key = self._by_digest.get(_digest(token.strip()))
        if key is None:
            raise UnauthenticatedError("the key is unknown, or was revoked", field="Authorization")
        return key

    def read(self) -> list[ApiKey]:
        """All keys, in the file's order."""
        try:
            status = self._path.stat()
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            if stamp != self._stamp:
                found = _KeyFile.model_validate_json(self._path.read_bytes()).keys
                self._by_digest = {key.sha256: key for key in found}
                self._stamp = stamp
        except (OSError, ValidationError) as error:
            raise InvalidInputError(
                f"the key file {str(self._path)!r} cannot be used: {error}; `swiftkv keys create` writes one",
                field="api_keys_file",
                value=str(self._path),
            ) from error
        return list(self._by_digest.values())


def create_key(
    path: Path,
    *,
    name: str,
    tenant: str,
    scopes: frozenset[Scope],
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
) -> str:
    """Add a key to the file, which is made if it is missing, and return the key: it is told only now.

    Raises `ConflictError` for a name that is taken and `InvalidInputError` for one that cannot be used.
    """
    keys = KeyRing(path).read() if path.exists() else []
    if any(key.name == name for key in keys):
        raise ConflictError(f"there is a key named {name!r} already; revoke it first", field="name", value=name)
    token = _PREFIX + secrets.token_urlsafe(32)
    try:
        key = ApiKey(
            name=name,
            tenant=tenant,
            scopes=scopes,
            sha256=_digest(token),
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise InvalidInputError(
            f"{first['loc'][0]} is {first['input']!r}: {first['msg']}", field=str(first["loc"][0]), value=first["input"]
        ) from error
    _write(path, [*keys, key])
    return token


def revoke_key(path: Path, name: str) -> None:
    """Take a key out of the file. Raises `NotFoundError`."""
    keys = KeyRing(path).read()
    kept = [key for key in keys if key.name != name]
    if len(kept) == len(keys):
        raise NotFoundError(f"there is no key named {name!r} in {str(path)!r}", field="name", value=name)
    _write(path, kept)


def _write(path: Path, keys: list[ApiKey]) -> None:
    """Replace the file in one step; only its owner may read it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(_KeyFile(keys=keys).model_dump_json(indent=2) + "\n")
        Path(partial).replace(path)
    finally:
        Path(partial).unlink(missing_ok=True)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()
