"""Jobs on a real Ray lose a worker, their driver or their control plane, or are paused, and still end with the same
result.

`SWIFTKV_SEED` chooses the steps of the interruptions; `make soak` tries several seeds.
"""

import json
import os
import random
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch

from swiftkv_platform.contract.attempts import AttemptId, AttemptRequest
from swiftkv_platform.contract.events import AttemptEvent
from swiftkv_platform.local.ray_head import RayHead
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.artifacts import fetch_directory, hash_manifest
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore, open_store
from tests.integration.conftest import wait_for
from tests.integration.planes import Plane, RayCluster
from tests.support.distill_jobs import (
    JOB,
    TOTAL_STEPS,
    assert_equal_bit_for_bit,
    events,
    final_weights,
    job_spec,
    start,
    starts,
    train_workers,
    wait_for_checkpoint,
    wait_for_starts,
    wait_for_step,
)
from tests.support.ledger import Ledger
from tests.support.s3_servers import S3Server

pytestmark = [pytest.mark.integration("whole jobs, interrupted"), pytest.mark.timeout(600)]


@pytest.fixture
def chance() -> random.Random:
    return random.Random(int(os.environ.get("SWIFTKV_SEED", "0")))


@pytest.fixture(scope="module")
def spec(tiny_teacher: Path, corpus: Path) -> JobSpec:
    return job_spec(tiny_teacher, corpus, max_steps=TOTAL_STEPS)


@pytest.fixture(scope="module")
def uninterrupted(cluster: str, spec: JobSpec, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Final weights of an uninterrupted run."""
    from swiftkv_platform.jobs.attempt.events import EventReporter
    from swiftkv_platform.jobs.driver import train

    store = open_store(str(tmp_path_factory.mktemp("undisturbed")))
    request = AttemptRequest(job_id=JOB, attempt=1, spec=spec, run_id="run")
    train(store, request, EventReporter(store, request.attempt_id, "driver"))
    return final_weights(store, tmp_path_factory.mktemp("uninterrupted"))


@pytest.mark.soak("a minute")
def test_a_job_on_s3_survives_the_loss_of_a_worker(
    cluster: str,
    s3_server: S3Server,
    tiny_teacher: Path,
    corpus: Path,
    tmp_path: Path,
    uninterrupted: dict[str, torch.Tensor],
) -> None:
    """Teacher, data, checkpoints, events and artifact are in the object store."""
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
    assert len(runs) == 2, "the workers were restarted once"
    assert runs[0][0] == 1
    saved = [event.data["step"] for event in said if event.type == "checkpoint"]
    assert starts(store) == [0, runs[1][0] - 1]
    assert runs[1][0] > 1, "the second run resumes from a checkpoint, even if its event was lost"
    assert runs[1][-1] == saved[-1] == TOTAL_STEPS
    num_kept = len(store.list_directories(AttemptId(JOB, 1).checkpoints_prefix))
    assert spec.checkpoint.keep <= num_kept <= spec.checkpoint.keep + 1  # plus the best one, if older
    _assert_artifact_is_complete(store, said, tmp_path / "artifact")
    assert_equal_bit_for_bit(final_weights(store, tmp_path / "checkpoint"), uninterrupted)
    _another_attempt_trains_no_more_and_meets_its_gate(store, spec)


def _steps_by_run(store: ObjectStore, total_steps: int = TOTAL_STEPS) -> list[list[int]]:
    """Return the steps that each start of the workers reported, in order of the starts."""
    by_writer: dict[str, list[int]] = {}
    for stored in AttemptStore(store).read_events(AttemptId(JOB, 1), {}):
        if stored.event.type == "metrics":
            assert stored.event.data["total_steps"] == total_steps
            by_writer.setdefault(stored.writer, []).extend(point["step"] for point in stored.event.data["points"])
    assert all(writer.startswith("rank0-") for writer in by_writer)
    return list(by_writer.values())


def _assert_artifact_is_complete(store: ObjectStore, said: list[AttemptEvent], directory: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import swiftkv_platform.model  # noqa: F401 (registers the classes)

    manifest = fetch_directory(store, AttemptId(JOB, 1).artifact_prefix, directory)
    (published,) = (event.data for event in said if event.type == "artifact")
    assert published["sha256"] == hash_manifest(manifest)
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
    assert report["kv_bytes_ratio"] == pytest.approx(5 / 6)  # 3 layers with their own KV, then groups of 2 and 1

    tokenizer, student = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    prompt = tokenizer("def add_7(", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        assert student.generate(prompt, max_new_tokens=4, do_sample=False).shape[1] == prompt.shape[1] + 4
        student.swiftkv(False)(prompt)


def _another_attempt_trains_no_more_and_meets_its_gate(store: ObjectStore, spec: JobSpec) -> None:
    from swiftkv_platform.jobs.distill import run_attempt

    checkpoint = AttemptStore(store).find_newest_checkpoint(JOB)
    gated = spec.model_copy(update={"evaluation": spec.evaluation.model_copy(update={"max_kl": 1e-9})})
    request = AttemptRequest(job_id=JOB, attempt=2, spec=gated, resume_from=checkpoint, run_id="run")

    failure = run_attempt(store, request)

    assert failure is not None
    assert (failure.code, failure.field, failure.retryable) == ("quality_gate", "evaluation.max_kl", False)
    said = [event.type for event in events(store, attempt=2)]
    passing = ("message", "placement", "progress")
    assert [kind for kind in said if kind not in passing] == ["status", "status", "error"]
    assert AttemptStore(store).read_artifact_manifest(AttemptId(JOB, 2)) is None


@pytest.mark.soak("a minute")
def test_sigterm_brings_about_a_checkpoint(cluster: str, tiny_teacher: Path, corpus: Path, tmp_path: Path) -> None:
    """SIGTERM to a worker restarts the workers at the step they reached; SIGTERM to the driver ends the job and frees
    them."""
    store = open_store(str(tmp_path / "store"))
    seldom = {"checkpoint": {"every_steps": 100_000}}
    process = start(store, job_spec(tiny_teacher, corpus, max_steps=100_000, **seldom), cluster)
    wait_for_step(store, process, 2)

    train_workers()[-1].send_signal(signal.SIGTERM)
    wait_for_starts(store, process, 2)
    [start_step, saved] = [event.data["step"] for event in events(store) if event.type == "checkpoint"]
    assert start_step == 0
    assert starts(store) == [0, saved]
    assert _steps_by_run(store, 100_000)[0][-1] == saved >= 2

    wait_for_step(store, process, saved + 2)
    process.send_signal(signal.SIGTERM)
    assert process.wait() == 128 + signal.SIGTERM
    while train_workers():
        time.sleep(0.1)
    newest = AttemptStore(store).list_checkpoints(JOB)[-1]
    assert newest.step == _steps_by_run(store, 100_000)[1][-1] >= saved + 2
    error = events(store)[-1]
    assert (error.type, error.data["code"], error.data["retryable"]) == ("error", "preempted", True)
    assert AttemptStore(store).read_artifact_manifest(AttemptId(JOB, 1)) is None


@pytest.mark.soak("three attempts")
def test_paused_killed_and_resumed_a_job_ends_as_if_nothing_had_been(
    cluster: str,
    spec: JobSpec,
    tmp_path: Path,
    uninterrupted: dict[str, torch.Tensor],
    chance: random.Random,
) -> None:
    store = open_store(str(tmp_path / "store"))
    paused = start(store, spec, cluster)
    wait_for_step(store, paused, chance.randint(1, 12))
    AttemptStore(store).request_pause(AttemptId(JOB, 1))
    assert paused.wait() == 0
    assert events(store)[-1].data == {"status": "paused"}
    assert AttemptStore(store).read_artifact_manifest(AttemptId(JOB, 1)) is None

    killed = start(store, spec, cluster, attempt=2)
    wait_for_step(store, killed, TOTAL_STEPS - chance.randint(5, 12), attempt=2)
    killed.kill()
    killed.wait()
    while train_workers():
        time.sleep(0.1)

    assert start(store, spec, cluster, attempt=3).wait() == 0
    begins = [starts(store, attempt=n) for n in (1, 2, 3)]
    assert [len(steps) for steps in begins] == [1, 1, 1]
    assert begins[0][0] == 0 < begins[1][0] < begins[2][0] < TOTAL_STEPS
    assert_equal_bit_for_bit(final_weights(store, tmp_path / "checkpoint"), uninterrupted)


def test_a_job_that_loses_its_control_plane_a_worker_and_its_driver_in_turn_ends_as_if_nothing_had_been(
    head: RayHead,
    spec: JobSpec,
    tmp_path: Path,
    uninterrupted: dict[str, torch.Tensor],
    chance: random.Random,
) -> None:
    """Each is killed in the middle of a step; the control plane is restarted two kills later."""
    unattended, widowed, orphaned = (chance.randint(first, first + 9) for first in (1, 12, 23))
    ledger = Ledger(tmp_path / "ledger")
    ledger.directory.mkdir()
    holds = f"2:{unattended} 2:{widowed} 2:{orphaned}"
    spec = spec.model_copy(update={"metadata": {"ledger": str(ledger.directory), "hold": holds}})
    plane = Plane(tmp_path / "plane", RayCluster.of(head), entrypoint=("-m", "tests.support.ledger"))
    store = open_store(str(plane.home / "store"))
    plane.start()
    try:
        job_id = plane.client.jobs.create(spec.model_dump(mode="json")).id
        wait_for(lambda: ledger.reached(unattended, 2))
        plane.kill()
        ledger.release(unattended, 2)
        wait_for(lambda: ledger.reached(widowed, 2))
        chance.choice(train_workers()).kill()
        ledger.release(widowed, 2)
        wait_for(lambda: ledger.reached(orphaned, 2))
        plane.start()
        plane.wait_for_step(job_id, widowed)
        orphans = train_workers()
        _driver(job_id).kill()
        psutil.wait_procs(orphans, timeout=60)  # Ray ends them; a worker released earlier would run one more step
        ledger.release(orphaned, 2)
        job = plane.client.jobs.wait(job_id, timeout=300)

        assert (job.status, job.attempt) == ("succeeded", 2)
        assert [point.step for point in plane.client.jobs.metrics(job_id)] == list(range(1, TOTAL_STEPS + 1))
    finally:
        plane.stop()
    begins = [starts(store, attempt=attempt, job_id=job_id) for attempt in (1, 2)]
    assert [len(steps) for steps in begins] == [2, 1]
    assert begins[0][0] == 0 <= begins[0][1] <= widowed <= orphaned
    assert begins[0][1] <= begins[1][0] <= orphaned
    weights = final_weights(store, tmp_path / "checkpoint", job_id=job_id)
    assert_equal_bit_for_bit(weights, uninterrupted)


def _driver(job_id: str) -> psutil.Process:
    """Return the entrypoint process of the job's attempt, which Ray started."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if {"tests.support.ledger", job_id} <= set(process.cmdline()):
                return process
    raise AssertionError("the driver is not there")
