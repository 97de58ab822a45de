"""`/healthz`, `/readyz` and `/metrics`: what probes and Prometheus ask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from swiftkv_platform.api.dependencies import Components, Parts
from swiftkv_platform.api.error_handlers import FieldProblem, problem_response
from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.orchestration.loop import ControlLoop

router = APIRouter(tags=["operations"])

_CHECK_TIMEOUT_S = 10.0


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """The process lives."""
    return {"status": "ok"}


@router.get("/readyz", response_model=None)
async def readyz(request: Request, parts: Parts) -> Response:
    """Database, Ray and object store answer; 503 names those that do not."""
    checks: dict[str, Callable[[], None]] = {
        "database": parts.database.check,
        "ray": parts.cluster.check,
        "object_store": parts.objects.ping,
    }
    complaints = dict(zip(checks, await asyncio.gather(*map(_complaint, checks.values())), strict=True))
    errors = [
        FieldProblem(field=name, message=complaint) for name, complaint in complaints.items() if complaint is not None
    ]
    if errors:
        detail = "; ".join(f"{error.field}: {error.message}" for error in errors)
        return problem_response(request.url.path, 503, "not_ready", detail, errors=errors)
    return JSONResponse({"status": "ok", "checks": dict.fromkeys(checks, "ok")})


async def _complaint(check: Callable[[], None]) -> str | None:
    try:
        await asyncio.wait_for(asyncio.to_thread(check), _CHECK_TIMEOUT_S)
    except SwiftKVError as error:
        return error.message
    except TimeoutError:
        return f"no answer within {_CHECK_TIMEOUT_S:g} s"
    return None


@router.get("/metrics")
def metrics(request: Request) -> Response:
    """Prometheus metrics."""
    return Response(generate_latest(request.app.state.metrics), media_type=CONTENT_TYPE_LATEST)


def metrics_registry(
    parts: Components, loops: Sequence[ControlLoop], files: Mapping[str, Callable[[], bool]]
) -> CollectorRegistry:
    """Metrics of one control plane, read when they are asked for.

    Args:
        files: whether the newest version of each of the operator's files is usable, by name.
    """
    registry = CollectorRegistry()
    registry.register(_Collector(parts, loops, files))
    return registry


class _Collector:
    def __init__(
        self, parts: Components, loops: Sequence[ControlLoop], files: Mapping[str, Callable[[], bool]]
    ) -> None:
        self._parts = parts
        self._loops = loops
        self._files = files

    def describe(self) -> Iterable[Metric]:
        """Nothing ahead of time: registering must not read the database."""
        return []

    def collect(self) -> Iterable[Metric]:
        jobs = GaugeMetricFamily("swiftkv_jobs", "Jobs by status.", labels=["status"])
        for status, count in self._parts.jobs.count_by_status().items():
            jobs.add_metric([status.value], count)
        yield jobs
        deliveries = GaugeMetricFamily("swiftkv_webhook_deliveries", "Webhook deliveries by status.", labels=["status"])
        for outcome, count in self._parts.outbox.count_by_status().items():
            deliveries.add_metric([outcome], count)
        yield deliveries
        files = GaugeMetricFamily(
            "swiftkv_operator_file_usable", "Whether a file's newest version is usable and holds.", labels=["file"]
        )
        for name, is_usable in self._files.items():
            files.add_metric([name], float(is_usable()))
        yield files
        ticks = GaugeMetricFamily(
            "swiftkv_loop_last_success_timestamp_seconds", "When a control loop last came around.", labels=["loop"]
        )
        for loop in self._loops:
            ticks.add_metric([loop.name], loop.last_success or 0.0)
        yield ticks
