"""Prometheus metrics of a replica, with vLLM's names for the same quantities. Knows outputs, no HTTP.

Gauges are read from the engine on request. Counters and histograms are updated on this replica's page and in the
export.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from swiftkv_platform.errors import SwiftKVError

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput
    from swiftkv_platform.serve.metrics_export import RayMetricsExport
    from swiftkv_platform.serve.replica_state import ModelVersion

_LATENCY_BUCKETS_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)

_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "prompt_tokens": ("Prompt tokens of finished requests.", ()),
    "generation_tokens": ("Generated tokens of finished requests.", ()),
    "prefix_cache_queries": ("Prompt tokens that were looked up in the prefix cache.", ()),
    "prefix_cache_hits": ("Prompt tokens whose KV was in the prefix cache.", ()),
    "tokens_exited": ("Generated tokens that did not go through all layers.", ()),
    "draft_tokens": (
        "Draft tokens (from the exit head, or copied from earlier text) that were verified.",
        (),
    ),
    "accepted_tokens": ("Drafted tokens that were accepted.", ()),
    "prefill_layer_tokens_skipped": ("Prompt tokens that skipped the layers >= l.", ()),
    "request_success": ("Finished answers.", ("finished_reason",)),
    "rejected_requests": ("Requests that were not admitted.", ("reason",)),
    "requests": ("Requests sent to the model, whatever their outcome.", ("model",)),
    "captured_requests": ("Requests chosen for captured traffic, by outcome.", ("outcome",)),
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
    """Metrics of a replica, over all its model versions."""

    def __init__(self, export: RayMetricsExport | None = None) -> None:
        self.registry = CollectorRegistry()
        self.export = export
        self.replica = ""
        self.version: ModelVersion | None = None
        """Current version, the source of gauges."""
        self._counters = {
            name: Counter(f"swiftkv:{name}", description, labels, registry=self.registry)
            for name, (description, labels) in _COUNTERS.items()
        }
        self._histograms = {
            name: Histogram(f"swiftkv:{name}", description, buckets=_LATENCY_BUCKETS_S, registry=self.registry)
            for name, description in _HISTOGRAMS.items()
        }
        self.registry.register(self)

    def _increment_counter(self, name: str, amount: float = 1.0, *, of_model: str | None = None, **labels: str) -> None:
        """Add to a counter on the replica's page and in the export. `of_model`: label of the exported series; None: the
        served model."""
        counter = self._counters[name]
        (counter.labels(**labels) if labels else counter).inc(amount)
        if self.export is not None:
            model = labels.pop("model", self.model if of_model is None else of_model)
            self.export.increment_counter(name, _COUNTERS[name][0], amount, model, labels)

    def _observe_histogram(self, name: str, seconds: float, model: str) -> None:
        self._histograms[name].observe(seconds)
        if self.export is not None:
            self.export.observe_histogram(name, _HISTOGRAMS[name], _LATENCY_BUCKETS_S, seconds, model)

    @property
    def model(self) -> str:
        return "" if self.version is None else self.version.model_info.model

    def count_load(self, model: str, seconds: Mapping[str, float]) -> None:
        """Count a loaded model. `seconds`: by phase of its loading."""
        self._increment_counter("model_loads", of_model=model)
        for phase, value in seconds.items():
            self._increment_counter("model_load_seconds", value, of_model=model, phase=phase)

    def count_swap(self, outcome: str) -> None:
        """Count a swap by its outcome: `succeeded`, `refused` or `superseded`."""
        self._increment_counter("swaps", outcome=outcome)

    def count_captured(self, outcome: str, number: int) -> None:
        """Count requests chosen for captured traffic by their outcome: `stored`, `dropped` or `failed`. Thread-safe."""
        self._increment_counter("captured_requests", number, outcome=outcome)

    def count_request(self, model: str) -> None:
        """Count a request, admitted or not. `model`: model chosen for the request."""
        self._increment_counter("requests", model=model)

    def count_refusal(self, error: SwiftKVError, model: str) -> None:
        self._increment_counter("rejected_requests", of_model=model, reason=error.code)

    def record_output(self, output: RequestOutput, model: str) -> None:
        metrics = output.metrics
        counts = {
            "generation_tokens": len(output.token_ids),
            "tokens_exited": output.num_exited_tokens,
            "draft_tokens": output.num_draft_tokens,
            "accepted_tokens": output.num_accepted_tokens,
        }
        if output.index == 0:
            counts["prompt_tokens"] = len(output.prompt_token_ids)
            # Log-probabilities of a prompt need its hidden states, which no cache has.
            counts["prefix_cache_queries"] = 0 if output.prompt_logprobs else len(output.prompt_token_ids)
            counts["prefix_cache_hits"] = output.num_cached_tokens
            counts["prefill_layer_tokens_skipped"] = output.num_skipped_tokens
        for name, amount in counts.items():
            self._increment_counter(name, amount, of_model=model)
        self._increment_counter("request_success", of_model=model, finished_reason=str(output.finish_reason))
        for name, seconds in zip(_HISTOGRAMS, (metrics.ttft, metrics.tpot, metrics.total), strict=True):
            if seconds is not None:
                self._observe_histogram(name, seconds, model)

    def read_gauges(self) -> list[tuple[str, str, float]]:
        """Return (name, description, value) of each gauge of the engine; empty without an engine."""
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
        if (adapters := self.version.adapters) is not None:
            values += [
                ("adapters_resident", "Adapters in memory.", adapters.num_resident),
                ("adapter_bytes", "Bytes of the weights of adapters in memory.", adapters.num_bytes),
            ]
        return [(name, description, value) for name, description, value in values if value is not None]

    def render_page(self) -> bytes:
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, since the engine of the gauges may not exist yet."""
        return []

    def collect(self) -> Iterable[Metric]:
        # Serve's proxy sends each scrape to any replica, so the page names its replica.
        info = GaugeMetricFamily(
            "swiftkv:replica_info",
            "Always 1. The labels are the replica that reports these metrics, and its operators, such as native "
            "kernels.",
            labels=["replica", "operators"],
        )
        info.add_metric([self.replica, "" if self.version is None else self.version.engine.model.operators], 1)
        yield info
        for name, description, value in self.read_gauges():
            yield GaugeMetricFamily(f"swiftkv:{name}", description, value=value)
