"""What is read of PEFT adapters without their weights: the base model's name, and what cannot be merged."""

import json
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.errors import InvalidInputError, ModelError, ObjectNotFoundError
from swiftkv_platform.sources import Access
from swiftkv_platform.sources.peft import parse_lora_config
from swiftkv_platform.sources.teacher_config import read_teacher_config
from tests.support.fakes.peft import CONFIG

BASE = {"base_model_name_or_path": "/models/base"}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "IA3"),
        ("peft_type", "PROMPT_TUNING"),
        ("peft_type", None),
        ("base_model_name_or_path", ""),
        ("base_model_name_or_path", 5),
        ("r", 0),
        ("r", "many"),
        ("lora_alpha", None),
        ("rank_pattern", {"q_proj": -1}),
        ("rank_pattern", {"q_(proj": 2}),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "olora"),
        ("layer_replication", [[0, 4], [2, 6]]),
        ("target_parameters", ["mlp.experts.down_proj"]),
        ("trainable_token_indices", [1, 2]),
        ("lora_bias", True),
        ("ensure_weight_tying", True),
        ("use_qalora", True),
        ("alora_invocation_tokens", [1]),
        ("megatron_config", {"tensor_model_parallel_size": 2}),
        ("a_field_of_a_later_version", {"x": 1}),
    ],
)
def test_what_is_no_sum_of_base_and_adapter_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ModelError) as caught:
        parse_lora_config({**CONFIG, **BASE, field: value}, "/adapter", "model")
    message = caught.value.message
    assert message.startswith(f"model is '/adapter': its adapter_config.json has {field} {value!r}, which cannot be")
    advice = "the model that the adapter was trained on" if field == "base_model_name_or_path" else "merge_and_unload"
    assert advice in message


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("init_lora_weights", "gaussian"),
        ("init_lora_weights", False),
        ("bias", "all"),
        ("modules_to_save", ["lm_head"]),
        ("layers_to_transform", [1, 2]),
        ("exclude_modules", "lm_head"),
        ("auto_mapping", {"base_model_class": "LlamaForCausalLM", "unsloth_fixed": True}),
        ("rank_pattern", None),
        ("a_field_of_a_later_version", None),
        ("another", False),
    ],
)
def test_what_only_training_reads_is_accepted(field: str, value: Any) -> None:
    config = parse_lora_config({**CONFIG, **BASE, field: value}, "/adapter", "model")
    assert (config.get_rank("model.layers.0.self_attn.q_proj"), config.get_scale("lm_head")) == (4, 2.0)


def write_adapter(directory: Path, base: str | Path, **values: Any) -> Path:
    directory.mkdir(parents=True)
    document = {**CONFIG, "base_model_name_or_path": str(base), **values}
    (directory / "adapter_config.json").write_text(json.dumps(document))
    return directory


def test_the_configuration_of_an_adapter_is_its_bases(tmp_path: Path) -> None:
    base, bucket = tmp_path / "base", "s3://bucket/base"
    base.mkdir()
    (base / "config.json").write_text('{"model_type": "llama", "a": 1}')
    objects = {
        "base/config.json": {"model_type": "llama", "a": 2},
        "adapter/adapter_config.json": {**CONFIG, "base_model_name_or_path": bucket},
    }

    def read_object(store: str, key: str) -> bytes:
        assert store == "s3://bucket"
        if key not in objects:
            raise ObjectNotFoundError(key)
        return json.dumps(objects[key]).encode()

    assert read_teacher_config(str(write_adapter(tmp_path / "a", base)), read_object) == {"model_type": "llama", "a": 1}
    for name in (str(write_adapter(tmp_path / "b", bucket)), "s3://bucket/adapter", bucket):
        assert read_teacher_config(name, read_object) == {"model_type": "llama", "a": 2}
    assert read_teacher_config(str(write_adapter(tmp_path / "c", "org/base")), read_object) is None, "on the hub"
    objects["adapter/adapter_config.json"]["use_bdlora"] = {"a": 1}
    with pytest.raises(ModelError, match=r"'s3://bucket/adapter': its adapter_config\.json has use_bdlora"):
        read_teacher_config("s3://bucket/adapter", read_object)


def test_a_tenant_learns_nothing_of_other_directories(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "llama"}')
    adapter = write_adapter(tmp_path / "own" / "adapter", tmp_path / "other")
    access = Access(roots=(str(tmp_path / "own"),), hub_organizations=("acme",))
    for base in (tmp_path / "other", "s3://bucket/base", "org/base"):
        document = {**CONFIG, "base_model_name_or_path": str(base)}
        (adapter / "adapter_config.json").write_text(json.dumps(document))
        with pytest.raises(InvalidInputError, match=r"its base_model_name_or_path is .*, which this tenant may not"):
            read_teacher_config(str(adapter), lambda *_: b"", access=access)


@pytest.mark.parametrize("text", ["[]", "{", '"x"'])
def test_a_file_that_is_no_object_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ModelError, match=r"its adapter_config\.json is not (a )?JSON"):
        read_teacher_config(str(tmp_path), lambda *_: b"")
