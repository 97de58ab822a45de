"""The plan of a prompt: the paper's table 1 and KV figures, and what bad configurations are told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.planning import FAMILIES, plan
from swiftkv_platform.planning.flops import attention_pairs

LLAMA_70B = Path(__file__).parents[3] / "benchmarks" / "configs" / "llama-3.1-70b.json"
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
TABLE_1 = [
    # l, g, then GFLOPs per prompt token: vocabulary; K, V; Q, O; MLP; attention; and the relative total
    (None, 1, 4.3, 2.6, 22, 113, 160, 1.0),
    (60, 1, 4.3, 2.6, 16, 85, 120, 0.755),
    (40, 1, 4.3, 2.6, 11, 56, 80, 0.510),
    (40, 4, 4.3, 1.7, 11, 56, 80, 0.507),
]


def test_all_layers_are_the_baseline() -> None:
    result = plan(LLAMA_8B, num_key_value_layers=32, sequence_length=1024)
    assert (result.prefill_flops_ratio, result.executed_prefill_flops_ratio, result.kv_bytes_ratio) == (1.0, 1.0, 1.0)
    assert result.num_kv_cache_layers == 32


@pytest.mark.parametrize(("l", "g", "vocabulary", "key_value", "query_output", "mlp", "attention", "relative"), TABLE_1)
def test_table_1_of_the_paper(
    l: int | None,  # noqa: E741  # the paper's l
    g: int,
    vocabulary: float,
    key_value: float,
    query_output: float,
    mlp: float,
    attention: float,
    relative: float,
) -> None:
    result = plan(LLAMA_70B, num_key_value_layers=l, key_value_group_size=g, sequence_length=131072)
    compared = result.prefill["paper"]
    flops = compared.dense if l is None else compared.swiftkv
    assert flops.vocabulary / 1e9 == pytest.approx(vocabulary, abs=0.1)
    assert flops.key_value / 1e9 == pytest.approx(key_value, abs=0.1)
    assert (flops.query + flops.output) / 1e9 == pytest.approx(query_output, abs=0.6)
    assert flops.mlp / 1e9 == pytest.approx(mlp, abs=0.6)
    # The paper's attention column is in units of 2^30, the others in 10^9: 160 is half of the 128K x 128K square.
    assert flops.attention / 2**30 == pytest.approx(attention, abs=0.6)
    assert flops.total / compared.dense.total == pytest.approx(relative, abs=0.005)
    if l is not None:
        assert result.prefill_flops_ratio == flops.total / compared.dense.total


@pytest.mark.parametrize(
    ("g", "dtype", "reduction"),
    [
        (1, "bfloat16", 0.0),
        (2, "bfloat16", 0.25),
        (4, "bfloat16", 0.375),
        (8, "bfloat16", 0.4375),
        (16, "bfloat16", 0.46875),
        (2, "fp8", 0.625),
        (4, "fp8", 0.6875),
    ],
)
def test_kv_reductions_of_the_paper(g: int, dtype: str, reduction: float) -> None:
    result = plan(LLAMA_8B, num_key_value_layers=16, key_value_group_size=g, kv_cache_dtype=dtype)
    assert 1 - result.kv_payload_ratio == reduction
    scales = 2 / 128 if dtype == "fp8" else 0  # bytes of scale per byte of payload, at head size 128
    assert result.kv_bytes_ratio == pytest.approx((1 - reduction) * (1 + scales))
    assert result.dense_kv_bytes_per_token == 32 * 2 * 8 * 128 * 2


def test_last_token_alone_meets_upper_layers_and_head() -> None:
    result = plan(LLAMA_8B, num_key_value_layers=16, sequence_length=1000)
    dense, swiftkv = result.prefill["executed"].dense, result.prefill["executed"].swiftkv
    head = 2 * 4096 * 128256
    assert dense.vocabulary == swiftkv.vocabulary == head / 1000
    assert swiftkv.mlp == pytest.approx(dense.mlp * (16 * 1000 + 16) / (32 * 1000))
    assert result.decode.swiftkv.attention == result.decode.dense.attention == 32 * 1001 * 4 * 4096


def test_a_window_caps_attention_and_cache() -> None:
    windowed = {**LLAMA_8B, "model_type": "mistral", "sliding_window": 4096}
    full = plan(LLAMA_8B, num_key_value_layers=16, sequence_length=65536)
    capped = plan(windowed, num_key_value_layers=16, sequence_length=65536)
    assert capped.kv_bytes_per_token == pytest.approx(full.kv_bytes_per_token * 4095 / 65536)
    assert capped.prefill["paper"].dense.attention < full.prefill["paper"].dense.attention / 8
    assert capped.prefill["paper"].dense.mlp == full.prefill["paper"].dense.mlp


@pytest.mark.parametrize("past", [0, 3, 9])
@pytest.mark.parametrize("window", [None, 2, 4, 20])
@pytest.mark.parametrize("num_queries", [0, 1, 7])
def test_attention_pairs_count_the_mask(num_queries: int, past: int, window: int | None) -> None:
    visible = [
        (query, key)
        for query in range(past, past + num_queries)
        for key in range(query + 1)
        if window is None or key > query - window
    ]
    assert attention_pairs(num_queries, past, window) == len(visible)


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
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    assert plan(tmp_path) == plan(tmp_path / "config.json") == plan(str(tmp_path)) == plan(LLAMA_8B)
    assert plan(LLAMA_8B).num_key_value_layers == 16
    assert plan(LLAMA_8B).sequence_length == 131072


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"model_type": "gpt2"}, "model.name_or_path", "no plan for model_type 'gpt2'; there are deepseek_v2, llama"),
        ({"model_type": None}, "model_type", "a string is accepted"),
        ({"hidden_size": None}, "hidden_size", "a positive integer is accepted"),
        ({"vocab_size": "many"}, "vocab_size", "'many'; a positive integer is accepted"),
        ({"num_key_value_heads": 7}, "num_key_value_heads", "32 query heads cannot share 7 KV heads"),
        ({"num_key_value_layers": 33}, "swiftkv.num_key_value_layers", r"1\.\.31 are accepted"),
    ],
)
def test_a_configuration_that_makes_no_sense(changes: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        plan(LLAMA_8B | changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"num_key_value_layers": 33}, "swiftkv.num_key_value_layers"),
        ({"key_value_group_size": 17}, "swiftkv.key_value_group_size"),
        ({"sequence_length": 0}, "sequence_length"),
        ({"kv_cache_dtype": "int4"}, "kv_cache_dtype"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        plan(LLAMA_8B, **arguments)
    assert caught.value.field == field


def test_a_file_that_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        plan(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="holds a list, not an object"):
        plan(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match="holds no JSON"):
        plan(tmp_path)


def test_planning_imports_no_torch() -> None:
    code = "import sys; from swiftkv_platform.planning import plan; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_family_has_a_row() -> None:
    assert {"llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2"} == set(FAMILIES)
