"""Logs of any length: read in pieces, kept within a bound, and followed by reading what is new."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from swiftkv_platform.api.app import create_app
from swiftkv_platform.cluster.ray_jobs import RayJobs
from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.orchestration.job import Job, JobStatus
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.local_store import LocalObjectStore
from tests.fakes.ray_logs import FakeRayLogs, RayLog
from tests.servers import serving
from tests.unit.api.conftest import Server, control_plane, make_parts

MIB = 1 << 20
LONG_MIB = 2048 if "SWIFTKV_SOAK" in os.environ else 200
"""Length of a log that must not be held in memory."""
PATIENCE_S = 30.0
LINE = b"step 00000000 loss 1.2345 and so on, sixty-four bytes in a line\n"

SAVE = """
import json, sys
from pathlib import Path
from swiftkv_platform.api.app import create_app
from swiftkv_platform.cluster.ray_jobs import RayJobs
from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.local_store import LocalObjectStore

def peak():
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024

cluster, attempts = RayJobs(sys.argv[1]), AttemptStore(LocalObjectStore(Path(sys.argv[2])))
attempts.save_logs(AttemptId("job_1", 1), cluster.logs("job_1-small"))
before = peak()
attempts.save_logs(AttemptId("job_1", 2), cluster.logs("job_1-large"))
print(json.dumps(peak() - before))
"""


@pytest.fixture
def ray() -> Iterator[FakeRayLogs]:
    with FakeRayLogs().serving() as ray:
        yield ray


def kept(directory: Path, attempt: int = 1) -> bytes:
    return (directory / f"jobs/job_1/attempts/{attempt}/logs.txt").read_bytes()


def test_the_log_of_an_attempt_that_has_ended_passes_through_in_pieces(ray: FakeRayLogs, tmp_path: Path) -> None:
    """`LONG_MIB` pass in a process of its own: its peak may grow by what is kept, not by the log."""
    ray.logs["job_1-small"] = RayLog(LINE, ended=True)
    ray.logs["job_1-large"] = large = RayLog(LINE * (MIB // len(LINE)), repeats=LONG_MIB, ended=True)
    command = [sys.executable, "-c", SAVE, ray.url, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=270, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 48 * MIB
    assert kept(tmp_path) == LINE
    log = kept(tmp_path, 2)
    assert len(log) <= 16 * MIB
    assert log.startswith(LINE)
    assert log.endswith(LINE)
    [notice] = [line for line in log.splitlines() if b"left out" in line]
    left_out = next(int(word) for word in notice.split() if word.isdigit())
    assert left_out == large.size - (len(log) - len(notice) - 1), "head, tail and what is left out are the whole"


KEEP = """
import sys
from pathlib import Path
from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.local_store import LocalObjectStore

def peak():  # that of `getrusage` is the parent's, where that was greater
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1])

attempts = AttemptStore(LocalObjectStore(Path(sys.argv[1])), max_log_bytes=128 << 20)
before = peak()
attempts.save_logs(AttemptId("job_1", 1), (b"line %06d " % number * 1024 * 86 + b"\\n" for number in range(300)))
print(peak() - before)
"""
FULL = """
import resource, sys
from pathlib import Path
from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.errors import StorageError
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.local_store import LocalObjectStore

resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
attempts = AttemptStore(LocalObjectStore(Path(sys.argv[1])))
try:
    attempts.save_logs(AttemptId("job_1", 1), iter([b"a" * 65536] * 100))
except StorageError as error:
    print(error.message)
"""


def test_what_is_kept_of_a_log_is_not_held_in_memory(tmp_path: Path) -> None:
    """128 of 290 MiB are kept: half of them are the end, which is not known before the log's end."""
    done = subprocess.run(
        [sys.executable, "-c", KEEP, tmp_path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 32 * 1024, "KiB"
    assert 120 * MIB < len(kept(tmp_path)) <= 128 * MIB
    assert kept(tmp_path).startswith(b"line 000000 ")
    assert kept(tmp_path).endswith(b"line 000299 \n")


def test_a_full_disk_is_a_store_that_fails(tmp_path: Path) -> None:
    """The job then waits for it, as for any store; another error would give the job up after a few tries."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, tmp_path], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "cannot keep the log jobs/job_1/attempts/1/logs.txt" in done.stdout
    assert not (tmp_path / "jobs/job_1/attempts/1/logs.txt").exists()


@dataclass
class House(Server):
    """A control plane whose Ray keeps real logs, behind a real HTTP server."""

    ray: FakeRayLogs = field(kw_only=True)
    url: str = field(kw_only=True)

    def running(self, text: bytes = b"") -> tuple[Job, RayLog]:
        """A job on the cluster, and what its driver prints."""
        job_id = self.submit()["id"]
        self.tick()
        log = self.ray.logs[f"{job_id}-1"] = RayLog(text)
        job = self.parts.jobs.get(job_id, tenant="default")
        assert job.status is JobStatus.STARTING
        return job, log

    def end(self, job: Job) -> None:
        """The driver ends, its log is saved, and the job is cancelled."""
        name = f"{job.id}-1"
        self.cluster.stop(name)
        self.ray.logs[name].ended = True
        self.cluster.submissions[name].log = b"".join(RayJobs(self.ray.url).logs(name)).decode()
        self.client.post(f"/jobs/{job.id}/cancel")
        self.tick()

    def read(self, job: Job, **params: Any) -> bytes:
        answer = httpx.get(f"{self.url}/jobs/{job.id}/logs", params=params, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return answer.content

    @contextmanager
    def following(self, job: Job, **params: Any) -> Iterator[bytearray]:
        """Yield what a follower has been sent so far; at the end the stream has ended by itself."""
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
    """Submissions that a test commands, and the logs of a dashboard."""

    def __init__(self, commanded: Any, real: RayJobs) -> None:
        self._commanded, self._real = commanded, real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real if name in ("logs", "follow_logs") else self._commanded, name)


@pytest.fixture
def house(ray: FakeRayLogs, tmp_path: Path, empty_database: Path) -> Iterator[House]:
    parts = make_parts(tmp_path, empty_database)
    settings = Settings(home=tmp_path, reconcile_interval_s=1e6, _env_file=None)
    seen_by_api = replace(parts, cluster=RayWithRealLogs(parts.cluster, RayJobs(ray.url)))  # type: ignore[arg-type]
    with control_plane(parts, settings) as client, serving(create_app(settings, components=seen_by_api)) as url:
        yield House(client, parts, settings, ray=ray, url=url)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.01)


def test_followers_are_sent_what_is_new(house: House) -> None:
    job, log = house.running(LINE * 10_000)
    with house.following(job) as received:
        for _ in range(8):
            until(lambda: len(received) == log.size)
            log.text += LINE * 100
        until(lambda: len(received) == log.size)
        house.end(job)
    assert bytes(received) == log.text
    assert log.sent < 3 * log.size, "once for the follower, once for the store; not the whole for every look"


def test_a_log_that_is_out_is_not_read_again(house: House) -> None:
    """Until the job is settled, which may take long while the store is away, a follower waits for its end alone."""
    job, log = house.running(LINE)
    with house.following(job) as received:
        until(lambda: len(received) == log.size)
        house.cluster.stop(f"{job.id}-1")
        log.ended = True
        until(lambda: log.following == 0)
        looked = len(log.requests)
        time.sleep(2.0)
        assert len(log.requests) == looked
        house.end(job)


def test_a_follower_sees_every_byte_once_over_a_restart_of_ray(house: House) -> None:
    job, log = house.running("ä line that is long, ünd another\n".encode() * 1000)
    with house.following(job) as received:
        until(lambda: len(received) == log.size)
        house.ray.logs[f"{job.id}-1"] = moved = RayLog(log.text + b"more\n")
        log.ended = True  # the old connection ends
        until(lambda: bytes(received).endswith(b"more\n"))
        house.end(job)
    assert bytes(received) == moved.text


def test_followers_are_bounded(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftkv_platform.api.job_logs.MOST_FOLLOWERS", 3)
    job, log = house.running(LINE)
    for _ in range(2):  # those that leave make room
        streams = [httpx.Client(timeout=PATIENCE_S) for _ in range(4)]
        address = f"{house.url}/jobs/{job.id}/logs?follow=true"
        answers = [stream.send(stream.build_request("GET", address), stream=True) for stream in streams]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        for answer, stream in zip(answers, streams, strict=True):
            answer.close()
            stream.close()
        until(lambda: log.following == 0)
    house.end(job)


def test_a_range_of_a_log_is_read_alone(house: House) -> None:
    lines = [b"line %06d\n" % number for number in range(100_000)]
    job, log = house.running(b"".join(lines))
    whole = b"".join(lines)
    for ended in (False, True):
        if ended:
            house.end(job)
        assert house.read(job) == whole
        assert house.read(job, offset=300_007, limit=1000) == whole[300_007:301_007]
        assert house.read(job, offset=len(whole)) == b""
        assert house.read(job, offset=len(whole) - 5) == whole[-5:]
        before = log.sent
        assert house.read(job, tail_lines=3) == b"".join(lines[-3:])
        assert log.sent - before < 1000
        assert house.read(job, tail_lines=10_000) == b"".join(lines[-10_000:])
    refused = httpx.get(f"{house.url}/jobs/{job.id}/logs", params={"tail_lines": 3, "follow": "true"})
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "tail_lines")
    for params in ({"tail_lines": 0}, {"tail_lines": 10**30}, {"offset": -1}, {"offset": 10**30}, {"limit": 0}):
        assert httpx.get(f"{house.url}/jobs/{job.id}/logs", params=params).status_code == 422, params


def test_a_range_of_what_is_kept_is_all_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store's own reads, counted: the end of a log costs a block or two."""
    store = LocalObjectStore(tmp_path)
    attempts = AttemptStore(store)
    attempts.save_logs(AttemptId("job_1", 1), iter([LINE * 1000] * 100))
    read, stream = 0, store.stream

    def counted(*arguments: Any, **named: Any) -> Iterator[bytes]:
        nonlocal read
        for piece in stream(*arguments, **named):
            read += len(piece)
            yield piece

    monkeypatch.setattr(store, "stream", counted)
    saved = attempts.saved_logs(AttemptId("job_1", 1))
    assert saved is not None
    assert b"".join(saved.tail(5)) == LINE * 5
    assert read < 256 * 1024


def test_a_follower_of_a_long_log_is_told_what_was_left_out(tmp_path: Path) -> None:
    """From where it was, in the log as it was printed, to the end of what was kept."""
    attempts = AttemptStore(LocalObjectStore(tmp_path), max_log_bytes=64 * 1024)
    lines = [b"line %06d\n" % number for number in range(100_000)]
    whole = b"".join(lines)
    attempts.save_logs(AttemptId("job_1", 1), iter(lines))
    saved = attempts.saved_logs(AttemptId("job_1", 1))
    assert saved is not None
    text = b"".join(saved.stream(0))
    assert len(text) <= 64 * 1024
    assert json.loads((tmp_path / "jobs/job_1/attempts/1/logs.json").read_text())["size"] == len(whole)
    for sent in (0, 1000, len(whole) // 2, len(whole) - 1000, len(whole)):
        rest = b"".join(saved.rest(sent))
        assert (b"left out" in rest) == (sent < len(whole) - 1000)
        assert whole.endswith(rest[-1000:])
        assert len(rest) <= len(text)
    assert b"".join(saved.rest(len(whole) - 1000)) == whole[-1000:]
    assert b"".join(saved.rest(1000)) == text[1000:]


def test_a_log_that_ray_cannot_read_holds_no_attempt(ray: FakeRayLogs, tmp_path: Path) -> None:
    attempts, cluster = AttemptStore(LocalObjectStore(tmp_path)), RayJobs(ray.url)
    ray.logs["job_1-1"] = RayLog(LINE, broken=True)
    attempts.save_logs(AttemptId("job_1", 1), cluster.logs("job_1-1"))
    assert kept(tmp_path).startswith(b"Ray cannot read the log of job_1-1: ")
    ray.logs["job_1-1"] = RayLog(LINE * 10_000, cut_after=100_000)
    attempts.save_logs(AttemptId("job_1", 1), cluster.logs("job_1-1"))
    assert kept(tmp_path).startswith((LINE * 10_000)[:60_000])
    assert b"Ray broke off" in kept(tmp_path)[-200:]
    ray.logs["job_1-1"] = RayLog(LINE, starting=True)
    assert b"".join(cluster.logs("job_1-1")) == b""
    assert b"".join(cluster.logs("unknown")) == b""


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_a_credential_is_found_wherever_the_pieces_end(
    ray: FakeRayLogs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hush-hush-hush")
    monkeypatch.setenv("SIGNING_KEY", "-----BEGIN-----\nline-of-a-key-1\nline-of-a-key-2\n-----END-----")
    text = b"a hush-hush-hushed word, hush-hush-hush\rhush-hush-hus\r\nline-of-a-key-2\nl\xc3\xa4ine \xff hush-hush"
    monkeypatch.setattr("tests.fakes.ray_logs.BLOCK", size)
    ray.logs["job_1-1"] = RayLog(text, ended=True)
    found = b"".join(RayJobs(ray.url).logs("job_1-1")).decode()
    assert found == "a [redacted]ed word, [redacted]\nhush-hush-hus\n[redacted]\nl\xe4ine \ufffd hush-hush"
