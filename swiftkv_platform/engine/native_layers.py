"""Layers of a step on the engine's kernels, one after another in one operator. Knows no request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from swiftkv_platform.engine import kernels
from swiftkv_platform.engine.deep_rows import DeepRows
from swiftkv_platform.engine.kernels import LayerOperands
from swiftkv_platform.engine.kv_cache import PagedTensor
from swiftkv_platform.engine.native_modules import NativeAttention, NativeLinear, NativeMLP, NativeRMSNorm
from swiftkv_platform.model.attention import HeadAttentionMixin
from swiftkv_platform.model.deep_tokens import DeepGroup


def output_projection(attention: Any) -> Any:
    """Projection that a layer's heads leave through."""
    student = isinstance(attention, HeadAttentionMixin)
    return attention.output_projection if student else attention.o_proj


@dataclass(frozen=True)
class _Heads:
    """Where a layer's queries, keys and values come from: one product of its normalised input."""

    linear: NativeLinear
    query_at: int
    """First output that is a query's."""
    key_at: int = -1
    """First output that is a key's, which those of the values follow; -1: the layer reads another's."""

    @classmethod
    def of(cls, attention: Any) -> Self | None:
        """None: they are not one product of ours."""
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
        assert all(getattr(part, "fused", None) is fused for part in parts), "parts of one product"
        first = [sum(fused.sizes[:at]) for at in range(len(fused.sizes))]
        return cls(linear, first[query], first[key])


@dataclass(frozen=True)
class Stored:
    """The cache layer that a layer attends to."""

    keys: PagedTensor
    values: PagedTensor
    slots: torch.Tensor | None
    """Slots that the layer writes to, int64 [num_tokens]; None: keys and values are there."""


class NativeLayer(nn.Module):
    """A layer of a step: x + attention(norm(x)), then x + MLP(norm(x)).

    All but steps over the engine's own cache go through the family's layer.
    """

    family_layer: Any
    operands: LayerOperands
    rotates: bool

    def __init__(self, layer: Any, heads: _Heads) -> None:
        super().__init__()
        self._modules.update(layer._modules)
        attention, mlp = layer.self_attn, layer.mlp
        output, norms = output_projection(attention), (layer.input_layernorm, layer.post_attention_layernorm)
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
                *(output.in_features // attention.head_dim, heads.query_at, heads.key_at),
                kernels.NO_WINDOW if window is None else window,
            ],
            [*(0.0 if norm is None else norm.variance_epsilon for norm in (*norms, of_heads[0])), attention.scaling],
        )
        # Found without the detour that modules of modules take.
        self.__dict__.update(
            family_layer=layer,
            operands=operands,
            rotates=attention.rotates,
            _index=attention.layer_idx,
            _reads_shared=isinstance(attention, HeadAttentionMixin),
            _has_keys=heads.key_at >= 0,
        )

    @classmethod
    def of(cls, layer: Any) -> Self | None:
        """None: the layer is of another shape."""
        attention, mlp = layer.self_attn, getattr(layer, "mlp", None)
        if not isinstance(attention, NativeAttention | HeadAttentionMixin) or attention.normalises_all_heads:
            return None
        family, config = attention.config.family, attention.config
        if family.norms != "before" or family.multiplier(config, "residual_multiplier") != 1.0:
            return None
        if not (isinstance(mlp, NativeMLP) and isinstance(mlp.down_proj, NativeLinear)):
            return None
        if not isinstance(output_projection(attention), NativeLinear):
            return None  # its rank's part of a sum
        if not all(
            isinstance(norm, NativeRMSNorm | nn.Identity | None) for norm in (attention.q_norm, attention.k_norm)
        ):
            return None
        heads = _Heads.of(attention)
        return None if heads is None else cls(layer, heads)

    def forward(self, hidden_states: torch.Tensor, **arguments: Any) -> torch.Tensor:
        """[1, num_tokens, hidden_size] -> the same. `arguments`: a decoder layer's."""
        paged, rotation = arguments.get("paged"), arguments["position_embeddings"]
        stored = None
        if paged is not None and rotation[0].dtype == hidden_states.dtype:
            stored = self.stored(arguments["past_key_values"], arguments.get("shared_key_value"))
        if stored is None:
            output: torch.Tensor = self.family_layer(hidden_states, **arguments)
            return output
        return _run(self.operands, hidden_states, [stored], rotation if self.rotates else (None, None), paged)

    def stored(self, cache: Any, shared: Any) -> Stored | None:
        """The part of a step's `cache`, or `run_layer`'s `shared`, that the layer attends to; None: kernels cannot."""
        slots = None
        if shared is None and self._reads_shared:
            return None  # the teacher's layer
        if shared is None:
            key_value, slots = cache.read(self._index), cache.slots
        elif not isinstance(shared, DeepGroup):
            key_value = shared
        elif not self._has_keys:
            key_value = shared.key_value
        elif isinstance(shared.writer, DeepRows) and shared.writer.deep is None:
            key_value, slots = shared.writer.place(shared.group)
            shared.key_value = key_value
        else:
            return None
        keys, values = key_value
        return Stored(keys, values, slots) if isinstance(keys, PagedTensor) and keys.native else None


class NativeLayers:
    """Several layers of a step at once: what Python takes between those of a decode step is a tenth of it or more."""

    def __init__(self, layers: Sequence[Any]) -> None:
        self._layers = layers
        self._operands: dict[range, LayerOperands | None] = {}

    def __call__(
        self, decoder: Any, which: range, hidden: torch.Tensor, context: Any, shared: Sequence[Any] | None
    ) -> torch.Tensor | None:
        """`run_layers` over hidden [1, num_tokens, hidden_size]. None: these layers cannot run at once."""
        if which not in self._operands:
            self._operands[which] = self._joined(which)
        operands, paged = self._operands[which], context.layer_arguments.get("paged")
        if operands is None or paged is None:
            return None
        stored: list[Stored] = []
        rotations: list[torch.Tensor | None] = []
        for i, key_value in zip(which, [None] * len(which) if shared is None else shared, strict=True):
            layer = self._layers[i]
            found = layer.stored(context.past_key_values, key_value)
            rotation = decoder.rotation_of(i, context, shared=key_value is not None)
            if found is None or rotation[0].dtype != hidden.dtype:
                return None
            stored.append(found)
            rotations += rotation if layer.rotates else (None, None)
        return _run(operands, hidden, stored, rotations, paged)

    def _joined(self, which: range) -> LayerOperands | None:
        """None: some of the layers are of another shape."""
        layers = [self._layers[i] for i in which]
        if not layers or not all(isinstance(layer, NativeLayer) for layer in layers):
            return None
        return LayerOperands(*([one for layer in layers for one in layer.operands[at]] for at in range(3)))


def _run(
    operands: LayerOperands, hidden: torch.Tensor, stored: Sequence[Stored], rotations: Sequence[Any], paged: Any
) -> torch.Tensor:
    y = kernels.layers(
        hidden[0],
        operands,
        list(rotations),
        [one.slots for one in stored],
        [one.keys.rows for one in stored],
        [one.values.rows for one in stored],
        paged.tables,
        stored[0].keys.payload,
    )
    return y[None]
