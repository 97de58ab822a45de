"""The distillation loop: optimizer steps, measurements and checkpoints. Independent of cluster, object store and
tracker.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from swiftkv_platform.contract.attempts import StopRequest
from swiftkv_platform.contract.events import CourseCode, TriedRate
from swiftkv_platform.data.packing import PackedRows, batch_rows, rank_rows
from swiftkv_platform.distillation.checkpoint import Checkpointer
from swiftkv_platform.distillation.course import (
    Course,
    CourseNote,
    Progress,
    Turn,
    chosen_step,
    default_warmup_steps,
    first_rate,
    highest_rate,
    learning_rate,
    measured,
    rate_note,
    search,
    turn_notes,
    went_back,
)
from swiftkv_platform.distillation.fork import Fork
from swiftkv_platform.distillation.parallel import DataParallel, FullySharded, Parallel, Weights
from swiftkv_platform.errors import LossNotFiniteError
from swiftkv_platform.model.packed_attention import TOKENS_MULTIPLE, to_tensors
from swiftkv_platform.planning.steering import RunSchedule, num_measured_rows, steps_of_trial
from swiftkv_platform.specs import JobSpec, TrainingSpec, ValidationSpec


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, the same on every worker."""

    step: int
    """Steps done, this one included."""
    tokens: int
    """Positions the loss has counted since the run began."""
    losses: dict[str, float]
    """`loss`, which is minimised, and its terms before weighting; means over the positions that count."""
    lr: float
    grad_norm: float
    """Norm before clipping."""
    tokens_per_second: float
    world_size: int
    held_out_kl: float | None = None
    """Held-out KL after the step, if measured."""

    def point(self) -> dict[str, float]:
        """A flat mapping, for events and trackers."""
        held_out = {} if self.held_out_kl is None else {"held_out_kl": self.held_out_kl}
        return {
            "step": self.step,
            "tokens": self.tokens,
            **self.losses,
            **held_out,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
            "tokens_per_second": self.tokens_per_second,
            "world_size": self.world_size,
        }


class TrainerListener(Protocol):
    """Callbacks of a run, called on every worker; they also deliver stop requests."""

    def on_start(self, progress: Progress) -> None:
        """Called when the run begins, at step 0 or at its newest checkpoint."""

    def on_step(self, metrics: StepMetrics) -> None:
        """Called after each step."""

    def on_course(self, note: CourseNote) -> None:
        """Called when the learning rate is found, and when training goes back or ends."""

    def stop_request(self) -> StopRequest:
        """Return the stop request that this worker has received since the last step."""


class Trainer:
    """Trains the student of `parallel` on `rows`; every worker runs one, over the same rows.

    Args:
        total_steps: last step of the run and of the learning rate schedule.
        held_out: rows that steer the run, see `course`, and that the evaluation does not report; None: train to the
            last step regardless of the held-out KL.
    """

    def __init__(
        self,
        parallel: Parallel,
        rows: PackedRows,
        checkpointer: Checkpointer,
        spec: JobSpec,
        *,
        total_steps: int,
        listener: TrainerListener,
        held_out: PackedRows | None = None,
    ) -> None:
        self._parallel = parallel
        self._rows = rows
        self._checkpointer = checkpointer
        self._spec = spec
        self._total_steps = total_steps
        self._schedule = RunSchedule.of(spec, total_steps, measures=held_out is not None)
        self._listener = listener
        self._held_out: HeldOut | None = None
        if held_out is not None and self._schedule.measured_every is not None:
            self._held_out = HeldOut(parallel, held_out, spec.training, every_steps=self._schedule.measured_every)

    def run(self) -> StopRequest:
        """Train from the newest checkpoint to the end, or until a stop request; the progress is in a checkpoint either
        way.

        Returns the stop request that ended the run, `NONE` at its end.

        Raises:
            LossNotFiniteError: loss or gradient norm is not finite; raised on every worker, and checkpoints stay.
            StorageError: the last checkpoint cannot be stored, or the state to go back to is missing.
        """
        progress = self._checkpointer.restore()
        self._listener.on_start(progress)
        stop_request = StopRequest.NONE
        try:
            progress = self._begin(progress)
            while not self._is_over(progress) and stop_request < StopRequest.LEAVE:
                progress = self._advance(progress)
                stop_request = StopRequest(self._parallel.agree(self._listener.stop_request()))
                is_best = progress.course.best_step == progress.step
                if is_best or self._schedule.is_due(progress.step) or stop_request or self._is_over(progress):
                    self._checkpointer.save(progress)
        except BaseException as error:
            try:
                self._checkpointer.finish()
            except Exception as unstored:  # the error that ended training matters more
                error.add_note(f"The last checkpoint was not stored: {unstored}")
            raise
        self._checkpointer.finish()
        return StopRequest.NONE if self._is_over(progress) else stop_request

    def _is_over(self, progress: Progress) -> bool:
        return progress.step >= self._total_steps or bool(progress.course.ended)

    def _begin(self, progress: Progress) -> Progress:
        """Find warm-up and rate, measure the start and save it. Does nothing if the run is resumed after that."""
        if progress.course.is_measured or self._is_over(progress):
            return progress
        if progress.step == 0:
            warmup_steps = default_warmup_steps(self._spec.optimizer, self._total_steps)
            progress = replace(progress, course=replace(progress.course, warmup_steps=warmup_steps))
        if self._held_out is None:
            return progress
        kl = self._held_out.measure()
        course = measured(progress.course, kl, progress.step, self._spec.training).course
        if progress.step == 0 and self._spec.optimizer.rate_search:
            course = self._settle_rate(course, self._held_out)
        progress = replace(progress, course=course, held_out_kl=kl)
        self._checkpointer.save(progress)
        return progress

    def _settle_rate(self, course: Course, held_out: HeldOut) -> Course:
        """Search for the peak learning rate; in runs too short for a search, bound it by the size of the trained
        weights."""
        asked, num_steps = self._spec.optimizer.learning_rate, steps_of_trial(self._total_steps)
        assert asked is not None, "settled before training, see specs.job.resolve_defaults"
        highest = highest_rate(self._parallel.matrices())
        rate, tried = first_rate(asked, highest, self._spec.distillation.trainable), list[TriedRate]()
        if num_steps is not None:
            rate, tried = search(rate, course.start_kl, self._trial(course, num_steps, held_out), highest=highest)
        course = replace(course, peak_rate=rate)
        if tried or rate < asked:
            self._listener.on_course(rate_note(course, tried))
        return course

    def _trial(self, course: Course, num_steps: int, held_out: HeldOut) -> Callable[[float], float]:
        """Return a function that trains for a few steps at a rate, measures the held-out KL, and restores the start."""
        put_back = self._parallel.remember()

        def held_out_kl(rate: float) -> float:
            trial = Progress(course=replace(course, peak_rate=rate))
            try:
                while trial.step < num_steps:
                    done = self.train_step(trial)
                    trial = replace(trial, step=done.step, tokens=done.tokens)
                return held_out.measure()
            except LossNotFiniteError:  # raised on every worker
                return math.inf
            finally:
                put_back()

        return held_out_kl

    def _advance(self, progress: Progress) -> Progress:
        """Take a step, measure if it is due, and act on the held-out KL."""
        training = self._spec.training
        try:
            metrics = self.train_step(progress)
        except LossNotFiniteError:
            course = progress.course
            if training.guard is None or not course.is_measured or course.num_rollbacks >= training.guard.max_rollbacks:
                raise
            turn = went_back(course, CourseCode.LOSS_NOT_FINITE, progress.step, training)
            return self._take(turn, math.nan, progress)
        progress = replace(progress, step=metrics.step, tokens=metrics.tokens, held_out_kl=None)
        if self._held_out is None or not self._schedule.is_measured(progress.step):
            self._listener.on_step(metrics)
            return progress
        kl = self._held_out.measure()
        self._listener.on_step(replace(metrics, held_out_kl=kl))
        step, is_last = progress.step, progress.step >= self._total_steps
        may_be_best = self._schedule.may_be_best(step)
        turn = measured(progress.course, kl, step, training, is_last=is_last, may_be_best=may_be_best)
        return self._take(turn, kl, progress)

    def _take(self, turn: Turn, kl: float, progress: Progress) -> Progress:
        """Act on a turn. All workers have the same numbers and so do the same."""
        course = turn.course
        if turn.rollback is not None:
            self._checkpointer.go_back(course.best_step)
        peak = self._spec.optimizer.learning_rate if math.isnan(course.peak_rate) else course.peak_rate
        rate, chosen = (peak or 0.0) * course.rate_scale, chosen_step(course, self._spec.training)
        for note in turn_notes(turn, kl, progress.step, rate, chosen):
            self._listener.on_course(note)
        return replace(progress, course=course, held_out_kl=kl if turn.rollback is None else course.best_kl)

    def train_step(self, progress: Progress) -> StepMetrics:
        """One optimizer step over `training.batch_size` rows, shared by the workers and cut into micro batches.

        The loss is the mean over the positions that count in the whole batch, so the split into micro batches does not
        affect it.
        """
        started = time.perf_counter()
        parallel, weights = self._parallel, self._parallel.loss_weights
        micro_batches = self._micro_batches(progress.step)
        masks = [batch["loss_mask"].sum() for batch, _ in micro_batches]
        num_counted = int(parallel.sum(torch.stack(masks).sum()))
        scale = parallel.world_size / max(num_counted, 1)  # gradients are averaged over the workers

        totals = torch.zeros(len(weights), device=parallel.device)
        for number, (batch, sample_lengths) in enumerate(micro_batches, start=1):
            with parallel.micro_batch(last=number == len(micro_batches)):
                sums = parallel(batch, sample_lengths)
                loss = torch.stack([weight * scale * sums[name] for name, weight in weights.items()]).sum()
                parallel.backward(loss)
            totals += torch.stack([sums[name].detach() for name in weights])

        means = (parallel.sum(totals) / max(num_counted, 1)).tolist()
        losses = dict(zip(weights, means, strict=True))
        losses = {"loss": sum(weights[name] * mean for name, mean in losses.items()), **losses}
        rate = learning_rate(self._spec.optimizer, progress.step, self._total_steps, progress.course)
        grad_norm = parallel.update(rate)
        self._check_finite(progress.step, losses["loss"], grad_norm)
        return StepMetrics(
            step=progress.step + 1,
            tokens=progress.tokens + num_counted,
            losses=losses,
            lr=rate,
            grad_norm=grad_norm,
            tokens_per_second=num_counted / (time.perf_counter() - started),
            world_size=parallel.world_size,
        )

    def _micro_batches(self, step: int) -> list[MicroBatch]:
        training = self._spec.training
        assert training.batch_size is not None, "settled before training, see specs.job.resolve_defaults"
        batch = batch_rows(len(self._rows), batch_size=training.batch_size, seed=training.seed, step=step)
        return micro_batches(self._parallel, self._rows, batch, training)

    def _check_finite(self, step: int, loss: float, grad_norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        raise LossNotFiniteError(
            f"step {step + 1}: loss {loss}, gradient norm {grad_norm}; try a smaller optimizer.learning_rate, a longer "
            "optimizer.warmup_ratio or model.dtype float32",
            field="optimizer.learning_rate",
            value=self._spec.optimizer.learning_rate,
        )


MicroBatch = tuple[dict[str, Tensor], tuple[int, ...]]
"""Tensors of samples end to end, and the lengths of the samples."""


def micro_batches(
    parallel: Parallel, rows: PackedRows, batch: Sequence[int], training: TrainingSpec
) -> list[MicroBatch]:
    """Return this worker's micro batches of the rows `batch`, each of `micro_batch_size` rows. Every worker has the
    same number: a worker with a smaller share adds a row that no loss counts."""
    mine = rank_rows(batch, parallel.data_rank, parallel.data_size)
    places = [*mine, *batch[: -(-len(batch) // parallel.data_size) - len(mine)]]
    if training.compile:  # compiled layers take batches of one size
        places += [batch[0]] * (-len(places) % training.micro_batch_size)
    made = []
    for start in range(0, len(places), training.micro_batch_size):
        chosen = places[start : start + training.micro_batch_size]
        step = math.lcm(parallel.sequence_parallel_size, TOKENS_MULTIPLE)
        multiple = len(chosen) * rows.max_length if training.compile else step
        num_counted = max(len(mine) - start, 0)
        arrays, lengths = rows.end_to_end(chosen, multiple=multiple, num_counted=num_counted)
        tensors = to_tensors(arrays)
        tensors["loss_mask"] = parallel.own_positions(tensors["loss_mask"])
        made.append((tensors, lengths))
    return made


class HeldOut:
    """Measures the held-out `rows` that steer a run.

    Args:
        every_steps: steps between two measurements.
    """

    def __init__(self, parallel: Parallel, rows: PackedRows, training: TrainingSpec, *, every_steps: int) -> None:
        assert training.validation is not None, "nothing is measured without"
        assert training.batch_size is not None, "settled before training, see specs.job.resolve_defaults"
        self._parallel, self._rows, self._training = parallel, rows, training
        self.chosen = measured_rows(rows, training.validation, training.batch_size * every_steps)

    def measure(self) -> float:
        """Mean KL(teacher || student) at temperature 1 over the positions that count, in nats; with `objective: lm` the
        loss on the next token. Collective."""
        sums = torch.zeros(2, dtype=torch.float64)
        for batch, lengths in micro_batches(self._parallel, self._rows, self.chosen, self._training):
            counted = batch["loss_mask"].sum()
            measured = self._parallel.measure(batch, lengths)
            sums += torch.stack([measured.detach().double().cpu(), counted.double().cpu()])
        total, num_counted = self._parallel.sum(sums).tolist()
        return total / num_counted if num_counted else math.nan


def measured_rows(rows: PackedRows, spec: ValidationSpec, rows_between: int) -> list[int]:
    """Evenly spaced rows, since packing sorts them by the length of their samples."""
    number = min(num_measured_rows(spec, rows.num_tokens / len(rows), rows_between), len(rows))
    return [int(i) for i in np.linspace(0, len(rows) - 1, number).round()]


def parallelize(
    fork: Fork, spec: JobSpec, *, dtype: torch.dtype, device: torch.device, weights: Weights | None = None
) -> Parallel:
    """Spread `fork` over the default process group as `spec.sharding` says, with the optimizer of `spec.optimizer`.

    Args:
        dtype: compute dtype.
        weights: source of the values of a fork on the meta device; FSDP2 and ZeRO stage 3 only.
    """
    match spec.sharding.strategy:
        case "ddp":
            return DataParallel(fork, spec, dtype=dtype, device=device)
        case "fsdp2":
            return FullySharded(fork, spec, weights, dtype=dtype, device=device)
        case "deepspeed":
            from swiftkv_platform.distillation.zero import ZeRO  # loads DeepSpeed, which takes seconds

            return ZeRO(fork, spec, weights, dtype=dtype, device=device)
