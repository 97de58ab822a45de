"""Dry runs of a job: its real wrapping, training step, calibration and evaluation at full size, over fake tensors and a
fake process group. Needs no Ray and reads no weights.

Tensors have shapes but no contents, and are in host memory, since a CPU build of torch has no CUDA streams: the figures
exclude workspaces of kernels and caches of the allocator. Every position counts in the losses, and every number read
from a tensor is 1.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, TypeVar, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary
from transformers import AutoConfig

from swiftkv_platform.data.packing import PackedRows, Samples, pack
from swiftkv_platform.distillation.model import DistillationModel
from swiftkv_platform.distillation.steering import TrainingProgress
from swiftkv_platform.distillation.strategy import EvaluationModel
from swiftkv_platform.distillation.trainer import Trainer, parallelize
from swiftkv_platform.engine import kernels
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.jobs.worker.measure import StudentEvaluator
from swiftkv_platform.jobs.worker.setup import get_compute_dtype
from swiftkv_platform.model import packed_attention
from swiftkv_platform.model.calibration import attention, calibrate_layerwise
from swiftkv_platform.model.causal_lm import get_student_classes, make_student_config
from swiftkv_platform.model.packed_attention import (
    AttentionImplementation,
    VarlenOperator,
    find_flash_head_obstacle,
    get_attention_head_dim,
    to_tensors,
)
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.planning.job import make_training_setup
from swiftkv_platform.planning.training import LOGITS_PER_CHUNK
from swiftkv_platform.sources.loader_rules import clean_config
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.job import resolve_batch_size, resolve_model_defaults

T = TypeVar("T")

_SAMPLE_TOKENS = 128
"""Tokens of a sample in packed rows."""


class _AssumeOnes(TorchDispatchMode):
    """Replaces contents that fake tensors lack: every number is 1, and every mask is set everywhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten.nonzero.default:
            return torch.empty(args[0].numel(), args[0].ndim, dtype=torch.int64, device=args[0].device)
        if func is torch.ops.aten.index.Tensor:
            indices = [place for index in args[1] for place in _expand_mask(index)]
            return func(args[0], indices)
        return func(*args, **kwargs or {})


def _expand_mask(index: Tensor | None) -> list[Tensor | None]:
    """Return the indices of a fully set mask, by dimension; other indices unchanged."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [torch.empty(index.numel(), dtype=torch.int64, device=index.device) for _ in range(index.ndim)]


class _FusedAttention(torch.autograd.Function):
    """Shapes of an attention kernel that stores no scores, which CUDA has for every head size. The CPU's stores them if
    keys and values differ in size."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        bias = None if mask is None else mask.to(query.dtype)
        output = query.new_empty(*query.shape[:-1], value.shape[-1])
        ctx.save_for_backward(query, key, value, bias, output, query.new_empty(query.shape[:-1], dtype=torch.float32))
        return output

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None


def _attend_varlen(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Attention of all samples at once, [num_tokens, num_heads, dim] from queries, keys and values of that shape."""
    output: Tensor = _FusedAttention.apply(query, key, value, None)  # type: ignore[no-untyped-call]
    return output


def _choose_operator(
    implementation: AttentionImplementation, config: Any, _: torch.device, dtype: torch.dtype
) -> VarlenOperator | None:
    """Return the operator that a GPU with FlashAttention would use."""
    if implementation == "sdpa" or find_flash_head_obstacle(dtype, get_attention_head_dim(config)) is not None:
        return None
    return _attend_varlen


def _assign_heads(lost: Tensor) -> list[int]:
    """Return any assignment; all cost the same."""
    return list(range(len(lost)))


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
    output: Tensor = _FusedAttention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
    return output


class FakeInputs:
    """Fake weights and rows for a job."""

    def __init__(self, spec: JobSpec, mode: FakeTensorMode) -> None:
        self._spec = spec
        self._mode = mode
        self._tied = WeakIdKeyDictionary()

    @contextmanager
    def use_fakes(self, *modes: TorchDispatchMode) -> Iterator[None]:
        """Run under fake tensors, `modes` and the replacements for contents."""
        with ExitStack() as stack:
            for mode in (self._mode, *modes, _AssumeOnes()):  # type: ignore[no-untyped-call]
                stack.enter_context(mode)
            yield

    def make_student(self, config: Any) -> Any:
        """Make a student on the meta device, except for its positional buffers."""
        config = copy.deepcopy(config)
        with torch.device("meta"):
            model = get_student_classes(config.model_type.removesuffix("_swiftkv")).causal_lm(config)
        model.tie_weights()
        # Without scores no expert can be chosen: the loop over experts becomes one grouped product with as many rows.
        model.config._experts_implementation_internal = "grouped_mm"
        with self._mode:
            model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
        return model.eval()

    def make_fake_parameters(self, module: nn.Module) -> None:
        """Give every parameter of `module` that is on the meta device a fake tensor on the CPU."""
        for part in module.modules():
            for leaf, parameter in part._parameters.items():
                if parameter is not None and parameter.is_meta:
                    part._parameters[leaf] = self._fill_parameter(parameter)

    def _fill_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        known: nn.Parameter | None = self._tied.get(parameter)
        if known is None:
            with self._mode:
                values = torch.empty(parameter.shape, dtype=parameter.dtype)
                known = self._tied[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        return known

    def untie_parameter(self, made: nn.Parameter) -> None:
        """Drop a parameter that `make_fake_parameters` has made, so that no module is tied to it any more."""
        for empty in [empty for empty, known in self._tied.items() if known is made]:
            del self._tied[empty]

    def make_rows(self, num_rows: int) -> PackedRows:
        """Make full rows, packed with samples of a typical length unless packing is off."""
        data = self._spec.data
        length = min(_SAMPLE_TOKENS, data.max_length) if data.packing else data.max_length
        per_row = -(-data.max_length // length)
        num_tokens = num_rows * data.max_length
        starts = np.concatenate([row * data.max_length + np.arange(per_row) * length for row in range(num_rows)])
        samples = Samples(
            tokens=np.zeros(num_tokens, dtype=np.int32),
            loss_mask=np.ones(num_tokens, dtype=np.bool_),
            starts=np.append(starts, num_tokens),
        )
        return pack(samples, np.arange(len(samples)), max_length=data.max_length, pad_token_id=0, packing=data.packing)


@contextmanager
def fake_cluster(spec: JobSpec) -> Iterator[FakeInputs]:
    """Set up a fake process group of all workers, and fake tensors with the chunks and the attention of the job's
    device."""
    store, size = FakeStore(), spec.resources.max_workers
    dist.init_process_group("fake", store=store, rank=0, world_size=size)
    try:
        with ExitStack() as patched:
            if spec.resources.gpus_per_worker:
                patched.enter_context(patch.dict(LOGITS_PER_CHUNK, cpu=LOGITS_PER_CHUNK["cuda"]))
                patched.enter_context(patch.object(torch.nn.functional, "scaled_dot_product_attention", _attend))
                patched.enter_context(patch.object(packed_attention, "choose_operator", _choose_operator))
            patched.enter_context(patch.object(kernels, "find_packed_operator", return_value=None))
            patched.enter_context(patch.object(attention, "assign_heads", _assign_heads))
            patched.enter_context(
                patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", _propagate_untracked)
            )
            yield FakeInputs(spec, FakeTensorMode(allow_non_fake_inputs=True))
    finally:
        dist.destroy_process_group()


_propagate = ShardingPropagator._propagate_tensor_meta_non_cached


def _propagate_untracked(propagator: ShardingPropagator, op_schema: Any) -> Any:
    """Infer the shape of an operator's result like DTensor does, over fake tensors as large as all shards together.
    They are fake in a real run too, so trackers must not see them."""
    with _disable_current_modes():
        return _propagate(propagator, op_schema)


class FakeWeights:
    """Weights without values, used instead of a `LazyStudent`."""

    def __init__(self, model: Any, fakes: FakeInputs) -> None:
        self.model = model
        self._fakes = fakes

    def map_parameters(self, _module: nn.Module) -> None:
        """Do nothing: fake weights do not differ by model."""

    def load_parameters(self, module: nn.Module, *, with_added: bool = True, read: bool = True) -> None:
        """Give storage to the parameters of `module` that are on the meta device."""
        del with_added, read
        self._fakes.make_fake_parameters(module)

    def load_shards(self, _root: nn.Module) -> None:
        """Write nothing: shards have their storage."""

    def free_parameters(self, module: nn.Module) -> None:
        """Put the parameters of `module` back on the meta device."""
        for part in module.modules():
            for leaf, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[leaf] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
                    self._fakes.untie_parameter(parameter)


class FakeWorkers(Workers):
    """Workers of a fake process group, which cannot send objects: this worker's value counts for all."""

    def gather(self, value: T) -> list[T]:
        return [value] * self.size

    def broadcast_from_first(self, value: T) -> T:
        return value


_HELD_OUT_TOKENS = 8192
"""Tokens of an evaluation's forward pass; at least one row."""


class Memory(FrozenBaseModel):
    """Bytes on one worker's device at the peak of a phase, by use."""

    peak: int
    parameters: int
    """Weights, between passes: this worker's shards, or all of them."""
    gradients: int = 0
    """Gradients that the optimizer reads."""
    optimizer: int = 0
    """Optimizer state."""
    remembered: int = 0
    """Copy of the initial weights during the learning-rate search of a worker without a GPU."""
    passing: int
    """Remainder of the peak: activations, weights gathered from shards, buffers, gradients in transit."""


class Collective(FrozenBaseModel):
    """Calls of one collective by one worker in a step."""

    name: str
    calls: int
    num_bytes: int
    """Bytes of all calls, for each the larger of input and output."""


class DryRun(FrozenBaseModel):
    """Collectives and memory of one worker."""

    num_workers: int
    num_micro_batches: int
    """Micro batches of the executed step; beyond two, they repeat the first."""
    num_parameters: int
    num_trained_parameters: int
    train: Memory
    """Memory of a step, with the optimizer's state in place."""
    collectives: tuple[Collective, ...]
    calibrate: Memory | None
    """Memory of calibration: one row runs through the teacher layer by layer, and sums over it are collected; None for
    a copied start."""
    evaluate: Memory
    """Memory of evaluation: rows run through teacher and student, which are sharded over the workers."""


def dry_run(spec: JobSpec, config: Mapping[str, Any]) -> DryRun:
    """Run a job's phases without data, weights and machines. `config`: the teacher's `config.json`. Raises
    `InvalidInputError` for DDP and DeepSpeed, since fake tensors have no memory addresses."""
    strategy = spec.sharding.strategy
    if strategy != "fsdp2":
        why = ", which needs memory addresses, and the tensors of a dry run have none"
        instead = "use fsdp2, or plan by formula with `swiftkv jobs validate`"
        raise InvalidInputError.for_field("sharding.strategy", strategy, f"{why}; {instead}")
    spec = _resolve_spec(spec, config)
    values = {key: value for key, value in clean_config(config).items() if key != "quantization_config"}
    student_config = make_student_config(AutoConfig.for_model(**values), spec.swiftkv.request)
    with fake_cluster(spec) as fakes:
        train, collectives, counts = _run_train(spec, student_config, fakes)
        calibrated = spec.swiftkv.is_calibrated
        return DryRun(
            num_workers=spec.resources.max_workers,
            num_micro_batches=make_training_setup(spec).num_micro_batches,
            num_parameters=counts[0],
            num_trained_parameters=counts[1],
            train=train,
            collectives=collectives,
            calibrate=_run_calibrate(spec, student_config, fakes) if calibrated else None,
            evaluate=_run_evaluate(spec, student_config, fakes),
        )


def _run_train(spec: JobSpec, config: Any, fakes: FakeInputs) -> tuple[Memory, tuple[Collective, ...], tuple[int, int]]:
    """Return memory and collectives of a step, and the numbers of all and of trained parameters."""
    device, dtype = torch.device("cpu"), get_compute_dtype(spec)
    model = DistillationModel.from_spec(fakes.make_student(config), spec, device=device)
    strategy = parallelize(model, spec, dtype=dtype, device=device, weights=FakeWeights(model.student, fakes))
    nothing = cast("Any", None)  # a single step neither saves nor reports
    assert spec.training.batch_size is not None, "resolved"
    rows = fakes.make_rows(spec.training.batch_size)
    trainer = Trainer(strategy, rows, nothing, spec, total_steps=1, listener=nothing)
    counts = (
        sum(parameter.numel() for parameter in strategy.module.parameters()),
        sum(parameter.numel() for parameter in strategy.module.parameters() if parameter.requires_grad),
    )
    tracker, gradients = MemoryTracker(), list[int]()
    tracker.track_external(strategy.module)
    parameters = tracker.bytes_alive
    with fakes.use_fakes(tracker):
        strategy.get_state()  # creates the optimizer's state, as a worker does to look for a checkpoint
        optimizer = tracker.bytes_alive - parameters
        # A worker with a GPU keeps the copy in host memory.
        remembers = make_training_setup(spec).searches_rate and not spec.resources.gpus_per_worker
        restore_weights = strategy.snapshot_weights() if remembers else None
        remembered = tracker.bytes_alive - parameters - optimizer
        tracker.reset_measurements()
        hook = register_optimizer_step_pre_hook(
            lambda optimizer, *_: gradients.append(_count_gradient_bytes(optimizer))
        )
        try:
            trainer.train_step(TrainingProgress(0, 0))
        finally:
            hook.remove()
        del restore_weights
    memory = Memory(
        peak=tracker.peak,
        parameters=parameters,
        gradients=sum(gradients),
        optimizer=optimizer,
        remembered=remembered,
        passing=tracker.peak - parameters - optimizer - remembered,
    )
    return memory, tracker.collectives, counts


def _run_calibrate(spec: JobSpec, config: Any, fakes: FakeInputs) -> Memory:
    source, tracker = FakeWeights(fakes.make_student(config).to(get_compute_dtype(spec)), fakes), MemoryTracker()
    rows = [to_tensors(fakes.make_rows(1).make_padded_batch([0]))]
    with fakes.use_fakes(tracker):
        for _ in calibrate_layerwise(source, rows, workers=FakeWorkers()):
            pass
    return Memory(peak=tracker.peak, parameters=0, passing=tracker.peak)


def _run_evaluate(spec: JobSpec, config: Any, fakes: FakeInputs) -> Memory:
    """Memory of one of the workers that share the model, for the rows of a forward pass."""
    weights = cast("Any", FakeWeights(fakes.make_student(config).to(get_compute_dtype(spec)), fakes))
    model = EvaluationModel(weights, spec.distillation, sharded=True, device=torch.device("cpu"))
    tracker = MemoryTracker()
    tracker.track_external(model)
    parameters = tracker.bytes_alive
    size = spec.resources.max_workers
    rows = fakes.make_rows(size * -(-_HELD_OUT_TOKENS // spec.data.max_length))
    settings = spec.evaluation.model_copy(update={"max_tokens": size * _HELD_OUT_TOKENS})
    with fakes.use_fakes(tracker):
        workers = FakeWorkers(in_step=True)
        model(
            lambda student: StudentEvaluator(student, rows, settings, workers=workers).compare_teacher_and_student(
                "distilled"
            )
        )
    return Memory(peak=tracker.peak, parameters=parameters, passing=tracker.peak - parameters)


def _resolve_spec(spec: JobSpec, config: Mapping[str, Any]) -> JobSpec:
    length = config.get("max_position_embeddings")
    settled = resolve_model_defaults(spec, context_length=length, hidden_size=config["hidden_size"])
    settled = resolve_batch_size(settled, num_rows=sys.maxsize)
    assert settled.training.batch_size is not None, "resolved"
    size = min(settled.training.batch_size, 2 * settled.global_micro_batch_size)
    return settled.model_copy(update={"training": settled.training.model_copy(update={"batch_size": size})})


class _NoModuleTracker(nullcontext[None]):
    """Replaces torch's module tracker, whose hooks around each module cost more than everything counted here."""

    is_bw = False
    parents: frozenset[str] = frozenset()

    def register_user_hooks(self, *_: Any) -> None:
        """Do nothing."""

    def clear_user_hooks(self) -> None:
        """Do nothing."""


class MemoryTracker(MemTracker):
    """Tracks bytes alive, their peak, and collectives. It is torch's tracker without figures by module, which would
    allow only one forward pass per module, and without a copy of all figures at every new peak."""

    def __init__(self) -> None:
        super().__init__()
        self._mod_tracker = cast("Any", _NoModuleTracker())
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
            self._bytes[name] += max((tensor.nbytes for tensor in _flatten_tensors((args, kwargs))), default=0)
        return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]

    def reset_measurements(self) -> None:
        self._peak_mem.clear()
        self._calls.clear()
        self._bytes.clear()

    @property
    def bytes_alive(self) -> int:
        return _sum_device_bytes({device: snapshot["Total"] for device, snapshot in self._curr_mem_snap.items()})

    @property
    def peak(self) -> int:
        return _sum_device_bytes(self._peak_mem)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        return tuple(
            Collective(name=name, calls=calls, num_bytes=self._bytes[name])
            for name, calls in sorted(self._calls.items())
        )


def _sum_device_bytes(totals: Mapping[torch.device, int]) -> int:
    """Sum the bytes on the device; tensors on the meta device, such as those of a released layer, have none."""
    return sum(total for device, total in totals.items() if device.type != "meta")


def _flatten_tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _count_gradient_bytes(optimizer: Optimizer) -> int:
    """Return the bytes of this worker's gradients that an optimizer reads."""
    gradients = (parameter.grad for group in optimizer.param_groups for parameter in group["params"])
    found = (each.to_local() if isinstance(each, DTensor) else each for each in gradients if each is not None)
    return sum(each.nbytes for each in found)
