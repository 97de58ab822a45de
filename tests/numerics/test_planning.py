"""Plans against real runs: FLOPs of forward passes as PyTorch counts them, and bytes of real caches."""

import copy
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from swiftkv_platform.distillation.model import DistillationModel
from swiftkv_platform.families import FAMILIES
from swiftkv_platform.model import convert
from swiftkv_platform.model.cache import count_cache_bytes, make_cache
from swiftkv_platform.planning import plan, read_architecture
from swiftkv_platform.planning.architecture import count_dense_parameters, count_student_parameters
from swiftkv_platform.planning.prefill import Components, Flops, count_forward_flops
from swiftkv_platform.specs import DistillationSpec
from swiftkv_platform.student_shape import LayerMap
from tests.support.parameters import in_turn, pairwise
from tests.support.tiny_models import CONFIGS, SHAPE, WINDOW

PROMPT = 20


def make_teacher(name: str) -> Any:
    torch.manual_seed(0)
    config = copy.deepcopy(CONFIGS[name])
    return countable(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval())


def countable(model: Any) -> Any:
    """Run experts as one product per expert over its tokens: the FLOP counter does not see grouped products."""
    if model.config.model_type.removesuffix("_swiftkv") in ("mixtral", "qwen3_moe", "deepseek_v2"):
        model.set_experts_implementation("eager")
    return model


@torch.no_grad()
def count(model: Any, tokens: torch.Tensor, **arguments: Any) -> tuple[int, int, Any]:
    """Return the FLOPs of linear layers and of attention, and the cache, for a forward pass over [1, num_tokens]."""
    counter = FlopCounterMode(display=False)
    with sdpa_kernel(SDPBackend.MATH), counter:
        outputs = model(tokens, use_cache=True, **arguments)
    products = {str(name): flops for name, flops in counter.get_flop_counts()["Global"].items()}
    attention = products.pop("aten.bmm", 0)
    return sum(products.values()), attention, outputs.past_key_values


def assert_equal(counted: tuple[int, int, Any], planned: Flops) -> None:
    assert (counted[0], counted[1]) == (planned.total - planned.attention, planned.attention)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_dense_plan_is_what_a_teacher_runs(name: str) -> None:
    teacher = make_teacher(name)
    model = read_architecture(teacher.config.to_dict())
    dense = LayerMap.dense(5)
    tokens = torch.arange(PROMPT)[None]
    prefill = count(teacher, tokens, logits_to_keep=1)
    planned = count_forward_flops(model, dense, num_tokens=PROMPT, num_selected=PROMPT, num_logits=1, square=True)
    assert_equal(prefill, planned)
    result = plan(teacher.config.to_dict(), sequence_length=PROMPT, kv_cache_dtype="float32")
    assert count_cache_bytes(prefill[2]) == PROMPT * result.dense_kv_bytes_per_token


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        *in_turn(CONFIGS, [(2, 2), (3, 1), (1, 4)]),
        *(pytest.param("llama", (3, 1, sharing), id=sharing) for sharing in ("mqa", "mha")),
    ],
)
def test_the_executed_plan_is_what_a_student_runs(name: str, shape: Any) -> None:
    l, g, *sharing = shape  # noqa: E741  # the paper's l
    heads: Any = {"sharing": sharing[0]} if sharing else {}
    student = countable(convert(make_teacher(name), num_key_value_layers=l, key_value_group_size=g, **heads))
    config = student.config.to_dict()
    model, layer_map = read_architecture(config), student.config.layer_map
    tokens = torch.arange(PROMPT)[None]
    prefill = count(student, tokens, logits_to_keep=1)
    planned = count_forward_flops(model, layer_map, num_tokens=PROMPT, num_selected=1, num_logits=1, square=True)
    assert_equal(prefill, planned)
    result = plan(config, sequence_length=PROMPT, kv_cache_dtype="float32")
    assert result.prefill["executed"].swiftkv.total - result.prefill["executed"].swiftkv.attention == pytest.approx(
        prefill[0] / PROMPT
    )
    assert count_cache_bytes(prefill[2]) == PROMPT * result.kv_bytes_per_token
    decode = count(student, tokens[:, :1], past_key_values=prefill[2])
    one_token = {"num_tokens": 1, "num_selected": 1, "num_logits": 1, "past": PROMPT}
    assert_equal(decode, count_forward_flops(model, layer_map, **one_token, square=True))
    assert result.decode.swiftkv == Components.from_flops(count_forward_flops(model, layer_map, **one_token))


@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_quantized_cache_has_the_planned_bytes(name: str) -> None:
    student = convert(make_teacher(name), num_key_value_layers=2, key_value_group_size=2)
    for kv_cache_dtype in ("fp8", "int8"):
        cache = make_cache(student.config, kv_cache_dtype=kv_cache_dtype)
        student(torch.arange(PROMPT)[None], past_key_values=cache, logits_to_keep=1)
        result = plan(student.config.to_dict(), sequence_length=PROMPT, kv_cache_dtype=kv_cache_dtype)
        assert count_cache_bytes(cache) == PROMPT * result.kv_bytes_per_token


@pytest.mark.parametrize("switched", [False, True])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_absent_keys_mean_what_transformers_takes_them_to_mean(model_type: str, switched: bool) -> None:
    given = {key: value for key, value in SHAPE.items() if key != "max_position_embeddings"}
    given |= {"pad_token_id": None, "num_experts_per_tok": 2}
    given |= {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 0} if switched else {}
    full = AutoConfig.for_model(model_type, **given).to_dict()
    assert read_architecture({"model_type": model_type, **given}) == read_architecture(full)


@pytest.mark.parametrize(
    ("name", "trainable", "own_output_projection"), pairwise(CONFIGS, ["kv", "qkv", "tail", "all"], [False, True])
)
def test_parameters_are_those_of_the_fork(name: str, trainable: Any, own_output_projection: bool) -> None:
    teacher = make_teacher(name)
    model = read_architecture(teacher.config.to_dict())
    assert count_dense_parameters(model) == sum(p.numel() for p in teacher.parameters())
    shape: dict[str, Any] = {"early_exit": True, "own_output_projection": own_output_projection}
    student = convert(teacher, num_key_value_layers=2, key_value_group_size=2, **shape)
    distillation_model = DistillationModel(student, DistillationSpec(trainable=trainable), dtype=torch.bfloat16)
    planned = count_student_parameters(model, student.config.layer_map, trainable)
    trained = sum(p.numel() for p in distillation_model.parameters() if p.requires_grad)
    assert (planned.trained, planned.total) == (trained, sum(p.numel() for p in distillation_model.parameters()))
