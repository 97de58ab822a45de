"""The audit trail's entries, one for each request that changes something or is refused access.

Once a caller is let in, the first transaction that its request commits carries the entry with the status that the
route answers with; it is put right before the answer if that turns out otherwise. Without such a transaction, the entry
is written by itself before the answer. Refusals are bounded: some of each address a minute, and some of all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from sqlalchemy import event
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from ulid import ULID

from swiftkv_platform.control_plane.access.rows import AuditEntry, SqlAudit, add, made_in
from swiftkv_platform.control_plane.base import Clock
from swiftkv_platform.control_plane.database.session import ALONGSIDE
from swiftkv_platform.errors import DatabaseUnavailableError, RateLimitedError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.security.principals import Principal
from swiftkv_platform.web.rate_limits import RateLimit

REQUEST_ID_HEADER = "X-Request-ID"
_LOOKING = frozenset({"GET", "HEAD", "OPTIONS"})
_ASKING = frozenset({"/jobs/validate"})
"""Routes that are `POST`ed to with a right to change something, and change nothing."""
_REFUSALS = frozenset({401, 403, 429})
_PER_ADDRESS, _PER_ADDRESS_AT_ONCE = 30, 20
"""Refusals of one address that are written in a minute."""
_OF_ALL, _OF_ALL_AT_ONCE = 600, 200
_LONGEST_ADDRESS, _LONGEST_TEXT = 64, 200
_NO_ROUTE = "unmatched"


class AuditRecord:
    """The entry of a request that is under way."""

    def __init__(self, request_id: str, address: str, method: str, now: float) -> None:
        self.entry = AuditEntry(
            id=f"aud_{ULID()}",
            created_at=now,
            request_id=request_id,
            actor=None,
            credential=None,
            tenant=None,
            address=address,
            method=method,
            route=_NO_ROUTE,
            object=None,
            status=0,
        )
        self._is_open = False
        self._is_stored = False
        self._only_asks = False

    def identify(self, request: Request, principal: Principal | None, *, name: str, tenant: str) -> None:
        """Name the caller and what it asks."""
        credential = None if principal is None else principal.credential
        self.entry = replace(self.entry, actor=name, credential=credential, tenant=tenant)
        self.locate(request.scope)

    def locate(self, scope: Scope) -> None:
        """Name the route, and the object that is in its path."""
        route = getattr(scope.get("route"), "path", None) or _NO_ROUTE
        named = next(iter(scope.get("path_params", {}).values()), None)
        status = self.entry.status or getattr(scope.get("route"), "status_code", None) or 200
        found = self.entry.object if named is None else _text(str(named), _LONGEST_TEXT)
        self.entry = replace(self.entry, route=route[:_LONGEST_TEXT], object=found, status=status)

    @property
    def changes(self) -> bool:
        """Whether the route changes something."""
        asks = self._only_asks or self.entry.method in _LOOKING
        return not asks and self.entry.route not in (*_ASKING, _NO_ROUTE)

    def open(self, *, only_asks: bool = False) -> None:
        """Let the next transaction carry the entry: the caller is let in. `only_asks`: to a route that changes
        nothing, whatever its method."""
        self._only_asks = only_asks
        self._is_open = self.changes

    def close(self) -> None:
        """The request is answered; what runs on is none of its doing."""
        self._is_open = False

    def join(self, session: Session) -> Callable[[], None]:
        """Prepare to add the entry to a transaction. Returns what adds it, to be called before the commit."""
        if not self._is_open or self._is_stored:
            return lambda: None
        made: list[str] = []

        def look(flushed: Session, *_: object) -> None:
            made.extend(found for found in (made_in(flushed),) if found is not None)

        event.listen(session, "before_flush", look)

        def write() -> None:
            session.flush()
            if made and self.entry.object is None:
                self.entry = replace(self.entry, object=made[0])
            event.listen(session, "after_commit", self._note_stored)
            add(session, self.entry)

        return write

    def _note_stored(self, _: Session) -> None:
        self._is_stored = True

    def settle(self, status: int) -> bool:
        """Take the status that is answered; whether the entry has to be written, or written again."""
        is_right = self._is_stored and status == self.entry.status
        self.entry = replace(self.entry, status=status)
        return not is_right


@dataclass
class Floods:
    """Bounds on how many refusals are written."""

    clock: Clock

    def __post_init__(self) -> None:
        self._each = RateLimit(_PER_ADDRESS, self.clock, burst=_PER_ADDRESS_AT_ONCE, of="address")
        self._all = RateLimit(_OF_ALL, self.clock, burst=_OF_ALL_AT_ONCE, of="address")
        self._lock = threading.Lock()
        self._left_out = 0

    def admit(self, address: str) -> int | None:
        """Number of refusals that were left out since the last one that was written; None leaves this one out too."""
        try:
            self._each.take(address)
            self._all.take("")
        except RateLimitedError:
            with self._lock:
                self._left_out += 1
            return None
        with self._lock:
            left_out, self._left_out = self._left_out, 0
        return left_out


class Audit:
    """Middleware that writes the entries, and names each request in its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["app"].state
        trail: SqlAudit | None = getattr(state, "audit", None)
        if scope["type"] != "http" or trail is None:  # an application that is not started has pages alone
            await self._app(scope, receive, send)
            return
        request_id = f"req_{ULID()}"
        address = _text(scope["client"][0] if scope.get("client") else "unknown", _LONGEST_ADDRESS)
        record = AuditRecord(request_id, address, scope["method"][:16], state.components.clock())
        scope.setdefault("state", {})["audit"] = record

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
                record.close()
                record.locate(scope)
                if _is_to_be_written(record, message["status"], state.floods):
                    await run_in_threadpool(_store, trail, record.entry)
            await send(message)

        token = ALONGSIDE.set(record.join)
        try:
            await self._app(scope, receive, watched)
        except Exception:
            # The answer to a bug is made further out.
            record.close()
            if _is_to_be_written(record, 500, state.floods):
                await run_in_threadpool(_store, trail, record.entry)
            raise
        finally:
            record.close()
            ALONGSIDE.reset(token)


def record_of(request: Request) -> AuditRecord:
    """The entry of the request."""
    record: AuditRecord = request.state.audit
    return record


def _is_to_be_written(record: AuditRecord, status: int, floods: Floods) -> bool:
    if status in _REFUSALS:
        left_out = floods.admit(record.entry.address)
        record.settle(status)
        if left_out is None:
            return False
        record.entry = replace(record.entry, left_out=left_out)
        return True
    # Who is not known changes nothing: bodies that are refused at the door, and sessions that are no more.
    return record.changes and record.entry.actor is not None and record.settle(status)


def _store(trail: SqlAudit, entry: AuditEntry) -> None:
    try:
        trail.store(entry)
    except DatabaseUnavailableError as error:
        # Nothing has changed: what changes something commits its entry with it.
        get_logger().error("audit entry not stored", **vars(entry), reason=error.message)


def _text(value: str, most: int) -> str:
    """The value without what a database refuses, and not longer than it takes."""
    return "".join(each if each.isascii() and each.isprintable() else "?" for each in value)[:most]
