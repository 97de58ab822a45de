"""API keys and their scopes, in a file of hashed keys, and authentication by them or by a token of an OIDC issuer.
Independent of HTTP and the database.

A key is 256 random bits, so its SHA-256 needs no salt. The file, which control plane and replicas read, reveals only
names and tenants. A changed file is read at the next request; while it is invalid, the last valid version stays in use.
An owner has several keys during a rotation.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from swiftkv_platform.errors import ConflictError, InvalidInputError, NotFoundError, UnauthenticatedError
from swiftkv_platform.security.operator_files import ReloadedFile
from swiftkv_platform.security.principals import MAX_TIME, NAME_PATTERN, Principal, Scope

if TYPE_CHECKING:
    from swiftkv_platform.security.tokens import JWTVerifier


KEY_PREFIX = "skv_"
_ID_DIGITS = 16


class ApiKey(Principal):
    """A key of the key file."""

    name: Annotated[str, Field(pattern=NAME_PATTERN)]
    """Owner, as recorded with jobs and in the audit trail."""
    scopes: Annotated[frozenset[Scope], Field(min_length=1)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
    """SHA-256 of the key, in hexadecimal."""
    not_before: Annotated[int, Field(ge=0, le=MAX_TIME)] | None = None
    """Unix seconds from which the key is valid; None: at once."""

    @property
    def id(self) -> str:
        """Id of the key: the first digits of its hash, which do not grant access."""
        return f"key_{self.sha256[:_ID_DIGITS]}"

    @property
    def credential(self) -> str:
        return self.id

    def has_begun(self, now: float) -> bool:
        return self.not_before is None or now >= self.not_before

    def has_expired(self, now: float) -> bool:
        return self.expires_at is not None and now >= self.expires_at


class _KeyFile(BaseModel, extra="forbid"):
    keys: list[ApiKey] = []


class KeyRing:
    """Keys of the last valid version of a file. Raises `InvalidInputError` if its first version is invalid."""

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._file = ReloadedFile(path, _parse, field="api_keys_file", hint="create it with `swiftkv keys create`")

    def authenticate(self, authorization: str | None) -> ApiKey:
        """Return the key of an `Authorization: Bearer` header. Raises `UnauthenticatedError`."""
        token = parse_bearer_token(authorization)
        if not token:
            raise UnauthenticatedError("send `Authorization: Bearer <key>`", field="Authorization")
        key = self.find_key(token)
        if key is None:
            raise UnauthenticatedError("the API key is unknown, or was revoked", field="Authorization")
        now = self._clock()
        if key.not_before is not None and not key.has_begun(now):
            message = f"key {key.name!r} is valid from {_format_utc(key.not_before)}; use the previous key until then"
            raise UnauthenticatedError(message, field="Authorization")
        if key.expires_at is not None and key.has_expired(now):
            message = f"key {key.name!r} expired at {_format_utc(key.expires_at)}; ask the operator for a new one"
            raise UnauthenticatedError(message, field="Authorization")
        return key

    def find_key(self, token: str) -> ApiKey | None:
        """Return the key of a token, also if not valid now; None if unknown."""
        return self._file.content.get(_hash_token(token))

    def list_keys(self) -> list[ApiKey]:
        return list(self._file.content.values())

    @property
    def is_usable(self) -> bool:
        return self._file.is_usable


def parse_bearer_token(authorization: str | None) -> str:
    """Return the token of an `Authorization: Bearer` header; empty for any other header."""
    scheme, _, token = (authorization or "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _parse(content: bytes) -> dict[str, ApiKey]:
    return {key.sha256: key for key in _KeyFile.model_validate_json(content).keys}


def create_key(path: Path, *, name: str, tenant: str, scopes: frozenset[Scope], **rights: Any) -> str:
    """Add a key to the file, which is created if missing, and return its token, which cannot be shown again. `rights`:
    other fields of `ApiKey`.

    Raises `ConflictError` if the name exists, and `InvalidInputError` for an invalid field.
    """
    with _lock_directory(path):
        keys = KeyRing(path).list_keys() if path.exists() else []
        if any(key.name == name for key in keys):
            raise ConflictError(f"a key named {name!r} exists; rotate it, or revoke it first", field="name", value=name)
        token = _make_token()
        try:
            key = ApiKey(name=name, tenant=tenant, scopes=scopes, sha256=_hash_token(token), **rights)
        except ValidationError as error:
            first = error.errors()[0]
            raise InvalidInputError.for_field(str(first["loc"][0]), first["input"], f": {first['msg']}") from error
        _check_times(key)
        _replace_file(path, [*keys, key])
    return token


def rotate_key(
    path: Path, name: str, *, now: int, overlap_s: int, expires_at: int | None = None, not_before: int | None = None
) -> tuple[str, ApiKey]:
    """Add a key with the rights of its owner's newest key. Returns (token, which cannot be shown again; key).

    The owner's earlier keys expire `overlap_s` seconds after the new one becomes valid, if they do not expire earlier.
    Expired keys are removed from the file.

    Raises `NotFoundError` for an unknown owner, and `InvalidInputError` if the new key would never be valid or the
    overlap ends after the year 9999."""
    with _lock_directory(path):
        keys = KeyRing(path).list_keys()
        present = [key for key in keys if key.name == name]
        if not present:
            raise _make_not_found_error(path, name)
        token = _make_token()
        times = {"expires_at": expires_at, "not_before": not_before}
        new = present[-1].model_copy(update={**times, "sha256": _hash_token(token)})
        _check_times(new)
        end = max(now, not_before or now) + overlap_s
        if end > MAX_TIME:
            raise InvalidInputError(f"overlap is {overlap_s} s; it must end before the year 10000", field="overlap")
        others = [key for key in keys if key.name != name or not key.has_expired(now)]
        _replace_file(path, [*(_limit_validity(key, end) if key.name == name else key for key in others), new])
    return token, new


def revoke_key(path: Path, name_or_id: str) -> list[ApiKey]:
    """Remove all keys of an owner, or the key with this id, and return them. Raises `NotFoundError`."""
    with _lock_directory(path):
        keys = KeyRing(path).list_keys()
        gone = [key for key in keys if name_or_id in (key.name, key.id)]
        if not gone:
            raise _make_not_found_error(path, name_or_id)
        _replace_file(path, [key for key in keys if key not in gone])
    return gone


def _make_token() -> str:
    return KEY_PREFIX + secrets.token_urlsafe(32)


def _limit_validity(key: ApiKey, end: int) -> ApiKey:
    return key.model_copy(update={"expires_at": end if key.expires_at is None else min(end, key.expires_at)})


def _check_times(key: ApiKey) -> None:
    if key.expires_at is not None and key.not_before is not None and key.expires_at <= key.not_before:
        why = f", not after not_before ({key.not_before}); use a later time"
        raise InvalidInputError.for_field("expires_at", key.expires_at, why)


def _make_not_found_error(path: Path, name: str) -> NotFoundError:
    return NotFoundError(
        f"no key named {name!r} in {str(path)!r}; `swiftkv keys list` shows the keys", field="name", value=name
    )


@contextmanager
def _lock_directory(path: Path) -> Iterator[None]:
    """Hold the directory's lock, so that concurrent commands do not overwrite each other's changes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace_file(path: Path, keys: list[ApiKey]) -> None:
    """Replace the file atomically; only its owner may read it."""
    descriptor, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(_KeyFile(keys=keys).model_dump_json(indent=2, exclude_defaults=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        Path(partial).replace(path)
    finally:
        Path(partial).unlink(missing_ok=True)


def _hash_token(token: str) -> str:
    return hashlib.sha256(token.encode(errors="replace")).hexdigest()


def _format_utc(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))


@dataclass(frozen=True)
class Credentials:
    """Accepted credentials: API keys, OIDC tokens, or both."""

    key_ring: KeyRing | None
    tokens: JWTVerifier | None

    @property
    def operator_files(self) -> Mapping[str, Callable[[], bool]]:
        """For each file by name, a function that returns whether its newest version is in use."""
        files = {"keys": self.key_ring, "oidc": self.tokens}
        return {name: partial(getattr, file, "is_usable") for name, file in files.items() if file is not None}

    def authenticate(self, authorization: str | None) -> Principal:
        """Return the caller. May wait for a token's issuer. Raises `UnauthenticatedError`."""
        if self.tokens is not None and is_jwt_header(authorization):
            token = parse_bearer_token(authorization)
            if self.key_ring is None or self.key_ring.find_key(token) is None:
                return self.tokens.authenticate(token)
        if self.key_ring is None:
            raise UnauthenticatedError(
                "send `Authorization: Bearer <token>`, a token of a trusted issuer", field="Authorization"
            )
        return self.key_ring.authenticate(authorization)


def open_credentials(
    api_keys_file: Path | None, oidc_file: Path | None, *, clock: Callable[[], float] = time.time
) -> Credentials | None:
    """Open the operator's files. Returns None without files: then no authentication is required.

    Raises `InvalidInputError` for an invalid file.
    """
    if api_keys_file is None and oidc_file is None:
        return None
    tokens = None
    if oidc_file is not None:
        from swiftkv_platform.security.tokens import JWTVerifier  # imports libraries that only tokens need

        tokens = JWTVerifier(oidc_file)
    return Credentials(None if api_keys_file is None else KeyRing(api_keys_file, clock=clock), tokens)


def is_jwt_header(authorization: str | None) -> bool:
    """Whether a header contains a JSON Web Token rather than an API key."""
    token = parse_bearer_token(authorization)
    return token.count(".") == 2 and not token.startswith(KEY_PREFIX)
