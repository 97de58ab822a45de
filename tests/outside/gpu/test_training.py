"""Training, calibration and evaluation on one GPU, compared to float32 on the CPU, without Ray or a control plane."""

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from swiftkv_platform.contract.attempts import AttemptRequest, StopRequest
from swiftkv_platform.data.packing import PackedRows, Samples, pack
from swiftkv_platform.distillation.checkpoint import Checkpointer
from swiftkv_platform.distillation.model import DistillationModel, compile_layers, load_trained_tensors
from swiftkv_platform.distillation.steering import TrainingProgress
from swiftkv_platform.distillation.strategy import EvaluationModel, Strategy
from swiftkv_platform.distillation.trainer import StepMetrics, Trainer, build_micro_batches, parallelize
from swiftkv_platform.engine.varlen import reference_varlen_attn
from swiftkv_platform.evaluation.quality import HeldOutTotals
from swiftkv_platform.jobs.attempt.stored import AttemptCheckpoints
from swiftkv_platform.jobs.worker.measure import StudentEvaluator
from swiftkv_platform.jobs.worker.setup import (
    calibrate,
    distribute_model,
    get_compute_dtype,
    load_student,
    open_lazy_student,
    set_deterministic_algorithms,
)
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.object_store import open_store
from tests.outside.gpu.device import ON_GPU, needs_gpu
from tests.support.tiny_models import disturb, family_teacher

CPU, DEVICE = torch.device("cpu"), torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
pytestmark = needs_gpu
WIDER = {"deepseek_v2": {"qk_nope_head_dim": 16}}
"""Head sizes that are multiples of 8, as FlashAttention requires."""
FORMS = ("shared", "own")
Case = dict[str, Any]
NUM_STEPS, KILLED_AFTER = 6, 4


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The process group of a single worker, with the backends of a job's."""
    if ON_GPU:
        torch.cuda.set_device(DEVICE)
    backend = "cpu:gloo,cuda:nccl" if ON_GPU else "gloo"
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@cache
def rows(num_samples: int = 12, seed: int = 0) -> PackedRows:
    """Return rows of several samples, longer than a window; some positions do not count."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(5, 40, num_samples)
    counts = rng.random(lengths.sum()) < 0.7
    counts[np.cumsum(lengths) - 1] = False
    tokens = rng.integers(0, 256, lengths.sum()).astype(np.int32)
    samples = Samples(tokens, counts, np.concatenate([[0], np.cumsum(lengths)]))
    return pack(samples, np.arange(num_samples), max_length=64, pad_token_id=0)


@cache
def teacher(family: str) -> tuple[TemporaryDirectory[str], str]:
    """Save a teacher whose weights are exact in bfloat16; return its directory, which lives as long as the object, and
    path."""
    model, directory = family_teacher(family, **WIDER.get(family, {})), TemporaryDirectory()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    model.save_pretrained(directory.name)
    return directory, directory.name


def job_spec(dtype: str = "float32", **sections: Any) -> JobSpec:
    size = len(rows())
    base: dict[str, dict[str, Any]] = {"model": {"dtype": dtype}, "sharding": {"strategy": "ddp"}, "swiftkv": {}}
    base |= {"resources": {"num_workers": 1, "gpus_per_worker": int(ON_GPU)}}
    base |= {"training": {"batch_size": size, "micro_batch_size": size, "max_steps": NUM_STEPS}}
    base["swiftkv"] = {"num_key_value_layers": 2, "key_value_group_size": 2, "decode_key_value": "shared"}
    base["swiftkv"] |= {"early_exit": True}
    merged = base | {key: base.get(key, {}) | section for key, section in sections.items()}
    return JobSpec.model_validate(merged | {"name": "n"})


def disturbed(spec: JobSpec, path: str) -> Any:
    """Return a float32 student whose weights are exact in bfloat16."""
    student = load_student(spec.model_copy(update={"model": job_spec().model}), path)
    torch.manual_seed(0)
    for parameter in disturb(student).parameters():
        parameter.data = parameter.data.bfloat16().float()
    return student


def on_cpu(*arguments: Any, **options: Any) -> Tensor:
    """Stand in for `varlen_attn` with plain operators."""
    output: Tensor = reference_varlen_attn(*arguments, **options, seqused_k=arguments[4].diff(), block_table=None)
    return output


@cache
def step(
    device: torch.device,
    dtype: str,
    family: str = "llama",
    form: str = "shared",
    trainable: str = "qkv",
    size: int = 2,
    *,
    attention: str = "sdpa",
    objective: str = "logits",
    checkpointing: bool = False,
    compiled: bool = False,
) -> dict[str, Tensor]:
    """Return the loss sums and gradients of a single worker's training step, by name, on the CPU."""
    fakes = attention == "varlen_attn" and device.type == "cpu"
    training = {"attn_implementation": "sdpa" if fakes else attention, "compile": compiled}
    spec = job_spec(
        dtype,
        distillation={"trainable": trainable, "objective": objective, "hidden_loss_weight": 1.0},
        training=training | {"gradient_checkpointing": checkpointing},
        swiftkv={"key_value_group_size": size, "decode_key_value": form},
    )
    distillation_model = DistillationModel.from_spec(disturbed(spec, teacher(family)[1]), spec, device=device)
    if compiled:
        compile_layers(distillation_model)
    strategy = parallelize(distillation_model, spec, dtype=get_compute_dtype(spec), device=device)
    [(batch, lengths)] = build_micro_batches(strategy, rows(), range(len(rows())), spec.training)
    operator = patch("swiftkv_platform.model.packed_attention.choose_operator", return_value=on_cpu)
    with operator if fakes else nullcontext(), strategy.run_micro_batch(last=True):
        sums = strategy(batch, lengths)
        strategy.backward(
            torch.stack([weight * sums[name] for name, weight in distillation_model.loss_weights.items()]).sum()
        )
    gradients = {name: p.grad for name, p in distillation_model.named_parameters() if p.grad is not None}
    assert len(gradients) == sum(p.requires_grad for p in distillation_model.parameters())
    return {name: tensor.detach().double().cpu() for name, tensor in (sums | gradients).items()}


def errors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Return relative errors by name: the norm of the difference over the expected norm."""
    assert actual.keys() == expected.keys()
    return {name: float((actual[name].double() - each).norm() / each.norm()) for name, each in expected.items()}


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], bounds: dict[str, float] | float) -> None:
    allowed = dict.fromkeys(expected, bounds) if isinstance(bounds, float) else bounds
    found = errors(actual, expected)
    wrong = {name: (error, allowed[name]) for name, error in found.items() if not error <= allowed[name]}
    assert not wrong, f"error and bound of {len(wrong)} of {len(found)}: {wrong}"


def bounds_of(case: Case) -> dict[str, float]:
    """Return twice bfloat16's error on the CPU, but at least 0.03."""
    narrow = errors(step(CPU, "bfloat16", **case), step(CPU, "float32", **case))
    return {name: max(2 * error, 3e-2) for name, error in narrow.items()}


STEPS: list[Case] = [
    {"form": form, "trainable": trainable, "size": size}
    for form, trainable, size in product(FORMS, ("qkv", "tail", "all"), (1, 2))
]
STEPS += [{"family": name, "form": form} for name in ("qwen2-mixed", "qwen3_moe", "deepseek_v2") for form in FORMS]
STEPS += [{"form": form, "checkpointing": True} for form in FORMS] + [{"objective": "lm"}]
every_step = pytest.mark.parametrize("case", STEPS, ids=lambda case: "-".join(map(str, case.values())))


@every_step
def test_a_step_in_float32(case: Case) -> None:
    assert_near(step(DEVICE, "float32", **case), step(CPU, "float32", **case), 1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "varlen_attn"])
@every_step
def test_a_step_in_bfloat16(case: Case, attention: str) -> None:
    actual = step(DEVICE, "bfloat16", **case, attention=attention)
    assert_near(actual, step(CPU, "float32", **case), bounds_of(case))
    assert_near(actual, step(DEVICE, "bfloat16", **case), bounds_of(case))


@pytest.mark.parametrize("attention", ["sdpa", *(["varlen_attn"] if ON_GPU else [])])
def test_a_compiled_step(attention: str) -> None:
    actual = step(DEVICE, "bfloat16", attention=attention, compiled=True)
    assert_near(actual, step(CPU, "float32"), bounds_of({}))


class Killed(Exception):  # noqa: N818
    """Raised to end a run in the middle."""


@dataclass
class Recorder:
    """Records the losses of a run's steps, and the state after each of them."""

    strategy: Strategy
    killed_after: int
    losses: list[float] = field(default_factory=list)
    states: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    restored: int = 0

    def on_start(self, progress: TrainingProgress) -> None:
        self.restored = progress.step
        if progress.step:
            self._keep(progress.step)

    def on_step(self, metrics: StepMetrics) -> None:
        self.losses.append(metrics.losses["loss"])
        self._keep(metrics.step)
        if metrics.step == self.killed_after:
            raise Killed

    def on_steering(self, note: Any) -> None:
        """Ignore notes: the losses say the same."""

    def poll_stop_request(self) -> StopRequest:
        return StopRequest.NONE

    def _keep(self, step: int) -> None:
        state = self.strategy.get_state()
        state["model"] |= {f"{name} {key}": v for name, of in state["optimizer"].items() for key, v in of.items()}
        whole = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state["model"].items()}
        self.states[step] = {name: tensor.detach().to("cpu", copy=True) for name, tensor in whole.items()}


STRATEGIES: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp2": {"strategy": "fsdp2"}}
STRATEGIES["offload"] = STRATEGIES["fsdp2"] | {"cpu_offload": True}
RUNS: dict[str, dict[str, Any]] = {
    f"{name}-{optimizer}": {"sharding": section, "optimizer": {"name": optimizer}}
    for name, section in STRATEGIES.items()
    for optimizer in ("adamw", "muon")
}
RUNS |= {f"{name}-steered": {"sharding": section} for name, section in STRATEGIES.items()}
TAIL_OWN = {"distillation": {"trainable": "tail"}, "swiftkv": {"decode_key_value": "own"}}
RUNS |= {"ddp-float32": {"model": {"dtype": "float32"}}, "fsdp2-tail-own": TAIL_OWN | {"sharding": STRATEGIES["fsdp2"]}}
every_run = pytest.mark.parametrize("name", RUNS)


@cache
def run(name: str, which: str, *, deterministic: bool = False) -> Recorder:
    """Run to the end (`whole` or `again`), to a kill in the middle (`killed`), or on from there (`resumed`)."""
    if which == "resumed":
        run(name, "killed", deterministic=deterministic)
    sections = {"checkpoint": {"every_steps": 3}, "training": {"micro_batch_size": 2}, "optimizer": {}} | RUNS[name]
    sections["optimizer"] = {"learning_rate": 5e-3, "warmup_ratio": 0.0} | sections["optimizer"]
    spec, path = job_spec("bfloat16", **sections), teacher("llama")[1]
    strategy = distribute_model(spec, path, None, device=DEVICE)
    assert {buffer.device for buffer in strategy.module.buffers()} == {DEVICE}
    job_id = f"{name}-{deterministic}-{which.replace('resumed', 'killed')}"
    request = AttemptRequest(job_id=job_id, attempt=1, spec=spec, run_id="r")
    checkpoints = AttemptCheckpoints(open_store(stores().name), request, keep=3)
    recorder = Recorder(strategy, KILLED_AFTER if which == "killed" else 0)
    options: Any = {"total_steps": NUM_STEPS, "listener": recorder}
    options["held_out"] = rows(5, seed=1) if name.endswith("steered") else None
    set_deterministic_algorithms(deterministic)
    with suppress(Killed):
        Trainer(strategy, rows(), Checkpointer(strategy, checkpoints, local_rank=0), spec, **options).run()
    set_deterministic_algorithms(False)
    return recorder


@cache
def stores() -> TemporaryDirectory[str]:
    return TemporaryDirectory()


@every_run
def test_a_run_learns(name: str) -> None:
    losses = run(name, "whole").losses
    assert len(losses) == NUM_STEPS
    assert losses[-1] < 0.9 * losses[0], losses


@every_run
def test_a_checkpoint_restores_every_number(name: str) -> None:
    killed, resumed = run(name, "killed"), run(name, "resumed")
    assert 0 < resumed.restored <= KILLED_AFTER
    saved, restored = killed.states[resumed.restored], resumed.states[resumed.restored]
    assert saved.keys() == restored.keys()
    assert [name for name, tensor in saved.items() if not tensor.equal(restored[name])] == []


@pytest.mark.parametrize("deterministic", [False, True], ids=["close", "bitwise"])
@every_run
def test_a_resumed_run_ends_as_one_that_was_not_cut(name: str, deterministic: bool) -> None:
    """Bit for bit if deterministic; otherwise as close as two uninterrupted runs."""
    whole, again, resumed = (
        run(name, which, deterministic=deterministic).states[NUM_STEPS] for which in ("whole", "again", "resumed")
    )
    difference, usual = (max(errors(other, whole).values()) for other in (resumed, again))
    told = f"largest relative difference {difference:.3e}; of two runs that were not cut {usual:.3e}"
    assert difference <= (0.0 if deterministic else max(10 * usual, 1e-6)), told


CALIBRATED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "float32", {}),
    "own": ("qwen2-mixed", "float32", {"decode_key_value": "own"}),
    "latent": ("deepseek_v2", "float32", {}),
    "bfloat16": ("llama", "bfloat16", {}),
}


@pytest.mark.parametrize("name", CALIBRATED)
@torch.no_grad()
def test_a_calibrated_start(name: str, tmp_path: Path) -> None:
    """Students that start from either agree in their outputs; weights are not compared, as a latent's basis is
    arbitrary."""
    family, dtype, section = CALIBRATED[name]
    spec, path = job_spec(dtype, swiftkv=section), teacher(family)[1]

    def said(directory: str, device: torch.device) -> dict[str, Tensor]:
        (tmp_path / directory).mkdir()
        calibrate(spec, path, rows(60), tmp_path / directory, device=device)
        student, start = disturbed(spec, path), Checkpoint.from_directory(tmp_path / directory)
        assert set(start) == student.swiftkv_parameters().keys()
        load_trained_tensors(student, start)
        ids = torch.from_numpy(rows().make_padded_batch([0])["input_ids"])
        return {"logits": student(ids).logits, "exit head": student.exit_head.weight}

    assert_near(said("device", DEVICE), said("cpu", CPU), 1e-3 if dtype == "float32" else 5e-2)


def measured(
    dtype: str, device: torch.device, form: str, trainable: str, *, sharded: bool = False
) -> dict[str, Tensor]:
    """Return the evaluation's sums for a disturbed student."""
    path = teacher("llama")[1]
    spec = job_spec(dtype, distillation={"trainable": trainable}, swiftkv={"decode_key_value": form})
    lazy = open_lazy_student(spec, path, device=device)
    model = EvaluationModel(lazy, spec.distillation, sharded=sharded, device=device)
    model.load_tensors({name: p.detach() for name, p in disturbed(spec, path).swiftkv_parameters().items()})
    totals: HeldOutTotals = model(
        lambda student: StudentEvaluator(student, rows(), spec.evaluation).compare_teacher_and_student("student")
    )
    assert totals.num_positions == rows().num_counted_tokens == sum(totals.exit_head.positions)
    sums = {name: getattr(totals, name) for name in ("teacher_nll", "student_nll", "kl", "agreements")}
    sums |= {"by position": totals.by_position.kl, "by prompt": totals.by_prompt_length.kl}
    sums["by sample"] = [sample.kl for sample in totals.samples]
    return {name: torch.tensor(value, dtype=torch.double) for name, value in sums.items()}


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", [("shared", "qkv"), ("own", "qkv"), ("shared", "all"), ("own", "tail")], ids="-".join)
def test_a_measured_student(case: tuple[str, str], dtype: str, sharded: bool) -> None:
    expected = measured("float32", CPU, *case)
    narrow = errors(measured(dtype, CPU, *case), expected)
    bounds = {name: 1e-4 if dtype == "float32" else max(2 * error, 5e-2) for name, error in narrow.items()}
    assert_near(measured(dtype, DEVICE, *case, sharded=sharded), expected, bounds)
