"""Export of a replica's metrics through Ray's: each node's metrics page has those of all its replicas.

Prometheus can discover and scrape nodes, while Serve's proxy would lead it to an arbitrary replica. Names are those of
`serve.metrics` with the prefix `ray_swiftkv_`. Labels: `deployment`, `replica` and `model`; the number of models per
replica is bounded.
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

_MOST_MODELS = 32
"""Most models per replica with series of their own; further ones are counted as `other`."""
_OTHER = "other"
_GAUGES_EVERY_S = 5.0
"""Seconds between updates. Ray drops a gauge that was not set for two of its reports, ten seconds apart."""
_LABELS = ("deployment", "replica", "model")


class RayMetricsExport:
    """Exports what `Metrics` of one replica count, by names without prefix."""

    def __init__(self, deployment: str, replica: str) -> None:
        self._constant = {"deployment": deployment, "replica": replica}
        self._metrics: dict[str, Metric] = {}
        self._models: set[str] = set()

    def count(self, name: str, what: str, amount: float, model: str, labels: dict[str, str]) -> None:
        if amount <= 0:  # Ray refuses to add 0
            return
        counter = self._metric(Counter, name, what, tag_keys=(*_LABELS, *labels))
        counter.inc(amount, {**self._tags(model), **labels})

    def observe(self, name: str, what: str, buckets: Sequence[float], seconds: float, model: str) -> None:
        histogram = self._metric(Histogram, name, what, boundaries=list(buckets), tag_keys=_LABELS)
        histogram.observe(seconds, self._tags(model))

    def set(self, name: str, what: str, value: float, model: str) -> None:
        self._metric(Gauge, name, what, tag_keys=_LABELS).set(value, self._tags(model))

    async def follow(self, metrics: Metrics) -> None:
        """Set the engine's gauges periodically until cancelled."""
        while True:
            try:
                for name, what, value in metrics.gauges():
                    self.set(name, what, value, metrics.model)
            except Exception:  # such as from an engine that is being closed; must not end the export
                get_logger().exception("gauges not read")
            await asyncio.sleep(_GAUGES_EVERY_S)

    def _metric(self, kind: type[M], name: str, what: str, **options: Any) -> M:
        if name not in self._metrics:
            self._metrics[name] = kind(f"swiftkv_{name}", what, **options)
        metric = self._metrics[name]
        assert isinstance(metric, kind)
        return metric

    def _tags(self, model: str) -> dict[str, str]:
        if model not in self._models:
            if len(self._models) >= _MOST_MODELS:
                model = _OTHER
            else:
                self._models.add(model)
        return {**self._constant, "model": model}
