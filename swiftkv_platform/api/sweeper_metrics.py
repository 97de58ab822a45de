"""Sizes of database and store as Prometheus metrics: what the sweeper counted last, and what it has removed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from swiftkv_platform.orchestration.orphans import Orphans
from swiftkv_platform.orchestration.sweeper import Sweeper


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
