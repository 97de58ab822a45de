"""Ways to spread a fork over workers: their common interface, the optimizers, and PyTorch's DDP and FSDP2 (DeepSpeed is
in `zero`). For measurements, student and teacher are whole on every worker, or sharded and gathered layer by layer.
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

from swiftkv_platform.distillation.fork import Fork, first_trained_layer, keep_teacher, load_trained, sharding_units
from swiftkv_platform.model.weights.checkpoint import read_rows
from swiftkv_platform.model.weights.lazy_student import LazyStudent, own_rows
from swiftkv_platform.specs import DistillationSpec, JobSpec, OptimizerSpec

State = dict[str, Any]
"""`model`: trained tensors by the fork's names; `optimizer`: for each of them AdamW's `exp_avg`, `exp_avg_sq` and
`step`, or Muon's `momentum_buffer`. Names and global shapes are the same for every strategy and number of workers."""
STUDENT = "student."
"""Prefix of the student's parameters in the fork's names."""
Read = Callable[[State], None]
"""Overwrites every tensor of a state, or of a part of one, with the saved values."""
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


class Weights(Protocol):
    """Values of a fork that is on the meta device."""

    def fill(self, module: nn.Module, *, read: bool = True) -> None:
        """Give storage to the parameters of `module` and its submodules that are on the meta device and, with `read`,
        their values."""

    def fill_shards(self, root: nn.Module) -> None:
        """Fill this worker's shards of the parameters of `root` after FSDP2 has sharded it."""


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
    """Whether a worker loads only its own part of a state."""

    def __init__(self, fork: Fork, *, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.device = device
        self.loss_weights = fork.loss_weights
        self._sequence = fork.sequence
        self.sequence_parallel_size = share = 1 if fork.sequence is None else fork.sequence.size
        self.data_rank = self.rank // share
        """Index of this worker's share of a batch's rows, out of `data_size` equal shares. Workers that divide the
        tokens of the same rows have the same index."""
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
        """Enclose forward and backward of one micro batch; gradients are reduced with the `last` one of a step."""
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
        """Return the fork's `held_out` sum over this worker's `batch`, see `Fork.forward`."""
        tensors = {name: tensor.to(self.device) for name, tensor in batch.items()}
        with self.micro_batch(last=False):
            measured: Tensor = self.module(**tensors, sample_lengths=sample_lengths, measures=True)["held_out"]
        return measured

    @abstractmethod
    def remember(self) -> Callable[[], None]:
        """Copy the trained weights to host memory, before the first update. The returned function restores them and
        resets the optimizer. Both calls are collective."""

    @abstractmethod
    def matrices(self) -> Iterator[Tensor]:
        """Yield the trained matrices, each whole. Collective."""

    @abstractmethod
    def update(self, learning_rate: float) -> float:
        """Clip the step's gradients, move the weights, forget the gradients.

        Returns the joint norm before clipping; if it is not finite, the weights stay as they are.
        """

    @abstractmethod
    def state(self) -> State:
        """Return the state that a checkpoint stores. Collective."""

    @abstractmethod
    def load_state(self, read: Read) -> None:
        """Load the state that `read` fills in. Collective."""

    @abstractmethod
    def load_trained(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Set trained parameters to the values in `tensors`, whole tensors by the student's names. Other parameters and
        the optimizer stay as they are. Collective.

        Returns the names of trained parameters that `tensors` lacks.
        """


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
        """Create the optimizers' state before the first update. Torch does so by an update that changes no weights but
        counts as a step; the count is reset."""
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
        """Return trained tensors by name. Torch leaves out frozen parameters, except the second name of a tied one and
        the kept teacher's names of parameters shared with the student."""
        named = self.module.named_parameters(remove_duplicate=False)
        frozen = {name.removeprefix("module.") for name, parameter in named if not parameter.requires_grad}
        state = get_model_state_dict(self.module, options=_TRAINED)
        return {name: state[name] for name in state if name not in frozen and not name.startswith("kept_teacher.")}


class DataParallel(_Native):
    """DDP: every worker holds everything. A single worker runs without it: gloo's threads, which would copy the
    gradients, outnumber the cores, and OpenMP then puts its own threads to sleep between operators."""

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
    """FSDP2: every layer is gathered when it runs; the rest (embeddings, norms, heads) belongs to the root.

    A fork without weights (on the meta device) is sharded first, and each worker reads only its own rows of each
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
        cast("FSDPModule", self.module).reshard()  # the root would wait for a backward pass, which does not come
        return measured


def _local(parameter: Tensor) -> Tensor:
    """This worker's part of a parameter."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def materialize(sharded: nn.Module, device: torch.device) -> None:
    """Give a sharded model on the meta device storage for this worker's rows; its buffers stay as they are, on the
    device that computes, to which FSDP2 has moved them."""
    buffers = [(module, dict(module._buffers)) for module in sharded.modules()]
    sharded.to_empty(device=device)
    for module, kept in buffers:
        module._buffers.update(kept)


def build_optimizer(parameters: Iterable[nn.Parameter], spec: OptimizerSpec) -> AdamW:
    """AdamW over the trained parameters; weight decay spares vectors (norms and biases)."""
    matrices, vectors = list[nn.Parameter](), list[nn.Parameter]()
    for parameter in parameters:
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO stage 3 leaves an empty vector in its place
        (matrices if len(shape) >= 2 else vectors).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": spec.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=0.0, betas=spec.betas)  # the step sets the rate


def build_optimizers(named: Iterable[tuple[str, nn.Parameter]], spec: OptimizerSpec) -> list[Optimizer]:
    """Build the optimizers that `spec.name` asks for: AdamW for everything, or Muon for the matrices and AdamW for the
    rest.

    Muon (Jordan et al., 2024) orthogonalises the momentum of a matrix by Newton-Schulz iterations. Its step is scaled
    to the root mean square of Adam's (Liu et al., 2025), so both take one learning rate. The exit head is left to
    AdamW, as heads and embeddings are.

    Args:
        named: trained parameters by name; with Muon whole matrices or `DTensor`s, no flat shards.
    """
    if spec.name == "adamw":
        return [build_optimizer((parameter for _, parameter in named), spec)]
    matrices, rest = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in named:
        (matrices if parameter.ndim == 2 and "exit_head." not in name else rest).append(parameter)
    muon = Muon(
        matrices, lr=0.0, weight_decay=spec.weight_decay, momentum=spec.momentum, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, build_optimizer(rest, spec)] if rest else [muon]


def set_learning_rate(optimizers: Sequence[Optimizer], rate: float) -> None:
    """Use `rate` for the next step of every group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


T = TypeVar("T")


class MeasuredStudent(nn.Module):
    """A student made from its lazy weights, with the copied start. If layers of its own are trained, the teacher keeps
    the untrained ones.

    Args:
        sharded: whether each worker of the default process group holds only its rows of every parameter.
    """

    def __init__(self, lazy: LazyStudent, spec: DistillationSpec, *, sharded: bool, device: torch.device) -> None:
        super().__init__()
        self.student = lazy.model
        self.kept_teacher: Any = None
        self.sharded = sharded
        self._lazy = lazy
        decoder = self.student.model
        units = list(sharding_units(decoder))
        if spec.trainable != "qkv":
            self.kept_teacher = keep_teacher(decoder, spec)
            units += list(self.kept_teacher.layers[first_trained_layer(self.student.config, spec) :])
            decoder.run_teacher_upper = self.kept_teacher.run_teacher_upper
            if spec.trainable == "all":
                decoder.run_teacher_lower = self.kept_teacher.run_lower
        self.requires_grad_(False)
        lazy.attach(self)
        if not sharded:
            lazy.fill(self)
            return
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for unit in [*units, self]:
            fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        materialize(self, device)
        lazy.fill_shards(self)

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        if self.sharded:
            self._lazy.started_from(tensors)
            self._lazy.fill_shards(self, only=tensors)
        else:
            load_trained(self.student, tensors)

    @torch.no_grad()
    def forward(self, work: Callable[[Any], T]) -> T:
        """Return `work(student)`. Collective if sharded, since its forward passes are."""
        return work(self.student)


def parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of a model's parameters on any device."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
