"""Logs of any length: read in pieces, stored up to a bound, and followed without reading them again."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.control_plane.jobs.job import Job, JobStatus
from swiftkv_platform.control_plane.ray import RayJobs
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import LocalObjectStore
from tests.support.fakes.ray_logs import FakeRayLogs, RayLog
from tests.support.servers import serving
from tests.support.waiting import eventually
from tests.unit.control_plane.routes.conftest import Server, Start, refusal

MIB = 1 << 20

LONG_MIB = 2048 if "SWIFTKV_SOAK" in os.environ else 100
"""Length in MiB of a log that must not be held in memory."""

PATIENCE_S = 30.0

LINE = b"step 00000000 loss 1.2345 and so on, sixty-four bytes in a line\n"


@pytest.fixture
def ray() -> Iterator[FakeRayLogs]:
    with FakeRayLogs().serving() as ray:
        yield ray


def kept(directory: Path, attempt: int = 1) -> bytes:
    return (directory / f"jobs/job_1/attempts/{attempt}/logs.txt").read_bytes()


@dataclass
class House(Server):
    """A control plane whose Ray serves real logs over HTTP."""

    ray: FakeRayLogs = field(kw_only=True)
    url: str = field(kw_only=True)

    def running(self, text: bytes = b"") -> tuple[Job, RayLog]:
        """Start a job; return it and the log of its driver."""
        job_id = self.submit()["id"]
        self.tick()
        log = self.ray.logs[f"{job_id}-1"] = RayLog(text)
        job = self.parts.jobs.get(job_id, tenant="default")
        assert job.status is JobStatus.STARTING
        return job, log

    def end(self, job: Job) -> None:
        """End the driver, whose log is saved, and cancel the job."""
        name = f"{job.id}-1"
        self.cluster.stop(name)
        self.ray.logs[name].ended = True
        self.cluster.submissions[name].log = b"".join(RayJobs(self.ray.url).read_logs(name)).decode()
        self.client.post(f"/jobs/{job.id}/cancel")
        self.tick()

    def read(self, job: Job, **params: Any) -> bytes:
        answer = httpx.get(f"{self.url}/jobs/{job.id}/logs", params=params, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.content

    @contextmanager
    def following(self, job: Job, **params: Any) -> Iterator[bytearray]:
        """Yield what a follower has been sent so far; at the end, check that the stream has ended by itself."""
        received, address = bytearray(), f"{self.url}/jobs/{job.id}/logs"

        def follow() -> None:
            with httpx.stream("GET", address, params={"follow": "true", **params}, timeout=PATIENCE_S) as stream:
                for piece in stream.iter_bytes():
                    received.extend(piece)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        yield received
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


class RayWithRealLogs:
    """A cluster whose submissions a test commands and whose logs come from a real dashboard client."""

    def __init__(self, commanded: Any, real: RayJobs) -> None:
        self._commanded, self._real = commanded, real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real if name in ("read_logs", "follow_logs") else self._commanded, name)


@pytest.fixture
def house(ray: FakeRayLogs, start: Start, monkeypatch: pytest.MonkeyPatch) -> Iterator[House]:
    monkeypatch.setattr("swiftkv_platform.control_plane.jobs.logs._LOG_POLL_INTERVAL_S", 0.05)
    commanded = start(reconcile_interval_s=1e6, max_followed_logs_of_key=3)
    real = RayWithRealLogs(commanded.cluster, RayJobs(ray.url))
    seen_by_api = replace(commanded.parts, cluster=real)  # type: ignore[arg-type]
    with serving(create_app(commanded.settings, components=seen_by_api)) as url:
        yield House(commanded.client, commanded.parts, commanded.settings, ray=ray, url=url)


def test_followers_are_sent_what_is_new(house: House) -> None:
    job, log = house.running(LINE * 10_000)
    with house.following(job) as received:
        for _ in range(8):
            eventually(lambda: len(received) == log.size, "the whole log is sent")
            log.text += LINE * 100
        eventually(lambda: len(received) == log.size, "the whole log is sent")
        house.end(job)
    assert bytes(received) == log.text
    assert log.sent < 3 * log.size, "sent once to the follower and once to the store, not again for every look"


def test_a_log_that_is_out_is_not_read_again(house: House) -> None:
    """Once the log has ended, a follower only waits for the job to be settled, which may take long."""
    job, log = house.running(LINE)
    with house.following(job) as received:
        eventually(lambda: len(received) == log.size, "the whole log is sent")
        house.cluster.stop(f"{job.id}-1")
        log.ended = True
        eventually(lambda: log.following == 0, "nobody follows the log")
        looked = len(log.requests)
        time.sleep(0.5)
        assert len(log.requests) == looked
        house.end(job)


def test_a_follower_sees_every_byte_once_over_a_restart_of_ray(house: House) -> None:
    job, log = house.running("ä line that is long, ünd another\n".encode() * 1000)
    with house.following(job) as received:
        eventually(lambda: len(received) == log.size, "the whole log is sent")
        house.ray.logs[f"{job.id}-1"] = moved = RayLog(log.text + b"more\n")
        log.ended = True  # ends the old connection
        eventually(lambda: bytes(received).endswith(b"more\n"), "the rest is sent")
        house.end(job)
    assert bytes(received) == moved.text


def test_followers_are_bounded(house: House) -> None:
    job, log = house.running(LINE)
    for _ in range(2):  # those that leave make room
        streams = [httpx.Client(timeout=PATIENCE_S) for _ in range(4)]
        address = f"{house.url}/jobs/{job.id}/logs?follow=true"
        answers = [stream.send(stream.build_request("GET", address), stream=True) for stream in streams]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        for answer, stream in zip(answers, streams, strict=True):
            answer.close()
            stream.close()
        eventually(lambda: log.following == 0, "nobody follows the log")
    house.end(job)


IN_A_PROCESS = """
import json, resource, sys
from pathlib import Path
from swiftkv_platform.control_plane.app import create_app
from swiftkv_platform.control_plane.ray import RayJobs
from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.errors import StorageError
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import LocalObjectStore

def peak():  # that of `getrusage` is the parent's, where that was greater
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

cluster, store = RayJobs(sys.argv[1]), LocalObjectStore(Path(sys.argv[2]))
attempts = AttemptStore(store)
attempts.save_logs(AttemptId("job_1", 1), cluster.read_logs("job_1-small"))
grown = [peak()]
attempts.save_logs(AttemptId("job_1", 2), cluster.read_logs("job_1-large"))
grown.append(peak())
lines = (b"line %06d " % number * 1024 * 86 + b"\\n" for number in range(300))
AttemptStore(store, max_log_bytes=128 << 20).save_logs(AttemptId("job_1", 3), lines)
grown.append(peak())
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    attempts.save_logs(AttemptId("job_1", 4), iter([b"a" * 65536] * 100))
except StorageError as error:
    print(json.dumps([*grown, error.message]))
"""


def test_logs_are_kept_without_being_held_in_memory(ray: FakeRayLogs, tmp_path: Path) -> None:
    """The peak memory of another process grows neither by the log that passes through nor by what is kept of it.

    Of a log of `LONG_MIB`, 16 MiB are kept; of one of 290 MiB, 128 MiB, half of them its end, which is known only once
    the log ends. A full disk is a `StorageError`, for which the job waits; other errors would give the job up.
    """
    ray.logs["job_1-small"] = RayLog(LINE, ended=True)
    ray.logs["job_1-large"] = large = RayLog(LINE * (MIB // len(LINE)), repeats=LONG_MIB, ended=True)
    command = [sys.executable, "-c", IN_A_PROCESS, ray.url, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=270, check=False)
    assert done.returncode == 0, done.stderr
    before, passed, held, full = json.loads(done.stdout)
    assert (passed - before < 48 * MIB, held - passed < 32 * MIB) == (True, True), done.stdout
    assert kept(tmp_path) == LINE
    log = kept(tmp_path, 2)
    assert len(log) <= 16 * MIB
    assert (log.startswith(LINE), log.endswith(LINE)) == (True, True)
    [notice] = [line for line in log.splitlines() if b"left out" in line]
    left_out = next(int(word) for word in notice.split() if word.isdigit())
    assert left_out == large.size - (len(log) - len(notice) - 1), "head, tail and the part left out are the whole log"
    log = kept(tmp_path, 3)
    assert 120 * MIB < len(log) <= 128 * MIB
    assert (log.startswith(b"line 000000 "), log.endswith(b"line 000299 \n")) == (True, True)
    assert "cannot save the log jobs/job_1/attempts/4/logs.txt" in full
    assert not (tmp_path / "jobs/job_1/attempts/4/logs.txt").exists()


def test_a_range_of_a_log_is_read_alone(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the end of a log reads a block or two, from Ray or from the store."""
    lines = [b"line %06d\n" % number for number in range(100_000)]
    job, log = house.running(b"".join(lines))
    whole, read, stream = b"".join(lines), [0], house.parts.objects.stream

    def counted(*arguments: Any, **named: Any) -> Iterator[bytes]:
        for piece in stream(*arguments, **named):
            read[0] += len(piece)
            yield piece

    monkeypatch.setattr(house.parts.objects, "stream", counted)
    for ended in (False, True):
        if ended:
            house.end(job)
        assert house.read(job) == whole
        assert house.read(job, offset=300_007, limit=1000) == whole[300_007:301_007]
        assert house.read(job, offset=len(whole)) == b""
        assert house.read(job, offset=len(whole) - 5) == whole[-5:]
        before, read[0] = log.sent, 0
        assert house.read(job, tail_lines=3) == b"".join(lines[-3:])
        assert (log.sent - before < 1000, read[0] < 256 * 1024) == (True, True)
        assert house.read(job, tail_lines=10_000) == b"".join(lines[-10_000:])
    logs = f"{house.url}/jobs/{job.id}/logs"
    assert refusal(httpx.get(logs, params={"tail_lines": 3, "follow": "true"}))["field"] == "tail_lines"
    for params in ({"tail_lines": 0}, {"tail_lines": 10**30}, {"offset": -1}, {"offset": 10**30}, {"limit": 0}):
        assert httpx.get(logs, params=params).status_code == 422, params


def test_a_follower_of_a_long_log_is_told_what_was_left_out(tmp_path: Path) -> None:
    """The follower goes on from its offset in the printed log to the end of what is kept."""
    attempts = AttemptStore(LocalObjectStore(tmp_path), max_log_bytes=64 * 1024)
    lines = [b"line %06d\n" % number for number in range(100_000)]
    whole = b"".join(lines)
    attempts.save_logs(AttemptId("job_1", 1), iter(lines))
    saved = attempts.open_saved_logs(AttemptId("job_1", 1))
    assert saved is not None
    text = b"".join(saved.stream(0))
    assert len(text) <= 64 * 1024
    assert json.loads((tmp_path / "jobs/job_1/attempts/1/logs.json").read_text())["size"] == len(whole)
    for sent in (0, 1000, len(whole) // 2, len(whole) - 1000, len(whole)):
        rest = b"".join(saved.stream_after(sent))
        assert (b"left out" in rest) == (sent < len(whole) - 1000)
        assert whole.endswith(rest[-1000:])
        assert len(rest) <= len(text)
    assert b"".join(saved.stream_after(len(whole) - 1000)) == whole[-1000:]
    assert b"".join(saved.stream_after(1000)) == text[1000:]


def test_a_log_that_ray_cannot_read_holds_no_attempt(ray: FakeRayLogs, tmp_path: Path) -> None:
    attempts, cluster = AttemptStore(LocalObjectStore(tmp_path)), RayJobs(ray.url)
    ray.logs["job_1-1"] = RayLog(LINE, broken=True)
    attempts.save_logs(AttemptId("job_1", 1), cluster.read_logs("job_1-1"))
    assert kept(tmp_path).startswith(b"Ray cannot read the log of job_1-1: ")
    ray.logs["job_1-1"] = RayLog(LINE * 10_000, cut_after=100_000)
    attempts.save_logs(AttemptId("job_1", 1), cluster.read_logs("job_1-1"))
    assert kept(tmp_path).startswith((LINE * 10_000)[:60_000])
    assert b"Ray ended the stream" in kept(tmp_path)[-200:]
    ray.logs["job_1-1"] = RayLog(LINE, starting=True)
    assert b"".join(cluster.read_logs("job_1-1")) == b""
    assert b"".join(cluster.read_logs("unknown")) == b""


@pytest.mark.parametrize("size", [1, 7, 64])
def test_a_credential_is_found_wherever_the_pieces_end(
    ray: FakeRayLogs, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hush-hush-hush")
    monkeypatch.setenv("SIGNING_KEY", "-----BEGIN-----\nline-of-a-key-1\nline-of-a-key-2\n-----END-----")
    text = b"a hush-hush-hushed word, hush-hush-hush\rhush-hush-hus\r\nline-of-a-key-2\nl\xc3\xa4ine \xff hush-hush"
    monkeypatch.setattr("tests.support.fakes.ray_logs.BLOCK", size)
    ray.logs["job_1-1"] = RayLog(text, ended=True)
    found = b"".join(RayJobs(ray.url).read_logs("job_1-1")).decode()
    assert found == "a [redacted]ed word, [redacted]\nhush-hush-hus\n[redacted]\nl\xe4ine \ufffd hush-hush"
