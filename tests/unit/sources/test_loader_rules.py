"""Values that third-party loaders see of a model: those that name a file are dropped or refused, real ones are kept."""

from __future__ import annotations

import dataclasses
import inspect
import json
import typing
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import FAMILIES
from swiftkv_platform.sources import loader_rules
from swiftkv_platform.sources.loader_rules import clean_config, clean_special_tokens, clean_tokenizer_config
from swiftkv_platform.student_shape import STUDENT_KEYS
from tests.support.opened_paths import compare, opening_calls

ELSEWHERE = "/proc/self/environ"
ROOT = Path(transformers.__path__[0])
TRANSFORMERS = (
    *("tokenization_utils_*.py", "tokenization_python.py", "convert_slow_tokenizer.py", "configuration_utils.py"),
    *("models/auto/tokenization_auto.py", "models/auto/configuration_auto.py", "models/auto/auto_factory.py"),
    *("generation/configuration_utils.py", "modeling_utils.py", "modeling_rope_utils.py", "dynamic_module_utils.py"),
    *("integrations/peft.py", "integrations/hub_kernels.py", "integrations/mistral/*.py", "utils/hub.py"),
    *("utils/chat_template_utils.py", "quantizers/auto.py"),
    *(f"models/{family.module or family.model_type}/*.py" for family in FAMILIES.values()),
    *(f"models/{name}/tokenization_{name}.py" for name in ("code_llama", "gemma", "gpt2", "gpt_neox", "cohere")),
)
"""Modules of transformers that read a model's small files, and whose classes are made of what they say."""
LIST = Path(__file__).with_name("opened_by_transformers.txt")
TEXTS = {"chat_template", "extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"}
"""Keys of a tokenizer's configuration with free text, of which nothing is opened."""


def test_transformers_opens_nothing_that_is_not_known() -> None:
    """Look at each new call: can a model's file decide what it opens? Then `loader_rules` must keep that value away."""
    compare(opening_calls(ROOT, TRANSFORMERS), LIST)


def test_tokenizers_opens_files_only_where_it_is_given_their_names() -> None:
    """Nothing in a `tokenizer.json` is opened: the library has no other functions that read files."""
    reading = {
        f"{owner.__name__}.{name}"
        for module in (tokenizers, tokenizers.models, tokenizers.normalizers, tokenizers.pre_tokenizers)
        for owner in vars(module).values()
        if inspect.isclass(owner) and owner.__module__.startswith("tokenizers")
        for name in dir(owner)
        if "file" in name or "pretrained" in name
    }
    models = ("BPE", "WordLevel", "WordPiece")
    known = {f"{model}.{name}" for model in models for name in ("from_file", "read_file")}
    known |= {f"{name}Tokenizer.from_file" for name in ("BertWordPiece", "ByteLevelBPE", "SentencePieceBPE", "CharBPE")}
    assert reading == known | {"Tokenizer.from_file", "Tokenizer.from_pretrained"}


def _classes() -> list[type[Any]]:
    names = {name for name in TOKENIZER_MAPPING_NAMES.values() if name} | loader_rules.TOKENIZER_CLASSES
    found = [tokenizer_class_from_name(name) for name in sorted(names)]
    return [each for each in found if each is not None and type(each) is type]  # not of a missing library


def test_no_argument_of_any_tokenizer_can_name_a_file() -> None:
    """Includes arguments of versions to come: they are not among the known keys."""
    arguments = {
        name for owner in _classes() for each in owner.__mro__ for name in inspect.signature(each.__init__).parameters
    }
    arguments |= {key for owner in _classes() for key in getattr(owner, "vocab_files_names", {})}
    assert {"vocab", "merges", "vocab_file", "tokenizer_file"} <= arguments
    arguments |= {"init_inputs", "fast_tokenizer_files", "name_or_path", "auto_map", "sp_model_kwargs", "unheard_of"}
    for key in sorted(arguments):
        for value in (ELSEWHERE, [ELSEWHERE], {"model_file": ELSEWHERE}, 3):
            for clean in (lambda values: clean_tokenizer_config(values, has_file=False), clean_special_tokens):
                with suppress(ModelError):  # refused
                    kept = clean({key: value})
                    texts = {name for name in kept if name in TEXTS or name.endswith("_token")}
                    assert texts or kept in ({}, {key: 3}), key


@pytest.mark.parametrize("key", ["init_inputs", "vocab", "merges", "fast_tokenizer_files", "gguf_file"])
def test_a_tokenizer_that_is_elsewhere_is_refused_by_its_key(key: str) -> None:
    with pytest.raises(ModelError, match=f"tokenizer_config.json has {key} .*/proc/self/environ"):
        clean_tokenizer_config({key: [ELSEWHERE]}, has_file=True)
    assert clean_tokenizer_config({key: []}, has_file=True) == {"tokenizer_class": "PreTrainedTokenizerFast"}


def test_only_known_classes_read_a_tokenizer_without_tokenizer_json() -> None:
    with pytest.raises(ModelError, match=r"tokenizer_class 'BertTokenizer'; store the tokenizer as tok"):
        clean_tokenizer_config({"tokenizer_class": "BertTokenizer"}, has_file=False)
    assert clean_tokenizer_config({"tokenizer_class": "GPT2TokenizerFast"}, has_file=False)
    for name in loader_rules.TOKENIZER_CLASSES:
        assert tokenizer_class_from_name(name) is not None, name


REAL = {
    "llama 3": {
        "added_tokens_decoder": {
            "128000": {
                "content": "<|begin_of_text|>",
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
        },
        "bos_token": "<|begin_of_text|>",
        "chat_template": "{{ messages }}",
        "clean_up_tokenization_spaces": True,
        "eos_token": "<|eot_id|>",
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": 131072,
    },
    "mistral": {
        "add_bos_token": True,
        "add_prefix_space": None,
        "additional_special_tokens": [],
        "legacy": False,
        "model_max_length": 1000000000000000019884624838656,
        "pad_token": None,
        "spaces_between_special_tokens": False,
        "unk_token": {"__type": "AddedToken", "content": "<unk>", "lstrip": False, "normalized": True},
        "use_default_system_prompt": False,
    },
    "gemma 3": {"boi_token": "<start_of_image>", "extra_special_tokens": {"boi_token": "<start_of_image>"}},
    "templates by name": {"chat_template": [{"name": "default", "template": "{{ messages }}"}], "errors": "replace"},
}
AUTHORS = {
    "sp_model_kwargs": {},
    "processor_class": "Gemma3Processor",
    "name_or_path": "/home/author/model",
    "special_tokens_map_file": "/home/author/special_tokens_map.json",
    "tokenizer_file": "/home/author/tokenizer.json",
    "auto_map": {"AutoTokenizer": ["tokenization.Tokenizer", None]},
    "use_auth_token": True,
    "vocab_file": None,
}
"""Keys that real files have and that change nothing."""


@pytest.mark.parametrize("name", REAL)
def test_a_real_tokenizers_configuration_is_kept(name: str) -> None:
    kept = clean_tokenizer_config({**REAL[name], **AUTHORS, "tokenizer_class": "LlamaTokenizerFast"}, has_file=True)
    assert kept == {**REAL[name], "tokenizer_class": "PreTrainedTokenizerFast"}


CONFIG: dict[str, Any] = {"model_type": "llama", "hidden_size": 8}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("speculators_config", {"verifier": {"name_or_path": ELSEWHERE}}),
        ("transformers_weights", "../other/model.safetensors"),
        ("configuration_files", ["config.4.0.0.json"]),
        ("attn_implementation", "evil/kernel"),
        ("_experts_implementation", {"": "evil/kernel"}),
        ("quantization_config", ELSEWHERE),
        ("rope_parameters", {"rope_type": ELSEWHERE}),
        ("hidden_act", ELSEWHERE),
        ("layer_types", [ELSEWHERE]),
    ],
)
@pytest.mark.parametrize("model_type", ["llama", "llama_swiftkv", "gpt99", None])
def test_a_configuration_that_names_something_else_is_refused(key: str, value: Any, model_type: str | None) -> None:
    with pytest.raises(ModelError) as caught:
        clean_config({**CONFIG, "model_type": model_type, key: value})
    assert caught.value.field == key
    assert key in caught.value.message


def test_what_a_configuration_names_without_need_is_dropped() -> None:
    names = ("_name_or_path", "name_or_path", "auto_map", "custom_pipelines", "text_model_id", "adapter", "vocab_file")
    for key in names:
        for value in (ELSEWHERE, "gpt2", [ELSEWHERE], {"AutoConfig": ELSEWHERE}):
            assert clean_config({**CONFIG, key: value}) == CONFIG
            kept = clean_config({**CONFIG, "model_type": "gpt99", "vision_config": {key: value}, key: value})
            assert ELSEWHERE not in json.dumps(kept)
            assert "gpt2" not in json.dumps(kept)


def test_a_quantisation_keeps_its_patterns_and_no_address() -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}}
    real = {"quant_method": "compressed-tensors", "config_groups": groups, "ignore": ["re:.*mlp/gate$", "lm_head"]}
    meta = {"quantizer": ["gptqmodel:1.9.0"], "uri": "https://github.com/modelcloud/gptqmodel"}
    kept = clean_config({**CONFIG, "quantization_config": {**real, "meta": meta}})
    assert kept == {**CONFIG, "quantization_config": {**real, "meta": {"quantizer": ["gptqmodel:1.9.0"]}}}


@pytest.mark.parametrize("name", FAMILIES)
def test_every_field_of_a_family_is_kept(name: str) -> None:
    """A new version's field of text or objects has to become a known key, or be left out on purpose."""
    own = {field.name: field.type for field in dataclasses.fields(CONFIG_MAPPING[name])}
    own = {key: kind for key, kind in own.items() if key not in PreTrainedConfig.__dataclass_fields__}
    assert own
    for key, kind in own.items():
        if not _is_of_numbers(kind):
            assert key in loader_rules._CONFIG_RULES.known, f"{key}: {kind}"
    texts = {key for key in STUDENT_KEYS if key == "swiftkv_decode_key_value"}
    assert texts <= loader_rules._CONFIG_RULES.known.keys()


def _is_of_numbers(kind: Any) -> bool:
    """Whether a field's values are numbers, booleans, null or lists of these."""
    if kind in (int, float, bool, type(None)):
        return True
    return bool(typing.get_args(kind)) and all(map(_is_of_numbers, typing.get_args(kind)))
