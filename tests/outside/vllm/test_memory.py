"""KV cache blocks at equal memory: AcrossKV saves what it promises, and 8 bits half of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.outside.vllm.engines import runner, serving
from tests.outside.vllm.students import make_student

SIXTEEN = {"num_hidden_layers": 16}


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """16 layers, l = 8, g = 2: 12 KV-cache layers."""
    shape = {"num_key_value_layers": 8, "key_value_group_size": 2}
    return make_student(tmp_path_factory.mktemp("sixteen"), shape=shape, **SIXTEEN)


def blocks(directory: Path, **options: object) -> tuple[int, int]:
    """Blocks, and the layers that have memory of their own."""
    with serving(directory, **options) as llm:
        layers = {cache.data_ptr() for cache in runner(llm).kv_caches}
        return runner(llm).kv_cache_config.num_blocks, len(layers)


def test_blocks_grow_by_16_to_12(student: Path) -> None:
    ours, our_layers = blocks(student)
    dense, dense_layers = blocks(student, hf_overrides={"swiftkv": False})
    assert (our_layers, dense_layers) == (12, 16)
    assert abs(12 * ours - 16 * dense) < 16  # each count is rounded down to whole blocks


def test_fp8_halves_a_block(student: Path) -> None:
    ours, _ = blocks(student, dtype="bfloat16")
    halved, layers = blocks(student, dtype="bfloat16", kv_cache_dtype="fp8")
    assert layers == 12
    assert halved // 2 in (ours, ours - 1)
