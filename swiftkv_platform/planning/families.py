"""Conversion of each family's `config.json` to an `Architecture`: one table. It counts nothing and imports no torch.

Absent keys mean what transformers takes them to mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swiftkv_platform.errors import ModelError
from swiftkv_platform.planning.architecture import Architecture, Attention, Entry, Layer, Linear
from swiftkv_platform.planning.config import ConfigSource, Fields, read_config
from swiftkv_platform.planning.config_values import check_family, check_values

_MOST_LAYERS = 10_000
"""Layers of a model; each is an object here."""

_STUDENT_SUFFIX = "_swiftkv"

Windows = tuple[int | None, ...]


def _grouped_query(
    *, bias: Callable[[Fields], bool], output_bias: bool = False, head_norms: bool = False, head_dim: int | None = None
) -> Callable[[Fields, int | None], Attention]:
    """Attention whose query heads share KV heads; MHA and MQA are its ends."""

    def attention(fields: Fields, num_key_value_heads: int | None) -> Attention:
        hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
        kv_heads = num_key_value_heads or fields.count("num_key_value_heads", default=heads)
        if heads % kv_heads:
            raise ModelError(
                f"{heads} query heads cannot share {kv_heads} KV heads; a divisor is accepted",
                field="num_key_value_heads_swiftkv",
                value=kv_heads,
            )
        size = fields.count("head_dim", default=head_dim or max(hidden // heads, 1))
        biased = bias(fields)
        return Attention(
            query=(Linear(hidden, heads * size, biased),),
            key_value=(Linear(hidden, kv_heads * size, biased),) * 2,
            expansion=(),
            output=(Linear(heads * size, hidden, biased and output_bias),),
            num_heads=heads,
            query_size=size,
            value_size=size,
            entries=(Entry(kv_heads, size),) * 2,
            head_norms=2 * size * head_norms,
        )

    return attention


def _latent(fields: Fields, num_key_value_heads: int | None) -> Attention:
    """Multi-head latent attention (DeepSeek-V2): one latent and one rotated key a token are cached for all heads."""
    if num_key_value_heads is not None:
        raise ModelError(
            "num_key_value_heads_swiftkv has no meaning for latent attention, which caches no heads",
            field="num_key_value_heads_swiftkv",
            value=num_key_value_heads,
        )
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    nope, rope = fields.count("qk_nope_head_dim", default=128), fields.count("qk_rope_head_dim", default=64)
    value, rank = fields.count("v_head_dim", default=128), fields.count("kv_lora_rank", default=512)
    query_rank = fields.optional_count("q_lora_rank") if fields.given("q_lora_rank") else 1536
    bias = fields.flag("attention_bias")
    query: tuple[Linear, ...] = (Linear(hidden, heads * (nope + rope)),)
    if query_rank is not None:
        query = (Linear(hidden, query_rank, bias), Linear(query_rank, heads * (nope + rope)))
    return Attention(
        query=query,
        key_value=(Linear(hidden, rank + rope, bias),),
        expansion=(Linear(rank, heads * (nope + value)),),
        output=(Linear(heads * value, hidden, bias),),
        num_heads=heads,
        query_size=nope + rope,
        value_size=value,
        entries=(Entry(1, rank), Entry(1, rope)),
        query_norms=query_rank or 0,
        key_norms=rank,
    )


def _gated(
    hidden: int, intermediate: int, *, bias: bool = False, copies: int = 1, active: int = 1
) -> tuple[Linear, ...]:
    into = Linear(hidden, intermediate, bias, copies, active)
    return into, into, Linear(intermediate, hidden, bias, copies, active)


def _dense_mlp(fields: Fields, _layer: int) -> tuple[Linear, ...]:
    return _gated(fields.count("hidden_size"), fields.count("intermediate_size"), bias=fields.flag("mlp_bias"))


def _experts(fields: Fields, intermediate: int, *counts: str, defaults: tuple[int, int | None]) -> tuple[Linear, ...]:
    """The router and the experts a token is sent to."""
    hidden = fields.count("hidden_size")
    copies = fields.count(*counts, default=defaults[0])
    active = fields.count("num_experts_per_tok", default=defaults[1])
    if active > copies:
        raise ModelError(
            f"config.json sends a token to {active} of {copies} experts", field="num_experts_per_tok", value=active
        )
    return (Linear(hidden, copies), *_gated(hidden, intermediate, copies=copies, active=active))


def _mixtral_mlp(fields: Fields, _layer: int) -> tuple[Linear, ...]:
    return _experts(fields, fields.count("intermediate_size"), "num_local_experts", "num_experts", defaults=(8, 2))


def _qwen3_moe_mlp(fields: Fields, layer: int) -> tuple[Linear, ...]:
    dense = layer in (fields.sequence("mlp_only_layers") or ())
    if dense or (layer + 1) % fields.count("decoder_sparse_step", default=1):
        return _dense_mlp(fields, layer)
    intermediate = fields.count("moe_intermediate_size", default=768)
    return _experts(fields, intermediate, "num_experts", "num_local_experts", defaults=(128, 8))


def _deepseek_mlp(fields: Fields, layer: int) -> tuple[Linear, ...]:
    if layer < (fields.optional_count("first_k_dense_replace") or 0):
        return _dense_mlp(fields, layer)
    intermediate = fields.count("moe_intermediate_size", default=1407)
    shared = intermediate * fields.count("n_shared_experts", default=2)
    routed = _experts(fields, intermediate, "n_routed_experts", "num_experts", defaults=(64, None))
    _check_expert_groups(fields, routed[0].out_features)
    return (*routed, *_gated(fields.count("hidden_size"), shared, bias=fields.flag("mlp_bias")))


def _check_expert_groups(fields: Fields, num_experts: int) -> None:
    """Raises `ModelError`: experts that cannot be chosen as a DeepSeek's `topk_method` says."""
    method = fields.text("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise ModelError(
            f"config.json has topk_method {method!r}; greedy and group_limited_greedy are accepted",
            field="topk_method",
            value=method,
        )
    if method == "greedy":
        return
    groups, chosen = fields.count("n_group"), fields.count("topk_group")
    if num_experts % groups:
        raise ModelError(
            f"config.json has n_group {groups}; a divisor of {num_experts} experts is accepted",
            field="n_group",
            value=groups,
        )
    if chosen > groups:
        raise ModelError(
            f"config.json has topk_group {chosen}; 1..{groups} is accepted", field="topk_group", value=chosen
        )


def _everywhere(default: int | None) -> Callable[[Fields, int], Windows]:
    """Every layer has the window that `sliding_window` names; `default` where the key is absent."""

    def windows(fields: Fields, num_layers: int) -> Windows:
        window = fields.optional_count("sliding_window") if fields.given("sliding_window") else default
        if window == 1:
            raise ModelError("config.json has sliding_window 1; 2 or more is accepted", field="sliding_window", value=1)
        return (window,) * num_layers

    return windows


def _no_window(_fields: Fields, num_layers: int) -> Windows:
    return (None,) * num_layers


def _switched(by_layer: bool) -> Callable[[Fields, int], Windows]:
    """Qwen: windows only with `use_sliding_window`; `by_layer` where `layer_types` or `max_window_layers` say."""

    def windows(fields: Fields, num_layers: int) -> Windows:
        window = _everywhere(4096)(fields, 1)[0] if fields.flag("use_sliding_window") else None
        if not by_layer or window is None:
            return (window,) * num_layers
        types = fields.sequence("layer_types")
        if types is None:
            first = fields.count("max_window_layers", default=28)
            return tuple(window if i >= first else None for i in range(num_layers))
        if len(types) != num_layers:
            raise ModelError(
                f"config.json has {len(types)} layer_types for {num_layers} layers",
                field="layer_types",
                value=len(types),
            )
        return tuple(window if kind == "sliding_attention" else None for kind in types)

    return windows


@dataclass(frozen=True)
class _PlannedFamily:
    """One row: how a family reads its configuration. Defaults are those of transformers."""

    attention: Callable[[Fields, int | None], Attention]
    mlp: Callable[[Fields, int], tuple[Linear, ...]] = _dense_mlp
    windows: Callable[[Fields, int], Windows] = _no_window
    max_position_embeddings: int = 32768


def _biased(fields: Fields) -> bool:
    return fields.flag("attention_bias")


def _never(_fields: Fields) -> bool:
    return False


def _always(_fields: Fields) -> bool:
    return True


_PLAIN = _grouped_query(bias=_never)
FAMILIES = {
    "llama": _PlannedFamily(_grouped_query(bias=_biased, output_bias=True), max_position_embeddings=2048),
    "mistral": _PlannedFamily(_PLAIN, windows=_everywhere(4096), max_position_embeddings=131072),
    "mixtral": _PlannedFamily(_PLAIN, _mixtral_mlp, _everywhere(None), max_position_embeddings=131072),
    "qwen2": _PlannedFamily(_grouped_query(bias=_always), windows=_switched(by_layer=True)),
    "qwen3": _PlannedFamily(
        _grouped_query(bias=_biased, output_bias=True, head_norms=True, head_dim=128), windows=_switched(by_layer=True)
    ),
    "qwen3_moe": _PlannedFamily(
        _grouped_query(bias=_biased, output_bias=True, head_norms=True), _qwen3_moe_mlp, _switched(by_layer=False)
    ),
    "deepseek_v2": _PlannedFamily(_latent, _deepseek_mlp, max_position_embeddings=2048),
}


def read_architecture(source: ConfigSource, *, num_key_value_heads_swiftkv: int | None = None) -> Architecture:
    """The decoder that a `config.json` (path, directory or content) describes; a teacher's or a student's.
    `num_key_value_heads_swiftkv`: KV heads of the student's groups (appendix C), in place of the configuration's.
    Raises `ModelError`: no such file, a family without a row here, or a key that is missing or makes no sense."""
    config = read_config(source)
    check_family(config, FAMILIES)
    check_values(config)
    fields = Fields(config)
    model_type = fields.text("model_type").removesuffix(_STUDENT_SUFFIX)
    family = FAMILIES[model_type]
    num_layers = fields.count("num_hidden_layers", most=_MOST_LAYERS)
    windows = family.windows(fields, num_layers)
    attention = family.attention(fields, None)
    shared_heads = num_key_value_heads_swiftkv or fields.optional_count("num_key_value_heads_swiftkv")
    return Architecture(
        model_type=model_type,
        hidden_size=fields.count("hidden_size"),
        vocab_size=fields.count("vocab_size"),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        layers=tuple(Layer(attention, family.mlp(fields, i), windows[i]) for i in range(num_layers)),
        shared_attention=family.attention(fields, shared_heads),
        max_position_embeddings=fields.count("max_position_embeddings", default=family.max_position_embeddings),
        dtype=fields.text("dtype", "torch_dtype", default="bfloat16"),
        num_key_value_layers=fields.optional_count("num_key_value_layers"),
        key_value_group_size=fields.count("key_value_group_size", default=1),
        early_exit=fields.flag("early_exit"),
        decodes_own=fields.text("swiftkv_decode_key_value", default="shared") == "own",
    )
