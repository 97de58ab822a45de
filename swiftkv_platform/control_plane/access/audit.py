"""The audit trail's entries, one for each request that changes something or is refused access.

Once a caller is admitted, the first transaction that its request commits includes the entry, with the status that the
route normally answers. If the status turns out otherwise, the entry is corrected before the answer. Without such a
transaction, the entry is written alone before the answer. Recorded refusals are limited, per address and in total.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated

from fastapi import Query
from sqlalchemy import event, insert, select, update
from sqlalchemy.orm import Session
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from ulid import ULID

from swiftkv_platform.control_plane.base import Clock, Page, Slice
from swiftkv_platform.control_plane.database.paging import Store, fetch, unknown_cursor, value_of
from swiftkv_platform.control_plane.database.session import ALONGSIDE
from swiftkv_platform.control_plane.database.tables import AuditRow, DeploymentRow, FileRow, JobRow
from swiftkv_platform.errors import DatabaseUnavailableError, RateLimitedError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.security.principals import Principal
from swiftkv_platform.web.limiters import RateLimiter


@dataclass(frozen=True)
class AuditEntry:
    """A request that changed something, tried to, or was refused access."""

    id: str
    created_at: float
    """Unix seconds."""
    request_id: str
    """Value of the answer's `X-Request-ID`."""
    actor: str | None
    """Name of the caller; None where none was known."""
    credential: str | None
    """Id of the key, or issuer and subject of the token."""
    tenant: str | None
    address: str
    method: str
    route: str
    """Template of the route, such as `/jobs/{job_id}/cancel`."""
    object: str | None
    """Id of what the request was about."""
    status: int
    """HTTP status of the answer."""
    left_out: int = 0
    """Number of earlier refusals that were not recorded because there were too many."""


_Value = Annotated[str | None, Query(max_length=300)]
_Time = Annotated[float | None, Query(ge=0.0, le=1e12, allow_inf_nan=False, description="Unix seconds")]


@dataclass(frozen=True)
class AuditFilter:
    """Values that entries must have, as the query of a request names them; None matches any."""

    tenant: _Value = None
    actor: _Value = None
    credential: _Value = None
    address: _Value = None
    route: _Value = None
    object: Annotated[_Value, Query(alias="about")] = None
    request_id: _Value = None
    status: Annotated[int | None, Query(ge=100, le=599)] = None
    since: _Time = None
    """Inclusive."""
    until: _Time = None
    """Exclusive."""


_EQUAL = ("tenant", "actor", "credential", "address", "route", "object", "request_id", "status")


class SqlAudit(Store):
    """Audit entries, which do not change once their request is answered."""

    def list(self, page: Page, wanted: AuditFilter) -> Slice[AuditEntry]:
        """Return a page of matching entries in order of time. Raises `InvalidInputError` for an unknown cursor."""
        query = select(AuditRow)
        for name in _EQUAL:
            value = getattr(wanted, name)
            if value is not None:
                query = query.where(getattr(AuditRow, name) == value)
        if wanted.since is not None:
            query = query.where(AuditRow.created_at >= wanted.since)
        if wanted.until is not None:
            query = query.where(AuditRow.created_at < wanted.until)
        with self._database.reading() as session:
            if page.after is not None:
                seen = session.get(AuditRow, page.after)
                if seen is None or wanted.tenant not in (None, seen.tenant):
                    raise unknown_cursor(page.after)
            rows = fetch(session, query, AuditRow.id, page, after=page.after)
            return Slice([value_of(AuditEntry, row) for row in rows.items], rows.has_more)

    def store(self, entry: AuditEntry) -> None:
        """Write an entry; if a transaction has already added it, update its status and object."""
        with self._database.writing() as session:
            changed = update(AuditRow).where(AuditRow.id == entry.id)
            done = session.connection().execute(changed.values(status=entry.status, object=entry.object))
            if not done.rowcount:
                _add(session, entry)


def _add(session: Session, entry: AuditEntry) -> None:
    """Write an entry as a part of the session's transaction."""
    session.execute(insert(AuditRow).values(**asdict(entry)))


def _made_in(session: Session) -> str | None:
    """Return the id of the job, deployment or file that the session is about to insert, if any."""
    made = (row.id for row in session.new if isinstance(row, JobRow | DeploymentRow | FileRow))
    return next(made, None)


REQUEST_ID_HEADER = "X-Request-ID"
_LOOKING = frozenset({"GET", "HEAD", "OPTIONS"})
_ASKING = frozenset({"/jobs/validate"})
"""`POST` routes that require a right to change something, but change nothing."""
_REFUSALS = frozenset({401, 403, 429})
_PER_ADDRESS, _PER_ADDRESS_AT_ONCE = 30, 20
"""Refusals of one address that are recorded in a minute, and at once."""
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
        """Record the caller and the route."""
        credential = None if principal is None else principal.credential
        self.entry = replace(self.entry, actor=name, credential=credential, tenant=tenant)
        self.locate(request.scope)

    def locate(self, scope: Scope) -> None:
        """Record the route, and the object that its path names."""
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
        """Let the next transaction include the entry, once the caller is admitted. `only_asks`: the route changes
        nothing, whatever its method."""
        self._only_asks = only_asks
        self._is_open = self.changes

    def close(self) -> None:
        """Join no further transaction: the request is answered."""
        self._is_open = False

    def join(self, session: Session) -> Callable[[], None]:
        """Prepare to add the entry to a transaction. Returns a function that adds it, to be called before the
        commit."""
        if not self._is_open or self._is_stored:
            return lambda: None
        made: list[str] = []

        def look(flushed: Session, *_: object) -> None:
            made.extend(found for found in (_made_in(flushed),) if found is not None)

        event.listen(session, "before_flush", look)

        def write() -> None:
            session.flush()
            if made and self.entry.object is None:
                self.entry = replace(self.entry, object=made[0])
            event.listen(session, "after_commit", self._note_stored)
            _add(session, self.entry)

        return write

    def _note_stored(self, _: Session) -> None:
        self._is_stored = True

    def settle(self, status: int) -> bool:
        """Set the status of the answer. Returns whether the entry must still be written, or corrected."""
        is_right = self._is_stored and status == self.entry.status
        self.entry = replace(self.entry, status=status)
        return not is_right


@dataclass
class Floods:
    """Limits on how many refusals are recorded."""

    clock: Clock

    def __post_init__(self) -> None:
        self._each = RateLimiter(_PER_ADDRESS, self.clock, burst=_PER_ADDRESS_AT_ONCE, caller_kind="address")
        self._all = RateLimiter(_OF_ALL, self.clock, burst=_OF_ALL_AT_ONCE, caller_kind="address")
        self._lock = threading.Lock()
        self._left_out = 0

    def admit(self, address: str) -> int | None:
        """Return the number of refusals left out since the last recorded one; None if this one is left out too."""
        try:
            self._each.count_request(address)
            self._all.count_request("")
        except RateLimitedError:
            with self._lock:
                self._left_out += 1
            return None
        with self._lock:
            left_out, self._left_out = self._left_out, 0
        return left_out


class Audit:
    """Middleware that writes the entries, and gives each answer its `X-Request-ID`."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["app"].state
        trail: SqlAudit | None = getattr(state, "audit", None)
        if scope["type"] != "http" or trail is None:  # an application that is not started serves only pages
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
            # An outer middleware answers unexpected exceptions.
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
    # An unknown caller changes nothing: its body was refused before the route, or its session has ended.
    return record.changes and record.entry.actor is not None and record.settle(status)


def _store(trail: SqlAudit, entry: AuditEntry) -> None:
    try:
        trail.store(entry)
    except DatabaseUnavailableError as error:
        # Nothing has changed: a transaction that changes something contains its entry.
        get_logger().error("audit entry not stored", **vars(entry), reason=error.message)


def _text(value: str, most: int) -> str:
    """Replace characters that a database may refuse by `?`, and cut the value to `most` characters."""
    return "".join(each if each.isascii() and each.isprintable() else "?" for each in value)[:most]
