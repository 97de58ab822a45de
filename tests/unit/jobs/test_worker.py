"""Rank 0's reports of its steps and checkpoints, a worker's utilisation, and the memory of its process."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from swiftkv_platform.contract.attempts import Manifest
from swiftkv_platform.contract.events import SteeringReason
from swiftkv_platform.distillation.steering import SteeringNote, TrainingProgress
from swiftkv_platform.distillation.trainer import StepMetrics
from swiftkv_platform.jobs.values import WorkerConfig
from swiftkv_platform.jobs.worker.prepare import compute_flops_per_token
from swiftkv_platform.jobs.worker.train import Telemetry, _RankZeroListener
from swiftkv_platform.model import convert
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.object_store import ObjectStore
from tests.numerics.distillation_worker import tiny_rows
from tests.support.fakes.object_store import InMemoryObjectStore
from tests.support.tiny_models import random_teacher
from tests.unit.jobs.attempts import UNTRACKED, HangingStore, points, request, said

CPU = torch.device("cpu")
MANIFEST = Manifest(kind="checkpoint", files={}, created_at=0.0)


def spec(**resources: Any) -> JobSpec:
    sections = {
        "data": {"max_length": 100},
        "training": {"batch_size": 8},
        "resources": {"num_workers": 2, **resources},
    }
    return JobSpec.model_validate({"name": "n", **UNTRACKED, **sections})


def step(number: int, *, tokens: int = 1, rate: float = 1.0, **measured: float) -> StepMetrics:
    return StepMetrics(number, tokens, {"loss": 1.0}, 0.1, 1.0, tokens_per_second=rate, world_size=2, **measured)


@contextmanager
def rank_zero(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> Iterator[_RankZeroListener]:
    monkeypatch.setattr("ray.train.torch.get_device", lambda: CPU)
    config = WorkerConfig(request(spec=spec()), store.uri, total_steps=9, prepared=cast("Any", None))
    listener = _RankZeroListener(store, config)
    try:
        yield listener
    finally:
        listener.close()


def test_no_step_waits_for_a_store_that_hangs_nor_for_a_checkpoint_that_does(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HangingStore()
    with rank_zero(store, monkeypatch) as listener:
        store.open.clear()
        listener.on_step(step(1))
        store.reached.wait()
        upload = threading.Thread(target=listener.on_commit, args=("key", MANIFEST, TrainingProgress(1)))
        upload.start()
        for number in range(2, 50):
            listener.on_step(step(number))
        assert said(store) == []  # `on_step` did not wait
        store.open.set()
        upload.join()
    assert [point["step"] for point in points(store)] == list(range(1, 50))


def test_a_checkpoint_comes_after_the_metrics_of_its_steps_and_of_its_measurement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = InMemoryObjectStore()
    with rank_zero(store, monkeypatch) as listener:
        for each in (step(1), step(2), step(3, held_out_kl=0.25)):
            listener.on_step(each)
        listener.on_commit("key", MANIFEST, TrainingProgress(3))
        listener.on_step(step(4))
    told = [event for event in said(store) if event.type in ("metrics", "checkpoint")]
    *before, checkpoint, after = told
    assert [event.type for event in (checkpoint, after)] == ["checkpoint", "metrics"]
    steps = [(point["step"], point.get("held_out_kl")) for event in before for point in event.data["points"]]
    assert steps == [(1, None), (2, None), (3, 0.25)]
    assert [point["step"] for point in after.data["points"]] == [4]


def test_a_step_back_is_a_warning_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemoryObjectStore()
    data = {"action": "rollback", "code": SteeringReason.HELD_OUT_KL_ABOVE_START, "step": 5}
    with rank_zero(store, monkeypatch) as listener:
        listener.on_steering(SteeringNote("back to step 3", data))
    (event,) = said(store, "course")
    assert (event.level, event.message) == ("warn", "back to step 3")
    assert event.data == {**data, "code": "held_out_kl_above_start"}


def test_work_follows_the_positions_that_count() -> None:
    """Each of two workers does half of the work for 200 positions, in half a second."""
    telemetry = Telemetry(spec(peak_flops_per_second=3.2e6), 4000.0, CPU)
    telemetry.start(1000)
    point = telemetry.compute_point(step(1, tokens=1200, rate=400.0))
    assert point["flops_per_second"] == pytest.approx(200 * 4000.0 / 2 / 0.5)
    assert point["mfu"] == pytest.approx(0.25)
    held = torch.ones(1 << 26)
    assert telemetry.compute_point(step(1, tokens=1200, rate=400.0))["memory_bytes"] > max(
        held.nbytes, point["memory_bytes"]
    )
    assert point["memory_bytes"] > 1 << 20
    assert telemetry.compute_point(step(1, tokens=1600, rate=200.0))["mfu"] == pytest.approx(0.125)
    unknown = (Telemetry(spec(), flops, CPU).compute_point(step(1)).keys() for flops in (1000.0, None))
    assert list(unknown) == [{"memory_bytes", "flops_per_second"}, {"memory_bytes"}]


def test_the_arithmetic_is_the_students_own() -> None:
    """A student with fewer layers that compute K and V trains more upper layers: more arithmetic per token."""
    short, long = (convert(random_teacher(), num_key_value_layers=layers).config for layers in (5, 2))
    rows = tiny_rows()
    all_count = replace(rows, samples=replace(rows.samples, loss_mask=np.ones_like(rows.samples.loss_mask)))
    of_short, of_long, of_all = (
        compute_flops_per_token(spec(), config, some)
        for config, some in ((short, rows), (long, rows), (long, all_count))
    )
    assert 1.3 < of_long / of_short < 3
    assert of_long > of_all
    assert of_long * rows.num_counted_tokens < of_all * rows.num_tokens, "positions that do not count skip layers"


KEEP_AND_FREE = """
import os
from pathlib import Path

import torch

from swiftkv_platform.jobs.worker.setup import return_freed_memory


def anonymous_mib():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) >> 10


if os.fork():
    os.wait()
    return_freed_memory()
torch.ones(16 << 18)  # of 16 MiB, freed at once: it raises the bound of glibc, where that may rise
before = anonymous_mib()
large, small = [], []
for _ in range(16):
    large.append(torch.ones(16 << 18))
    small.append(torch.ones(16 << 10))
del large
print(anonymous_mib() - before, flush=True)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library is glibc on Linux alone")
@pytest.mark.soak("processes that import torch")
def test_freed_tensors_are_given_back_to_the_system() -> None:
    """256 MiB of tensors are freed between small ones that stay; by default, glibc would keep all of that memory."""
    done = subprocess.run([sys.executable, "-c", KEEP_AND_FREE], capture_output=True, text=True, check=True)
    kept, given_back = map(int, done.stdout.split())
    assert 128 <= kept <= 320
    assert 0 <= given_back <= 32
