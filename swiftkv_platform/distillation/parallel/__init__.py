"""Distribution of a fork over the workers: one interface, three libraries behind it."""

from __future__ import annotations

import torch

from swiftkv_platform.distillation.fork import Fork
from swiftkv_platform.distillation.parallel.base import Parallel, Read, State, Weights
from swiftkv_platform.specs import JobSpec

__all__ = ["Parallel", "Read", "State", "Weights", "parallelize"]


def parallelize(
    fork: Fork, spec: JobSpec, *, dtype: torch.dtype, device: torch.device, weights: Weights | None = None
) -> Parallel:
    """Spread `fork` over the default process group as `spec.sharding` says, with the optimizer of `spec.optimizer`.

    Args:
        dtype: compute dtype.
        weights: where those of a fork on the meta device come from; FSDP2 and ZeRO stage 3 only.
    """
    from swiftkv_platform.distillation.parallel.native import DataParallel, FullySharded

    match spec.sharding.strategy:
        case "ddp":
            return DataParallel(fork, spec, dtype=dtype, device=device)
        case "fsdp2":
            return FullySharded(fork, spec, weights, dtype=dtype, device=device)
        case "deepspeed":
            from swiftkv_platform.distillation.parallel.zero import ZeRO  # loads DeepSpeed, which takes seconds

            return ZeRO(fork, spec, weights, dtype=dtype, device=device)
