"""An attempt's driver process, without what its workers do and without a cluster."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from swiftkv_platform.contract.attempts import PROTOCOL, AttemptId
from swiftkv_platform.control_plane.ray.jobs import Entrypoint
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.jobs import distill, driver
from swiftkv_platform.jobs.distill import main
from swiftkv_platform.jobs.driver import check_store_is_shared
from swiftkv_platform.jobs.ray_train import _Trainer
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.addresses import open_store
from tests.support.requirements import required_module
from tests.unit.jobs.attempts import request, said


def arguments(store: Path, protocol: int) -> list[str]:
    *command, _ = shlex.split(Entrypoint((), str(store)).format_command(AttemptId("job", 1)))
    return [*command, str(protocol)]


@pytest.mark.parametrize(
    ("num_workers", "free", "size"),
    [
        (3, [0], 3),
        ({"min": 1, "max": 8}, [4], 4),
        ({"min": 1, "max": 3}, [4], 3),
        ({"min": 1, "max": 8}, [1, 4, 9], 4),
        ({"min": 1, "max": 8}, [2] * 5, 2),
        ({"min": 2, "max": 8}, [0] * 5, 2),
        ({"min": 6, "max": 8}, [4], 6),
    ],
)
def test_a_group_waits_for_no_place_that_another_holds(
    monkeypatch: pytest.MonkeyPatch, num_workers: Any, free: list[int], size: int
) -> None:
    """The cluster has four CPUs. A group that waits for what another job holds could wait for ever."""
    told = iter(free)
    monkeypatch.setattr(driver, "STOP_POLL_INTERVAL_S", 0.0)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 4.0})
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": float(next(told))})
    assert driver.choose_group_size(JobSpec(name="test", resources={"num_workers": num_workers}).resources) == size


@pytest.mark.parametrize("protocol", [None, *range(1, PROTOCOL + 1)])
def test_its_own_and_older_control_planes_requests_are_read(tmp_path: Path, protocol: int | None) -> None:
    """Requests of the oldest control planes name no protocol."""
    command = arguments(tmp_path, protocol or 1)
    assert main(command if protocol else command[:-2]) == 1
    (event,) = said(open_store(str(tmp_path)), "error")
    assert "attempt.json" in event.message
    assert (event.data["code"], event.data["retryable"]) == ("object_not_found", True)


@pytest.mark.parametrize(
    ("protocol", "said_to_be", "field", "value"),
    [
        (
            PROTOCOL + 1,
            f"the workers' image has protocol {PROTOCOL}, the control plane has protocol {PROTOCOL + 1}",
            None,
            PROTOCOL + 1,
        ),
        (
            PROTOCOL,
            "the workers' image does not support the job: spec.training.momentum: Extra inputs are not permitted",
            "spec.training.momentum",
            None,
        ),
    ],
)
def test_a_request_of_another_version_is_refused_in_one_sentence(
    protocol: int, said_to_be: str, field: str | None, value: int | None, tmp_path: Path
) -> None:
    store, asked = open_store(str(tmp_path)), json.loads(request().to_json())
    asked["spec"]["training"] = {"momentum": 0.9}
    store.put_bytes(AttemptId("job", 1).request_key, json.dumps(asked).encode())
    assert main(arguments(tmp_path, protocol)) == 1
    (event,) = said(store, "error")
    assert event.message == said_to_be
    assert [event.data[key] for key in ("code", "field", "retryable")] == ["protocol_mismatch", field, False]
    assert value is None or event.data["value"] == value


def test_a_directory_is_no_store_for_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check(uri: str, *alive: bool) -> None:
        monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": is_alive} for is_alive in alive])
        check_store_is_shared(open_store(uri))

    with pytest.raises(InvalidInputError, match="the cluster has 2 nodes") as raised:
        check(str(tmp_path), True, False, True)
    assert (raised.value.field, raised.value.value) == ("storage_uri", str(tmp_path))
    check(str(tmp_path), True, False)
    check("s3://bucket/prefix", True, True)
    monkeypatch.setenv("SWIFTKV_SHARED_DIRECTORY", "1")
    check(str(tmp_path), True, True)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Let SIGINT raise KeyboardInterrupt in the main thread, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def fit(monkeypatch: pytest.MonkeyPatch, run: Callable[[], None]) -> Any:
    """Run `fit` of Ray Train in this process, with a controller that calls `run`."""

    def method(function: Callable[[], Any]) -> Any:
        """Stand-in for an actor's method; it runs when its result is asked for."""
        return SimpleNamespace(remote=lambda: function)

    def abort() -> None:
        raise ray.exceptions.RayActorError

    result = method(lambda: SimpleNamespace(error=None))
    controller = SimpleNamespace(run=method(run), get_result=result, abort=method(abort))
    monkeypatch.setattr(ray, "remote", lambda **_: lambda _class: SimpleNamespace(remote=lambda **_: controller))
    monkeypatch.setattr(ray, "get", lambda function: function())
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    return _Trainer(lambda: None)._initialize_and_run_controller()


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_interrupts_training_and_means_after_it_what_it_meant_before(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(KeyboardInterrupt):
        fit(monkeypatch, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert fit(monkeypatch, lambda: None).error is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_no_process_is_started_for_data_sets_that_there_are_not() -> None:
    """Left to itself, Ray Train starts an actor for Ray Data with every group of workers."""
    callbacks = [type(callback).__name__ for callback in _Trainer(lambda: None)._create_default_callbacks()]
    assert "BackendSetupCallback" in callbacks
    assert "DatasetsCallback" not in callbacks


TRACKED = """
import sys
from swiftkv_platform.jobs.attempt.tracking import TrackedRun
from swiftkv_platform.contract.attempts import AttemptRequest, Manifest
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.addresses import open_store

spec = JobSpec.model_validate({"name": "n", "tracking": {"wandb": {"mode": "offline"}}})
run = TrackedRun(open_store(sys.argv[1]), AttemptRequest(job_id="job", attempt=3, spec=spec, run_id="run-1"))
run.log({"loss": 1.0}, 1)
run.save()
bins = [{"low": i / 2, "high": i / 2 + 0.5, "share": 0.5, "agreement": 0.5} for i in range(2)]
report = {"teacher": {"perplexity": 1.9}, "rewired": None, "calibrated": None, "tasks": [], "exit_head": bins}
run.log_report(report | {"distilled": {"perplexity": 2.0, "kl": 0.1, "top1_agreement": 0.9}}, 1)
run.log_artifact(Manifest(kind="artifact", files={}, created_at=0.0))
run.close()
assert run.info is not None, "nothing failed"
"""


def test_offline_files_of_the_tracked_run_are_in_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    required_module("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("SWIFTKV_HOME", "HOME"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    store, prefix = (
        open_store(str(tmp_path / "store")),
        AttemptId("job", 3).artifact_prefix.replace("artifact", "tracking"),
    )
    (tmp_path / "store" / AttemptId("job", 3).artifact_prefix).mkdir(parents=True)
    done = subprocess.run([sys.executable, "-c", TRACKED, store.uri], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    keys = {info.key.removeprefix(f"{prefix}/").partition("/")[2]: info.key for info in store.list(prefix)}
    assert all(key.startswith(f"{prefix}/offline-run-") for key in keys.values())
    for made in ("files/media/table/quality", "files/media/images/exit_head"):
        assert any(name.startswith(made) for name in keys)
    (local,) = (tmp_path / "home" / "tracking" / "job" / "wandb").glob("offline-run-*/run-run-1.wandb")
    assert store.get_bytes(keys["run-run-1.wandb"]) == local.read_bytes(), "the newest state of the file"


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP])
def test_a_job_here_that_is_told_to_end_leaves_nothing(
    told: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*_: Any) -> None:
        assert list(tmp_path.glob("distill-*"))
        os.kill(os.getpid(), told)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(distill, "_start_local_ray", lambda spec: nullcontext())
    monkeypatch.setattr(distill, "distill", work)
    before = signal.getsignal(told)
    with pytest.raises(SystemExit, match="143"):
        distill.run_local(JobSpec(name="here"), tmp_path / "output")
    assert signal.getsignal(told) == before
    assert not list(tmp_path.iterdir())
