"""Memory and collectives of what runs over fake tensors. Knows no job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from swiftkv_platform.frozen import FrozenModel


class Memory(FrozenModel):
    """Bytes on one worker's device at the peak of a phase, by what they hold."""

    peak: int
    parameters: int
    """Weights, between passes: this worker's shards, or all of them."""
    gradients: int = 0
    """Gradients that the optimizer reads."""
    optimizer: int = 0
    """State of the optimizer."""
    remembered: int = 0
    """Trained weights as they began, while a worker without a GPU tries learning rates."""
    passing: int
    """The rest of the peak: activations, gathered weights, buffers, gradients on their way."""


class Collective(FrozenModel):
    """Calls of one collective by one worker in a step."""

    name: str
    calls: int
    num_bytes: int
    """Bytes of the larger of what goes in and what comes out, of all calls."""


class DryRun(FrozenModel):
    """Collectives and memory of one worker."""

    num_workers: int
    num_micro_batches: int
    """Micro batches of the step that was run: of more than two, the others are like the first."""
    num_parameters: int
    num_trained_parameters: int
    train: Memory
    """A step, when the optimizer has its state."""
    collectives: tuple[Collective, ...]
    calibrate: Memory | None
    """One row through the teacher layer by layer, and the sums of it; None for a copied start."""
    evaluate: Memory
    """Rows through teacher and student, sharded over the workers."""


class _NoModules:
    """Stand-in for torch's tracker of modules, whose hooks around each one cost more than all that is counted here."""

    is_bw = False
    parents: frozenset[str] = frozenset()

    def register_user_hooks(self, *_: Any) -> None:
        """Call none."""

    def clear_user_hooks(self) -> None:
        """There are none."""

    def __enter__(self) -> None:
        """Watch nothing."""

    def __exit__(self, *_: object) -> None:
        """Watch nothing."""


class Tracker(MemTracker):
    """Bytes alive at the peak, and collectives. Torch's tracker without its figures by module, which allow one forward
    pass a module, and without a copy of all figures at every new peak."""

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = cast("Any", _NoModules())
        self._calls: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def _update_peak_stats(self, peak_state: Any) -> None:
        del peak_state
        for device, snapshot in self._curr_mem_snap.items():
            self._peak_mem[device] = max(self._peak_mem.get(device, 0), snapshot["Total"])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func.overloadpacket.__name__ != "wait_tensor":
            name = func.overloadpacket.__name__.strip("_")
            self._calls[name] += 1
            self._bytes[name] += max((tensor.nbytes for tensor in _tensors((args, kwargs))), default=0)
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def restart(self) -> None:
        self._peak_mem.clear()
        self._calls.clear()
        self._bytes.clear()

    @property
    def alive(self) -> int:
        return _on_device({device: snapshot["Total"] for device, snapshot in self._curr_mem_snap.items()})

    @property
    def peak(self) -> int:
        return _on_device(self._peak_mem)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(
            Collective(name=name, calls=calls, num_bytes=self._bytes[name])
            for name, calls in sorted(self._calls.items())
        )


def _on_device(totals: Mapping[torch.device, int]) -> int:
    """Bytes on the device: tensors on the meta device, which a layer that was let go of becomes, have none."""
    return sum(total for device, total in totals.items() if device.type != "meta")


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


class Gradients:
    """Counts the bytes of the gradients that an optimizer reads."""

    num_bytes = 0

    def __enter__(self) -> None:
        self._handle = register_optimizer_step_pre_hook(self._count)

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _count(self, optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for gradient in (parameter.grad for parameter in group["params"] if parameter.grad is not None):
                local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
                self.num_bytes += local.nbytes
