"""Allow-lists of the keys and values in a model's small JSON files that third-party loaders may see.

transformers, tokenizers and vLLM open paths, URLs and hub ids in these files, under keys that change with every
version. So loaders get cleaned copies. By `FileRules`, a copy keeps known keys with valid values, and numbers, which
name no file. Other keys are dropped, since real files have many. Keys that replace the model or its tokenizer are
refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import FAMILIES, get_teacher_type
from swiftkv_platform.student_shape import StudentShape

ValueCheck = Callable[[Any], bool]
"""Whether a value is valid and names nothing outside of the file."""

CONFIG, GENERATION, INDEX = "config.json", "generation_config.json", "model.safetensors.index.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
SPECIAL_TOKENS, ADDED_TOKENS = "special_tokens_map.json", "added_tokens.json"
ADAPTER_FILE, QUANTIZATION = "adapter_config.json", "hf_quant_config.json"
TOKENIZER_CLASS = "PreTrainedTokenizerFast"
"""Class that uses `tokenizer.json` unchanged; other classes rebuild parts of it."""
TOKENIZER_CLASSES = frozenset(
    {
        *("TokenizersBackend", "PreTrainedTokenizer", "LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer"),
        *("Qwen2Tokenizer", "GPT2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer"),
    }
)
"""Classes, without `Fast`, that read a tokenizer without `tokenizer.json` from their files only."""

_WORD_PATTERN = re.compile(r"(?!\.)[\w.+:-]{1,100}", re.ASCII)
_MAX_TOKEN_LENGTH = 4096
_MAX_DEPTH = 8


@dataclass(frozen=True)
class FileRules:
    """Keys and values of one file that its cleaned copy keeps."""

    known: Mapping[str, ValueCheck]
    """Known keys, with the checks of their values."""
    refused: Mapping[str, str]
    """Keys that must be absent, null or empty, with the cure for messages."""
    keep_numbers: bool = True
    """Whether unknown keys keep numbers, booleans and lists of these."""

    def clean_values(self, file: str, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return a cleaned copy. Raises `ModelError` for refused keys, and for known keys with an invalid value."""
        cleaned: dict[str, Any] = {}
        for key, value in values.items():
            if key in self.refused and value not in (None, [], {}, ""):
                raise _make_error(file, key, value, self.refused[key])
            is_valid = self.known.get(key)
            if is_valid is not None:
                # `planning.config_values` refuses wrong numbers.
                if not (is_valid(value) or (self.keep_numbers and is_number(value))):
                    raise _make_error(file, key, value, "use a value without paths, URLs or hub ids")
                cleaned[key] = value
            elif self.keep_numbers and key not in self.refused and is_number(value):
                cleaned[key] = value
        return cleaned


def is_number(value: Any, depth: int = 0) -> bool:
    """Whether a value is null, a boolean, a number, or a list of such values."""
    if isinstance(value, list):
        return depth < _MAX_DEPTH and all(is_number(item, depth + 1) for item in value)
    return value is None or isinstance(value, bool | int | float)


def is_word(value: Any) -> bool:
    """Whether a value is null or a word such as `silu`: no slashes, no spaces, no leading dot."""
    return value is None or (isinstance(value, str) and _WORD_PATTERN.fullmatch(value) is not None)


def _is_word_list(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(map(is_word, value)))


def _accept_types(*types: type) -> ValueCheck:
    return lambda value: value is None or isinstance(value, types)


_is_flag, _is_object = _accept_types(bool), _accept_types(Mapping)
_is_scalar = _accept_types(bool, int, float)


def _is_pattern_list(value: Any) -> bool:
    return value is None or (isinstance(value, list) and all(isinstance(item, str) for item in value))


def _is_rope_config(value: Any) -> bool:
    """Whether a value is an object of numbers, words and lists of numbers, or of such objects by layer type."""
    return value is None or (isinstance(value, Mapping) and all(_is_rope_value(item) for item in value.values()))


def _is_word_or_settings(value: Any) -> bool:
    return is_word(value) or _is_rope_config(value)


def _is_rope_value(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(is_number(item) or is_word(item) for item in value.values())
    return is_number(value) or is_word(value)


_PATTERN_KEYS = frozenset(
    {
        *("ignore", "targets", "modules_to_not_convert", "ignored_layers", "exclude", "exclude_modules"),
        *("llm_int8_skip_modules", "modules_in_block_to_quantize"),
    }
)
"""Keys of a quantization config whose values are patterns of module names."""


def is_token(value: Any) -> bool:
    """Whether a value is a token as tokenizers store it: its text, or an object of its text and flags."""
    if isinstance(value, Mapping):
        flags = {key: item for key, item in value.items() if key not in ("content", "__type")}
        known = value.get("__type", "AddedToken") == "AddedToken" and flags.keys() <= _TOKEN_FLAGS
        return known and isinstance(value.get("content"), str) and all(map(_is_flag, flags.values()))
    return value is None or (isinstance(value, str) and len(value) <= _MAX_TOKEN_LENGTH)


def _is_token_list_or_map(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(is_token, value.values()))
    return value is None or (isinstance(value, list) and all(map(is_token, value)))


def _is_token_map_by_id(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        str(key).isascii() and str(key).isdigit() and isinstance(item, Mapping) and is_token(item)
        for key, item in value.items()
    )


def _is_chat_template(value: Any) -> bool:
    """Whether a value is a chat template, or several with names."""
    if isinstance(value, list):
        return all(
            isinstance(item, Mapping)
            and item.keys() <= {"name", "template"}
            and all(isinstance(text, str) for text in item.values())
            for item in value
        )
    if isinstance(value, Mapping):
        return all(isinstance(text, str) for text in value.values())
    return value is None or isinstance(value, str)


_TOKEN_FLAGS = {"lstrip", "rstrip", "single_word", "normalized", "special"}

_USE_DEFAULT_NAME = "store it in the model's directory under its usual name"
_REFUSED_CONFIG_KEYS = {
    "transformers_weights": "store the weights as model.safetensors",
    "configuration_files": "store the configuration as config.json",
    "speculators_config": "use the model that it names, without the draft",
    "speculative_config": "set num_lookup_tokens of a request, or serve without a draft",
}
_IMPLEMENTATION_KEYS = tuple(
    form.format(name)
    for name in ("attn_implementation", "experts_implementation")
    for form in ("{}", "_{}", "_{}_internal")
)
_CALL_KEYS = frozenset(
    {
        *("output_attentions", "output_hidden_states", "output_router_logits"),
        *("return_dict", "use_return_dict", "torchscript"),
    }
)
"""Keys that say what a call of the model returns. They describe a script, not the model, and transformers refuses to
write some of them."""

_CONFIG_RULES = FileRules(
    known={
        **dict.fromkeys(("model_type", "hidden_act", "hidden_activation", "dtype", "torch_dtype"), is_word),
        **dict.fromkeys(("topk_method", "scoring_func"), is_word),
        **{key: is_word for key, (kind, _) in StudentShape.get_config_fields().items() if kind is str},
        **dict.fromkeys(("architectures", "layer_types"), _is_word_list),
        **dict.fromkeys(("rope_parameters", "rope_scaling"), _is_rope_config),
        "quantization_config": _is_object,  # cleaned as an object
    },
    refused=_REFUSED_CONFIG_KEYS,
)
_GENERATION_RULES = FileRules(
    known={
        **dict.fromkeys(("cache_implementation", "early_stopping", "kv_cache_dtype"), is_word),
        "early_exit": _is_word_or_settings,
    },
    refused={},
)
_REFUSED_TOKENIZER_KEYS = {
    **dict.fromkeys(("vocab", "merges", "tokenizer_object", "gguf_file", "spm_file"), _USE_DEFAULT_NAME),
    "init_inputs": "remove it; use named arguments",
    "fast_tokenizer_files": "store the tokenizer as tokenizer.json",
}
_TOKEN_KEYS = {
    **dict.fromkeys((f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")), is_token),
    **dict.fromkeys(
        ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens"), _is_token_list_or_map
    ),
}
_FLAG_KEYS = (
    *("add_bos_token", "add_eos_token", "add_prefix_space", "clean_up_tokenization_spaces", "legacy"),
    *("use_default_system_prompt", "do_lower_case", "split_special_tokens", "spaces_between_special_tokens"),
    *("keep_accents", "remove_space", "strip_accents", "tokenize_chinese_chars", "fix_mistral_regex"),
)
_TOKENIZER_RULES = FileRules(
    known={
        **_TOKEN_KEYS,
        **dict.fromkeys(_FLAG_KEYS, _is_flag),
        **dict.fromkeys(("padding_side", "truncation_side", "truncation_strategy", "errors"), is_word),
        **dict.fromkeys(("model_max_length", "max_length", "stride", "pad_to_multiple_of"), _is_scalar),
        "pad_token_type_id": _is_scalar,
        "model_input_names": _is_word_list,
        "added_tokens_decoder": _is_token_map_by_id,
        "chat_template": _is_chat_template,
    },
    refused=_REFUSED_TOKENIZER_KEYS,
    keep_numbers=False,  # a number instead of a path is an open file
)
_SPECIAL_TOKEN_RULES = FileRules(known=_TOKEN_KEYS, refused=_REFUSED_TOKENIZER_KEYS, keep_numbers=False)

_REFERENCE_KEY = re.compile(
    r"(^|_)(path|paths|file|files|filename|dir|directory|folder|repo|repo_id|repository|url|uri|name_or_path|checkpoint"
    r"|weights|pretrained|auto_map|pipelines|tokenizer|processor|backbone|model|model_id|model_name|adapter|kernel)$"
)
"""Keys whose values name models and files."""


def _clean_object(values: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Return a cleaned copy of an object with unknown keys: numbers, words that name no file or model, and objects of
    these."""
    cleaned: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            if depth < _MAX_DEPTH:
                cleaned[key] = _clean_object(value, depth + 1)
        elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
            if depth < _MAX_DEPTH:
                cleaned[key] = [_clean_object(item, depth + 1) for item in value]
        elif is_number(value) or (key in _PATTERN_KEYS and _is_pattern_list(value)) or _is_plain_text(key, value):
            cleaned[key] = value
    return cleaned


def _is_plain_text(key: str, value: Any) -> bool:
    """Whether a value is a word or a list of words that do not name a file or a model."""
    return not (_REFERENCE_KEY.search(key) or key in _IMPLEMENTATION_KEYS) and (is_word(value) or _is_word_list(value))


def _refuse_code(values: Mapping[str, Any], depth: int = 0) -> None:
    for key, value in values.items():
        if key in _IMPLEMENTATION_KEYS and "/" in str(value):
            raise ModelError(
                f"{CONFIG} names the code {str(value)[:200]!r}; leave {key} out", field=key, value=str(value)[:200]
            )
        if isinstance(value, Mapping) and depth < _MAX_DEPTH:
            _refuse_code(value, depth + 1)


def clean_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cleaned `config.json`. Raises `ModelError` if it names code, weights or another model."""
    _refuse_code(values)
    cleaned = _CONFIG_RULES.clean_values(CONFIG, values)
    if get_teacher_type(values.get("model_type")) not in FAMILIES:  # only vLLM serves it
        return _clean_object(values)
    cleaned = {key: value for key, value in cleaned.items() if key not in (*_IMPLEMENTATION_KEYS, *_CALL_KEYS)}
    if isinstance(quantization := cleaned.get("quantization_config"), Mapping):
        cleaned["quantization_config"] = _clean_object(quantization)
    version = values.get("transformers_version")  # decides how old tokenizers are read
    return cleaned | ({"transformers_version": version} if isinstance(version, str) and is_word(version) else {})


def clean_generation_config(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a cleaned `generation_config.json`: numbers and names of modes. Raises `ModelError`."""
    return _GENERATION_RULES.clean_values(GENERATION, values)


def clean_tokenizer_config(values: Mapping[str, Any], *, has_file: bool) -> dict[str, Any]:
    """Return a cleaned `tokenizer_config.json`. `has_file`: whether there is a `tokenizer.json`, which then defines the
    tokenizer. Raises `ModelError` if it names files or an unsupported class."""
    cleaned = _select_custom_tokens(values) | _TOKENIZER_RULES.clean_values(TOKENIZER_CONFIG, values)
    if has_file:
        return cleaned | {"tokenizer_class": TOKENIZER_CLASS}
    name = values.get("tokenizer_class")
    if name is None:
        return cleaned
    if not isinstance(name, str) or name.removesuffix("Fast") not in TOKENIZER_CLASSES:
        cure = f"store the tokenizer as {TOKENIZER}: save it with transformers"
        raise _make_error(TOKENIZER_CONFIG, "tokenizer_class", name, cure)
    return cleaned | {"tokenizer_class": name}


def clean_special_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    return _select_custom_tokens(values) | _SPECIAL_TOKEN_RULES.clean_values(SPECIAL_TOKENS, values)


def clean_added_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an `added_tokens.json`: ids by token. Raises `ModelError` for other values."""
    for token, number in values.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise _make_error(ADDED_TOKENS, token[:80], number, "a token id is accepted")
    return dict(values)


def clean_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return cleaned settings of a quantization, or of an image or audio preprocessor, for vLLM."""
    return _clean_object(values)


def clean_index(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return an index of shards, without its metadata. Raises `ModelError` if a shard is outside the directory of
    the index."""
    shards = values.get("weight_map")
    for shard in shards.values() if isinstance(shards, Mapping) else ():
        if not is_plain_file_name(shard):
            raise ModelError(
                f"{INDEX} names the shard {str(shard)[:200]!r}; use a file in the same directory",
                field="weight_map",
                value=str(shard)[:200],
            )
    return {"metadata": {}, "weight_map": shards}


def is_plain_file_name(name: object) -> bool:
    """Whether a name is that of a file in the same directory."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set("/\\\0") & set(name)


def _select_custom_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return special tokens with custom names, such as `image_token`."""
    return {
        key: value
        for key, value in values.items()
        if key.endswith("_token") and key not in _TOKENIZER_RULES.known and value is not None and is_token(value)
    }


def _make_error(file: str, key: str, value: Any, cure: str) -> ModelError:
    text = repr(value)
    text = text if len(text) <= 80 else f"{text[:80]}..."
    return ModelError(f"{file} has {key} {text}; {cure}", field=key, value=value)
