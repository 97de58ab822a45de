"""A local receiver of OpenTelemetry spans: OTLP over HTTP, as exporters send it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.fakes.scripted_server import Answer, Request, serve


@dataclass(frozen=True)
class ReceivedSpan:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    began: float
    """Unix seconds."""
    ended: float
    is_error: bool
    attributes: dict[str, str | int]


class OtlpReceiver:
    url = ""

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []

    def answer(self, request: Request) -> Answer:
        assert request.path == "/v1/traces", request.path
        for resource in ExportTraceServiceRequest.FromString(request.raw).resource_spans:
            names = {item.key: item.value.string_value for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [_received(names["service.name"], span) for span in scope.spans]
        return Answer(headers={"Content-Type": "application/x-protobuf"})

    def by_name(self) -> dict[str, ReceivedSpan]:
        assert len({span.name for span in self.spans}) == len(self.spans), self.spans
        return {span.name: span for span in self.spans}


def _received(service: str, span: Any) -> ReceivedSpan:
    return ReceivedSpan(
        service=service,
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        began=span.start_time_unix_nano / 1e9,
        ended=span.end_time_unix_nano / 1e9,
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
        attributes={item.key: item.value.string_value or item.value.int_value for item in span.attributes},
    )


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    with serve(receiver) as receiver.url:
        yield receiver
