"""Histograms of a control plane: its requests, the ticks of its loops, the wait of jobs, the lag of events."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.orchestration.orphans import Orphans
from swiftkv_platform.orchestration.ports import Clock
from swiftkv_platform.orchestration.reading import Instruments
from swiftkv_platform.orchestration.sweeper import Sweeper

_REQUESTS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_TICKS_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)
_WAITS_S = (1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 1800.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 24 * 3600.0)
_LAGS_S = (0.1, 0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0)


class ControlPlaneHistograms:
    """Kept as long as the application lives, however often it starts."""

    def __init__(self) -> None:
        self._requests = Histogram(
            "swiftkv_http_request_duration_seconds",
            "From a request's arrival to the head of its answer, by the route's template.",
            ("method", "route", "status"),
            buckets=_REQUESTS_S,
            registry=None,
        )
        self._ticks = Histogram(
            "swiftkv_loop_tick_duration_seconds",
            "Steps of the control loops that this control plane leads.",
            ("loop",),
            buckets=_TICKS_S,
            registry=None,
        )
        self._waits = Histogram(
            "swiftkv_job_queue_wait_seconds", "In the queue, by attempt that left it.", buckets=_WAITS_S, registry=None
        )
        self._lags = Histogram(
            "swiftkv_event_lag_seconds", "From an event's time until it was read.", buckets=_LAGS_S, registry=None
        )
        self.orchestration = Instruments(queue_wait=self._waits.observe, event_lag=self._lags.observe)
        """Listeners for the reconciler."""

    def register(self, registry: CollectorRegistry) -> None:
        """Have them on the page of a registry."""
        for histogram in (self._requests, self._ticks, self._waits, self._lags):
            registry.register(histogram)

    def answered(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count a request; `route` is a template, as `/jobs/{job_id}`, of which there are few."""
        self._requests.labels(method, route, f"{status // 100}xx").observe(seconds)

    def timed(self, loop: str, step: Callable[[], None]) -> Callable[[], None]:
        """`step`, whose every run is counted, also one that fails."""
        ticks = self._ticks.labels(loop)

        def run() -> None:
            with ticks.time():
                step()

        return run


T = TypeVar("T")


class Kept(Generic[T]):
    """The answer of `ask`, asked again once it is older than `keep_s` seconds; one thread asks at a time."""

    def __init__(self, ask: Callable[[], T], clock: Clock, *, keep_s: float) -> None:
        self._ask = ask
        self._clock = clock
        self._keep_s = keep_s
        self._kept: tuple[float, T] | None = None
        """Time of the last question, and its answer."""
        self._lock = threading.Lock()

    def get(self) -> T:
        """Raises as `ask`; a failure is not kept."""
        with self._lock:
            now = self._clock()
            if self._kept is None or now - self._kept[0] >= self._keep_s:
                self._kept = now, self._ask()
            return self._kept[1]


def complaint_of(check: Callable[[], None]) -> Callable[[], str | None]:
    """`check` as a question: what it complains of, None for nothing."""

    def ask() -> str | None:
        try:
            check()
        except SwiftKVError as error:
            return error.message
        return None

    return ask


class SweeperMetrics:
    """A collector that counts nothing itself. A control plane that stands by has counted nothing, and shows nothing."""

    def __init__(self, sweeper: Sweeper, orphans: Orphans) -> None:
        self._sweeper = sweeper
        self._orphans = orphans

    def describe(self) -> Iterable[Metric]:
        """Announce no metric ahead of time."""
        return []

    def collect(self) -> Iterable[Metric]:
        counts = self._sweeper.counts
        yield _gauge("swiftkv_database_rows", "Rows by table, when they were last counted.", "table", counts.rows)
        yield _gauge("swiftkv_store_objects", "Objects in the store by kind, likewise.", "kind", counts.objects)
        yield _gauge("swiftkv_store_bytes", "Their bytes.", "kind", counts.bytes)
        swept = self._sweeper.swept
        for what, text in (("rows", "Rows"), ("objects", "Objects"), ("bytes", "Bytes")):
            removed = CounterMetricFamily(
                f"swiftkv_swept_{what}", f"{text} that this process has removed.", labels=["kind"]
            )
            for kind, total in swept.items():
                if getattr(total, what):
                    removed.add_metric([kind], getattr(total, what))
            yield removed
        yield CounterMetricFamily(
            "swiftkv_orphans_stopped", "Attempts without a job that were stopped.", value=self._orphans.stopped
        )


def _gauge(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
