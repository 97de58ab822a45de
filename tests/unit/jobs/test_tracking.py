"""The tracked run of an attempt: its offline files reach the store, whatever becomes of the disk."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from swiftkv_platform.storage.addresses import open_store
from tests.requirements import required_module

required_module("wandb")

PROGRAM = """
import shutil, sys
from pathlib import Path
from swiftkv_platform.jobs.attempt.tracking import TrackedRun
from swiftkv_platform.contract.attempts import AttemptRequest, Manifest
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.addresses import open_store

store = open_store(sys.argv[1])
spec = JobSpec.model_validate({"name": "n", "tracking": {"wandb": {"mode": "offline"}}})
run = TrackedRun(store, AttemptRequest(job_id="job", attempt=3, spec=spec, run_id="run-1"))
run.log({"loss": 1.0}, 1)
run.save()
quality = {"perplexity": 2.0, "kl": 0.1, "top1_agreement": 0.9}
bins = [{"low": i / 2, "high": i / 2 + 0.5, "share": 0.5, "agreement": 0.5} for i in range(2)]
report = {"teacher": {"perplexity": 1.9}, "rewired": None, "calibrated": None, "distilled": quality, "tasks": [],
          "exit_head": bins}
run.log_report(report, 1)
run.log_artifact(Manifest(kind="artifact", files={}, created_at=0.0))
run.close()
assert run.info is not None, "nothing failed"
"""


def test_offline_files_are_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SWIFTKV_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    store = open_store(str(tmp_path / "store"))
    (tmp_path / "store" / "jobs" / "job" / "attempts" / "3" / "artifact").mkdir(parents=True)

    done = subprocess.run([sys.executable, "-c", PROGRAM, store.uri], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    keys = [
        info.key.removeprefix("jobs/job/attempts/3/tracking/") for info in store.list("jobs/job/attempts/3/tracking")
    ]
    names = {key.partition("/")[2] for key in keys}
    assert {key.partition("/")[0][:12] for key in keys} == {"offline-run-"}
    assert "run-run-1.wandb" in names
    assert any(name.startswith("files/media/table/quality") for name in names)
    assert any(name.startswith("files/media/images/exit_head") for name in names)
    (local,) = (tmp_path / "home" / "tracking" / "job" / "wandb").glob("offline-run-*/run-run-1.wandb")
    (stored,) = (info.key for info in store.list("jobs/job/attempts/3/tracking") if info.key.endswith(".wandb"))
    assert store.get_bytes(stored) == local.read_bytes(), "the newest state of the file"
