"""Whole attempts on a real Ray: workers, checkpoints, events and artifact, on a directory and on S3."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from swiftkv_platform.attempts import (
    AttemptEvent,
    AttemptRequest,
    artifact_prefix,
    checkpoints_prefix,
)
from swiftkv_platform.distillation.checkpoint import read_trained
from swiftkv_platform.errors import ConflictError
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.artifacts import fetch_directory, manifest_digest
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore, open_store
from tests.s3_servers import S3Server

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

JOB = "job_1"
TOTAL_STEPS = 36
ONE_WORKER = {"num_workers": 1}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "functions.jsonl"
    rows = ({"text": f"def add_{i}(x):\n    return x + {i}\n"} for i in range(300))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def job_spec(teacher: Path | str, corpus: Path | str, *, max_steps: int, **sections: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "tiny",
            "model": {"name_or_path": str(teacher), "dtype": "float32"},
            "swiftkv": {"key_value_group_size": 2, "calibration_tokens": 1024, "early_exit": True},
            "data": {"sources": [{"name_or_path": str(corpus)}], "max_length": 96, "validation_fraction": 0.1},
            "training": {"max_steps": max_steps, "batch_size": 4, "micro_batch_size": 2},
            "optimizer": {"learning_rate": 3e-3},
            "checkpoint": {"every_steps": 3},
            "tracking": {"wandb": {"mode": "disabled"}},
            **sections,
        }
    )


def start(store: ObjectStore, spec: JobSpec, cluster: str, *, attempt: int = 1) -> subprocess.Popen[bytes]:
    """The entrypoint, as a Ray Job runs it."""
    newest = AttemptStore(store).newest_checkpoint(JOB, before_attempt=attempt)
    request = AttemptRequest(job_id=JOB, attempt=attempt, spec=spec, resume_from=newest, run_id="run")
    AttemptStore(store).write_request(request)
    command = [sys.executable, "-m", "jobs.distill", "--job-id", JOB, "--attempt", str(attempt), "--store", store.uri]
    return subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": cluster})


def events(store: ObjectStore, *, attempt: int = 1) -> list[AttemptEvent]:
    return [stored.event for stored in AttemptStore(store).read_events(JOB, attempt, {})]


def wait_for_checkpoint(store: ObjectStore, process: subprocess.Popen[bytes]) -> None:
    while not any(event.type == "checkpoint" for event in events(store)):
        assert process.poll() is None, "the job ended before its first checkpoint"
        time.sleep(0.05)


def wait_for_step(store: ObjectStore, process: subprocess.Popen[bytes], step: int, *, attempt: int = 1) -> None:
    while not any(p["step"] >= step for e in events(store, attempt=attempt) for p in e.data.get("points", [])):
        assert process.poll() is None, f"the job ended before step {step}"
        time.sleep(0.05)


def final_weights(store: ObjectStore, directory: Path) -> dict[str, torch.Tensor]:
    newest = AttemptStore(store).newest_checkpoint(JOB)
    assert newest is not None
    assert f"/step-{TOTAL_STEPS:08d}-" in newest
    fetch_directory(store, newest, directory)
    return read_trained(directory)


@pytest.fixture(scope="module")
def uninterrupted(
    cluster: str, tiny_teacher: Path, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, torch.Tensor]:
    """What a run that nothing disturbs ends with."""
    path = tmp_path_factory.mktemp("uninterrupted")
    store = open_store(str(path / "store"))
    assert start(store, job_spec(tiny_teacher, corpus, max_steps=TOTAL_STEPS), cluster).wait() == 0
    return final_weights(store, path / "checkpoint")


def assert_equal_bit_for_bit(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].equal(tensor), name


def train_workers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended since, or waits for its parent to notice
            if "RayTrainWorker" in " ".join(process.cmdline()):
                found.append(process)
    return found


def test_a_job_on_s3_survives_the_loss_of_a_worker(
    cluster: str,
    s3_server: S3Server,
    tiny_teacher: Path,
    corpus: Path,
    tmp_path: Path,
    uninterrupted: dict[str, torch.Tensor],
) -> None:
    """Teacher, data, checkpoints, events and artifact are objects."""
    inputs = open_store(s3_server.uri("inputs"))
    for file in tiny_teacher.iterdir():
        inputs.upload_file(file, f"teacher/{file.name}")
    inputs.upload_file(corpus, "corpus.jsonl")
    store = open_store(s3_server.uri("store"))
    spec = job_spec(
        s3_server.uri("inputs/teacher"),
        s3_server.uri("inputs/corpus.jsonl"),
        max_steps=TOTAL_STEPS,
        tracking={"wandb": {"mode": "offline"}},
    )
    process = start(store, spec, cluster)

    wait_for_checkpoint(store, process)
    workers = train_workers()
    assert len(workers) == 2
    workers[-1].send_signal(signal.SIGKILL)
    assert process.wait() == 0

    said = events(store)
    assert [event.data["status"] for event in said if event.type == "status"] == ["running", "evaluating"]
    assert not [event for event in said if event.type == "error"]
    assert {event.data["run_id"] for event in said if event.type == "tracking"} == {"run"}
    runs = _steps_by_run(store)
    assert len(runs) == 2, "the workers were started once more"
    assert runs[0][0] == 1
    saved = [event.data["step"] for event in said if event.type == "checkpoint"]
    assert runs[1][0] - 1 in saved, "the second run goes on from a checkpoint"
    begins = [event.data["step"] for event in said if event.message.startswith("training begins")]
    assert begins == [0, runs[1][0] - 1]
    assert runs[1][-1] == saved[-1] == TOTAL_STEPS
    assert len(store.list_directories(checkpoints_prefix(JOB, 1))) == spec.checkpoint.keep
    _assert_artifact_is_complete(store, said, tmp_path / "artifact")
    assert_equal_bit_for_bit(final_weights(store, tmp_path / "checkpoint"), uninterrupted)
    _another_attempt_trains_no_more_and_meets_its_gate(store, spec)


def _steps_by_run(store: ObjectStore) -> list[list[int]]:
    """Steps that each start of the workers reported, in the order of the starts."""
    by_writer: dict[str, list[int]] = {}
    for stored in AttemptStore(store).read_events(JOB, 1, {}):
        if stored.event.type == "metrics":
            assert stored.event.data["total_steps"] == TOTAL_STEPS
            by_writer.setdefault(stored.writer, []).extend(point["step"] for point in stored.event.data["points"])
    assert all(writer.startswith("rank0-") for writer in by_writer)
    return list(by_writer.values())


def _assert_artifact_is_complete(store: ObjectStore, said: list[AttemptEvent], directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import swiftkv_platform.model  # noqa: F401 (registers the classes)

    manifest = fetch_directory(store, artifact_prefix(JOB, 1), directory)
    (published,) = (event.data for event in said if event.type == "artifact")
    assert published["sha256"] == manifest_digest(manifest)
    assert published["metrics"] == manifest.metrics
    assert {
        "job_id",
        "attempt",
        "teacher",
        "revision",
        "data_fingerprint",
        "code_version",
        "spec",
    } <= manifest.lineage.keys()
    report = json.loads((directory / "evaluation.json").read_text())
    assert report == manifest.metrics
    assert report["distilled"]["kl"] < report["calibrated"]["kl"] < report["rewired"]["kl"]
    assert report["kv_bytes_ratio"] == pytest.approx(5 / 6)  # 3 layers of their own, then groups of 2 and 1

    tokenizer, student = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    prompt = tokenizer("def add_7(", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert student.generate(prompt, max_new_tokens=4, do_sample=False).shape[1] == prompt.shape[1] + 4
        student.swiftkv(False)(prompt)


def _another_attempt_trains_no_more_and_meets_its_gate(store: ObjectStore, spec: JobSpec) -> None:
    from jobs.distill import run_attempt

    checkpoint = AttemptStore(store).newest_checkpoint(JOB)
    gated = spec.model_copy(update={"evaluation": spec.evaluation.model_copy(update={"max_kl": 1e-9})})
    request = AttemptRequest(job_id=JOB, attempt=2, spec=gated, resume_from=checkpoint, run_id="run")

    failure = run_attempt(store, request)

    assert failure is not None
    assert (failure.code, failure.field, failure.retryable) == ("quality_gate", "evaluation.max_kl", False)
    said = [event.type for event in events(store, attempt=2)]
    assert [kind for kind in said if kind != "message"] == ["status", "status", "error"]
    assert AttemptStore(store).artifact_manifest(JOB, 2) is None


@pytest.mark.usefixtures("cluster")
def test_a_long_calibration_is_divided_among_workers(tiny_teacher: Path, tmp_path: Path) -> None:
    import ray

    from jobs.phases import prepare
    from jobs.prepare import calibration_shares
    from jobs.prepare import prepare as prepare_here
    from jobs.training import as_task

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("".join(f"def add_{i}(x):\n    return x + {i}\n\n" for i in range(1200)))
    spec = job_spec(
        tiny_teacher,
        corpus,
        max_steps=4,
        data={"sources": [{"name_or_path": str(corpus)}], "max_length": 256, "validation_fraction": 0.0},
        swiftkv={"calibration_tokens": 1 << 15},
        resources={"num_workers": 2},
    )
    request = AttemptRequest(job_id=JOB, attempt=1, spec=spec, run_id="run")
    store = open_store(str(tmp_path / "store"))
    _, stored = ray.get(as_task(prepare, spec.resources, num_returns=2).remote(request, store.uri))
    stored.fetch(tmp_path / "rows")
    _, alone = prepare_here(spec, tmp_path / "rows")
    assert calibration_shares(spec, alone.data) == 2
    assert alone.calibrated is not None
    for name, tensor in alone.calibrated.items():
        torch.testing.assert_close(stored.calibrated[name], tensor, atol=1e-5, rtol=1e-4, msg=name)


def test_sigterm_ends_the_job_and_frees_its_workers(
    cluster: str, tiny_teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    """Its checkpoint is of the step it got to, not of the last multiple of `every_steps`."""
    store = open_store(str(tmp_path / "store"))
    seldom = {"resources": ONE_WORKER, "checkpoint": {"every_steps": 100_000}}
    process = start(store, job_spec(tiny_teacher, corpus, max_steps=100_000, **seldom), cluster)
    wait_for_step(store, process, 2)

    process.send_signal(signal.SIGTERM)

    assert process.wait() == 128 + signal.SIGTERM
    while train_workers():
        time.sleep(0.1)
    assert AttemptStore(store).newest_checkpoint(JOB) is not None
    error = events(store)[-1]
    assert (error.type, error.data["code"], error.data["retryable"]) == ("error", "preempted", True)
    assert AttemptStore(store).artifact_manifest(JOB, 1) is None


@pytest.mark.parametrize("seed", [int(os.environ.get("SWIFTKV_SEED", "0"))])
def test_paused_killed_and_resumed_a_job_ends_as_if_nothing_had_been(
    cluster: str,
    tiny_teacher: Path,
    corpus: Path,
    tmp_path: Path,
    uninterrupted: dict[str, torch.Tensor],
    seed: int,
) -> None:
    chance = random.Random(seed)
    store = open_store(str(tmp_path / "store"))
    spec = job_spec(tiny_teacher, corpus, max_steps=TOTAL_STEPS)
    paused = start(store, spec, cluster)
    wait_for_step(store, paused, chance.randint(1, 12))
    AttemptStore(store).request_pause(JOB, 1)
    assert paused.wait() == 0
    assert events(store)[-1].data == {"status": "paused"}
    assert AttemptStore(store).artifact_manifest(JOB, 1) is None

    killed = start(store, spec, cluster, attempt=2)
    wait_for_step(store, killed, TOTAL_STEPS - chance.randint(5, 12), attempt=2)
    killed.kill()
    killed.wait()
    while train_workers():
        time.sleep(0.1)

    assert start(store, spec, cluster, attempt=3).wait() == 0
    begins = [e.data["step"] for n in (1, 2, 3) for e in events(store, attempt=n) if e.message.startswith("training b")]
    assert begins[0] == 0 < begins[1] < begins[2] < TOTAL_STEPS
    assert_equal_bit_for_bit(final_weights(store, tmp_path / "checkpoint"), uninterrupted)


@pytest.mark.parametrize(
    ("section", "code", "field"),
    [
        ({"data": {"sources": [{"name_or_path": "{columnless}"}]}}, "data_error", "data.sources[0]"),
        ({"swiftkv": {"num_key_value_layers": 9}}, "invalid_input", "swiftkv.num_key_value_layers"),
        ({"model": {"name_or_path": "{nowhere}"}}, "model_error", "model.name_or_path"),
    ],
)
def test_what_only_the_cluster_can_know_is_an_error_event(
    cluster: str,
    tiny_teacher: Path,
    corpus: Path,
    tmp_path: Path,
    section: dict[str, Any],
    code: str,
    field: str,
) -> None:
    from jobs.distill import run_attempt

    columnless = tmp_path / "rows.jsonl"
    columnless.write_text('{"nothing": 1}\n')
    filled = json.loads(
        json.dumps(section).replace("{columnless}", str(columnless)).replace("{nowhere}", str(tmp_path / "nowhere"))
    )
    store = open_store(str(tmp_path / "store"))
    spec = job_spec(tiny_teacher, corpus, max_steps=1, **filled)

    failure = run_attempt(store, AttemptRequest(job_id=JOB, attempt=1, spec=spec, run_id="run"))

    error = events(store)[-1]
    assert failure is not None
    assert (error.type, error.level) == ("error", "error")
    assert error.data["code"] == failure.code == code
    assert error.data["field"].startswith(field)
    assert error.data["retryable"] is False


def test_a_job_without_a_control_plane(tiny_teacher: Path, corpus: Path, tmp_path: Path) -> None:
    """`run_local` in a process of its own: it starts a Ray, and leaves nothing but the artifact."""
    spec_file, output = tmp_path / "spec.json", tmp_path / "output"
    spec = job_spec(tiny_teacher, corpus, max_steps=2, resources=ONE_WORKER).model_dump(mode="json")
    prompts = {"name_or_path": str(corpus), "sample_count": 3, "complete": {"max_tokens": 4, "prompt_tokens": 8}}
    spec["data"]["sources"].append(prompts)
    spec_file.write_text(json.dumps(spec))
    program = """
import sys
from pathlib import Path
from jobs.distill import run_local
from swiftkv_platform.specs import load_spec
def say(event):
    print(event.type, event.message, sep="\\t", flush=True)
run_local(load_spec(Path(sys.argv[1])), Path(sys.argv[2]), on_event=say)
"""
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")}
    (tmp_path / "tmp").mkdir()

    done = subprocess.run(
        [sys.executable, "-c", program, str(spec_file), str(output)], env=environment, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    said = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
    kinds = [kind for kind, _ in said]
    wrote = next(message.split()[3] for _, message in said if message.startswith("the teacher wrote "))
    assert 3 <= int(wrote) <= 12
    assert any(message.startswith("data.sources[1] ") and f"{wrote} tokens written" in message for _, message in said)
    assert kinds[0] == "status"
    assert kinds[-1] == "artifact"
    assert {"metrics", "checkpoint"} <= set(kinds)
    assert (output / "evaluation.json").is_file()
    assert not list((tmp_path / "tmp").glob("distill-*"))


def test_an_output_that_holds_something_else_is_refused_at_once(tmp_path: Path) -> None:
    from jobs.distill import run_local

    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConflictError, match="holds no artifact"):
        run_local(JobSpec(name="n"), tmp_path)
