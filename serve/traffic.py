"""Recording of captured traffic: finished requests that were chosen for it are redacted and stored in parts.

The event loop only queues a request. A thread does the rest, with bounded memory: requests beyond it are dropped, and
rows that cannot be stored in time fail. Both are counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from sys import getsizeof
from typing import TYPE_CHECKING, Literal

from swiftkv_platform.contract.traffic import (
    MAX_WRITE_DELAY_S,
    CapturedRequest,
    format_utc_day,
    make_part_key,
    strip_response_id_prefix,
)
from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.serve.redaction import Redactor
from swiftkv_platform.storage.object_store import ObjectStore, open_store
from swiftkv_platform.storage.traffic import MAX_ROW_BYTES, TrafficStore, encode_row

if TYPE_CHECKING:
    from swiftkv_platform.engine import RequestOutput
    from swiftkv_platform.serve.access import Caller
    from swiftkv_platform.serve.collector import CapturePlan, OutputCollector
    from swiftkv_platform.serve.replica_state import ServedModelInfo

Outcome = Literal["stored", "dropped", "failed"]
"""`dropped`: no memory left, or the row is too long; `failed`: the row could not be encoded, or stored in time."""

MAX_PENDING_BYTES = 16 << 20
"""Max approximate bytes of requests that are not stored yet."""
WRITE_INTERVAL_S = 10.0
"""Max seconds between two parts while there are rows."""
_PART_BYTES = 4 << 20
"""Bytes of uncompressed rows after which a part is written."""
_BATCH_BYTES, _BATCH_INTERVAL_S = 1 << 18, 1.0
"""Bytes of queued requests, or seconds, after which they are encoded."""
_CLOSE_TIMEOUT_S = 30.0
_OBJECT_BYTES = 4096
"""Approximate bytes of a queued request without its texts."""
_TOKEN_BYTES, _TOKEN_ID_BYTES = 8, 40
"""Approximate bytes of a token as text, and of its id in a list."""


@dataclass(frozen=True)
class _FinishedRequest:
    """A finished request with one answer, not encoded yet."""

    plan: CapturePlan
    id: str
    time: float
    model: str
    prompt: str | list[int]
    output: RequestOutput
    """Without token ids and log-probabilities."""
    prompt_tokens: int
    completion_tokens: int

    @property
    def num_bytes(self) -> int:
        """Approximate size in memory."""
        size = _OBJECT_BYTES + getsizeof(self.output.text)
        if self.plan.conversation is not None:
            # The prompt's tokens include the tools.
            return size + self.plan.conversation.num_bytes + _TOKEN_BYTES * self.prompt_tokens
        return size + (getsizeof(self.prompt) if isinstance(self.prompt, str) else _TOKEN_ID_BYTES * len(self.prompt))

    def make_row(self) -> CapturedRequest:
        """Return the row, redacted. Takes long for long texts."""
        plan = self.plan
        if plan.conversation is not None:
            fields = plan.conversation.make_row_fields(self.output)
        else:
            prompt = self.prompt if isinstance(self.prompt, str) else plan.decode(self.prompt)
            fields = {"prompt": prompt, "completion": self.output.text, "finish_reason": self.output.finish_reason}
        row = CapturedRequest(
            id=self.id,
            time=self.time,
            path=plan.path,
            model=self.model,
            user=plan.user,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            **fields,
        )
        return Redactor(plan.settings.redact).redact_row(row)


@dataclass(frozen=True)
class _EncodedRow:
    uri: str
    """Address of the traffic that the row belongs to."""
    time: float
    line: bytes

    @property
    def part(self) -> tuple[str, str]:
        """(address, day); rows of a part have the same."""
        return self.uri, format_utc_day(self.time)


@dataclass(frozen=True)
class _Part:
    uri: str
    name: str
    rows: Sequence[_EncodedRow]


_open_fail_fast_store = partial(open_store, patient=False)


class TrafficRecorder:
    """Observer that stores the requests with a capture plan. Its thread starts with the first one.

    Args:
        count: called with an outcome and a number of requests, from any thread.
        open_store: returns the store at an address, which should fail within seconds.
        clock: Unix seconds.
    """

    def __init__(
        self,
        count: Callable[[Outcome, int], None],
        *,
        open_store: Callable[[str], ObjectStore] = _open_fail_fast_store,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._count = count
        self._open_store = open_store
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: list[_FinishedRequest] = []
        self._queued_bytes = 0
        self._encoded_bytes = 0
        self._is_closing = False
        self._thread: threading.Thread | None = None
        # Of the thread only
        self._rows: list[_EncodedRow] = []
        self._unstored_parts: list[_Part] = []
        """Parts whose write has failed; it is repeated under the same name, since it may have reached the store."""
        self._stores: dict[str, TrafficStore] = {}

    def on_request_ended(self, collector: OutputCollector, model_info: ServedModelInfo) -> None:
        """Queue the first answer to each prompt of a request that has finished."""
        plan = collector.context.capture
        if plan is None or collector.outcome != "finished":
            return
        now, request_id = self._clock(), strip_response_id_prefix(collector.id)
        outputs = [output for output in collector.outputs if output.index == 0]
        for number, (prompt, output) in enumerate(zip(collector.prompts, outputs, strict=True)):
            if output.token_ids:  # else the prompt was only scored
                self._add_request(
                    _FinishedRequest(
                        plan,
                        request_id if len(outputs) == 1 else f"{request_id}/{number}",
                        now,
                        model_info.model,
                        "" if plan.conversation is not None else prompt,
                        replace(output, prompt_token_ids=[], token_ids=[], logprobs=None, prompt_logprobs=None),
                        prompt_tokens=len(output.prompt_token_ids),
                        completion_tokens=len(output.token_ids),
                    )
                )

    def on_request_refused(self, error: SwiftKVError, caller: Caller, model_info: ServedModelInfo) -> None:
        """Ignore refused requests, which have no answer."""

    def _add_request(self, request: _FinishedRequest) -> None:
        size = request.num_bytes
        with self._changed:
            if self._is_closing or self._queued_bytes + self._encoded_bytes + size > MAX_PENDING_BYTES:
                self._count("dropped", 1)
                return
            self._queue.append(request)
            self._queued_bytes += size
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="traffic", daemon=True)
                self._thread.start()
            if len(self._queue) == 1 or self._queued_bytes >= _BATCH_BYTES:
                self._changed.notify()

    def close(self) -> None:
        """Store what is queued, and end the thread; what cannot be stored now has failed. Blocks."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        """Encode and store queued requests until `close`."""
        next_write = 0.0
        is_closing = False
        while not is_closing:
            # 1. wait for requests, and then for more of them
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or self._queue or self._has_rows)
                self._changed.wait_for(self._has_batch, _BATCH_INTERVAL_S)
                requests, queued_bytes = self._queue, self._queued_bytes
                self._queue, is_closing = [], self._is_closing
            # 2. encode them
            if not self._has_rows:
                next_write = time.monotonic() + WRITE_INTERVAL_S
            for request in requests:
                self._encode_request(request)
            with self._changed:
                self._queued_bytes -= queued_bytes
                self._encoded_bytes = self._sum_encoded_bytes()
            # 3. write parts
            if is_closing or self._encoded_bytes >= _PART_BYTES or time.monotonic() >= next_write:
                self._write_parts()
                next_write = time.monotonic() + WRITE_INTERVAL_S
        for part in self._unstored_parts:
            self._count("failed", len(part.rows))

    @property
    def _has_rows(self) -> bool:
        return bool(self._rows or self._unstored_parts)

    def _sum_encoded_bytes(self) -> int:
        unstored = (row for part in self._unstored_parts for row in part.rows)
        return sum(len(row.line) for row in (*self._rows, *unstored))

    def _has_batch(self) -> bool:
        return self._is_closing or self._queued_bytes >= _BATCH_BYTES

    def _encode_request(self, request: _FinishedRequest) -> None:
        try:
            line = encode_row(request.make_row())
        except Exception as error:  # of any kind, since one request must not end the thread
            # The error's text may have the request's.
            get_logger().error("captured request not encoded", request_id=request.id, error=type(error).__name__)
            self._count("failed", 1)
            return
        if len(line) > MAX_ROW_BYTES:
            self._count("dropped", 1)
        else:
            self._rows.append(_EncodedRow(request.plan.settings.uri, request.time, line))

    def _write_parts(self) -> None:
        """Store the rows. Those of a failed write stay until they are too old."""
        earliest = self._clock() - MAX_WRITE_DELAY_S
        parts = [*self._unstored_parts, *_split_into_parts(self._rows)]
        self._rows, self._unstored_parts = [], []
        for part in parts:
            fresh = [row for row in part.rows if row.time > earliest]
            if len(fresh) < len(part.rows):
                self._count("failed", len(part.rows) - len(fresh))
            if not fresh:
                continue
            try:
                self._get_store(part.uri).write_part([row.line for row in fresh], name=part.name)
            except SwiftKVError as error:
                get_logger().warning("captured traffic not stored", rows=len(fresh), reason=error.message)
                self._unstored_parts.append(replace(part, rows=fresh))
            else:
                self._count("stored", len(fresh))
        with self._changed:
            self._encoded_bytes = self._sum_encoded_bytes()

    def _get_store(self, uri: str) -> TrafficStore:
        if uri not in self._stores:
            self._stores[uri] = TrafficStore(self._open_store(uri))
        return self._stores[uri]


def _split_into_parts(rows: Sequence[_EncodedRow]) -> Iterator[_Part]:
    """Yield new parts with the rows."""
    by_part: dict[tuple[str, str], list[_EncodedRow]] = {}
    for row in rows:
        by_part.setdefault(row.part, []).append(row)
    for (uri, day), found in by_part.items():
        part, size = list[_EncodedRow](), 0
        for row in found:
            if part and size + len(row.line) > _PART_BYTES:
                yield _Part(uri, make_part_key(day), part)
                part, size = [], 0
            part.append(row)
            size += len(row.line)
        yield _Part(uri, make_part_key(day), part)
