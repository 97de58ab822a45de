"""One interface over DDP and FSDP2: a fork spread over the workers of the default process group. It knows no data, no
loss weights and no schedule.

Both strategies average gradients over the workers; a caller that wants their sum multiplies its loss by `world_size`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from swiftkv_platform.distillation.fork import Fork
from swiftkv_platform.specs import ShardingSpec


class Parallel:
    """A fork that runs on every worker of the default process group, which must exist (a group of one is fine).

    Args:
        fork: equal on all workers.
        dtype: compute dtype; trained weights, their gradients and the reduction stay float32.
        device: this worker's device.
    """

    def __init__(self, fork: Fork, sharding: ShardingSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self.loss_weights = fork.loss_weights
        self._autocast = None
        if sharding.strategy == "fsdp2":
            self.module: nn.Module = _shard(fork, sharding, dtype, device)
        else:
            self._autocast = dtype if dtype != torch.float32 else None
            self.module = DistributedDataParallel(fork.to(device), forward_sync_buffers=False, init_sync=False)

    def trained(self) -> list[nn.Parameter]:
        """The parameters that are trained, sharded as they are."""
        return [parameter for parameter in self.module.parameters() if parameter.requires_grad]

    def __call__(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The fork's sums over this worker's `batch`."""
        sums: dict[str, Tensor] = self.module(**{name: tensor.to(self.device) for name, tensor in batch.items()})
        return sums

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around forward and backward of one micro batch; gradients are reduced with the `last` one of a step."""
        with ExitStack() as stack:
            if self._autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, dtype=self._autocast))
            if isinstance(self.module, DistributedDataParallel):
                if not last:
                    stack.enter_context(self.module.no_sync())
            else:
                cast("FSDPModule", self.module).set_requires_gradient_sync(last)
            yield

    def sum(self, values: Tensor) -> Tensor:
        """`values` summed over the workers."""
        total = values.detach().clone().to(self.device)
        dist.all_reduce(total)
        return total

    def clip_gradients(self, max_norm: float) -> float:
        """Scale the gradients of all workers to a joint norm of at most `max_norm`; returns the norm they had."""
        norm = nn.utils.clip_grad_norm_(self.trained(), max_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)


def _shard(fork: Fork, sharding: ShardingSpec, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """FSDP2: every layer is gathered when it runs; what is left (embeddings, norms, heads) belongs to the root."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    precision = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, reduce_dtype=torch.float32)
    # On a CPU everything is in host memory already.
    offload = CPUOffloadPolicy() if sharding.cpu_offload and device.type != "cpu" else OffloadPolicy()
    for unit in [*fork.units(), fork]:
        fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload)
    return fork
