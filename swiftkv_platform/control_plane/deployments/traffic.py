"""`/deployments/{id}/traffic`: captured traffic of a deployment. Reading its rows is in the audit trail."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Query, status

from swiftkv_platform.contract.traffic import (
    MAX_USER_CHARS,
    CapturedRequest,
    TrafficDeletion,
    make_traffic_prefix,
    remove_route_prefix,
)
from swiftkv_platform.control_plane.access.callers import Deployer, Fetcher
from swiftkv_platform.control_plane.components import Components, ComponentsDep
from swiftkv_platform.control_plane.deployments.deployment import Deployment
from swiftkv_platform.control_plane.http.responses import ListResponse, ResponseModel
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.limits import PAGE_BYTES
from swiftkv_platform.specs.deployment import ResolvedCapture
from swiftkv_platform.storage.traffic import TrafficStore

_MAX_TIME = 253_402_300_799.0
"""Last second of the year 9999."""


class TrafficDayResponse(ResponseModel):
    """Captured traffic of a UTC day."""

    day: str
    """Such as `2026-11-30`."""
    parts: int
    """Number of objects."""
    bytes: int
    """Compressed bytes."""


class TrafficResponse(ResponseModel):
    """Captured traffic of a deployment."""

    object: Literal["deployment.traffic"] = "deployment.traffic"
    capture: ResolvedCapture | None
    """The deployment's settings; null: nothing is captured, and what was captured is being deleted."""
    bytes: int
    """Compressed bytes of all days."""
    days: list[TrafficDayResponse]
    """In order. Rows of pending deletions count."""
    pending_deletions: list[TrafficDeletion]
    """Deletions whose rows are hidden, and removed from storage within minutes."""


router = APIRouter(prefix="/deployments/{deployment_id}/traffic", tags=["deployments"])

_FilterTime = Annotated[float | None, Query(ge=0.0, le=_MAX_TIME, allow_inf_nan=False)]
_FilterText = Annotated[str | None, Query(min_length=1, max_length=MAX_USER_CHARS)]


def open_traffic(parts: Components, deployment: Deployment) -> TrafficStore:
    """Return the captured traffic of a deployment."""
    return TrafficStore(parts.objects, make_traffic_prefix(deployment.tenant, deployment.spec.id))


class _ReadableTraffic:
    """Captured traffic of the deployment in the path, for callers who may read the tenant's data."""

    def __init__(self, deployment_id: str, parts: ComponentsDep, caller: Fetcher) -> None:
        self.deployment = parts.deployments.get_deployment(deployment_id, tenant=caller.tenant)
        self.store = open_traffic(parts, self.deployment)


ReadableTraffic = Annotated[_ReadableTraffic, Depends(_ReadableTraffic)]


@router.get("")
def get_traffic(traffic: ReadableTraffic) -> TrafficResponse:
    """Return the settings of captured traffic, its size by day, and pending deletions."""
    days = traffic.store.list_days()
    return TrafficResponse(
        capture=traffic.deployment.spec.capture,
        bytes=sum(day.bytes for day in days),
        days=[TrafficDayResponse.model_validate(day) for day in days],
        pending_deletions=[*traffic.store.list_deletions().values()],
    )


@router.get("/rows")
def list_captured_requests(
    traffic: ReadableTraffic,
    since: Annotated[_FilterTime, Query(description="Unix seconds, inclusive")] = None,
    until: Annotated[_FilterTime, Query(description="Unix seconds, exclusive")] = None,
    user: Annotated[_FilterText, Query(description="End user")] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 20,
    after: Annotated[str | None, Query(description="`last_id` of the previous page")] = None,
) -> ListResponse[CapturedRequest]:
    """List captured requests with their answers, newest first. `last_id` is a position, not an id of a request. A page
    reads a limited amount of storage: with a filter it may have few rows, or none, and more may follow."""
    page = traffic.store.read_page(
        limit=limit, after=after, since=since, until=until, user=user, max_bytes=PAGE_BYTES.default
    )
    return ListResponse(
        data=page.rows,
        has_more=page.next is not None,
        first_id=page.rows[0].id if page.rows else None,
        last_id=page.next,
    )


@router.delete("", status_code=status.HTTP_202_ACCEPTED)
def delete_traffic(
    deployment_id: str,
    parts: ComponentsDep,
    caller: Deployer,
    request_id: Annotated[_FilterText, Query(description="Id of a response, with or without its prefix")] = None,
    user: Annotated[_FilterText, Query(description="End user")] = None,
    before: Annotated[_FilterTime, Query(description="Delete requests that ended before, in Unix seconds")] = None,
) -> TrafficDeletion:
    """Delete captured requests that match all given conditions, and ended until now. They are hidden at once, also from
    later jobs, and removed from storage within minutes."""
    deployment = parts.deployments.get_deployment(deployment_id, tenant=caller.tenant)
    if request_id is None and user is None and before is None:
        raise InvalidInputError("give request_id, user or before: which requests to delete", field="request_id")
    deletion = TrafficDeletion(
        requested_at=parts.clock(),
        request_id=None if request_id is None else remove_route_prefix(request_id),
        user=user,
        before=before,
    )
    open_traffic(parts, deployment).delete(deletion)
    return deletion
