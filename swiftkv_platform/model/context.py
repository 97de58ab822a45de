"""The context of a forward pass: masks, positions and cache, which all layers share.

A `TokenSelection` names the tokens that enter layers >= l: prompt tokens, rows of a decode batch, or any tokens of a
flat batch. `DecoderContext.select` makes their context.

A layer's mask is full or sliding, and has the size of the cache layer that it reads. If the layers of a group have
different windows, their cache layer has the longest one and each layer's mask applies its own window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self, runtime_checkable

import torch
from transformers import Cache
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.attention import Rotation


@dataclass(frozen=True)
class TokenSelection:
    """Selected rows of the batch and selected tokens of each row. `TokenSelection()` selects everything.

    Selecting the last n tokens of every row returns views. Rows and token indices are gathered.
    """

    tokens: int | torch.Tensor | None = None
    """The last n tokens of each row (0: none), or indices into the token dimension, int64 [num_selected]; None: all."""
    rows: torch.Tensor | None = None
    """Rows of the batch, int64 [num_rows]; None: all."""
    indices: tuple[int, ...] | None = None
    """Host copy of `tokens`, if available. Reading `tokens` from a GPU would synchronize with it."""

    def count_selected(self, num_tokens: int) -> int:
        """Return the number of selected tokens in a row with `num_tokens`."""
        if self.tokens is None:
            return num_tokens
        return self.tokens.numel() if isinstance(self.tokens, torch.Tensor) else min(self.tokens, num_tokens)

    @property
    def selects_last_only(self) -> bool:
        """Whether `tokens` is 1. False for a tensor of indices, which is not read."""
        return not isinstance(self.tokens, torch.Tensor) and self.tokens == 1

    def select(self, x: torch.Tensor) -> torch.Tensor:
        """[batch or 1, num_tokens, ...] -> [num_rows or 1, num_selected, ...]. A first dimension of 1 holds for all
        rows."""
        return self.select_rows(self._select_tokens(x, 1))

    def select_queries(self, mask: torch.Tensor) -> torch.Tensor:
        """[batch or 1, 1, num_tokens, context_len] -> [num_rows or 1, 1, num_selected, context_len]."""
        return self.select_rows(self._select_tokens(mask, 2))

    def select_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[batch or 1, ...] -> [num_rows or 1, ...]."""
        if self.rows is None or (x.shape[0] == 1 and self.rows.numel() != 0):
            return x
        return x.index_select(0, self.rows)

    def get_positions(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """Return the indices of the selected tokens in a row, [num_selected]."""
        return self._select_tokens(torch.arange(num_tokens, device=device), 0)

    def _select_tokens(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if self.tokens is None:
            return x
        if isinstance(self.tokens, torch.Tensor):
            return x.index_select(dim, self.tokens)
        num_selected = self.count_selected(x.shape[dim])
        return x.narrow(dim, x.shape[dim] - num_selected, num_selected)


@runtime_checkable
class TokenSelectable(Protocol):
    """Attention metadata in a context's `layer_arguments` that depends on the selected tokens."""

    def select_tokens(self, selection: TokenSelection) -> Self:
        """Return new metadata with the selected tokens as queries; the keys remain the whole context."""
        ...


FULL, SLIDING = "full_attention", "sliding_attention"
PACKED_ATTENTION = "swiftkv_packed"
"""Name of the attention implementation in `packed_attention.py`, which runs SDPA without packed samples."""
_SDPA_IMPLEMENTATIONS = ("sdpa", PACKED_ATTENTION)


@dataclass(frozen=True)
class Masks:
    """The masks of all layers."""

    by_layer: tuple[Any, ...]
    """Masks for the attention backend: [batch, 1, num_tokens, context_len], or None for plain causal."""
    causal_flag: bool = False
    """Whether a None mask becomes the backend's causal flag, which aligns the first query with the first key (SDPA)."""
    context_lens: tuple[int, ...] = ()
    """Number of keys per layer. A preallocated cache has more keys than tokens until it is full."""


def get_layer_types(config: Any) -> list[str]:
    """Return `full_attention` or `sliding_attention` for each layer."""
    types: list[str] = get_layer_types_and_kwargs(config)[0]
    return types


def get_layer_windows(config: Any) -> tuple[int | None, ...]:
    """Return the sliding window per layer in tokens, including the query itself; None: no window."""
    return tuple(config.sliding_window if kind == SLIDING else None for kind in get_layer_types(config))


def make_masks(
    config: Any,
    cache_layers: Sequence[int],
    *,
    hidden: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: Cache | None,
    position_ids: torch.Tensor,
) -> Masks:
    """Make the masks of all layers for the tokens `hidden` [batch, num_tokens, hidden_size].

    Args:
        cache_layers: the cache layer that each layer reads.
        attention_mask: [batch, context_len], 0 for padding. None: packed samples begin where positions restart.
    """
    if attention_mask is None and past_key_values is None:
        _check_packing(config, position_ids)
    made: dict[tuple[str, bool], Any] = {}
    masks, context_lens = [], []
    num_tokens = hidden.shape[1]
    for layer_type, cache_layer in zip(get_layer_types(config), cache_layers, strict=True):
        # A cache made without a configuration adds layers on their first write, without windows.
        layers: list[Any] = [] if past_key_values is None else past_key_values.layers
        windowed = cache_layer < len(layers) and getattr(layers[cache_layer], "is_sliding", False)
        key = (layer_type, windowed)
        if key not in made:
            build = create_sliding_window_causal_mask if layer_type == SLIDING else create_causal_mask
            made[key] = build(
                config=config,
                inputs_embeds=hidden,
                attention_mask=attention_mask,
                past_key_values=past_key_values,
                position_ids=position_ids,
                layer_idx=cache_layer,
            )
        masks.append(made[key])
        sizes = (num_tokens, 0) if past_key_values is None else past_key_values.get_mask_sizes(num_tokens, cache_layer)
        context_lens.append(sizes[0])
    return Masks(tuple(masks), config._attn_implementation in _SDPA_IMPLEMENTATIONS, tuple(context_lens))


def _check_packing(config: Any, position_ids: torch.Tensor) -> None:
    """Raise `ModelError` for packed batches of several rows with flash attention. transformers separates samples by
    their positions only in batches of one row."""
    implementation = str(config._attn_implementation)
    if "flash" in implementation and len(position_ids) > 1 and bool((position_ids.diff() != 1).any()):
        raise ModelError(
            f"attn_implementation {implementation} separates packed samples only in batches of one row, but this batch "
            f"has {len(position_ids)} rows; pass one row at a time, or use sdpa",
            field="attn_implementation",
            value=implementation,
        )


def supports_selection(config: Any, selection: TokenSelection) -> bool:
    """Whether the attention backend supports masks for selected queries. Flash attention supports the last tokens only;
    backends with compiled masks (flex attention) support none."""
    implementation = str(config._attn_implementation)
    if "flash" in implementation:
        return not isinstance(selection.tokens, torch.Tensor)
    return implementation in ("eager", *_SDPA_IMPLEMENTATIONS)


def select_masks(masks: Masks, selection: TokenSelection, num_tokens: int, device: torch.device) -> Masks:
    """Return the masks of the selected queries among `num_tokens`. The keys stay the same."""
    selected: dict[tuple[int, int], Any] = {}
    context_lens = masks.context_lens or (num_tokens,) * len(masks.by_layer)
    keys = [(id(mask), context_len) for mask, context_len in zip(masks.by_layer, context_lens, strict=True)]
    for key, mask in zip(keys, masks.by_layer, strict=True):
        if key in selected:
            continue
        if mask is None:
            selected[key] = _make_selected_mask(selection, num_tokens, key[1], device) if masks.causal_flag else None
        else:
            # Backends without a dense mask take [batch, context_len] and align causal queries with the last keys.
            selected[key] = selection.select_queries(mask) if mask.ndim == 4 else selection.select_rows(mask)
    return replace(masks, by_layer=tuple(selected[key] for key in keys))


def _make_selected_mask(
    selection: TokenSelection, num_tokens: int, context_len: int, device: torch.device
) -> torch.Tensor | None:
    """Make the causal mask of the selected queries [1, 1, num_selected, context_len]; None if they attend to every key.

    The causal flag aligns the first query with the first key, so it does not fit selected queries.
    """
    if num_tokens == 1 or selection.tokens is None or (selection.selects_last_only and context_len == num_tokens):
        return None
    positions = selection.get_positions(num_tokens, device)
    return (positions[:, None] >= torch.arange(context_len, device=device))[None, None]


@dataclass(frozen=True)
class DecoderContext:
    """Data of a forward pass that all layers share."""

    hidden: torch.Tensor
    """Embeddings, [batch, num_tokens, hidden_size]."""
    position_ids: torch.Tensor
    """[batch or 1, num_tokens]."""
    rotation: Rotation
    masks: Masks
    past_key_values: Cache | None
    layer_arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.hidden.shape[1]

    def select(self, selection: TokenSelection) -> DecoderContext:
        """Return a new context of the selected tokens, for layers >= l."""
        rotation = self.rotation
        parts = tuple(map(selection.select, rotation)) if isinstance(rotation, tuple) else selection.select(rotation)
        return DecoderContext(
            hidden=selection.select(self.hidden),
            position_ids=selection.select(self.position_ids),
            rotation=parts,
            masks=select_masks(self.masks, selection, self.num_tokens, self.hidden.device),
            past_key_values=self.past_key_values,
            layer_arguments={
                name: value.select_tokens(selection) if isinstance(value, TokenSelectable) else value
                for name, value in self.layer_arguments.items()
            },
        )
