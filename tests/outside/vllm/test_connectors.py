"""KV caches that leave the engine and come back, through a connector of vLLM's that keeps them in files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.outside.vllm.engines import complete, expected, prompts, recorded_sizes, serving

TRANSFER = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize("compiled", [False, True])
def test_text_from_a_stored_cache(compiled: bool, student: Path, tmp_path: Path) -> None:
    """What one engine has stored, the next one reads: it computes less, and gives the same text."""
    batch = prompts((70, 41, 100))
    transfer = TRANSFER | {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path / "stored")}}
    options = {"kv_transfer_config": transfer, "enable_prefix_caching": False, "block_size": 32}
    computed = []
    for _ in range(2):
        with serving(student, **options, enforce_eager=not compiled) as llm, recorded_sizes(llm) as sizes:
            assert complete(llm, batch) == expected(student, batch)
            computed.append(sizes[0][0])
            assert complete(llm, batch[::-1]) == expected(student, batch[::-1]), "a hit in the engine that stored it"
    assert computed == [sum(map(len, batch)), sum(len(ids) - (len(ids) - 2) // 32 * 32 for ids in batch)]
