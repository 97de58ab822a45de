"""An attempt's driver process, without what its workers do and without a cluster."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from swiftkv_platform.contract.attempts import PROTOCOL, AttemptId, AttemptRequest, ManifestFile
from swiftkv_platform.control_plane.ray import Entrypoint
from swiftkv_platform.errors import ConflictError, DataError, InvalidInputError, QualityGateError
from swiftkv_platform.jobs import driver
from swiftkv_platform.jobs.distill import main
from swiftkv_platform.jobs.driver import check_store_is_shared
from swiftkv_platform.jobs.ray_train import _Trainer
from swiftkv_platform.local import training
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.artifacts import write_manifest
from swiftkv_platform.storage.object_store import ObjectStore, open_store
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


GIB = 1 << 30


@pytest.mark.parametrize(
    ("resources", "message"),
    [
        ({"gpus_per_worker": 1}, "resources.gpus_per_worker is 1.0; this machine has 0 GPUs"),
        ({"gpus_per_worker": 4, "GPU": 2}, "resources.gpus_per_worker is 4.0; this machine has 2 GPUs"),
        ({"gpus_per_worker": 1, "num_workers": 4, "GPU": 2}, "resources.num_workers is 4, which need 4 GPUs; this "),
        ({"accelerator_type": "H100"}, "resources.accelerator_type is 'H100'; this machine has no GPU; leave"),
        (
            {"accelerator_type": "H100", "gpus_per_worker": 1, "GPU": 2, "accelerator_type:A100": 1},
            "resources.accelerator_type is 'H100'; this machine has A100",
        ),
        ({"memory_per_worker": 9 * GIB}, f"resources.memory_per_worker is {9 * GIB}; this machine has 8 GiB"),
        (
            {"memory_per_worker": 3 * GIB, "num_workers": 3},
            "resources.num_workers is 3, which need 9 GiB of free memory",
        ),
        ({"memory_per_worker": 8 * GIB, "num_workers": {"min": 1, "max": 9}}, None),
        ({"accelerator_type": "A100", "gpus_per_worker": 2, "GPU": 2, "accelerator_type:A100": 1}, None),
        ({"cpus_per_worker": 64}, None),
    ],
)
def test_a_local_run_that_would_wait_for_ever_is_refused(
    resources: dict[str, Any], message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local Ray has as many CPUs as the workers need. Upper-case names and types are the machine's."""
    machine = {
        "memory": 8.0 * GIB,
        **{name: value for name, value in resources.items() if name[0] == "G" or ":" in name},
    }
    wanted = {"num_workers": 1, **{name: value for name, value in resources.items() if name not in machine}}
    spec = JobSpec(name="here", resources=wanted)
    shut: list[bool] = []
    monkeypatch.setattr(ray, "init", lambda *_, **__: None)
    monkeypatch.setattr(ray, "cluster_resources", lambda: machine)
    monkeypatch.setattr(ray, "shutdown", lambda: shut.append(True))
    monkeypatch.setattr(training, "_set_signal_handlers", lambda _handlers: None)
    with pytest.raises(InvalidInputError) if message else nullcontext() as raised, training._start_local_ray(spec):
        assert message is None
    assert shut == [True]
    assert message is None or message in raised.value.message


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
from swiftkv_platform.storage.object_store import open_store

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


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Output of local runs without a Ray, whose failures leave a model of one file."""

    def save_model(_store: Any, _request: Any, checkpoint: str, directory: Path) -> None:
        directory.mkdir()
        (directory / "model.safetensors").write_text(checkpoint)

    monkeypatch.setattr(training, "_start_local_ray", lambda spec: nullcontext())
    monkeypatch.setattr(training, "save_model", save_model)
    return tmp_path / "output"


Run = Callable[..., None]


def trained(store: ObjectStore, request: AttemptRequest, *, step: int = 2) -> str:
    """Store a checkpoint of `request` after `step`, and return its key."""
    key = f"{request.attempt_id.checkpoints_prefix}/step-{step:08d}-a"
    store.put_bytes(f"{key}/weights", b"trained")
    file = ManifestFile(size=7, sha256="0")
    write_manifest(store, key, {"weights": file}, kind="checkpoint", lineage={"step": step}, metrics={})
    return key


def run_here(monkeypatch: pytest.MonkeyPatch, output: Path, work: Run, **sections: Any) -> Path:
    monkeypatch.setattr(training, "distill", work)
    return training.run_job_locally(JobSpec.model_validate({"name": "here", **sections}), output)


def fail_after_training(error: BaseException) -> Run:
    def work(store: ObjectStore, request: AttemptRequest, *, on_trained: Callable[[str], None]) -> None:
        on_trained(trained(store, request))
        store.put_bytes(f"{request.attempt_id.prefix}/evaluation.json", b"{}")
        raise error

    return work


def finish(store: ObjectStore, request: AttemptRequest, **_: Any) -> None:
    prefix = request.attempt_id.artifact_prefix
    names = ("model.safetensors", "evaluation.json", "tokenizer/vocab.json")
    for name in names:
        store.put_bytes(f"{prefix}/{name}", (request.resume_from or "").encode())
    write_manifest(
        store,
        prefix,
        {name: ManifestFile(size=0, sha256="0") for name in names},
        kind="artifact",
        lineage={"attempt": request.attempt},
        metrics={},
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (QualityGateError("too far", field="evaluation.max_kl", value=0.5), "quality_gate"),
        (DataError("no such task", field="evaluation.tasks[0]"), "data_error"),
        (OSError(28, "No space left on device"), "disk_full"),
        (MemoryError("8 GiB"), "out_of_memory"),
        (ValueError("`temperature` is set"), "internal_error"),
    ],
)
def test_a_failure_after_training_leaves_model_report_and_reason(
    error: Exception, code: str, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(type(error)):
        run_here(monkeypatch, output, fail_after_training(error))
    assert json.loads((output / "failure.json").read_text())["code"] == code
    assert (output / "evaluation.json").read_bytes() == b"{}"
    assert "step-00000002" in (output / "model" / "model.safetensors").read_text()

    run_here(monkeypatch, output, finish, evaluation={"max_kl": 9.0}, publish={"adapter": True})
    assert "step-00000002" in (output / "model.safetensors").read_text(), "the second attempt did not train again"
    assert {path.name for path in output.iterdir()} == {
        *("model.safetensors", "evaluation.json", "tokenizer", "manifest.json")
    }


def test_a_model_that_cannot_be_written_hides_no_reason_and_no_checkpoint(
    output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training, "save_model", fail)
    with pytest.raises(DataError):
        run_here(monkeypatch, output, fail_after_training(DataError("no such task")))
    assert json.loads((output / "failure.json").read_text())["code"] == "data_error"
    assert list(output.glob("job/jobs/*/attempts/1/checkpoints/step-00000002-a/weights"))


@pytest.mark.parametrize("sections", [{"training": {"seed": 7}}, {"model": {"name_or_path": "builtin:other"}}])
def test_a_trained_run_is_not_replaced_by_one_of_another_spec(
    sections: dict[str, Any], output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_here(monkeypatch, output, fail_after_training(KeyboardInterrupt()))
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    with pytest.raises(ConflictError, match=rf"different: {next(iter(sections))}"):
        run_here(monkeypatch, output, finish, **sections)
    assert before == {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    assert json.loads((output / "failure.json").read_text())["code"] == "interrupted"


def test_only_changed_evaluations_are_measured_again(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[bool] = []

    def work(store: ObjectStore, request: AttemptRequest, *, on_trained: Callable[[str], None]) -> None:
        first = AttemptId(request.job_id, 1).evaluation_key("digest", "teacher")
        kept.append(store.head(first) is not None)
        store.put_bytes(request.attempt_id.evaluation_key("digest", "teacher"), b"{}")
        fail_after_training(DataError("x"))(store, request, on_trained=on_trained)

    for sections in ({}, {}, {"evaluation": {"max_tokens": 4096}}):
        with pytest.raises(DataError):
            run_here(monkeypatch, output, work, **sections)
    assert kept == [False, True, False]


def test_a_move_of_the_artifact_that_was_killed_is_completed(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill before any file, or before the run is deleted: the second run moves the rest, without an attempt."""
    replace, delete = Path.replace, shutil.rmtree

    def delete_or_die(path: Path, **options: Any) -> None:
        if path.name == "job":
            (path / "jobs").rename(path / "other")
            raise SystemExit(9)
        delete(path, **options)

    for killed_after in range(5):
        number = iter(range(5))

        def replace_or_die(path: Path, target: Path, number: Any = number, last: int = killed_after) -> Path:
            if path.suffix and next(number) == last:
                raise SystemExit(9)
            return replace(path, target)

        one = output.with_name(str(killed_after))
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", replace_or_die)
            patch.setattr(shutil, "rmtree", delete_or_die)
            with pytest.raises(SystemExit):
                run_here(monkeypatch, one, finish)
        assert run_here(monkeypatch, one, fail_after_training(AssertionError("the model was complete"))) == one
        assert sorted(path.name for path in one.iterdir()) == [
            *("evaluation.json", "manifest.json", "model.safetensors", "tokenizer")
        ]


@pytest.mark.parametrize(("name", "content"), [("manifest.json", "a finished model"), ("notes.txt", "files other")])
def test_other_files_in_the_output_are_kept(
    name: str, content: str, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output.mkdir()
    (output / name).write_text("mine")
    with pytest.raises(ConflictError, match=content):
        run_here(monkeypatch, output, finish)
    assert [(path.name, path.read_text()) for path in output.iterdir()] == [(name, "mine")]


def test_two_runs_cannot_use_one_output(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(store: ObjectStore, request: AttemptRequest, **_: Any) -> None:
        with pytest.raises(ConflictError, match="another process"):
            run_here(monkeypatch, output, finish)
        finish(store, request)

    run_here(monkeypatch, output, work)


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGHUP])
def test_a_job_here_that_has_not_trained_leaves_nothing(
    told: signal.Signals, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(store: ObjectStore, request: AttemptRequest, **_: Any) -> None:
        trained(store, request, step=0)
        os.kill(os.getpid(), told)

    before = signal.getsignal(told)
    with pytest.raises(SystemExit, match="143"):
        run_here(monkeypatch, output, work)
    assert signal.getsignal(told) == before
    assert not list(tmp_path.iterdir())
