"""The real W&B client, offline: what was logged is read back from the file that `wandb sync` would upload."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import structlog
from PIL import Image

from swiftkv_platform.specs import WandbSpec
from swiftkv_platform.specs.job import WandbMode, restrict_wandb_mode
from swiftkv_platform.tracking.recorded import _read_records
from swiftkv_platform.tracking.tracker import TrackingInfo, WandbTracker, find_api_key
from tests.support.rays import free_port
from tests.support.requirements import required_module

required_module("wandb")


def records(path: Path) -> Iterator[Any]:
    """The protobuf records of a `.wandb` file."""
    from wandb.proto import wandb_internal_pb2

    for data in _read_records(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        yield record


def read_back(directory: Path) -> tuple[list[dict[str, Any]], dict[str, Any], list[Any]]:
    """History rows, summary and run records of every offline run below `directory`."""
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}
    runs: list[Any] = []
    for path in sorted(directory.glob("wandb/offline-run-*/run-*.wandb")):
        for record in records(path):
            match record.WhichOneof("record_type"):
                case "history":
                    rows.append(
                        {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                    )
                case "summary":
                    summary.update({i.key: json.loads(i.value_json) for i in record.summary.update if i.key})
                case "run":
                    runs.append(record.run)
    return rows, summary, runs


@pytest.fixture(autouse=True)
def _own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_DISABLED", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores what the tracker sets
        monkeypatch.delenv(name)


ATTEMPT = """
import sys
from pathlib import Path
import swiftkv_platform.tracking.tracker
assert "wandb" not in sys.modules
from swiftkv_platform.specs import WandbSpec
from swiftkv_platform.tracking.tracker import Table
from swiftkv_platform.tracking.tracker import WandbTracker

directory, step, loss = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
tracker = WandbTracker(WandbSpec(project="p", entity="team", tags=("a", "b")), directory, name="my-job")
tracker.start("job-1", {"learning_rate": 0.5})
tracker.log({"logits_loss": loss}, step)
table = Table(("task", "score"), (("gsm8k", 0.5), ("mmlu", None)))
png = (directory / "losses.png").read_bytes()
tracker.log_report({"evaluation": {"kl": loss / 10}}, {"scores": table}, {"losses": png}, step + 1)
tracker.log_artifact("my-model", "s3://bucket/jobs/1/artifact", "abc")
tracker.finish()
print(tracker.info, tracker.files, sep="\\n")
"""
"""Program of an attempt: a process, since W&B's file is complete only once it has ended."""


@pytest.mark.soak("waits for a dead server")
def test_auto_is_online_where_a_key_is_set_and_a_dead_server_makes_it_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "0123456789abcdef" * 3
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{free_port()}")
    tracker = WandbTracker(WandbSpec(), tmp_path, name="x", timeout_s=1.0)
    with structlog.testing.capture_logs() as logs:
        tracker.start("job-1", {})
        tracker.log({"loss": 1.0}, 1)
        tracker.finish()
    assert [(line["event"], line["log_level"]) for line in logs] == [("tracking_offline", "warning")]
    assert key not in str(logs)
    assert tracker.info is not None
    assert tracker.info.fault == logs[0]["error"], "its job reports the fault"
    assert replace(tracker.info, fault=None) == TrackingInfo("wandb", run_id="job-1", mode="offline", url=None)
    assert not tracker.uploaded
    assert list(tmp_path.glob("wandb/offline-run-*")) == [tracker.files]


def test_a_failure_in_the_middle_ends_the_tracking_alone(tmp_path: Path) -> None:
    tracker = WandbTracker(WandbSpec(mode="offline"), tmp_path, name="x")
    tracker.start("job-2", {})
    with structlog.testing.capture_logs() as logs:
        tracker.log({"loss": 1.0}, "not a step")  # type: ignore[arg-type]
        tracker.log({"loss": 1.0}, 1)
        tracker.finish()
    assert [(line["event"], line["action"]) for line in logs] == [("tracking_disabled", "log")]
    assert tracker.info is None


def test_a_disabled_tracker_records_nothing(tmp_path: Path) -> None:
    disabled = WandbTracker(WandbSpec(mode="disabled"), tmp_path, name="x")
    disabled.start("job-1", {})
    disabled.log({"loss": 1.0}, 1)
    disabled.finish()
    assert disabled.info is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("environment", "started"),
    [
        ({"WANDB_MODE": "disabled"}, []),
        ({"WANDB_MODE": " Disabled "}, []),
        ({"WANDB_DISABLED": "true"}, []),
        ({"WANDB_DISABLED": "1", "WANDB_MODE": "online"}, []),
        ({"WANDB_MODE": "offline"}, ["offline"]),
        ({"WANDB_MODE": "dryrun"}, ["offline"]),
        ({"WANDB_MODE": "none"}, ["offline"]),
        ({"WANDB_MODE": "run", "WANDB_DISABLED": "false"}, ["online"]),
        ({"WANDB_MODE": ""}, ["online"]),
        ({}, ["online"]),
    ],
)
@pytest.mark.parametrize("mode", ["auto", "online"])
@pytest.mark.parametrize("has_netrc", [False, True])
def test_the_environment_restricts_uploads(
    environment: dict[str, str],
    started: list[str],
    mode: Literal["auto", "online"],
    has_netrc: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also an explicit `online`, and whether the key is in the environment or in ~/.netrc."""
    modes: list[str] = []
    monkeypatch.setattr(WandbTracker, "_init_run", lambda _tracker, run_mode, *_: modes.append(run_mode))
    key = "0123456789abcdef" * 3
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".netrc").write_text(f"machine api.wandb.ai login user password {key}" if has_netrc else "")
    for name, value in (environment if has_netrc else {"WANDB_API_KEY": key, **environment}).items():
        monkeypatch.setenv(name, value)
    WandbTracker(WandbSpec(mode=mode), tmp_path, name="x").start("job-1", {})
    assert modes[:1] == started


@pytest.mark.parametrize(
    ("text", "environment", "found"),
    [
        ("machine api.wandb.ai login user password KEY", {}, "KEY"),
        ("machine api.wandb.ai login user password KEY", {"WANDB_API_KEY": "OTHER"}, "OTHER"),
        ("machine api.wandb.ai login user password KEY", {"WANDB_BASE_URL": "https://own.example:8080/"}, None),
        ("machine own.example:8080 password KEY", {"WANDB_BASE_URL": "https://own.example:8080/"}, "KEY"),
        ("machine github.com login user password KEY", {}, None),
        ("default login user password KEY", {}, None),
        ("machine api.wandb.ai login user", {}, None),
        ("no entry", {}, None),
        ("", {}, None),
    ],
)
def test_the_key_is_that_of_the_server(
    text: str, environment: dict[str, str], found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_api_key() == environment.get("WANDB_API_KEY"), "there is no file"
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".netrc").write_text(text)
    with structlog.testing.capture_logs() as logs:
        assert find_api_key() == found
    assert [line["event"] for line in logs] == (["netrc_unreadable"] if text == "no entry" else [])
    assert "KEY" not in str(logs)
    monkeypatch.setenv("NETRC", str(tmp_path / "nothing"))
    assert find_api_key() == environment.get("WANDB_API_KEY")


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_the_environment_permits_nothing_that_the_spec_forbids(mode: WandbMode) -> None:
    for word in ("online", "run", "offline", ""):
        assert restrict_wandb_mode(mode, {"WANDB_MODE": word}) == mode


def test_metrics_and_reports_of_two_attempts_are_one_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    Image.new("RGB", (2, 2)).save(tmp_path / "run" / "losses.png")
    for step, loss in ((10, 1.5), (20, 0.75)):
        command = [sys.executable, "-c", ATTEMPT, str(tmp_path / "run"), str(step), str(loss)]
        attempt = subprocess.run(command, capture_output=True, text=True, check=False)
        assert attempt.returncode == 0, attempt.stderr
        told, place = attempt.stdout.splitlines()
        assert told == str(TrackingInfo(provider="wandb", run_id="job-1", mode="offline", url=None)), attempt.stderr
        files = Path(place)
        (table,) = files.glob("files/media/table/scores*.table.json")
        assert json.loads(table.read_text())["data"] == [["gsm8k", 0.5], ["mmlu", None]]
        (image,) = files.glob("files/media/images/losses*.png")
        assert image.read_bytes().startswith(b"\x89PNG")
        recorded = records(next(files.glob("run-*.wandb")))
        artifacts = [record.artifact for record in recorded if record.WhichOneof("record_type") == "artifact"]
        assert "my-model" in {artifact.name for artifact in artifacts}

    rows, summary, runs = read_back(tmp_path / "run")
    assert [row["_step"] for row in rows] == [10, 11, 20, 21]
    assert [row["logits_loss"] for row in rows if "logits_loss" in row] == [1.5, 0.75]
    assert summary["evaluation"] == {"kl": 0.075}
    assert summary["artifact"] == {"uri": "s3://bucket/jobs/1/artifact", "sha256": "abc"}
    described = {(run.run_id, run.project, run.entity, run.display_name, tuple(run.tags)) for run in runs}
    assert described == {("job-1", "p", "team", "my-job", ("a", "b"))}
    config = {item.key: json.loads(item.value_json) for run in runs for item in run.config.update}
    assert config["learning_rate"] == 0.5
    assert not (tmp_path / "home").exists(), "every file lies below the given directory"
