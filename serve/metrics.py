"""Prometheus metrics of a replica, with vLLM's names if they mean the same. Knows outputs, no HTTP.

Gauges are read from the engine when the metrics are read. Counters and histograms are updated as events happen, both on
this replica's page and in the export.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from swiftkv_platform.errors import SwiftKVError

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput
    from swiftkv_platform.serve.current import Version
    from swiftkv_platform.serve.metrics_export import RayMetricsExport

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)


_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompt_tokens": ("Prompt tokens of finished requests.", ()),
    "generation_tokens": ("Generated tokens of finished requests.", ()),
    "prefix_cache_hits": ("Prompt tokens whose KV was in the prefix cache.", ()),
    "tokens_exited": ("Generated tokens that did not go through all layers.", ()),
    "draft_tokens": ("Tokens drafted by the exit head or from the text, and verified.", ()),
    "accepted_tokens": ("Drafted tokens that were accepted.", ()),
    "prefill_layer_tokens_skipped": ("Prompt tokens that did not go through the layers above layer l.", ()),
    "request_success": ("Finished answers.", ("finished_reason",)),
    "rejected_requests": ("Requests that were not admitted.", ("reason",)),
    "requests": ("Requests sent to the model, whatever their outcome.", ("model",)),
    "model_loads": ("Models loaded, at a start or for a swap.", ()),
    "model_load_seconds": ("Time to load models, by phase.", ("phase",)),
    "swaps": ("Swaps of versions, by outcome.", ("outcome",)),
}
"""Description and labels of each counter, by its name without prefix."""
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From arrival to the first token.",
    "inter_token_latency_seconds": "Mean time between an answer's tokens.",
    "e2e_request_latency_seconds": "From arrival to the last token.",
}


class Metrics:
    """Metrics of a replica, which persist across swaps of models."""

    def __init__(self, export: RayMetricsExport | None = None) -> None:
        self.registry = CollectorRegistry()
        self.export = export
        self.replica = ""
        """Serve's name of the replica."""
        self.version: Version | None = None
        """Current version, the source of gauges."""
        self._counters = {
            name: Counter(f"swiftkv:{name}", what, labels, registry=self.registry)
            for name, (what, labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"swiftkv:{name}", what, buckets=_SECONDS, registry=self.registry)
            for name, what in _HISTOGRAMS.items()
        }
        self.registry.register(self)

    def _count(self, name: str, amount: float = 1.0, *, of: str | None = None, **labels: str) -> None:
        """Add to a counter on the replica's page and in the export. `of`: the event's model, which every exported
        series has as a label; None: the served model."""
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(amount)
        if self.export is not None:
            model = labels.pop("model", self.model if of is None else of)
            self.export.count(name, _COUNTERS[name][0], amount, model, labels)

    def _observe(self, name: str, seconds: float, model: str) -> None:
        self._histograms[name].observe(seconds)
        if self.export is not None:
            self.export.observe(name, _HISTOGRAMS[name], _SECONDS, seconds, model)

    @property
    def model(self) -> str:
        """Id of the served model; empty while there is none."""
        return "" if self.version is None else self.version.card.model

    def loaded(self, model: str, seconds: Mapping[str, float]) -> None:
        """Count a loaded model, and the seconds of each phase of its loading."""
        self._count("model_loads", of=model)
        for phase, value in seconds.items():
            self._count("model_load_seconds", value, of=model, phase=phase)

    def swapped(self, outcome: str) -> None:
        """Count a swap by its outcome: `succeeded`, `refused` or `superseded`."""
        self._count("swaps", outcome=outcome)

    def asked(self, model: str) -> None:
        """Count a request for the model chosen for it."""
        self._count("requests", model=model)

    def refused(self, error: SwiftKVError, model: str) -> None:
        """Count a request that was not admitted, for the model chosen for it."""
        self._count("rejected_requests", of=model, reason=error.code)

    def finished(self, output: RequestOutput, model: str) -> None:
        """Count a finished sample of a model."""
        metrics = output.metrics
        counted = {
            "generation_tokens": len(output.token_ids),
            "tokens_exited": output.num_exited_tokens,
            "draft_tokens": output.num_draft_tokens,
            "accepted_tokens": output.num_accepted_tokens,
        }
        if output.index == 0:
            counted["prompt_tokens"] = len(output.prompt_token_ids)
            counted["prefix_cache_hits"] = output.num_cached_tokens
            counted["prefill_layer_tokens_skipped"] = output.num_skipped_tokens
        for name, amount in counted.items():
            self._count(name, amount, of=model)
        self._count("request_success", of=model, finished_reason=str(output.finish_reason))
        for name, seconds in zip(_HISTOGRAMS, (metrics.ttft, metrics.tpot, metrics.total), strict=True):
            if seconds is not None:
                self._observe(name, seconds, model)

    def gauges(self) -> list[tuple[str, str, float]]:
        """Return name, description and value of each gauge of the engine; none while there is no engine."""
        if self.version is None:
            return []
        state, config = self.version.engine.state, self.version.engine.model.config
        values = [
            ("num_requests_running", "Running sequences.", state.num_running),
            ("num_requests_waiting", "Waiting sequences.", state.num_waiting),
            ("num_prompt_tokens_waiting", "Prompt tokens not processed yet.", state.num_waiting_tokens),
            ("num_preemptions", "Sequences preempted so far.", state.num_preemptions),
            ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", state.kv_cache_usage),
            ("exit_layer", "l: layers that compute their own KV.", getattr(config, "num_key_value_layers", None)),
        ]
        return [(name, what, value) for name, what, value in values if value is not None]

    def text(self) -> bytes:
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        """Announce no gauges to Prometheus in advance, since there may be no engine yet."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Yield the gauges for Prometheus."""
        # Serve's proxy may send a request to any replica: a reader that adds them up must know which one answered.
        info = GaugeMetricFamily(
            "swiftkv:replica_info", "1, labeled with the replica that these metrics are from.", labels=["replica"]
        )
        info.add_metric([self.replica], 1)
        yield info
        for name, what, value in self.gauges():
            yield GaugeMetricFamily(f"swiftkv:{name}", what, value=value)
