"""Attention masks by layer: full or sliding, sized for the cache layer that the layer reads. It knows no attention.

A group whose layers differ keeps the longest window in its shared cache layer, and each layer masks for itself; so the
mask depends on the layer's own type and on what its cache layer holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

FULL, SLIDING = "full_attention", "sliding_attention"

Masks = tuple[Any, ...]
"""By layer, what the attention backend takes: [batch, 1, num_tokens, context_len], or None for plain causal."""


def layer_types(config: Any) -> list[str]:
    """`full_attention` or `sliding_attention` for each layer."""
    types: list[str] = get_layer_types_and_kwargs(config)[0]
    return types


def make_masks(
    config: Any,
    cache_layers: Sequence[int],
    *,
    hidden: torch.Tensor,
    attention_mask: torch.Tensor | None,
    past_key_values: DynamicCache | None,
    position_ids: torch.Tensor,
) -> Masks:
    """Masks of all layers for the tokens `hidden` [batch, num_tokens, hidden_size].

    Args:
        cache_layers: by layer, the cache layer that it reads.
        attention_mask: [batch, context_len], 0 for padding; None with restarting positions keeps packed samples apart.
    """
    made: dict[tuple[str, bool], Any] = {}
    masks = []
    for layer_type, cache_layer in zip(layer_types(config), cache_layers, strict=True):
        windowed = past_key_values is not None and getattr(past_key_values.layers[cache_layer], "is_sliding", False)
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
    return tuple(masks)


def select_rows(masks: Masks, num_tokens: int, num_kept: int, device: torch.device) -> Masks:
    """The masks of the last `num_kept` of `num_tokens` queries."""
    selected: dict[int, Any] = {}
    for mask in masks:
        if id(mask) in selected:
            continue
        if mask is not None:
            selected[id(mask)] = mask[..., -num_kept:, :]
        elif num_kept > 1:
            # No mask means the backend's causal flag, which aligns queries to the first keys: these are the last ones.
            rows = torch.ones((num_kept, num_tokens), dtype=torch.bool, device=device)
            selected[id(mask)] = rows.tril(num_tokens - num_kept)
        else:
            selected[id(mask)] = None
    return tuple(selected[id(mask)] for mask in masks)
