"""Settings and requests that are refused by name, before weights are read or the request is queued."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm import SamplingParams
from vllm.config import CompilationConfig
from vllm.exceptions import VLLMValidationError
from vllm.utils.import_utils import resolve_obj_by_qualname

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model import export
from swiftkv_platform.vllm.checks import (
    _check_breakable_graphs,
    _check_skipping,
    refuse_full_graphs_of_prompts,
)
from tests.outside.vllm.engines import TAIL, complete, configure, expected, make_student, prompts, serving
from tests.outside.vllm.interpreted import SECOND_RUNNER


def test_prompt_logprobs_are_refused_by_the_server(llama: Path) -> None:
    assert configure(llama).cache_config.kv_sharing_fast_prefill
    teacher = configure(llama, hf_overrides={"swiftkv": False}, kv_sharing_fast_prefill=True)
    assert not teacher.cache_config.kv_sharing_fast_prefill


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2"),
        ({"enable_lora": True}, "LoRA"),
        ({"quantization": "experts_int8"}, "quantized with experts_int8 are untested"),
        ({"kv_transfer_config": {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}}, "untested with"),
        ({"runner": "pooling", "convert": "embed"}, "use runner=generate"),
    ],
)
def test_options(options: dict[str, Any], message: str, llama: Path) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        configure(llama, **options)
    assert caught.value.field


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}, "VLLM_USE_BREAKABLE_CUDAGRAPH"),
        ({"VLLM_BATCH_INVARIANT": "1"}, "VLLM_BATCH_INVARIANT"),
        ({"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}, "VLLM_USE_BREAKABLE_CUDAGRAPH"),
        ({"VLLM_BATCH_INVARIANT": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}, None),
        ({"VLLM_BATCH_INVARIANT": "0"}, None),
    ],
)
def test_breakable_graphs(
    settings: dict[str, str], named: str | None, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would freeze that all tokens run layers >= l. A teacher has nothing to skip."""
    monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH", raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    if named is None:
        _check_breakable_graphs()
        return
    with pytest.raises(ModelError, match="set VLLM_USE_BREAKABLE_CUDAGRAPH=0") as caught:
        configure(llama)
    assert caught.value.field == named


def test_what_hangs_or_records_wrong_rows(tmp_path: Path, llama: Path) -> None:
    make_student(tmp_path, "qwen3_moe")
    two = SimpleNamespace(data_parallel_size=2)
    for student, changes, message in (
        (tmp_path, {"parallel_config": two}, "data_parallel_size is 2"),
        (tmp_path, {"aux": {"enable_return_routed_experts": True}}, "leave enable_return_routed_experts off"),
        (llama, {"attention_config": FLASHINFER, "speculative_config": NGRAM}, "use attention_backend FLASH_ATTN"),
        (llama, {"parallel_config": two}, None),
        (llama, {"attention_config": FLASHINFER}, None),
    ):
        config = configure(student)
        parts = {name: getattr(config, name) for name in CHECKED if hasattr(config, name)}
        holder = parts.get("aux_output_config", config.model_config)
        for name, value in changes.pop("aux", {}).items():
            setattr(holder, name, value)
        given: Any = SimpleNamespace(**parts | changes)
        if message is None:
            _check_skipping(given)
            continue
        with pytest.raises(ModelError, match=message) as caught:
            _check_skipping(given)
        assert caught.value.field


CHECKED = ("parallel_config", "model_config", "aux_output_config", "attention_config", "speculative_config")
"""Parts of vLLM's configuration that `_check_skipping` reads."""
FLASHINFER = SimpleNamespace(backend=SimpleNamespace(name="FLASHINFER"))
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def dense(student: Path, directory: Path) -> Path:
    """Write the configuration of a dense model with one layer."""
    config = json.loads((student / "config.json").read_text()) | {"model_type": "llama", "num_hidden_layers": 1}
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["LlamaForCausalLM"]}))
    return directory


@pytest.mark.parametrize(
    ("given", "drafts", "message"),
    [
        ("student", "eagle", "eagle method drafts from hidden states"),
        ("student", "draft_model", "with a second model"),
        ("dense", "draft_model", "student cannot be a draft model"),
    ],
)
def test_drafts(given: str, drafts: str, message: str, llama: Path, tmp_path: Path) -> None:
    other = dense(llama, tmp_path)
    target, draft = (llama, other) if given == "student" else (other, llama)
    speculative = {"method": drafts, "model": str(draft), "num_speculative_tokens": 2}
    with pytest.raises(ModelError, match=rf"{message}.*; use ") as caught:
        configure(target, speculative_config=speculative)
    assert caught.value.field


def test_latent_attention_says_what_serves_it(tmp_path: Path) -> None:
    make_student(tmp_path, "deepseek_v2")
    with pytest.raises(ModelError, match=r"deepseek_v2_swiftkv .* native engine .* serves DeepSeek-V2"):
        configure(tmp_path)


@pytest.mark.parametrize("sharing", ["mqa", "mha"])
def test_shared_heads_of_another_count(sharing: str, tmp_path: Path) -> None:
    make_student(tmp_path, shape={"num_key_value_layers": 2, "sharing": sharing})
    with pytest.raises(ModelError, match=r"num_key_value_heads_swiftkv is (1|8)"):
        configure(tmp_path)


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        ({"kv_connector": "ExampleConnector"}, "swiftkv_deep_tail is 16.*; use NixlConnector"),
        (
            {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"bidirectional_kv_xfer": True}},
            "leave bidirectional_kv_xfer out",
        ),
    ],
)
def test_caches_in_which_other_tokens_are_deep(transfer: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_student(tmp_path, shape=TAIL)
    transfer = {"kv_role": "kv_both"} | transfer
    with pytest.raises(ModelError, match=message):
        configure(tmp_path, kv_transfer_config=transfer)
    configure(tmp_path, hf_overrides={"swiftkv": False}, kv_transfer_config=transfer)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            {"speculative_config": NGRAM},
            "with drafts vLLM's model runner V1 does not report where prompts end",
            marks=pytest.mark.skipif(SECOND_RUNNER, reason="the second runner serves them"),
        ),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "leave scheduler_cls out"),
        ({"enable_prompt_embeds": True}, "leave enable_prompt_embeds off"),
    ],
)
def test_beside_own_keys_and_values(options: dict[str, Any], message: str, own: Path) -> None:
    """In teacher mode the same options are allowed."""
    with pytest.raises(ModelError, match=rf"swiftkv_decode_key_value is 'own'.*{message}"):
        configure(own, **options)
    taught = configure(own, hf_overrides={"swiftkv": False}, **options)
    assert taught.scheduler_config.scheduler_cls == options.get("scheduler_cls")


@pytest.mark.parametrize("form", ["shared", "own"])
def test_a_server_that_prefills_only_gives_one_token(form: str, llama: Path, own: Path) -> None:
    transfer = {"kv_transfer_config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}
    student = llama if form == "shared" else own
    (name,) = configure(student, hf_overrides={"swiftkv_prefill_only": True}, **transfer).model_config.logits_processors
    check = resolve_obj_by_qualname(name.replace(":", ".")).validate_params
    check(SamplingParams(max_tokens=1))
    for wrong in ({"max_tokens": 2}, {"prompt_logprobs": 1}):
        with pytest.raises(VLLMValidationError, match=next(iter(wrong))):
            check(SamplingParams(**{"max_tokens": 1} | wrong))


def test_full_graphs_are_for_decode_steps_alone() -> None:
    for mode in ("NONE", "PIECEWISE", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"):
        refuse_full_graphs_of_prompts(CompilationConfig(cudagraph_mode=mode))
    with pytest.raises(ModelError, match=r"cudagraph_mode is FULL, .*use FULL_AND_PIECEWISE"):
        refuse_full_graphs_of_prompts(CompilationConfig(cudagraph_mode="FULL"))


def test_teacher_mode_of_an_export_without_the_teacher(llama: Path, tmp_path: Path) -> None:
    export(llama, tmp_path / "served")
    with pytest.raises(ModelError, match="exported without"):
        configure(tmp_path / "served", hf_overrides={"swiftkv": False})


@pytest.mark.parametrize("prompt_logprobs", [0, 3])
def test_prompt_logprobs_are_refused_and_the_engine_lives_on(prompt_logprobs: int, llama: Path) -> None:
    batch = prompts((20, 9))
    with serving(llama) as llm:
        params = SamplingParams(max_tokens=2, prompt_logprobs=prompt_logprobs, detokenize=False)
        with pytest.raises(VLLMValidationError, match=r"prompt_logprobs is \d, but a SwiftKV model skips"):
            complete(llm, batch, params)
        assert complete(llm, batch) == expected(llama, batch)


@pytest.mark.parametrize(
    ("form", "name", "message"),
    [
        ("llama", "4.self_attn.v_proj_swiftkv", "lacks 1 SwiftKV"),
        ("llama", "3.self_attn.k_proj_swiftkv", "does not have 1 SwiftKV"),
        ("llama", "4.self_attn.k_proj_decode_swiftkv", "does not have 1 SwiftKV"),
        ("own", "4.self_attn.k_proj_decode_swiftkv", "lacks 1 SwiftKV"),
    ],
)
def test_tensors_of_another_layer_map(
    form: str, name: str, message: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    student: Path = request.getfixturevalue(form)
    tensors = load_file(student / "model.safetensors")
    name = f"model.layers.{name}.weight"
    if tensors.pop(name, None) is None:
        tensors[name] = tensors["model.norm_swiftkv.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((student / "config.json").read_bytes())
    with pytest.raises(ModelError, match=message), serving(tmp_path):
        pass
