"""Dry runs of a job: its real wrapping, training step, calibration and evaluation in its true shape, over fake tensors
and a fake process group. Knows no Ray and reads no weights.

Tensors have shapes and no contents, and stand in host memory, since a CPU build of torch has no CUDA streams:
workspaces of kernels and what an allocator keeps are in none of the figures. Every position counts in the losses, and
every number that is read of a tensor is one.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, TypeVar, cast
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

from jobs.worker.measure import Evaluation
from jobs.worker.prepare import compute_dtype, student_shape
from swiftkv_platform.data.packing import PackedRows, Samples, pack
from swiftkv_platform.distillation import losses
from swiftkv_platform.distillation.checkpoint import Progress
from swiftkv_platform.distillation.fork import Fork
from swiftkv_platform.distillation.measured import MeasuredStudent
from swiftkv_platform.distillation.parallel import Parallel, parallelize
from swiftkv_platform.distillation.sequence_parallel import SequenceGroup
from swiftkv_platform.distillation.trainer import Trainer
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.model.batches import to_tensors
from swiftkv_platform.model.calibration_stream import calibrate_streamed
from swiftkv_platform.model.conversion import make_student_config
from swiftkv_platform.model.families import student_classes
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.planning.job_setup import training_setup
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.defaults import resolve_batch_size, resolve_defaults

T = TypeVar("T")

_SAMPLE_TOKENS = 128
"""Length of the samples of a packed row."""
_HELD_OUT_TOKENS = 8192
"""Tokens of the rows of one forward pass of an evaluation, or a whole row."""


class Memory(FrozenModel):
    """Bytes on one worker's device at the peak of a phase, by what they hold."""

    peak: int
    parameters: int
    """Weights, between passes: this worker's shards, or all of them."""
    gradients: int = 0
    """Gradients that the optimizer reads."""
    optimizer: int = 0
    """State of the optimizer."""
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


def dry_run(spec: JobSpec, config: Mapping[str, Any]) -> DryRun:
    """Run a job's phases without data, weights and machines.

    Args:
        config: the teacher's `config.json`.

    Raises:
        InvalidInputError: DDP and DeepSpeed copy by addresses, which fake tensors do not have.
    """
    strategy = spec.sharding.strategy
    if strategy != "fsdp2":
        raise InvalidInputError(
            f"sharding.strategy is {strategy!r}, whose buffers are made of addresses that fake tensors do not have; "
            "fsdp2 can be run dry, and `swiftkv jobs validate` plans the others by formula",
            field="sharding.strategy",
            value=strategy,
        )
    spec = _settled(spec, config)
    student_config = _student_config(spec, config)
    with _fakes(spec) as fakes:
        train, collectives, counts = _train(spec, student_config, fakes)
        calibrated = spec.swiftkv.initialization == "calibrated"
        return DryRun(
            num_workers=spec.resources.max_workers,
            num_micro_batches=training_setup(spec).num_micro_batches,
            num_parameters=counts[0],
            num_trained_parameters=counts[1],
            train=train,
            collectives=collectives,
            calibrate=_calibrate(spec, student_config, fakes) if calibrated else None,
            evaluate=_evaluate(spec, student_config, fakes),
        )


class _Assume(TorchDispatchMode):
    """Stand-ins for contents that fake tensors do not have: a number is one, a mask is set everywhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            return 1.0 if args[0].is_floating_point() else 1
        if func is torch.ops.aten.nonzero.default:
            return torch.empty(args[0].numel(), args[0].ndim, dtype=torch.int64, device=args[0].device)
        if func is torch.ops.aten.index.Tensor:
            indices = [place for index in args[1] for place in _places(index)]
            return func(args[0], indices)
        return func(*args, **kwargs or {})


def _places(index: Tensor | None) -> list[Tensor | None]:
    """Where a mask is set, dimension by dimension; other indices as they are."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [torch.empty(index.numel(), dtype=torch.int64, device=index.device) for _ in range(index.ndim)]


class _FusedAttention(torch.autograd.Function):
    """Shapes of an attention kernel that keeps no scores, as CUDA has them for every head size; the CPU's writes them
    out where keys and values differ in theirs."""

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


def _attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **_: Any) -> Tensor:
    output: Tensor = _FusedAttention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]
    return output


class _Tracker(MemTracker):
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


class _Fakes:
    """Fake weights and rows for a job."""

    def __init__(self, spec: JobSpec, mode: FakeTensorMode) -> None:
        self._spec = spec
        self._mode = mode
        self._tied = WeakIdKeyDictionary()

    @contextmanager
    def active(self, *modes: TorchDispatchMode) -> Iterator[None]:
        """Under fake tensors, `modes` and the assumptions about contents."""
        with ExitStack() as stack:
            for mode in (self._mode, *modes, _Assume()):  # type: ignore[no-untyped-call]
                stack.enter_context(mode)
            yield

    def student(self, config: Any) -> Any:
        """A student on the meta device, but for its positional buffers."""
        config = copy.deepcopy(config)
        with torch.device("meta"):
            model = student_classes(config.model_type.removesuffix("_swiftkv")).causal_lm(config)
        model.tie_weights()
        # No expert is chosen where scores have no contents: the loop over experts becomes one product of as many rows.
        model.config._experts_implementation_internal = "grouped_mm"
        with self._mode:
            model.model.rotary_emb = type(model.model.rotary_emb)(config=config)
        return model.eval()

    def fill(self, module: nn.Module) -> None:
        """Give every parameter of `module` that is on the meta device a fake tensor on the CPU."""
        for part in module.modules():
            for leaf, parameter in part._parameters.items():
                if parameter is not None and parameter.is_meta:
                    part._parameters[leaf] = self._filled(parameter)

    def _filled(self, parameter: nn.Parameter) -> nn.Parameter:
        known: nn.Parameter | None = self._tied.get(parameter)
        if known is None:
            with self._mode:
                values = torch.empty(parameter.shape, dtype=parameter.dtype)
                known = self._tied[parameter] = nn.Parameter(values, requires_grad=parameter.requires_grad)
        return known

    def rows(self, num_rows: int) -> PackedRows:
        """Full rows; packed ones of samples of a usual length."""
        data = self._spec.data
        length = min(_SAMPLE_TOKENS, data.max_length) if data.packing else data.max_length
        per_row = -(-data.max_length // length)
        num_tokens = num_rows * data.max_length
        starts = np.concatenate([row * data.max_length + np.arange(per_row) * length for row in range(num_rows)])
        samples = Samples(
            tokens=np.zeros(num_tokens, dtype=np.int32),
            counts=np.ones(num_tokens, dtype=np.bool_),
            starts=np.append(starts, num_tokens),
        )
        return pack(samples, np.arange(len(samples)), max_length=data.max_length, pad_token_id=0, packing=data.packing)


@contextmanager
def _fakes(spec: JobSpec) -> Iterator[_Fakes]:
    """A fake process group of all workers, and fake tensors that are chunked and attended to as on the job's device."""
    store, size = FakeStore(), spec.resources.max_workers
    dist.init_process_group("fake", store=store, rank=0, world_size=size)
    try:
        with ExitStack() as patched:
            if spec.resources.gpus_per_worker:
                patched.enter_context(patch.object(losses, "LOGITS_PER_CHUNK_ON_CPU", losses.LOGITS_PER_CHUNK))
                patched.enter_context(patch.object(torch.nn.functional, "scaled_dot_product_attention", _attend))
            patched.enter_context(
                patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", _propagate_unseen)
            )
            yield _Fakes(spec, FakeTensorMode(allow_non_fake_inputs=True))
    finally:
        dist.destroy_process_group()


_propagate = ShardingPropagator._propagate_tensor_meta_non_cached


def _propagate_unseen(propagator: ShardingPropagator, op_schema: Any) -> Any:
    """Find the shape of an operator's result as DTensor does, over fake tensors as large as all workers' shards
    together: fake in a real run as well, so that no tracker may see them."""
    with _disable_current_modes():
        return _propagate(propagator, op_schema)


def _train(spec: JobSpec, config: Any, fakes: _Fakes) -> tuple[Memory, tuple[Collective, ...], tuple[int, int]]:
    """Memory and collectives of a step, and the numbers of parameters, all and trained."""
    parallel = _spread(spec, config, fakes)
    trainer = _trainer(spec, parallel, fakes.rows(_batch_size(spec)))
    counts = (
        sum(parameter.numel() for parameter in parallel.module.parameters()),
        sum(parameter.numel() for parameter in parallel.module.parameters() if parameter.requires_grad),
    )
    tracker, gradients = _Tracker(), _Gradients()
    tracker.track_external(parallel.module)
    parameters = tracker.alive
    with fakes.active(tracker):
        parallel.state()  # as a worker looks for a checkpoint to go on from, which makes the optimizer's state
        optimizer = tracker.alive - parameters
        tracker.restart()
        with gradients:
            trainer.train_step(Progress(0, 0))
    passing = tracker.peak - parameters - optimizer
    memory = Memory(
        peak=tracker.peak, parameters=parameters, gradients=gradients.num_bytes, optimizer=optimizer, passing=passing
    )
    return memory, tracker.collectives, counts


def _spread(spec: JobSpec, config: Any, fakes: _Fakes) -> Parallel:
    """The fork over the workers, as `jobs.worker.train` has it."""
    fork = Fork(
        fakes.student(config),
        spec.distillation,
        dtype=compute_dtype(spec),
        gradient_checkpointing=spec.training.gradient_checkpointing,
        sequence=SequenceGroup.create(spec.sharding.sequence_parallel_size, torch.device("cpu")),
    )
    weights = _FakeWeights(fork.student, fakes)
    return parallelize(fork, spec, dtype=compute_dtype(spec), device=torch.device("cpu"), weights=weights)


def _trainer(spec: JobSpec, parallel: Parallel, rows: PackedRows) -> Trainer:
    # A single step neither saves nor reports.
    return Trainer(parallel, rows, cast("Any", None), spec, total_steps=1, listener=cast("Any", None))


class _Gradients:
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


class _FakeWeights:
    """Weights without values, in place of a `LazyStudent`."""

    def __init__(self, model: Any, fakes: _Fakes) -> None:
        self.model = model
        self._fakes = fakes

    def attach(self, _fork: nn.Module) -> None:
        """Learn nothing: all weights are alike."""

    def fill(self, module: nn.Module, *, own: bool = True, read: bool = True) -> None:
        """Give the parameters of `module` that are on the meta device storage."""
        del own, read
        self._fakes.fill(module)

    def fill_shards(self, _root: nn.Module) -> None:
        """Write nothing: shards have their storage."""

    def release(self, module: nn.Module) -> None:
        """Put the parameters of `module` back on the meta device."""
        for part in module.modules():
            for leaf, parameter in part._parameters.items():
                if parameter is not None:
                    part._parameters[leaf] = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)


class _FakeWorkers(Workers):
    """Workers of a fake process group, which carries no objects: this one speaks for all."""

    def gather(self, value: T) -> list[T]:
        return [value] * self.size

    def from_first(self, value: T) -> T:
        return value


def _calibrate(spec: JobSpec, config: Any, fakes: _Fakes) -> Memory:
    """Memory of one worker that calibrates on one row."""
    source, tracker = _FakeWeights(fakes.student(config).to(compute_dtype(spec)), fakes), _Tracker()
    rows = [to_tensors(fakes.rows(1).batch([0]))]
    with fakes.active(tracker):
        for _ in calibrate_streamed(source, rows, workers=_FakeWorkers()):
            pass
    return Memory(peak=tracker.peak, parameters=0, passing=tracker.peak)


def _evaluate(spec: JobSpec, config: Any, fakes: _Fakes) -> Memory:
    """Memory of one of the workers that share the model, for the rows of a forward pass."""
    weights = cast("Any", _FakeWeights(fakes.student(config).to(compute_dtype(spec)), fakes))
    model = MeasuredStudent(weights, spec.distillation, sharded=True, device=torch.device("cpu"))
    tracker = _Tracker()
    tracker.track_external(model)
    parameters = tracker.alive
    size = spec.resources.max_workers
    rows = fakes.rows(size * -(-_HELD_OUT_TOKENS // spec.data.max_length))
    settings = spec.evaluation.model_copy(update={"max_tokens": size * _HELD_OUT_TOKENS})
    with fakes.active(tracker):
        workers = _FakeWorkers(in_step=True)
        model(lambda student: Evaluation(student, rows, settings, workers=workers).compare("distilled"))
    return Memory(peak=tracker.peak, parameters=parameters, passing=tracker.peak - parameters)


def _settled(spec: JobSpec, config: Mapping[str, Any]) -> JobSpec:
    length = config.get("max_position_embeddings")
    settled = resolve_defaults(spec, context_length=length, hidden_size=config["hidden_size"])
    settled = resolve_batch_size(settled, num_rows=sys.maxsize)
    size = min(_batch_size(settled), 2 * settled.rows_per_pass)
    return settled.model_copy(update={"training": settled.training.model_copy(update={"batch_size": size})})


def _batch_size(spec: JobSpec) -> int:
    assert spec.training.batch_size is not None, "settled"
    return spec.training.batch_size


def _student_config(spec: JobSpec, config: Mapping[str, Any]) -> Any:
    values = {key: value for key, value in config.items() if key != "quantization_config"}
    return make_student_config(AutoConfig.for_model(**values), **student_shape(spec))
