"""FLOPs of forward passes and bytes of KV caches in closed form, and SwiftKV's savings on one prompt (paper, table 1
and section 4). Imports no torch.

Two conventions:

- `executed`: what our forward pass runs. The embedding is a look-up. The head runs for positions whose logits are
  requested. Only these positions of a prompt run through layers >= l and through bypassed layers.
- `paper` (table 1): embedding and head count for every token, and no prompt token enters layers >= l.

Attention counts the pairs of query and key that the causal mask and the window allow, as in kernels that skip masked
blocks; `square` counts all pairs, as in plain matrix products. Norms, activations, RoPE and softmax are not counted, as
in the paper. `model.cache.count_cache_bytes` measures a real cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal, get_args

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.planning.architecture import Architecture, AttentionShape, LinearShape, read_architecture
from swiftkv_platform.planning.config import ConfigSource
from swiftkv_platform.student_shape import LayerMap, RequestedStudentShape, StudentShape, refuse_bypass_with_latents

KVCacheDtype = Literal["float32", "bfloat16", "float16", "fp8", "int8"]

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}
SCALE_BYTES = 2
"""Bytes of a scale. A quantized cache has one per token and head for keys, and one for values."""
QUANTIZED_CACHE_DTYPES = frozenset({"fp8", "int8"})


def check_kv_cache_dtype(name: str, *, field: str = "kv_cache_dtype") -> None:
    """Raise `InvalidInputError` with the accepted values for an unknown dtype."""
    if name not in DTYPE_BYTES:
        raise InvalidInputError.for_field(field, name, f"; {', '.join(get_args(KVCacheDtype))} are accepted")


def compute_kv_bytes(
    model: Architecture, layer_map: LayerMap, sequence_length: int, kv_cache_dtype: str
) -> tuple[int, int]:
    """Return the payload bytes and the scale bytes of the cache after `sequence_length` tokens of one sequence.

    A cache layer with a window keeps the tokens that the next token attends to. A group keeps its layers' longest
    window.
    """
    payload = scales = 0
    for attention, window in list_cache_layers(model, layer_map):
        num_tokens = sequence_length if window is None else min(sequence_length, window - 1)
        for entry in attention.entries:
            payload += num_tokens * entry.heads * entry.size * DTYPE_BYTES[kv_cache_dtype]
            scales += num_tokens * entry.heads * SCALE_BYTES * (kv_cache_dtype in QUANTIZED_CACHE_DTYPES)
    return payload, scales


def list_cache_layers(model: Architecture, layer_map: LayerMap) -> list[tuple[AttentionShape, int | None]]:
    """Return the attention and the window of each cache layer."""
    first = layer_map.num_key_value_layers
    layers = [(layer.attention, layer.window) for layer in model.layers[:first]]
    for leader in layer_map.leaders:
        windows = [model.layers[i].window for i in layer_map.get_group(leader)]
        longest = None if None in windows else max(window for window in windows if window is not None)
        layers.append((model.shared_attention, longest))
    return layers


Convention = Literal["paper", "executed"]


@dataclass(frozen=True)
class Flops:
    """FLOPs of a forward pass, summed over its tokens."""

    vocabulary: float = 0
    query: float = 0
    key_value: float = 0
    """Keys and values; for MLA the latent and its expansion at attention time."""
    output: float = 0
    mlp: float = 0
    """MLP, or the router and active experts of a mixture of experts."""
    attention: float = 0

    def __add__(self, other: Flops) -> Flops:
        return Flops(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __truediv__(self, divisor: float) -> Flops:
        return Flops(*(value / divisor for value in astuple(self)))

    @property
    def total(self) -> float:
        total: float = sum(astuple(self))
        return total


def count_forward_flops(
    model: Architecture,
    layer_map: LayerMap,
    *,
    num_tokens: int,
    num_selected: int,
    num_logits: int,
    past: int = 0,
    square: bool = False,
) -> Flops:
    """Return the FLOPs of one forward pass of the student by the `executed` convention; of the teacher with a dense
    map.

    Args:
        num_tokens: new tokens of one sequence.
        num_selected: number of last tokens that run through layers >= l and through bypassed layers.
        num_logits: positions whose logits are computed.
        past: cached tokens.
        square: count attention over all cached keys, as in plain matrix products.
    """
    total = Flops(vocabulary=num_logits * LinearShape(model.hidden_size, model.vocab_size).flops)
    leaders, bypassed_layers = frozenset(layer_map.leaders), frozenset(layer_map.bypassed_layers)
    cache = list_cache_layers(model, layer_map)
    for i, layer in enumerate(model.layers):
        upper = i >= layer_map.num_key_value_layers
        attention, cache_window = cache[layer_map.get_cache_layer(i)]
        num_queries = num_selected if upper or i in bypassed_layers else num_tokens
        # pairs of query and key
        if square:
            cached = past if cache_window is None else min(past, cache_window - 1)
            pairs = num_queries * (cached + num_tokens)
        else:
            pairs = count_attention_pairs(num_queries, past + num_tokens - num_queries, layer.window)
        # K and V of all new tokens, once per group; MLA expands the whole context
        computes_kv = not upper or i in leaders
        num_attended = past + num_tokens if num_queries else 0
        total += Flops(
            query=num_queries * sum_linear_flops(attention.query),
            key_value=computes_kv
            * (
                num_tokens * sum_linear_flops(attention.key_value)
                + num_attended * sum_linear_flops(attention.expansion)
            ),
            output=num_queries * sum_linear_flops(attention.output),
            mlp=num_queries * sum_linear_flops(layer.mlp),
            attention=pairs * attention.flops_per_pair,
        )
    return total


def count_prefill_flops(
    model: Architecture, layer_map: LayerMap, sequence_length: int, convention: Convention, *, square: bool = False
) -> Flops:
    """Return the FLOPs of a whole prompt, up to the logits of its last token. The paper does not count the last token's
    pass through layers >= l."""
    num_deep = min(layer_map.deep_tail or 1, sequence_length)
    if convention == "executed":
        return count_forward_flops(
            model, layer_map, num_tokens=sequence_length, num_selected=num_deep, num_logits=1, square=square
        )
    layers = count_forward_flops(
        model, layer_map, num_tokens=sequence_length, num_selected=num_deep - 1, num_logits=0, square=square
    )
    embedding_and_head = 2 * LinearShape(model.hidden_size, model.vocab_size).flops
    return layers + Flops(vocabulary=sequence_length * embedding_and_head)


def count_attention_pairs(num_queries: int, past: int, window: int | None) -> int:
    """Count the pairs of query and key for `num_queries` tokens after `past`: sum over t = 1..num_queries of min(past +
    t, window)."""
    window = window or past + num_queries
    num_unlimited = min(max(window - past, 0), num_queries)  # queries with fewer keys than the window
    return num_unlimited * past + num_unlimited * (num_unlimited + 1) // 2 + (num_queries - num_unlimited) * window


def sum_linear_flops(maps: tuple[LinearShape, ...]) -> int:
    return sum(linear.flops for linear in maps)


class Components(FrozenBaseModel):
    """FLOPs per token by component."""

    vocabulary: float
    """Embedding and head."""
    query: float
    key_value: float
    output: float
    mlp: float
    attention: float
    total: float

    @classmethod
    def from_flops(cls, flops: Flops) -> Components:
        return cls(**vars(flops), total=flops.total)


class PrefillComparison(FrozenBaseModel):
    """FLOPs per token of teacher and student."""

    dense: Components
    swiftkv: Components

    @property
    def ratio(self) -> float:
        return self.swiftkv.total / self.dense.total


class Plan(FrozenBaseModel):
    """Cost of a student against its teacher on a prompt of `sequence_length` tokens."""

    model_type: str
    num_hidden_layers: int
    num_key_value_layers: int
    prefill_layers: tuple[int, ...]
    """Layers that skipped prompt tokens run through, e.g. (0, 1, 3): those below l that they do not bypass."""
    key_value_group_size: int
    num_kv_cache_layers: int
    sequence_length: int
    kv_cache_dtype: str
    prefill_flops_ratio: float
    """SwiftKV / dense as the paper counts (table 1): embedding and head for every token."""
    executed_prefill_flops_ratio: float
    """SwiftKV / dense as executed: only the last token has logits, and only the deep tail enters layers >= l."""
    kv_bytes_per_token: float
    """Bytes of the student's cache per prompt token, including scales."""
    dense_kv_bytes_per_token: float
    """Bytes of the teacher's cache per token: in bfloat16 if the student's cache is quantized, else in its dtype."""
    kv_bytes_ratio: float
    """`kv_bytes_per_token` / `dense_kv_bytes_per_token`."""
    kv_payload_ratio: float
    """`kv_bytes_ratio` without scales, as the paper counts (62.5% and 68.75% saved with FP8)."""
    prefill: dict[Convention, PrefillComparison]
    """FLOPs per prompt token by convention."""
    decode: PrefillComparison
    """FLOPs of the token that follows the prompt, as executed."""


def plan(
    config: ConfigSource,
    *,
    num_key_value_layers: int | None = None,
    key_value_group_size: int | None = None,
    prefill_layers: Sequence[int] | None = None,
    sequence_length: int | None = None,
    kv_cache_dtype: str = "bfloat16",
    num_key_value_heads_swiftkv: int | None = None,
    deep_tail: int | None = None,
) -> Plan:
    """Compute FLOPs and KV bytes of a student from its teacher's `config.json`. Raises `InvalidInputError` if l, g, a
    length or a dtype is out of range, `ModelError` if the configuration cannot be read or its family is unknown.

    Args:
        config: path of a `config.json`, its directory, or its content; a teacher's or a student's.
        num_key_value_layers: l; default: the student configuration's, or half of the layers.
        key_value_group_size: g; default: the student configuration's, or 1.
        prefill_layers: layers that prompts run through, ascending, in place of l; default: as for l.
        sequence_length: tokens of the prompt; default: the model's context.
        kv_cache_dtype: float32, bfloat16, float16, fp8 or int8.
        num_key_value_heads_swiftkv: KV heads of the student's groups (appendix C); default: the configuration's.
        deep_tail: tokens at a prompt's end that run all layers; default: the student configuration's, or 1.
    """
    teacher = read_architecture(config)
    num_layers, shape = len(teacher.layers), teacher.student
    if num_key_value_layers == num_layers and key_value_group_size in (None, 1):
        shape = StudentShape.dense(num_layers)  # the teacher itself, the baseline of table 1
    elif (num_key_value_layers, prefill_layers, key_value_group_size) != (None, None, None):
        if shape is not None and num_key_value_layers is None and prefill_layers is None:
            num_key_value_layers, prefill_layers = shape.num_key_value_layers, shape.swiftkv_prefill_layers
        if key_value_group_size is None:
            key_value_group_size = 1 if shape is None else shape.key_value_group_size
        shape = RequestedStudentShape(
            num_key_value_layers=num_key_value_layers,
            key_value_group_size=key_value_group_size,
            prefill_layers=prefill_layers,
        ).resolve(num_layers)
    heads = num_key_value_heads_swiftkv or (teacher.student and teacher.student.num_key_value_heads_swiftkv)
    if heads is not None:
        shape = resolve_layer_map(teacher, shape).shape.model_copy(update={"num_key_value_heads_swiftkv": heads})
    if deep_tail is None and teacher.student is not None:
        deep_tail = teacher.student.swiftkv_deep_tail
    if deep_tail is not None and deep_tail > 1:
        tail = {"swiftkv_deep_tail": deep_tail, "swiftkv_decode_key_value": "own"}
        shape = resolve_layer_map(teacher, shape).shape.model_copy(update=tail)
    return plan_prefill(config, shape, sequence_length=sequence_length, kv_cache_dtype=kv_cache_dtype)


def plan_prefill(
    config: ConfigSource,
    shape: StudentShape | None,
    *,
    sequence_length: int | None = None,
    kv_cache_dtype: str = "bfloat16",
) -> Plan:
    """Return what `plan` returns for a student of this shape, see `resolve_layer_map`."""
    model = read_architecture(config, shape)
    layer_map = resolve_layer_map(model)
    sequence_length = model.max_position_embeddings if sequence_length is None else sequence_length
    if sequence_length < 1:
        raise InvalidInputError.for_field("sequence_length", sequence_length, "; 1 or more is accepted")
    check_kv_cache_dtype(kv_cache_dtype)
    dense_map = LayerMap.dense(len(model.layers))
    prefill: dict[Convention, PrefillComparison] = {}
    for convention in ("paper", "executed"):
        dense, swiftkv = (
            Components.from_flops(count_prefill_flops(model, layers, sequence_length, convention) / sequence_length)
            for layers in (dense_map, layer_map)
        )
        prefill[convention] = PrefillComparison(dense=dense, swiftkv=swiftkv)
    decode = {
        name: Components.from_flops(
            count_forward_flops(model, layers, num_tokens=1, num_selected=1, num_logits=1, past=sequence_length)
        )
        for name, layers in (("dense", dense_map), ("swiftkv", layer_map))
    }
    return Plan(
        model_type=model.model_type,
        num_hidden_layers=layer_map.num_hidden_layers,
        num_key_value_layers=layer_map.num_key_value_layers,
        prefill_layers=layer_map.prefill_layers,
        key_value_group_size=layer_map.key_value_group_size,
        num_kv_cache_layers=layer_map.num_kv_cache_layers,
        sequence_length=sequence_length,
        kv_cache_dtype=kv_cache_dtype,
        prefill_flops_ratio=prefill["paper"].ratio,
        executed_prefill_flops_ratio=prefill["executed"].ratio,
        prefill=prefill,
        decode=PrefillComparison(**decode),
        **_compare_kv_bytes(model, layer_map, sequence_length, kv_cache_dtype),
    )


def resolve_layer_map(model: Architecture, shape: StudentShape | None = None) -> LayerMap:
    """Return the layer map of `shape`; None: of the student in `model`, or of the default shape with l = L / 2. Raises
    `InvalidInputError` for a shape that does not fit the model."""
    num_layers = len(model.layers)
    layer_map = LayerMap(num_layers, shape or model.student or RequestedStudentShape().resolve(num_layers))
    if layer_map.bypassed_layers and model.shared_attention.expansion:
        refuse_bypass_with_latents(layer_map.prefill_layers, model.model_type)
    return layer_map


def _compare_kv_bytes(
    model: Architecture, layer_map: LayerMap, sequence_length: int, kv_cache_dtype: str
) -> dict[str, Any]:
    plain = "bfloat16" if kv_cache_dtype in QUANTIZED_CACHE_DTYPES else kv_cache_dtype
    dense = compute_kv_bytes(model, LayerMap.dense(len(model.layers)), sequence_length, plain)
    swiftkv = compute_kv_bytes(model, layer_map, sequence_length, kv_cache_dtype)
    return {
        "kv_bytes_per_token": sum(swiftkv) / sequence_length,
        "dense_kv_bytes_per_token": sum(dense) / sequence_length,
        "kv_bytes_ratio": sum(swiftkv) / sum(dense),
        "kv_payload_ratio": swiftkv[0] / dense[0],
    }
