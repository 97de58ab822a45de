"""Metrics of a control plane for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from swiftkv_platform.control_plane.deployments.reconciler import DeploymentReconciler
from swiftkv_platform.control_plane.jobs.orphans import Orphans
from swiftkv_platform.control_plane.jobs.reading import Instruments
from swiftkv_platform.control_plane.jobs.reconciler import Reconciler
from swiftkv_platform.control_plane.kept import Kept
from swiftkv_platform.control_plane.loops.loop import ControlLoop
from swiftkv_platform.control_plane.parts import Components
from swiftkv_platform.control_plane.upkeep.sweeper import Sweeper
from swiftkv_platform.errors import SwiftKVError

_REQUESTS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TICKS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_WAITS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 24 * 3600.0)
_LAGS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0)


def _histogram(name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
    return Histogram(name, text, labels, buckets=buckets, registry=None)


class ControlPlaneHistograms:
    """Histograms and counters that live as long as the application, however often it starts."""

    def __init__(self) -> None:
        text = "Time from a request's arrival to the head of its answer, by route template."
        labels = ("method", "route", "status")
        self._requests = _histogram("swiftkv_http_request_duration_seconds", text, _REQUESTS_S, labels)
        text = "Steps of the control loops that this control plane leads."
        self._ticks = _histogram("swiftkv_loop_tick_duration_seconds", text, _TICKS_S, ("loop",))
        text = "Time in the queue of each attempt that left it."
        self._waits = _histogram("swiftkv_job_queue_wait_seconds", text, _WAITS_S)
        self._lags = _histogram("swiftkv_event_lag_seconds", "Time from an event until it was read.", _LAGS_S)
        text = "Runs that a tracker such as W&B did not receive, or only in part."
        self._untracked = Counter("swiftkv_untracked_runs", text, registry=None)
        self.reconciler = Instruments(
            queue_wait=self._waits.observe, event_lag=self._lags.observe, untracked=self._untracked.inc
        )
        """Listeners for the reconciler."""

    def register(self, registry: CollectorRegistry) -> None:
        """Register them with `registry`."""
        for each in (self._requests, self._ticks, self._waits, self._lags, self._untracked):
            registry.register(each)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Observe a request that took `seconds`. `route` is the template, such as `/jobs/{job_id}`, which keeps labels
        few."""
        self._requests.labels(method, route, f"{status // 100}xx").observe(seconds)

    def timed(self, loop: str, step: Callable[[], None]) -> Callable[[], None]:
        """Wrap `step` so that the duration of each run is observed, also of one that fails."""
        ticks = self._ticks.labels(loop)

        def run() -> None:
            with ticks.time():
                step()

        return run


_KEEP_COUNTS_S = 10.0
"""Seconds that counts are kept: counting reads a whole index."""
_SCRAPE_WAITS_S = 3.0
"""Longest wait of a scrape in seconds; Prometheus itself gives up after 10."""


def complaint_of(check: Callable[[], object]) -> Callable[[], str | None]:
    """Wrap `check` to return the message of the `SwiftKVError` that it raises; None if it raises none."""

    def ask() -> str | None:
        try:
            check()
        except SwiftKVError as error:
            return error.message
        return None

    return ask


@dataclass(eq=False)
class ControlPlaneMetrics:
    """Collector of one control plane's jobs, deliveries, loops and operator files, read at each scrape.

    It also reports what the sweeper counted last and has removed; a standby control plane has counted nothing. Counts
    that the database does not return within seconds are left out.
    """

    parts: Components
    loops: Sequence[ControlLoop]
    reconciler: Reconciler
    files: Mapping[str, Callable[[], bool]]
    """Whether the newest version of each of the operator's files is usable, by name."""
    sweeper: Sweeper
    orphans: Orphans
    deployments: DeploymentReconciler
    checks: Mapping[str, Kept[str | None]]
    """Complaint about each dependency, by name. The serving cluster is added here: `/readyz` does not check it."""

    def __post_init__(self) -> None:
        kept = partial(Kept, clock=self.parts.clock, keep_s=_KEEP_COUNTS_S)
        self._checks = {**self.checks, "serving": kept(complaint_of(self.parts.serving.status))}
        self._jobs = kept(self.parts.jobs.count_by_status)
        self._deliveries = kept(self.parts.outbox.count_by_status)

    def describe(self) -> Iterable[Metric]:
        """Return nothing: registering the collector must not read the database."""
        return []

    def collect(self) -> Iterable[Metric]:
        up = {name: check.get() for name, check in self._checks.items()}
        jobs, deliveries = self._jobs.get(), self._deliveries.get()
        asked: list[Future[Any]] = [*up.values(), jobs, deliveries]
        answered = wait(asked, timeout=_SCRAPE_WAITS_S).done
        text = "Whether the dependency answers and can be used."
        good = {answer for answer in answered if answer.exception() is None}
        values = {name: answer in good and answer.result() is None for name, answer in up.items()}
        yield _gauge("swiftkv_dependency_up", text, "dependency", values)
        if jobs in good:
            yield _gauge("swiftkv_jobs", "Jobs by status.", "status", jobs.result())
        if deliveries in good:
            text = "Webhook deliveries by status."
            yield _gauge("swiftkv_webhook_deliveries", text, "status", deliveries.result())
        usable = {name: is_usable() for name, is_usable in self.files.items()}
        text = "Whether a file's newest version is usable and in effect."
        yield _gauge("swiftkv_operator_file_usable", text, "file", usable)
        text = "Jobs that could not be handled in the latest round and are tried again."
        yield GaugeMetricFamily("swiftkv_jobs_put_off", text, value=self.reconciler.jobs_put_off)
        text = "Deployments whose rows cannot be read; they keep serving unchanged."
        unreadable = len(self.deployments.unreadable)
        yield GaugeMetricFamily("swiftkv_deployments_unreadable", text, value=unreadable)
        stalled = {loop.name: loop.is_stalled for loop in self.loops}
        text = "Whether a control loop is stalled; /readyz is 503 then."
        yield _gauge("swiftkv_loop_stalled", text, "loop", stalled)
        ticks = {loop.name: loop.last_success or 0.0 for loop in self.loops}
        text = "When a control loop last completed a round."
        yield _gauge("swiftkv_loop_last_success_timestamp_seconds", text, "loop", ticks)
        counts = self.sweeper.counts
        yield _gauge("swiftkv_database_rows", "Rows by table, when they were last counted.", "table", counts.rows)
        for what, stored in (("objects", counts.objects), ("bytes", counts.bytes)):
            text = f"{what.capitalize()} in the store by kind, when they were last counted."
            yield _gauge(f"swiftkv_store_{what}", text, "kind", stored)
        for what in ("rows", "objects", "bytes"):
            text = f"{what.capitalize()} that this process has removed."
            removed = CounterMetricFamily(f"swiftkv_swept_{what}", text, labels=["kind"])
            for kind, total in self.sweeper.swept.items():
                if getattr(total, what):
                    removed.add_metric([kind], getattr(total, what))
            yield removed
        text = "Attempts without a job that were stopped."
        yield CounterMetricFamily("swiftkv_orphans_stopped", text, value=self.orphans.stopped)


def _gauge(name: str, text: str, label: str, values: Mapping[Any, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([str(key)], float(value))
    return family
