"""Read `config.json` of known families: typed access to its keys, and the values that are accepted in it and in
`generation_config.json`. Imports no torch.

Used by both the control plane and the workers, so that they refuse the same values: those that transformers refuses and
those that would fail later. Keys not listed here are left to transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import FLAG_KEYS, STUDENT_SUFFIX, ConfigFlag, FixedFlag
from swiftkv_platform.student_shape import STUDENT_KEYS

MODEL_FIELD = "model.name_or_path"
_MAX_VALUE = 1 << 40
"""Max accepted count in a configuration."""

ConfigSource = str | Path | Mapping[str, Any]
"""A `config.json`, the directory that holds one, or its content."""


def read_config(source: ConfigSource) -> dict[str, Any]:
    """Return the content of a Hugging Face `config.json`. Raises `ModelError` if there is none, or it holds no JSON
    object."""
    if isinstance(source, Mapping):
        return dict(source)
    path = Path(source).expanduser()
    path = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        accepted = "a config.json or a Hugging Face model directory is accepted"
        raise ModelError(
            f"{path} cannot be read ({error.strerror}); {accepted}", field=MODEL_FIELD, value=str(source)
        ) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON ({error})", field=MODEL_FIELD, value=str(source)) from error
    if not isinstance(config, dict):
        raise ModelError(f"{path} holds a {type(config).__name__}, not an object", field=MODEL_FIELD, value=str(source))
    return config


class ConfigFields:
    """Typed access to a configuration. A missing or mistyped value is a `ModelError` that names the key."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._config = config

    def get_count(self, *names: str, default: int | None = None, maximum: int = _MAX_VALUE) -> int:
        """A positive integer of at most `maximum` under the first of `names` that is there; null counts as absent."""
        value = self.get_optional_count(*names, maximum=maximum)
        if value is None:
            value = default
        if value is None:
            raise make_config_error(names[0], None, "a positive integer is accepted")
        return value

    def get_optional_count(self, *names: str, minimum: int = 1, maximum: int = _MAX_VALUE) -> int | None:
        """Return the integer from `minimum` to `maximum` of the first of `names` that is set; None if none is."""
        for name in names:
            value = self._config.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
                kind = "a positive integer of" if minimum else "0 or a positive integer of"
                raise make_config_error(name, value, f"{kind} at most {maximum} is accepted")
            return value
        return None

    def get_flag(self, name: str, *, default: bool = False) -> bool:
        value = self._config.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise make_config_error(name, value, "true and false are accepted")
        return value

    def get_family_flag(self, flag: ConfigFlag | FixedFlag) -> bool:
        """Return the value of a family's flag in this configuration."""
        return flag.value if isinstance(flag, FixedFlag) else self.get_flag(flag.key, default=flag.default)

    def get_text(self, *names: str, default: str | None = None) -> str:
        for name in names:
            value = self._config.get(name, default)
            if isinstance(value, str):
                return value
        raise make_config_error(names[0], self._config.get(names[0]), "a string is accepted")

    def has_key(self, name: str) -> bool:
        """Whether the configuration has the key, possibly with the value null."""
        return name in self._config

    def get_sequence(self, name: str) -> Sequence[Any] | None:
        value = self._config.get(name)
        if value is not None and not isinstance(value, list | tuple):
            raise make_config_error(name, value, "a list is accepted")
        return value


MAX_LAYERS = 1024
"""Max layers of a model: each becomes an object when a configuration is read."""
_MAX_COUNT = (1 << 31) - 1
_DTYPE_NAMES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_FP8_METHODS = ("fbgemm_fp8", "fp8")
_ORDER_PRESERVING_ACTORDERS = ("weight", "static")
"""Orders of rounding (`actorder`) that keep columns and their groups in place."""

_COUNT_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "max_position_embeddings")
_OPTIONAL_COUNT_KEYS = (
    *("num_key_value_heads", "head_dim", "sliding_window", "sliding_window_pattern"),
    *("num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "decoder_sparse_step", "n_group", "topk_group"),
    *("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
)
_FRACTION_KEYS = ("initializer_range", "attention_dropout")
_BOOLEAN_KEYS = ("tie_word_embeddings", *sorted(FLAG_KEYS), "use_cache", "use_sliding_window")
_CAP_KEYS = ("attn_logit_softcapping", "final_logit_softcapping")
_TOKEN_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ROPE_COUNT_KEYS = ("original_max_position_embeddings",)
_ROPE_NUMBER_KEYS = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
_ROPE_REQUIRED_KEYS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
"""Keys that each kind of RoPE requires, since transformers has no defaults for them."""
_PROBABILITY_KEYS = ("top_p", "min_p", "typical_p")
_POSITIVE_KEYS = ("temperature", "repetition_penalty")


def has_quantized_weights(config: Mapping[str, Any]) -> bool:
    """Whether a configuration declares quantized weights. Raises `ModelError` for an unsupported quantization."""
    fields = config.get("quantization_config")
    if fields is None:
        return False
    if not isinstance(fields, Mapping):
        raise make_config_error("quantization_config", fields, "an object or null is accepted")
    method = fields.get("quant_method")
    if method in _FP8_METHODS or (method == "compressed-tensors" and _is_supported_compressed_tensors(fields)):
        return True
    form = f" (format {fields['format']!r})" if "format" in fields else ""
    raise ModelError(
        f"config.json has quantization_config.quant_method {method!r}{form}, which is not supported; use unquantized "
        "safetensors, FP8 as fbgemm_fp8, fp8 or compressed-tensors with 8-bit float weights, or compressed-tensors "
        "with symmetric int8 or int4 weights",
        field=MODEL_FIELD,
        value=method,
    )


def _is_supported_compressed_tensors(fields: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors' weights are 8-bit floats, or symmetric 8- or 4-bit integers in their original
    order."""
    groups = fields.get("config_groups")
    found = [group.get("weights") for group in groups.values() if isinstance(group, Mapping)] if groups else []
    weights = [each for each in found if isinstance(each, Mapping)]
    return bool(weights) and all(map(_is_supported_scheme, weights))


def _is_supported_scheme(weights: Mapping[str, Any]) -> bool:
    if weights.get("type") == "float":
        return weights.get("num_bits") == 8
    plain = weights.get("symmetric", True) and weights.get("actorder") in (None, False, *_ORDER_PRESERVING_ACTORDERS)
    return bool(plain) and weights.get("type", "int") == "int" and weights.get("num_bits") in (4, 8)


def check_config_values(config: Mapping[str, Any]) -> None:
    """Check a `config.json` of a known family; absent keys have transformers' defaults. Raises `ModelError`, which
    names the key, its value and what is accepted."""
    values = _CheckedValues("config.json", config)
    values.check_keys(("num_hidden_layers",), _is_count(MAX_LAYERS), f"1..{MAX_LAYERS} is accepted")
    values.check_keys(_COUNT_KEYS, _is_count(), "a positive integer is accepted")
    values.check_keys(_OPTIONAL_COUNT_KEYS, _or_null(_is_count()), "a positive integer or null is accepted")
    values.check_keys(("rms_norm_eps",), _is_number(0, math.inf), "a number that is not negative is accepted")
    values.check_keys(_FRACTION_KEYS, _or_null(_is_number(0, 1)), "a number from 0 to 1 is accepted")
    values.check_keys(_BOOLEAN_KEYS, lambda value: isinstance(value, bool), "true or false is accepted")
    values.check_keys(("hidden_act", "hidden_activation"), lambda value: isinstance(value, str), "a name is accepted")
    values.check_keys(_CAP_KEYS, lambda value: value is None, "null is accepted: logits and scores are not capped here")
    values.check_keys(("use_bidirectional_attention",), lambda value: not value, "false is accepted")
    values.check_keys(
        ("dtype", "torch_dtype"), _or_null(_is_one_of(_DTYPE_NAMES)), f"one of {', '.join(_DTYPE_NAMES)} is accepted"
    )
    positive = ("rope_theta", "query_pre_attn_scalar")
    values.check_keys(positive, _or_null(_is_number(0, math.inf, above=True)), "a positive number is accepted")
    values.check_keys(("partial_rotary_factor",), _is_share, "a number above 0 and up to 1 is accepted")
    values.check_keys(("rope_parameters", "rope_scaling"), _or_null(_is_object), "an object or null is accepted")
    _check_token_ids(values)
    check_no_student_keys(config)
    _check_padding(config)
    _check_heads(config)
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(rope := config.get(key), Mapping):
            # an earlier name
            old = {"su": _ROPE_REQUIRED_KEYS["longrope"]} if config.get("model_type") == "phi3" else {}
            _check_rope(_CheckedValues("config.json", rope, f"{key}."), {**_ROPE_REQUIRED_KEYS, **old})
            for kind, of_type in rope.items():  # by layer type, if these have their own
                if isinstance(of_type, Mapping):
                    _check_rope(_CheckedValues("config.json", of_type, f"{key}.{kind}."), _ROPE_REQUIRED_KEYS)


def check_generation_values(config: Mapping[str, Any]) -> None:
    """Check a `generation_config.json`. Raises as `check_config_values`."""
    values = _CheckedValues("generation_config.json", config)
    _check_token_ids(values)
    values.check_keys(_PROBABILITY_KEYS, _or_null(_is_number(0, 1)), "a number from 0 to 1 is accepted")
    values.check_keys(_POSITIVE_KEYS, _or_null(_is_number(0, math.inf)), "a number that is not negative is accepted")
    values.check_keys(
        ("do_sample", "use_cache"), _or_null(lambda value: isinstance(value, bool)), "true or false is accepted"
    )
    values.check_keys(("top_k",), _or_null(_is_integer), "an integer is accepted")


class _CheckedValues:
    """Keys of a file, possibly nested below another key."""

    def __init__(self, file: str, config: Mapping[str, Any], prefix: str = "") -> None:
        self._file, self._config, self._prefix = file, config, prefix

    def check_keys(self, keys: Iterable[str], accepts: Callable[[Any], bool], accepted: str) -> None:
        for key in keys:
            if key in self._config and not accepts(self._config[key]):
                raise make_config_error(f"{self._prefix}{key}", self._config[key], accepted, file=self._file)

    def check_required_keys(self, keys: Iterable[str], required: Mapping[str, Sequence[str]]) -> None:
        """Raise `ModelError` for missing keys that the value of the first set key of `keys` requires. `required`:
        required keys by value."""
        for key in [key for key in keys if key in self._config][:1]:
            for needed in required[self._config[key]]:
                if self._config.get(needed) is None:
                    accepted = f"it requires {self._prefix}{needed}"
                    raise make_config_error(f"{self._prefix}{key}", self._config[key], accepted, file=self._file)


def _check_token_ids(values: _CheckedValues) -> None:
    values.check_keys(
        _TOKEN_ID_KEYS,
        lambda value: _or_null(_is_integer)(value) or (isinstance(value, list) and all(map(_is_integer, value))),
        "a token id, a list of them or null is accepted",
    )


def check_no_student_keys(config: Mapping[str, Any]) -> None:
    """Raise `ModelError` for a teacher's configuration with a student's keys, which conversion would take over."""
    kind = str(config.get("model_type"))
    found = next((key for key in STUDENT_KEYS if key in config), None)
    if found is not None and not kind.endswith(STUDENT_SUFFIX):
        accepted = f"model_type {kind!r} has no such key; a student's model_type is {kind + STUDENT_SUFFIX!r}"
        raise make_config_error(found, config[found], accepted)


def _check_padding(config: Mapping[str, Any]) -> None:
    padding, size = config.get("pad_token_id"), config.get("vocab_size")
    if isinstance(padding, int) and isinstance(size, int) and not -size <= padding < size:
        raise make_config_error("pad_token_id", padding, f"an id below vocab_size {size} or null is accepted")


def _check_heads(config: Mapping[str, Any]) -> None:
    heads, shared = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and heads % shared:
        raise make_config_error("num_key_value_heads", shared, f"a divisor of num_attention_heads {heads} is accepted")


def _check_rope(values: _CheckedValues, required: Mapping[str, Sequence[str]]) -> None:
    values.check_keys(_ROPE_NUMBER_KEYS, _or_null(_is_number(0, math.inf, above=True)), "a positive number is accepted")
    values.check_keys(("partial_rotary_factor",), _is_share, "a number above 0 and up to 1 is accepted")
    values.check_keys(_ROPE_COUNT_KEYS, _or_null(_is_count()), "a positive integer is accepted")
    values.check_keys(("rope_type", "type"), _is_one_of(required), f"one of {', '.join(required)} is accepted")
    values.check_required_keys(("rope_type", "type"), required)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_object(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_count(maximum: int = _MAX_COUNT) -> Callable[[Any], bool]:
    return lambda value: _is_integer(value) and 1 <= value <= maximum


def _is_number(minimum: float, maximum: float, *, above: bool = False) -> Callable[[Any], bool]:
    def accepts(value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            return False
        return minimum <= value <= maximum and not (above and value == minimum)

    return accepts


def _is_share(value: Any) -> bool:
    return value is None or _is_number(0, 1, above=True)(value)


def _is_one_of(names: Collection[str]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and value in names


def _or_null(accepts: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or accepts(value)


def make_config_error(key: str, value: Any, accepted: str, *, file: str = "config.json") -> ModelError:
    """Make an error about a key of a file. `accepted`: sentence about the accepted values."""
    text = repr(value)
    shown = text if len(text) <= 80 else f"{text[:80]}..."
    return ModelError(f"{file} has {key} {shown}; {accepted}", field=key, value=value)
