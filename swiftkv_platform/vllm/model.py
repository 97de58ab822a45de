"""A SwiftKV decoder in vLLM: two compiled halves, and between them the write of the shared KV and the token skipping.

    lower half: embeddings, layers < l, norm_swiftkv, K and V of all groups     all tokens
    write:      K and V into the groups' caches                                 all tokens
    upper half: layers >= l, final norm                                         tokens whose logits are needed

If deep tokens keep their own K and V, the first layer of each group overwrites their K and V from x before its
attention (`deep_tokens.py`).

vLLM's fast prefill for models that share KV selects the tokens whose logits are needed: layers that read a shared cache
get separate attention metadata. The write must be outside the compiled halves, since its operator declares no mutation
and compilers drop calls with unused results.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.attention.backends.utils import KVSharingFastPrefillMetadata

from swiftkv_platform.configs import get_layer_windows
from swiftkv_platform.families import Family
from swiftkv_platform.student_shape import LayerMap
from swiftkv_platform.vllm.checks import refuse_full_graphs_with_own_kv
from swiftkv_platform.vllm.deep_tokens import WRITE_OPERATOR, compute_own_slots
from swiftkv_platform.vllm.layers import (
    DecoderLayer,
    GroupKVCache,
    GroupKVProjections,
    OwnKVAttention,
    SharedKVAttention,
    add_and_normalize,
    get_norm_class,
)
from swiftkv_platform.vllm.quantized import set_fused_parts


def _run_layers(
    layers: Iterable[nn.Module], positions: torch.Tensor, hidden_states: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the last layer's output and the residual to add to it."""
    residual = None
    for layer in layers:
        hidden_states, residual = layer(positions, hidden_states, residual)
    return hidden_states, residual


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "inputs_embeds": 0})
class DenseDecoder(nn.Module):
    """All layers and the final norm: for teacher mode, and students whose layers all have their own KV."""

    def __init__(self, *, embed_tokens: nn.Module, layers: nn.ModuleList, norm: nn.Module) -> None:
        super().__init__()
        self.embed_tokens, self.layers, self.norm = embed_tokens, layers, norm

    def forward(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, inputs_embeds: torch.Tensor | None
    ) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]."""
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden_states, residual = _run_layers(self.layers, positions, hidden_states)
        return add_and_normalize(self.norm, hidden_states, residual)[0]


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "inputs_embeds": 0})
class LowerHalf(nn.Module):
    """Layers < l, and the K and V of all groups."""

    def __init__(
        self, *, embed_tokens: nn.Module, layers: nn.ModuleList, norm: nn.Module | None, groups: GroupKVProjections
    ) -> None:
        super().__init__()
        self.embed_tokens, self.layers, self.norm, self.groups = embed_tokens, layers, norm, groups

    def forward(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, inputs_embeds: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return x, the input of layer l, [num_tokens, hidden_size]; and keys and values shared by layers >= l,
        each [num_tokens, num_groups, num_kv_heads, stored_dim]."""
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden_states, residual = _run_layers(self.layers, positions, hidden_states)
        normalized, x = add_and_normalize(self.norm, hidden_states, residual)
        keys, values = self.groups(positions, normalized)
        return x, keys, values


@support_torch_compile(dynamic_arg_dims={"positions": 0, "x": 0})
class UpperHalf(nn.Module):
    """Layers >= l of a student, and the final norm."""

    def __init__(self, *, layers: nn.ModuleList, norm: nn.Module) -> None:
        super().__init__()
        self.layers, self.norm = layers, norm

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """[num_selected, hidden_size] -> [num_selected, hidden_size]."""
        hidden_states, residual = _run_layers(self.layers, positions, x)
        return add_and_normalize(self.norm, hidden_states, residual)[0]


class ScaledEmbedding(VocabParallelEmbedding):
    scale = 1.0

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        embeddings: torch.Tensor = super().forward(input_ids)
        return embeddings if self.scale == 1.0 else embeddings * self.scale


class SwiftKVDecoder(nn.Module):
    """The decoder (`model` in a checkpoint's tensor names) of all families."""

    def __init__(self, *, family: Family, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config, quant_config = vllm_config.model_config.hf_config, vllm_config.quant_config
        # In teacher mode (`swiftkv: false`) the map is dense, and all tokens run all layers.
        self.layer_map: LayerMap = config.layer_map if config.swiftkv else LayerMap.dense(config.num_hidden_layers)
        if quant_config is not None:
            set_fused_parts(quant_config, self.layer_map)
        self.embed_tokens = ScaledEmbedding(
            config.vocab_size, config.hidden_size, quant_config=quant_config, prefix=f"{prefix}.embed_tokens"
        )
        self.embed_tokens.scale = family.get_multiplier(config, "embedding_multiplier")
        if family.multipliers == "sizes":  # rounded to the weights' dtype
            self.embed_tokens.scale = torch.tensor(self.embed_tokens.scale).to(vllm_config.model_config.dtype).item()
        self.is_prefill_only = bool(self.layer_map.leaders) and config.swiftkv_prefill_only
        """Whether the model has no layers >= l."""
        if not self.is_prefill_only:
            self.norm = get_norm_class(family)(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            DecoderLayer(
                family,
                vllm_config,
                layer,
                OwnKVAttention(family, vllm_config, layer, f"{prefix}.layers.{layer}.self_attn"),
                f"{prefix}.layers.{layer}",
            )
            for layer in range(self.layer_map.num_key_value_layers)
        )
        self.dense: DenseDecoder | None = None
        if self.layer_map.leaders:
            self._add_student_layers(family, vllm_config, prefix)
        else:
            with set_model_tag("dense"):
                self.dense = DenseDecoder(embed_tokens=self.embed_tokens, layers=self.layers, norm=self.norm)

    def _add_student_layers(self, family: Family, vllm_config: VllmConfig, prefix: str) -> None:
        config, layer_map = vllm_config.model_config.hf_config, self.layer_map
        windows = get_layer_windows(config)
        normalizes = family.has_input_norm
        self.norm_swiftkv = get_norm_class(family)(config.hidden_size, eps=config.rms_norm_eps) if normalizes else None
        self.groups = GroupKVProjections(family, vllm_config, layer_map.leaders, prefix)
        self.group_caches = tuple(
            GroupKVCache(
                vllm_config,
                self.groups.heads,
                [windows[layer] for layer in layer_map.get_group(leader)],
                f"{prefix}.layers.{leader}.group",
            )
            for leader in layer_map.leaders
        )
        self.caches = nn.ModuleList(self.group_caches)
        first = layer_map.num_key_value_layers
        with set_model_tag("lower"):
            self.lower = LowerHalf(
                embed_tokens=self.embed_tokens, layers=self.layers[:first], norm=self.norm_swiftkv, groups=self.groups
            )
        if self.is_prefill_only:
            return
        for layer in range(first, layer_map.num_hidden_layers):
            name, leader = f"{prefix}.layers.{layer}", layer_map.get_leader(layer)
            arguments = family, vllm_config, layer, f"{name}.self_attn", f"{prefix}.layers.{leader}.group"
            own = layer in layer_map.deep_leaders
            attention = OwnKVAttention(*arguments) if own else SharedKVAttention(*arguments, leader)
            self.layers.append(DecoderLayer(family, vllm_config, layer, attention, name))
        self.reader_layer_name = attention.attn.layer_name
        with set_model_tag("upper"):
            self.upper = UpperHalf(layers=self.layers[first:], norm=self.norm)
        if layer_map.deep_leaders:
            self._enable_own_deep_kv(vllm_config)
        # CUDA graphs of the upper half read their input from the address at capture.
        size, device = vllm_config.scheduler_config.max_num_batched_tokens, self.norm.weight.device
        self.upper_positions = torch.zeros(size, dtype=torch.int64, device=device)
        self.upper_input = torch.zeros((size, config.hidden_size), dtype=vllm_config.model_config.dtype, device=device)

    def _enable_own_deep_kv(self, vllm_config: VllmConfig) -> None:
        """Let deep tokens write their own K and V. Raises `ModelError` for full CUDA graphs of batches with prompts."""
        compilation = vllm_config.compilation_config
        refuse_full_graphs_with_own_kv(compilation)
        if compilation.splitting_ops and WRITE_OPERATOR not in compilation.splitting_ops:
            compilation.splitting_ops.append(WRITE_OPERATOR)  # like attention, it reads slots from the step's context
        layers: Any = self.layers
        self.groups.k_norms = nn.ModuleList(layers[leader].self_attn.k_norm for leader in self.layer_map.leaders)
        size, device = vllm_config.scheduler_config.max_num_batched_tokens, self.norm.weight.device
        first_deep = torch.zeros(size, dtype=torch.int64, device=device)
        for cache in self.group_caches:
            cache.first_deep = first_deep

    def forward(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, inputs_embeds: torch.Tensor | None
    ) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]; NaN in rows of tokens whose logits are not needed. A prefill-only
        model returns x."""
        if self.dense is not None:
            dense: torch.Tensor = self.dense(input_ids, positions, inputs_embeds)
            return dense
        # 1. lower half: all tokens
        x: torch.Tensor
        x, keys, values = self.lower(input_ids, positions, inputs_embeds)
        # 2. write K and V of all tokens
        for group, cache in enumerate(self.group_caches):
            cache.write_kv(keys[:, group], values[:, group])
        if self.is_prefill_only:
            return x
        # 3. upper half: tokens whose logits are needed
        selected = self._select_upper_tokens()
        if selected is None:
            output = self._run_upper(positions, x, None)
        else:
            padded, num_selected = selected
            hidden_states = self._run_upper(positions[padded], x[padded], selected)
            # NaN marks rows that were not computed.
            output = torch.full_like(x, torch.nan)
            output[padded[:num_selected]] = hidden_states[:num_selected]
        for cache in self.group_caches:
            cache.finish_step()
        return output

    def _select_upper_tokens(self) -> tuple[torch.Tensor, int] | None:
        """Return the indices of the tokens whose logits are needed, padded to a CUDA graph size, and their number. None
        if all logits are needed (a decode step), or if it is unknown (profiling, capture of a full graph)."""
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return None
        assert isinstance(metadata, dict)
        upper = metadata[self.reader_layer_name]
        if not isinstance(upper, KVSharingFastPrefillMetadata) or upper.logits_indices_padded is None:
            return None
        assert upper.num_logits_indices
        if upper.num_logits_indices == metadata[self.group_caches[0].layer_name].num_actual_tokens:
            return None
        return upper.logits_indices_padded, upper.num_logits_indices

    def _run_upper(
        self, positions: torch.Tensor, x: torch.Tensor, selected: tuple[torch.Tensor, int] | None
    ) -> torch.Tensor:
        """Run the upper half on the rows at `positions`, with a batch descriptor and slots for these rows."""
        size = x.shape[0]
        self.upper_positions[:size].copy_(positions)
        self.upper_input[:size].copy_(x)
        context = get_forward_context()
        descriptor, slots = context.batch_descriptor, context.slot_mapping
        if descriptor is not None:  # else the piecewise graphs for the size of the whole batch are replayed
            context.batch_descriptor = replace(descriptor, num_tokens=size)
        context.slot_mapping = slots | self._compute_own_slots(slots, positions, selected)
        hidden_states: torch.Tensor = self.upper(self.upper_positions[:size], self.upper_input[:size])
        context.batch_descriptor, context.slot_mapping = descriptor, slots
        return hidden_states

    def _compute_own_slots(
        self, slots: dict[str, torch.Tensor], positions: torch.Tensor, selected: tuple[torch.Tensor, int] | None
    ) -> dict[str, torch.Tensor]:
        """Return the cache slots by group for rows with their own K and V; empty if there are none, or without a
        cache."""
        by_slots: dict[int, torch.Tensor] = {}  # groups share slots: compute them once per step
        by_layer: dict[str, torch.Tensor] = {}
        for cache in self.group_caches:
            if cache.first_deep is not None and cache.layer_name in slots:
                group_slots = slots[cache.layer_name]
                if id(group_slots) not in by_slots:
                    by_slots[id(group_slots)] = compute_own_slots(group_slots, positions, cache.first_deep, selected)
                by_layer[cache.layer_name] = by_slots[id(group_slots)]
        return by_layer
