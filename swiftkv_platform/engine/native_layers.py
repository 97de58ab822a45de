"""Modules on the native kernels that replace a family's modules, for one row of tokens on a CPU in bfloat16.

Consecutive layers of the usual structure run in one operator. Other layers consist of `Native` modules. Knows no
request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from swiftkv_platform.engine import kernels
from swiftkv_platform.engine.batch import DeepRowsWriter
from swiftkv_platform.engine.integer_weights import get_common_weights
from swiftkv_platform.engine.kernels import LayerOperands, packing
from swiftkv_platform.engine.kernels.packing import Arena
from swiftkv_platform.engine.kv_cache import PagedTensor
from swiftkv_platform.model.attention import HeadAttentionMixin, Rotation, rotate, split_heads
from swiftkv_platform.model.decoder import ScaledEmbedding
from swiftkv_platform.model.deep_tokens import DeepGroup
from swiftkv_platform.model.weights.quantization import IntegerWeight


def rotate_heads(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Apply RoPE as `model.attention.rotate`, with the kernel if the factors have the dtype of `x`."""
    size = rotation[0].shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rotate_heads(x[..., :size], rotation), x[..., size:]), dim=-1)
    return (kernels.rotate if rotation[0].dtype == x.dtype else rotate)(x, rotation)


class NativeLinear(nn.Module):
    """y = x W^T + b."""

    def __init__(self, weight: torch.Tensor | IntegerWeight, bias: torch.Tensor | None, arena: Arena) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = packing.pack_weight(weight).move_into(arena)
        self.bias = None if bias is None else packing.pad_to_block(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return kernels.linear(x, self.weight, self.bias, self.out_features)

    def project_normalized(self, x: torch.Tensor, norm: NativeRMSNorm) -> torch.Tensor:
        """Project norm(x): [num_tokens, in_features] -> [num_tokens, out_features]."""
        return kernels.linear_with_norm(x, self.weight, self.bias, self.out_features, norm=norm)


class NativeHead(NativeLinear):
    """A language model's head, with logits in float32, not rounded to bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]."""
        return kernels.compute_logits(x, self.weight, self.bias, self.out_features)


class NativeEmbedding(nn.Module):
    """Embedding that reads a tied head's packed weight, so that the weight exists once."""

    def __init__(self, embedding: nn.Embedding, head: NativeHead) -> None:
        super().__init__()
        self.weight = nn.Parameter(head.weight.values, requires_grad=False)
        self._scaled = embedding.scale_embeddings if isinstance(embedding, ScaledEmbedding) else None

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[...] -> [..., hidden_size]."""
        pairs = self.weight.view(torch.int32).squeeze(-1)  # two bfloat16 numbers at once take a quarter of the time
        embedded = pairs[input_ids // packing.BLOCK_COLUMNS, :, input_ids % packing.BLOCK_COLUMNS].view(
            self.weight.dtype
        )
        return embedded if self._scaled is None else self._scaled(embedded)


class NativeRMSNorm(nn.Module):
    """The families' RMSNorm."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = packing.pad_to_block(norm.weight)
        self.variance_epsilon = norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> [..., size], computed in float32."""
        return kernels.rms_norm(x, self.weight, self.variance_epsilon)


class NativeMLP(nn.Module):
    """The families' gated MLP with SiLU; silu(gate) * up is one operator."""

    def __init__(self, mlp: Any, arena: Arena) -> None:
        super().__init__()
        fused = getattr(mlp, "gate_up_proj", None)
        separate = fused is None
        gate, up = (
            get_common_weights([mlp.gate_proj, mlp.up_proj]) if separate else get_common_weights([fused])[0].chunk(2)
        )
        self.gate_up = GatedLinear(gate, up, arena)
        self.down_proj = mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same."""
        y: torch.Tensor = self.down_proj(self.gate_up(x))
        return y


class GatedLinear(nn.Module):
    """silu(x G^T) * x U^T."""

    def __init__(self, gate: torch.Tensor | IntegerWeight, up: torch.Tensor | IntegerWeight, arena: Arena) -> None:
        super().__init__()
        self.size, self.in_features = gate.shape
        self.out_features = 2 * self.size  # gate and up
        self.weight = packing.pack_gated(gate, up).move_into(arena)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., intermediate_size]."""
        return kernels.gated_linear(x, self.weight, self.size)


class NativeAttention(nn.Module):
    """A family's multi-head attention, with the kernels' RoPE."""

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    qkv_proj: nn.Module
    o_proj: nn.Module
    q_norm: nn.Module | None
    k_norm: nn.Module | None

    def __init__(self, attention: Any) -> None:
        super().__init__()
        self._modules.update(attention._modules)
        self.config, self.layer_idx = attention.config, attention.layer_idx
        self.head_dim, self.scaling = attention.head_dim, attention.scaling
        self.num_key_value_groups, self.is_causal = attention.num_key_value_groups, True
        self.sliding_window = getattr(attention, "sliding_window", getattr(self.config, "sliding_window", None))
        self.q_norm, self.k_norm = (attention._modules.get(name) for name in ("q_norm", "k_norm"))
        self.has_joint_head_norm = self.config.family.query_key_norms == "all heads"
        self.rotates = getattr(attention, "use_rope", True)

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotation,
        attention_mask: torch.Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend as the family's module. Returns [1, num_tokens, hidden_size], and weights if the backend has them."""
        query, key, value = (
            split_heads(part, self.head_dim, norm, over_all_heads=self.has_joint_head_norm)
            for part, norm in zip(self._project(hidden_states), (self.q_norm, self.k_norm, None), strict=True)
        )
        if self.rotates:
            query, key = rotate_heads(query, position_embeddings), rotate_heads(key, position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(
            self, query, key, value, attention_mask, scaling=self.scaling, sliding_window=self.sliding_window, **kwargs
        )
        return self.o_proj(output.flatten(-2)), weights

    def _project(self, hidden_states: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return queries, keys and values of all heads, each [1, num_tokens, num_heads * head_dim]."""
        if not hasattr(self, "qkv_proj"):
            return [projection(hidden_states) for projection in (self.q_proj, self.k_proj, self.v_proj)]
        heads = (self.config.num_attention_heads, *[self.config.num_key_value_heads] * 2)
        parts: Sequence[torch.Tensor] = self.qkv_proj(hidden_states).split([n * self.head_dim for n in heads], dim=-1)
        return parts


class SharedKeyValueWriter:
    """Writes K and V of all groups from x with one operator. One operator per group would take 1/15 of a student's
    prefill time."""

    def __init__(self, decoder: Any, leaders: Sequence[HeadAttentionMixin], linear: NativeLinear) -> None:
        self._rotations, self._leaders = decoder.layer_rotations, decoder.layer_map.leaders
        self._first = decoder.layer_map.num_key_value_layers
        self._linear, self._norm = linear, decoder.norm_swiftkv
        self._head_norms = [leader.k_norm for leader in leaders if isinstance(leader.k_norm, NativeRMSNorm)]
        self._rotates = leaders[0].rotates

    @classmethod
    def from_decoder(cls, decoder: Any) -> Self | None:
        """Return the writer; None if the groups' projections are not one native product, or their heads differ in
        kind."""
        leaders = [decoder.layers[i].self_attn for i in decoder.layer_map.leaders]
        if not leaders or not isinstance(decoder.norm_swiftkv, NativeRMSNorm):
            return None
        if any(not isinstance(leader, HeadAttentionMixin) or leader.has_joint_head_norm for leader in leaders):
            return None
        kinds = {(type(leader.k_norm), leader.rotates) for leader in leaders}
        norm, _ = next(iter(kinds))
        linear = getattr(getattr(leaders[0].k_proj_swiftkv, "fused", None), "linear", None)
        if len(kinds) > 1 or not issubclass(norm, NativeRMSNorm | nn.Identity | None):
            return None
        return cls(decoder, leaders, linear) if isinstance(linear, NativeLinear) else None

    def try_write(self, x: torch.Tensor, rotation: Rotation, cache: Any) -> bool:
        """Compute K and V from x [1, num_tokens, hidden_size] and write them to the slots of a `StepCache`. Returns
        False, without writing, if the operator does not support the cache or the rotation."""
        rotations = [self._rotations.select(i, rotation) for i in self._leaders] if self._rotates else []
        layers = [cache.read(self._first + group) for group in range(len(self._leaders))]
        keys = layers[0][0]
        if not (isinstance(keys, PagedTensor) and keys.uses_kernels):
            return False
        if any(one[0] is not rotations[0][0] or one[0].dtype != x.dtype for one in rotations):
            return False
        kernels.write_projected(
            self._linear.project_normalized(x[0], self._norm),
            cache.slots,
            [(keys.rows, values.rows) for keys, values in layers],
            norms=self._head_norms,
            rotation=rotations[0] if rotations else None,
            quantized_dtype=keys.quantized_dtype,
        )
        return True


def get_output_projection(attention: Any) -> Any:
    student = isinstance(attention, HeadAttentionMixin)
    return attention.output_projection if student else attention.o_proj


@dataclass(frozen=True)
class _QKVProjection:
    """The product that computes a layer's queries, keys and values, and their offsets in its output."""

    linear: NativeLinear
    query_offset: int
    key_offset: int = -1
    """Offset of the keys in the output, followed by the values; -1: the layer reads another layer's K and V."""

    @classmethod
    def from_attention(cls, attention: Any) -> Self | None:
        """Return the product; None if queries, keys and values are not one native product."""
        if isinstance(attention, NativeAttention):
            if isinstance(linear := getattr(attention, "qkv_proj", None), NativeLinear):
                return cls(linear, 0, attention.config.num_attention_heads * attention.head_dim)
            names, query, key = ("q_proj", "k_proj", "v_proj"), 0, 1
        elif isinstance(linear := attention.q_proj_swiftkv, NativeLinear):
            return cls(linear, 0)
        else:
            names, query, key = ("k_proj_decode_swiftkv", "v_proj_decode_swiftkv", "q_proj_swiftkv"), 2, 0
        parts = [getattr(attention, name, None) for name in names]
        fused = getattr(parts[0], "fused", None)
        if not isinstance(linear := getattr(fused, "linear", None), NativeLinear):
            return None
        assert fused is not None
        assert all(getattr(part, "fused", None) is fused for part in parts), (
            "queries, keys and values are parts of different products"
        )
        first = [sum(fused.sizes[:at]) for at in range(len(fused.sizes))]
        return cls(linear, first[query], first[key])


@dataclass(frozen=True)
class LayerKeyValues:
    """K and V that a layer attends to, and where it writes."""

    keys: PagedTensor
    values: PagedTensor
    slots: torch.Tensor | None
    """Slots that the layer writes to, int64 [num_tokens]; None: they are already written."""


class NativeLayer(nn.Module):
    """A layer in one operator: y = x + attention(norm(x)), then y + MLP(norm(y)).

    Passes without the engine's cache use the family's layer.
    """

    family_layer: Any
    operands: LayerOperands
    rotates: bool

    def __init__(self, layer: Any, heads: _QKVProjection) -> None:
        super().__init__()
        self._modules.update(layer._modules)
        attention, mlp = layer.self_attn, layer.mlp
        output, norms = get_output_projection(attention), (layer.input_layernorm, layer.post_attention_layernorm)
        of_heads = [norm if isinstance(norm, NativeRMSNorm) else None for norm in (attention.q_norm, attention.k_norm)]
        window = getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None))
        weights: list[torch.Tensor | None] = []
        for product in (heads.linear, output, mlp.gate_up, mlp.down_proj):
            weights += [*product.weight, getattr(product, "bias", None)]
        weights += [None if norm is None else norm.weight for norm in (*norms, *of_heads)]
        operands = LayerOperands(
            weights,
            [
                *(heads.linear.out_features, output.out_features, mlp.gate_up.size, mlp.down_proj.out_features),
                *(output.in_features // attention.head_dim, heads.query_offset, heads.key_offset),
                kernels.NO_WINDOW if window is None else window,
            ],
            [*(0.0 if norm is None else norm.variance_epsilon for norm in (*norms, of_heads[0])), attention.scaling],
        )
        # Plain attributes: `nn.Module.__getattr__` is slow.
        self.__dict__.update(
            family_layer=layer,
            operands=operands,
            rotates=attention.rotates,
            _index=attention.layer_idx,
            _reads_shared=isinstance(attention, HeadAttentionMixin),
            _has_keys=heads.key_offset >= 0,
        )

    @classmethod
    def from_layer(cls, layer: Any) -> Self | None:
        """Return the native layer; None if the layer has another structure."""
        attention, mlp = layer.self_attn, getattr(layer, "mlp", None)
        if not isinstance(attention, NativeAttention | HeadAttentionMixin) or attention.has_joint_head_norm:
            return None
        family, config = attention.config.family, attention.config
        if family.norms != "before" or family.get_multiplier(config, "residual_multiplier") != 1.0:
            return None
        if not (isinstance(mlp, NativeMLP) and isinstance(mlp.down_proj, NativeLinear)):
            return None
        if not isinstance(get_output_projection(attention), NativeLinear):
            return None  # a rank computes only its part of the sum
        if not all(
            isinstance(norm, NativeRMSNorm | nn.Identity | None) for norm in (attention.q_norm, attention.k_norm)
        ):
            return None
        heads = _QKVProjection.from_attention(attention)
        return None if heads is None else cls(layer, heads)

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """[1, num_tokens, hidden_size] -> the same. `arguments`: arguments of a decoder layer."""
        paged, rotation = arguments.get("paged"), arguments["position_embeddings"]
        stored = None
        if paged is not None and rotation[0].dtype == hidden_states.dtype:
            stored = self.find_key_values(arguments["past_key_values"], arguments.get("shared_key_value"))
        if stored is None:
            output: torch.Tensor = self.family_layer(hidden_states, **arguments)
            return output
        return _run_layers(self.operands, hidden_states, [stored], rotation if self.rotates else (None, None), paged)

    def find_key_values(self, cache: Any, shared: Any) -> LayerKeyValues | None:
        """Return the K and V that the layer attends to, from the step's `cache` or `shared` K and V of its group. None:
        the kernels do not support them."""
        slots = None
        if shared is None and self._reads_shared:
            return None  # the teacher's layer
        if shared is None:
            key_value, slots = cache.read(self._index), cache.slots
        elif not isinstance(shared, DeepGroup):
            key_value = shared
        elif not self._has_keys:
            key_value = shared.key_value
        elif isinstance(shared.writer, DeepRowsWriter) and shared.writer.deep_indices is None:
            key_value, slots = shared.writer.get_write_target(shared.group)
            shared.key_value = key_value
        else:
            return None
        keys, values = key_value
        return LayerKeyValues(keys, values, slots) if isinstance(keys, PagedTensor) and keys.uses_kernels else None


class NativeLayers:
    """Runs consecutive layers in one operator. In a decode step, Python between layers would take 10% of the time or
    more."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._operands: dict[range, LayerOperands | None] = {}

    def __call__(
        self, decoder: Any, layer_indices: range, hidden: torch.Tensor, context: Any, shared: Sequence[Any] | None
    ) -> torch.Tensor | None:
        """Run layers over hidden [1, num_tokens, hidden_size]. None: these layers cannot run in one operator."""
        if layer_indices not in self._operands:
            self._operands[layer_indices] = self._join_operands(layer_indices)
        operands, paged = self._operands[layer_indices], context.layer_arguments.get("paged")
        if operands is None or paged is None:
            return None
        stored: list[LayerKeyValues] = []
        rotations: list[torch.Tensor | None] = []
        for i, key_value in zip(layer_indices, [None] * len(layer_indices) if shared is None else shared, strict=True):
            layer = self._layers[i]
            found = layer.find_key_values(context.past_key_values, key_value)
            rotation = decoder.select_rotation(i, context, shared=key_value is not None)
            if found is None or rotation[0].dtype != hidden.dtype:
                return None
            stored.append(found)
            rotations += rotation if layer.rotates else (None, None)
        return _run_layers(operands, hidden, stored, rotations, paged)

    def _join_operands(self, layer_indices: range) -> LayerOperands | None:
        """Concatenate the layers' operands; None if some layer has another structure."""
        layers = [self._layers[i] for i in layer_indices]
        if not layers or not all(isinstance(layer, NativeLayer) for layer in layers):
            return None
        return LayerOperands(*([one for layer in layers for one in layer.operands[at]] for at in range(3)))


def _run_layers(
    operands: LayerOperands,
    hidden: torch.Tensor,
    stored: Sequence[LayerKeyValues],
    rotations: Sequence[Any],
    paged: Any,
) -> torch.Tensor:
    y = kernels.run_layers(
        hidden[0],
        operands,
        list(rotations),
        [one.slots for one in stored],
        [one.keys.rows for one in stored],
        [one.values.rows for one in stored],
        paged.kernel_tables,
        stored[0].keys.quantized_dtype,
    )
    return y[None]
