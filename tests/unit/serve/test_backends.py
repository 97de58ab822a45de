"""Choice of the engine that a version runs on, and refusal of what an engine has not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from swiftkv_platform.engine import LLMEngine
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.orchestration.deploying import check_engine_options
from swiftkv_platform.serve.args import Served
from swiftkv_platform.serve.backends import Surroundings, choose_backend
from swiftkv_platform.specs.engine import EngineConfig

GPU = Surroundings(device="cuda", has_vllm=True, model_type="llama_swiftkv", has_exit_head=False)


@pytest.mark.parametrize(
    ("options", "around", "backend"),
    [
        ({}, {}, "vllm"),
        ({}, {"model_type": "llama"}, "vllm"),
        ({}, {"model_type": "qwen3_moe_swiftkv"}, "vllm"),
        ({"max_num_seqs": 8, "kv_cache_dtype": "fp8"}, {}, "vllm"),
        ({}, {"device": "cpu"}, "native"),
        ({}, {"has_vllm": False}, "native"),
        ({}, {"model_type": "deepseek_v2_swiftkv"}, "native"),
        ({}, {"model_type": "gpt2"}, "native"),
        ({}, {"has_exit_head": True}, "native"),
        ({}, {"has_own_head_count": True}, "native"),
        ({}, {"is_judged": True}, "native"),
        ({"kv_cache_dtype": "int8"}, {}, "native"),
        ({"native_kernels": False}, {}, "native"),
        ({"backend": "native"}, {}, "native"),
        ({"backend": "vllm"}, {"device": "cpu", "has_exit_head": True}, "vllm"),
        ({"backend": "vllm"}, {"has_vllm": False, "model_type": "gpt2"}, "vllm"),
    ],
)
def test_the_choice(options: dict[str, Any], around: dict[str, Any], backend: str) -> None:
    assert choose_backend(EngineConfig(**options), replace(GPU, **around)) == backend


@pytest.mark.parametrize(
    ("option", "value"),
    [("kv_cache_dtype", "int8"), ("kv_cache_dtype", "float32"), ("fuse_weights", False), ("native_kernels", False)],
)
def test_an_option_of_the_native_engine_alone_is_refused_beside_vllm(option: str, value: Any) -> None:
    assert EngineConfig(**{option: value}).native_only == (option,)
    with pytest.raises(ValidationError, match="backend native"):
        EngineConfig(**{"backend": "vllm", option: value})
    with pytest.raises(InvalidInputError, match="an option of backend native alone") as caught:
        check_engine_options({option: value, "backend": "vllm"})
    assert (caught.value.field, caught.value.value) == (f"engine.{option}", value)
    check_engine_options({option: value, "backend": "native"})


def test_a_shadow_is_refused_beside_vllm() -> None:
    document = {"model": "mdl_1", "artifact_uri": "/a", "shadow": {"against": "teacher"}}
    with pytest.raises(ValidationError, match="shadow compares distributions, which backend native alone gives"):
        Served.model_validate({**document, "engine": {"backend": "vllm"}})
    assert Served.model_validate({**document, "engine": {"backend": "auto"}}).shadow is not None


def test_the_native_engine_refuses_to_be_another(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="this is the native engine") as caught:
        LLMEngine.from_pretrained(tmp_path, EngineConfig(backend="vllm"))
    assert caught.value.field == "backend"
