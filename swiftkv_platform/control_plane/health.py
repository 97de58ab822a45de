"""`/healthz`, `/readyz` and `/metrics`, for probes and Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from swiftkv_platform.control_plane.kept import Kept
from swiftkv_platform.control_plane.loops.loop import ControlLoop
from swiftkv_platform.control_plane.metrics import complaint_of
from swiftkv_platform.control_plane.parts import Components
from swiftkv_platform.web.problems import FieldProblem, make_problem, problem_response
from swiftkv_platform.web.swagger import OPEN

router = APIRouter(tags=["operations"])

_CHECK_TIMEOUT_S = 10.0
_KEEP_CHECK_S = 2.0
_KEEP_PING_S = 30.0
"""Seconds that the object store's answer is kept: a ping writes an object, and the route needs no API key."""


@router.get("/healthz", response_model=None, openapi_extra=OPEN)
async def healthz(request: Request) -> Response:
    """Liveness. 503 if a loop has hung in one step for minutes, which only a restart ends; `/readyz` reports steps that
    fail and dependencies that do not answer."""
    readiness: Readiness = request.app.state.readiness
    hung = {f"loop {loop.name}": "one of its steps has hung for minutes" for loop in readiness.loops if loop.is_hung}
    if hung:
        return _readiness(request, hung)
    return JSONResponse({"status": "ok"})


@router.get("/readyz", response_model=None, openapi_extra=OPEN)
async def readyz(request: Request) -> Response:
    """Readiness: database, Ray and object store answer, and the control loops make progress; 503 names those that do
    not."""
    readiness: Readiness = request.app.state.readiness
    return _readiness(request, await readiness.complaints())


@router.get("/readyz/{check}", response_model=None, openapi_extra=OPEN)
async def readyz_of(check: Literal["database", "ray", "object_store"], request: Request) -> Response:
    """Readiness of one dependency. A load balancer asks for the database alone, without which no route works."""
    readiness: Readiness = request.app.state.readiness
    return _readiness(request, {check: await readiness.complaint(check)})


def _readiness(request: Request, complaints: Mapping[str, str | None]) -> Response:
    errors = [FieldProblem(field=name, message=found) for name, found in complaints.items() if found is not None]
    if errors:
        detail = "; ".join(f"{error.field}: {error.message}" for error in errors)
        return problem_response(make_problem(request.url.path, 503, "not_ready", detail, errors))
    return JSONResponse({"status": "ok", "checks": dict.fromkeys(complaints, "ok")})


class Readiness:
    """Whether a control plane can do its work. Answers are kept for seconds, since the routes need no API key."""

    def __init__(self, parts: Components, loops: Sequence[ControlLoop]) -> None:
        self.checks = {
            "database": Kept(complaint_of(parts.database.check), parts.clock, keep_s=_KEEP_CHECK_S),
            "ray": Kept(complaint_of(parts.cluster.check), parts.clock, keep_s=_KEEP_CHECK_S),
            # Writes an object.
            "object_store": Kept(complaint_of(parts.objects.ping), parts.clock, keep_s=_KEEP_PING_S),
        }
        self.loops = loops

    async def complaint(self, check: str) -> str | None:
        """Return what is wrong with one dependency; None if nothing is."""
        return await _complaint(self.checks[check])

    async def complaints(self) -> dict[str, str | None]:
        """Return what is wrong with each dependency, None if nothing is, and with each loop that is stalled."""
        found = await asyncio.gather(*(_complaint(check) for check in self.checks.values()))
        return dict(zip(self.checks, found, strict=True)) | {
            f"loop {loop.name}": "none of its steps has completed for minutes; the log says why"
            for loop in self.loops
            if loop.is_stalled
        }


async def _complaint(check: Kept[str | None]) -> str | None:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(check.get()), _CHECK_TIMEOUT_S)
    except TimeoutError:
        return f"no answer within {_CHECK_TIMEOUT_S:g} s"


@router.get("/metrics", openapi_extra=OPEN)
def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    return Response(generate_latest(request.app.state.metrics), media_type=CONTENT_TYPE_LATEST)
