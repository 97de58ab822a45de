"""Faults of a checkpoint are reported before weights are read, and nothing is left behind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftkv_platform.errors import ConflictError, InvalidInputError, ModelError
from swiftkv_platform.model import convert, convert_checkpoint, export
from tests.checkpoints import SHAPE, rewrite, save
from tests.tiny_models import random_teacher

BROKEN: dict[str, tuple[Any, str]] = {
    "missing": (lambda t: t.pop("model.layers.4.mlp.up_proj.weight"), r"lacks 1 tensor .*layers\.4\.mlp\.up_proj"),
    "added": (lambda t: t.update({"model.layers.9.x": torch.zeros(1)}), r"holds 1 tensor .*no place for.*layers\.9\.x"),
    "shape": (
        lambda t: t.update({"model.norm.weight": torch.zeros(65)}),
        r"of another shape.*model\.norm\.weight is \[65\], not \[64\]",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("how", ["convert", "convert_checkpoint", "student"])
def test_tensors_that_do_not_fit_are_named(what: str, how: str, tmp_path: Path) -> None:
    change, message = BROKEN[what]
    path = tmp_path / "model"
    attempt = {
        "convert": lambda: convert(path, **SHAPE),
        "convert_checkpoint": lambda: convert_checkpoint(path, tmp_path / "student", **SHAPE),
        "student": lambda: AutoModelForCausalLM.from_pretrained(path),
    }[how]
    (random_teacher() if how != "student" else convert(random_teacher(), **SHAPE)).save_pretrained(path)
    rewrite(path, change)
    with pytest.raises(ModelError, match=message):
        attempt()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_export_that_lost_some_of_the_teacher_is_no_export(tmp_path: Path) -> None:
    convert(random_teacher(), **SHAPE).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.4.self_attn.k_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks 1 tensor .*layers\.4\.self_attn\.k_proj\.weight"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_an_index_that_names_what_is_not_there_is_refused(tmp_path: Path) -> None:
    save(random_teacher(), tmp_path / "teacher", max_shard_size="100KB")
    shard = sorted((tmp_path / "teacher").glob("*.safetensors"))[1]
    shard.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=f"its index names {shard.name}, which is not there"):
        convert(tmp_path / "teacher", **SHAPE)
    (tmp_path / "elsewhere").rename(shard)
    index = tmp_path / "teacher" / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    document["weight_map"]["model.norm.weight"] = shard.name
    index.write_text(json.dumps(document))
    with pytest.raises(ModelError, match=r"holds model\.norm\.weight, which it does not"):
        convert(tmp_path / "teacher", **SHAPE)


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    save(random_teacher(), tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(ModelError, match="not all of one"):
        convert(tmp_path, **SHAPE)


def test_pickles_are_refused(tmp_path: Path) -> None:
    model = random_teacher()
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickles"):
        convert(tmp_path, **SHAPE)


@pytest.mark.parametrize("function", [convert_checkpoint, export])
def test_an_output_that_is_not_empty_is_refused(function: Any, tmp_path: Path) -> None:
    (tmp_path / "output").mkdir()
    (tmp_path / "output" / "precious").write_text("")
    with pytest.raises(ConflictError, match="exists and is not empty"):
        function(tmp_path / "no-such-model", tmp_path / "output")


def test_out_of_range_is_refused_from_the_configuration_alone(tmp_path: Path) -> None:
    random_teacher().config.save_pretrained(tmp_path / "teacher")
    with pytest.raises(InvalidInputError, match=r"1\.\.5"):
        convert_checkpoint(tmp_path / "teacher", tmp_path / "student", num_key_value_layers=6)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    save(random_teacher(vocab_size=200, bos_token_id=1, eos_token_id=2), tmp_path / "teacher")
    with pytest.raises(ModelError, match="makes ids up to 257, the model's vocab_size is 200"):
        convert_checkpoint(tmp_path / "teacher", tmp_path / "student", **SHAPE)
