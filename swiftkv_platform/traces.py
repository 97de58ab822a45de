"""Spans of jobs, sent over OTLP if `OTEL_EXPORTER_OTLP_ENDPOINT` is set; otherwise nothing is imported or recorded. A
W3C `traceparent` passes the context from POST /jobs through `attempt.json` to the workers."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_TRACEPARENT_PATTERN = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_FLUSH_MS = 5000


def open_provider(service: str) -> TracerProvider | None:
    """Return a provider that sends spans in the background; None if no endpoint is set. `OTEL_SERVICE_NAME` overrides
    `service`."""
    if not any(os.environ.get(name) for name in _ENDPOINT_VARIABLES):
        return None
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import SERVICE_NAME, Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", service)
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def parse_traceparent(header: str | None) -> str | None:
    """Return the header if it is a W3C `traceparent` of version 00, else None."""
    return header if header is not None and _TRACEPARENT_PATTERN.fullmatch(header) else None


class SpanRecorder:
    """Records spans as children of a `traceparent`. `provider`: None records nothing."""

    def __init__(self, provider: TracerProvider | None = None) -> None:
        self._provider = provider

    @contextmanager
    def span(self, name: str, parent: str | None, **attributes: Any) -> Iterator[str | None]:
        """Record the block as a span and yield its `traceparent`, or `parent` if nothing is recorded.

        A block that raises is marked as an error.
        """
        if self._provider is None:
            yield parent
            return
        from opentelemetry.trace import Status, StatusCode

        span = self._start_span(name, parent, time.time(), attributes)
        try:
            yield _format_traceparent(span)
        except BaseException as error:
            span.set_status(Status(StatusCode.ERROR, type(error).__name__))
            raise
        finally:
            span.end()

    def record(self, name: str, parent: str | None, start: float, end: float, **attributes: Any) -> None:
        """Record a span that has ended. Times are Unix seconds."""
        if self._provider is not None:
            self._start_span(name, parent, start, attributes).end(_to_nanoseconds(end))

    def flush(self) -> None:
        """Send the recorded spans; wait at most 5 seconds."""
        if self._provider is not None:
            self._provider.force_flush(_FLUSH_MS)

    def close(self) -> None:
        """Send the remaining spans and stop the exporter."""
        if self._provider is not None:
            self._provider.shutdown()

    def _start_span(self, name: str, parent: str | None, start: float, attributes: dict[str, Any]) -> Any:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        assert self._provider is not None, "callers check for a provider"
        context = TraceContextTextMapPropagator().extract({} if parent is None else {"traceparent": parent})
        tracer = self._provider.get_tracer("swiftkv")
        named = {f"swiftkv.{key}": value for key, value in attributes.items()}
        return tracer.start_span(name, context, attributes=named, start_time=_to_nanoseconds(start))


DISABLED_SPAN_RECORDER = SpanRecorder()


@cache
def get_job_span_recorder() -> SpanRecorder:
    """Return the recorder of this driver or worker process."""
    return SpanRecorder(open_provider("swiftkv-job"))


def _format_traceparent(span: Any) -> str:
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"


def _to_nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
