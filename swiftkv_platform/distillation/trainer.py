"""The distillation loop: optimizer steps, validation and checkpoints. Independent of Ray, the object store and
trackers."""

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
from swiftkv_platform.contract.events import SteeringReason, TriedRate
from swiftkv_platform.data.packing import PackedRows, select_batch_rows, select_rank_rows
from swiftkv_platform.distillation.checkpoint import Checkpointer
from swiftkv_platform.distillation.model import DistillationModel
from swiftkv_platform.distillation.steering import (
    SteeringDecision,
    SteeringNote,
    SteeringState,
    TrainingProgress,
    choose_first_trial_rate,
    choose_model_step,
    compute_max_stable_rate,
    decide_after_measurement,
    decide_rollback,
    describe_decision,
    describe_learning_rate,
    get_default_warmup_steps,
    get_learning_rate,
    search_learning_rate,
)
from swiftkv_platform.distillation.strategy import DDPStrategy, FSDP2Strategy, Strategy, WeightSource
from swiftkv_platform.errors import LossNotFiniteError
from swiftkv_platform.model.packed_attention import TOKENS_MULTIPLE, to_tensors
from swiftkv_platform.planning.training import RunSchedule, compute_trial_steps, count_measured_rows
from swiftkv_platform.specs import JobSpec, TrainingSpec, ValidationSpec


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step, the same on every worker."""

    step: int
    """Completed steps, this one included."""
    tokens: int
    """Positions that the loss has counted since the start of the run."""
    losses: dict[str, float]
    """`loss`, which is minimized, and its unweighted terms; means over the counted positions."""
    lr: float
    grad_norm: float
    """Norm before clipping."""
    tokens_per_second: float
    world_size: int
    held_out_kl: float | None = None
    """Held-out KL after the step, if measured."""

    def to_point(self) -> dict[str, float]:
        """Return a flat mapping for events and trackers."""
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

    def on_start(self, progress: TrainingProgress) -> None:
        """Called when the run starts, at step 0 or at its newest checkpoint."""

    def on_step(self, metrics: StepMetrics) -> None:
        """Called after each step."""

    def on_steering(self, note: SteeringNote) -> None:
        """Called when the learning rate is found, on a rollback, and at the end."""

    def poll_stop_request(self) -> StopRequest:
        """Return the stop request that this worker has received since the last step."""


class Trainer:
    """Trains the student of `strategy` on `rows`. Every worker runs one, over the same rows.

    Args:
        total_steps: last step of the run and of the learning rate schedule.
        validation_rows: rows for rollbacks, early stopping and the choice of the model; the evaluation reports other
            rows. None: train to the last step, whatever the held-out KL.
    """

    def __init__(
        self,
        strategy: Strategy,
        rows: PackedRows,
        checkpointer: Checkpointer,
        spec: JobSpec,
        *,
        total_steps: int,
        listener: TrainerListener,
        validation_rows: PackedRows | None = None,
    ) -> None:
        self._strategy = strategy
        self._rows = rows
        self._checkpointer = checkpointer
        self._spec = spec
        self._total_steps = total_steps
        self._schedule = RunSchedule.from_spec(spec, total_steps, measures=validation_rows is not None)
        self._listener = listener
        self._validation: ValidationSet | None = None
        if validation_rows is not None and (interval := self._schedule.measurement_interval) is not None:
            self._validation = ValidationSet(strategy, validation_rows, spec.training, every_steps=interval)

    def run(self) -> StopRequest:
        """Train from the newest checkpoint to the last step, or until a stop request. Either way, a checkpoint has the
        progress.

        Returns the stop request that ended the run; `NONE` after the last step.

        Raises:
            LossNotFiniteError: loss or gradient norm is not finite; raised on every worker, and checkpoints stay.
            StorageError: the last checkpoint cannot be stored, or the target of a rollback is missing.
        """
        # 1. resume from the newest checkpoint
        progress = self._checkpointer.restore()
        self._listener.on_start(progress)
        stop_request = StopRequest.NONE
        try:
            # 2. at step 0: warm-up, first validation, search of the learning rate
            progress = self._validate_and_set_learning_rate(progress)
            # 3. train, validate and save
            while not self._is_finished(progress) and stop_request < StopRequest.LEAVE:
                progress = self._train_and_validate(progress)
                stop_request = StopRequest(self._strategy.all_reduce_max(self._listener.poll_stop_request()))
                is_best = progress.steering.best_step == progress.step
                if (
                    is_best
                    or self._schedule.is_checkpoint_due(progress.step)
                    or stop_request
                    or self._is_finished(progress)
                ):
                    self._checkpointer.save(progress)
        except BaseException as error:
            try:
                self._checkpointer.finish()
            except Exception as storage_error:  # the error that ended training matters more
                error.add_note(f"The last checkpoint was not stored: {storage_error}")
            raise
        # 4. wait for the last upload
        self._checkpointer.finish()
        return StopRequest.NONE if self._is_finished(progress) else stop_request

    def _is_finished(self, progress: TrainingProgress) -> bool:
        return progress.step >= self._total_steps or bool(progress.steering.ended)

    def _validate_and_set_learning_rate(self, progress: TrainingProgress) -> TrainingProgress:
        """Before the first step: validate the student, set warm-up and peak learning rate, and save a checkpoint. Does
        nothing if the run resumes later."""
        if progress.steering.is_measured or self._is_finished(progress):
            return progress
        if progress.step == 0:
            warmup_steps = get_default_warmup_steps(self._spec.optimizer, self._total_steps)
            progress = replace(progress, steering=replace(progress.steering, warmup_steps=warmup_steps))
        if self._validation is None:
            return progress
        kl = self._validation.measure_kl()
        state = decide_after_measurement(progress.steering, kl, progress.step, self._spec.training).state
        if progress.step == 0 and self._spec.optimizer.rate_search:
            state = self._find_peak_rate(state, self._validation)
        progress = replace(progress, steering=state, held_out_kl=kl)
        self._checkpointer.save(progress)
        return progress

    def _find_peak_rate(self, state: SteeringState, validation: ValidationSet) -> SteeringState:
        """Search for the peak learning rate. In runs too short for a search, limit it to `compute_max_stable_rate`."""
        spec_rate, num_steps = self._spec.optimizer.learning_rate, compute_trial_steps(self._total_steps)
        assert spec_rate is not None, "set before training by specs.job.resolve_model_defaults"
        max_rate = compute_max_stable_rate(self._strategy.gather_matrices())
        trials = list[TriedRate]()
        rate = choose_first_trial_rate(spec_rate, max_rate, self._spec.distillation.trainable)
        if num_steps is not None:
            run_trial = self._make_trial(state, num_steps, validation)
            rate, trials = search_learning_rate(rate, state.start_kl, run_trial, max_rate=max_rate)
        state = replace(state, peak_rate=rate)
        if trials or rate < spec_rate:
            self._listener.on_steering(describe_learning_rate(state, trials))
        return state

    def _make_trial(self, state: SteeringState, num_steps: int, validation: ValidationSet) -> Callable[[float], float]:
        """Return a function that trains `num_steps` steps at a rate, returns the held-out KL, and restores the
        weights."""
        restore_weights = self._strategy.snapshot_weights()

        def run_trial(rate: float) -> float:
            trial = TrainingProgress(steering=replace(state, peak_rate=rate))
            try:
                while trial.step < num_steps:
                    metrics = self.train_step(trial)
                    trial = replace(trial, step=metrics.step, tokens=metrics.tokens)
                return validation.measure_kl()
            except LossNotFiniteError:  # raised on every worker
                return math.inf
            finally:
                restore_weights()

        return run_trial

    def _train_and_validate(self, progress: TrainingProgress) -> TrainingProgress:
        """Take a step, validate if it is due, and act on the held-out KL."""
        training, state = self._spec.training, progress.steering
        # 1. optimizer step; roll back if the loss is not finite
        try:
            metrics = self.train_step(progress)
        except LossNotFiniteError:
            if training.guard is None or not state.is_measured or state.num_rollbacks >= training.guard.max_rollbacks:
                raise
            decision = decide_rollback(state, SteeringReason.LOSS_NOT_FINITE, progress.step, training)
            return self._apply_decision(decision, math.nan, progress)
        progress = replace(progress, step=metrics.step, tokens=metrics.tokens, held_out_kl=None)
        if self._validation is None or not self._schedule.is_measured(progress.step):
            self._listener.on_step(metrics)
            return progress
        # 2. held-out KL
        kl = self._validation.measure_kl()
        self._listener.on_step(replace(metrics, held_out_kl=kl))
        # 3. continue, roll back or end
        step, is_last = progress.step, progress.step >= self._total_steps
        has_checkpoint = self._schedule.may_be_best(step)
        decision = decide_after_measurement(state, kl, step, training, is_last=is_last, has_checkpoint=has_checkpoint)
        return self._apply_decision(decision, kl, progress)

    def _apply_decision(self, decision: SteeringDecision, kl: float, progress: TrainingProgress) -> TrainingProgress:
        """Act on a decision. Collective: all workers make the same decision from the same numbers."""
        state = decision.state
        if decision.rollback is not None:
            self._checkpointer.roll_back(state.best_step)
        peak = self._spec.optimizer.learning_rate if math.isnan(state.peak_rate) else state.peak_rate
        rate, chosen = (peak or 0.0) * state.rate_scale, choose_model_step(state, self._spec.training)
        for note in describe_decision(decision, kl, progress.step, rate, chosen):
            self._listener.on_steering(note)
        return replace(progress, steering=state, held_out_kl=kl if decision.rollback is None else state.best_kl)

    def train_step(self, progress: TrainingProgress) -> StepMetrics:
        """Run one optimizer step of the distillation (paper, section 3.3) over `training.batch_size` rows.

        With `objective: logits`, the minimized loss is the mean over the counted positions of the whole batch of

            L = logits_loss_weight * tau^2 KL(p_teacher || p_student)      at temperature tau
              + hidden_loss_weight * mean((h_teacher - h_student)^2)       over the features of a layer's output
              + exit_loss_weight   * tau^2 KL(p_teacher || p_exit)         of the early-exit head, if there is one

        The teacher is the student's own frozen weights, and only the parameters of `distillation.trainable` get
        gradients: by default the projections of Q, K and V in the layers >= l.
        """
        started = time.perf_counter()
        strategy, weights = self._strategy, self._strategy.loss_weights

        # 1. this worker's micro batches, and the counted positions of all workers
        micro_batches = self._build_micro_batches(progress.step)
        masks = [batch["loss_mask"].sum() for batch, _ in micro_batches]
        num_counted = int(strategy.sum_over_workers(torch.stack(masks).sum()))
        scale = strategy.world_size / max(num_counted, 1)  # gradients are averaged over the workers

        # 2. teacher and student forward, losses and backward, see `DistillationModel.forward`
        totals = torch.zeros(len(weights), device=strategy.device)
        for number, (batch, sample_lengths) in enumerate(micro_batches, start=1):
            with strategy.run_micro_batch(last=number == len(micro_batches)):
                loss_sums = strategy(batch, sample_lengths)
                loss = torch.stack([weight * scale * loss_sums[name] for name, weight in weights.items()]).sum()
                strategy.backward(loss)
            totals += torch.stack([loss_sums[name].detach() for name in weights])

        # 3. clip the gradients and update the weights
        rate = get_learning_rate(self._spec.optimizer, progress.step, self._total_steps, progress.steering)
        grad_norm = strategy.step_optimizer(rate)

        # 4. mean losses of all workers
        means = (strategy.sum_over_workers(totals) / max(num_counted, 1)).tolist()
        losses = dict(zip(weights, means, strict=True))
        losses = {"loss": sum(weights[name] * mean for name, mean in losses.items()), **losses}
        self._check_finite(progress.step, losses["loss"], grad_norm)
        return StepMetrics(
            step=progress.step + 1,
            tokens=progress.tokens + num_counted,
            losses=losses,
            lr=rate,
            grad_norm=grad_norm,
            tokens_per_second=num_counted / (time.perf_counter() - started),
            world_size=strategy.world_size,
        )

    def _build_micro_batches(self, step: int) -> list[MicroBatch]:
        training = self._spec.training
        assert training.batch_size is not None, "set before training by specs.job.resolve_model_defaults"
        batch = select_batch_rows(len(self._rows), batch_size=training.batch_size, seed=training.seed, step=step)
        return build_micro_batches(self._strategy, self._rows, batch, training)

    def _check_finite(self, step: int, loss: float, grad_norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        raise LossNotFiniteError(
            f"step {step + 1}: the loss is {loss} and the gradient norm is {grad_norm}; use a smaller "
            "optimizer.learning_rate, a longer optimizer.warmup_ratio or model.dtype float32",
            field="optimizer.learning_rate",
            value=self._spec.optimizer.learning_rate,
        )


MicroBatch = tuple[dict[str, Tensor], tuple[int, ...] | None]
"""Tensors of concatenated samples, and the lengths of the samples; None if they share prefixes."""


def build_micro_batches(
    strategy: Strategy, rows: PackedRows, batch: Sequence[int], training: TrainingSpec
) -> list[MicroBatch]:
    """Return this worker's share of the rows `batch` in micro batches of `micro_batch_size` rows. Every worker has the
    same number: a worker with a smaller share adds a row that no loss counts."""
    # 1. this worker's rows, padded to the same number on every worker
    own_rows = select_rank_rows(batch, strategy.data_rank, strategy.data_size)
    indices = [*own_rows, *batch[: -(-len(batch) // strategy.data_size) - len(own_rows)]]
    if training.compile:  # compiled layers need batches of one size
        indices += [batch[0]] * (-len(indices) % training.micro_batch_size)
    # 2. concatenate the rows of each micro batch
    micro_batches = []
    for start in range(0, len(indices), training.micro_batch_size):
        chosen = indices[start : start + training.micro_batch_size]
        step = math.lcm(strategy.sequence_parallel_size, TOKENS_MULTIPLE)
        multiple = len(chosen) * rows.max_length if training.compile else step
        num_counted = max(len(own_rows) - start, 0)
        arrays, lengths = rows.make_padding_free_batch(chosen, multiple=multiple, num_counted=num_counted)
        tensors = to_tensors(arrays)
        tensors["loss_mask"] = strategy.restrict_mask_to_own_positions(tensors["loss_mask"])
        micro_batches.append((tensors, lengths))
    return micro_batches


class ValidationSet:
    """Evenly spaced validation rows.

    Args:
        every_steps: steps between two measurements.
    """

    def __init__(self, strategy: Strategy, rows: PackedRows, training: TrainingSpec, *, every_steps: int) -> None:
        assert training.validation is not None, "validation is off"
        assert training.batch_size is not None, "set before training by specs.job.resolve_model_defaults"
        self._strategy, self._rows, self._training = strategy, rows, training
        self.selected = select_validation_rows(rows, training.validation, training.batch_size * every_steps)

    def measure_kl(self) -> float:
        """Return the mean KL(teacher || student) at temperature 1 over the counted positions, in nats; with `objective:
        lm` the loss on the next token. Collective."""
        sums = torch.zeros(2, dtype=torch.float64)
        for batch, lengths in build_micro_batches(self._strategy, self._rows, self.selected, self._training):
            kl, num_counted = self._strategy.sum_held_out(batch, lengths), batch["loss_mask"].sum()
            sums += torch.stack([kl.detach().double().cpu(), num_counted.double().cpu()])
        total, num_counted = self._strategy.sum_over_workers(sums).tolist()
        return total / num_counted if num_counted else math.nan


def select_validation_rows(rows: PackedRows, spec: ValidationSpec, rows_between: int) -> list[int]:
    """Return evenly spaced rows, since packing sorts them by the length of their samples."""
    number = min(count_measured_rows(spec, rows.num_tokens / len(rows), rows_between), len(rows))
    return [int(i) for i in np.linspace(0, len(rows) - 1, number).round()]


def parallelize(
    model: DistillationModel,
    spec: JobSpec,
    *,
    dtype: torch.dtype,
    device: torch.device,
    weights: WeightSource | None = None,
) -> Strategy:
    """Distribute `model` over the default process group by `spec.sharding`, with the optimizer of `spec.optimizer`.

    Args:
        dtype: compute dtype.
        weights: values of a model on the meta device; FSDP2 and ZeRO stage 3 only.
    """
    match spec.sharding.strategy:
        case "ddp":
            return DDPStrategy(model, spec, dtype=dtype, device=device)
        case "fsdp2":
            return FSDP2Strategy(model, spec, weights, dtype=dtype, device=device)
        case "deepspeed":
            from swiftkv_platform.distillation.zero import DeepSpeedStrategy  # loads DeepSpeed, which takes seconds

            return DeepSpeedStrategy(model, spec, weights, dtype=dtype, device=device)
