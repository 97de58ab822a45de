"""Small distillation runs over real process groups. A separate module, so that spawned workers can import it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from swiftkv_platform.contract.attempts import AttemptId, AttemptRequest, StopRequest
from swiftkv_platform.data.packing import PackedRows, Samples, pack
from swiftkv_platform.distillation.checkpoint import Checkpointer, load_training_state
from swiftkv_platform.distillation.model import DistillationModel
from swiftkv_platform.distillation.partial_reads import CheckpointTensors
from swiftkv_platform.distillation.steering import SteeringNote, TrainingProgress
from swiftkv_platform.distillation.strategy import Strategy
from swiftkv_platform.distillation.trainer import StepMetrics, Trainer, parallelize
from swiftkv_platform.jobs.attempt.stored import AttemptCheckpoints
from swiftkv_platform.model import convert
from swiftkv_platform.model.weights import checkpoint
from swiftkv_platform.model.weights.lazy_student import LazyStudent
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.object_store import open_store
from swiftkv_platform.student_shape import RequestedStudentShape
from tests.numerics.spawning import run_in_group
from tests.support.tiny_models import family_teacher, random_teacher

CHECKPOINTS = AttemptId("j", 1).checkpoints_prefix
"""Prefix of the checkpoints inside a run's store."""
VOCAB, ROW_LENGTH, NUM_LAYERS, NUM_KEY_VALUE_LAYERS = 50, 24, 5, 2


def tiny_teacher() -> Any:
    small = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": NUM_LAYERS}
    special = {"tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2}
    return random_teacher(**small, **special, num_attention_heads=4, initializer_range=0.2)


def tiny_student(*, group_size: int = 2, early_exit: bool = False, family: str | None = None, **shape: Any) -> Any:
    return convert(
        tiny_teacher() if family is None else family_teacher(family),
        num_key_value_layers=NUM_KEY_VALUE_LAYERS,
        key_value_group_size=group_size,
        early_exit=early_exit,
        **shape,
    )


def tiny_rows(num_samples: int = 60, *, seed: int = 0) -> PackedRows:
    """Return packed rows of at least two samples each, of different lengths; some positions do not count."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(3, ROW_LENGTH // 2, num_samples)
    counts = generator.random(lengths.sum()) < 0.8
    counts[np.cumsum(lengths) - 1] = False
    samples = Samples(
        tokens=generator.integers(0, VOCAB, lengths.sum()).astype(np.int32),
        loss_mask=counts,
        starts=np.concatenate([[0], np.cumsum(lengths)]),
    )
    return pack(samples, np.arange(num_samples), max_length=ROW_LENGTH, pad_token_id=0)


@dataclass(frozen=True)
class Run:
    """One run of a scenario: its sharding, where it stops, and where its checkpoints are."""

    store: str
    """Address of the object store."""
    attempt: int = 1
    resume_from: str | None = None
    """Key of a checkpoint, or a pattern that matches exactly one key."""
    parent: str | None = None
    """Directory of the checkpoint that the run continues from, or a pattern that matches exactly one."""
    stop_after: int | None = None
    """Leave the loop, as if killed, once this many steps are done."""
    stop_requests: dict[int, StopRequest] = field(default_factory=dict)
    """Stop requests that the last worker receives, by the step that they follow."""
    early_exit: bool = False
    decode_key_value: str = "shared"
    prefill_layers: list[int] | None = None
    family: str | None = None
    """Family among `tiny_models.FAMILY_CONFIGS`; None for the tiny Llama."""
    teacher: str | None = None
    """Directory of the teacher; sharded workers read its weights piece by piece."""
    held_out: bool = False
    """Steer the run by held-out rows."""
    spec: dict[str, Any] = field(default_factory=dict)
    """Sections of the job spec that differ from `job_spec`."""


@dataclass(frozen=True)
class Outcome:
    steps: list[StepMetrics]
    trained: dict[str, Tensor]
    """Trained parameters, whole, by the student's names."""
    notes: list[SteeringNote]
    frozen_changed: list[str]
    """Names of frozen parameters whose values changed."""
    largest_share: float = 1.0
    """Largest share of the model's elements that this worker held at once while it read the weights."""
    share_read: float = 1.0
    """Bytes of weights that this worker read, as a share of the checkpoint's."""


def assert_equal_weights(actual: Outcome, expected: Outcome) -> None:
    for name, tensor in expected.trained.items():
        assert actual.trained[name].equal(tensor), name


def job_spec(sections: dict[str, Any]) -> JobSpec:
    base: dict[str, Any] = {"model": {"dtype": "float32"}, "resources": {"num_workers": 1}}
    base |= {"checkpoint": {"every_steps": 2}, "sharding": {"strategy": "ddp"}}
    base["training"] = {"batch_size": 4, "micro_batch_size": 1, "max_steps": 4}
    base["optimizer"] = {"learning_rate": 1e-2, "warmup_ratio": 0.25}
    merged = {key: {**base.get(key, {}), **sections.get(key, {})} for key in base | sections}
    return JobSpec.model_validate({**merged, "name": "n"})


class _KilledError(Exception):
    """Raised to end a run in the middle."""


class Recorder:
    """Record the metrics of every step, and end the run after the step `stop_after`."""

    def __init__(self, stop_after: int | None = None, stop_requests: dict[int, StopRequest] | None = None) -> None:
        self.steps: list[StepMetrics] = []
        self.notes: list[SteeringNote] = []
        self._stop_after, self._stop_requests = stop_after, stop_requests or {}

    def on_start(self, progress: TrainingProgress) -> None:
        """Ignore the start: the first step's metrics say the same."""

    def on_step(self, metrics: StepMetrics) -> None:
        self.steps.append(metrics)
        if metrics.step == self._stop_after:
            raise _KilledError

    def on_steering(self, note: SteeringNote) -> None:
        self.notes.append(note)

    def poll_stop_request(self) -> StopRequest:
        return self._stop_requests.get(self.steps[-1].step, StopRequest.NONE)


def run(scenario: Run) -> Outcome:
    """Train over the default process group."""
    spec = job_spec(scenario.spec)
    dtype = getattr(torch, spec.model.dtype)
    lazy, student = (
        None,
        tiny_student(
            early_exit=scenario.early_exit,
            family=scenario.family,
            decode_key_value=scenario.decode_key_value,
            prefill_layers=scenario.prefill_layers,
        ),
    )
    if scenario.teacher is not None:
        shape: dict[str, Any] = {"num_key_value_layers": NUM_KEY_VALUE_LAYERS, "key_value_group_size": 2}
        shape |= {"prefill_reduction": None, "early_exit": scenario.early_exit, "sharing": "gqa"}
        student = convert(scenario.teacher, **shape, dtype=dtype)
        if spec.sharding.shards_parameters:
            lazy = LazyStudent.open(scenario.teacher, RequestedStudentShape(**shape), {}, dtype=dtype)
    before = {name: p.detach().clone() for name, p in student.named_parameters()}
    student = student if lazy is None else lazy.model
    distillation_model = DistillationModel.from_spec(student, spec, device=torch.device("cpu"))
    trained_names = {name for name, p in student.named_parameters() if p.requires_grad}
    weights = None if lazy is None else _Watched(lazy, distillation_model)
    with counted_reads() as sizes:
        strategy = parallelize(distillation_model, spec, dtype=dtype, device=torch.device("cpu"), weights=weights)
    if scenario.parent is not None:
        _continue(strategy, scenario.parent, with_optimizer=spec.training.load_optimizer_state)
    request = AttemptRequest(job_id="j", attempt=scenario.attempt, spec=spec, resume_from=_key(scenario), run_id="r")
    store = AttemptCheckpoints(open_store(scenario.store), request, keep=spec.checkpoint.keep)
    checkpointer = Checkpointer(strategy, store, local_rank=dist.get_rank())
    told = scenario.stop_requests if dist.get_rank() == dist.get_world_size() - 1 else {}
    recorder = Recorder(scenario.stop_after, told)
    validation_rows = tiny_rows(9, seed=1) if scenario.held_out else None
    options: Any = {
        "total_steps": spec.training.max_steps or 0,
        "listener": recorder,
        "validation_rows": validation_rows,
    }
    trainer = Trainer(strategy, tiny_rows(), checkpointer, spec, **options)
    with suppress(_KilledError):
        trainer.run()
    after = {name: _whole(p) for name, p in student.named_parameters()}
    return Outcome(
        steps=recorder.steps,
        notes=recorder.notes,
        trained={name: after[name] for name in trained_names},
        largest_share=1.0 if weights is None else max(weights.held),
        share_read=1.0 if lazy is None else sum(sizes) / sum(one.num_bytes for one in lazy.base.headers.values()),
        frozen_changed=[name for name in before if name not in trained_names and not before[name].equal(after[name])],
    )


def _continue(strategy: Strategy, pattern: str, *, with_optimizer: bool) -> None:
    (directory,) = Path("/").glob(pattern.removeprefix("/"))
    if with_optimizer:
        load_training_state(strategy, directory)
    else:
        assert strategy.load_trained_tensors(CheckpointTensors(directory)) == []


class _Watched:
    """Weights of a lazy student; records the share of the model that is held after each read."""

    def __init__(self, lazy: LazyStudent, distillation_model: DistillationModel) -> None:
        lazy.map_parameters(distillation_model)
        self._lazy, self._fork = lazy, distillation_model
        self.held: list[float] = []

    def load_parameters(self, module: torch.nn.Module, *, read: bool = True) -> None:
        self._lazy.load_parameters(module, read=read)
        self.held.append(_share_held(self._fork))

    def load_shards(self, root: torch.nn.Module) -> None:
        self._lazy.load_shards(root)
        self.held.append(_share_held(self._fork))


@contextmanager
def counted_reads() -> Iterator[list[int]]:
    """Record the bytes of every tensor, or part of a tensor, that is read from checkpoint files."""
    read, sizes = checkpoint._read_tensor, []

    def count(*arguments: Any) -> Tensor:
        tensor = read(*arguments)
        sizes.append(tensor.nbytes)
        return tensor

    with patch.object(checkpoint, "_read_tensor", count):
        yield sizes


def _share_held(distillation_model: DistillationModel) -> float:
    local = total = 0
    for parameter in distillation_model.parameters():
        total += getattr(parameter, "ds_numel", parameter.numel())
        if hasattr(parameter, "ds_tensor"):
            local += parameter.ds_tensor.numel()
        elif hasattr(parameter, "to_local"):
            local += parameter.to_local().numel()
        elif not parameter.is_meta:
            local += parameter.numel()
    return local / total


def _key(scenario: Run) -> str | None:
    if scenario.resume_from is None:
        return None
    (found,) = Path(scenario.store).glob(scenario.resume_from)
    return found.relative_to(scenario.store).as_posix()


def _whole(parameter: Any) -> Tensor:
    if hasattr(parameter, "ds_id"):  # ZeRO stage 3
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach().clone()


@contextmanager
def group_of_one(directory: Path) -> Iterator[None]:
    """A gloo process group that holds only this process."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/group-of-one", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_spawned(scenarios: Sequence[Run], world_size: int, directory: Path) -> list[Outcome]:
    """Run the scenarios in turn in `world_size` new processes, and return rank 0's outcomes."""
    return run_in_group(_run_all, (list(scenarios),), world_size, directory)


def _run_all(scenarios: list[Run]) -> list[Outcome]:
    return [run(scenario) for scenario in scenarios]
