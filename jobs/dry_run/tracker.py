"""Memory and collectives of what runs over fake tensors. Knows no job."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from jobs.dry_run.figures import Collective


class Tracker(MemTracker):
    """Bytes alive at the peak, and collectives. Torch's tracker without its figures by module, which allow one forward
    pass a module and copy a snapshot of each with every operator."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def _pre_fw_hook(self, module: nn.Module, inputs: Any) -> None:
        """No figures by module."""

    _post_fw_hook = _pre_bw_hook = _post_bw_hook = cast("Any", lambda *_: None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional") and func.overloadpacket.__name__ != "wait_tensor":
            name = func.overloadpacket.__name__.strip("_")
            self._calls[name] += 1
            self._bytes[name] += max((tensor.nbytes for tensor in _tensors((args, kwargs))), default=0)
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def restart(self) -> None:
        """Forget the peak so far, and the collectives."""
        self._peak_mem, self._peak_mem_snap = {}, {}
        self._calls.clear()
        self._bytes.clear()

    @property
    def alive(self) -> int:
        return self._total("current")

    @property
    def peak(self) -> int:
        return self._total("peak")

    def _total(self, kind: Literal["current", "peak"]) -> int:
        """Bytes on the device: tensors on the meta device, which a layer that was let go of becomes, have none."""
        snapshots: dict[torch.device, dict[str, int]] = self.get_tracker_snapshot(kind)
        return sum(snapshot["Total"] for device, snapshot in snapshots.items() if device.type != "meta")

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(
            Collective(name=name, calls=calls, num_bytes=self._bytes[name])
            for name, calls in sorted(self._calls.items())
        )


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
