"""Start, watch and inspect attempts of a small distillation job, as a Ray Job runs them."""

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from swiftkv_platform.contract.attempts import AttemptId, AttemptRequest
from swiftkv_platform.contract.events import AttemptEvent
from swiftkv_platform.distillation.partial_reads import CheckpointTensors
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.artifacts import fetch_directory
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import ObjectStore

JOB = "job_1"
TOTAL_STEPS = 36
ONE_WORKER = {"num_workers": 1}


def job_spec(teacher: Path | str, corpus: Path | str, *, max_steps: int | None, **sections: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "tiny",
            "model": {"name_or_path": str(teacher), "dtype": "float32"},
            "swiftkv": {"key_value_group_size": 2, "calibration_tokens": 1 << 13, "early_exit": True},
            "data": {"sources": [{"name_or_path": str(corpus)}], "max_length": 96, "validation_fraction": 0.1},
            "training": {"max_steps": max_steps, "batch_size": 4, "micro_batch_size": 2},
            "optimizer": {"learning_rate": 3e-3},
            "checkpoint": {"every_steps": 3},
            "resources": {"num_workers": 2},
            "tracking": {"wandb": {"mode": "disabled"}},
            **sections,
        }
    )


def start(
    store: ObjectStore, spec: JobSpec, cluster: str, *, attempt: int = 1, module: str = "swiftkv_platform.jobs.distill"
) -> subprocess.Popen[bytes]:
    """Start the attempt's entrypoint as a Ray Job does, or `module` instead."""
    newest = AttemptStore(store).find_newest_checkpoint(JOB, before_attempt=attempt)
    request = AttemptRequest(job_id=JOB, attempt=attempt, spec=spec, resume_from=newest, run_id="run")
    AttemptStore(store).write_request(request)
    command = [sys.executable, "-m", module, "--job-id", JOB, "--attempt", str(attempt), "--store", store.uri]
    return subprocess.Popen(command, env={**os.environ, "RAY_ADDRESS": cluster})


def events(store: ObjectStore, *, attempt: int = 1, job_id: str = JOB) -> list[AttemptEvent]:
    return [stored.event for stored in AttemptStore(store).read_events(AttemptId(job_id, attempt), {})]


def starts(store: ObjectStore, *, attempt: int = 1, job_id: str = JOB) -> list[int]:
    """Return the step at which the attempt's workers began, for each of their starts."""
    said = events(store, attempt=attempt, job_id=job_id)
    return [event.data["step"] for event in said if event.message.startswith("training starts")]


def wait_for_checkpoint(store: ObjectStore, process: subprocess.Popen[bytes]) -> None:
    while not any(event.type == "checkpoint" and event.data["step"] > 0 for event in events(store)):
        assert process.poll() is None, "the job ended before its first checkpoint after a step"
        time.sleep(0.05)


def wait_for_step(store: ObjectStore, process: subprocess.Popen[bytes], step: int, *, attempt: int = 1) -> None:
    while not any(p["step"] >= step for e in events(store, attempt=attempt) for p in e.data.get("points", [])):
        assert process.poll() is None, f"the job ended before step {step}"
        time.sleep(0.05)


def wait_for_starts(store: ObjectStore, process: subprocess.Popen[bytes], number: int) -> None:
    while len(starts(store)) < number:
        assert process.poll() is None, f"the job ended before its workers had begun {number} times"
        time.sleep(0.05)


def final_weights(store: ObjectStore, directory: Path, *, job_id: str = JOB) -> dict[str, torch.Tensor]:
    newest = AttemptStore(store).find_newest_checkpoint(job_id)
    assert newest is not None
    assert f"/step-{TOTAL_STEPS:08d}-" in newest
    fetch_directory(store, newest, directory)
    return dict(CheckpointTensors(directory))


def assert_equal_bit_for_bit(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert actual[name].equal(tensor), name


def train_workers() -> list[psutil.Process]:
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile, or is a zombie
            if "RayTrainWorker" in " ".join(process.cmdline()):
                found.append(process)
    return found
