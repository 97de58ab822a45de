"""KV caches that leave the engine and return through a vLLM connector that stores them in files, and servers that fill
caches for others.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model import export
from tests.outside.vllm.engines import (
    CHOSEN,
    OWN,
    SHAPE,
    complete,
    expected,
    make_student,
    prompts,
    recorded_sizes,
    runner,
    serving,
)
from tests.outside.vllm.test_compiled import COMPILED

BLOCK = 32
ONE = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)


def options(directory: Path) -> dict[str, Any]:
    """Return options of an engine that stores its caches in a directory."""
    stored = {"shared_storage_path": str(directory)}
    transfer = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": stored}
    return {"kv_transfer_config": transfer, "enable_prefix_caching": False, "block_size": BLOCK}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("shape", [SHAPE, OWN, CHOSEN], ids=["shared", "own", "chosen"])
def test_text_from_a_stored_cache(shape: dict[str, Any], compiled: bool, tmp_path: Path) -> None:
    """The second engine reads the caches that the first one stored: it computes less and gives the same text."""
    student = make_student(tmp_path / "student", shape=shape)
    batch = prompts((70, 41, 100))
    computed = []
    for _ in range(2):
        with (
            serving(student, **options(tmp_path / "stored"), enforce_eager=not compiled) as llm,
            recorded_sizes(llm) as sizes,
        ):
            assert complete(llm, batch) == expected(student, batch)
            computed.append(sizes[0][0])
            assert complete(llm, batch[::-1]) == expected(student, batch[::-1]), "the engine reads its own cache"
    assert computed == [sum(map(len, batch)), sum(len(ids) - (len(ids) - 2) // BLOCK * BLOCK for ids in batch)]


def filled(directory: Path, stored: Path, **changes: Any) -> tuple[set[str], dict[str, torch.Tensor]]:
    """Return the parameters' names, and by layer the blocks of each cache except the last prompt tokens'."""
    batch = prompts((65, 33, 97))  # the last token is alone in its block
    with serving(directory, **options(stored), num_gpu_blocks_override=16, **changes) as llm:
        complete(llm, batch, ONE)
        layers = runner(llm).vllm_config.compilation_config.static_forward_context
        own = {name: layer for name, layer in layers.items() if layer.kv_sharing_target_layer_name is None}
        names = {name for name, _ in runner(llm).model.named_parameters()}
        return names, {name: layer.kv_cache[[1, 2, 4, 6, 7, 8]].clone() for name, layer in own.items()}


@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2"])
def test_half_a_model_fills_the_caches_of_a_whole_one(name: str, student: Path, tmp_path: Path) -> None:
    """From a prefill export, or from the whole student, of which only the layers that run are loaded."""
    if name == "qwen3":
        student = make_student(tmp_path / "qwen3", name, shape={"num_key_value_layers": 3, "key_value_group_size": 2})
    if name == "olmo2":
        student = make_student(tmp_path / "olmo2", name, shape=CHOSEN)
    export(student, tmp_path / "half", prefill_only=True)
    whole, caches = filled(student, tmp_path / "0")
    for directory, changes in (
        (tmp_path / "half", {}),
        (student, {"hf_overrides": {"swiftkv_prefill_only": True}}),
        (tmp_path / "half", COMPILED | {"max_num_batched_tokens": 256}),
    ):
        names, half = filled(directory, tmp_path / f"{directory.name}-{len(changes)}", **changes)
        assert half.keys() == caches.keys()
        assert all(torch.allclose(half[layer], caches[layer], atol=1e-5) for layer in caches)
        above = ("lm_head", "model.norm.", *(f"model.layers.{layer}." for layer in (2, 3, 4)[name != "llama" :]))
        assert names == {name for name in whole if not name.startswith(above)} | {n for n in names if "k_norms" in n}


def test_half_a_model_gives_no_text(student: Path, tmp_path: Path) -> None:
    half = {"hf_overrides": {"swiftkv_prefill_only": True}}
    with pytest.raises(ModelError, match=r"swiftkv_prefill_only is true.*kv_transfer_config"), serving(student, **half):
        pass
    with serving(student, **half, **options(tmp_path)) as llm:
        with pytest.raises(VLLMValidationError, match=r"max_tokens is 12 .*prefill-only server"):
            complete(llm, prompts())
        complete(llm, prompts(), ONE)
