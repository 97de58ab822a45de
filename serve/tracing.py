"""Observers of ended requests: a log line, and OpenTelemetry spans if an OTLP endpoint is set.

A request has one span, a child of the caller's span if it sent a W3C `traceparent`. Each choice has spans for queue,
prefill and decode. Exporter, sampler and resource are configured by OpenTelemetry's environment variables
(`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_TRACES_SAMPLER`, `OTEL_SERVICE_NAME`, ...).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.serve.access import Caller
from swiftkv_platform.serve.collector import OutputCollector
from swiftkv_platform.serve.replica_state import RequestObserver, ServedModelInfo
from swiftkv_platform.serve.schemas import Timings, Usage
from swiftkv_platform.traces import open_provider

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from swiftkv_platform.engine import RequestOutput


@dataclass(frozen=True, kw_only=True)
class RequestLogger:
    """Writes a log line per request: model, tenant, usage, timings and outcome."""

    with_text: bool = False
    """Also log prompts and completions, which may be confidential."""

    def on_request_ended(self, collector: OutputCollector, model_info: ServedModelInfo) -> None:
        outputs = collector.outputs
        fields: dict[str, Any] = {
            "request_id": collector.id,
            "tenant": collector.context.caller.tenant,
            "path": collector.context.caller.request_path,
            "model": model_info.model,
            "manifest_digest": model_info.manifest_digest,
            "outcome": collector.outcome,
            "finish_reasons": [output.finish_reason for output in outputs],
        }
        if collector.context.ignored_fields:
            fields["ignored_fields"] = collector.context.ignored_fields
        if outputs:
            fields |= Usage.from_outputs(outputs).model_dump() | Timings.from_outputs(outputs).model_dump()
        if self.with_text:
            fields |= {"prompts": collector.prompts, "texts": [output.text for output in outputs]}
        get_logger().info("request", **fields)

    def on_request_refused(self, error: SwiftKVError, caller: Caller, model_info: ServedModelInfo) -> None:
        fields = {"tenant": caller.tenant, "path": caller.request_path, "model": model_info.model}
        get_logger().info("request", **fields, outcome=error.code, field=error.field)


def make_request_observers(*, with_text: bool) -> list[RequestObserver]:
    """Return the observers of the process's settings. `with_text`: see `RequestLogger`."""
    provider = open_provider("swiftkv-serve")
    return [RequestLogger(with_text=with_text), *([] if provider is None else [RequestTracer(provider)])]


class RequestTracer:
    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("swiftkv.serve")
        self._propagator = TraceContextTextMapPropagator()

    def on_request_ended(self, collector: OutputCollector, model_info: ServedModelInfo) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        caller, outputs = collector.context.caller, collector.outputs
        parent = self._propagator.extract({"traceparent": caller.traceparent} if caller.traceparent else {})
        request = self._tracer.start_span(
            f"POST {caller.request_path}",
            parent,
            SpanKind.SERVER,
            {
                "gen_ai.request.model": model_info.model,
                "gen_ai.response.id": collector.id,
                "gen_ai.response.finish_reasons": [output.finish_reason or collector.outcome for output in outputs],
                "gen_ai.usage.input_tokens": sum(
                    len(output.prompt_token_ids) for output in outputs if output.index == 0
                ),
                "gen_ai.usage.output_tokens": sum(len(output.token_ids) for output in outputs),
                "swiftkv.tenant": caller.tenant,
                "swiftkv.outcome": collector.outcome,
                "swiftkv.early_exit_tokens": sum(output.num_exited_tokens for output in outputs),
            },
            start_time=collector.started_ns,
        )
        if collector.outcome not in ("finished", "left"):
            request.set_status(Status(StatusCode.ERROR, collector.outcome))
        parent_context = set_span_in_context(request)
        for choice, output in enumerate(outputs):
            for name, start, end in _iterate_phases(output):
                span = self._tracer.start_span(
                    name,
                    parent_context,
                    attributes={"swiftkv.choice": choice},
                    start_time=collector.started_ns + _to_ns(start),
                )
                span.end(collector.started_ns + _to_ns(end))
        request.end(time.time_ns())

    def on_request_refused(self, error: SwiftKVError, caller: Caller, model_info: ServedModelInfo) -> None:
        """Write no span; the caller's own trace has the status."""

    def shutdown(self) -> None:
        self._provider.shutdown()


def _iterate_phases(output: RequestOutput) -> Iterator[tuple[str, float, float]]:
    """Yield (name, start, end) of each past phase, in seconds since the request's arrival."""
    metrics = output.metrics
    if metrics.queue_time is None:
        yield "queue", 0.0, metrics.total
        return
    yield "queue", 0.0, metrics.queue_time
    yield "prefill", metrics.queue_time, metrics.total if metrics.ttft is None else metrics.ttft
    if metrics.ttft is not None:
        yield "decode", metrics.ttft, metrics.total


def _to_ns(seconds: float) -> int:
    return int(seconds * 1e9)
