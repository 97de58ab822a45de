"""Strategies that distribute student and teacher over workers: their common interface, optimizers, and PyTorch's DDP
and FSDP2 (DeepSpeed is in `zero`). For evaluation, the models are whole on every worker, or sharded and gathered by
layer.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, TypeVar, cast

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
from torch.optim import AdamW, Muon, Optimizer

from swiftkv_platform.distillation.model import (
    DistillationModel,
    copy_teacher,
    find_first_trained_layer,
    iter_sharding_units,
    load_trained_tensors,
)
from swiftkv_platform.model.weights.checkpoint import read_rows
from swiftkv_platform.model.weights.lazy_student import LazyStudent, get_local_rows
from swiftkv_platform.specs import DistillationSpec, JobSpec, OptimizerSpec
from swiftkv_platform.specs.job import TRAINABLE_LAYERS

TrainingState = dict[str, Any]
"""`model`: trained tensors by their names in `DistillationModel`; `optimizer`: for each of them AdamW's `exp_avg`,
`exp_avg_sq` and `step`, or Muon's `momentum_buffer`. Names and global shapes are the same for every strategy and number
of workers."""
STUDENT_PREFIX = "student."
"""Prefix of the student's parameters in a `DistillationModel`."""
StateReader = Callable[[TrainingState], None]
"""Overwrites the tensors of a state, or of a part of it, with the saved values."""
_TRAINED_STATE_OPTIONS = StateDictOptions(ignore_frozen_params=True, strict=False)


class WeightSource(Protocol):
    """Source of the values of a model on the meta device."""

    def load_parameters(self, module: nn.Module, *, read: bool = True) -> None:
        """Give storage to the parameters of `module` and its submodules that are on the meta device and, with `read`,
        their values."""

    def load_shards(self, root: nn.Module) -> None:
        """Fill this worker's shards of the parameters of `root` after FSDP2 has sharded it."""


class Strategy(ABC):
    """A `DistillationModel` and its optimizer on every worker of the default process group, which must exist, even for
    a single worker.

    Gradients are averaged over the workers: a caller that wants their sum multiplies its loss by `world_size`. Trained
    weights, optimizer state and the reduction of gradients are float32, whatever the compute dtype.

    Args:
        model: equal on all workers.
        device: this worker's device.
    """

    module: nn.Module
    reads_own_shards = False
    """Whether a worker reads only its own shards of a checkpoint."""

    def __init__(self, model: DistillationModel, *, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self.loss_weights = model.loss_weights
        self._sequence = model.sequence
        self.sequence_parallel_size = share = 1 if model.sequence is None else model.sequence.size
        self.data_rank = self.rank // share
        """Index of this worker's share of a batch's rows, out of `data_size` equal shares. Workers that split the same
        rows have the same index."""
        self.data_size = self.world_size // share

    def __call__(self, batch: Mapping[str, Tensor], sample_lengths: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Return the sums of the losses over this worker's `batch`, see `DistillationModel.forward`."""
        tensors = {name: tensor.to(self.device) for name, tensor in batch.items()}
        sums: dict[str, Tensor] = self.module(**tensors, sample_lengths=sample_lengths)
        return sums

    def restrict_mask_to_own_positions(self, mask: Tensor) -> Tensor:
        """Set `mask` [batch, num_tokens] to False outside the positions of which this worker computes the loss."""
        if self._sequence is None:
            return mask
        own, masked = self._sequence.get_own_positions(mask.shape[1]), torch.zeros_like(mask)
        masked[:, own] = mask[:, own]
        return masked

    @contextmanager
    def run_micro_batch(self, *, last: bool) -> Iterator[None]:  # noqa: ARG002
        """Context of forward and backward of a micro batch. Gradients are reduced with the `last` one of a step."""
        yield

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def sum_over_workers(self, values: Tensor) -> Tensor:
        total = values.detach().clone().to(self.device)
        dist.all_reduce(total)
        return total

    def all_reduce_max(self, value: int) -> int:
        """Return the maximum of all workers' values."""
        maximum = torch.tensor(value, device=self.device)
        dist.all_reduce(maximum, op=dist.ReduceOp.MAX)
        return int(maximum)

    @torch.no_grad()
    def sum_held_out(self, batch: Mapping[str, Tensor], sample_lengths: Sequence[int] | None = None) -> Tensor:
        """Return the sum `held_out` over this worker's `batch`, see `DistillationModel.forward`."""
        tensors = {name: tensor.to(self.device) for name, tensor in batch.items()}
        with self.run_micro_batch(last=False):
            total: Tensor = self.module(**tensors, sample_lengths=sample_lengths, held_out_only=True)["held_out"]
        return total

    @abstractmethod
    def snapshot_weights(self) -> Callable[[], None]:
        """Copy the trained weights to host memory, before the first update. The returned function restores them and
        resets the optimizer. Both calls are collective."""

    @abstractmethod
    def gather_matrices(self) -> Iterator[Tensor]:
        """Yield the trained matrices, gathered one at a time. Collective."""

    @abstractmethod
    def step_optimizer(self, learning_rate: float) -> float:
        """Clip the gradients, update the weights, reset the gradients.

        Returns the total norm before clipping. If it is not finite, the weights do not change.
        """

    @abstractmethod
    def get_state(self) -> TrainingState:
        """Return the state that a checkpoint stores. Collective."""

    @abstractmethod
    def load_state(self, read: StateReader) -> None:
        """Load the state whose tensors `read` overwrites. Collective."""

    @abstractmethod
    def load_trained_tensors(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Set trained parameters to the values in `tensors`, whole tensors by the student's names. Other parameters and
        the optimizer do not change. Collective.

        Returns the names of trained parameters that `tensors` lacks.
        """


class _TorchStrategy(Strategy):
    """Base of DDP and FSDP2: clipping, optimizers and state."""

    def __init__(self, model: DistillationModel, module: nn.Module, spec: JobSpec, *, device: torch.device) -> None:
        super().__init__(model, device=device)
        self.module = module
        self._max_grad_norm = spec.optimizer.max_grad_norm
        named = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        self._trained = [parameter for _, parameter in named]
        self._optimizers = build_optimizers(named, spec.optimizer)

    def step_optimizer(self, learning_rate: float) -> float:
        norm: Tensor = nn.utils.clip_grad_norm_(self._trained, self._max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if math.isfinite(grad_norm):
            set_learning_rate(self._optimizers, learning_rate)
            for optimizer in self._optimizers:
                optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        return grad_norm

    def snapshot_weights(self) -> Callable[[], None]:
        saved = [_get_local_tensor(parameter).detach().to("cpu", copy=True) for parameter in self._trained]

        @torch.no_grad()
        def restore_weights() -> None:
            for parameter, values in zip(self._trained, saved, strict=True):
                _get_local_tensor(parameter).copy_(values)
            for optimizer in self._optimizers:
                optimizer.state.clear()

        return restore_weights

    def gather_matrices(self) -> Iterator[Tensor]:
        for parameter in self._trained:
            if parameter.ndim >= 2:
                yield parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def get_state(self) -> TrainingState:
        self._create_moments()
        optimizer = get_optimizer_state_dict(self.module, self._optimizers, options=_TRAINED_STATE_OPTIONS)
        return {"model": self._collect_trained(), "optimizer": optimizer["state"]}

    def load_state(self, read: StateReader) -> None:
        self._create_moments()
        groups = get_optimizer_state_dict(self.module, self._optimizers, options=_TRAINED_STATE_OPTIONS)["param_groups"]
        state = self.get_state()
        read(state)
        set_model_state_dict(self.module, state["model"], options=_TRAINED_STATE_OPTIONS)
        optimizer = {"state": state["optimizer"], "param_groups": groups}
        set_optimizer_state_dict(self.module, self._optimizers, optimizer, options=_TRAINED_STATE_OPTIONS)

    def _create_moments(self) -> None:
        """Create the optimizers' state before the first step. Torch does so by a step that changes no weights; its step
        count is reset."""
        fresh = [optimizer for optimizer in self._optimizers if not optimizer.state]
        if not fresh:
            return
        get_optimizer_state_dict(self.module, self._optimizers, options=_TRAINED_STATE_OPTIONS)
        for optimizer in fresh:
            for state in optimizer.state.values():
                if "step" in state:
                    state["step"].zero_()

    @torch.no_grad()
    def load_trained_tensors(self, tensors: Mapping[str, Tensor]) -> list[str]:
        missing = []
        for name, parameter in self.module.named_parameters():
            own = name.removeprefix("module.").removeprefix(STUDENT_PREFIX)
            if not parameter.requires_grad:
                continue
            if own not in tensors:
                missing.append(own)
            elif not isinstance(parameter, DTensor):
                parameter.copy_(tensors[own])
            elif (rows := get_local_rows(parameter)).stop > rows.start:
                parameter.to_local().copy_(read_rows(tensors, own, rows))
        return missing

    def _collect_trained(self) -> TrainingState:
        """Return trained tensors by name. Torch does not omit the second name of a tied frozen parameter, nor the
        teacher copy's names of parameters shared with the student."""
        named = self.module.named_parameters(remove_duplicate=False)
        frozen = {name.removeprefix("module.") for name, parameter in named if not parameter.requires_grad}
        state = get_model_state_dict(self.module, options=_TRAINED_STATE_OPTIONS)
        return {name: state[name] for name in state if name not in frozen and not name.startswith("teacher_copy.")}


class DDPStrategy(_TorchStrategy):
    """DDP: every worker holds all weights. A single worker does without torch's DDP: gloo's threads, which would copy
    the gradients, outnumber the cores, and OpenMP then puts its own threads to sleep between operators."""

    def __init__(self, model: DistillationModel, spec: JobSpec, *, dtype: torch.dtype, device: torch.device) -> None:
        self._autocast = dtype if dtype != torch.float32 else None
        module: nn.Module = model.to(device)
        if dist.get_world_size() > 1:
            module = DistributedDataParallel(module, forward_sync_buffers=False, init_sync=False)
        super().__init__(model, module, spec, device=device)

    @contextmanager
    def run_micro_batch(self, *, last: bool) -> Iterator[None]:
        synced: AbstractContextManager[None] = nullcontext()
        if isinstance(self.module, DistributedDataParallel) and not last:
            synced = self.module.no_sync()
        with torch.autocast(self.device.type, self._autocast, enabled=self._autocast is not None), synced:
            yield


class FSDP2Strategy(_TorchStrategy):
    """FSDP2: every layer is gathered when it runs; embeddings, norms and heads belong to the root.

    A model on the meta device is sharded first, and then each worker reads only its own rows of each parameter.
    """

    reads_own_shards = True

    def __init__(
        self,
        model: DistillationModel,
        spec: JobSpec,
        weights: WeightSource | None,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        param_dtype = None if dtype == torch.float32 else dtype
        precision = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        # On a CPU everything is in host memory already.
        offloads = spec.sharding.cpu_offload and device.type != "cpu"
        offload = CPUOffloadPolicy() if offloads else OffloadPolicy()
        for unit in [*model.iter_sharding_units(), model]:
            fully_shard(unit, mesh=mesh, mp_policy=precision, offload_policy=offload)
        if weights is not None:
            allocate_shards(model, torch.device("cpu") if offloads else device)
            weights.load_shards(model)
        super().__init__(model, model, spec, device=device)

    @contextmanager
    def run_micro_batch(self, *, last: bool) -> Iterator[None]:
        cast("FSDPModule", self.module).set_requires_gradient_sync(last)
        yield

    def sum_held_out(self, batch: Mapping[str, Tensor], sample_lengths: Sequence[int] | None = None) -> Tensor:
        total = super().sum_held_out(batch, sample_lengths)
        cast("FSDPModule", self.module).reshard()  # the root would wait for a backward pass, which does not come
        return total


def _get_local_tensor(parameter: Tensor) -> Tensor:
    """Return this worker's shard of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def allocate_shards(sharded: nn.Module, device: torch.device) -> None:
    """Allocate this worker's shards of a model on the meta device. Its buffers do not change: FSDP2 has moved them to
    the compute device."""
    buffers = [(module, dict(module._buffers)) for module in sharded.modules()]
    sharded.to_empty(device=device)
    for module, saved in buffers:
        module._buffers.update(saved)


def build_adamw(parameters: Iterable[nn.Parameter], spec: OptimizerSpec) -> AdamW:
    """Build AdamW over the trained parameters, without weight decay for vectors (norms and biases)."""
    matrices, vectors = list[nn.Parameter](), list[nn.Parameter]()
    for parameter in parameters:
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO stage 3 leaves an empty vector in its place
        (matrices if len(shape) >= 2 else vectors).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": spec.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=0.0, betas=spec.betas)  # the step sets the rate


def build_optimizers(named_parameters: Iterable[tuple[str, nn.Parameter]], spec: OptimizerSpec) -> list[Optimizer]:
    """Build AdamW for all parameters, or with `name: muon` Muon for the matrices and AdamW for the other parameters.

    Muon (Jordan et al., 2024) orthogonalizes the momentum of a matrix by Newton-Schulz iterations. Its step is scaled
    to the root mean square of Adam's (Liu et al., 2025), so both take one learning rate. The exit head is left to
    AdamW, as heads and embeddings are.

    Args:
        named_parameters: trained parameters by name; with Muon whole matrices or `DTensor`s, no flat shards.
    """
    if spec.name == "adamw":
        return [build_adamw((parameter for _, parameter in named_parameters), spec)]
    matrices, rest = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in named_parameters:
        (matrices if parameter.ndim == 2 and "exit_head." not in name else rest).append(parameter)
    muon = Muon(
        matrices, lr=0.0, weight_decay=spec.weight_decay, momentum=spec.momentum, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, build_adamw(rest, spec)] if rest else [muon]


def set_learning_rate(optimizers: Sequence[Optimizer], rate: float) -> None:
    """Set the rate of every parameter group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


T = TypeVar("T")


class EvaluationModel(nn.Module):
    """A student to evaluate, opened from lazy weights with the copied start. The teacher has its own copy of the layers
    that are trained.

    Args:
        sharded: whether each worker of the default process group holds only a shard of every parameter.
    """

    def __init__(self, lazy: LazyStudent, spec: DistillationSpec, *, sharded: bool, device: torch.device) -> None:
        super().__init__()
        self.student = lazy.model
        self.teacher_copy: Any = None
        self.sharded = sharded
        self._lazy = lazy
        decoder = self.student.model
        units = list(iter_sharding_units(decoder))
        if spec.trainable in TRAINABLE_LAYERS:
            self.teacher_copy = copy_teacher(decoder, spec)
            units += list(self.teacher_copy.layers[find_first_trained_layer(self.student.config, spec) :])
            decoder.run_teacher_upper = self.teacher_copy.run_teacher_upper
            if spec.trainable == "all":
                decoder.run_teacher_lower = self.teacher_copy.run_lower_layers
        self.requires_grad_(False)
        lazy.map_parameters(self)
        if not sharded:
            lazy.load_parameters(self)
            return
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for unit in [*units, self]:
            fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        allocate_shards(self, device)
        lazy.load_shards(self)

    def load_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if self.sharded:
            self._lazy.set_start_values(tensors)
            self._lazy.load_shards(self, only=tensors)
        else:
            load_trained_tensors(self.student, tensors)

    @torch.no_grad()
    def forward(self, function: Callable[[Any], T]) -> T:
        """Return `function(student)`. Collective if sharded."""
        return function(self.student)


def count_parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters on any device."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
