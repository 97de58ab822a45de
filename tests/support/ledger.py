"""An entrypoint of attempts that records the samples which every step of every worker trained on, as the losses receive
them, and the node that prepared the job.

    python -m tests.support.ledger --job-id ID --attempt N --store URI

It runs `jobs.distill` with two of the trainer's calls wrapped. The job's metadata names the ledger's directory
(`ledger`) and the steps after which training waits until the test releases it (`hold`, by number of workers: `2:7
1:14`). With several workers all but rank 0 wait, so that rank 0 waits for them in the middle of the next step.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import ray
import ray.train

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.distillation.checkpoint import broadcast_from_rank_0
from swiftkv_platform.distillation.steering import TrainingProgress
from swiftkv_platform.distillation.strategy import Strategy
from swiftkv_platform.distillation.trainer import StepMetrics, Trainer
from swiftkv_platform.jobs import distill, driver, ray_train
from swiftkv_platform.jobs.attempt.stored import StoredInputs
from swiftkv_platform.jobs.driver import prepare_run as prepare_job
from swiftkv_platform.jobs.values import RunPlan, TrainingResult, WorkerConfig
from swiftkv_platform.jobs.worker import train
from swiftkv_platform.specs import JobSpec


@dataclass(frozen=True)
class Entry:
    """One worker's part of a step."""

    start: float
    """Unix seconds when the workers began, the same for all of them."""
    step: int
    """Number of steps done, including this one."""
    rank: int
    world_size: int
    samples: list[list[int]]
    """Token ids of the samples that the losses counted."""


@dataclass(frozen=True)
class Ledger:
    directory: Path

    @classmethod
    def of(cls, spec: JobSpec) -> Ledger:
        return cls(Path(spec.metadata["ledger"]))

    def write(self, entry: Entry) -> None:
        partial = self.directory / f".{uuid4().hex}"
        partial.write_text(json.dumps(asdict(entry)))
        partial.rename(self.directory / f"{uuid4().hex}.json")

    def entries(self) -> list[Entry]:
        """Return all entries so far, including steps that were lost."""
        return [Entry(**json.loads(path.read_text())) for path in self.directory.glob("*.json")]

    def reached(self, step: int, world_size: int) -> bool:
        return any((entry.step, entry.world_size) == (step, world_size) for entry in self.entries())

    def timeline(self) -> dict[int, list[Entry]]:
        """Return the entries that led to the final weights, by step: a later start replaces the steps that it
        repeats."""
        by_start: dict[float, list[Entry]] = {}
        for entry in self.entries():
            by_start.setdefault(entry.start, []).append(entry)
        steps: dict[int, list[Entry]] = {}
        for _, entries in sorted(by_start.items()):
            first = min(entry.step for entry in entries)
            steps = {step: shares for step, shares in steps.items() if step < first}
            for entry in entries:
                steps.setdefault(entry.step, []).append(entry)
        return steps

    @property
    def prepared_on(self) -> str:
        """Id of the node that prepared the job."""
        return (self.directory / "prepared-on").read_text()

    def release(self, step: int, world_size: int) -> None:
        self._hold(step, world_size).touch()

    def wait(self, spec: JobSpec, step: int, world_size: int) -> None:
        if f"{world_size}:{step}" in spec.metadata.get("hold", "").split():
            while not self._hold(step, world_size).exists():
                time.sleep(0.05)

    def _hold(self, step: int, world_size: int) -> Path:
        return self.directory / f"hold-{world_size}-{step}.released"


def prepare_run(request: AttemptRequest, store_uri: str) -> tuple[RunPlan, StoredInputs]:
    """Call `prepare_run` of `swiftkv_platform.jobs.driver`, and record the node that it runs on."""
    (Ledger.of(request.spec).directory / "prepared-on").write_text(ray.get_runtime_context().get_node_id())
    return prepare_job(request, store_uri)


def train_loop_per_worker(config: dict[str, WorkerConfig]) -> TrainingResult:
    """Call the train loop of `swiftkv_platform.jobs.worker.train`, and write the ledger."""
    spec = config["worker"].request.spec
    ledger, context = Ledger.of(spec), ray.train.get_context()
    rank, world_size, began = context.get_world_rank(), context.get_world_size(), broadcast_from_rank_0(time.time)
    seen: list[list[int]] = []
    call, step = Strategy.__call__, Trainer.train_step

    def recorded_call(self: Strategy, batch: Any, sample_lengths: Any) -> Any:
        assert sample_lengths is not None, "the texts of these jobs share no prompt"
        padding = batch["input_ids"].shape[1] - sum(sample_lengths)
        token_ids, counts = (batch[name][0].split([*sample_lengths, padding]) for name in ("input_ids", "loss_mask"))
        seen.extend(ids.tolist() for ids, counted in zip(token_ids, counts, strict=True) if counted.any())
        return call(self, batch, sample_lengths)

    def recorded_step(self: Trainer, progress: TrainingProgress) -> StepMetrics:
        if rank or world_size == 1:
            ledger.wait(spec, progress.step, world_size)
        seen.clear()
        metrics = step(self, progress)
        ledger.write(Entry(began, metrics.step, rank, world_size, seen))
        return metrics

    with patch.object(Strategy, "__call__", recorded_call), patch.object(Trainer, "train_step", recorded_step):
        return train.train_loop_per_worker(config)


def main() -> int:
    with (
        patch.object(driver, "prepare_run", prepare_run),
        patch.object(ray_train, "train_loop_per_worker", train_loop_per_worker),
    ):
        return distill.main()


if __name__ == "__main__":
    # Ray finds functions by their module's name, which must not be `__main__`.
    sys.exit(importlib.import_module("tests.support.ledger").main())
