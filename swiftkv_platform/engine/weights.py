"""Lays out weights for inference: projections of the same input become one matrix product. Knows no family and no
request.

The model's code stays unchanged: each projection is replaced by a part of a fused projection, which computes all parts
on the first part's call. Weights are also packed once for the native kernels, and the original weights are dropped.
`Native` modules replace a family's modules and use the native kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation

from swiftkv_platform.engine.integer_weights import get_common_weights, get_integer_weight
from swiftkv_platform.engine.kernels.packing import TENSOR_ALIGNMENT, Arena, SeparateArenas
from swiftkv_platform.engine.native_layers import (
    NativeAttention,
    NativeEmbedding,
    NativeHead,
    NativeLayer,
    NativeLayers,
    NativeLinear,
    NativeMLP,
    NativeRMSNorm,
    SharedKeyValueWriter,
    rotate_heads,
)
from swiftkv_platform.model.attention import HeadAttentionMixin
from swiftkv_platform.model.weights.quantization import IntegerWeight

FUSED_PROJECTIONS = (
    ("q_proj", "k_proj", "v_proj"),
    ("q_proj", "kv_a_proj_with_mqa"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("gate_proj", "up_proj"),
    ("k_proj_decode_swiftkv", "v_proj_decode_swiftkv", "q_proj_swiftkv"),
    ("kv_a_proj_with_mqa_decode_swiftkv", "q_proj_swiftkv"),
    ("kv_a_proj_with_mqa_decode_swiftkv", "q_a_proj_swiftkv"),
)
"""Names of linear modules of one parent that read the same input, in the order of their calls."""
SILU_CLASSES = (nn.SiLU, SiLUActivation)
PACKING_OVERHEAD = 1 << 14
"""Max bytes by which a packed weight exceeds its parameter: padding to a whole block, scales, alignment."""


MakeLinear = Callable[[Any, torch.Tensor | None], nn.Module]


def fuse_weights(model: Any, *, native: bool = False, is_adapter: bool = False) -> None:
    """Fuse and pack the weights of one of this project's causal language models, in place. Projections that only the
    teacher uses are dropped.

    Args:
        native: pack for the native kernels.
        is_adapter: the model shares weights with others, so each packed weight gets memory that is freed with it.
    """
    # 1. drop unused weights, and pack MLPs and heads for the kernels
    decoder = model.model
    drop_teacher_projections(decoder)
    arena = _make_arena(model, is_adapter=is_adapter) if native else None
    make_linear: MakeLinear = _FloatLinear if arena is None else partial(NativeLinear, arena=arena)
    if arena is not None:
        _replace_modules(model, _is_gated_mlp, lambda mlp: NativeMLP(mlp, arena))
        _pack_heads(model, arena)
    # 2. fuse K and V projections of all groups, then the projections of each module
    leaders = [decoder.layers[i].self_attn for i in decoder.layer_map.leaders]
    shared = [projection for leader in leaders for projection in leader.input_projections]
    if shared:
        _fuse_projections(decoder, shared, make_linear)
    for module in list(decoder.modules()):
        for siblings in _find_fusable(module):
            _fuse_projections(module, siblings, make_linear)
    # 3. replace norms, and pack the other projections
    _replace_norms(model)
    if arena is not None:
        embedding = decoder.embed_tokens.weight
        _replace_modules(
            model,
            lambda child: (
                type(child) is nn.Linear and not (child.weight is embedding and get_integer_weight(child) is None)
            ),
            lambda linear: NativeLinear(get_common_weights([linear])[0], linear.bias, arena),
        )


def _make_arena(model: Any, *, is_adapter: bool) -> Arena:
    if is_adapter:
        return SeparateArenas()
    return Arena(sum(parameter.nbytes + PACKING_OVERHEAD for parameter in model.parameters()))


def align_weights(model: nn.Module) -> None:
    """Copy unaligned weights of linear modules, as in a memory-mapped file, to aligned memory. On a CPU, products with
    unaligned weights are rounded differently, so outputs would depend on the layout of the weight files."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False) if isinstance(module, nn.Linear) else ():
            if parameter.device.type == "cpu" and parameter.data_ptr() % TENSOR_ALIGNMENT:
                parameter.data = parameter.data.clone()


def _pack_heads(model: Any, arena: Arena) -> None:
    """Pack the heads for the kernels. The embeddings of a tied head in floats are read from its packed weight."""
    embedding = model.model.embed_tokens
    for name in ("lm_head", "exit_head"):
        head = getattr(model, name, None)
        if type(head) is not nn.Linear:
            continue
        packed = NativeHead(get_common_weights([head])[0], head.bias, arena)
        if head.weight is embedding.weight and get_integer_weight(head) is None:
            model.model.embed_tokens = NativeEmbedding(embedding, packed)
        setattr(model, name, packed)


def _replace_modules(root: nn.Module, predicate: Callable[[Any], bool], make: Callable[[Any], nn.Module]) -> None:
    """Replace all modules below `root` for which `predicate` is True by `make(module)`."""
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if predicate(child):
                setattr(parent, name, make(child))


def _replace_norms(model: Any) -> None:
    norm_class, offset = type(model.model.norm), model.config.family.norm_offset
    _replace_modules(model, lambda child: type(child) is norm_class, lambda norm: _RMSNorm(norm, offset))


def use_kernels(model: Any) -> None:
    """Use the native kernels for norms, RoPE and whole layers of a model that `kernels.supports_model`, in place."""
    if type(model.model.norm) is not _RMSNorm:
        _replace_norms(model)
    _replace_modules(model, lambda child: type(child) is _RMSNorm, NativeRMSNorm)
    for layer in model.model.layers:
        attention = layer.self_attn
        if isinstance(attention, HeadAttentionMixin):
            attention.rotate = rotate_heads
        elif all(hasattr(attention, name) for name in ("q_proj", "k_proj", "v_proj")) or hasattr(attention, "qkv_proj"):
            layer.self_attn = NativeAttention(attention)
    layers = model.model.layers
    for i, layer in enumerate(layers):
        layers[i] = NativeLayer.from_layer(layer) or layer
    model.model.fused_layers = NativeLayers(layers)
    model.model.shared_writer = SharedKeyValueWriter.from_decoder(model.model)


def _is_gated_mlp(module: nn.Module) -> bool:
    children = dict(module.named_children())
    for inner, activation in ((("gate_proj", "up_proj"), "act_fn"), (("gate_up_proj",), "activation_fn")):
        if set(children) == {*inner, "down_proj", activation} and isinstance(children[activation], SILU_CLASSES):
            return all(type(children[name]) is nn.Linear and children[name].bias is None for name in inner)
    return False


def drop_teacher_projections(decoder: Any) -> None:
    """Drop the projections of layers >= l that only the teacher runs."""
    if decoder.config.swiftkv_teacher_weights:
        for i in range(decoder.layer_map.num_key_value_layers, len(decoder.layers)):
            decoder.layers[i].self_attn.drop_teacher()
        decoder.config.swiftkv_teacher_weights = False


def _find_fusable(module: nn.Module) -> Iterator[list[nn.Linear]]:
    for names in FUSED_PROJECTIONS:
        found = [getattr(module, name, None) for name in names]
        linear = [child for child in found if type(child) is nn.Linear]
        if len(linear) == len(names):
            yield linear


def _fuse_projections(root: nn.Module, projections: Sequence[nn.Linear], make_linear: MakeLinear) -> None:
    """Replace `projections`, modules below `root` with the same input, by parts of one fused projection."""
    weights: list[Any] = get_common_weights(projections)
    weight = IntegerWeight.cat(weights) if isinstance(weights[0], IntegerWeight) else torch.cat(weights)
    biases = [projection.bias.detach() for projection in projections if projection.bias is not None]
    assert len(biases) in (0, len(projections)), "some projections have a bias, others do not"
    fused = _FusedLinear(
        make_linear(weight, torch.cat(biases) if biases else None), [p.out_features for p in projections]
    )
    parts = {id(projection): FusedLinearPart(fused, at) for at, projection in enumerate(projections)}
    _replace_modules(root, lambda child: id(child) in parts, lambda child: parts[id(child)])


class _FloatLinear(nn.Module):
    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.weight = weight.detach()
        self.bias = None if bias is None else bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight, self.bias)


class _RMSNorm(nn.Module):
    """The families' RMSNorm in one operator. `offset`: number that a family's norms add to their weights."""

    def __init__(self, norm: Any, offset: int) -> None:
        super().__init__()
        self.weight = norm.weight.detach().float() + offset
        self.variance_epsilon = norm.eps if offset else norm.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.variance_epsilon).to(x.dtype)


class _FusedLinear:
    """A projection whose outputs several modules share."""

    def __init__(self, linear: nn.Module, sizes: list[int]) -> None:
        self.linear = linear
        self.sizes = sizes
        self._input: torch.Tensor | None = None
        self._parts: tuple[torch.Tensor, ...] = ()

    def compute_part(self, x: torch.Tensor, at: int) -> torch.Tensor:
        """Return the output of part `at`. The first part's call computes all; the last part's call drops them."""
        if self._input is not x:
            self._input, self._parts = x, self.linear(x).split(self.sizes, dim=-1)
        part = self._parts[at]
        if at == len(self.sizes) - 1:
            self._input, self._parts = None, ()
        return part


class FusedLinearPart(nn.Module):
    """Replaces one of the projections that were fused."""

    def __init__(self, fused: _FusedLinear, at: int) -> None:
        super().__init__()
        self.fused = fused
        self._at = at
        self.in_features = fused.linear.in_features
        self.out_features = fused.sizes[at]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fused.compute_part(x, self._at)
