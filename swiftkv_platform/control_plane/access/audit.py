"""The audit trail's entries, one for each request that changes something, reads captured traffic or is refused access.

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

from swiftkv_platform.control_plane.base import Clock, Page, PageQuery
from swiftkv_platform.control_plane.database.session import (
    TRANSACTION_HOOK,
    Repository,
    fetch_rows,
    make_cursor_error,
    to_dataclass,
)
from swiftkv_platform.control_plane.database.tables import AuditRow, DeploymentRow, FileRow, JobRow
from swiftkv_platform.errors import DatabaseUnavailableError, RateLimitedError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.security.principals import Principal
from swiftkv_platform.web.limiters import RateLimiter


@dataclass(frozen=True)
class AuditEntry:
    """A request that changed something, tried to, read captured traffic, or was refused access."""

    id: str
    created_at: float
    """Unix seconds."""
    request_id: str
    """`X-Request-ID` of the response."""
    actor: str | None
    """Name of the caller; None if unknown."""
    credential: str | None
    """Id of the key, or issuer and subject of the token."""
    tenant: str | None
    address: str
    method: str
    route: str
    """Template of the route, such as `/jobs/{job_id}/cancel`."""
    object: str | None
    """Id of the object that the request reads or changes, e.g. of a job."""
    status: int
    """HTTP status of the response."""
    left_out: int = 0
    """Number of earlier refusals that were not recorded, to limit the size of the trail."""


_FilterText = Annotated[str | None, Query(max_length=300)]
_FilterTime = Annotated[float | None, Query(ge=0.0, le=1e12, allow_inf_nan=False, description="Unix seconds")]


@dataclass(frozen=True)
class AuditFilter:
    """Query parameters that select entries; None matches any value."""

    tenant: _FilterText = None
    actor: _FilterText = None
    credential: _FilterText = None
    address: _FilterText = None
    route: _FilterText = None
    object: Annotated[_FilterText, Query(alias="about")] = None
    request_id: _FilterText = None
    status: Annotated[int | None, Query(ge=100, le=599)] = None
    since: _FilterTime = None
    """Inclusive."""
    until: _FilterTime = None
    """Exclusive."""


_EXACT_FIELDS = ("tenant", "actor", "credential", "address", "route", "object", "request_id", "status")


class AuditTrail(Repository):
    """Stored audit entries. They do not change after their request has been answered."""

    def list_entries(self, page: PageQuery, filters: AuditFilter) -> Page[AuditEntry]:
        """Return a page of matching entries, ordered by time. Raises `InvalidInputError` for an unknown cursor."""
        # 1. filters  2. the cursor must be an entry that the caller may read  3. the page
        query = select(AuditRow)
        for name in _EXACT_FIELDS:
            value = getattr(filters, name)
            if value is not None:
                query = query.where(getattr(AuditRow, name) == value)
        if filters.since is not None:
            query = query.where(AuditRow.created_at >= filters.since)
        if filters.until is not None:
            query = query.where(AuditRow.created_at < filters.until)
        with self._database.begin_read() as session:
            if page.after is not None:
                seen = session.get(AuditRow, page.after)
                if seen is None or filters.tenant not in (None, seen.tenant):
                    raise make_cursor_error(page.after)
            rows = fetch_rows(session, query, AuditRow.id, page, after=page.after)
            return Page([to_dataclass(AuditEntry, row) for row in rows.items], rows.has_more)

    def store_entry(self, entry: AuditEntry) -> None:
        """Store an entry; if a transaction has inserted it before, update its status and object."""
        with self._database.begin_write() as session:
            changed = update(AuditRow).where(AuditRow.id == entry.id)
            done = session.connection().execute(changed.values(status=entry.status, object=entry.object))
            if not done.rowcount:
                _insert_entry(session, entry)


def _insert_entry(session: Session, entry: AuditEntry) -> None:
    """Insert an entry in the session's transaction."""
    session.execute(insert(AuditRow).values(**asdict(entry)))


def _find_new_object_id(session: Session) -> str | None:
    """Return the id of a job, deployment or file that the session is about to insert; None without one."""
    made = (row.id for row in session.new if isinstance(row, JobRow | DeploymentRow | FileRow))
    return next(made, None)


REQUEST_ID_HEADER = "X-Request-ID"
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_READ_ONLY_POSTS = frozenset({"/jobs/validate"})
"""`POST` routes that need a write scope, but change nothing."""
_CONFIDENTIAL_ROUTES = frozenset({"/deployments/{deployment_id}/traffic/rows"})
"""Routes whose reading requests are recorded."""
_REFUSAL_STATUSES = frozenset({401, 403, 429})
_MAX_PER_ADDRESS, _BURST_PER_ADDRESS = 30, 20
"""Max recorded refusals per address and minute, and at once."""
_MAX_TOTAL, _BURST_TOTAL = 600, 200
_MAX_ADDRESS_CHARS, _MAX_TEXT_CHARS = 64, 200
_UNMATCHED_ROUTE = "unmatched"


class RequestAudit:
    """The audit entry of a request in progress."""

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
            route=_UNMATCHED_ROUTE,
            object=None,
            status=0,
        )
        self._is_enabled = False
        self._is_stored = False
        self._is_read_only = False

    def set_caller(self, request: Request, principal: Principal | None, *, name: str, tenant: str) -> None:
        """Set the caller and the route."""
        credential = None if principal is None else principal.credential
        self.entry = replace(self.entry, actor=name, credential=credential, tenant=tenant)
        self.record_route(request.scope)

    def record_route(self, scope: Scope) -> None:
        """Set the route, and the object id from its path."""
        route = getattr(scope.get("route"), "path", None) or _UNMATCHED_ROUTE
        named = next(iter(scope.get("path_params", {}).values()), None)
        status = self.entry.status or getattr(scope.get("route"), "status_code", None) or 200
        found = self.entry.object if named is None else _sanitize(str(named), _MAX_TEXT_CHARS)
        self.entry = replace(self.entry, route=route[:_MAX_TEXT_CHARS], object=found, status=status)

    @property
    def is_audit_required(self) -> bool:
        """Whether the route may change data, or reads confidential ones."""
        if self.entry.route in _CONFIDENTIAL_ROUTES:
            return True
        asks = self._is_read_only or self.entry.method in _SAFE_METHODS
        return not asks and self.entry.route not in (*_READ_ONLY_POSTS, _UNMATCHED_ROUTE)

    def start_storing(self, *, is_read_only: bool = False) -> None:
        """Store the audit entry with the request's next database transaction. Call it once the caller is admitted.
        `is_read_only`: the route changes nothing, whatever its HTTP method."""
        self._is_read_only = is_read_only
        self._is_enabled = self.is_audit_required

    def stop_storing(self) -> None:
        """Stop storing the audit entry with transactions: the request has been answered."""
        self._is_enabled = False

    def join_transaction(self, session: Session) -> Callable[[], None]:
        """Prepare to insert the entry in a transaction. Returns a function that inserts it; call it before the
        commit."""
        if not self._is_enabled or self._is_stored:
            return lambda: None
        made: list[str] = []

        def collect_new_ids(flushed: Session, *_: object) -> None:
            made.extend(found for found in (_find_new_object_id(flushed),) if found is not None)

        event.listen(session, "before_flush", collect_new_ids)

        def write() -> None:
            session.flush()
            if made and self.entry.object is None:
                self.entry = replace(self.entry, object=made[0])
            event.listen(session, "after_commit", self._mark_stored)
            _insert_entry(session, self.entry)

        return write

    def _mark_stored(self, _: Session) -> None:
        self._is_stored = True

    def set_status(self, status: int) -> bool:
        """Set the status of the response. Returns whether the stored entry is missing or has another status."""
        is_right = self._is_stored and status == self.entry.status
        self.entry = replace(self.entry, status=status)
        return not is_right


@dataclass
class RefusalLimiter:
    """Limits the number of recorded refusals."""

    clock: Clock

    def __post_init__(self) -> None:
        self._each = RateLimiter(_MAX_PER_ADDRESS, self.clock, burst=_BURST_PER_ADDRESS, caller_kind="address")
        self._all = RateLimiter(_MAX_TOTAL, self.clock, burst=_BURST_TOTAL, caller_kind="address")
        self._lock = threading.Lock()
        self._num_suppressed = 0

    def count_refusal(self, address: str) -> int | None:
        """Count a refusal. Returns the number of unrecorded refusals since the last recorded one; None if this one
        must not be recorded."""
        try:
            self._each.count_request(address)
            self._all.count_request("")
        except RateLimitedError:
            with self._lock:
                self._num_suppressed += 1
            return None
        with self._lock:
            left_out, self._num_suppressed = self._num_suppressed, 0
        return left_out


class AuditMiddleware:
    """Middleware that stores the audit entries and sets `X-Request-ID` in each response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = scope["app"].state
        trail: AuditTrail | None = getattr(state, "audit", None)
        if scope["type"] != "http" or trail is None:  # an application that is not started serves only pages
            await self._app(scope, receive, send)
            return
        # 1. begin the entry  2. run the request; its transactions may store the entry  3. store or correct it
        request_id = f"req_{ULID()}"
        address = _sanitize(scope["client"][0] if scope.get("client") else "unknown", _MAX_ADDRESS_CHARS)
        record = RequestAudit(request_id, address, scope["method"][:16], state.components.clock())
        scope.setdefault("state", {})["audit"] = record

        async def send_audited(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
                record.stop_storing()
                record.record_route(scope)
                if _needs_storing(record, message["status"], state.refusal_limiter):
                    await run_in_threadpool(_store_or_log, trail, record.entry)
            await send(message)

        token = TRANSACTION_HOOK.set(record.join_transaction)
        try:
            await self._app(scope, receive, send_audited)
        except Exception:
            # An outer middleware answers unexpected exceptions.
            record.stop_storing()
            if _needs_storing(record, 500, state.refusal_limiter):
                await run_in_threadpool(_store_or_log, trail, record.entry)
            raise
        finally:
            record.stop_storing()
            TRANSACTION_HOOK.reset(token)


def get_request_audit(request: Request) -> RequestAudit:
    record: RequestAudit = request.state.audit
    return record


def _needs_storing(record: RequestAudit, status: int, refusal_limiter: RefusalLimiter) -> bool:
    if status in _REFUSAL_STATUSES:
        left_out = refusal_limiter.count_refusal(record.entry.address)
        record.set_status(status)
        if left_out is None:
            return False
        record.entry = replace(record.entry, left_out=left_out)
        return True
    # An unknown caller changes nothing: its body was refused before the route, or its session has ended.
    return record.is_audit_required and record.entry.actor is not None and record.set_status(status)


def _store_or_log(trail: AuditTrail, entry: AuditEntry) -> None:
    try:
        trail.store_entry(entry)
    except DatabaseUnavailableError as error:
        # Nothing has changed: a transaction that changes something contains its entry.
        get_logger().error("audit entry not stored", **vars(entry), reason=error.message)


def _sanitize(value: str, max_chars: int) -> str:
    """Replace non-printable and non-ASCII characters by `?`, and cut the value to `max_chars`."""
    return "".join(each if each.isascii() and each.isprintable() else "?" for each in value)[:max_chars]
