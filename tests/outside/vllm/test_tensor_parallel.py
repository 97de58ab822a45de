"""Two ranks give the text of one: sharded key-value heads, and one head that both ranks hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.outside.vllm.engines import complete, expected, prompts, serving
from tests.outside.vllm.students import make_student


@pytest.mark.parametrize("num_key_value_heads", [2, 1], ids=["sharded", "replicated"])
def test_two_ranks(num_key_value_heads: int, tmp_path: Path) -> None:
    make_student(tmp_path, "qwen3", num_key_value_heads=num_key_value_heads)
    batch = prompts()
    with serving(tmp_path, tensor_parallel_size=2, distributed_executor_backend="mp") as llm:
        assert complete(llm, batch) == expected(tmp_path, batch)
