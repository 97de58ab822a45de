"""Weights rounded when a model is loaded, and weights of quantized checkpoints: which modules have integers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams
from swiftkv_platform.engine.integer_weights import (
    attach_stored_integers,
    get_common_weights,
    get_integer_weight,
    quantize_weights,
)
from swiftkv_platform.engine.loading import load_model, prepare_model
from swiftkv_platform.errors import ModelError
from swiftkv_platform.model import convert, export
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.model.weights.quantization import IntegerWeight, dequantize_weight
from tests.support import reference
from tests.support.tiny_models import disturb, random_teacher

BF16 = EngineConfig(dtype="bfloat16", kv_cache_bytes=1 << 20, block_size=8)
SHAPE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "tie_word_embeddings": True}


@pytest.fixture(scope="module")
def student_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("student")
    student = convert(random_teacher(**SHAPE), num_key_value_layers=2, key_value_group_size=1, early_exit=True)
    disturb(student).to(torch.bfloat16).save_pretrained(directory)
    return directory


def forms(model: nn.Module) -> dict[str, str]:
    """Integer format of each module that has integers, by its name without what all layers' names begin with."""
    found = ((name, get_integer_weight(module)) for name, module in model.named_modules())
    return {name.removeprefix("model.layers."): one.form for name, one in found if one is not None}


def test_int4_leaves_heads_and_sensitive_projections_in_int8(student_dir: Path) -> None:
    model = load_model(student_dir, BF16.model_copy(update={"fuse_weights": False})).model
    embedding = model.get_input_embeddings().weight.clone()
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    quantize_weights(model, "int4")
    found = forms(model)
    last = model.config.num_hidden_layers - 1
    mlps = {f"{i}.mlp.{name}_proj" for i in range(last) for name in ("gate", "up", "down")}
    outputs = {f"{i}.self_attn.o_proj" for i in range(last + 1)}
    assert {name for name, form in found.items() if form == "int4"} == mlps | outputs
    assert {"0.self_attn.q_proj", f"{last}.self_attn.q_proj_swiftkv", "lm_head", "exit_head"} <= found.keys()
    assert torch.equal(model.get_input_embeddings().weight, embedding), "a tied head keeps its floats for embeddings"
    up = model.model.layers[0].mlp.up_proj
    assert not torch.equal(up.weight, before)
    assert torch.equal(up.weight, dequantize_weight(up.integers.integers, up.integers.scale).bfloat16())


def test_what_runs_as_one_is_in_one_form(student_dir: Path) -> None:
    model = load_model(student_dir, BF16.model_copy(update={"fuse_weights": False})).model
    quantize_weights(model, "int8")
    layer = model.model.layers[0].self_attn
    query, key = get_common_weights([layer.q_proj, layer.k_proj])
    assert isinstance(query, IntegerWeight)
    assert isinstance(key, IntegerWeight)
    fused = IntegerWeight.cat([query, key])
    assert torch.equal(fused.integers[len(query.integers) :], key.integers)
    del layer.k_proj.integers
    assert all(isinstance(weight, torch.Tensor) for weight in get_common_weights([layer.q_proj, layer.k_proj]))


@pytest.mark.parametrize("form", ["int8", "mixed"])
def test_stored_integers_are_taken_as_they_are(student_dir: Path, form: Any, tmp_path: Path) -> None:
    export(student_dir, tmp_path / "served", quantize=form)
    model = load_model(
        tmp_path / "served", BF16.model_copy(update={"fuse_weights": False, "weights": "bfloat16"})
    ).model
    assert forms(model) == {}
    attach_stored_integers(model, Checkpoint.open(tmp_path / "served"))
    found = forms(model)
    assert found["0.mlp.gate_proj"] == ("int8" if form == "int8" else "int4")
    last = model.config.num_hidden_layers - 1
    assert found[f"{last}.self_attn.q_proj_swiftkv"] == found[f"{last}.mlp.up_proj"] == "int8"
    assert "lm_head" not in found
    for module in model.modules():
        if (integers := get_integer_weight(module)) is not None:
            assert torch.equal(dequantize_weight(integers.integers, integers.scale).bfloat16(), module.weight)
    if form == "int8":
        with pytest.raises(ModelError, match="weights is 'int4', and the model is stored in int8") as error:
            quantize_weights(model, "int4")
        assert error.value.field == "weights"


def test_on_a_gpu_nothing_is_rounded(student_dir: Path) -> None:
    model = load_model(student_dir, BF16).model
    with pytest.raises(ModelError, match="weights is 'int8', but the device is a GPU"):
        prepare_model(model, BF16.model_copy(update={"weights": "int8"}), "meta")


@pytest.mark.parametrize("form", ["int8", "int4"])
def test_deep_tails_and_bypassed_layers_give_the_tokens_of_the_second_implementation(form: Any, tmp_path: Path) -> None:
    """Over the same weights in float32, within bfloat16's errors."""
    shape: dict[str, Any] = {"prefill_layers": [0, 2], "decode_key_value": "own", "deep_tail": 9, "early_exit": True}
    disturb(convert(random_teacher(**SHAPE), **shape)).to(torch.bfloat16).save_pretrained(tmp_path)
    model = load_model(tmp_path, BF16.model_copy(update={"fuse_weights": False})).model
    quantize_weights(model, form)
    exact = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    rounded = {name: get_integer_weight(module) for name, module in model.named_modules()}
    state = exact.state_dict() | {
        f"{name}.weight": dequantize_weight(one.integers, one.scale) for name, one in rounded.items() if one is not None
    }
    frequencies = reference.frequencies(exact.model.rotary_emb)
    prompts = [list(range(3 + i, 4 + i + length)) for i, length in enumerate((2, 8, 30, 44))]
    engine = LLMEngine.from_pretrained(
        tmp_path, BF16.model_copy(update={"weights": form, "max_num_batched_tokens": 24})
    )
    for early_exit in ("off", "lossless"):
        params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, early_exit=early_exit)
        for output in engine.generate(prompts, params):
            ids, first = output.prompt_token_ids + output.token_ids, len(output.prompt_token_ids)
            turns = torch.where(torch.arange(len(ids)) >= first - 9, 0, -1)
            logits = reference.logits(state, model.config, torch.tensor(ids), frequencies, swiftkv=True, turns=turns)
            found = logits[first - 1 : -1].log_softmax(-1)
            chosen = found.gather(1, torch.tensor(output.token_ids)[:, None])
            assert (found.amax(1) - chosen[:, 0]).max() < 0.3
    engine.assert_consistent()


def test_rows_and_columns_of_ranks_make_the_whole() -> None:
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(-8, 8, (6, 128), dtype=torch.int8, generator=generator)
    for scale, form in ((torch.rand(6, 1), "int8"), (torch.rand(6, 4), "int4")):
        whole: Any = IntegerWeight(integers, scale, form)  # type: ignore[arg-type]
        rows = [whole.slice_part((slice(3 * rank, 3 * rank + 3),)) for rank in range(2)]
        assert torch.equal(IntegerWeight.cat(rows).scale, scale)
        columns = [whole.slice_part((slice(None), slice(64 * rank, 64 * rank + 64))) for rank in range(2)]
        wide = torch.cat([dequantize_weight(one.integers, one.scale) for one in columns], dim=1)
        assert torch.equal(wide, dequantize_weight(integers, scale))
    assert whole.slice_part((slice(None), slice(0, 48))) is None, "a slice may not cut a group"
