"""Outages of W&B, played by a local server that hangs, refuses, fails and comes back: callers do not wait, the run goes
on under its id, and records can be uploaded later."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from swiftkv_platform.settings import Settings
from swiftkv_platform.specs import WandbSpec
from swiftkv_platform.tracking.recorded import RecordedRun, drop_steps, fetch_last_step, upload_run
from swiftkv_platform.tracking.tracker import BackgroundTracker, TrackingInfo, WandbTracker
from tests.support.requirements import required_module
from tests.support.wandb_server import WandbServer, wandb_server
from tests.unit.control_plane.routes.conftest import SPEC, make_parts, served_control_plane

required_module("wandb")

pytestmark = [pytest.mark.soak("outages of minutes; each run starts wandb's process"), pytest.mark.timeout(900)]

PROGRAM = """
import json, sys
from pathlib import Path
from swiftkv_platform.specs import WandbSpec
from swiftkv_platform.tracking.tracker import BackgroundTracker
from swiftkv_platform.tracking.tracker import WandbTracker

directory, run_id, first, after, timeout_s, pauses = Path(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:])
inner = WandbTracker(WandbSpec(), directory, name="n", timeout_s=timeout_s)
tracker = BackgroundTracker(inner, finish_timeout_s=600.0)
tracker.start(run_id, {})
for step in range(first, after):
    tracker.log({"loss": 1.0}, step)
print("logged", tracker.info is None, flush=True)
if pauses:
    sys.stdin.readline()
tracker.finish()
info = tracker.info
print(json.dumps([info and info.mode, tracker.uploaded, str(tracker.files)]), flush=True)
"""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[WandbServer]:
    for name in ("WANDB_MODE", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.delenv(name, raising=False)
    with wandb_server() as server:
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef" * 3)
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        yield server


class Attempt:
    """A process that records steps of the run `job-1`."""

    def __init__(self, directory: Path, first: int, after: int, *, timeout_s: int = 60, pauses: bool = False) -> None:
        arguments = [str(directory), "job-1", str(first), str(after), str(timeout_s), str(int(pauses))]
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def until_logged(self) -> bool:
        """Wait until every step is handed over; return whether W&B's run had not begun by then."""
        assert self._process.stdout is not None
        word, waiting = self._process.stdout.readline().split()
        assert word == "logged"
        return waiting == "True"

    def end(self) -> tuple[str, bool, Path]:
        """End the process; return the mode of the run, whether it is uploaded, and its directory."""
        said, _ = self._process.communicate("\n")
        mode, uploaded, files = json.loads(said.splitlines()[-1])
        return mode, uploaded, Path(files)


def test_a_server_that_comes_back_has_all_steps_and_the_next_attempt_goes_on(
    server: WandbServer, tmp_path: Path
) -> None:
    attempt = Attempt(tmp_path, 0, 5, pauses=True)
    attempt.until_logged()
    _wait_for(lambda: "job-1" in server.runs)
    server.outage = "fails"
    _wait_for(lambda: server.refused > 0)
    server.outage = None
    assert attempt.end()[:2] == ("online", True)
    assert server.runs["job-1"].steps == list(range(5))
    assert Attempt(tmp_path, 3, 9).end()[:2] == ("online", True)
    assert server.runs.keys() == {"job-1"}
    assert (server.runs["job-1"].steps, server.runs["job-1"].starts) == (list(range(9)), 2)


def test_a_key_that_wandb_login_has_stored_is_enough(
    server: WandbServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home").mkdir()
    entry = f"machine {urlsplit(server.url).netloc} login user password {os.environ['WANDB_API_KEY']}"
    (tmp_path / "home" / ".netrc").write_text(entry)
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name)
    assert Attempt(tmp_path, 0, 5).end()[:2] == ("online", True)
    assert fetch_last_step("swiftkv", None, "job-1") == 4


def test_what_a_server_missed_at_the_end_and_what_was_offline_become_one_run(
    server: WandbServer, tmp_path: Path
) -> None:
    first = Attempt(tmp_path, 0, 50, timeout_s=30, pauses=True)
    first.until_logged()
    _wait_for(lambda: "job-1" in server.runs)
    server.outage = "fails"
    mode, uploaded, begun = first.end()
    assert (mode, uploaded) == ("online", False)
    mode, uploaded, resumed = Attempt(tmp_path, 30, 70, timeout_s=4).end()
    assert (mode, uploaded) == ("offline", False)

    server.outage = None
    for _ in range(2):  # the second time changes nothing
        last = fetch_last_step("swiftkv", None, "job-1")
        for path in (begun, resumed):
            last = drop_steps(RecordedRun(path), last)
            upload_run(RecordedRun(path))
        assert last == 69
        assert server.runs["job-1"].steps == list(range(70))


def test_a_record_that_is_cut_off_ends_what_is_uploaded(server: WandbServer, tmp_path: Path) -> None:
    server.outage = "refuses"
    *_, files = Attempt(tmp_path, 0, 3000, timeout_s=2).end()
    file = RecordedRun(files).record_file
    file.write_bytes(file.read_bytes()[: 5 * 32768 + 3])
    last = drop_steps(RecordedRun(files), 99)
    assert 99 < last < 2999
    server.outage = None
    upload_run(RecordedRun(files))
    assert server.runs["job-1"].steps == list(range(100, last + 1))


def test_the_command_uploads_what_a_job_has_left(server: WandbServer, tmp_path: Path, empty_database: Path) -> None:
    server.outage = "refuses"
    attempt = Attempt(tmp_path / "run", 0, 5, timeout_s=2)
    assert attempt.until_logged(), "steps must be taken before W&B answers"
    mode, uploaded, files = attempt.end()
    assert (mode, uploaded, server.runs) == ("offline", False, {})
    server.outage = None
    parts = make_parts(tmp_path, empty_database)
    settings = Settings(home=tmp_path, _env_file=None)
    with served_control_plane(parts, settings) as url:
        job_id = httpx.post(f"{url}/jobs", json=SPEC, timeout=60.0, trust_env=False).json()["id"]
        for path in files.rglob("*"):
            if path.is_file():
                key = f"jobs/{job_id}/attempts/1/tracking/{files.name}/{path.relative_to(files).as_posix()}"
                parts.objects.upload_file(path, key)
        # In another process, since this one's output has the control plane's log.
        command = [sys.executable, "-m", "swiftkv_platform.cli", "jobs", "wandb-sync", job_id, "--json"]
        result = subprocess.run(command, env={**os.environ, "SWIFTKV_URL": url}, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["pages"] == {"job-1": f"{server.url}/team/swiftkv/runs/job-1"}
    assert server.runs["job-1"].steps == list(range(5))


class Stuck(WandbTracker):
    """A tracker whose `start` does not return until `may` is set."""

    def __init__(self) -> None:
        super().__init__(WandbSpec(), Path(), name="n")
        self.may = threading.Event()
        self.logged: list[int] = []

    def start(self, run_id: str, config: Any) -> None:
        self.may.wait()
        self.info = TrackingInfo(provider="wandb", run_id=run_id, mode="online", url="u")

    def log(self, metrics: Any, step: int) -> None:
        self.logged.append(step)


def test_the_queue_is_bounded_and_the_end_does_not_wait_for_ever() -> None:
    stuck = Stuck()
    told: list[TrackingInfo] = []

    def tell(info: TrackingInfo) -> bool:
        told.append(info)
        return True

    tracker = BackgroundTracker(stuck, on_info=tell, max_queued_calls=3, finish_timeout_s=0.2)
    tracker.start("r", {})
    _wait_for(tracker._calls.empty)
    for step in range(100):
        tracker.log({}, step)
    tracker.finish()
    stuck.may.set()
    _wait_for(lambda: stuck.logged == [0, 1, 2])
    assert told == [replace(told[0], run_id="r")]


def _wait_for(condition: Any) -> None:
    event = threading.Event()
    for _ in range(1200):
        if condition():
            return
        event.wait(0.05)
    raise AssertionError("waited for a minute")


def test_no_key_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    with pytest.raises(Exception, match="WANDB_API_KEY is not set"):
        fetch_last_step("p", None, "r")
    assert "WANDB_API_KEY" not in os.environ
