"""Adapters store only what a student changes; with its base, an adapter gives the full artifact bit for bit."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swiftkv_platform.configs.adapter import ADAPTER_FILE
from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams
from swiftkv_platform.errors import ConflictError, ModelError
from swiftkv_platform.model import convert, convert_checkpoint, export, export_adapter, load_dense
from swiftkv_platform.model.weights.adapters import check_can_be_base
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from tests.support.checkpoints import ROWS, SHAPE, rewrite, save, save_fp8
from tests.support.parameters import few
from tests.support.tiny_models import FAMILY_CONFIGS, disturb, family_teacher

PROMPT = torch.arange(24)[None] * 7 % 250


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A teacher in several weight files."""
    return save(family_teacher("llama"), tmp_path / "base", max_shard_size="100KB")


@pytest.fixture
def full(base: Path, tmp_path: Path) -> Path:
    """A trained student as a whole artifact."""
    return trained(base, tmp_path / "full")


def trained(base: Path, target: Path, **options: Any) -> Path:
    """Save a student of `base` whose SwiftKV tensors and exit head have moved away from their start."""
    return save(disturb(convert(base, **SHAPE, **options)), target)


def change(student: Path, names: str) -> None:
    """Disturb the tensors of a student whose names contain one of `names`."""

    def disturbed(tensors: dict[str, torch.Tensor]) -> None:
        chosen = [name for name in tensors if names in name]
        assert chosen
        tensors |= {name: tensors[name] * 1.5 for name in chosen}

    rewrite(student, disturbed)


def logits(path: Path, **arguments: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(path, **arguments).eval()
    with torch.no_grad():
        found: torch.Tensor = model(PROMPT).logits
    return found


def tensors_of(path: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    same_names = a.keys() == b.keys()
    return same_names and all(a[name].dtype == b[name].dtype and torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("name", few(FAMILY_CONFIGS))
def test_an_adapter_is_the_full_artifact_to_the_bit(name: str, tmp_path: Path) -> None:
    base = save(family_teacher(name), tmp_path / "base", max_shard_size="100KB")
    options = {"early_exit": True, "own_output_projection": name != "llama"}
    full, adapter = trained(base, tmp_path / "full", **options), tmp_path / "adapter"
    written = export_adapter(full, adapter, base=base)
    assert (written.replaced, written.dropped, written.cast) == ((), (), {})
    assert set(tensors_of(adapter)) == {
        name for name in tensors_of(full) if "swiftkv" in name or name.startswith("exit_")
    }
    assert torch.equal(logits(adapter), logits(full))
    assert torch.equal(logits(adapter, swiftkv=False), logits(full, swiftkv=False))
    assert torch.equal(load_dense(adapter)(PROMPT).logits, load_dense(full)(PROMPT).logits)
    export(adapter, tmp_path / "again", teacher=True)
    assert equal(tensors_of(tmp_path / "again"), tensors_of(full))


def test_what_differs_is_found_by_comparing_not_by_name(base: Path, full: Path, tmp_path: Path) -> None:
    """The engine generates and scores the same from the adapter as from the full artifact."""
    change(full, "layers.3.self_attn.o_proj.weight")
    written = export_adapter(full, tmp_path / "adapter", base=base)
    assert written.replaced == ("model.layers.3.self_attn.o_proj.weight",)
    assert torch.equal(logits(tmp_path / "adapter"), logits(full))
    export(tmp_path / "adapter", tmp_path / "again", teacher=True)
    assert equal(tensors_of(tmp_path / "again"), tensors_of(full))
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, logprobs=5, prompt_logprobs=5)
    answers = []
    for path in (full, tmp_path / "adapter"):
        engine = LLMEngine.from_pretrained(path, EngineConfig(dtype="float32", kv_cache_bytes=1 << 20))
        (output,) = engine.generate([PROMPT[0].tolist()], params)
        answers.append((output.token_ids, output.logprobs, output.prompt_logprobs))
    assert answers[0] == answers[1]


def test_a_changed_tail_without_its_teacher_stays_without(base: Path, full: Path, tmp_path: Path) -> None:
    """A student exported without its teacher gets it back from the base, unless its own layers >= l changed."""
    served = export(full, tmp_path / "served", teacher=False)
    assert export_adapter(served, tmp_path / "back", base=base).dropped == ()
    assert torch.equal(logits(tmp_path / "back"), logits(served))
    assert torch.equal(logits(tmp_path / "back", swiftkv=False), logits(full, swiftkv=False))
    weights = tensors_of(served)
    for file in (*served.glob("*.index.json"), *served.glob("*.safetensors")):
        file.unlink()
    weights["model.layers.3.mlp.up_proj.weight"] = weights["model.layers.3.mlp.up_proj.weight"] + 1
    save_file(weights, served / "model.safetensors", metadata={"format": "pt"})
    written = export_adapter(served, tmp_path / "adapter", base=base)
    assert len(written.dropped) == 9  # q, k and v of three layers
    assert torch.equal(logits(tmp_path / "adapter"), logits(served))
    with pytest.raises(ModelError, match="teacher mode needs"):
        logits(tmp_path / "adapter", swiftkv=False)


def test_a_student_in_another_type_than_its_base(base: Path, tmp_path: Path) -> None:
    full = save(disturb(convert(base, **SHAPE, dtype=torch.bfloat16)), tmp_path / "full")
    written = export_adapter(full, tmp_path / "adapter", base=base)
    assert written.replaced == ()
    assert set(written.cast.values()) == {"bfloat16"}
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(logits(tmp_path / "adapter", dtype=dtype), logits(full, dtype=dtype))
    export(tmp_path / "adapter", tmp_path / "again", teacher=True)
    assert equal(tensors_of(tmp_path / "again"), tensors_of(full))


def test_a_base_in_fp8_is_shared_where_the_student_keeps_its_files(tmp_path: Path) -> None:
    save_fp8(tmp_path / "base", ROWS)
    convert_checkpoint(tmp_path / "base", tmp_path / "full", **SHAPE)
    assert not export_adapter(tmp_path / "full", tmp_path / "adapter", base=tmp_path / "base").replaced
    assert torch.equal(logits(tmp_path / "adapter"), logits(tmp_path / "full"))
    dequantized = save(convert(tmp_path / "base", **SHAPE), tmp_path / "dequantized")
    assert len(export_adapter(dequantized, tmp_path / "other", base=tmp_path / "base").replaced) == 6 * 7
    assert torch.equal(logits(tmp_path / "other"), logits(dequantized))
    with pytest.raises(ModelError, match="stored quantized"):
        check_can_be_base(Checkpoint.open(tmp_path / "base"), "publish.adapter")


def test_another_base_is_refused_by_the_tensor_that_differs(base: Path, full: Path, tmp_path: Path) -> None:
    written = export_adapter(full, tmp_path / "adapter", base=base)
    other = save(family_teacher("llama", seed=4), tmp_path / "other", max_shard_size="100KB")
    with pytest.raises(ModelError, match=r"model\.\S+ of '.*other' has the SHA-256 [0-9a-f]{64}") as caught:
        logits(tmp_path / "adapter", base_model=str(other))
    assert caught.value.field == "base.name_or_path"
    assert caught.value.value == str(other)
    assert f"fits '{base}' with digest {written.base.digest}" in caught.value.message
    shard = sorted(base.glob("*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1  # flip a bit of the base
    shard.write_bytes(data)
    with pytest.raises(ModelError, match="has the SHA-256"):
        logits(tmp_path / "adapter")


def test_a_base_of_another_shape_is_refused_before_weights_are_read(base: Path, full: Path, tmp_path: Path) -> None:
    export_adapter(full, tmp_path / "adapter", base=base)
    shape = r"mlp\.down_proj\.weight of .* is \[64, 80\], .* \[64, 96\]"
    for number, (teacher, message) in enumerate(
        [
            (family_teacher("llama", num_hidden_layers=4), r"lacks 9 tensors: model\.layers\.4\."),
            (family_teacher("llama", num_hidden_layers=6), r"has unexpected 9 tensors: model\.layers\.5\."),
            (family_teacher("llama", intermediate_size=80), shape),
            (family_teacher("llama").to(torch.bfloat16), "is bfloat16, but the adapter was made for float32"),
        ]
    ):
        other = save(teacher, tmp_path / f"other-{number}")
        reads = patch("swiftkv_platform.model.weights.checkpoint.Checkpoint.read_tensors", None)
        with reads, pytest.raises(ModelError, match=message):
            logits(tmp_path / "adapter", base_model=str(other))


def test_a_damaged_adapter_is_refused(base: Path, full: Path, tmp_path: Path) -> None:
    export_adapter(full, tmp_path / "adapter", base=base)
    path = tmp_path / "adapter" / ADAPTER_FILE
    document = json.loads(path.read_text())
    grouped = document["swiftkv"] | {"key_value_group_size": 1}
    regrouped = "key_value_group_size is 2 in config.json .* and 1 in its"
    for changes, field, message in (
        ({"format_version": 2}, ADAPTER_FILE, "format_version"),
        ({"added": document["added"][1:]}, "adapter", "has unexpected 1 tensor"),
        ({"added": [*document["added"], "x"]}, "adapter", "lacks 1 tensor: x"),
        ({"swiftkv": grouped}, "key_value_group_size", regrouped),
    ):
        path.write_text(json.dumps(document | changes))
        with pytest.raises(ModelError, match=message) as caught:
            logits(tmp_path / "adapter")
        assert caught.value.field == field


def test_tensors_as_they_stream_by_are_checked_and_applied(base: Path, full: Path, tmp_path: Path) -> None:
    """Apply as the vLLM plugin does: the adapter's tensors come first, then the base's under a prefix."""
    change(full, "layers.1.mlp.up_proj.weight")
    adapter = export_adapter(full, tmp_path / "adapter", base=base)
    own = list(tensors_of(tmp_path / "adapter").items())
    of_base = [(f"base/{name}", tensor) for name, tensor in tensors_of(base).items()]

    def apply(tensors: list[tuple[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        return dict(adapter.apply_to_base(tensors, base_prefix="base/", source="adapter"))

    assert equal(apply(own + of_base), tensors_of(full))
    for tensors, message in (
        (own[1:] + of_base, "'adapter' lacks 1 tensor"),
        (own + of_base[1:], "lacks 1 tensor"),
        ([*own, *of_base, ("base/x", torch.ones(1))], "has unexpected 1 tensor: x"),
        ([*own, (of_base[0][0], of_base[0][1] + 1), *of_base[1:]], "has the SHA-256"),
    ):
        with pytest.raises(ModelError, match=message):
            apply(tensors)


def test_what_makes_no_adapter_is_refused(base: Path, full: Path, tmp_path: Path) -> None:
    export_adapter(full, tmp_path / "adapter", base=base)
    with pytest.raises(ModelError, match="is an adapter already"):
        export_adapter(tmp_path / "adapter", tmp_path / "other", base=base)
    with pytest.raises(ConflictError, match="not empty"):
        export_adapter(full, tmp_path / "adapter", base=base)
    change(full, "")
    with pytest.raises(ModelError, match=r"[\d,]+ of the student's [\d,]+ bytes .* as large as the model") as caught:
        export_adapter(full, tmp_path / "of-everything", base=base)
    assert caught.value.field == "adapter"
    assert not (tmp_path / "of-everything").exists()


def test_a_base_that_has_moved_is_named_and_a_whole_export_outlives_both(
    base: Path, full: Path, tmp_path: Path
) -> None:
    export_adapter(full, tmp_path / "adapter", base=base)
    expected = logits(full)
    base.rename(tmp_path / "moved")
    with pytest.raises(ModelError, match=str(base)):
        logits(tmp_path / "adapter")
    assert torch.equal(logits(tmp_path / "adapter", base_model=tmp_path / "moved"), expected)
    with pytest.raises(ModelError, match="is not an adapter; leave it out"):
        logits(full, base_model=tmp_path / "moved")
    (tmp_path / "moved").rename(base)
    whole = export(tmp_path / "adapter", tmp_path / "whole", teacher=True)
    assert not any(path.is_symlink() for path in whole.iterdir())
    for directory in (base, tmp_path / "adapter"):
        for path in directory.iterdir():
            path.unlink()
    assert torch.equal(logits(whole), expected)
    assert not (whole / ADAPTER_FILE).exists()
