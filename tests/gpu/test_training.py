"""Training, calibration and evaluation on one GPU, against float32 on the CPU. It needs no Ray and no control plane.

Where there is no GPU, `SWIFTKV_GPU_TESTS=cpu` runs all of it on the CPU, which tries the tests themselves.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from swiftkv_platform.contract.attempts import StopRequest
from swiftkv_platform.data.packing import PackedRows, Samples, pack
from swiftkv_platform.distillation.calibration_text import calibration_batches
from swiftkv_platform.distillation.checkpoint import Checkpointer
from swiftkv_platform.distillation.course import Progress
from swiftkv_platform.distillation.fork import Fork, compile_layers, load_trained
from swiftkv_platform.distillation.measured import MeasuredStudent
from swiftkv_platform.distillation.parallel import Parallel
from swiftkv_platform.distillation.trainer import StepMetrics, Trainer, micro_batches, parallelize
from swiftkv_platform.engine.varlen import reference_varlen_attn
from swiftkv_platform.evaluation.quality import Totals, evaluate
from swiftkv_platform.model import convert
from swiftkv_platform.model.calibration_stream import calibrate_streamed
from swiftkv_platform.model.lazy_student import LazyStudent
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.specs import JobSpec
from tests.tiny_models import disturb, family_teacher

ON_CPU = os.environ.get("SWIFTKV_GPU_TESTS") == "cpu"
CPU, DEVICE = torch.device("cpu"), torch.device("cpu") if ON_CPU else torch.device("cuda", 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ON_CPU and not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16
WIDER = {"deepseek_v2": {"qk_nope_head_dim": 16}}
"""Heads of a multiple of 8 numbers, which FlashAttention takes."""
NUM_STEPS, KILLED_AFTER = 6, 4


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The process group of a worker alone, of the backends that a job's has."""
    if not ON_CPU:
        torch.cuda.set_device(DEVICE)
    backend = "gloo" if ON_CPU else "cpu:gloo,cuda:nccl"
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@cache
def rows(num_samples: int = 12, seed: int = 0) -> PackedRows:
    """Rows of several samples, longer than a window, some positions of which do not count."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 40, num_samples)
    counts = rng.random(lengths.sum()) < 0.7
    counts[np.cumsum(lengths) - 1] = False
    tokens = rng.integers(0, 256, lengths.sum()).astype(np.int32)
    samples = Samples(tokens, counts, np.concatenate([[0], np.cumsum(lengths)]))
    return pack(samples, np.arange(num_samples), max_length=64, pad_token_id=0)


def job_spec(dtype: torch.dtype, **sections: Any) -> JobSpec:
    size = len(rows())
    base: dict[str, Any] = {"name": "n", "model": {"dtype": str(dtype).removeprefix("torch.")}}
    base |= {"resources": {"num_workers": 1, "gpus_per_worker": 0 if ON_CPU else 1}}
    base |= {"training": {"batch_size": size, "micro_batch_size": size}, "sharding": {"strategy": "ddp"}}
    return JobSpec.model_validate(base | {key: base.get(key, {}) | section for key, section in sections.items()})


@cache
def teacher(family: str, dtype: torch.dtype = BFLOAT16) -> Any:
    """Its weights are numbers of `dtype`, in float32: so they are the same in both."""
    model = family_teacher(family, **WIDER.get(family, {}))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype).float()
    return model


def shape_of(l: int = 2, g: int = 2, **changes: Any) -> dict[str, Any]:  # noqa: E741  # the paper's l
    shape = {"num_key_value_layers": l, "prefill_reduction": None, "key_value_group_size": g, "early_exit": True}
    return shape | {"sharing": "gqa", "decode_key_value": "shared"} | changes


def on_cpu(*arguments: Any, **options: Any) -> Tensor:
    """`varlen_attn` of plain operators."""
    output: Tensor = reference_varlen_attn(*arguments, **options, seqused_k=arguments[4].diff(), block_table=None)
    return output


@dataclass(frozen=True)
class Step:
    """A training step of a worker alone."""

    family: str = "llama"
    decode_key_value: str = "shared"
    trainable: str = "qkv"
    group_size: int = 2
    objective: str = "logits"
    attention: str = "sdpa"
    checkpointing: bool = False
    compiled: bool = False

    def __str__(self) -> str:
        return (
            "-".join(str(getattr(self, one.name)) for one in fields(self) if getattr(self, one.name) != one.default)
            or "plain"
        )

    @cache  # noqa: B019  # for as long as the tests run
    def __call__(self, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """Loss sums and gradients, by name, on the CPU."""
        distillation = {"trainable": self.trainable, "objective": self.objective, "hidden_loss_weight": 1.0}
        size = len(rows())
        fakes = self.attention == "varlen_attn" and device.type == "cpu"
        training: dict[str, Any] = {"attn_implementation": "sdpa" if fakes else self.attention}
        training |= {"gradient_checkpointing": self.checkpointing, "compile": self.compiled}
        spec = job_spec(dtype, distillation=distillation, training=training)
        shape = shape_of(g=self.group_size, decode_key_value=self.decode_key_value)
        student = convert(teacher(self.family), **shape)
        torch.manual_seed(0)
        disturb(student)
        for parameter in student.parameters():
            parameter.data = parameter.data.bfloat16().float()
        fork = Fork.of_job(student, spec, device=device)
        if self.compiled:
            compile_layers(fork)
        parallel = parallelize(fork, spec, dtype=dtype, device=device)
        [(batch, lengths)] = micro_batches(parallel, rows(), range(size), spec.training)
        operator = patch("swiftkv_platform.model.packed_pass.choose_operator", return_value=on_cpu)
        with operator if fakes else nullcontext(), parallel.micro_batch(last=True):
            sums = parallel(batch, lengths)
            parallel.backward(torch.stack([weight * sums[name] for name, weight in fork.loss_weights.items()]).sum())
        gradients = {name: p.grad for name, p in fork.named_parameters() if p.grad is not None}
        assert len(gradients) == sum(p.requires_grad for p in fork.parameters())
        return {name: tensor.detach().double().cpu() for name, tensor in (sums | gradients).items()}


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Norms of differences over norms, by name."""
    assert actual.keys() == expected.keys()
    return {name: float((actual[name] - each).norm() / each.norm()) for name, each in expected.items()}


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], bounds: dict[str, float] | float) -> None:
    allowed = dict.fromkeys(expected, bounds) if isinstance(bounds, float) else bounds
    found = errors(actual, expected)
    wrong = {name: (error, allowed[name]) for name, error in found.items() if not error <= allowed[name]}
    assert not wrong, f"error and bound of {len(wrong)} of {len(found)}: {wrong}"


def bounds_of(step: Step) -> dict[str, float]:
    """Twice the error that bfloat16 has on the CPU, and no less than a few of its last places."""
    on_cpu = errors(step(CPU, BFLOAT16), step(CPU, FLOAT32))
    return {name: max(2 * error, 3e-2) for name, error in on_cpu.items()}


STEPS = [
    Step(decode_key_value=form, trainable=trainable, group_size=size)
    for form in ("shared", "own")
    for trainable in ("qkv", "tail", "all")
    for size in (1, 2)
]
STEPS += [Step(family, form) for family in ("qwen2-mixed", "qwen3_moe", "deepseek_v2") for form in ("shared", "own")]
STEPS += [Step(objective="lm"), Step(checkpointing=True), Step(decode_key_value="own", checkpointing=True)]


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_step_in_float32(step: Step) -> None:
    assert_near(step(DEVICE, FLOAT32), step(CPU, FLOAT32), 1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "varlen_attn"])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_step_in_bfloat16(step: Step, attention: str) -> None:
    assert_near(replace(step, attention=attention)(DEVICE, BFLOAT16), step(CPU, FLOAT32), bounds_of(step))


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_both_attentions_take_the_same_step(step: Step) -> None:
    ours, theirs = (replace(step, attention=name)(DEVICE, BFLOAT16) for name in ("varlen_attn", "sdpa"))
    assert_near(ours, theirs, bounds_of(step))


@pytest.mark.parametrize("attention", ["sdpa", "varlen_attn"])
def test_a_compiled_step(attention: str) -> None:
    step = Step(attention=attention, compiled=True)
    assert_near(step(DEVICE, BFLOAT16), Step()(CPU, FLOAT32), bounds_of(Step()))


Saved = Callable[[str], Path]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """Directories of teachers by family."""

    @cache
    def save(family: str) -> Path:
        path = tmp_path_factory.mktemp("teacher")
        teacher(family).save_pretrained(path)
        return path

    return save


class Folder:
    """The `CheckpointStore` of one run in a directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def upload(self, directory: Path, name: str) -> dict[str, Any]:
        shutil.copytree(directory, self.path / "open" / name)
        return {}

    def commit(self, name: str, *_: Any) -> None:
        shutil.move(self.path / "open" / name, self.path / "complete" / name)

    def failed(self, name: str, _progress: Progress, error: Exception) -> None:
        raise AssertionError(name) from error

    def candidates(self) -> list[str]:
        return sorted((path.name for path in (self.path / "complete").glob("*")), reverse=True)

    def of_step(self, step: int) -> list[str]:
        return [key for key in self.candidates() if key.startswith(f"step-{step:08d}")]

    def fetch(self, key: str, directory: Path) -> None:
        shutil.copytree(self.path / "complete" / key, directory)

    def open(self, key: str) -> Any:
        path = self.path / "complete" / key
        return SimpleNamespace(fetch=partial(_copy, path), read=partial(_read, path))


def _copy(path: Path, name: str, destination: Path) -> None:
    destination.mkdir(exist_ok=True)
    shutil.copy(path / name, destination)


def _read(path: Path, name: str, start: int, stop: int) -> bytes:
    return (path / name).read_bytes()[start:stop]


class Killed(Exception):  # noqa: N818  # it is no error here
    """Ends a run in the middle."""


@dataclass
class Recorder:
    """Losses of a run's steps, and its state behind each of them."""

    parallel: Parallel
    killed_after: int = 0
    losses: list[float] = field(default_factory=list)
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    restored: int = 0

    def on_start(self, progress: Progress) -> None:
        self.restored = progress.step
        if progress.step:
            self._keep(progress.step)

    def on_step(self, metrics: StepMetrics) -> None:
        self.losses.append(metrics.losses["loss"])
        self._keep(metrics.step)
        if metrics.step == self.killed_after:
            raise Killed

    def on_course(self, note: Any) -> None:
        """The losses tell as much."""

    def stop_request(self) -> StopRequest:
        return StopRequest.NONE

    def _keep(self, step: int) -> None:
        state = self.parallel.state()
        optimizer = {f"{name} {key}": v for name, of in state["optimizer"].items() for key, v in of.items()}
        whole = {
            name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in (state["model"] | optimizer).items()
        }
        self.states[step] = {name: tensor.detach().to("cpu", copy=True) for name, tensor in whole.items()}


OFFLOADED = {"strategy": "fsdp2", "cpu_offload": True}
UNSTEERED = {"validation": None, "guard": None, "keep_best": False}
RUNS: dict[str, dict[str, Any]] = {
    f"{sharding}-{optimizer}": {"sharding": section, "optimizer": {"name": optimizer}}
    for sharding, section in [("ddp", {}), ("fsdp2", {"strategy": "fsdp2"}), ("offload", OFFLOADED)]
    for optimizer in ("adamw", "muon")
}
RUNS |= {f"{name}-steered": RUNS[name] | {"training": {}} for name in ("ddp-adamw", "fsdp2-adamw", "offload-adamw")}
RUNS["fsdp2-tail-own"] = RUNS["fsdp2-adamw"] | {"distillation": {"trainable": "tail"}}
RUNS["ddp-float32"] = RUNS["ddp-adamw"] | {"model": {"dtype": "float32"}}


class Runs:
    """Runs of one name: `whole` and `again` to the end, `killed` in the middle and `resumed`."""

    def __init__(self, directory: Path, path: Path) -> None:
        self._directory, self._path = directory, path
        self._made: dict[tuple[str, str], Recorder] = {}

    def __call__(self, name: str, which: str) -> Recorder:
        if which == "resumed":
            self(name, "killed")
        if (name, which) not in self._made:
            self._made[name, which] = self._run(name, which)
        return self._made[name, which]

    def _run(self, name: str, which: str) -> Recorder:
        sections = {"model": {}, "training": UNSTEERED, "distillation": {}} | RUNS[name]
        size = len(rows())
        sections["training"] = {"batch_size": size, "micro_batch_size": 2, "max_steps": NUM_STEPS} | sections[
            "training"
        ]
        sections["optimizer"] = sections["optimizer"] | {"learning_rate": 5e-3, "warmup_ratio": 0.0}
        sections["checkpoint"] = {"every_steps": 3}
        dtype = getattr(torch, sections["model"].get("dtype", "bfloat16"))
        spec = job_spec(dtype, **sections)
        shape: dict[str, Any] = shape_of(decode_key_value="own" if name.endswith("own") else "shared") | {
            "dtype": dtype
        }
        lazy = LazyStudent.open(self._path, {}, **shape) if spec.sharding.shards_parameters else None
        fork = Fork.of_job(lazy.model if lazy else convert(self._path, **shape), spec, device=DEVICE)
        if lazy is not None:
            lazy.attach(fork)
        parallel = parallelize(fork, spec, dtype=dtype, device=DEVICE, weights=lazy)
        store = Folder(self._directory / name / which.replace("resumed", "killed"))
        recorder = Recorder(parallel, KILLED_AFTER if which == "killed" else 0)
        options: Any = {"total_steps": NUM_STEPS, "listener": recorder}
        options["held_out"] = rows(5, seed=1) if name.endswith("steered") else None
        with suppress(Killed):
            Trainer(parallel, rows(), Checkpointer(parallel, store, local_rank=0), spec, **options).run()
        return recorder


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, saved: Saved) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), saved("llama"))


def largest_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    return max(
        0.0 if ours[name].equal(each) else error
        for (name, each), error in zip(theirs.items(), errors(ours, theirs).values(), strict=True)
    )


@pytest.mark.parametrize("name", RUNS)
def test_a_run_learns(runs: Runs, name: str) -> None:
    losses = runs(name, "whole").losses
    assert len(losses) == NUM_STEPS
    assert losses[-1] < 0.9 * losses[0], losses


@pytest.mark.parametrize("name", RUNS)
def test_a_checkpoint_restores_every_number(runs: Runs, name: str) -> None:
    killed, resumed = runs(name, "killed"), runs(name, "resumed")
    assert 0 < resumed.restored <= KILLED_AFTER
    saved, restored = killed.states[resumed.restored], resumed.states[resumed.restored]
    assert saved.keys() == restored.keys()
    assert [name for name, tensor in saved.items() if not tensor.equal(restored[name])] == []


@pytest.mark.parametrize("bitwise", [False, True], ids=["close", "bitwise"])
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_ends_as_one_that_was_not_cut(runs: Runs, name: str, bitwise: bool) -> None:
    whole, again, resumed = (runs(name, which).states[NUM_STEPS] for which in ("whole", "again", "resumed"))
    difference, usual = largest_error(resumed, whole), largest_error(again, whole)
    told = f"largest relative difference {difference:.3e}; of two runs that were not cut {usual:.3e}"
    assert difference <= (0.0 if bitwise else max(10 * usual, 1e-6)), told


CALIBRATED: dict[str, tuple[str, dict[str, Any], torch.dtype]] = {
    "llama": ("llama", {}, FLOAT32),
    "own": ("qwen2-mixed", {"decode_key_value": "own"}, FLOAT32),
    "latent": ("deepseek_v2", {}, FLOAT32),
    "refitted": ("llama", {"own_output_projection": True, "early_exit": False}, FLOAT32),
    "bfloat16": ("llama", {}, BFLOAT16),
}


@pytest.mark.parametrize("name", CALIBRATED)
@torch.no_grad()
def test_a_calibrated_start(saved: Saved, name: str) -> None:
    """What the started students say: the basis of a latent is arbitrary."""
    family, changes, dtype = CALIBRATED[name]
    path, shape = saved(family), shape_of(**changes)

    def said(device: torch.device) -> dict[str, Tensor]:
        source = LazyStudent.open(path, {}, **shape, dtype=dtype, device=device)
        batches = calibration_batches(rows(60), 10_000, seed=0)
        stream = calibrate_streamed(source, batches, workers=Workers(), refit=name == "refitted", device=device)
        start = {name: tensor.to(dtype).cpu() for name, tensor in stream}
        student = convert(path, **shape, dtype=FLOAT32)
        assert start.keys() == student.swiftkv_parameters().keys()
        load_trained(student, start)
        ids = torch.from_numpy(rows().batch([0])["input_ids"])
        exits = {"exit head": student.exit_head.weight} if shape["early_exit"] else {}
        return {"logits": student(ids).logits, **exits}

    assert_near(said(DEVICE), said(CPU), 1e-3 if dtype == FLOAT32 else 5e-2)


def measured(
    path: Path, form: str, trainable: str, dtype: torch.dtype, device: torch.device, *, sharded: bool = False
) -> dict[str, Tensor]:
    """Sums of the figures of a disturbed student."""
    shape = shape_of(decode_key_value=form)
    student = convert(path, **shape, dtype=BFLOAT16).float()
    torch.manual_seed(0)
    trained = {name: tensor.detach().bfloat16() for name, tensor in disturb(student).swiftkv_parameters().items()}
    spec = job_spec(dtype, distillation={"trainable": trainable}).distillation
    lazy = LazyStudent.open(path, {}, **shape, dtype=dtype, device=device)
    model = MeasuredStudent(lazy, spec, sharded=sharded, device=device)
    model.start_from(trained)
    assert {parameter.device.type for parameter in model.parameters()} == {device.type}
    totals: Totals = model(lambda student: evaluate(student, rows(), max_tokens=10_000, batch_size=2))
    assert totals.num_positions == rows().num_counted_tokens == sum(totals.exit_head.positions)
    sums = {name: getattr(totals, name) for name in ("teacher_nll", "student_nll", "kl", "agreements")}
    sums |= {"by position": totals.by_position.kl, "by prompt": totals.by_prompt_length.kl}
    sums["by sample"] = [sample.kl for sample in totals.samples]
    return {name: torch.tensor(value, dtype=torch.double) for name, value in sums.items()}


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16], ids=str)
@pytest.mark.parametrize(("form", "trainable"), [("shared", "qkv"), ("own", "qkv"), ("shared", "all"), ("own", "tail")])
def test_a_measured_student(saved: Saved, form: str, trainable: str, dtype: torch.dtype, sharded: bool) -> None:
    case = saved("llama"), form, trainable
    expected = measured(*case, FLOAT32, CPU)
    on_cpu = errors(measured(*case, dtype, CPU), expected)
    bounds = {name: 1e-4 if dtype == FLOAT32 else max(2 * error, 5e-2) for name, error in on_cpu.items()}
    assert_near(measured(*case, dtype, DEVICE, sharded=sharded), expected, bounds)
