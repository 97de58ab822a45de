"""`/audit`: who changed what, and who was refused."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Depends, Query, Request

from swiftkv_platform.control_plane.access.callers import taking_turns
from swiftkv_platform.control_plane.access.rows import AuditEntry, AuditFilter, SqlAudit
from swiftkv_platform.control_plane.base import Caller
from swiftkv_platform.control_plane.http.answers import Answer, ListAnswer, list_answer
from swiftkv_platform.control_plane.http.lists import NewestFirst
from swiftkv_platform.errors import ForbiddenError
from swiftkv_platform.security.principals import Principal, Scope

router = APIRouter(tags=["operations"])

_Value = Annotated[str | None, Query(max_length=300)]
_Time = Annotated[float | None, Query(ge=0.0, le=1e12, allow_inf_nan=False, description="Unix seconds")]


class AuditAnswer(Answer):
    """A request that changed something, tried to, or was refused access."""

    id: str
    object: Literal["audit.entry"] = "audit.entry"
    created_at: float
    """Unix seconds."""
    request_id: str
    """`X-Request-ID` of its answer."""
    actor: str | None
    """Name of the key's owner, or issuer and subject of the token; null where the caller was not known."""
    credential: str | None
    """Id of the key (`swiftkv keys list`), or issuer and subject."""
    tenant: str | None
    address: str
    """Address of the caller, as a trusted proxy names it."""
    method: str
    route: str
    """Template of the route."""
    about: str | None
    """Id of what the request was about."""
    status: int
    """HTTP status of its answer."""
    left_out: int
    """Number of earlier refusals that were not recorded because there were too many."""

    @classmethod
    def of(cls, entry: AuditEntry) -> Self:
        values: dict[str, Any] = asdict(entry)
        return cls(about=values.pop("object"), **values)


def seen_tenant(request: Request, caller: Annotated[Caller, taking_turns("reading")]) -> str | None:
    """Return the tenant whose entries the caller may see; None for all tenants. Raises `ForbiddenError`."""
    principal: Principal | None = getattr(request.state, "principal", None)
    if principal is None or principal.operator:
        return None
    principal.require(Scope.ADMIN)
    return caller.tenant


@router.get("/audit")
def list_audit(
    request: Request,
    seen: Annotated[str | None, Depends(seen_tenant)],
    page: NewestFirst,
    tenant: _Value = None,
    actor: _Value = None,
    credential: _Value = None,
    address: _Value = None,
    route: _Value = None,
    about: _Value = None,
    request_id: _Value = None,
    status: Annotated[int | None, Query(ge=100, le=599)] = None,
    since: _Time = None,
    until: _Time = None,
) -> ListAnswer[AuditAnswer]:
    """List the audit trail, newest first: an operator's key sees all tenants, another key with `admin` its own."""
    if seen is not None and tenant not in (None, seen):
        message = f"tenant is {tenant!r}; this key sees only the entries of {seen!r}, an operator's key those of all"
        raise ForbiddenError(message, field="tenant")
    wanted = AuditFilter(
        tenant=seen or tenant,
        actor=actor,
        credential=credential,
        address=address,
        route=route,
        object=about,
        request_id=request_id,
        status=status,
        since=since,
        until=until,
    )
    trail: SqlAudit = request.app.state.audit
    return list_answer(trail.list(page, wanted), AuditAnswer.of, lambda entry: entry.id, page.order)
