"""The dashboard's sessions, with which a browser sends a key or token that no script can read, and last uses of keys.

The cookie holds a random id. The database holds the id's hash, and the key sealed with the id: every control plane can
serve every session, and the database alone, or a copy of it, gives no access. The key itself is needed, not just its
name: replicas of a deployment ask for it.
"""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Mapping
from dataclasses import dataclass

from sqlalchemy import delete, select

from swiftkv_platform.control_plane.base import Clock
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.database.tables import KeyUseRow, SessionRow
from swiftkv_platform.errors import DatabaseUnavailableError, UnauthenticatedError
from swiftkv_platform.limits import SESSIONS
from swiftkv_platform.logs import get_logger
from swiftkv_platform.security.keys import ApiKey
from swiftkv_platform.security.principals import Authenticator, Principal

_MAX_ENDED_AT_ONCE = 100
"""Max old sessions of a key that a new session ends. Earlier versions did not limit the number of sessions."""
_ID_BYTES = 32
_MAX_NAME_CHARS = 64
_PAD_PREFIX = b"swiftkv session seal\0"
_MIN_USE_INTERVAL_S = 60.0
"""Min seconds between two stored uses of a key."""


@dataclass(frozen=True)
class Session:
    """A browser that has signed in."""

    id: str
    """Value of the cookie."""
    key: Principal
    authorization: str
    """`Authorization` header of the session's key."""
    began_at: float
    """Unix seconds."""
    expires_at: float
    """Unix seconds."""


class Sessions:
    """Sessions of all control planes that share a database. `lifetime_s`: seconds from signing in to expiry,
    regardless of use."""

    def __init__(self, database: Database, authenticator: Authenticator, clock: Clock, *, lifetime_s: int) -> None:
        self._database = database
        self._authenticator = authenticator
        self._clock = clock
        self._lifetime_s = lifetime_s

    def authenticate(self, api_key: str) -> Principal:
        """Return the caller that a key or token belongs to. Raises `UnauthenticatedError`."""
        return self._authenticator.authenticate(f"Bearer {api_key}")

    def create(self, api_key: str, key: Principal) -> Session:
        """Create a session of `key`, which `authenticate` returned for `api_key`. Deletes expired sessions, and the
        key's oldest sessions beyond `SESSIONS`."""
        # 1. the row, with the sealed key  2. delete expired and excess sessions, and insert the row
        session_id, now = secrets.token_urlsafe(_ID_BYTES), self._clock()
        expires_at = now + self._lifetime_s
        if key.expires_at is not None:
            expires_at = min(expires_at, float(key.expires_at))
        name = _make_owner_name(key)
        row = SessionRow(
            id_sha256=_hash_id(session_id),
            key_name=name,
            sealed_key=_xor_with_pad(session_id, api_key.strip().encode()).hex(),
            created_at=now,
            expires_at=expires_at,
        )
        of_key = select(SessionRow.id_sha256).where(SessionRow.key_name == name)
        excess = of_key.order_by(SessionRow.expires_at.desc()).offset(SESSIONS.default - 1).limit(_MAX_ENDED_AT_ONCE)
        with self._database.begin_write() as transaction:
            self._database.lock(transaction, f"sessions of {name}")
            transaction.execute(delete(SessionRow).where(SessionRow.expires_at <= now))
            if oldest := transaction.scalars(excess).all():
                transaction.execute(delete(SessionRow).where(SessionRow.id_sha256.in_(oldest)))
            transaction.add(row)
        get_logger().info("signed in", tenant=key.tenant, key=key.name)
        return Session(session_id, key, f"Bearer {api_key}", now, expires_at)

    def get(self, session_id: str) -> Session:
        """Return the session of a cookie. Raises `UnauthenticatedError`; deletes the session if its key is no longer
        valid."""
        with self._database.begin_read() as transaction:
            stored = transaction.get(SessionRow, _hash_id(session_id))
        if stored is None or stored.expires_at <= self._clock():
            raise UnauthenticatedError("the session has ended; sign in again", field="Cookie")
        authorization = f"Bearer {_xor_with_pad(session_id, bytes.fromhex(stored.sealed_key)).decode(errors='replace')}"
        try:
            api_key = self._authenticator.authenticate(authorization)
        except UnauthenticatedError:
            self.delete(session_id)
            raise
        return Session(session_id, api_key, authorization, stored.created_at, stored.expires_at)

    def delete(self, session_id: str) -> None:
        """Delete a session, if it exists."""
        with self._database.begin_write() as transaction:
            transaction.execute(delete(SessionRow).where(SessionRow.id_sha256 == _hash_id(session_id)))


def _make_owner_name(key: Principal) -> str:
    """Return a unique name of the caller to count its sessions by: hashed if it is too long for the column, as for
    token holders."""
    name = f"{key.tenant}/{key.name}"
    return name if len(name) <= _MAX_NAME_CHARS else hashlib.sha256(name.encode()).hexdigest()


def _hash_id(session_id: str) -> str:
    """Hash a session's id; 256 random bits need no salt."""
    return hashlib.sha256(session_id.encode()).hexdigest()


def _xor_with_pad(session_id: str, text: bytes) -> bytes:
    """XOR `text` with a pad derived from the session's id; the same call encrypts and decrypts. Each pad encrypts one
    key, so this is a one-time pad.

    A modified ciphertext decrypts to an unknown key.
    """
    pad = hashlib.shake_256(_PAD_PREFIX + session_id.encode()).digest(len(text))
    return bytes(left ^ right for left, right in zip(text, pad, strict=True))


class KeyUses:
    """Records the last use of each API key, at most once per minute and key in all control planes of a database."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._database = database
        self._clock = clock
        self._last_recorded: dict[str, float] = {}
        """Unix seconds by key id."""
        self._lock = threading.Lock()

    def record(self, principal: Principal) -> None:
        """Store the use of a key now, unless a use within the last minute is stored.

        If the database is unavailable, the failure is logged and a later use is stored.
        """
        if not isinstance(principal, ApiKey):
            return
        now = self._clock()
        with self._lock:
            if now - self._last_recorded.get(principal.id, -_MIN_USE_INTERVAL_S) < _MIN_USE_INTERVAL_S:
                return
            self._last_recorded[principal.id] = now
        try:
            self._store(principal.id, now)
        except DatabaseUnavailableError as error:
            get_logger().warning(
                "last use of the key not stored", key=principal.name, key_id=principal.id, reason=error.message
            )

    def _store(self, key_id: str, now: float) -> None:
        """Store a use, unless another control plane has stored a use within the last minute."""
        with self._database.begin_write() as session:
            self._database.lock(session, f"uses of {key_id}")
            seen = session.get(KeyUseRow, key_id)
            if seen is None:
                session.add(KeyUseRow(key_id=key_id, last_used_at=int(now)))
            elif seen.last_used_at <= now - _MIN_USE_INTERVAL_S:
                seen.last_used_at = int(now)


def list_last_uses(database: Database) -> Mapping[str, int]:
    """Return the last use of each key in Unix seconds, by key id."""
    with database.begin_read() as session:
        return {row.key_id: row.last_used_at for row in session.scalars(select(KeyUseRow))}
