"""Decoder layers from vLLM's modules: layers with their own KV, layers that read a group's KV, and a group's KV cache.
Also the attention heads of a tensor-parallel rank with their norms, RoPE and padding.

A `SeparateKVCache` is an attention layer that caches K and V of all tokens and never attends. An AcrossKV group has
one, which its layers share, and so has a bypassed layer. The layers that read one run for the selected rows of a step
(`deep_tokens.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update
from vllm.model_executor.layers.attention.kv_transfer_utils import maybe_transfer_kv_layer
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.gemma3 import Gemma3MLP
from vllm.model_executor.models.llama import LlamaMLP
from vllm.model_executor.models.mixtral import MixtralMoE
from vllm.model_executor.models.qwen3_moe import Qwen3MoeSparseMoeBlock
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform

from swiftkv_platform.configs import get_layer_windows
from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import Family
from swiftkv_platform.vllm.deep_tokens import RowSelectingAttention, RowSelector, write_own_kv
from swiftkv_platform.vllm.quantized import DECODE_QKV_NAME, GROUP_KV_NAME, QKV, check_scale_blocks


@dataclass(frozen=True)
class Heads:
    """Numbers and sizes of an attention layer's heads on one tensor-parallel rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    stored_dim: int
    """Head size in the KV cache; larger than `head_dim` if the attention backend has no kernel for `head_dim`."""
    tp_size: int
    total_num_heads: int
    total_num_kv_heads: int

    @classmethod
    def from_config(cls, config: Any) -> Heads:
        total, total_kv = config.num_attention_heads, config.num_key_value_heads
        tp_size = get_tensor_model_parallel_world_size()
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // total
        if total % tp_size or (total_kv % tp_size and tp_size % total_kv):
            raise ModelError.for_field(
                "tensor_parallel_size",
                tp_size,
                f"; it must divide the {total} query heads, and divide the {total_kv} key-value heads or be a multiple "
                "of them",
            )
        return cls(
            num_heads=total // tp_size,
            num_kv_heads=max(1, total_kv // tp_size),
            head_dim=head_dim,
            stored_dim=_select_stored_dim(head_dim),
            tp_size=tp_size,
            total_num_heads=total,
            total_num_kv_heads=total_kv,
        )

    def pad_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Pad heads with zeros: [..., num * head_dim] -> [..., num * stored_dim]. Attention scores do not change."""
        if self.stored_dim == self.head_dim:
            return x
        by_head = x.unflatten(-1, (-1, self.head_dim))
        padded: torch.Tensor = F.pad(by_head, (0, self.stored_dim - self.head_dim)).flatten(-2)
        return padded

    def trim_heads(self, x: torch.Tensor) -> torch.Tensor:
        """Undo `pad_heads`: [..., num * stored_dim] -> [..., num * head_dim]."""
        if self.stored_dim == self.head_dim:
            return x
        by_head = x.unflatten(-1, (-1, self.stored_dim))
        trimmed: torch.Tensor = by_head[..., : self.head_dim].flatten(-2)
        return trimmed


def _select_stored_dim(head_dim: int) -> int:
    if not current_platform.is_cpu():
        return head_dim  # vLLM chooses an attention backend for the size
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes: list[int] = CPUAttentionBackend.get_supported_head_sizes()
    larger = [size for size in sizes if size >= head_dim]
    if not larger:
        why = f", more than vLLM's CPU attention supports; up to {max(sizes)} is accepted"
        raise ModelError.for_field("head_dim", head_dim, why)
    return min(larger)


def get_norm_class(family: Family) -> Any:
    return GemmaRMSNorm if family.norm_offset else RMSNorm


class _PerHeadNorm(nn.Module):
    """Mixin that applies a norm to each head separately."""

    weight: nn.Parameter

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize each head of [num_tokens, num_heads * head_dim]."""
        normalized: torch.Tensor = super().forward(x.unflatten(-1, (-1, len(self.weight))).contiguous())
        return normalized.flatten(-2)


class HeadNorm(_PerHeadNorm, RMSNorm):
    """RMSNorm of each head separately."""


class OffsetHeadNorm(_PerHeadNorm, GemmaRMSNorm):
    """Gemma's RMSNorm of each head separately, which adds 1 to its weights."""


class AllHeadsNorm(RMSNorm):
    """RMSNorm over all heads together, of which each rank has a part."""

    def __init__(self, heads: Heads, total: int, eps: float) -> None:
        self._num_rows = heads.head_dim * max(1, total // heads.tp_size)
        super().__init__(self._num_rows, eps=eps)
        self._first_row = heads.head_dim * (get_tensor_model_parallel_rank() * total // heads.tp_size)
        self._tp_size = heads.tp_size
        set_weight_attrs(self.weight, {"weight_loader": self._load_rows})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize this rank's [num_tokens, num_heads * head_dim] by the mean square over all ranks."""
        if self._tp_size == 1:
            normalized: torch.Tensor = super().forward(x.contiguous())
            return normalized
        wide = x.float()  # if ranks have copies of heads, each head has equally many
        mean = tensor_model_parallel_all_reduce(wide.square().mean(-1, keepdim=True)) / self._tp_size
        scaled: torch.Tensor = wide * torch.rsqrt(mean + self.variance_epsilon) * self.weight.float()
        return scaled.to(x.dtype)

    def _load_rows(self, parameter: nn.Parameter, tensor: torch.Tensor) -> None:
        default_weight_loader(parameter, tensor[self._first_row : self._first_row + self._num_rows])


def make_head_norm(family: Family, config: Any, heads: Heads, total: int) -> nn.Module:
    """Return the family's norm of queries or keys, for `total` heads on all ranks; the identity if it has none."""
    if family.query_key_norms == "all heads":
        return AllHeadsNorm(heads, total, config.rms_norm_eps)
    norm = OffsetHeadNorm if family.norm_offset else HeadNorm
    return norm(heads.head_dim, eps=config.rms_norm_eps) if family.query_key_norms else nn.Identity()


def make_rotary_embedding(config: Any, heads: Heads, layer: int) -> nn.Module:
    """Return a layer's RoPE, of whole heads or their first dimensions. vLLM reuses a module with equal parameters."""
    parameters = config.rope_parameters
    if config.family.has_rope_per_layer_type:
        parameters = parameters[config.layer_types[layer]]
    rotary: nn.Module = get_rope(
        heads.head_dim, max_position=config.max_position_embeddings, rope_parameters=parameters
    )
    return rotary


def apply_rope(rotary: nn.Module, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Apply RoPE to queries or to keys alone, [num_tokens, num_heads * head_dim].

    Uses PyTorch's operations, since a pass of vLLM's GPU compiler expects vLLM's operator to get queries and keys.
    """
    # Phi-3's LongRoPE has only a PyTorch forward, which requires keys.
    alone: Any = getattr(rotary, "forward_native", None)
    rotated: torch.Tensor = rotary(positions, x, x)[0] if alone is None else alone(positions, x)[0]
    return rotated


@dataclass(frozen=True)
class CacheReader:
    """How an attention layer reads a `SeparateKVCache`."""

    cache: str
    """Name of the cache in vLLM."""
    selector: RowSelector


class OwnKVAttention(nn.Module):
    """Attention with its own K and V: in layers < l, and in all layers in teacher mode."""

    qkv_name = QKV
    """Name of the fused projection in a quantization configuration."""
    is_leader = False

    def __init__(
        self, family: Family, vllm_config: VllmConfig, layer: int, prefix: str, reader: CacheReader | None = None
    ) -> None:
        super().__init__()
        config, quant_config = vllm_config.model_config.hf_config, vllm_config.quant_config
        self.heads = heads = Heads.from_config(config)
        self.sizes = [count * heads.head_dim for count in (heads.num_heads, heads.num_kv_heads, heads.num_kv_heads)]
        self.qkv_proj = QKVParallelLinear(
            config.hidden_size,
            heads.head_dim,
            heads.total_num_heads,
            heads.total_num_kv_heads,
            bias=family.input_bias.get_value(config),
            quant_config=quant_config,
            prefix=f"{prefix}.{self.qkv_name}",
        )
        self.o_proj = _make_output_projection(family, vllm_config, heads, prefix, is_shared=self.is_leader)
        self.q_norm = make_head_norm(family, config, heads, heads.total_num_heads)
        self.k_norm = make_head_norm(family, config, heads, heads.total_num_kv_heads)
        self.rotary_emb = make_rotary_embedding(config, heads, layer)
        self.attn = _make_attention(vllm_config, heads, layer, prefix, reader)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        query, key, value = self.project_heads(positions, hidden_states)
        return self.project_output(self.attn(query, key, value))

    def project_heads(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> list[torch.Tensor]:
        """Return queries and keys, with RoPE, and values: each [num_tokens, num_heads * stored_dim]."""
        projected, _ = self.qkv_proj(hidden_states)
        query, key, value = projected.split(self.sizes, dim=-1)
        query, key = self.rotary_emb(positions, self.q_norm(query), self.k_norm(key))
        return [self.heads.pad_heads(x) for x in (query, key, value)]

    def project_output(self, attended: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.o_proj(self.heads.trim_heads(attended))[0]
        return output

    def unflatten_heads(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, num_kv_heads * stored_dim] -> [num_tokens, num_kv_heads, stored_dim]."""
        by_head: torch.Tensor = x.unflatten(-1, (-1, self.heads.stored_dim))
        return by_head


class LeaderAttention(OwnKVAttention):
    """Attention of a group's leader if deep tokens keep their own K and V: it writes and reads the group's cache, for
    the selected rows."""

    qkv_name = DECODE_QKV_NAME
    is_leader = True

    def __init__(self, family: Family, vllm_config: VllmConfig, layer: int, prefix: str, reader: CacheReader) -> None:
        super().__init__(family, vllm_config, layer, prefix, reader)
        self._cache = reader.cache

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, hidden_size]."""
        query, key, value = self.project_heads(positions, hidden_states)
        write_own_kv(self.unflatten_heads(key), self.unflatten_heads(value), self._cache)
        return self.project_output(self.attn(query, key, value))


class BypassedAttention(OwnKVAttention):
    """Attention of a bypassed layer for the selected rows, over K and V of all tokens (`BypassedKVProjections`)."""


class BypassedKVProjections(nn.Module):
    """K and V of all tokens in a bypassed layer."""

    def __init__(self, attention: BypassedAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_tokens, hidden_size] -> keys and values, each [num_tokens, 1, num_kv_heads, stored_dim]."""
        _, key, value = self.attention.project_heads(positions, hidden_states)
        return self.attention.unflatten_heads(key)[:, None], self.attention.unflatten_heads(value)[:, None]


class SharedKVAttention(nn.Module):
    """Attention of a student's layer >= l for the selected rows: its own queries, and the KV cache of its group."""

    def __init__(
        self, leader: int, family: Family, vllm_config: VllmConfig, layer: int, prefix: str, reader: CacheReader
    ) -> None:
        """`leader`: first layer of the group."""
        super().__init__()
        config, quant_config = vllm_config.model_config.hf_config, vllm_config.quant_config
        self.heads = heads = Heads.from_config(config)
        self.query = ColumnParallelLinear(
            config.hidden_size,
            heads.total_num_heads * heads.head_dim,
            bias=family.input_bias.get_value(config),
            quant_config=quant_config,
            prefix=f"{prefix}.q_proj_swiftkv",
        )
        self.o_proj = _make_output_projection(family, vllm_config, heads, prefix, is_shared=True)
        self.q_norm = make_head_norm(family, config, heads, heads.total_num_heads)
        self.rotary_emb = make_rotary_embedding(config, heads, leader)
        self.attn = _make_attention(vllm_config, heads, layer, prefix, reader)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, hidden_size]."""
        query = self.q_norm(self.query(hidden_states)[0])
        query = self.heads.pad_heads(apply_rope(self.rotary_emb, positions, query))
        # A layer that shares its KV cache ignores keys and values, but the operator requires tensors.
        unused = query[..., : self.heads.num_kv_heads * self.heads.stored_dim]
        output: torch.Tensor = self.o_proj(self.heads.trim_heads(self.attn(query, unused, unused)))[0]
        return output


def _make_attention(
    vllm_config: VllmConfig, heads: Heads, layer: int, prefix: str, reader: CacheReader | None
) -> Attention:
    """Make the attention of a layer; with a reader, that of the selected rows over another cache."""
    window = get_layer_windows(vllm_config.model_config.hf_config)[layer]
    arguments = _make_attention_arguments(vllm_config, heads, window) | {"prefix": f"{prefix}.attn"}
    if reader is None:
        return Attention(**arguments)
    return RowSelectingAttention(reader.selector, **arguments, kv_sharing_target_layer_name=reader.cache)


def _make_attention_arguments(vllm_config: VllmConfig, heads: Heads, window: int | None) -> dict[str, Any]:
    """Return the common arguments of a model's attention layers and KV caches."""
    config: Any = vllm_config.model_config.hf_config
    multiplier = config.family.get_multiplier(config, "attention_multiplier") if config.family.multipliers else None
    return {
        "num_heads": heads.num_heads,
        "head_size": heads.stored_dim,
        "scale": heads.head_dim**-0.5 if multiplier is None else multiplier,
        "num_kv_heads": heads.num_kv_heads,
        "cache_config": vllm_config.cache_config,
        "quant_config": vllm_config.quant_config,
        "per_layer_sliding_window": window,
    }


def _make_output_projection(
    family: Family, vllm_config: VllmConfig, heads: Heads, prefix: str, *, is_shared: bool
) -> nn.Module:
    config: Any = vllm_config.model_config.hf_config
    projection: nn.Module = RowParallelLinear(
        heads.total_num_heads * heads.head_dim,
        config.hidden_size,
        bias=family.output_bias.get_value(config),
        quant_config=vllm_config.quant_config,
        prefix=f"{prefix}.{'o_proj_swiftkv' if is_shared and config.own_output_projection else 'o_proj'}",
    )
    return projection


class SeparateKVCache(Attention):
    """A KV cache that other layers read: an attention layer that is never called."""

    def __init__(self, vllm_config: VllmConfig, heads: Heads, windows: Sequence[int | None], prefix: str) -> None:
        # Its readers may have different windows: the cache keeps the longest, each layer masks by its own.
        window = None if None in windows else max(window for window in windows if window is not None)
        super().__init__(**_make_attention_arguments(vllm_config, heads, window), prefix=prefix)
        self.changes_later = False
        """Whether deep tokens overwrite their K and V later in a step."""
        if not hasattr(self.impl, "do_kv_cache_update"):
            raise ModelError(
                f"the attention backend {self.attn_backend.get_name()} writes its KV cache only during attention; "
                "SwiftKV needs one that writes it separately, such as FLASH_ATTN or TRITON_ATTN (CPU_ATTN on CPUs)",
                field="attention_config.backend",
                value=self.attn_backend.get_name(),
            )

    def write_kv(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Append a step's keys (with RoPE) and values, each [num_tokens, num_kv_heads, stored_dim], to the cache."""
        unified_kv_cache_update(keys, values, self.layer_name)
        if not self.changes_later:
            _transfer_kv(self.layer_name)

    def finish_step(self) -> None:
        """Save the cache to a KV connector, if any, after deep tokens have changed it."""
        if self.changes_later:
            _transfer_kv(self.layer_name)


def _do_nothing(layer_name: str) -> None:
    pass


_transfer_kv = maybe_transfer_kv_layer(_do_nothing)
"""Let a KV connector load and save a layer's cache; does nothing without a connector."""


class GroupKVProjections(nn.Module):
    """K and V of all groups from norm_swiftkv(x), in one matrix product."""

    def __init__(self, family: Family, vllm_config: VllmConfig, leaders: Sequence[int], prefix: str) -> None:
        super().__init__()
        num_groups = len(leaders)
        config = vllm_config.model_config.hf_config
        self.heads = heads = Heads.from_config(config)
        # With more ranks than key-value heads, each rank gets a copy of its head (`repeat_heads`).
        rows = heads.num_kv_heads * heads.tp_size * heads.head_dim
        self.projection = MergedColumnParallelLinear(
            config.hidden_size,
            [rows] * 2 * num_groups,
            bias=family.input_bias.get_value(config),
            quant_config=vllm_config.quant_config,
            prefix=f"{prefix}.layers.{GROUP_KV_NAME}",
        )
        check_scale_blocks(self.projection)
        self.num_groups = num_groups
        self.k_norms = nn.ModuleList(make_head_norm(family, config, heads, heads.total_num_kv_heads) for _ in leaders)
        self.has_head_norms = family.query_key_norms is not None
        self.rotary_embs = nn.ModuleList(make_rotary_embedding(config, heads, leader) for leader in leaders)
        self.has_equal_rope = len(set(self.rotary_embs)) == 1

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_tokens, hidden_size] -> keys and values, each [num_tokens, num_groups, num_kv_heads, stored_dim]."""
        keys, values = self.projection(hidden_states)[0].chunk(2, dim=-1)
        if self.has_head_norms:
            parts = keys.chunk(self.num_groups, dim=-1)
            keys = torch.cat([norm(part) for norm, part in zip(self.k_norms, parts, strict=True)], dim=-1)
        if self.has_equal_rope:
            keys = apply_rope(self.rotary_embs[0], positions, keys)
        else:
            by_group = zip(self.rotary_embs, keys.chunk(self.num_groups, dim=-1), strict=True)
            keys = torch.cat([apply_rope(rotary, positions, part) for rotary, part in by_group], dim=-1)
        shape = (self.num_groups, self.heads.num_kv_heads, self.heads.stored_dim)
        return self.heads.pad_heads(keys).unflatten(-1, shape), self.heads.pad_heads(values).unflatten(-1, shape)

    def repeat_heads(self, kind: str, tensor: torch.Tensor) -> torch.Tensor:
        """Repeat each head's part of a K or V projection's tensor for the ranks with that head. `kind`: `weight`,
        `bias`, scales, ..."""
        heads = self.heads
        repeats = heads.num_kv_heads * heads.tp_size // heads.total_num_kv_heads
        parameter: Any = getattr(self.projection, kind, None)
        dim = getattr(parameter, "output_dim", None)
        if repeats == 1 or dim is None:
            return tensor
        by_head: torch.Tensor = tensor.unflatten(dim, (heads.total_num_kv_heads, -1))
        return by_head.repeat_interleave(repeats, dim=dim).flatten(dim, dim + 1)


_NORM_NAMES = {
    "before": ("input_layernorm", None, "post_attention_layernorm", None),
    "behind": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
    "both": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
"""Names of a layer's norms: before and after attention, before and after feed-forward."""


def add_and_normalize(
    norm: nn.Module | None, hidden_states: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (norm(sum), sum) of hidden states and residual. `norm`: None is the identity; `residual`: None is zero."""
    if residual is None:
        return (hidden_states if norm is None else norm(hidden_states)), hidden_states
    if norm is None:
        residual = hidden_states + residual
        return residual, residual
    normalized: tuple[torch.Tensor, torch.Tensor] = norm(hidden_states, residual)
    return normalized


class DecoderLayer(nn.Module):
    """A decoder layer."""

    def __init__(self, family: Family, vllm_config: VllmConfig, layer: int, self_attn: nn.Module, prefix: str) -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.self_attn = self_attn
        name, feed_forward = _make_feed_forward(family, vllm_config, layer, prefix)
        self.feed_forward_name = name
        self.add_module(name, feed_forward)
        self.branch_scale = family.get_multiplier(config, "residual_multiplier")
        self.norm_names = _NORM_NAMES[family.norms]
        for norm in filter(None, self.norm_names):
            self.add_module(norm, get_norm_class(family)(config.hidden_size, eps=config.rms_norm_eps))

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's output and the residual to add to it, each [num_tokens, hidden_size]."""
        norms = (None if name is None else getattr(self, name) for name in self.norm_names)
        before_attention, after_attention, before_feed_forward, after_feed_forward = norms
        hidden_states, residual = add_and_normalize(before_attention, hidden_states, residual)
        hidden_states = self._scale_branch(self.self_attn(positions, hidden_states))
        if after_attention is not None:
            hidden_states = after_attention(hidden_states)
        hidden_states, residual = add_and_normalize(before_feed_forward, hidden_states, residual)
        hidden_states = self._scale_branch(getattr(self, self.feed_forward_name)(hidden_states))
        return hidden_states if after_feed_forward is None else after_feed_forward(hidden_states), residual

    @property
    def input_norm(self) -> nn.Module | None:
        """The norm before attention; None if the family has none."""
        name = self.norm_names[0]
        norm: nn.Module | None = None if name is None else getattr(self, name)
        return norm

    def _scale_branch(self, branch: torch.Tensor) -> torch.Tensor:
        return branch if self.branch_scale == 1.0 else branch * self.branch_scale


def _make_feed_forward(family: Family, vllm_config: VllmConfig, layer: int, prefix: str) -> tuple[str, nn.Module]:
    """Return the name in the checkpoint and the module of a layer's feed-forward part."""
    config = vllm_config.model_config.hf_config
    name = "block_sparse_moe" if family.feed_forward == "mixtral" else "mlp"
    common: dict[str, Any] = {"quant_config": vllm_config.quant_config, "prefix": f"{prefix}.{name}"}
    sizes = config.hidden_size, config.intermediate_size
    if family.feed_forward == "mixtral":
        return name, MixtralMoE(config.num_local_experts, config.num_experts_per_tok, *sizes, **common)
    is_sparse = (
        family.feed_forward == "qwen3_moe"
        and layer not in config.mlp_only_layers
        and config.num_experts > 0
        and (layer + 1) % config.decoder_sparse_step == 0
    )
    if is_sparse:
        return name, Qwen3MoeSparseMoeBlock(vllm_config, prefix=common["prefix"])
    if family.feed_forward == "gated_gelu":
        return name, Gemma3MLP(*sizes, config.hidden_activation, **common)
    return name, LlamaMLP(*sizes, config.hidden_act, bias=family.mlp_bias.get_value(config), **common)
