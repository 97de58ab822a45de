"""`/audit`: who changed what, and who was refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal, Self

from fastapi import APIRouter, Depends, Request

from swiftkv_platform.control_plane.access.callers import taking_turns
from swiftkv_platform.control_plane.access.rows import AuditEntry, AuditFilter, SqlAudit
from swiftkv_platform.control_plane.base import Caller
from swiftkv_platform.control_plane.http.answers import Answer, ListAnswer, list_answer
from swiftkv_platform.control_plane.http.lists import NewestFirst
from swiftkv_platform.errors import ForbiddenError
from swiftkv_platform.security.principals import Principal, Scope

router = APIRouter(tags=["operations"])


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
        return cls.model_validate({**vars(entry), "object": "audit.entry", "about": entry.object})


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
    wanted: Annotated[AuditFilter, Depends()],
    page: NewestFirst,
) -> ListAnswer[AuditAnswer]:
    """List the audit trail, newest first: an operator's key sees all tenants, another key with `admin` its own."""
    asked = wanted.tenant
    if seen is not None and asked not in (None, seen):
        message = f"tenant is {asked!r}; this key sees only the entries of {seen!r}, an operator's key those of all"
        raise ForbiddenError(message, field="tenant")
    trail: SqlAudit = request.app.state.audit
    found = trail.list(page, replace(wanted, tenant=seen or asked))
    return list_answer(found, AuditAnswer.of, order=page.order)
