"""Observers of ended requests: a line in the log, and OpenTelemetry spans if an OTLP endpoint is set.

A request is one span, a child of the caller's span if it sent a W3C `traceparent`; each of its choices has spans for
queue, prefill and decode. Exporter, sampler and resource are configured by OpenTelemetry's environment variables
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
from swiftkv_platform.serve.answers import Answers
from swiftkv_platform.serve.current import ModelCard, Observer
from swiftkv_platform.serve.schemas import Timings, Usage
from swiftkv_platform.traces import open_provider

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from swiftkv_platform.engine import RequestOutput


@dataclass(frozen=True, kw_only=True)
class RequestLog:
    """Writes a log line for each request: model, tenant, usage, timings and outcome."""

    with_text: bool = False
    """Log prompts and answers too. They may be confidential."""

    def closed(self, answers: Answers, card: ModelCard) -> None:
        outputs = answers.outputs
        fields: dict[str, Any] = {
            "request_id": answers.id,
            "tenant": answers.context.caller.tenant,
            "path": answers.context.caller.path,
            "model": card.model,
            "manifest_digest": card.manifest_digest,
            "outcome": answers.outcome,
            "finish_reasons": [output.finish_reason for output in outputs],
        }
        if answers.context.ignored_fields:
            fields["ignored_fields"] = answers.context.ignored_fields
        if outputs:
            fields |= Usage.of(outputs).model_dump() | Timings.of(outputs).model_dump()
        if self.with_text:
            fields |= {"prompts": answers.prompts, "texts": [output.text for output in outputs]}
        get_logger().info("request", **fields)

    def refused(self, error: SwiftKVError, caller: Caller, card: ModelCard) -> None:
        fields = {"tenant": caller.tenant, "path": caller.path, "model": card.model}
        get_logger().info("request", **fields, outcome=error.code, field=error.field)


def make_observers(*, with_text: bool) -> list[Observer]:
    """Return the observers that the process's settings ask for. `with_text`: see `RequestLog`."""
    provider = open_provider("swiftkv-serve")
    return [RequestLog(with_text=with_text), *([] if provider is None else [Tracing(provider)])]


class Tracing:
    """Writes the spans of ended requests."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("swiftkv.serve")
        self._propagator = TraceContextTextMapPropagator()

    def closed(self, answers: Answers, card: ModelCard) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        caller, outputs = answers.context.caller, answers.outputs
        parent = self._propagator.extract({"traceparent": caller.traceparent} if caller.traceparent else {})
        request = self._tracer.start_span(
            f"POST {caller.path}",
            parent,
            SpanKind.SERVER,
            {
                "gen_ai.request.model": card.model,
                "gen_ai.response.id": answers.id,
                "gen_ai.response.finish_reasons": [output.finish_reason or answers.outcome for output in outputs],
                "gen_ai.usage.input_tokens": sum(len(one.prompt_token_ids) for one in outputs if one.index == 0),
                "gen_ai.usage.output_tokens": sum(len(output.token_ids) for output in outputs),
                "swiftkv.tenant": caller.tenant,
                "swiftkv.outcome": answers.outcome,
                "swiftkv.early_exit_tokens": sum(output.num_exited_tokens for output in outputs),
            },
            start_time=answers.began_ns,
        )
        if answers.outcome not in ("finished", "left"):
            request.set_status(Status(StatusCode.ERROR, answers.outcome))
        within = set_span_in_context(request)
        for choice, output in enumerate(outputs):
            for name, since, until in _phases(output):
                span = self._tracer.start_span(
                    name, within, attributes={"swiftkv.choice": choice}, start_time=answers.began_ns + _ns(since)
                )
                span.end(answers.began_ns + _ns(until))
        request.end(time.time_ns())

    def refused(self, error: SwiftKVError, caller: Caller, card: ModelCard) -> None:
        """Write no span: nothing ran, and the caller's own trace has the status."""

    def shutdown(self) -> None:
        """Send pending spans."""
        self._provider.shutdown()


def _phases(output: RequestOutput) -> Iterator[tuple[str, float, float]]:
    """Yield (name, begin, end) of each phase that was reached, in seconds since the request's arrival."""
    metrics = output.metrics
    if metrics.queue_time is None:
        yield "queue", 0.0, metrics.total
        return
    yield "queue", 0.0, metrics.queue_time
    yield "prefill", metrics.queue_time, metrics.total if metrics.ttft is None else metrics.ttft
    if metrics.ttft is not None:
        yield "decode", metrics.ttft, metrics.total


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)
