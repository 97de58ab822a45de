"""A SwiftKV decoder in vLLM: compiled parts, and between them the write of K and V and the token skipping.

    lower parts: embeddings, layers < l, norm_swiftkv, K and V of all groups    all tokens
    write:       K and V into the groups' caches                                all tokens
    upper half:  layers >= l, final norm                                        selected rows

The selected rows (`deep_tokens.py`) are the tokens whose logits are needed and a prompt's deep tokens. If deep tokens
keep their own K and V, the first layer of each group overwrites their K and V from x before its attention.

Bypassed layers divide the lower half: a part ends with the K and V of the bypassed layer behind it, which runs for the
selected rows. Writes must be outside the compiled parts, since their operator declares no mutation and compilers drop
calls with unused results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from vllm.compilation.backends import set_model_tag
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from swiftkv_platform.configs import get_layer_windows
from swiftkv_platform.families import Family
from swiftkv_platform.student_shape import LayerMap
from swiftkv_platform.vllm.checks import refuse_full_graphs_of_prompts
from swiftkv_platform.vllm.deep_tokens import NO_ROWS, WRITE_OPERATOR, RowSelector, SelectedRows, compute_own_slots
from swiftkv_platform.vllm.layers import (
    BypassedAttention,
    BypassedKVProjections,
    CacheReader,
    DecoderLayer,
    GroupKVProjections,
    Heads,
    LeaderAttention,
    OwnKVAttention,
    SeparateKVCache,
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
class FullDepthDecoder(nn.Module):
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
class LowerPart(nn.Module):
    """Consecutive layers < l, and the K and V of the layers behind them."""

    def __init__(
        self, *, embed_tokens: nn.Module, layers: nn.ModuleList, norm: nn.Module | None, projections: nn.Module
    ) -> None:
        super().__init__()
        self.embed_tokens, self.layers, self.norm, self.projections = embed_tokens, layers, norm, projections

    def forward(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, inputs_embeds: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`inputs_embeds`: the input of the first layer, if not the tokens' embeddings. Return the output of the last
        layer, [num_tokens, hidden_size]; and keys and values, each [num_tokens, num_caches, num_kv_heads,
        stored_dim]."""
        hidden_states = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        hidden_states, residual = _run_layers(self.layers, positions, hidden_states)
        normalized, x = add_and_normalize(self.norm, hidden_states, residual)
        keys, values = self.projections(positions, normalized)
        return x, keys, values


@support_torch_compile(dynamic_arg_dims={"positions": 0, "x": 0})
class SelectedRowsPart(nn.Module):
    """Layers that run for the selected rows: layers >= l and the final norm, or a bypassed layer."""

    def __init__(self, *, layers: nn.ModuleList, norm: nn.Module | None) -> None:
        super().__init__()
        self.layers, self.norm = layers, norm

    def forward(self, positions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] -> [num_rows, hidden_size]."""
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
        self.dense: FullDepthDecoder | None = None
        if self.layer_map.leaders:
            self._add_student_layers(family, vllm_config, prefix)
            self._add_student_parts(vllm_config)
        else:
            make = partial(_make_layer, family, vllm_config, prefix, OwnKVAttention)
            self.layers = nn.ModuleList(map(make, range(config.num_hidden_layers)))
            with set_model_tag("dense"):
                self.dense = FullDepthDecoder(embed_tokens=self.embed_tokens, layers=self.layers, norm=self.norm)

    def _add_student_layers(self, family: Family, vllm_config: VllmConfig, prefix: str) -> None:
        """Make layers and KV caches. vLLM requires that a cache is made before the layers that read it."""
        config, layer_map = vllm_config.model_config.hf_config, self.layer_map
        make = partial(_make_layer, family, vllm_config, prefix)
        heads, windows = Heads.from_config(config), get_layer_windows(config)

        def make_kv_cache(layers: Sequence[int]) -> SeparateKVCache:
            name = f"{prefix}.layers.{layers[0]}.group"
            return SeparateKVCache(vllm_config, heads, [windows[layer] for layer in layers], name)

        layers = {layer: make(OwnKVAttention, layer) for layer in layer_map.prefill_layers}
        self.bypass_caches = {layer: make_kv_cache([layer]) for layer in layer_map.bypassed_layers}
        self.group_caches = {leader: make_kv_cache(layer_map.get_group(leader)) for leader in layer_map.leaders}
        self.caches = nn.ModuleList([*self.bypass_caches.values(), *self.group_caches.values()])
        self.selector = RowSelector(vllm_config, layer_map.deep_tail, self.embed_tokens.weight.device)
        for layer, cache in self.bypass_caches.items():
            layers[layer] = make(BypassedAttention, layer, CacheReader(cache.layer_name, self.selector))
        if not self.is_prefill_only:
            for leader, cache in self.group_caches.items():
                reader = CacheReader(cache.layer_name, self.selector)
                for layer in layer_map.get_group(leader):
                    kind = LeaderAttention if layer in layer_map.deep_leaders else partial(SharedKVAttention, leader)
                    layers[layer] = make(kind, layer, reader)
        self.layers = nn.ModuleList(layers[layer] for layer in sorted(layers))
        normalizes = family.has_input_norm
        self.norm_swiftkv = get_norm_class(family)(config.hidden_size, eps=config.rms_norm_eps) if normalizes else None
        self.groups = GroupKVProjections(family, vllm_config, layer_map.leaders, prefix)

    def _add_student_parts(self, vllm_config: VllmConfig) -> None:
        """Make the compiled parts and their buffers. Raises `ModelError` for full CUDA graphs of prompts."""
        config, layer_map = vllm_config.model_config.hf_config, self.layer_map
        layers: Any = self.layers
        self.lower_parts, self.bypassed = nn.ModuleList(), nn.ModuleList()
        begin = 0
        for layer in layer_map.bypassed_layers:
            projections = BypassedKVProjections(layers[layer].self_attn)
            self._add_lower_part(begin, layer, layers[layer].input_norm, projections)
            with set_model_tag(f"bypassed{layer}"):
                self.bypassed.append(SelectedRowsPart(layers=layers[layer : layer + 1], norm=None))
            begin = layer + 1
        self._add_lower_part(begin, layer_map.num_key_value_layers, self.norm_swiftkv, self.groups)
        # CUDA graphs read the input of a part from the address at capture.
        size, dtype = vllm_config.scheduler_config.max_num_batched_tokens, vllm_config.model_config.dtype
        device = self.embed_tokens.weight.device
        if self.bypassed:
            self.part_input = torch.zeros(size, config.hidden_size, dtype=dtype, device=device)
        if self.is_prefill_only:
            return
        self.row_positions = torch.zeros(size, dtype=torch.int64, device=device)
        self.row_input = torch.zeros(size, config.hidden_size, dtype=dtype, device=device)
        refuse_full_graphs_of_prompts(vllm_config.compilation_config)
        self.reader_layer_name = layers[-1].self_attn.attn.layer_name
        with set_model_tag("upper"):
            self.upper = SelectedRowsPart(layers=layers[layer_map.num_key_value_layers :], norm=self.norm)
        if layer_map.deep_leaders:
            self._enable_own_deep_kv(vllm_config)
        _disable_fast_prefill_selection(vllm_config, self.caches[0])

    def _add_lower_part(self, begin: int, end: int, norm: nn.Module | None, projections: nn.Module) -> None:
        with set_model_tag(f"lower{begin or ''}"):
            part = LowerPart(
                embed_tokens=self.embed_tokens, layers=self.layers[begin:end], norm=norm, projections=projections
            )
        self.lower_parts.append(part)

    def _enable_own_deep_kv(self, vllm_config: VllmConfig) -> None:
        """Let deep tokens write their own K and V."""
        compilation = vllm_config.compilation_config
        if compilation.splitting_ops and WRITE_OPERATOR not in compilation.splitting_ops:
            compilation.splitting_ops.append(WRITE_OPERATOR)  # like attention, it reads slots from the step's context
        layers: Any = self.layers
        self.groups.k_norms = nn.ModuleList(layers[leader].self_attn.k_norm for leader in self.layer_map.leaders)
        for cache in self.group_caches.values():
            cache.changes_later = True

    def forward(
        self, input_ids: torch.Tensor | None, positions: torch.Tensor, inputs_embeds: torch.Tensor | None
    ) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]; NaN in rows of tokens whose logits are not needed. Return x if
        layers >= l do not run; vLLM discards the tokens that it samples from x."""
        if self.dense is not None:
            dense: torch.Tensor = self.dense(input_ids, positions, inputs_embeds)
            return dense
        rows = self._get_selected_rows()
        is_upper_skipped = rows is not None and rows.num_rows == 0
        row_positions = _select_rows(positions, rows)
        # 1. lower half: all tokens; bypassed layers: deep tokens
        lower_parts: Any = self.lower_parts
        x: torch.Tensor
        for part, bypassed, cache in zip(lower_parts, self.bypassed, self.bypass_caches.values(), strict=False):
            x, keys, values = part(input_ids, positions, inputs_embeds)
            cache.write_kv(keys[:, 0], values[:, 0])
            inputs_embeds = self.part_input[: len(x)].copy_(x)  # the next part's graph may reuse the memory of x
            if is_upper_skipped:
                continue
            row_x = _select_rows(inputs_embeds, rows)
            output = self._run_rows(bypassed, row_positions, row_x)
            is_deep = row_positions >= self.selector.first_deep[: len(row_positions)]
            _replace_rows(inputs_embeds, torch.where(is_deep[:, None], output, row_x), rows)
        x, keys, values = lower_parts[-1](input_ids, positions, inputs_embeds)
        # 2. write K and V of all tokens
        for group, cache in enumerate(self.group_caches.values()):
            cache.write_kv(keys[:, group], values[:, group])
        # 3. upper half: selected rows
        hidden_states = x
        if not is_upper_skipped:
            own_slots = self._compute_own_slots(row_positions, rows)
            hidden_states = self._run_rows(self.upper, row_positions, _select_rows(x, rows), own_slots)
            if rows is not None:  # NaN marks tokens that were not computed
                hidden_states = _replace_rows(torch.full_like(x, torch.nan), hidden_states, rows)
        for cache in self.group_caches.values():
            cache.finish_step()
        return hidden_states

    def _get_selected_rows(self) -> SelectedRows | None:
        """Return the rows that run layers >= l. None if all rows do: in a decode step, and without metadata
        (profiling)."""
        if self.is_prefill_only:
            return NO_ROWS
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return None
        assert isinstance(metadata, dict)
        rows: SelectedRows | None = metadata[self.reader_layer_name].selected_rows
        return rows

    def _run_rows(
        self,
        part: nn.Module,
        positions: torch.Tensor,
        x: torch.Tensor,
        own_slots: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> torch.Tensor:
        """Run a part on selected rows [num_rows, hidden_size], with a batch descriptor for their number. `own_slots`:
        cache slots by layer for the rows' own K and V."""
        size = len(x)
        self.row_positions[:size].copy_(positions)
        self.row_input[:size].copy_(x)
        context = get_forward_context()
        descriptor, slots = context.batch_descriptor, context.slot_mapping
        if descriptor is not None:  # else the piecewise graphs for the size of the whole batch are replayed
            context.batch_descriptor = replace(descriptor, num_tokens=size)
        context.slot_mapping = {**slots, **own_slots}
        output: torch.Tensor = part(self.row_positions[:size], self.row_input[:size])
        context.batch_descriptor, context.slot_mapping = descriptor, slots
        return output

    def _compute_own_slots(self, positions: torch.Tensor, rows: SelectedRows | None) -> dict[str, torch.Tensor]:
        """Return the cache slots by group for rows with their own K and V; empty if there are none, or without a
        cache."""
        slots = get_forward_context().slot_mapping
        by_slots: dict[int, torch.Tensor] = {}  # groups share slots: compute them once per step
        by_layer: dict[str, torch.Tensor] = {}
        first_deep = self.selector.first_deep[: len(positions)]
        for cache in self.group_caches.values():
            if cache.changes_later and cache.layer_name in slots:
                group_slots = slots[cache.layer_name]
                if id(group_slots) not in by_slots:
                    by_slots[id(group_slots)] = compute_own_slots(group_slots, positions, first_deep, rows)
                by_layer[cache.layer_name] = by_slots[id(group_slots)]
        return by_layer


def _select_rows(x: torch.Tensor, rows: SelectedRows | None) -> torch.Tensor:
    if rows is None:
        return x
    return x[rows.tokens] if rows.num_rows else x[:0]


def _replace_rows(x: torch.Tensor, output: torch.Tensor, rows: SelectedRows | None) -> torch.Tensor:
    """Copy the selected rows to their tokens in `x` [num_tokens, hidden_size], in place."""
    if rows is None:
        return x.copy_(output)
    return x.index_copy_(0, rows.tokens[: rows.num_rows], output[: rows.num_rows])


def _make_layer(
    family: Family,
    vllm_config: VllmConfig,
    prefix: str,
    kind: Callable[..., nn.Module],
    layer: int,
    reader: CacheReader | None = None,
) -> DecoderLayer:
    """Make a decoder layer. `kind`: class of its attention."""
    name = f"{prefix}.layers.{layer}"
    attention = kind(family, vllm_config, layer, f"{name}.self_attn", reader)
    return DecoderLayer(family, vllm_config, layer, attention, name)


def _disable_fast_prefill_selection(vllm_config: VllmConfig, cache: nn.Module) -> None:
    """Leave the selection of rows to `RowSelector`. vLLM's fast prefill, which must be on so that vLLM refuses prompt
    log-probabilities, selects rows for the layers that share a cache and were made after all caches."""
    layers = vllm_config.compilation_config.static_forward_context
    layers[cache.layer_name] = layers.pop(cache.layer_name)
