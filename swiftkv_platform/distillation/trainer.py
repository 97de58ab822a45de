"""The distillation loop: one optimizer step after the other, a checkpoint now and then. It knows no cluster, no object
store and no tracker.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Protocol

import torch

from swiftkv_platform.contract.stop_requests import StopRequest
from swiftkv_platform.data.packing import PackedRows, batch_rows, rank_rows
from swiftkv_platform.distillation.checkpoint import Checkpointer, Progress
from swiftkv_platform.distillation.optimizer import learning_rate
from swiftkv_platform.distillation.parallel import Parallel
from swiftkv_platform.errors import LossNotFiniteError
from swiftkv_platform.model.batches import to_tensors
from swiftkv_platform.specs import JobSpec


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step, the same on every worker."""

    step: int
    """Steps done, this one included."""
    tokens: int
    """Positions the loss has counted since the run began."""
    losses: dict[str, float]
    """`loss`, what is minimised, and its terms before weighting; means over the positions that count."""
    lr: float
    grad_norm: float
    """Norm before clipping."""
    tokens_per_second: float
    world_size: int

    def point(self) -> dict[str, float]:
        """A flat mapping, for events and trackers."""
        return {
            "step": self.step,
            "tokens": self.tokens,
            **self.losses,
            "lr": self.lr,
            "grad_norm": self.grad_norm,
            "tokens_per_second": self.tokens_per_second,
            "world_size": self.world_size,
        }


class TrainerListener(Protocol):
    """Hears, on every worker, how a run gets on, and speaks for the world outside."""

    def on_start(self, progress: Progress) -> None:
        """The run begins, at step 0 or where its newest checkpoint is."""

    def on_step(self, metrics: StepMetrics) -> None:
        """A step is done."""

    def stop_request(self) -> StopRequest:
        """Return the stop request that this worker has been told since the last step."""


class Trainer:
    """Trains the student of `parallel` on `rows`; every worker runs one, over the same rows.

    Args:
        total_steps: where the run, and its learning rate, end.
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
    ) -> None:
        self._parallel = parallel
        self._rows = rows
        self._checkpointer = checkpointer
        self._spec = spec
        self._total_steps = total_steps
        self._listener = listener

    def run(self) -> StopRequest:
        """Go on from the newest checkpoint to the last step, or until told to stop; a checkpoint says where that was.

        Returns the stop request that ended the run, `NONE` at the last step.

        Raises:
            LossNotFiniteError: on every worker alike; checkpoints stay.
            StorageError: training went well, and the last checkpoint cannot be stored.
        """
        progress = self._checkpointer.restore()
        self._listener.on_start(progress)
        stop_request = StopRequest.NONE
        try:
            while progress.step < self._total_steps and stop_request < StopRequest.LEAVE:
                metrics = self.train_step(progress)
                progress = Progress(metrics.step, metrics.tokens)
                self._listener.on_step(metrics)
                stop_request = StopRequest(self._parallel.agree(self._listener.stop_request()))
                last = progress.step == self._total_steps
                if last or stop_request or progress.step % self._spec.checkpoint.every_steps == 0:
                    self._checkpointer.save(progress)
        except BaseException as error:
            try:
                self._checkpointer.finish()
            except Exception as unstored:  # why training ended counts more
                error.add_note(f"The last checkpoint is not stored: {unstored}")
            raise
        self._checkpointer.finish()
        return stop_request if progress.step < self._total_steps else StopRequest.NONE

    def train_step(self, progress: Progress) -> StepMetrics:
        """One optimizer step over `training.batch_size` rows, shared by the workers and cut into micro batches.

        The loss is the mean over the positions that count in the whole batch, so how it is cut makes no difference.
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
        rate = learning_rate(self._spec.optimizer, progress.step, self._total_steps)
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

    def _micro_batches(self, step: int) -> list[tuple[dict[str, torch.Tensor], tuple[int, ...]]]:
        """This worker's samples of a step, of `micro_batch_size` rows at a time, and their lengths. Every worker has
        equally many micro batches: one whose share is shorter fills it up with a row that no loss counts."""
        training, parallel = self._spec.training, self._parallel
        assert training.batch_size is not None, "settled before training, see spec_defaults"
        batch = batch_rows(len(self._rows), batch_size=training.batch_size, seed=training.seed, step=step)
        mine = rank_rows(batch, parallel.data_rank, parallel.data_size)
        places = [*mine, *batch[: -(-len(batch) // parallel.data_size) - len(mine)]]
        micro_batches = []
        for start in range(0, len(places), training.micro_batch_size):
            rows = places[start : start + training.micro_batch_size]
            # Compiled layers take batches of one size.
            multiple = len(rows) * self._rows.max_length if training.compile else parallel.sequence_parallel_size
            num_counted = max(len(mine) - start, 0)
            arrays, lengths = self._rows.end_to_end(rows, multiple=multiple, num_counted=num_counted)
            tensors = to_tensors(arrays)
            tensors["loss_mask"] = parallel.own_positions(tensors["loss_mask"])
            micro_batches.append((tensors, lengths))
        return micro_batches

    def _check_finite(self, step: int, loss: float, grad_norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(grad_norm):
            return
        raise LossNotFiniteError(
            f"step {step + 1}: loss {loss}, gradient norm {grad_norm}; a smaller optimizer.learning_rate or a longer "
            f"optimizer.warmup_ratio may do, or model.dtype float32",
            field="optimizer.learning_rate",
            value=self._spec.optimizer.learning_rate,
        )
