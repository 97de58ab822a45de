"""`/healthz`, `/readyz` and `/metrics`: routes for probes and Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from swiftkv_platform.control_plane.base import CachedCall
from swiftkv_platform.control_plane.components import Components
from swiftkv_platform.control_plane.deployments.reconciler import DeploymentReconciler
from swiftkv_platform.control_plane.jobs.reconciler import OrphanCleaner, Reconciler
from swiftkv_platform.control_plane.loops import ControlLoop
from swiftkv_platform.control_plane.retention import RetentionSweeper
from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.web.problems import FieldProblem, make_problem, respond_with_problem
from swiftkv_platform.web.swagger import OPEN

_REQUEST_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_STEP_BUCKETS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_WAIT_BUCKETS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 24 * 3600.0)
_LAG_BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0)


def _make_histogram(name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
    return Histogram(name, text, labels, buckets=buckets, registry=None)


class ControlPlaneHistograms:
    """Histograms and counters of the application; they survive restarts of its lifespan."""

    def __init__(self) -> None:
        text = "Time from request to response headers, by route template."
        labels = ("method", "route", "status")
        self._requests = _make_histogram("swiftkv_http_request_duration_seconds", text, _REQUEST_BUCKETS_S, labels)
        text = "Duration of control loop steps on the leader."
        self._ticks = _make_histogram("swiftkv_loop_tick_duration_seconds", text, _STEP_BUCKETS_S, ("loop",))
        text = "Time that an attempt waited in the queue."
        self.waits = _make_histogram("swiftkv_job_queue_wait_seconds", text, _WAIT_BUCKETS_S)
        self.lags = _make_histogram(
            "swiftkv_event_lag_seconds", "Time from an event until the control plane read it.", _LAG_BUCKETS_S
        )
        text = "Runs that a tracker such as W&B did not receive completely."
        self.untracked = Counter("swiftkv_untracked_runs", text, registry=None)

    def register(self, registry: CollectorRegistry) -> None:
        for each in (self._requests, self._ticks, self.waits, self.lags, self.untracked):
            registry.register(each)

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Observe a request's duration. `route` is the template, such as `/jobs/{job_id}`, which keeps the number of
        labels small."""
        self._requests.labels(method, route, f"{status // 100}xx").observe(seconds)

    def measure_step_duration(self, loop: str, step: Callable[[], None]) -> Callable[[], None]:
        """Wrap `step` to observe the duration of each run, including failed runs."""
        ticks = self._ticks.labels(loop)

        def run() -> None:
            with ticks.time():
                step()

        return run


_COUNTS_TTL_S = 10.0
"""Seconds that counts are cached: counting reads a whole index."""
_SCRAPE_TIMEOUT_S = 3.0
"""Max seconds that a scrape waits; Prometheus gives up after 10."""


def catch_error_message(check: Callable[[], object]) -> Callable[[], str | None]:
    """Wrap `check` to return the message of its `SwiftKVError`; None without an error."""

    def run_check() -> str | None:
        try:
            check()
        except SwiftKVError as error:
            return error.message
        return None

    return run_check


@dataclass(eq=False)
class ControlPlaneMetrics:
    """Prometheus collector of one control plane's jobs, deliveries, loops and operator files, read at each scrape.

    Also reports the counts and removals of this process's retention, which are empty on a standby. Counts that the
    database does not return in time are omitted.
    """

    parts: Components
    loops: Sequence[ControlLoop]
    reconciler: Reconciler
    files: Mapping[str, Callable[[], bool]]
    """Whether the newest version of each operator file is usable, by name."""
    sweeper: RetentionSweeper
    orphans: OrphanCleaner
    deployments: DeploymentReconciler
    checks: Mapping[str, CachedCall[str | None]]
    """Problem of each dependency, by name. The serving cluster is added here; `/readyz` does not check it."""

    def __post_init__(self) -> None:
        cached = partial(CachedCall, clock=self.parts.clock, ttl_s=_COUNTS_TTL_S)
        self._checks = {**self.checks, "serving": cached(catch_error_message(self.parts.serving.list_states))}
        self._jobs = cached(self.parts.jobs.count_by_status)
        self._deliveries = cached(self.parts.outbox.count_by_status)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering the collector must not read the database."""
        return []

    def collect(self) -> Iterable[Metric]:
        # 1. dependencies and counts, within the scrape's timeout  2. loops and operator files  3. retention
        up = {name: check.get_future() for name, check in self._checks.items()}
        jobs, deliveries = self._jobs.get_future(), self._deliveries.get_future()
        asked: list[Future[Any]] = [*up.values(), jobs, deliveries]
        answered = wait(asked, timeout=_SCRAPE_TIMEOUT_S).done
        text = "1 if the dependency is available."
        good = {answer for answer in answered if answer.exception() is None}
        values = {name: answer in good and answer.result() is None for name, answer in up.items()}
        yield _make_gauge("swiftkv_dependency_up", text, "dependency", values)
        if jobs in good:
            yield _make_gauge("swiftkv_jobs", "Jobs by status.", "status", jobs.result())
        if deliveries in good:
            text = "Webhook deliveries by status."
            yield _make_gauge("swiftkv_webhook_deliveries", text, "status", deliveries.result())
        usable = {name: is_usable() for name, is_usable in self.files.items()}
        text = "1 if the newest version of the file is valid and in use."
        yield _make_gauge("swiftkv_operator_file_usable", text, "file", usable)
        text = "Jobs that the control loop could not process in its latest round and will process again."
        yield GaugeMetricFamily("swiftkv_jobs_put_off", text, value=self.reconciler.num_backed_off_jobs)
        text = "Deployments with unreadable rows; they keep serving unchanged."
        unreadable = len(self.deployments.unreadable)
        yield GaugeMetricFamily("swiftkv_deployments_unreadable", text, value=unreadable)
        stalled = {loop.name: loop.is_stalled for loop in self.loops}
        text = "1 if the control loop is stalled; /readyz then returns 503."
        yield _make_gauge("swiftkv_loop_stalled", text, "loop", stalled)
        ticks = {loop.name: loop.last_success or 0.0 for loop in self.loops}
        text = "Unix time of the control loop's last completed round."
        yield _make_gauge("swiftkv_loop_last_success_timestamp_seconds", text, "loop", ticks)
        counts = self.sweeper.stored
        yield _make_gauge("swiftkv_database_rows", "Rows by table at the last count.", "table", counts.rows)
        for what, stored in (("objects", counts.objects), ("bytes", counts.bytes)):
            text = f"{what.capitalize()} in the object store by kind at the last count."
            yield _make_gauge(f"swiftkv_store_{what}", text, "kind", stored)
        for what in ("rows", "objects", "bytes"):
            text = f"{what.capitalize()} removed by this process."
            removed = CounterMetricFamily(f"swiftkv_swept_{what}", text, labels=["kind"])
            for kind, total in self.sweeper.removed.items():
                if getattr(total, what):
                    removed.add_metric([kind], getattr(total, what))
            yield removed
        text = "Stopped attempts that had no job."
        yield CounterMetricFamily("swiftkv_orphans_stopped", text, value=self.orphans.stopped)


def _make_gauge(name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], float(value))
    return family


router = APIRouter(tags=["operations"])

_CHECK_TIMEOUT_S = 10.0
_CHECK_TTL_S = 2.0
_PING_TTL_S = 30.0
"""Seconds that the object store's health is cached: a ping writes an object, and the route needs no API key."""


@router.get("/healthz", response_model=None, openapi_extra=OPEN)
async def healthz(request: Request) -> Response:
    """Return 200, or 503 if a step of a loop has hung for minutes, so that the process must be restarted. `/readyz`
    reports failing steps and unavailable dependencies."""
    readiness: Readiness = request.app.state.readiness
    hung = {
        f"loop {loop.name}": "a step has hung for minutes; restart the control plane"
        for loop in readiness.loops
        if loop.is_hung
    }
    if hung:
        return _make_readiness_response(request, hung)
    return JSONResponse({"status": "ok"})


@router.get("/readyz", response_model=None, openapi_extra=OPEN)
async def readyz(request: Request) -> Response:
    """Return 200, or a 503 that names unavailable dependencies (database, Ray, object store) and stalled loops."""
    readiness: Readiness = request.app.state.readiness
    return _make_readiness_response(request, await readiness.find_problems())


@router.get("/readyz/{check}", response_model=None, openapi_extra=OPEN)
async def readyz_dependency(check: Literal["database", "ray", "object_store"], request: Request) -> Response:
    """Check one dependency. A load balancer checks the database alone, since no route works without it."""
    readiness: Readiness = request.app.state.readiness
    return _make_readiness_response(request, {check: await _get_problem(readiness.checks[check])})


def _make_readiness_response(request: Request, problems: Mapping[str, str | None]) -> Response:
    errors = [FieldProblem(field=name, message=found) for name, found in problems.items() if found is not None]
    if errors:
        detail = "; ".join(f"{error.field}: {error.message}" for error in errors)
        return respond_with_problem(make_problem(request.url.path, 503, "not_ready", detail, errors))
    return JSONResponse({"status": "ok", "checks": dict.fromkeys(problems, "ok")})


class Readiness:
    """Checks whether a control plane is ready. Results are cached for seconds, since the routes need no API key."""

    def __init__(self, parts: Components, loops: Sequence[ControlLoop]) -> None:
        self.checks = {
            "database": CachedCall(
                catch_error_message(parts.database.check_available), parts.clock, ttl_s=_CHECK_TTL_S
            ),
            "ray": CachedCall(catch_error_message(parts.cluster.check_alive), parts.clock, ttl_s=_CHECK_TTL_S),
            # Writes an object.
            "object_store": CachedCall(catch_error_message(parts.objects.ping), parts.clock, ttl_s=_PING_TTL_S),
        }
        self.loops = loops

    async def find_problems(self) -> dict[str, str | None]:
        """Return the problem of each dependency, None without one, and of each stalled loop."""
        found = await asyncio.gather(*(_get_problem(check) for check in self.checks.values()))
        return dict(zip(self.checks, found, strict=True)) | {
            f"loop {loop.name}": "no step has completed for minutes; see the log"
            for loop in self.loops
            if loop.is_stalled
        }


async def _get_problem(check: CachedCall[str | None]) -> str | None:
    try:
        return await asyncio.wait_for(asyncio.wrap_future(check.get_future()), _CHECK_TIMEOUT_S)
    except TimeoutError:
        return f"no answer within {_CHECK_TIMEOUT_S:g} s"


@router.get("/metrics", openapi_extra=OPEN)
def metrics(request: Request) -> Response:
    """Return Prometheus metrics."""
    return Response(generate_latest(request.app.state.metrics), media_type=CONTENT_TYPE_LATEST)
