"""API keys and their scopes. A file of hashed keys that the operator keeps; knows no HTTP and no database.

A key is 256 random bits, so its SHA-256 needs no salt, and the file gives nothing away but names and tenants. Control
plane and replicas read the same format; a file that has changed is read again at the next request, and one that is
broken changes nothing until it is mended.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable
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
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.security.operator_files import OperatorFile

_PREFIX = "skv_"
_LATEST = 253_402_300_799
"""The last second of the year 9999."""
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


class ApiKey(FrozenModel):
    """A line of the key file."""

    name: Annotated[str, Field(pattern=_NAME_PATTERN)]
    """Owner; jobs and the audit log carry it. Unique in the file."""
    tenant: Annotated[str, Field(pattern=_NAME_PATTERN)] = "default"
    """Keys of one tenant see the same jobs, models and deployments, and no other tenant's."""
    scopes: Annotated[frozenset[Scope], Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the key, in hexadecimal."""
    expires_at: Annotated[int, Field(ge=0, le=_LATEST)] | None = None
    """Unix seconds from which the key is refused; None: never."""
    requests_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Requests that a replica answers the key in a minute; None: no limit."""
    tokens_per_minute: Annotated[int, Field(ge=1)] | None = None
    """Tokens, of prompts and answers together; None: no limit."""
    max_priority: int = 0
    """Highest priority that its requests may ask a replica for: the lowest number, since lower goes first."""

    def has_expired(self, now: float) -> bool:
        return self.expires_at is not None and now >= self.expires_at

    def require(self, scope: Scope) -> None:
        """Raises `ForbiddenError` if the key does not open `scope`."""
        if scope not in self.scopes and Scope.ADMIN not in self.scopes:
            held = ", ".join(sorted(self.scopes))
            raise ForbiddenError(f"key {self.name!r} has the scopes {held}; this needs {scope}", field="Authorization")


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid")

    keys: list[ApiKey] = []


class KeyRing:
    """The keys in a file, in its last good version.

    Raises `InvalidInputError` where the file cannot be used from the start.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file = OperatorFile(
            path, _parse, field="api_keys_file", hint="it holds API keys, and `swiftkv keys create` writes one"
        )

    def authenticate(self, authorization: str | None) -> ApiKey:
        """The key of an `Authorization: Bearer` header. Raises `UnauthenticatedError`."""
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not token.strip():
            raise UnauthenticatedError("send `Authorization: Bearer <key>`", field="Authorization")
        key = self._file.content.get(_digest(token.strip()))
        if key is None:
            raise UnauthenticatedError("the key is unknown, or was revoked", field="Authorization")
        if key.expires_at is not None and key.has_expired(self._clock()):
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(key.expires_at))
            raise UnauthenticatedError(
                f"key {key.name!r} expired at {when}; ask the operator for another", field="Authorization"
            )
        return key

    def read(self) -> list[ApiKey]:
        """All keys, in the file's order."""
        return list(self._file.content.values())

    @property
    def is_usable(self) -> bool:
        """Whether the file's newest version is the one that holds."""
        return self._file.is_usable


def _parse(content: bytes) -> dict[str, ApiKey]:
    return {key.sha256: key for key in _KeyFile.model_validate_json(content).keys}


def create_key(
    path: Path,
    *,
    name: str,
    tenant: str,
    scopes: frozenset[Scope],
    expires_at: int | None = None,
    requests_per_minute: int | None = None,
    tokens_per_minute: int | None = None,
    max_priority: int = 0,
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
            expires_at=expires_at,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            max_priority=max_priority,
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
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()
