"""DDP and FSDP2: PyTorch's own strategies, over optimizers of ours. Knows nothing of DeepSpeed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from swiftkv_platform.distillation.fork import Fork
from swiftkv_platform.distillation.optimizer import build_optimizers, set_learning_rate
from swiftkv_platform.distillation.parallel.base import STUDENT, Parallel, Read, State, Weights
from swiftkv_platform.distillation.weights import own_rows
from swiftkv_platform.model.checkpoint import read_rows
from swiftkv_platform.specs import JobSpec

_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


class _Native(Parallel):
    """Clipping, optimizer and state, which DDP and FSDP2 share."""

    def __init__(self, fork: Fork, module: nn.Module, spec: JobSpec, *, device: torch.device) -> None:
        super().__init__(fork, device=device)
        self.module = module
        self._max_grad_norm = spec.optimizer.max_grad_norm
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self._trained = [parameter for _, parameter in named]
        self._optimizers = build_optimizers(named, spec.optimizer)

    def update(self, learning_rate: float) -> float:
        norm: Tensor = nn.utils.clip_grad_norm_(self._trained, self._max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(grad_norm):
            set_learning_rate(self._optimizers, learning_rate)
            for optimizer in self._optimizers:
                optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        return grad_norm

    def remember(self) -> Callable[[], None]:
        kept = [_local(parameter).detach().to("cpu", copy=True) for parameter in self._trained]

        @torch.no_grad()
        def put_back() -> None:
            for parameter, values in zip(self._trained, kept, strict=True):
                _local(parameter).copy_(values)
            for optimizer in self._optimizers:
                optimizer.state.clear()

        return put_back

    def matrices(self) -> Iterator[Tensor]:
        for parameter in self._trained:
            if parameter.ndim >= 2:
                yield parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def state(self) -> State:
        self._create_moments()
        optimizer = get_optimizer_state_dict(self.module, self._optimizers, options=_TRAINED)
        return {"model": self._trained_tensors(), "optimizer": optimizer["state"]}

    def load_state(self, read: Read) -> None:
        self._create_moments()
        groups = get_optimizer_state_dict(self.module, self._optimizers, options=_TRAINED)["param_groups"]
        state = self.state()
        read(state)
        set_model_state_dict(self.module, state["model"], options=_TRAINED)
        optimizer = {"state": state["optimizer"], "param_groups": groups}
        set_optimizer_state_dict(self.module, self._optimizers, optimizer, options=_TRAINED)

    def _create_moments(self) -> None:
        """Create the optimizers' state where nothing has been updated: torch does so by an update that moves nothing,
        and counts it."""
        fresh = [optimizer for optimizer in self._optimizers if not optimizer.state]
        if not fresh:
            return
        get_optimizer_state_dict(self.module, self._optimizers, options=_TRAINED)
        for optimizer in fresh:
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"].zero_()

    @torch.no_grad()
    def load_trained(self, tensors: Mapping[str, Tensor]) -> list[str]:
        missing = []
        for name, parameter in self.module.named_parameters():
            own = name.removeprefix("module.").removeprefix(STUDENT)
            if not parameter.requires_grad:
                continue
            if own not in tensors:
                missing.append(own)
            elif not isinstance(parameter, DTensor):
                parameter.copy_(tensors[own])
            elif (rows := own_rows(parameter)).stop > rows.start:
                parameter.to_local().copy_(read_rows(tensors, own, rows))
        return missing

    def _trained_tensors(self) -> State:
        """Trained tensors by name. Torch leaves out frozen parameters, but not the second name of one that is tied to
        another, nor that under which the kept teacher has what it shares with the student."""
        named = self.module.named_parameters(remove_duplicate=False)
        frozen = {name.removeprefix("module.") for name, parameter in named if not parameter.requires_grad}
        state = get_model_state_dict(self.module, options=_TRAINED)
        return {name: state[name] for name in state if name not in frozen and not name.startswith("kept_teacher.")}


class DataParallel(_Native):
    """DDP: every worker holds everything. A worker that is alone does without: gloo's threads, which would copy its
    gradients, are more than the cores it computes on, and OpenMP then puts its own to sleep between operators."""

    def __init__(self, fork: Fork, spec: JobSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self._autocast = dtype if dtype != torch.float32 else None
        module: nn.Module = fork.to(device)
        if dist.get_world_size() > 1:
            module = DistributedDataParallel(module, forward_sync_buffers=False, init_sync=False)
        super().__init__(fork, module, spec, device=device)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        synced: AbstractContextManager[None] = nullcontext()
        if isinstance(self.module, DistributedDataParallel) and not last:
            synced = self.module.no_sync()
        with torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None), synced:
            yield


class FullySharded(_Native):
    """FSDP2: every layer is gathered when it runs; what is left (embeddings, norms, heads) belongs to the root.

    A fork without weights (on the meta device) is sharded first, and a worker reads no more than its own rows of each
    parameter.
    """

    loads_parts = True

    def __init__(
        self, fork: Fork, spec: JobSpec, weights: Weights | None, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        param_dtype = None if dtype == torch.float32 else dtype
        precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        # On a CPU everything is in host memory already.
        offloads = spec.sharding.cpu_offload and device.type != "cpu"
        offload = CPUOffloadPolicy() if offloads else OffloadPolicy()
        for unit in [*fork.units(), fork]:
            fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload)
        if weights is not None:
            materialize(fork, torch.device("cpu") if offloads else device)
            weights.fill_shards(fork)
        super().__init__(fork, fork, spec, device=device)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        cast("FSDPModule", self.module).set_requires_gradient_sync(last)
        yield

    def measure(self, batch: Mapping[str, Tensor], sample_lengths: Sequence[int] | None = None) -> Tensor:
        measured = super().measure(batch, sample_lengths)
        cast("FSDPModule", self.module).reshard()  # the root waits for a backward pass, which does not come
        return measured


def _local(parameter: Tensor) -> Tensor:
    """This worker's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def materialize(sharded: nn.Module, device: torch.device) -> None:
    """Give a sharded model on the meta device storage for this worker's rows; its buffers keep their values."""
    buffers = {name: buffer.to(device) for name, buffer in sharded.named_buffers()}
    sharded.to_empty(device=device)
    for name, buffer in sharded.named_buffers():
        buffer.copy_(buffers[name])
