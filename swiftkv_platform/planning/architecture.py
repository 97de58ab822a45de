"""A decoder's parts by layer, read from a `config.json`: projections, attention windows, cache entries, and
parameters. Other modules compute FLOPs, bytes and memory from them. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.families import Family, find_family
from swiftkv_platform.planning.config import (
    ConfigFields,
    ConfigSource,
    check_config_values,
    make_config_error,
    read_config,
)
from swiftkv_platform.specs.job import TRAINABLE_LAYERS, Trainable
from swiftkv_platform.student_shape import LayerMap, StudentShape


@dataclass(frozen=True)
class LinearShape:
    """A linear map, or the equal maps of a mixture of experts: `copies` in total, `active` per token."""

    in_features: int
    out_features: int
    bias: bool = False
    copies: int = 1
    active: int = 1

    @property
    def parameters(self) -> int:
        return self.copies * (self.in_features * self.out_features + self.bias * self.out_features)

    @property
    def flops(self) -> int:
        """Multiplications and additions per token, without the bias."""
        return 2 * self.active * self.in_features * self.out_features


@dataclass(frozen=True)
class CacheEntry:
    """Keys or values of one token in one cache layer: `heads` vectors of `size`."""

    heads: int
    size: int


@dataclass(frozen=True)
class AttentionShape:
    """Shape of an attention module."""

    query: tuple[LinearShape, ...]
    key_value: tuple[LinearShape, ...]
    """Projections that make the cache entries."""
    expansion: tuple[LinearShape, ...]
    """Projections from cache entries to keys and values at attention time (MLA only)."""
    output: tuple[LinearShape, ...]
    num_heads: int
    """Query heads."""
    query_size: int
    """Size of a head's query and key."""
    value_size: int
    entries: tuple[CacheEntry, ...]
    shared_query_norms: int = 0
    """Parameters of norms on queries before RoPE, which teacher and student share (Qwen3)."""
    shared_key_norms: int = 0
    """Parameters of norms on keys before RoPE, which teacher and student share."""
    query_norms: int = 0
    """Parameters of norms between query projections, which a student copies (MLA)."""
    key_norms: int = 0
    """Parameters of norms between key and value projections, which a student copies (MLA)."""

    @property
    def flops_per_pair(self) -> int:
        """Multiplications and additions of score and weighted sum per pair of query and key, over all heads."""
        return 2 * self.num_heads * (self.query_size + self.value_size)

    @property
    def query_parameters(self) -> int:
        return sum(linear.parameters for linear in self.query) + self.query_norms

    @property
    def key_value_parameters(self) -> int:
        return sum(linear.parameters for linear in (*self.key_value, *self.expansion)) + self.key_norms

    @property
    def decode_parameters(self) -> int:
        """Parameters of the projections that make deep tokens' own cache entries."""
        return sum(linear.parameters for linear in self.key_value)

    @property
    def output_parameters(self) -> int:
        return sum(linear.parameters for linear in self.output)


@dataclass(frozen=True)
class Layer:
    """One decoder layer."""

    attention: AttentionShape
    mlp: tuple[LinearShape, ...]
    """Router (if any), then gate, up and down projections of routed and shared experts."""
    window: int | None
    """Sliding window in tokens, including the query itself; None: no window."""


@dataclass(frozen=True)
class Architecture:
    """A teacher, and the student that its configuration describes, if any."""

    model_type: str
    """Model type of the teacher."""
    hidden_size: int
    vocab_size: int
    tie_word_embeddings: bool
    layers: tuple[Layer, ...]
    has_input_norm: bool
    """Whether attention has a norm before it, and x has norm_swiftkv."""
    num_norms: int
    """Norms of hidden states per layer."""
    shared_attention: AttentionShape
    """Attention of the student's group leaders, which have the KV projections."""
    max_position_embeddings: int
    dtype: str
    student: StudentShape | None
    """The shape in a student's configuration; None in a teacher's."""


_MAX_LAYERS = 10_000
"""Max layers of a model; each becomes an object here."""


def _read_head_attention(family: Family, fields: ConfigFields, num_key_value_heads: int | None) -> AttentionShape:
    """Attention whose query heads share KV heads (GQA, with MHA and MQA as its extremes)."""
    hidden, heads = fields.get_count("hidden_size"), fields.get_count("num_attention_heads")
    kv_heads = num_key_value_heads or fields.get_count("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise ModelError(
            f"{heads} query heads cannot share {kv_heads} KV heads; a divisor is accepted",
            field="num_key_value_heads_swiftkv",
            value=kv_heads,
        )
    size = fields.get_count("head_dim", default=family.head_dim or max(hidden // heads, 1))
    bias = fields.get_family_flag(family.input_bias)
    norms = {"head": (size, size), "all heads": (heads * size, kv_heads * size), None: (0, 0)}[family.query_key_norms]
    return AttentionShape(
        query=(LinearShape(hidden, heads * size, bias),),
        key_value=(LinearShape(hidden, kv_heads * size, bias),) * 2,
        expansion=(),
        output=(LinearShape(heads * size, hidden, fields.get_family_flag(family.output_bias)),),
        num_heads=heads,
        query_size=size,
        value_size=size,
        entries=(CacheEntry(kv_heads, size),) * 2,
        shared_query_norms=norms[0],
        shared_key_norms=norms[1],
    )


def _read_latent_attention(family: Family, fields: ConfigFields, _num_key_value_heads: int | None) -> AttentionShape:
    """Multi-head latent attention (DeepSeek-V2): the cache has one latent and one rotated key per token."""
    hidden, heads = fields.get_count("hidden_size"), fields.get_count("num_attention_heads")
    nope, rope = fields.get_count("qk_nope_head_dim", default=128), fields.get_count("qk_rope_head_dim", default=64)
    value, rank = fields.get_count("v_head_dim", default=128), fields.get_count("kv_lora_rank", default=512)
    query_rank = fields.get_optional_count("q_lora_rank") if fields.has_key("q_lora_rank") else 1536
    bias = fields.get_family_flag(family.input_bias)
    query: tuple[LinearShape, ...] = (LinearShape(hidden, heads * (nope + rope)),)
    if query_rank is not None:
        query = (LinearShape(hidden, query_rank, bias), LinearShape(query_rank, heads * (nope + rope)))
    return AttentionShape(
        query=query,
        key_value=(LinearShape(hidden, rank + rope, bias),),
        expansion=(LinearShape(rank, heads * (nope + value)),),
        output=(LinearShape(heads * value, hidden, fields.get_family_flag(family.output_bias)),),
        num_heads=heads,
        query_size=nope + rope,
        value_size=value,
        entries=(CacheEntry(1, rank), CacheEntry(1, rope)),
        query_norms=query_rank or 0,
        key_norms=rank,
    )


def _make_gated_mlp(
    hidden: int, intermediate: int, *, bias: bool = False, copies: int = 1, active: int = 1
) -> tuple[LinearShape, ...]:
    into = LinearShape(hidden, intermediate, bias, copies, active)
    return into, into, LinearShape(intermediate, hidden, bias, copies, active)


def _read_gated_mlp(family: Family, fields: ConfigFields, _layer: int) -> tuple[LinearShape, ...]:
    hidden, intermediate = fields.get_count("hidden_size"), fields.get_count("intermediate_size")
    bias = fields.get_family_flag(family.mlp_bias)
    if family.has_fused_projections:
        return LinearShape(hidden, 2 * intermediate, bias), LinearShape(intermediate, hidden, bias)
    return _make_gated_mlp(hidden, intermediate, bias=bias)


def _read_experts(
    fields: ConfigFields, intermediate: int, *counts: str, defaults: tuple[int, int | None]
) -> tuple[LinearShape, ...]:
    """Router and experts of a layer."""
    hidden = fields.get_count("hidden_size")
    copies = fields.get_count(*counts, default=defaults[0])
    active = fields.get_count("num_experts_per_tok", default=defaults[1])
    if active > copies:
        raise ModelError(
            f"config.json has num_experts_per_tok {active}, but only {copies} experts",
            field="num_experts_per_tok",
            value=active,
        )
    return (LinearShape(hidden, copies), *_make_gated_mlp(hidden, intermediate, copies=copies, active=active))


def _read_mixtral_mlp(_family: Family, fields: ConfigFields, _layer: int) -> tuple[LinearShape, ...]:
    intermediate = fields.get_count("intermediate_size")
    return _read_experts(fields, intermediate, "num_local_experts", "num_experts", defaults=(8, 2))


def _read_qwen3_moe_mlp(family: Family, fields: ConfigFields, layer: int) -> tuple[LinearShape, ...]:
    dense = layer in (fields.get_sequence("mlp_only_layers") or ())
    if dense or (layer + 1) % fields.get_count("decoder_sparse_step", default=1):
        return _read_gated_mlp(family, fields, layer)
    intermediate = fields.get_count("moe_intermediate_size", default=768)
    return _read_experts(fields, intermediate, "num_experts", "num_local_experts", defaults=(128, 8))


def _read_deepseek_mlp(family: Family, fields: ConfigFields, layer: int) -> tuple[LinearShape, ...]:
    if layer < (fields.get_optional_count("first_k_dense_replace", minimum=0) or 0):
        return _read_gated_mlp(family, fields, layer)
    intermediate = fields.get_count("moe_intermediate_size", default=1407)
    shared = intermediate * fields.get_count("n_shared_experts", default=2)
    routed = _read_experts(fields, intermediate, "n_routed_experts", "num_experts", defaults=(64, None))
    _check_expert_groups(fields, routed[0].out_features)
    hidden, bias = fields.get_count("hidden_size"), fields.get_family_flag(family.mlp_bias)
    return (*routed, *_make_gated_mlp(hidden, shared, bias=bias))


def _check_expert_groups(fields: ConfigFields, num_experts: int) -> None:
    """Raise `ModelError` if experts cannot be chosen by the configuration's `topk_method`."""
    method = fields.get_text("topk_method", default="greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise make_config_error("topk_method", method, "greedy and group_limited_greedy are accepted")
    if method == "greedy":
        return
    groups, chosen = fields.get_count("n_group"), fields.get_count("topk_group")
    if num_experts % groups:
        raise make_config_error("n_group", groups, f"a divisor of {num_experts} experts is accepted")
    if chosen > groups:
        raise make_config_error("topk_group", chosen, f"1..{groups} is accepted")


def _read_rotated_layers(fields: ConfigFields, num_layers: int) -> list[bool]:
    """Return whether each layer has RoPE. Raises `ModelError` if the list is too short."""
    named = fields.get_sequence("no_rope_layers")
    if named is None:
        interval = fields.get_count("no_rope_layer_interval", default=4)
        return [(i + 1) % interval != 0 for i in range(num_layers)]
    if len(named) < num_layers:
        raise ModelError(
            f"config.json has {len(named)} no_rope_layers for {num_layers} layers; an entry for each is accepted",
            field="no_rope_layers",
            value=len(named),
        )
    return [bool(entry) for entry in named[:num_layers]]


def _read_windows(family: Family, fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """Return the sliding window of each layer in tokens; None: no window."""
    windows = family.windows
    if windows is None or (windows.is_switchable and not fields.get_flag("use_sliding_window")):
        return (None,) * num_layers
    window = fields.get_optional_count("sliding_window") if fields.has_key("sliding_window") else windows.default
    if window == 1:
        raise make_config_error("sliding_window", 1, "2 or more is accepted")
    types = fields.get_sequence("layer_types") if windows.has_layer_types else None
    if window is None and windows.full_interval is not None and (types is None or "sliding_attention" in types):
        raise ModelError(
            "config.json has sliding_window null, but sliding-window layers; a number is accepted",
            field="sliding_window",
            value=None,
        )
    if not windows.has_layer_types or window is None:
        return (window,) * num_layers
    if types is None and family.has_layers_without_rope:
        return tuple(None if rotates else window for rotates in _read_rotated_layers(fields, num_layers))
    if types is None and windows.full_interval is not None:
        every = fields.get_count("sliding_window_pattern", default=windows.full_interval)
        return tuple(None if (i + 1) % every == 0 else window for i in range(num_layers))
    if types is None:
        named = fields.get_optional_count("max_window_layers", minimum=0) if windows.is_switchable else 0
        first = 28 if named is None else named
        return tuple(window if i >= first else None for i in range(num_layers))
    if len(types) != num_layers:
        raise ModelError(
            f"config.json has {len(types)} layer_types for {num_layers} layers", field="layer_types", value=len(types)
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _read_student_shape(fields: ConfigFields, num_layers: int) -> StudentShape | None:
    """Return the shape in a student's configuration; None for a teacher's. Raises `ModelError` with the key."""
    read: dict[Any, Callable[[str], Any]] = {
        bool: fields.get_flag,
        str: fields.get_text,
        list[int] | None: fields.get_sequence,
    }
    given: dict[str, Any] = {}
    for name, (kind, default) in StudentShape.get_config_fields().items():
        if fields.has_key(name):
            minimum = 0 if default == 0 else 1
            given[name] = read[kind](name) if kind in read else fields.get_optional_count(name, minimum=minimum)
    if not given:
        return None
    try:
        return LayerMap(num_layers, StudentShape.from_config({"num_hidden_layers": num_layers} | given)).shape
    except InvalidInputError as error:
        raise ModelError(error.message, field=error.field, value=error.value) from error


_ATTENTION_READERS: Mapping[str, Callable[[Family, ConfigFields, int | None], AttentionShape]] = {
    "head": _read_head_attention,
    "latent": _read_latent_attention,
}
_FEED_FORWARD_READERS: Mapping[str, Callable[[Family, ConfigFields, int], tuple[LinearShape, ...]]] = {
    "gated": _read_gated_mlp,
    "gated_gelu": _read_gated_mlp,
    "mixtral": _read_mixtral_mlp,
    "qwen3_moe": _read_qwen3_moe_mlp,
    "deepseek_v2": _read_deepseek_mlp,
}


def read_architecture(source: ConfigSource, shape: StudentShape | None = None) -> Architecture:
    """Read the decoder of a teacher's or student's `config.json` (path, directory or content). `shape` overrides the
    configuration's. Raises `ModelError` for a missing file, an unknown family, or a missing or invalid key."""
    config = read_config(source)
    family = find_family(config)
    check_config_values(config)
    fields = ConfigFields(config)
    num_layers = fields.get_count("num_hidden_layers", maximum=_MAX_LAYERS)
    windows = _read_windows(family, fields, num_layers)
    if family.has_layers_without_rope:
        _read_rotated_layers(fields, num_layers)  # refused here, before transformers reaches the end of the list
    attention, feed_forward = _ATTENTION_READERS[family.attention], _FEED_FORWARD_READERS[family.feed_forward]
    own = attention(family, fields, None)
    student = _read_student_shape(fields, num_layers) if shape is None else shape
    shared_heads = None if student is None else student.num_key_value_heads_swiftkv
    family.check_head_sharing(shared_heads, "num_key_value_heads_swiftkv")
    return Architecture(
        model_type=family.model_type,
        hidden_size=fields.get_count("hidden_size"),
        vocab_size=fields.get_count("vocab_size"),
        tie_word_embeddings=fields.get_flag("tie_word_embeddings", default=family.tie_word_embeddings),
        layers=tuple(Layer(own, feed_forward(family, fields, i), windows[i]) for i in range(num_layers)),
        has_input_norm=family.has_input_norm,
        num_norms=4 if family.norms == "both" else 2,
        shared_attention=attention(family, fields, shared_heads),
        max_position_embeddings=fields.get_count("max_position_embeddings", default=family.max_position_embeddings),
        dtype=fields.get_text("dtype", "torch_dtype", default="bfloat16"),
        student=student,
    )


@dataclass(frozen=True)
class ParameterCounts:
    """Parameter counts of a student. Tied embeddings count once."""

    frozen: int
    """Frozen parameters, including the teacher's copies of trained layers."""
    trained: int
    root: int
    """Parameters outside the layers: embeddings, heads, norms."""
    largest_layer: int
    """Parameters of the largest layer as FSDP gathers it, with the student's query and output projections but without
    its KV projections."""
    shared_key_value: int
    """Parameters of the KV projections that FSDP gathers together: of as many groups as fit into the size of a
    layer."""
    trained_of_layer: int
    """Trained parameters of the largest layer."""
    largest_tensor: int

    @property
    def total(self) -> int:
        return self.frozen + self.trained


def count_dense_parameters(model: Architecture) -> int:
    layers = sum(_count_layer_parameters(model, layer) for layer in model.layers)
    return layers + _count_embedding_parameters(model) + model.hidden_size


def count_student_parameters(model: Architecture, layer_map: LayerMap, trainable: Trainable = "qkv") -> ParameterCounts:
    """Count the parameters of a student during distillation, with its teacher's projections."""
    # 1. new tensors: query and output projections per layer, KV projections per group, norm, exit head
    hidden, vocabulary = model.hidden_size, model.vocab_size * model.hidden_size
    upper = model.layers[layer_map.num_key_value_layers :]
    own = model.shared_attention
    of_output = layer_map.shape.own_output_projection * own.output_parameters
    own_of_layer = own.query_parameters + of_output
    twins = len(upper) * own_of_layer
    decode = bool(layer_map.deep_leaders) * own.decode_parameters
    key_value = len(layer_map.leaders) * (own.key_value_parameters + decode)
    projecting = len(layer_map.leaders) * own.decode_parameters  # of K and V that tokens share
    exit_head = layer_map.shape.has_exit_head * (vocabulary + hidden)
    norm = hidden * model.has_input_norm
    added = twins + key_value + norm + exit_head
    # 2. trained tensors: the new ones, with `kv` not all, with `tail` also the layers >= l, with `all` also those below
    total = count_dense_parameters(model) + added
    teacher_projections = sum(
        layer.attention.query_parameters + layer.attention.key_value_parameters + of_output for layer in upper
    )
    trained = projecting + norm + exit_head if trainable == "kv" else added
    if trainable in TRAINABLE_LAYERS:
        tail = sum(_count_layer_parameters(model, layer) for layer in upper)
        # Layers after their group's first one have no keys to normalize.
        idle_norms = upper[-1].attention.shared_key_norms * (len(upper) - len(layer_map.leaders))
        trained += tail - teacher_projections - idle_norms
        total += tail + twins + key_value  # the teacher's copies are whole layers with the student's projections
    if trainable == "all":
        lower = sum(_count_layer_parameters(model, layer) for layer in model.layers[: layer_map.num_key_value_layers])
        trained += lower
        total += lower
    # 3. largest units that FSDP gathers
    first = layer_map.num_key_value_layers
    own_of_layer += decode  # upper bound: any kind of layer may be a leader
    largest = max(
        _count_layer_parameters(model, layer) + (i >= first) * own_of_layer for i, layer in enumerate(model.layers)
    )
    projecting = own.decode_parameters + own.key_norms
    runs = split_by_size([projecting] * len(layer_map.leaders), largest)
    return ParameterCounts(
        frozen=total - trained,
        trained=trained,
        root=_count_embedding_parameters(model) + hidden + norm + exit_head,
        largest_layer=largest,
        shared_key_value=projecting * max((run.stop - run.start for run in runs), default=0),
        trained_of_layer=largest if trainable in TRAINABLE_LAYERS else own_of_layer,
        largest_tensor=max(vocabulary, *(m.in_features * m.out_features * m.copies for m in upper[-1].mlp)),
    )


def _count_embedding_parameters(model: Architecture) -> int:
    return (1 if model.tie_word_embeddings else 2) * model.vocab_size * model.hidden_size


def _count_layer_parameters(model: Architecture, layer: Layer) -> int:
    """Count the parameters of a teacher's layer."""
    attention = layer.attention
    norms = attention.shared_query_norms + attention.shared_key_norms
    projections = attention.query_parameters + attention.key_value_parameters + norms
    maps = attention.output_parameters + sum(linear.parameters for linear in layer.mlp)
    return projections + maps + model.num_norms * model.hidden_size


def count_served_parameters(model: Architecture, layer_map: LayerMap) -> tuple[int, int]:
    """Count the parameters in the layers, and outside them, of a student without its teacher's projections; of the
    teacher with a dense map."""
    first, hidden = layer_map.num_key_value_layers, model.hidden_size
    layers = sum(_count_layer_parameters(model, layer) for layer in model.layers)
    for i, layer in enumerate(model.layers[first:], start=first):
        layers -= layer.attention.query_parameters + layer.attention.key_value_parameters
        layers += model.shared_attention.query_parameters
        own = model.shared_attention
        layers += (i in layer_map.leaders) * own.key_value_parameters
        layers += (i in layer_map.deep_leaders) * own.decode_parameters
    return layers, _count_embedding_parameters(model) + hidden * (
        1 + (model.has_input_norm and bool(layer_map.leaders))
    )


def split_by_size(sizes: Sequence[int], limit: int) -> list[slice]:
    """Split a sequence into the fewest slices with sums of at most `limit`; a larger item is a slice by itself.

    With a layer's size as the limit, it decides which groups FSDP shards and gathers together.
    """
    runs, begin, total = [], 0, 0
    for i, size in enumerate(sizes):
        if i > begin and total + size > limit:
            runs.append(slice(begin, i))
            begin, total = i, 0
        total += size
    return [*runs, slice(begin, len(sizes))] if sizes else []
