"""Base of every way to spread a fork over workers: what all share, and what each brings. Knows no data, no schedule."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from swiftkv_platform.distillation.fork import Fork

State = dict[str, Any]
"""`model`: trained tensors by the fork's names; `optimizer`: for each of them AdamW's `exp_avg`, `exp_avg_sq` and
`step`, or Muon's `momentum_buffer`. Names and global shapes are the same for every strategy and number of workers."""
STUDENT = "student."
"""Prefix of the student's parameters in the fork's names."""
Read = Callable[[State], None]
"""Overwrites every tensor of a state, or of a part of one, with what was saved."""


class Weights(Protocol):
    """Values of a fork that is on the meta device."""

    def fill(self, module: nn.Module, *, read: bool = True) -> None:
        """Give the parameters of `module`, and of those within, that are on the meta device storage and, with `read`,
        values."""

    def fill_shards(self, root: nn.Module) -> None:
        """Write the values of the parameters of `root` that this worker holds after FSDP2 has sharded it."""


class Parallel(ABC):
    """A fork and its optimizer on every worker of the default process group, which must exist (a group of one is fine).

    Gradients are averaged over the workers: a caller that wants their sum multiplies its loss by `world_size`. Trained
    weights, optimizer state and the reduction of gradients are float32, whatever the compute dtype.

    Args:
        fork: equal on all workers.
        device: this worker's device.
    """

    module: nn.Module
    loads_parts = False
    """Whether a worker loads its own part of a state alone, and not what the others load."""

    def __init__(self, fork: Fork, *, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self.loss_weights = fork.loss_weights
        self._sequence = fork.sequence
        self.sequence_parallel_size = share = 1 if fork.sequence is None else fork.sequence.size
        self.data_rank = self.rank // share
        """Index of this worker's share of a batch's rows, of `data_size` equal shares. Workers that divide the tokens
        of rows among them have the same."""
        self.data_size = self.world_size // share

    def __call__(self, batch: Mapping[str, Tensor], sample_lengths: Sequence[int] | None = None) -> dict[str, Tensor]:
        """The fork's sums over this worker's `batch`, see `Fork.forward`."""
        tensors = {name: tensor.to(self.device) for name, tensor in batch.items()}
        sums: dict[str, Tensor] = self.module(**tensors, sample_lengths=sample_lengths)
        return sums

    def own_positions(self, mask: Tensor) -> Tensor:
        """`mask` [batch, num_tokens] where this worker computes the loss, False elsewhere."""
        if self._sequence is None:
            return mask
        own, kept = self._sequence.own(mask.shape[1]), torch.zeros_like(mask)
        kept[:, own] = mask[:, own]
        return kept

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:  # noqa: ARG002
        """Around forward and backward of one micro batch; gradients are reduced with the `last` one of a step."""
        yield

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def sum(self, values: Tensor) -> Tensor:
        total = values.detach().clone().to(self.device)
        dist.all_reduce(total)
        return total

    def agree(self, value: int) -> int:
        """The largest `value` of all workers."""
        largest = torch.tensor(value, device=self.device)
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
        return int(largest)

    @torch.no_grad()
    def measure(self, batch: Mapping[str, Tensor], sample_lengths: Sequence[int] | None = None) -> Tensor:
        """The fork's sum of what held-out text is measured by over this worker's `batch`, see `Fork.forward`."""
        tensors = {name: tensor.to(self.device) for name, tensor in batch.items()}
        with self.micro_batch(last=False):
            measured: Tensor = self.module(**tensors, sample_lengths=sample_lengths, measures=True)["held_out"]
        return measured

    @abstractmethod
    def remember(self) -> Callable[[], None]:
        """Keep the trained weights of now in memory, before the first update. What is returned puts them back, with an
        optimizer that has not updated anything. Both are collective."""

    @abstractmethod
    def matrices(self) -> Iterator[Tensor]:
        """Trained matrices, whole, one at a time. Collective."""

    @abstractmethod
    def update(self, learning_rate: float) -> float:
        """Clip the step's gradients, move the weights, forget the gradients.

        Returns the joint norm before clipping; where it is not finite, nothing moves.
        """

    @abstractmethod
    def state(self) -> State:
        """Return what a checkpoint keeps. Collective."""

    @abstractmethod
    def load_state(self, read: Read) -> None:
        """Go on from what `read` finds. Collective."""

    @abstractmethod
    def load_trained(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Give trained parameters the values that `tensors` has of them, whole and by the student's names; others, and
        the optimizer, stay as they are. Collective.

        Returns the names of trained parameters that `tensors` lacks.
        """
