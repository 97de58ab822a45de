"""A sweep on a real Ray: every trial is trained and measured, the best is published, and nothing runs twice."""

import json
import threading
from pathlib import Path

import pytest

from swiftkv_platform.contract.attempts import AttemptId, AttemptRequest
from swiftkv_platform.contract.row_results import load_rows
from swiftkv_platform.specs import JobSpec, SweepSpec
from swiftkv_platform.storage.artifacts import fetch_directory
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import open_store
from tests.integration.conftest import wait_for

pytestmark = [pytest.mark.integration("a sweep of two trials"), pytest.mark.timeout(600)]

JOB, STEPS, ENDLESS = "job_1", 3, 100_000
FIRST, SECOND = AttemptId(JOB, 1), AttemptId(JOB, 2)


def sweep_spec(teacher: Path, corpus: Path) -> JobSpec:
    rows = {"name": "own", "metric": "likelihood", "max_tokens": 4}
    return JobSpec.model_validate(
        {
            "name": "tiny",
            "model": {"name_or_path": str(teacher), "dtype": "float32"},
            "swiftkv": {"num_key_value_layers": 3, "calibration_tokens": 1024},
            "data": {"sources": [{"name_or_path": str(corpus)}], "max_length": 96, "validation_fraction": 0.1},
            "training": {"max_steps": STEPS, "batch_size": 2, "guard": None},  # let a learning rate ruin its trial
            "optimizer": {"warmup_ratio": 0.0},
            "resources": {"num_workers": 1},
            "evaluation": {
                "max_kl": 100.0,
                "continuations": 2,
                "rows": [rows | {"source": {"name_or_path": str(corpus), "sample_count": 3}}],
            },
            "sweep": {"learning_rate": [1e-3, 1e30], "max_concurrent": 2},
            "tracking": {"wandb": {"mode": "disabled"}},
        }
    )


@pytest.mark.usefixtures("cluster")
def test_a_sweep_publishes_its_choice_and_repeats_no_trial(tiny_teacher: Path, tmp_path: Path) -> None:
    """One of two learning rates makes the loss infinite: a result of the sweep, not a failure of the job. The first
    attempt ends after it has published and before it says so."""
    from swiftkv_platform.jobs.attempt.events import EventReporter
    from swiftkv_platform.jobs.distill import run_attempt
    from swiftkv_platform.jobs.sweep import run_sweep

    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"def add_{i}(x):\n    return x + {i}\n"}) + "\n" for i in range(80)))
    store, spec = open_store(str(tmp_path / "store")), sweep_spec(tiny_teacher, corpus)
    attempts = AttemptStore(store)

    first = AttemptRequest(job_id=JOB, attempt=1, spec=spec, run_id="run")
    run_sweep(store, first, EventReporter(store, first.attempt_id, "driver"))

    manifest = fetch_directory(store, FIRST.artifact_prefix, tmp_path / "artifact")
    sweep = json.loads((tmp_path / "artifact" / "sweep.json").read_text())
    good, bad = sweep["points"]
    assert (sweep["recommended"], good["name"], bad["name"]) == ("lr0.001", "lr0.001", "lr1e+30")
    assert good["report"] == manifest.metrics == json.loads((tmp_path / "artifact" / "evaluation.json").read_text())
    assert bad["report"] is None
    assert "learning_rate" in bad["error"]
    assert manifest.lineage["spec"]["optimizer"]["learning_rate"] == 1e-3
    assert (manifest.lineage["job_id"], manifest.lineage["attempt"], manifest.lineage["trial"]) == (
        JOB,
        1,
        "tiny-lr0.001",
    )
    [task] = manifest.metrics["tasks"]
    assert len(load_rows(store.get_bytes(FIRST.row_results_key(task["row_results"])))) == 3
    _assert_it_is_the_trained_student(tmp_path, manifest.metrics["distilled"]["kl"], corpus)
    _assert_steps_count_through_the_trials(attempts)

    assert run_attempt(store, AttemptRequest(job_id=JOB, attempt=2, spec=spec, run_id="run")) is None

    again = [stored.event for stored in attempts.read_events(SECOND, {})]
    assert not [event for event in again if event.type == "metrics"], "a trial ran again"
    second = attempts.read_artifact_manifest(SECOND)
    assert store.get_bytes(SECOND.row_results_key(task["row_results"])) == store.get_bytes(
        FIRST.row_results_key(task["row_results"])
    ), "the model's attempt has them, wherever the trial was measured"
    assert second is not None
    assert second.metrics == manifest.metrics
    weights = "model.safetensors"
    assert second.files[weights] == manifest.files[weights]
    left = [info.key for info in store.list(f"jobs/{JOB}") if "/checkpoints/" in info.key or "/data/" in info.key]
    assert left == []


@pytest.mark.soak("two attempts of a sweep more")
@pytest.mark.usefixtures("cluster")
def test_a_paused_sweep_goes_on_from_the_checkpoints_of_its_trials(tiny_teacher: Path, tmp_path: Path) -> None:
    """The pause comes long before the last step; the second attempt's spec asks for only a few more steps than were
    done."""
    from swiftkv_platform.jobs.distill import run_attempt

    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": f"def add_{i}(x):\n    return x + {i}\n"}) + "\n" for i in range(80)))
    store, spec = open_store(str(tmp_path / "store")), sweep_spec(tiny_teacher, corpus)
    spec = spec.model_copy(update={"sweep": SweepSpec(learning_rate=(1e-3, 2e-3), max_concurrent=2)})
    attempts = AttemptStore(store)

    def asking_for(steps: int) -> JobSpec:
        return spec.model_copy(update={"training": spec.training.model_copy(update={"max_steps": steps})})

    def pause() -> None:
        wait_for(lambda: any(stored.event.type == "metrics" for stored in attempts.read_events(FIRST, {})))
        attempts.request_pause(FIRST)

    watcher = threading.Thread(target=pause)
    watcher.start()
    first = AttemptRequest(job_id=JOB, attempt=1, spec=asking_for(ENDLESS), run_id="run")
    assert run_attempt(store, first) is None
    watcher.join()

    assert _messages(attempts, 1)[-1] == "paused"
    assert attempts.read_artifact_manifest(FIRST) is None
    done = [0, 0]
    for stored in attempts.read_events(FIRST, {}):
        for point in stored.event.data["points"] if stored.event.type == "metrics" else ():
            done[point["trial"]] = max(done[point["trial"]], point["step"] - point["trial"] * ENDLESS)
    assert max(done) > 0
    second = AttemptRequest(job_id=JOB, attempt=2, spec=asking_for(max(done) + STEPS), run_id="run")
    assert run_attempt(store, second) is None
    begun = [int(said.split()[-1]) for said in _messages(attempts, 2) if "training starts at step" in said]
    assert sorted(begun) == sorted(done)
    assert attempts.read_artifact_manifest(SECOND) is not None


def _messages(attempts: AttemptStore, attempt: int) -> list[str]:
    return [stored.event.message for stored in attempts.read_events(AttemptId(JOB, attempt), {})]


def _assert_it_is_the_trained_student(tmp_path: Path, kl: float, corpus: Path) -> None:
    from transformers import AutoModelForCausalLM

    import swiftkv_platform.model  # noqa: F401 (registers the classes)
    from swiftkv_platform.data.preparation import prepare_data
    from swiftkv_platform.evaluation.quality import evaluate
    from swiftkv_platform.jobs.worker.setup import load_tokenizer

    artifact, rows = tmp_path / "artifact", tmp_path / "rows"
    spec = sweep_spec(artifact, corpus)
    rows.mkdir()
    data = prepare_data(
        spec.data, load_tokenizer(spec, str(artifact)), rows, seed=0, with_steering=True, mask_prompts=True
    )
    student = AutoModelForCausalLM.from_pretrained(artifact)
    assert evaluate(student, data.held_out, max_tokens=65536, batch_size=4).student.kl == pytest.approx(kl, rel=1e-4)


def _assert_steps_count_through_the_trials(attempts: AttemptStore) -> None:
    events = [stored.event for stored in attempts.read_events(FIRST, {}) if stored.event.type == "metrics"]
    steps = sorted(point["step"] for event in events for point in event.data["points"])
    assert {event.data["total_steps"] for event in events} == {2 * STEPS}
    assert steps[:STEPS] == [1, 2, 3]
    assert all(step > STEPS for step in steps[STEPS:])
