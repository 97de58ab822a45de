"""Waits of jobs, lags of their events, and spans, told while they happen. Knows no metrics library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swiftkv_platform.orchestration.job import Job
from swiftkv_platform.orchestration.ports import StoredEvent
from swiftkv_platform.traces import NO_SPANS, Spans

Observe = Callable[[float], None]
"""Takes seconds."""


def _ignore(_seconds: float) -> None:
    pass


@dataclass(frozen=True)
class Instruments:
    """Listeners to the reconciler; by default there are none."""

    queue_wait: Observe = _ignore
    """Seconds that an attempt was in the queue."""
    event_lag: Observe = _ignore
    """Seconds from an event's time, by its writer's clock, until it is read."""

    spans: Spans = NO_SPANS

    def started(self, job: Job, now: float) -> None:
        """Tell of an attempt that leaves the queue. A delay before a retry is no wait for a place."""
        since = max(job.created_at, job.not_before)
        self.queue_wait(max(0.0, now - since))
        named = {"job_id": job.id, "attempt": job.attempt.number}
        self.spans.record("queue wait", job.traceparent, min(since, now), now, **named)

    def read(self, events: Sequence[StoredEvent], now: float) -> None:
        """Tell of events that were read."""
        for item in events:
            self.event_lag(max(0.0, now - item.event.time))


NO_INSTRUMENTS = Instruments()
