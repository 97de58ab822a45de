"""Prometheus metrics of a replica, with vLLM's names if they mean the same. Knows outputs, no HTTP.

Gauges are read from the engine when the metrics are read. Counters and histograms are updated as events happen, both on
this replica's page and in the export.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from swiftkv_platform.errors import SwiftKVError

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput
    from swiftkv_platform.engine.frontend import EngineFrontend
    from swiftkv_platform.serve.metrics_export import RayMetricsExport

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5, 10, 20, 40, 80, 160)


class _Counter:
    """A counter on the replica's page and in the export. Events without a model count for the served model."""

    def __init__(self, metrics: Metrics, name: str, what: str, labels: tuple[str, ...]) -> None:
        self._metrics, self._name, self._what, self._labels = metrics, name, what, labels
        self._counter = Counter(f"swiftkv:{name}", what, labels, registry=metrics.registry)

    def inc(self, amount: float = 1.0, *values: str, model: str | None = None) -> None:
        (self._counter.labels(*values) if values else self._counter).inc(amount)
        if self._metrics.export is not None:
            labels = dict(zip(self._labels, values, strict=True))
            model = labels.pop("model", model)  # every exported series has that label
            self._metrics.export.count(
                self._name, self._what, amount, self._metrics.model if model is None else model, labels
            )


class _Histogram:
    """A histogram of seconds on the replica's page and in the export."""

    def __init__(self, metrics: Metrics, name: str, what: str) -> None:
        self._metrics, self._name, self._what = metrics, name, what
        self._histogram = Histogram(f"swiftkv:{name}", what, buckets=_SECONDS, registry=metrics.registry)

    def observe(self, seconds: float, model: str) -> None:
        self._histogram.observe(seconds)
        if self._metrics.export is not None:
            self._metrics.export.observe(self._name, self._what, _SECONDS, seconds, model)


class Metrics:
    """Metrics of a replica, which persist across swaps of models."""

    def __init__(self, export: RayMetricsExport | None = None) -> None:
        self.registry = CollectorRegistry()
        self.export = export
        self._engine: Callable[[], EngineFrontend | None] = lambda: None
        self._model: Callable[[], str] = lambda: ""
        self._replica = ""

        def counter(name: str, what: str, *labels: str) -> _Counter:
            return _Counter(self, name, what, labels)

        def histogram(name: str, what: str) -> _Histogram:
            return _Histogram(self, name, what)

        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._generation_tokens = counter("generation_tokens", "Generated tokens of finished requests.")
        self._cached_tokens = counter("prefix_cache_hits", "Prompt tokens whose KV was in the prefix cache.")
        self._exited_tokens = counter("tokens_exited", "Generated tokens that did not go through all layers.")
        self._draft_tokens = counter("draft_tokens", "Tokens drafted by the exit head or from the text, and verified.")
        self._accepted_tokens = counter("accepted_tokens", "Drafted tokens that were accepted.")
        self._skipped_tokens = counter(
            "prefill_layer_tokens_skipped", "Prompt tokens that did not go through the layers above layer l."
        )
        self._success = counter("request_success", "Finished answers.", "finished_reason")
        self._rejected = counter("rejected_requests", "Requests that were not admitted.", "reason")
        self._asked = counter("requests", "Requests sent to the model, whatever their outcome.", "model")
        self._loads = counter("model_loads", "Models loaded, at a start or for a swap.")
        self._load_seconds = counter("model_load_seconds", "Time to load models, by phase.", "phase")
        self._swaps = counter("swaps", "Swaps of versions, by outcome.", "outcome")
        self._ttft = histogram("time_to_first_token_seconds", "From arrival to the first token.")
        self._itl = histogram("inter_token_latency_seconds", "Mean time between an answer's tokens.")
        self._latency = histogram("e2e_request_latency_seconds", "From arrival to the last token.")
        self.registry.register(_EngineState(self))

    def follow(self, engine: Callable[[], EngineFrontend | None], model: Callable[[], str], replica: str) -> None:
        """Set the source of gauges: functions that return the current engine and model, and Serve's replica name."""
        self._engine, self._model, self._replica = engine, model, replica

    @property
    def replica(self) -> str:
        return self._replica

    @property
    def model(self) -> str:
        """Id of the served model; empty while there is none."""
        return self._model()

    @property
    def engine(self) -> EngineFrontend | None:
        return self._engine()

    def loaded(self, model: str, seconds: Mapping[str, float]) -> None:
        """Count a loaded model, and the seconds of each phase of its loading."""
        self._loads.inc(model=model)
        for phase, value in seconds.items():
            self._load_seconds.inc(value, phase, model=model)

    def swapped(self, outcome: str) -> None:
        """Count a swap by its outcome: `succeeded`, `refused` or `superseded`."""
        self._swaps.inc(1, outcome)

    def asked(self, model: str) -> None:
        """Count a request for the model chosen for it."""
        self._asked.inc(1, model)

    def refused(self, error: SwiftKVError, model: str) -> None:
        """Count a request that was not admitted, for the model chosen for it."""
        self._rejected.inc(1, error.code, model=model)

    def finished(self, output: RequestOutput, model: str) -> None:
        """Count a finished sample of a model."""
        if output.index == 0:
            self._prompt_tokens.inc(len(output.prompt_token_ids), model=model)
            self._cached_tokens.inc(output.num_cached_tokens, model=model)
            self._skipped_tokens.inc(output.num_prefill_layers_skipped_tokens, model=model)
        self._generation_tokens.inc(len(output.token_ids), model=model)
        self._exited_tokens.inc(output.num_exited_tokens, model=model)
        self._draft_tokens.inc(output.num_draft_tokens, model=model)
        self._accepted_tokens.inc(output.num_accepted_tokens, model=model)
        self._success.inc(1, str(output.finish_reason), model=model)
        metrics = output.metrics
        for histogram, seconds in (
            (self._ttft, metrics.ttft),
            (self._itl, metrics.tpot),
            (self._latency, metrics.total),
        ):
            if seconds is not None:
                histogram.observe(seconds, model)

    def gauges(self) -> list[tuple[str, str, float]]:
        """Return name, description and value of each gauge of the engine; none while there is no engine."""
        engine = self.engine
        if engine is None:
            return []
        state = engine.state
        values = [
            ("num_requests_running", "Running sequences.", state.num_running),
            ("num_requests_waiting", "Waiting sequences.", state.num_waiting),
            ("num_prompt_tokens_waiting", "Prompt tokens not processed yet.", state.num_waiting_tokens),
            ("num_preemptions", "Sequences preempted so far.", state.num_preemptions),
            ("kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", state.kv_cache_usage),
            (
                "exit_layer",
                "l: layers that compute their own KV.",
                getattr(engine.model.config, "num_key_value_layers", None),
            ),
        ]
        return [(name, what, value) for name, what, value in values if value is not None]

    def text(self) -> bytes:
        """Return the metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _EngineState:
    """Prometheus collector of the current engine's gauges."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def describe(self) -> Iterable[Metric]:
        """Announce no metrics in advance, since there may be no engine yet."""
        return []

    def collect(self) -> Iterable[Metric]:
        # Serve's proxy may send a request to any replica: a reader that adds them up must know which one answered.
        info = GaugeMetricFamily(
            "swiftkv:replica_info", "1, labeled with the replica that these metrics are from.", labels=["replica"]
        )
        info.add_metric([self._metrics.replica], 1)
        yield info
        for name, what, value in self._metrics.gauges():
            yield GaugeMetricFamily(f"swiftkv:{name}", what, value=value)
