"""The recorder of captured traffic: off the event loop, with bounded memory, and lossy only as counted."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.contract.traffic import MAX_WRITE_DELAY_S, CapturedRequest
from swiftkv_platform.engine.outputs import RequestMetrics, RequestOutput
from swiftkv_platform.errors import StorageError
from swiftkv_platform.serve import traffic as traffic_module
from swiftkv_platform.serve.access import Caller
from swiftkv_platform.serve.collector import CapturePlan, OutputCollector, RequestContext
from swiftkv_platform.serve.replica_state import ServedModelInfo
from swiftkv_platform.serve.traffic import MAX_PENDING_BYTES, TrafficRecorder
from swiftkv_platform.specs.deployment import ResolvedCapture
from swiftkv_platform.storage.object_store import LocalObjectStore
from swiftkv_platform.storage.traffic import TrafficReader

CARD = ServedModelInfo(deployment="dep_1", model="mdl_1", manifest_digest=None, swiftkv=None, max_model_len=64)
METRICS = RequestMetrics(0.0, 0.1, 0.1, 0.2)
TIMEOUT_S = 30.0


class Store(LocalObjectStore):
    """A directory that a test blocks or breaks."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.may_write = threading.Event()
        self.may_write.set()
        self.is_broken = self.loses_responses = False
        self.num_attempts = 0

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        self.num_attempts += 1
        assert self.may_write.wait(TIMEOUT_S)
        if self.is_broken:
            raise StorageError("the store is away")
        super().put_bytes(key, data, if_absent=if_absent)
        if self.loses_responses:
            raise StorageError("the response is lost")


class Clock:
    now = 1e9

    def __call__(self) -> float:
        return self.now


class Conversation:
    """A conversation that records which thread converts it."""

    def __init__(self, text: str = "hi") -> None:
        self.text = text
        self.thread: str | None = None

    @property
    def num_bytes(self) -> int:
        return len(self.text)

    def make_row_fields(self, output: RequestOutput) -> dict[str, Any]:
        self.thread = threading.current_thread().name
        answer = {"role": "assistant", "content": output.text}
        messages = [{"role": "user", "content": self.text}, answer]
        return {"messages": messages, "tools": None, "finish_reason": output.finish_reason}


class Stream:
    def __init__(self, *outputs: RequestOutput) -> None:
        self.newest_outputs = {output.index: output for output in outputs}

    def close(self) -> None:
        """Nothing runs."""


class Recording:
    """A recorder with its store, clock and counts."""

    def __init__(self, directory: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.store, self.clock = Store(directory), Clock()
        self.settings = ResolvedCapture(share=1.0, uri=str(directory))
        self.recorder = TrafficRecorder(self.count, open_store=lambda _: self.store, clock=self.clock)
        self._num_requests = 0

    def count(self, outcome: str, number: int) -> None:
        self.counts[outcome] += number

    def finish(
        self,
        text: str = "hello",
        *,
        conversation: Conversation | None = None,
        decode: Callable[[Sequence[int]], str] = str,
        prompts: Sequence[str | list[int]] = ("prompt",),
        outcome: str = "finished",
        token_ids: Sequence[int] = (1, 2),
    ) -> None:
        """Let a request end that was chosen to be captured."""
        self._num_requests += 1
        plan = CapturePlan(self.settings, "/generate", decode, conversation=conversation)
        outputs = [
            RequestOutput(f"r/{number}", [1, 2, 3], [*token_ids], text, "stop", METRICS)
            for number in range(len(prompts))
        ]
        collector = OutputCollector(
            f"gen_{self._num_requests}",
            prompts,
            len(prompts),
            RequestContext(Caller(), capture=plan),
            lambda _: None,
            lambda _: None,
            0,
            [Stream(output) for output in outputs],  # type: ignore[misc]
            1,
            None,
        )
        collector.outcome = outcome
        self.recorder.on_request_ended(collector, CARD)

    def read_rows(self) -> list[CapturedRequest]:
        return [*TrafficReader(self.store).iterate_rows()]

    def wait_until(self, is_reached: Callable[[], object]) -> None:
        until = time.monotonic() + TIMEOUT_S
        while not is_reached():
            assert time.monotonic() < until, self.counts
            time.sleep(0.005)


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recording]:
    monkeypatch.setattr(traffic_module, "_BATCH_INTERVAL_S", 0.01)
    monkeypatch.setattr(traffic_module, "WRITE_INTERVAL_S", 0.05)
    recording = Recording(tmp_path)
    yield recording
    recording.store.is_broken = recording.store.loses_responses = False
    recording.store.may_write.set()
    recording.recorder.close()


def test_rows_are_stored_within_the_interval_without_a_close(recording: Recording) -> None:
    recording.finish()
    recording.wait_until(lambda: recording.counts["stored"])
    [row] = recording.read_rows()
    assert (row.id, row.time, row.path, row.model) == ("1", 1e9, "/generate", "mdl_1")
    assert (row.prompt, row.completion, row.finish_reason) == ("prompt", "hello", "stop")
    assert (row.prompt_tokens, row.completion_tokens) == (3, 2)


def test_rows_of_an_interval_share_a_part(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "WRITE_INTERVAL_S", 3600.0)
    for _ in range(50):
        recording.finish()
    recording.recorder.close()
    assert len(recording.read_rows()) == 50
    assert recording.store.num_attempts == 1


def test_a_part_is_written_early_if_it_is_large(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "WRITE_INTERVAL_S", 3600.0)
    monkeypatch.setattr(traffic_module, "_PART_BYTES", 10_000)
    for _ in range(5):
        recording.finish("x" * 3000)
    recording.wait_until(lambda: recording.counts["stored"] >= 3)
    recording.recorder.close()
    assert len(recording.read_rows()) == 5
    assert recording.store.num_attempts >= 2


def test_the_rows_of_two_days_are_in_their_days(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "WRITE_INTERVAL_S", 3600.0)
    recording.clock.now = 86400.0 * 20_000 - 1
    recording.finish()
    recording.clock.now += 2
    recording.finish()
    recording.recorder.close()
    assert [day.day for day in TrafficReader(recording.store).list_days()] == ["2024-10-03", "2024-10-04"]


async def test_the_event_loop_converts_redacts_and_decodes_nothing(recording: Recording) -> None:
    hostile = "4" * 2_000_000 + "\n" + "a@" * 1_000_000
    conversation, decoded_by = Conversation(hostile), list[str]()

    def decode(token_ids: Sequence[int]) -> str:
        decoded_by.append(threading.current_thread().name)
        return "decoded"

    longest, started, done = 0.0, time.monotonic(), False
    recording.finish(conversation=conversation)
    recording.finish(decode=decode, prompts=[[1, 2, 3]])
    assert time.monotonic() - started < 0.1
    while not done:
        before = time.monotonic()
        await asyncio.sleep(0.001)
        longest = max(longest, time.monotonic() - before)
        done = recording.counts["stored"] == 2
        assert before < started + TIMEOUT_S
    assert (conversation.thread, decoded_by) == ("traffic", ["traffic"])
    assert longest < 1.0  # a piece at a time holds the interpreter
    assert [row.prompt for row in recording.read_rows()] == [None, "decoded"]


def test_requests_beyond_the_memory_limit_are_dropped_and_counted(recording: Recording) -> None:
    recording.store.may_write.clear()  # the store blocks
    size = MAX_PENDING_BYTES // 8
    for _ in range(20):
        recording.finish("x" * size)
    held = recording.recorder._queued_bytes + recording.recorder._encoded_bytes
    assert held <= MAX_PENDING_BYTES
    recording.wait_until(lambda: recording.store.num_attempts)
    for _ in range(20):
        recording.finish("x" * size)
    assert recording.counts["dropped"] >= 40 - 16
    recording.store.may_write.set()
    recording.recorder.close()
    assert recording.counts["stored"] + recording.counts["dropped"] == 40
    assert len(recording.read_rows()) == recording.counts["stored"] >= 7


def test_memory_is_free_again_after_a_write(recording: Recording) -> None:
    for number in range(1, 5):
        for _ in range(6):
            recording.finish("x" * (MAX_PENDING_BYTES // 8))
        recording.wait_until(lambda stored=6 * number: recording.counts["stored"] == stored)  # type: ignore[misc]
    assert recording.counts == {"stored": 24}


def test_a_row_beyond_the_length_limit_is_dropped(recording: Recording, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "MAX_ROW_BYTES", 1000)
    recording.finish("x" * 2000)
    recording.finish()
    recording.recorder.close()
    assert recording.counts == {"dropped": 1, "stored": 1}


def test_a_failed_write_is_repeated(recording: Recording) -> None:
    recording.store.is_broken = True
    recording.finish()
    recording.wait_until(lambda: recording.store.num_attempts >= 3)
    recording.store.is_broken = False
    recording.wait_until(lambda: recording.counts["stored"])
    assert len(recording.read_rows()) == 1
    assert recording.counts == {"stored": 1}


def test_a_write_that_seems_to_fail_stores_no_row_twice(recording: Recording) -> None:
    recording.store.loses_responses = True
    recording.finish()
    recording.wait_until(lambda: recording.store.num_attempts >= 2)
    recording.finish()
    recording.store.loses_responses = False
    recording.wait_until(lambda: recording.counts["stored"] == 2)
    assert sorted(row.id for row in recording.read_rows()) == ["1", "2"]
    assert recording.counts == {"stored": 2}


def test_rows_that_cannot_be_stored_in_time_have_failed(recording: Recording) -> None:
    recording.store.is_broken = True
    recording.finish()
    recording.wait_until(lambda: recording.store.num_attempts >= 1)
    recording.clock.now += MAX_WRITE_DELAY_S
    recording.wait_until(lambda: recording.counts["failed"])
    recording.store.is_broken = False
    recording.finish()
    recording.wait_until(lambda: recording.counts["stored"])
    assert [row.id for row in recording.read_rows()] == ["2"]


def test_what_a_broken_store_cannot_take_at_the_end_has_failed(recording: Recording) -> None:
    recording.store.is_broken = True
    recording.finish()
    recording.recorder.close()
    recording.finish()
    assert recording.counts == {"failed": 1, "dropped": 1}


def test_one_request_that_cannot_be_encoded_ends_no_other(recording: Recording) -> None:
    class Broken(Conversation):
        def make_row_fields(self, output: RequestOutput) -> dict[str, Any]:
            raise ValueError("secret text")

    recording.finish(conversation=Broken())
    recording.finish("\ud800")
    recording.finish()
    recording.recorder.close()
    assert recording.counts == {"failed": 2, "stored": 1}


@pytest.mark.parametrize("outcome", ["left", "timeout", "internal_error"])
def test_only_finished_requests_are_captured(recording: Recording, outcome: str) -> None:
    recording.finish(outcome=outcome)
    recording.finish(token_ids=())
    recording.recorder.close()
    assert recording.counts == {}


def test_each_prompt_is_a_row(recording: Recording) -> None:
    recording.finish(prompts=["a", [1, 2]], decode=lambda ids: f"decoded {[*ids]}")
    recording.recorder.close()
    assert [(row.id, row.prompt) for row in recording.read_rows()] == [("1/0", "a"), ("1/1", "decoded [1, 2]")]
