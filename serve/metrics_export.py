"""Export of a replica's metrics to the metrics page of its Ray node, which has those of all replicas of the node.

Prometheus discovers and scrapes nodes; Serve's proxy would lead it to any replica. Names are those of `serve.metrics`
with the prefix `ray_swiftkv_`. Labels: `deployment`, `replica` and `model`; the number of models per replica is
limited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ray.util.metrics import Counter, Gauge, Histogram, Metric

from swiftkv_platform.logs import get_logger

if TYPE_CHECKING:
    from swiftkv_platform.serve.metrics import Metrics

M = TypeVar("M", bound=Metric)

_MAX_MODELS = 32
"""Max models per replica with separate series; further models are counted as `other`."""
_OTHER_MODELS_LABEL = "other"
_GAUGE_INTERVAL_S = 5.0
"""Seconds between updates of gauges. Ray drops a gauge that was not set for 20 s."""
_COMMON_LABELS = ("deployment", "replica", "model")


class RayMetricsExport:
    """Exports the metrics of one replica, by their names without prefix."""

    def __init__(self, deployment: str, replica: str) -> None:
        self._constant = {"deployment": deployment, "replica": replica}
        self._metrics: dict[str, Metric] = {}
        self._models: set[str] = set()

    def increment_counter(self, name: str, description: str, amount: float, model: str, labels: dict[str, str]) -> None:
        if amount <= 0:  # Ray refuses to add 0
            return
        counter = self._get_metric(Counter, name, description, tag_keys=(*_COMMON_LABELS, *labels))
        counter.inc(amount, {**self._make_tags(model), **labels})

    def observe_histogram(
        self, name: str, description: str, buckets: Sequence[float], seconds: float, model: str
    ) -> None:
        histogram = self._get_metric(Histogram, name, description, boundaries=list(buckets), tag_keys=_COMMON_LABELS)
        histogram.observe(seconds, self._make_tags(model))

    def set_gauge(self, name: str, description: str, value: float, model: str) -> None:
        self._get_metric(Gauge, name, description, tag_keys=_COMMON_LABELS).set(value, self._make_tags(model))

    async def export_gauges(self, metrics: Metrics) -> None:
        """Set the gauges periodically until canceled."""
        while True:
            try:
                for name, description, value in metrics.read_gauges():
                    self.set_gauge(name, description, value, metrics.model)
            except Exception:  # such as from an engine that is closing
                get_logger().exception("engine_gauges_unreadable")
            await asyncio.sleep(_GAUGE_INTERVAL_S)

    def _get_metric(self, kind: type[M], name: str, description: str, **options: Any) -> M:
        if name not in self._metrics:
            self._metrics[name] = kind(f"swiftkv_{name}", description, **options)
        metric = self._metrics[name]
        assert isinstance(metric, kind)
        return metric

    def _make_tags(self, model: str) -> dict[str, str]:
        if model not in self._models:
            if len(self._models) >= _MAX_MODELS:
                model = _OTHER_MODELS_LABEL
            else:
                self._models.add(model)
        return {**self._constant, "model": model}
