"""The layer map: the arithmetic that attention, cache and cost all rest on."""

from __future__ import annotations

import re
from typing import Any

import pytest

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.planning import LayerMap, resolve_num_key_value_layers, shared_key_value_heads, student_layer_map
from swiftkv_platform.planning.layers import split_by_size


def test_groups_share_one_cache_layer_and_the_last_may_be_short() -> None:
    layer_map = LayerMap(num_hidden_layers=9, num_key_value_layers=4, key_value_group_size=2)
    assert layer_map.leaders == (4, 6, 8)
    assert [layer_map.cache_layer(i) for i in range(9)] == [0, 1, 2, 3, 4, 4, 5, 5, 6]
    assert [layer_map.leader(i) for i in range(4, 9)] == [4, 4, 6, 6, 8]
    assert [list(layer_map.group(i)) for i in layer_map.leaders] == [[4, 5], [6, 7], [8]]
    assert layer_map.num_kv_cache_layers == 7


@pytest.mark.parametrize(("group_size", "reduction"), [(1, 0.0), (2, 0.25), (4, 0.375), (8, 0.4375), (16, 0.46875)])
def test_kv_reductions_of_the_paper_at_half_of_32_layers(group_size: int, reduction: float) -> None:
    assert 1 - LayerMap(32, 16, group_size).num_kv_cache_layers / 32 == reduction


def test_every_layer_computes_its_own_kv_when_dense() -> None:
    dense = LayerMap(6, 6, 1)
    assert dense.leaders == ()
    assert dense.num_kv_cache_layers == 6


@pytest.mark.parametrize(("share", "expected"), [(None, 16), (0.25, 24), (0.5, 16), (0.01, 31), (0.99, 1)])
def test_prefill_reduction_rounds_to_layers_and_keeps_one_on_each_side(share: float | None, expected: int) -> None:
    assert resolve_num_key_value_layers(32, None, share) == expected


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"prefill_reduction": 0.0}, "prefill_reduction is 0.0"),
        ({"prefill_reduction": 1.5}, "prefill_reduction is 1.5"),
        ({"num_key_value_layers": 6, "prefill_reduction": 0.5}, "leave one of them out"),
        ({"num_key_value_layers": 6.0}, "num_key_value_layers is 6.0; a whole number"),
        ({"num_key_value_layers": "6"}, "num_key_value_layers is '6'"),
        ({"num_key_value_layers": True}, "num_key_value_layers is True"),
        ({"key_value_group_size": None}, "key_value_group_size is None"),
    ],
)
def test_what_gives_no_layer_map_is_named(given: dict[str, Any], named: str) -> None:
    arguments: dict[str, Any] = {
        "num_key_value_layers": None,
        "prefill_reduction": None,
        "key_value_group_size": 1,
    } | given
    with pytest.raises(InvalidInputError, match=re.escape(named)):
        student_layer_map(12, **arguments)


def test_an_unknown_sharing_is_named() -> None:
    sharing: Any = "mla"
    with pytest.raises(InvalidInputError, match="'mla'; gqa, mqa, mha are accepted"):
        shared_key_value_heads(sharing, num_attention_heads=8, num_key_value_heads=2)


@pytest.mark.parametrize("num_key_value_layers", [0, 12, 13])
def test_a_student_skips_some_layers_and_keeps_some(num_key_value_layers: int) -> None:
    with pytest.raises(InvalidInputError, match=r"accepts? 1\.\.11|1\.\.11 are accepted") as caught:
        student_layer_map(12, num_key_value_layers=num_key_value_layers, prefill_reduction=None, key_value_group_size=1)
    assert caught.value.field == "swiftkv.num_key_value_layers"
    assert caught.value.value == num_key_value_layers


def test_group_size_is_bounded_by_the_skipped_layers() -> None:
    with pytest.raises(InvalidInputError, match=r"1\.\.6 are accepted") as caught:
        LayerMap(12, 6, 7)
    assert caught.value.field == "swiftkv.key_value_group_size"


@pytest.mark.parametrize(
    ("sizes", "runs"), [([], []), ([4, 4, 4], [[4, 4], [4]]), ([5, 5], [[5, 5]]), ([3, 12, 3, 7], [[3], [12], [3, 7]])]
)
def test_runs_are_no_larger_than_the_limit_but_for_single_items(sizes: list[int], runs: list[list[int]]) -> None:
    assert [sizes[run] for run in split_by_size(sizes, 10)] == runs
