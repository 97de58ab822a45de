"""The plan of a prompt: the layer map, the paper's table 1 and KV figures, and errors for bad configurations."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.planning import plan
from swiftkv_platform.planning.architecture import split_by_size
from swiftkv_platform.planning.prefill import count_attention_pairs
from swiftkv_platform.student_shape import LayerMap, RequestedStudentShape, StudentShape, format_layers, parse_layers
from tests.support.model_configs import llama_config

CONFIGS = Path(__file__).parents[3] / "benchmarks" / "configs"
LLAMA_8B = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())


def test_layer_maps() -> None:
    """A group shares one cache layer, and the last group may be short; a share of the prefill is rounded to layers, at
    least one on each side; a run of items stays within a limit, unless it is a single item."""
    layer_map = LayerMap(9, StudentShape(num_key_value_layers=4, key_value_group_size=2))
    assert layer_map.leaders == (4, 6, 8)
    assert [layer_map.get_cache_layer(i) for i in range(9)] == [0, 1, 2, 3, 4, 4, 5, 5, 6]
    assert [layer_map.get_leader(i) for i in range(4, 9)] == [4, 4, 6, 6, 8]
    assert [list(layer_map.get_group(i)) for i in layer_map.leaders] == [[4, 5], [6, 7], [8]]
    assert layer_map.num_kv_cache_layers == 7
    dense = LayerMap.dense(6)
    assert (dense.leaders, dense.num_kv_cache_layers) == ((), 6)
    for share, expected in ((None, 16), (0.25, 24), (0.5, 16), (0.01, 31), (0.99, 1)):
        assert RequestedStudentShape(prefill_reduction=share).resolve_depth(32) == expected
    cases: list[tuple[list[int], list[list[int]]]] = [([], []), ([4, 4, 4], [[4, 4], [4]]), ([5, 5], [[5, 5]])]
    for sizes, runs in (*cases, ([3, 12, 3, 7], [[3], [12], [3, 7]])):
        assert [sizes[run] for run in split_by_size(sizes, 10)] == runs


@pytest.mark.parametrize("text", ["0-2,4,6-16", "3", "0,2"])
def test_layers_are_written_as_they_are_read(text: str) -> None:
    assert format_layers(parse_layers(text)) == text
    assert parse_layers("0-2, 4") == [0, 1, 2, 4]
    for wrong in ("", "a", "1-", "-1", "1,,2", "1-2-3", "0-9999999", "4,2", "2,2", "3-1", "0-4,4-6"):
        with pytest.raises(InvalidInputError, match="as 0-2,4,6-16"):
            parse_layers(wrong)


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"prefill_reduction": 0.0}, "prefill_reduction", "prefill_reduction is 0.0"),
        ({"prefill_reduction": 1.5}, "prefill_reduction", "prefill_reduction is 1.5"),
        ({"num_key_value_layers": 6, "prefill_reduction": 0.5}, "prefill_reduction", "leave one of them out"),
        ({"num_key_value_layers": 6.0}, "num_key_value_layers", "num_key_value_layers is 6.0; an integer"),
        ({"num_key_value_layers": "6"}, "num_key_value_layers", "num_key_value_layers is '6'"),
        ({"num_key_value_layers": True}, "num_key_value_layers", "num_key_value_layers is True"),
        ({"key_value_group_size": None}, "key_value_group_size", "key_value_group_size is None"),
        ({"key_value_group_size": 7}, "key_value_group_size", "1..6 are accepted"),
        *(({"num_key_value_layers": n}, "num_key_value_layers", "1..11") for n in (0, 12, 13)),
    ],
)
def test_what_gives_no_layer_map_is_named(given: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(message)) as caught:
        RequestedStudentShape(**given).resolve(12)
    assert caught.value.field == f"swiftkv.{field}"
    assert caught.value.value == given[field]


@pytest.mark.parametrize(
    ("l", "g", "gigaflops", "relative"),
    [  # per prompt token: vocabulary; K, V; Q, O; MLP; attention; and the relative total
        (None, 1, (4.3, 2.6, 22, 113, 160), 1.0),
        (60, 1, (4.3, 2.6, 16, 85, 120), 0.755),
        (40, 1, (4.3, 2.6, 11, 56, 80), 0.510),
        (40, 4, (4.3, 1.7, 11, 56, 80), 0.507),
    ],
)
def test_table_1_of_the_paper(l: int | None, g: int, gigaflops: tuple[float, ...], relative: float) -> None:  # noqa: E741
    config = CONFIGS / "llama-3.1-70b.json"
    result = plan(config, num_key_value_layers=l, key_value_group_size=g, sequence_length=131072)
    compared = result.prefill["paper"]
    flops = compared.dense if l is None else compared.swiftkv
    # The paper's attention column is in units of 2^30, the others in 10^9: 160 is half of the 128K x 128K square.
    found = [flops.vocabulary, flops.key_value, flops.query + flops.output, flops.mlp, flops.attention * 10**9 / 2**30]
    for column, expected, tolerance in zip(found, gigaflops, (0.1, 0.1, 0.6, 0.6, 0.6), strict=True):
        assert column / 1e9 == pytest.approx(expected, abs=tolerance)
    assert flops.total / compared.dense.total == pytest.approx(relative, abs=0.005)
    if l is not None:
        assert result.prefill_flops_ratio == flops.total / compared.dense.total


@pytest.mark.parametrize(
    ("dtype", "reductions"),
    [("bfloat16", {1: 0.0, 2: 0.25, 4: 0.375, 8: 0.4375, 16: 0.46875}), ("fp8", {2: 0.625, 4: 0.6875})],
)
def test_kv_reductions_of_the_paper(dtype: str, reductions: dict[int, float]) -> None:
    for g, reduction in reductions.items():
        result = plan(LLAMA_8B, num_key_value_layers=16, key_value_group_size=g, kv_cache_dtype=dtype)
        assert 1 - result.kv_payload_ratio == reduction
        scales = 2 / 128 if dtype == "fp8" else 0  # bytes of scale per byte of payload, at head size 128
        assert result.kv_bytes_ratio == pytest.approx((1 - reduction) * (1 + scales))
        assert result.dense_kv_bytes_per_token == 32 * 2 * 8 * 128 * 2


def test_a_student_that_skips_nothing_is_its_teacher() -> None:
    result = plan(LLAMA_8B, num_key_value_layers=32, sequence_length=1024)
    assert (result.prefill_flops_ratio, result.executed_prefill_flops_ratio, result.kv_bytes_ratio) == (1.0, 1.0, 1.0)
    assert result.num_kv_cache_layers == 32


def test_prompts_only_write_key_values_where_they_bypass_a_layer() -> None:
    """By hand: 2 query heads and a KV head of size 4, hidden size 8, MLP of 16; prompts of 5 tokens bypass layer 1."""
    config = llama_config(4, hidden_size=8, num_attention_heads=2, num_key_value_heads=1, head_dim=4)
    config |= {"intermediate_size": 16, "vocab_size": 10}
    found = plan(config, prefill_layers=[0, 2], sequence_length=5)
    key_value, rest, pair, head = 128, 128 + 128 + 768, 32, 160
    whole = 5 * (key_value + rest) + 15 * pair
    last_alone = 5 * key_value + rest + 5 * pair  # in layers 1 and 3
    flops = {name: 5 * each.swiftkv.total for name, each in found.prefill.items()}
    assert flops["executed"] == pytest.approx(2 * whole + 2 * last_alone + head)
    assert flops["paper"] == pytest.approx(2 * whole + 2 * 5 * key_value + 5 * 2 * head)
    assert found.decode.swiftkv == found.decode.dense
    assert (found.num_key_value_layers, found.prefill_layers) == (3, (0, 2))
    student = config | {"model_type": "llama_swiftkv", "num_key_value_layers": 3, "swiftkv_prefill_layers": [0, 2]}
    assert plan(student, sequence_length=5) == found
    assert plan(student, num_key_value_layers=3).prefill_layers == (0, 1, 2), "an argument overrides the configuration"


def test_a_window_caps_attention_and_cache() -> None:
    windowed = {**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096}
    full, capped = (plan(config, num_key_value_layers=16, sequence_length=65536) for config in (LLAMA_8B, windowed))
    assert capped.kv_bytes_per_token == pytest.approx(full.kv_bytes_per_token * 4095 / 65536)
    assert capped.prefill["paper"].dense.attention < full.prefill["paper"].dense.attention / 8
    assert capped.prefill["paper"].dense.mlp == full.prefill["paper"].dense.mlp


def test_attention_pairs_count_the_mask() -> None:
    for num_queries, past, window in product((0, 1, 7), (0, 3, 9), (None, 2, 4, 20)):
        visible = [
            (query, key)
            for query in range(past, past + num_queries)
            for key in range(query + 1)
            if window is None or key > query - window
        ]
        assert count_attention_pairs(num_queries, past, window) == len(visible), (num_queries, past, window)


def test_heads_of_a_group_may_differ_from_the_teachers() -> None:
    by_heads = [
        plan(LLAMA_8B, num_key_value_layers=16, key_value_group_size=g, num_key_value_heads_swiftkv=heads)
        for heads, g in ((8, 4), (32, 16), (2, 1))
    ]
    assert len({result.kv_bytes_per_token for result in by_heads}) == 1  # appendix C compares equal caches
    student = {**LLAMA_8B, "model_type": "llama_swiftkv", "num_key_value_layers": 16, "key_value_group_size": 16}
    read = plan(student | {"num_key_value_heads_swiftkv": 32})
    assert read == by_heads[1]


def test_a_directory_a_file_and_a_mapping_are_the_same(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        plan(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert plan(tmp_path) == plan(tmp_path / "config.json") == plan(str(tmp_path)) == plan(LLAMA_8B)
    assert (plan(LLAMA_8B).num_key_value_layers, plan(LLAMA_8B).sequence_length) == (16, 131072)
    for text, message in (("[1]", "holds a list, not an object"), ("{", "is not valid JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ModelError, match=message):
            plan(tmp_path)


LATENT = llama_config(32, model_type="deepseek_v2_swiftkv", first_k_dense_replace=32, q_lora_rank=None)
GEMMA = {"model_type": "gemma3_text"}
STUDENT = {"model_type": "llama_swiftkv"}
LISTS: list[tuple[Any, dict[str, Any], str]] = [
    ([], {}, r"is \[\]; an ascending list"),
    ([0, 2, 2], {}, "an ascending list"),
    ([0, True], {}, "an ascending list"),
    ([-1, 2], {}, "an ascending list"),
    ([0, 31], {}, "a model of 32 layers takes 0 to 30"),
    ([0, 2], {"num_key_value_layers": 4}, "which sets l to 3; leave num_key_value_layers"),
    ([0, 2], LATENT, r"which deepseek_v2 does not support, since it caches latents \(MLA\); use"),
]


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        (
            {"model_type": "gpt2"},
            "model.name_or_path",
            "model_type 'gpt2', which is not supported; supported types are deepseek_v2, g",
        ),
        (GEMMA | {"final_logit_softcapping": 30.0}, "final_logit_softcapping", "softcapping 30.0; null is accepted"),
        (GEMMA | {"use_bidirectional_attention": True}, "use_bidirectional_attention", "True; false is accepted"),
        ({"model_type": "olmo3", "sliding_window": None}, "sliding_window", "null, but sliding-window layers"),
        ({"model_type": None}, "model.name_or_path", "model_type None, which is not supported"),
        ({"hidden_size": None}, "hidden_size", "a positive integer is accepted"),
        ({"vocab_size": "many"}, "vocab_size", "'many'; a positive integer is accepted"),
        ({"num_key_value_heads": 7}, "num_key_value_heads", "7; a divisor of num_attention_heads 32 is accepted"),
        ({"model_type": "smollm3", "no_rope_layers": [1]}, "no_rope_layers", "1 no_rope_layers for 32 layers"),
        ({"num_key_value_layers": 33}, "num_key_value_layers", "33; model_type 'llama' has no such key"),
        (STUDENT | {"num_key_value_layers": 33}, "swiftkv.num_key_value_layers", r"1\.\.31 are accepted"),
        *(
            (STUDENT | {"swiftkv_prefill_layers": layers, **others}, "swiftkv.prefill_layers", message)
            for layers, others, message in LISTS
        ),
    ],
)
def test_a_configuration_that_makes_no_sense(changes: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        plan(LLAMA_8B | changes)
    assert caught.value.field == field


def test_arguments_out_of_range() -> None:
    layers = {"num_key_value_layers": 33, "key_value_group_size": 17}
    for name, value in {**layers, "sequence_length": 0, "kv_cache_dtype": "int4"}.items():
        with pytest.raises(InvalidInputError) as caught:
            plan(LLAMA_8B, **{name: value})
        assert caught.value.field == (f"swiftkv.{name}" if name in layers else name)
    sharing: Any = "mla"
    with pytest.raises(InvalidInputError, match="'mla'; gqa, mqa, mha are accepted"):
        RequestedStudentShape(sharing=sharing).resolve(4, 8)
