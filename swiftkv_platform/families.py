"""Table of model families: one row per teacher architecture of transformers. Imports neither torch nor transformers.

Configuration classes, plans, models, the vLLM plugin and the GGUF reader use these rows. A decoder can become a family
if it only embeds, runs its layers and normalizes, if its layers pass keyword arguments to their attention, and if that
attention is one of `Family.attention`. Absent keys have transformers' defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from swiftkv_platform.errors import ModelError

STUDENT_SUFFIX = "_swiftkv"
"""Suffix that a student's `model_type` adds to its teacher's."""


@dataclass(frozen=True)
class ConfigFlag:
    """A boolean key of a teacher's `config.json`, and the value if the key is missing."""

    key: str
    default: bool = False

    def get_value(self, config: Any) -> bool:
        """Return the key's value in a transformers configuration."""
        return bool(getattr(config, self.key, self.default))


@dataclass(frozen=True)
class FixedFlag:
    """A constant instead of a `ConfigFlag`, for families without the key."""

    value: bool

    def get_value(self, _config: Any) -> bool:
        return self.value


@dataclass(frozen=True)
class SlidingWindows:
    """Sliding windows of a family's layers."""

    default: int | None
    """Window in tokens without `sliding_window`; None: no window."""
    is_switchable: bool = False
    """Whether windows need `use_sliding_window: true`."""
    has_layer_types: bool = False
    """Whether `layer_types` lists the layers with a window. Without it, all layers have one, or those from
    `max_window_layers` on if windows are switchable."""
    full_interval: int | None = None
    """n: without `layer_types`, every n-th layer has no window. `sliding_window_pattern` overrides n."""


NEVER, ALWAYS = FixedFlag(False), FixedFlag(True)
ATTENTION_BIAS, MLP_BIAS = ConfigFlag("attention_bias"), ConfigFlag("mlp_bias")


@dataclass(frozen=True)
class Family:
    """One teacher architecture of transformers; the defaults are those of Llama without biases."""

    model_type: str
    """Teacher's `model_type`; the student's is `{model_type}_swiftkv`."""
    class_prefix: str
    """Prefix of transformers' class names, e.g. `Llama` for `LlamaForCausalLM`."""
    module: str = ""
    """Name of the module in transformers, if it is not `model_type`."""
    decoder_class_prefix: str = ""
    """Prefix of the decoder's and the configuration's class names, if it is not `class_prefix`."""
    attention: Literal["head", "latent"] = "head"
    """Kind of attention: keys and values by head with `q_proj`, `k_proj`, `v_proj`, `o_proj` and Llama's RoPE (rotated
    halves), or DeepSeek-V2's latents."""
    input_bias: ConfigFlag | FixedFlag = NEVER
    """Biases of the query, key and value projections."""
    output_bias: ConfigFlag | FixedFlag = NEVER
    """Bias of the output projection of attention."""
    norms: Literal["before", "behind", "both"] = "before"
    """Position of a layer's norms: before its attention and MLP, behind both, or before and behind. Without norms
    before attention (OLMo 2), students have no norm_swiftkv: K and V of layers >= l come from x itself."""
    norm_offset: int = 0
    """Number that norms add to their weights."""
    has_fused_projections: bool = False
    """Whether the teacher has one `qkv_proj` for queries, keys and values, and one `gate_up_proj` (Phi-3). The
    projections that a student adds are separate."""
    query_key_norms: Literal["head", "all heads"] | None = None
    """RMSNorms on queries and keys before RoPE: over each head, or over all heads together."""
    head_dim: int | None = None
    """Default of `head_dim`; None: hidden_size / num_attention_heads."""
    has_layers_without_rope: bool = False
    """Whether a 0 in `no_rope_layers` marks a layer without RoPE (SmolLM3). A group follows its first layer."""
    has_rope_per_layer_type: bool = False
    """Whether full and sliding layers have different RoPEs. A group follows its first layer."""
    feed_forward: Literal["gated", "gated_gelu", "mixtral", "qwen3_moe", "deepseek_v2"] = "gated"
    """Feed-forward part of a layer: gate, up and down projections with the activation `hidden_act` (`gated`) or
    `hidden_activation` (`gated_gelu`), or a mixture of experts."""
    mlp_bias: ConfigFlag | FixedFlag = NEVER
    """Biases of a feed-forward part that is not a mixture of experts."""
    multipliers: Literal["keys", "sizes"] | None = None
    """Scaling factors. `keys`: keys of the configuration scale embeddings, scores, residual branches and logits
    (Granite). `sizes`: `hidden_size ** 0.5`, rounded to the weights' dtype, scales embeddings, and
    `query_pre_attn_scalar ** -0.5` scores (Gemma)."""
    windows: SlidingWindows | None = None
    """Sliding windows; None: `sliding_window` is ignored."""
    max_position_embeddings: int = 32768
    """Default of the key of this name."""
    tie_word_embeddings: bool = False
    gguf_architecture: str = ""
    """`general.architecture` of its GGUF files; empty: GGUF files are not supported."""
    vllm_obstacle: str = ""
    """Reason why vLLM does not serve the family's students, and what serves them; empty: vLLM does."""

    @property
    def student_model_type(self) -> str:
        """The student's `model_type`."""
        return f"{self.model_type}{STUDENT_SUFFIX}"

    def get_multiplier(self, config: Any, key: str) -> float:
        """Return a scaling factor by Granite's key, such as `embedding_multiplier`; 1 if the family has none."""
        if self.multipliers == "sizes":
            embedding, attention = config.hidden_size**0.5, config.query_pre_attn_scalar**-0.5
            return float({"embedding_multiplier": embedding, "attention_multiplier": attention}.get(key, 1.0))
        return float(getattr(config, key)) if self.multipliers else 1.0

    @property
    def has_input_norm(self) -> bool:
        """Whether attention has a norm before it, and the K and V of layers >= l have norm_swiftkv."""
        return self.norms != "behind"

    def check_head_sharing(self, num_key_value_heads: int | None, field: str) -> None:
        """Raise `ModelError` for another number of KV heads than the teacher's if the family does not support it."""
        reason = None
        if self.attention == "latent":
            reason = "caches one latent for all heads (MLA), so the number of KV heads cannot be reduced"
        elif self.query_key_norms == "all heads":
            reason = "normalizes the keys of all heads together, so a student needs the teacher's heads"
        if reason and num_key_value_heads is not None:
            raise ModelError(
                f"num_key_value_heads_swiftkv is {num_key_value_heads}, but {self.model_type} {reason}; "
                "use swiftkv.sharing: gqa",
                field=field,
                value=num_key_value_heads,
            )

    def get_teacher_class_name(self, kind: str) -> str:
        """Return the name of transformers' class of a kind, such as `DecoderLayer`."""
        of_decoder = kind in ("Model", "Config") and self.decoder_class_prefix
        return f"{self.decoder_class_prefix if of_decoder else self.class_prefix}{kind}"

    def get_transformers_import_path(self, kind: Literal["modeling", "configuration"]) -> str:
        """Return the import path of transformers' module of a kind."""
        name = self.module or self.model_type
        return f"transformers.models.{name}.{kind}_{name}"

    @property
    def student_class_name(self) -> str:
        """Name in a student's `architectures`."""
        return f"{self.class_prefix}SwiftKVForCausalLM"


_BIASES: dict[str, Any] = {"input_bias": ATTENTION_BIAS, "output_bias": ATTENTION_BIAS}

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            "llama",
            "Llama",
            **_BIASES,
            mlp_bias=MLP_BIAS,
            max_position_embeddings=2048,
            gguf_architecture="llama",  # Mistral's models too
        ),
        Family("mistral", "Mistral", windows=SlidingWindows(4096), max_position_embeddings=131072),
        Family(
            "ministral", "Ministral", windows=SlidingWindows(4096, has_layer_types=True), max_position_embeddings=131072
        ),
        Family(
            "qwen2",
            "Qwen2",
            input_bias=ALWAYS,
            windows=SlidingWindows(4096, is_switchable=True, has_layer_types=True),
            gguf_architecture="qwen2",
        ),
        Family(
            "qwen3",
            "Qwen3",
            **_BIASES,
            query_key_norms="head",
            head_dim=128,
            windows=SlidingWindows(4096, is_switchable=True, has_layer_types=True),
            gguf_architecture="qwen3",
        ),
        Family("granite", "Granite", **_BIASES, mlp_bias=MLP_BIAS, multipliers="keys", max_position_embeddings=2048),
        Family(
            "seed_oss",
            "SeedOss",
            input_bias=ConfigFlag("attention_bias", default=True),
            output_bias=ConfigFlag("attention_out_bias"),
            head_dim=128,
            mlp_bias=MLP_BIAS,
            max_position_embeddings=524288,
        ),
        Family(
            "smollm3",
            "SmolLM3",
            **_BIASES,
            has_layers_without_rope=True,
            mlp_bias=MLP_BIAS,
            windows=SlidingWindows(None, is_switchable=True, has_layer_types=True),
            tie_word_embeddings=True,
            vllm_obstacle="the vLLM plugin applies RoPE to the keys of every layer group, but some SmolLM3 layers "
            "have no RoPE; the native engine (`swiftkv serve`) serves SmolLM3 students",
        ),
        Family("olmo2", "Olmo2", **_BIASES, norms="behind", query_key_norms="all heads", max_position_embeddings=2048),
        Family(
            "olmo3",
            "Olmo3",
            **_BIASES,
            norms="behind",
            query_key_norms="all heads",
            has_rope_per_layer_type=True,
            windows=SlidingWindows(4096, has_layer_types=True, full_interval=4),
            max_position_embeddings=2048,
        ),
        Family("phi3", "Phi3", has_fused_projections=True, windows=SlidingWindows(None), max_position_embeddings=4096),
        Family(
            "gemma3_text",
            "Gemma3",
            module="gemma3",
            decoder_class_prefix="Gemma3Text",
            **_BIASES,
            norms="both",
            norm_offset=1,
            query_key_norms="head",
            head_dim=256,
            has_rope_per_layer_type=True,
            feed_forward="gated_gelu",
            multipliers="sizes",
            windows=SlidingWindows(4096, has_layer_types=True, full_interval=6),
            max_position_embeddings=131072,
            tie_word_embeddings=True,
            gguf_architecture="gemma3",
        ),
        Family(
            "mixtral", "Mixtral", feed_forward="mixtral", windows=SlidingWindows(None), max_position_embeddings=131072
        ),
        Family(
            "qwen3_moe",
            "Qwen3Moe",
            **_BIASES,
            query_key_norms="head",
            feed_forward="qwen3_moe",
            windows=SlidingWindows(4096, is_switchable=True),
        ),
        Family(
            "deepseek_v2",
            "DeepseekV2",
            attention="latent",
            **_BIASES,
            feed_forward="deepseek_v2",
            mlp_bias=MLP_BIAS,
            max_position_embeddings=2048,
            vllm_obstacle="vLLM's multi-head latent attention cannot share a KV cache between layers; the native "
            "engine (`swiftkv serve`) serves DeepSeek-V2 students",
        ),
    )
}
"""Supported families by the teacher's `model_type`."""
FLAG_KEYS = frozenset(
    flag.key
    for family in FAMILIES.values()
    for flag in (family.input_bias, family.output_bias, family.mlp_bias)
    if isinstance(flag, ConfigFlag)
)
"""Keys of `config.json` that `FAMILIES` reads as flags."""


def get_teacher_type(model_type: object) -> str:
    """Return the teacher's `model_type` for a teacher's or a student's; any other value comes back as text."""
    return str(model_type).removesuffix(STUDENT_SUFFIX)


def find_family(config: Mapping[str, Any]) -> Family:
    """Return the family of a teacher's or a student's `config.json`. Raises `ModelError`: `model_type` has no row."""
    model_type = config.get("model_type")
    family = FAMILIES.get(get_teacher_type(model_type)) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(
            f"config.json has model_type {model_type!r}, which is not supported; supported types are "
            f"{', '.join(sorted(FAMILIES))}",
            field="model.name_or_path",
            value=model_type,
        )
    return family


def refuse_student(model_type: object, name: str, field: str) -> None:
    """Raise `ModelError` if `model_type`, of the teacher `name`, is a student's."""
    if str(model_type).endswith(STUDENT_SUFFIX):
        raise ModelError.for_field(
            field, name, ", which is a SwiftKV student already; use the teacher that it was made from"
        )


def is_served_by_vllm(model_type: str) -> bool:
    """Whether vLLM serves students of a family, by the `model_type` of a teacher or a student."""
    family = FAMILIES.get(get_teacher_type(model_type))
    return family is not None and not family.vllm_obstacle
