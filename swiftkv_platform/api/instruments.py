"""Histograms of a control plane: its requests, the ticks of its loops, the wait of jobs, the lag of events."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Histogram

from swiftkv_platform.orchestration.instruments import Instruments

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
