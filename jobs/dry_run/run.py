"""Phases of a job over fake tensors: its real wrapping, training step, calibration and evaluation, with their memory
and collectives.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from transformers import AutoConfig

from swiftkv_platform.distillation.course import Progress
from swiftkv_platform.distillation.fork import Fork
from swiftkv_platform.distillation.measured import MeasuredStudent
from swiftkv_platform.distillation.parallel import Parallel
from swiftkv_platform.distillation.trainer import Trainer, parallelize
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.jobs.dry_run.fakes import Fakes, FakeWeights, FakeWorkers, faked
from swiftkv_platform.jobs.worker.measure import Evaluation
from swiftkv_platform.jobs.worker.setup import compute_dtype, student_shape
from swiftkv_platform.model.calibration_stream import calibrate_streamed
from swiftkv_platform.model.conversion import make_student_config
from swiftkv_platform.model.packed_attention import to_tensors
from swiftkv_platform.planning.job import training_setup
from swiftkv_platform.sources.loader_rules import clean_config
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.defaults import resolve_batch_size, resolve_defaults

_HELD_OUT_TOKENS = 8192
"""Tokens of an evaluation's forward pass; at least one row."""


class Memory(FrozenModel):
    """Bytes on one worker's device at the peak of a phase, by use."""

    peak: int
    parameters: int
    """Weights, between passes: this worker's shards, or all of them."""
    gradients: int = 0
    """Gradients that the optimizer reads."""
    optimizer: int = 0
    """Optimizer state."""
    remembered: int = 0
    """Copy of the untrained weights while a worker without a GPU tries learning rates."""
    passing: int
    """The rest of the peak: activations, gathered weights, buffers, gradients on their way."""


class Collective(FrozenModel):
    """Calls of one collective by one worker in a step."""

    name: str
    calls: int
    num_bytes: int
    """Bytes of all calls, for each the larger of input and output."""


class DryRun(FrozenModel):
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
    """One row through the teacher layer by layer, and the sums of it; None for a copied start."""
    evaluate: Memory
    """Rows through teacher and student, sharded over the workers."""


def dry_run(spec: JobSpec, config: Mapping[str, Any]) -> DryRun:
    """Run a job's phases without data, weights and machines. `config`: the teacher's `config.json`. Raises
    `InvalidInputError` for DDP and DeepSpeed, which copy by address, and fake tensors have none."""
    strategy = spec.sharding.strategy
    if strategy != "fsdp2":
        raise InvalidInputError(
            f"sharding.strategy is {strategy!r}, whose buffers need memory addresses, which fake tensors do not have; "
            "fsdp2 can be run dry, and `swiftkv jobs validate` plans the others by formula",
            field="sharding.strategy",
            value=strategy,
        )
    spec = _settled(spec, config)
    student_config = _student_config(spec, config)
    with faked(spec) as fakes:
        train, collectives, counts = _train(spec, student_config, fakes)
        calibrated = spec.swiftkv.is_calibrated
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


def _train(spec: JobSpec, config: Any, fakes: Fakes) -> tuple[Memory, tuple[Collective, ...], tuple[int, int]]:
    """Return memory and collectives of a step, and the numbers of all and of trained parameters."""
    parallel = _spread(spec, config, fakes)
    nothing = cast("Any", None)  # a single step neither saves nor reports
    trainer = Trainer(parallel, fakes.rows(_batch_size(spec)), nothing, spec, total_steps=1, listener=nothing)
    counts = (
        sum(parameter.numel() for parameter in parallel.module.parameters()),
        sum(parameter.numel() for parameter in parallel.module.parameters() if parameter.requires_grad),
    )
    tracker, gradients = Tracker(), Gradients()
    tracker.track_external(parallel.module)
    parameters = tracker.alive
    with fakes.active(tracker):
        parallel.state()  # creates the optimizer's state, as a worker does to look for a checkpoint
        optimizer = tracker.alive - parameters
        # A worker with a GPU keeps the copy in host memory.
        remembers = training_setup(spec).searches_rate and not spec.resources.gpus_per_worker
        put_back = parallel.remember() if remembers else None
        remembered = tracker.alive - parameters - optimizer
        tracker.restart()
        with gradients:
            trainer.train_step(Progress(0, 0))
        del put_back
    memory = Memory(
        peak=tracker.peak,
        parameters=parameters,
        gradients=gradients.num_bytes,
        optimizer=optimizer,
        remembered=remembered,
        passing=tracker.peak - parameters - optimizer - remembered,
    )
    return memory, tracker.collectives, counts


def _spread(spec: JobSpec, config: Any, fakes: Fakes) -> Parallel:
    """Spread the fork over the workers, as `swiftkv_platform.jobs.worker.train` does."""
    device = torch.device("cpu")
    fork = Fork.of_job(fakes.student(config), spec, device=device)
    weights = FakeWeights(fork.student, fakes)
    return parallelize(fork, spec, dtype=compute_dtype(spec), device=device, weights=weights)


def _calibrate(spec: JobSpec, config: Any, fakes: Fakes) -> Memory:
    source, tracker = FakeWeights(fakes.student(config).to(compute_dtype(spec)), fakes), Tracker()
    rows = [to_tensors(fakes.rows(1).batch([0]))]
    with fakes.active(tracker):
        for _ in calibrate_streamed(source, rows, workers=FakeWorkers(), refit=spec.swiftkv.is_refitted):
            pass
    return Memory(peak=tracker.peak, parameters=0, passing=tracker.peak)


def _evaluate(spec: JobSpec, config: Any, fakes: Fakes) -> Memory:
    """Memory of one of the workers that share the model, for the rows of a forward pass."""
    weights = cast("Any", FakeWeights(fakes.student(config).to(compute_dtype(spec)), fakes))
    model = MeasuredStudent(weights, spec.distillation, sharded=True, device=torch.device("cpu"))
    tracker = Tracker()
    tracker.track_external(model)
    parameters = tracker.alive
    size = spec.resources.max_workers
    rows = fakes.rows(size * -(-_HELD_OUT_TOKENS // spec.data.max_length))
    settings = spec.evaluation.model_copy(update={"max_tokens": size * _HELD_OUT_TOKENS})
    with fakes.active(tracker):
        workers = FakeWorkers(in_step=True)
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
    values = {key: value for key, value in clean_config(config).items() if key != "quantization_config"}
    return make_student_config(AutoConfig.for_model(**values), **student_shape(spec))


class _NoModules:
    """Replaces torch's module tracker, whose hooks around each module cost more than everything counted here."""

    is_bw = False
    parents: frozenset[str] = frozenset()

    def register_user_hooks(self, *_: Any) -> None:
        """Do nothing."""

    def clear_user_hooks(self) -> None:
        """Do nothing."""

    def __enter__(self) -> None:
        """Do nothing."""

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


class Tracker(MemTracker):
    """Tracks bytes alive, their peak, and collectives. It is torch's tracker without figures by module, which would
    allow only one forward pass per module, and without a copy of all figures at every new peak."""

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
    """Sum the bytes on the device; tensors on the meta device, such as those of a released layer, have none."""
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
