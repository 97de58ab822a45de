"""Training plans against real training steps: FLOPs as PyTorch counts them, live bytes as its profiler does."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from swiftkv_platform.distillation import model as distillation_module
from swiftkv_platform.distillation.model import DistillationModel
from swiftkv_platform.distillation.strategy import build_adamw
from swiftkv_platform.engine.kv_cache import get_bytes_per_block
from swiftkv_platform.engine.memory import get_kv_cache_format, get_layer_shapes
from swiftkv_platform.model import convert
from swiftkv_platform.planning import TrainingSetup, plan_training, read_architecture, training
from swiftkv_platform.planning.architecture import count_served_parameters
from swiftkv_platform.planning.serving import ServingSetup, plan_serving
from swiftkv_platform.specs import DistillationSpec, OptimizerSpec
from tests.numerics.test_planning import countable, make_teacher
from tests.support.parameters import WIDE, pairwise
from tests.support.tiny_models import CONFIGS, random_teacher

SPECS: dict[str, dict[str, Any]] = {
    "paper": {},
    "K and V that prompts share": {"trainable": "kv"},
    "all of layers >= l": {"trainable": "tail"},
    "all layers": {"trainable": "all"},
    "all layers, language modelling": {"trainable": "all", "objective": "lm"},
    "language modelling": {"objective": "lm"},
    "hidden states": {"objective": "lm", "hidden_loss_weight": 1.0},
}


def make_batch(vocab_size: int, batch: int, length: int, *, packed: bool) -> dict[str, torch.Tensor]:
    positions = torch.arange(length).repeat(batch, 1)
    if packed:
        positions[:, length // 3 :] = torch.arange(length - length // 3)
    return {
        "input_ids": torch.randint(vocab_size, (batch, length), generator=torch.Generator().manual_seed(1)),
        "position_ids": positions,
        "loss_mask": torch.ones(batch, length, dtype=torch.bool),
    }


def sample_length_histogram(length: int, number: int = 1) -> tuple[tuple[int, int], ...]:
    """The samples of `make_batch`, packed."""
    return (length // 3, number), (length - length // 3, number)


def two_rows(
    vocab_size: int, spec: DistillationSpec, counted_share: float
) -> tuple[dict[str, torch.Tensor], TrainingSetup]:
    """Return a micro-batch of two packed rows of 24 tokens, of which a share counts, and its description."""
    batch = make_batch(vocab_size, 2, 24, packed=True)
    batch["loss_mask"][:] = torch.arange(24) < counted_share * 24
    rows: Any = {"sequence_length": 24, "samples": sample_length_histogram(24, 2), "counted_share": counted_share}
    rows |= {"micro_batch_size": 2, "dtype": "float32"}
    learnt: Any = {"trainable": spec.trainable, "objective": spec.objective}
    return batch, TrainingSetup(**rows, **learnt, hidden_loss=spec.hidden_loss_weight > 0)


def count_step(distillation_model: DistillationModel, batch: dict[str, torch.Tensor]) -> int:
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        sum(distillation_model(**batch).values()).backward()
    return counter.get_total_flops()


@pytest.fixture
def squares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count attention as plain matrix products do, over the whole square of a sample, and add no padding tokens, which
    are few in real rows."""
    monkeypatch.setattr(distillation_module, "TOKENS_MULTIPLE", 1)
    monkeypatch.setattr(training, "count_attention_pairs", lambda length, past, _window: length * (past + length))


@pytest.mark.usefixtures("squares")
@pytest.mark.parametrize(("name", "early_exit", "counted_share"), pairwise(SPECS, [False, True], [1.0, 0.25]))
def test_flops_are_those_of_a_step(name: str, early_exit: bool, counted_share: float) -> None:
    spec = DistillationSpec(**SPECS[name])
    student = convert(random_teacher(), num_key_value_layers=2, key_value_group_size=3, early_exit=early_exit)
    batch, setup = two_rows(student.config.vocab_size, spec, counted_share)
    counted = count_step(DistillationModel(student, spec, dtype=torch.float32), batch)
    planned = plan_training(student.config.to_dict(), setup).flops_per_token.total
    assert counted == pytest.approx(48 * planned, rel=1e-12)


KEEPING: dict[str, Any] = {"num_key_value_layers": 2, "key_value_group_size": 2}


@pytest.mark.usefixtures("squares")
@pytest.mark.parametrize(
    ("name", "layers", "trainable"),
    [
        *(("llama", {"prefill_layers": [0, 2]}, trainable) for trainable in ("qkv", "tail", "all")),
        *((name, KEEPING, "kv") for name in ("llama", "deepseek_v2", "olmo2")),
        *((name, KEEPING, trainable) for name, trainable in (("llama", "qkv"), ("qwen3", "tail"))),
        *((name, KEEPING, trainable) for name, trainable in (("deepseek_v2", "qkv"), ("olmo2", "tail"))),
        ("llama", {"prefill_layers": [0, 2], "deep_tail": 5}, "all"),
        ("llama", KEEPING | {"deep_tail": 5}, "qkv"),
    ],
)
def test_flops_of_students_that_keep_their_own(name: str, layers: dict[str, Any], trainable: Any) -> None:
    """The second half of each sample consists of deep tokens; prompts may bypass layers."""
    student = countable(convert(make_teacher(name), **layers, decode_key_value="own"))
    batch = make_batch(258, 1, 20, packed=False)
    batch["loss_mask"][:, :10] = False
    deep_share = 0.5 + (layers.get("deep_tail", 1) - 1) / 20
    rows: Any = {"sequence_length": 20, "counted_share": 0.5, "deep_share": deep_share, "dtype": "float32"}
    spec = DistillationSpec(trainable=trainable, vary_deep_tail=False)
    distillation_model = DistillationModel(student, spec, dtype=torch.float32)
    planned = plan_training(student.config.to_dict(), TrainingSetup(**rows, trainable=trainable))
    assert count_step(distillation_model, batch) == pytest.approx(20 * planned.flops_per_token.total, rel=1e-12)
    assert planned.trained_parameters == sum(p.numel() for p in distillation_model.parameters() if p.requires_grad)
    assert planned.parameters == sum(p.numel() for p in distillation_model.parameters())


@pytest.mark.usefixtures("squares")
@pytest.mark.parametrize("name", CONFIGS)
def test_flops_of_every_family(name: str) -> None:
    student = countable(convert(make_teacher(name), num_key_value_layers=2, key_value_group_size=2))
    setup = TrainingSetup(sequence_length=20, samples=sample_length_histogram(20), dtype="float32")
    counted = count_step(
        DistillationModel(student, DistillationSpec(), dtype=torch.float32), make_batch(258, 1, 20, packed=True)
    )
    planned = plan_training(student.config.to_dict(), setup).flops_per_token.total
    assert counted == pytest.approx(20 * planned, rel=1e-12)


def measure_step(
    distillation_model: DistillationModel, batch: dict[str, torch.Tensor], dtype: torch.dtype, num_micro_batches: int
) -> int:
    """Return the peak of live bytes in a step: parameters, optimizer state, and allocations that the profiler sees."""
    optimizer = build_adamw([p for p in distillation_model.parameters() if p.requires_grad], OptimizerSpec())

    def step() -> None:
        for _ in range(num_micro_batches):
            with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
                sums = distillation_model(**batch)
                sum(sums.values()).backward()
        del sums
        optimizer.step()
        optimizer.zero_grad()

    step()  # AdamW allocates its state
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    now = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    assert now == 0, "the step left memory allocated"
    state = [tensor for tensors in optimizer.state.values() for tensor in tensors.values()]
    return most + sum(tensor.nbytes for tensor in (*distillation_model.parameters(), *state))


@pytest.mark.parametrize(
    "case",
    [
        {"dtype": "bfloat16", "packed": True},
        {"early_exit": True, "num_micro_batches": 2},
        {"trainable": "all", "gradient_checkpointing": True},
        {"trainable": "tail", "sequence_length": 16},
        {"trainable": "all", "prefill_layers": [0, 2, 4], "decode_key_value": "own"},
        *(
            pytest.param(case, marks=WIDE)
            for case in (
                {},
                {"packed": True},
                {"dtype": "bfloat16", "key_value_group_size": 1},
                {"num_micro_batches": 2},
                {"gradient_checkpointing": True},
                {"early_exit": True},
                {"trainable": "tail"},
                {"trainable": "all"},
                {"sequence_length": 16},
            )
        ),
    ],
    ids=str,
)
def test_memory_is_that_of_a_step(case: dict[str, Any]) -> None:
    """Within 10%, without the buckets and gathered weights of several workers."""
    num_micro_batches = case.get("num_micro_batches", 1)
    options = {"dtype": "float32", "sequence_length": 192, **case}
    options.pop("num_micro_batches", None)
    packed = options.pop("packed", False)
    student_shape: dict[str, Any] = {"key_value_group_size": 2}
    for name in ("key_value_group_size", "prefill_layers", "decode_key_value", "early_exit"):
        student_shape |= {name: options.pop(name)} if name in options else {}
    student_shape |= {} if "prefill_layers" in student_shape else {"num_key_value_layers": 4}
    setup = TrainingSetup(micro_batch_size=2, batch_size=2 * num_micro_batches, strategy="ddp", device="cpu", **options)
    dtype = getattr(torch, setup.dtype)
    shape = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 8, "vocab_size": 1024}
    student = convert(random_teacher(**shape), **student_shape)
    spec = DistillationSpec(trainable=setup.trainable)
    distillation_model = DistillationModel(
        student, spec, dtype=dtype, gradient_checkpointing=setup.gradient_checkpointing
    )
    batch = make_batch(1024, 2, setup.sequence_length, packed=packed)
    measured = measure_step(distillation_model, batch, dtype, num_micro_batches)
    planned = plan_training(student.config.to_dict(), setup).memory
    buckets = planned.gradients // 2
    assert planned.frozen + planned.trained == sum(p.nbytes for p in distillation_model.parameters())
    # The plan has buckets where gradients peak; a single process has none.
    assert planned.peak - buckets < 1.1 * measured
    assert planned.peak > 0.9 * measured


@pytest.mark.parametrize(("model_type", "l", "g"), [("llama", 3, 1), ("deepseek_v2", 2, 2)])
def test_serving_counts_the_engines_blocks_and_the_exported_weights(model_type: str, l: int, g: int) -> None:  # noqa: E741
    student = convert(make_teacher(model_type), num_key_value_layers=l, key_value_group_size=g)
    config = student.config.to_dict()
    planned = plan_serving(config, ServingSetup(memory_bytes=10**6, sequence_length=64)).swiftkv
    stored = get_kv_cache_format("auto", torch.bfloat16)
    assert planned.kv_block_bytes == get_bytes_per_block(get_layer_shapes(student.config), 16, stored)
    kept = [p.numel() for name, p in student.named_parameters() if not _is_teachers(name, l)]
    assert sum(count_served_parameters(read_architecture(config), student.config.layer_map)) == sum(kept)
    assert planned.weights_bytes == 2 * sum(kept)


def _is_teachers(name: str, first: int) -> bool:
    """Whether `name` is a projection of a layer >= l that an export leaves out."""
    parts = name.split(".")
    if "self_attn" not in parts or int(parts[2]) < first:
        return False
    return "swiftkv" not in name and parts[4] not in ("o_proj", "q_norm", "k_norm")
