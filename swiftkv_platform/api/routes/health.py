"""`/healthz`, `/readyz` and `/metrics`: what probes and Prometheus ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from swiftkv_platform.api.dependencies import Components
from swiftkv_platform.api.instruments import ControlPlaneHistograms, Kept, complaint_of
from swiftkv_platform.orchestration.loop import ControlLoop
from swiftkv_platform.web.problems import FieldProblem, make_problem, problem_response
from swiftkv_platform.web.swagger import OPEN

router = APIRouter(tags=["operations"])

_CHECK_TIMEOUT_S = 10.0
_KEEP_CHECK_S = 2.0
_KEEP_PING_S = 30.0
_KEEP_COUNTS_S = 10.0
"""Seconds that an answer is kept: counting reads a whole index, a ping writes to the store, no key is asked for."""


@router.get("/healthz", openapi_extra=OPEN)
async def healthz() -> dict[str, str]:
    """The process lives."""
    return {"status": "ok"}


@router.get("/readyz", response_model=None, openapi_extra=OPEN)
async def readyz(request: Request) -> Response:
    """Database, Ray and object store answer, and the loops come around; 503 names those that do not."""
    readiness: Readiness = request.app.state.readiness
    complaints = await readiness.complaints()
    errors = [
        FieldProblem(field=name, message=complaint) for name, complaint in complaints.items() if complaint is not None
    ]
    if errors:
        detail = "; ".join(f"{error.field}: {error.message}" for error in errors)
        return problem_response(make_problem(request.url.path, 503, "not_ready", detail, errors))
    return JSONResponse({"status": "ok", "checks": dict.fromkeys(readiness.checks, "ok")})


@router.get("/readyz/{check}", response_model=None, openapi_extra=OPEN)
async def readyz_of(check: Literal["database", "ray", "object_store"], request: Request) -> Response:
    """One of them answers: a load balancer asks for the database alone, without which no route does."""
    readiness: Readiness = request.app.state.readiness
    complaint = await readiness.complaint(check)
    if complaint is not None:
        errors = [FieldProblem(field=check, message=complaint)]
        detail = f"{check}: {complaint}"
        return problem_response(make_problem(request.url.path, 503, "not_ready", detail, errors))
    return JSONResponse({"status": "ok", "checks": {check: "ok"}})


class Readiness:
    """Whether a control plane can do its work, looked at anew every few seconds: anybody may ask."""

    def __init__(self, parts: Components, loops: Sequence[ControlLoop]) -> None:
        self.checks = {
            "database": Kept(complaint_of(parts.database.check), parts.clock, keep_s=_KEEP_CHECK_S),
            "ray": Kept(complaint_of(parts.cluster.check), parts.clock, keep_s=_KEEP_CHECK_S),
            # This one writes.
            "object_store": Kept(complaint_of(parts.objects.ping), parts.clock, keep_s=_KEEP_PING_S),
        }
        self.loops = loops

    async def complaint(self, check: str) -> str | None:
        """Return what is wrong with one part, None for nothing."""
        return await _complaint(self.checks[check].get)

    async def complaints(self) -> dict[str, str | None]:
        """Return what is wrong with each part, None for nothing; of the loops only those with which something is."""
        found = await asyncio.gather(*(_complaint(check.get) for check in self.checks.values()))
        return dict(zip(self.checks, found, strict=True)) | {
            f"loop {loop.name}": "no step of it has come to its end for minutes; the log says why"
            for loop in self.loops
            if loop.is_stalled
        }


async def _complaint(ask: Callable[[], str | None]) -> str | None:
    try:
        return await asyncio.wait_for(asyncio.to_thread(ask), _CHECK_TIMEOUT_S)
    except TimeoutError:
        return f"no answer within {_CHECK_TIMEOUT_S:g} s"


@router.get("/metrics", openapi_extra=OPEN)
def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    return Response(generate_latest(request.app.state.metrics), media_type=CONTENT_TYPE_LATEST)


def metrics_registry(
    parts: Components,
    loops: Sequence[ControlLoop],
    jobs_put_off: Callable[[], int],
    files: Mapping[str, Callable[[], bool]],
    histograms: ControlPlaneHistograms,
) -> CollectorRegistry:
    """Metrics of one control plane, read when they are asked for; what takes a query is asked now and then.

    Args:
        files: whether the newest version of each of the operator's files is usable, by name.
        histograms: what is counted when it happens.
    """
    registry = CollectorRegistry()
    histograms.register(registry)
    registry.register(_Collector(parts, loops, jobs_put_off, files))
    return registry


class _Collector:
    def __init__(
        self,
        parts: Components,
        loops: Sequence[ControlLoop],
        jobs_put_off: Callable[[], int],
        files: Mapping[str, Callable[[], bool]],
    ) -> None:
        self._jobs = Kept(parts.jobs.count_by_status, parts.clock, keep_s=_KEEP_COUNTS_S)
        self._deliveries = Kept(parts.outbox.count_by_status, parts.clock, keep_s=_KEEP_COUNTS_S)
        self._jobs_put_off = jobs_put_off
        self._loops = loops
        self._files = files

    def describe(self) -> Iterable[Metric]:
        """Announce no metric ahead of time: registering must not read the database."""
        return []

    def collect(self) -> Iterable[Metric]:
        jobs = GaugeMetricFamily("swiftkv_jobs", "Jobs by status.", labels=["status"])
        for status, count in self._jobs.get().items():
            jobs.add_metric([status.value], count)
        yield jobs
        deliveries = GaugeMetricFamily("swiftkv_webhook_deliveries", "Webhook deliveries by status.", labels=["status"])
        for outcome, count in self._deliveries.get().items():
            deliveries.add_metric([outcome], count)
        yield deliveries
        files = GaugeMetricFamily(
            "swiftkv_operator_file_usable", "Whether a file's newest version is usable and holds.", labels=["file"]
        )
        for name, is_usable in self._files.items():
            files.add_metric([name], float(is_usable()))
        yield files
        yield GaugeMetricFamily(
            "swiftkv_jobs_put_off",
            "Jobs that failed to be handled in the latest round and are tried again.",
            value=self._jobs_put_off(),
        )
        stalled = GaugeMetricFamily(
            "swiftkv_loop_stalled", "Whether a control loop gets nowhere; /readyz is 503 then.", labels=["loop"]
        )
        ticks = GaugeMetricFamily(
            "swiftkv_loop_last_success_timestamp_seconds", "When a control loop last came around.", labels=["loop"]
        )
        for loop in self._loops:
            stalled.add_metric([loop.name], loop.is_stalled)
            ticks.add_metric([loop.name], loop.last_success or 0.0)
        yield stalled
        yield ticks
