"""PEFT adapters merge into their base models: the merged model computes what the model does with the adapter."""

import copy
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import structlog
import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.jobs.worker.setup import resolve_teacher
from swiftkv_platform.model import convert_checkpoint
from swiftkv_platform.model.weights.bases import resolve_model_directory
from swiftkv_platform.sources import Access
from swiftkv_platform.specs import ModelSpec
from tests.numerics.test_brought_models import change_json as edit
from tests.support.checkpoints import save
from tests.support.fakes.peft import run_with_adapter, save_adapter
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.support.tiny_models import family_teacher, random_tokens

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TOKEN_IDS = random_tokens(1, 40)


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swiftkv_platform.model.weights.bases.PEFT_CACHE", tmp_path / "cache")


def base_of(family: str, tmp_path: Path, **changes: Any) -> tuple[PreTrainedModel, Path]:
    """Return a base model and its directory, in several files."""
    model = family_teacher(family, **changes)
    return model, save(model, tmp_path / "base", max_shard_size="100KB")


def logits_of(directory: str | Path) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = AutoModelForCausalLM.from_pretrained(directory).eval()(TOKEN_IDS).logits
    return logits


def assert_close(found: torch.Tensor, expected: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert (expected - other).abs().max() > 0.1, "the adapter changes nothing"


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("llama-biased", {}),
        ("llama-biased", {"use_dora": True}),
        ("llama-biased", {"fan_in_fan_out": True}),
        ("phi3", {"targets": ("qkv_proj", "gate_up_proj")}),
        ("llama", {"targets": ("q_proj", "embed_tokens")}),
        ("llama", {"targets": ("q_proj", "lm_head")}),
        ("qwen3", {"targets": ("embed_tokens", "lm_head")}),
        ("qwen3_moe", {"targets": ("o_proj",)}),
        ("gemma3_text", {}),
    ],
)
def test_the_merged_model_computes_what_the_adapter_adds(family: str, config: dict[str, Any], tmp_path: Path) -> None:
    """Also where embedding and head are tied, of which an adapter changes one."""
    model, base = base_of(family, tmp_path)
    tensors = save_adapter(model, tmp_path / "adapter", base, **config)
    with structlog.testing.capture_logs() as logs:
        merged = resolve_model_directory(str(tmp_path / "adapter"))
    assert_close(logits_of(merged), run_with_adapter(model, tensors, TOKEN_IDS), model(TOKEN_IDS).logits)
    (line,) = logs
    assert (line["event"], line["adapter"], line["base"], line["directory"]) == (
        "merged a PEFT adapter into its base model",
        str(tmp_path / "adapter"),
        str(base),
        merged,
    )


def test_ranks_and_scales_by_module(tmp_path: Path) -> None:
    model, base = base_of("qwen3", tmp_path)
    ranks = {"model.layers.1.self_attn.q_proj": 3} | {f"model.layers.2.{name}": 6 for name in ("self_attn.q_proj",)}
    tensors = save_adapter(
        model,
        tmp_path / "adapter",
        base,
        ranks=ranks,
        use_rslora=True,
        rank_pattern={"layers.1.self_attn.q_proj": 3, r"model\.layers\.2\..*q_proj": 6, "proj": 99},
        alpha_pattern={"down_proj": 20, "layers.0.mlp.down_proj": 1},
    )
    alpha = {f"model.layers.{layer}.mlp.down_proj": 20 for layer in range(5)}  # the first pattern decides
    expected = run_with_adapter(model, tensors, TOKEN_IDS, alpha=alpha, is_rank_stabilized=True)
    assert_close(logits_of(resolve_model_directory(str(tmp_path / "adapter"))), expected, model(TOKEN_IDS).logits)


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", (HEAD,)),
        ("llama", (EMBEDDING,)),
        ("qwen3", (EMBEDDING, HEAD)),
        ("qwen3", ("model.norm.weight",)),
        ("llama-biased", ("model.layers.1.self_attn.q_proj.bias",)),
    ],
)
def test_saved_tensors_replace_those_of_the_base(family: str, names: tuple[str, ...], tmp_path: Path) -> None:
    """Modules to save and trained biases; PEFT stores some below `base_layer`."""
    model, base = base_of(family, tmp_path)
    changed = copy.deepcopy(model)
    changed.lm_head.weight = nn.Parameter(changed.lm_head.weight.clone())  # no longer tied
    parameters = dict(changed.named_parameters())
    for name in names:
        parameters[name].data += torch.randn_like(parameters[name])
    saved = {name.replace("q_proj.bias", "q_proj.base_layer.bias"): parameters[name].data for name in names}
    tensors = save_adapter(model, tmp_path / "adapter", base, saved=saved)
    expected = run_with_adapter(changed, tensors, TOKEN_IDS)
    merged = resolve_model_directory(str(tmp_path / "adapter"))
    assert_close(logits_of(merged), expected, run_with_adapter(model, tensors, TOKEN_IDS))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_added_tokens_come_with_the_adapter(family: str, tmp_path: Path) -> None:
    model, base = base_of(family, tmp_path)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens([AddedToken("<tool>"), AddedToken("<call>")])
    tokenizer.chat_template = "{{ messages[0].content }}<call>"
    model.resize_token_embeddings(len(tokenizer))
    saved = {EMBEDDING: model.model.embed_tokens.weight.data, HEAD: model.lm_head.weight.data}
    tensors = save_adapter(model, tmp_path / "adapter", base, saved=saved)
    tokenizer.save_pretrained(tmp_path / "adapter")
    merged = resolve_model_directory(str(tmp_path / "adapter"))
    torch.testing.assert_close(logits_of(merged), run_with_adapter(model, tensors, TOKEN_IDS), rtol=1e-4, atol=1e-4)
    found = AutoTokenizer.from_pretrained(merged)
    assert found.get_vocab() == tokenizer.get_vocab()
    assert found.chat_template == tokenizer.chat_template
    config = json.loads((Path(merged) / "config.json").read_text())
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (len(tokenizer), family == "llama")
    converted = convert_checkpoint(merged, tmp_path / "student", num_key_value_layers=3)
    assert converted.config.vocab_size == len(tokenizer)


def test_without_a_tokenizer_that_of_the_base_is_used(tmp_path: Path) -> None:
    model, base = base_of("qwen3", tmp_path)
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    save_adapter(model, tmp_path / "adapter", base)
    merged = Path(resolve_model_directory(str(tmp_path / "adapter")))
    assert AutoTokenizer.from_pretrained(merged).get_vocab() == byte_tokenizer().get_vocab()
    assert json.loads((merged / "config.json").read_text())["license"] == "apache-2.0"
    assert not (merged / "adapter_config.json").exists()
    assert (merged / "generation_config.json").read_bytes() == (base / "generation_config.json").read_bytes()


def test_weights_keep_the_dtype_of_the_base(tmp_path: Path) -> None:
    model, base = base_of("qwen3", tmp_path)
    save(model.bfloat16(), base, max_shard_size="100KB")
    tensors = save_adapter(model, tmp_path / "adapter", base)
    merged = Path(resolve_model_directory(str(tmp_path / "adapter")))
    found = load_file(merged / "model.safetensors")
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    name = "model.layers.3.mlp.down_proj"
    matrices = [tensors[f"base_model.model.{name}.lora_{part}.weight"].double() for part in "BA"]
    expected = model.get_submodule(name).weight.double() + 2 * matrices[0] @ matrices[1]
    assert torch.equal(found[f"{name}.weight"], expected.bfloat16()), "rounded once"
    assert torch.equal(found[EMBEDDING], model.model.embed_tokens.weight)


def test_a_merge_is_made_once_for_the_same_content(tmp_path: Path) -> None:
    model, base = base_of("qwen3", tmp_path)
    save_adapter(model, tmp_path / "adapter", base)
    with ThreadPoolExecutor() as threads:
        directories = set(threads.map(lambda _: resolve_model_directory(str(tmp_path / "adapter")), range(3)))
    (merged,) = directories
    written = (Path(merged) / "model.safetensors").stat().st_mtime_ns
    (tmp_path / "adapter").rename(tmp_path / "moved")
    assert resolve_model_directory(str(tmp_path / "moved")) == merged
    assert (Path(merged) / "model.safetensors").stat().st_mtime_ns == written
    changed = load_file(tmp_path / "moved" / "adapter_model.safetensors")
    save_file({name: tensor * 2 for name, tensor in changed.items()}, tmp_path / "moved" / "adapter_model.safetensors")
    other = resolve_model_directory(str(tmp_path / "moved"))
    assert other != merged
    os.utime(base / "config.json", (1, 1))
    assert resolve_model_directory(str(tmp_path / "moved")) not in (other, merged), "the base may have changed"
    leftovers = [path.name for path in (tmp_path / "cache").iterdir() if path.name.startswith(".")]
    assert leftovers == []


def change_tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path, Path], None]:
    def apply(adapter: Path, _: Path) -> None:
        tensors = load_file(adapter / "adapter_model.safetensors")
        change(tensors)
        save_file(tensors, adapter / "adapter_model.safetensors")

    return apply


def change_adapter(**values: Any) -> Callable[[Path, Path], None]:
    return lambda adapter, _: edit(adapter / "adapter_config.json", **values)


def nest(adapter: Path, base: Path) -> None:
    (base / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    for path in base.glob("model*"):
        path.unlink()


FIRST = "base_model.model.model.layers.0.mlp.down_proj.lora_A.weight"
REFUSED: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "no base": (
        change_adapter(base_model_name_or_path=None),
        "its adapter_config.json has base_model_name_or_path None, .*set it to the model that the adapter was trained",
    ),
    "a missing base": (
        change_adapter(base_model_name_or_path="/nowhere/model"),
        "its base_model_name_or_path is '/nowhere/model': no such file or directory",
    ),
    "a relative base": (
        change_adapter(base_model_name_or_path="./base"),
        "its base_model_name_or_path is './base', a relative path; use an absolute path or a hub id",
    ),
    "an odd revision": (change_adapter(revision="../../x"), "its revision is '../../x'; a branch, tag or commit"),
    "an object store without a download": (
        change_adapter(base_model_name_or_path="s3://bucket/base"),
        "its base_model_name_or_path is 's3://bucket/base', which cannot be downloaded here",
    ),
    "an adapter of an adapter": (
        nest,
        "its base_model_name_or_path is '.*': its adapter_config.json belongs to a PEFT",
    ),
    "bitsandbytes": (
        lambda _, base: edit(base / "config.json", quantization_config={"quant_method": "bitsandbytes"}),
        "its base_model_name_or_path is .*quant_method 'bitsandbytes'.*use unquantized",
    ),
    "FP8": (
        lambda _, base: edit(base / "config.json", quantization_config={"quant_method": "fp8"}),
        "its base_model_name_or_path is .*, which is quantized; name the model before quantization in adapter_config",
    ),
    "pickles": (
        lambda adapter, _: (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin"),
        "it has no adapter_model.safetensors; save the adapter as safetensors",
    ),
    "another base": (
        change_tensors(lambda tensors: tensors.update({FIRST.replace("layers.0", "layers.7"): tensors.pop(FIRST)})),
        r"it changes 1 tensors that its base model does not have: model\.layers\.7\.mlp\.down_proj\.weight; check that",
    ),
    "a wider base": (
        change_tensors(lambda tensors: tensors.update({FIRST: torch.ones(4, 97)})),
        r"its matrices for model\.layers\.0\.mlp\.down_proj\.weight are \[64, 4\] and \[4, 97\], .* 4 .*\[64, 96\]",
    ),
    "another rank": (change_adapter(r=5), r"its matrices for .*, which do not fit rank 5"),
    "half a pair": (
        change_tensors(lambda tensors: tensors.pop(FIRST)),
        r"it has lora_B for model\.layers\.0\.mlp\.down_proj\.weight",
    ),
    "no magnitudes": (change_adapter(use_dora=True), "it has lora_A, lora_B for .*, with use_dora True"),
    "nothing": (change_tensors(lambda tensors: tensors.clear()), "its adapter_model.safetensors has no tensors"),
    "a misshapen tensor": (
        change_tensors(lambda tensors: tensors.update({"base_model.model.model.norm.weight": torch.ones(5)})),
        r"its model\.norm\.weight is \[5\], and its base model's \[64\]",
    ),
    "more tokens in one": (
        change_tensors(lambda tensors: tensors.update({f"base_model.model.{HEAD}": torch.ones(300, 64)})),
        r"its tensors have different numbers of tokens: .*258.*300",
    ),
    "other weights": (
        lambda adapter, base: save_file({"a": torch.ones(2)}, adapter / "model.safetensors"),
        r"other weights \(model.safetensors\); if the weights include the adapter, remove adapter_config.json",
    ),
    "a student's adapter": (
        lambda adapter, base: save_file({"a": torch.ones(2)}, adapter / "adapter-00001.safetensors"),
        r"other weights \(adapter-00001.safetensors\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_merged_is_refused_by_name(case: str, tmp_path: Path) -> None:
    model, base = base_of("qwen3", tmp_path)
    save_adapter(model, tmp_path / "adapter", base)
    change, message = REFUSED[case]
    change(tmp_path / "adapter", base)
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model_directory(str(tmp_path / "adapter"))
    assert caught.value.field == "model.name_or_path"
    assert caught.value.message.startswith(f"model.name_or_path is '{tmp_path / 'adapter'}': ")
    cache = tmp_path / "cache"
    assert not cache.exists() or all(path.suffix == ".lock" for path in cache.iterdir()), "half a model is left"


def test_a_tenant_reads_only_its_own_bases(tmp_path: Path) -> None:
    model, base = base_of("qwen3", tmp_path)
    own = tmp_path / "own"
    save_adapter(model, own / "adapter", base)
    spec, access = ModelSpec(name_or_path=str(own / "adapter")), Access(roots=(str(own),))
    with pytest.raises(InvalidInputError, match=r"its base_model_name_or_path is .*, which this tenant may not read"):
        resolve_teacher(spec, tmp_path / "work", access=access)
    base.rename(own / "base")
    edit(own / "adapter" / "adapter_config.json", base_model_name_or_path=str(own / "base"))
    merged = resolve_teacher(spec, tmp_path / "work", access=access)
    assert not torch.equal(logits_of(merged), logits_of(own / "base"))
    weights = own / "adapter" / "adapter_model.safetensors"
    weights.rename(tmp_path / "weights")
    weights.symlink_to(tmp_path / "weights")
    with pytest.raises(ModelError, match=r"'adapter_model\.safetensors' links to a path that the job may not read"):
        resolve_teacher(spec, tmp_path / "work", access=access)
