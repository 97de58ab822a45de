"""Attention masks by layer: full or sliding, sized for the cache layer that the layer reads.

If the layers of a group have different windows, their shared cache layer keeps the longest one and each layer masks by
its own. So a mask depends on the layer's type and on the length of its cache layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache
from transformers.cache_utils import get_layer_types_and_kwargs
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.selection import TokenSelection

FULL, SLIDING = "full_attention", "sliding_attention"
PACKED = "swiftkv_packed"
"""Name of the attention implementation in `packed_attention.py`; it is SDPA if no sample lengths are passed."""
_SDPA = ("sdpa", PACKED)


@dataclass(frozen=True)
class Masks:
    """The masks of all layers."""

    by_layer: tuple[Any, ...]
    """Masks for the attention backend: [batch, 1, num_tokens, context_len], or None for plain causal."""
    causal_flag: bool = False
    """Whether the backend replaces None by a causal flag, which aligns the first query to the first key (SDPA)."""
    context_lens: tuple[int, ...] = ()
    """Number of keys by layer; a preallocated cache that is not full has more keys than tokens."""


def layer_types(config: Any) -> list[str]:
    """Return `full_attention` or `sliding_attention` for each layer."""
    types: list[str] = get_layer_types_and_kwargs(config)[0]
    return types


def layer_windows(config: Any) -> tuple[int | None, ...]:
    """Return, by layer, the number of tokens that a query sees, including itself; None: all before it."""
    return tuple(config.sliding_window if kind == SLIDING else None for kind in layer_types(config))


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
        cache_layers: by layer, the cache layer that it reads.
        attention_mask: [batch, context_len], 0 for padding; None with positions that restart separates packed samples.
    """
    if attention_mask is None and past_key_values is None:
        _check_packing(config, position_ids)
    made: dict[tuple[str, bool], Any] = {}
    masks, context_lens = [], []
    num_tokens = hidden.shape[1]
    for layer_type, cache_layer in zip(layer_types(config), cache_layers, strict=True):
        # A cache made without a configuration adds layers as they are written, all without a window.
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
    return Masks(tuple(masks), config._attn_implementation in _SDPA, tuple(context_lens))


def _check_packing(config: Any, position_ids: torch.Tensor) -> None:
    """Raise `ModelError` for packed batches of several rows with flash attention: transformers separates samples by
    their positions only in batches of one row."""
    implementation = str(config._attn_implementation)
    if "flash" in implementation and len(position_ids) > 1 and bool((position_ids.diff() != 1).any()):
        raise ModelError(
            f"attn_implementation is {implementation}, which keeps packed samples apart in batches of one row only, "
            f"and this batch has {len(position_ids)} rows; use one row at a time, or sdpa",
            field="attn_implementation",
            value=implementation,
        )


def can_select(config: Any, selection: TokenSelection) -> bool:
    """Whether the attention backend supports masks for selected queries: flash attention only for the last tokens, and
    backends that compile their masks (flex attention) not at all."""
    implementation = str(config._attn_implementation)
    if "flash" in implementation:
        return not isinstance(selection.tokens, torch.Tensor)
    return implementation in ("eager", *_SDPA)


def select_queries(masks: Masks, selection: TokenSelection, num_tokens: int, device: torch.device) -> Masks:
    """Return the masks for the selected ones of `num_tokens` queries; the keys stay the same."""
    selected: dict[tuple[int, int], Any] = {}
    by_layer = []
    for mask, context_len in zip(
        masks.by_layer, masks.context_lens or (num_tokens,) * len(masks.by_layer), strict=True
    ):
        key = (id(mask), context_len)
        if key not in selected:
            flagged = mask is None and masks.causal_flag
            selected[key] = (
                _write_out(selection, num_tokens, context_len, device) if flagged else _select(mask, selection)
            )
        by_layer.append(selected[key])
    return replace(masks, by_layer=tuple(by_layer))


def _select(mask: torch.Tensor | None, selection: TokenSelection) -> torch.Tensor | None:
    if mask is None:
        return None
    # Backends without a dense mask take [batch, context_len] and align causal queries to the last keys.
    return selection.take_queries(mask) if mask.ndim == 4 else selection.take_rows(mask)


def _write_out(
    selection: TokenSelection, num_tokens: int, context_len: int, device: torch.device
) -> torch.Tensor | None:
    """Make the causal mask of the selected queries [1, 1, num_kept, context_len]; None if they see every key.

    The causal flag aligns the first query to the first key, so it cannot be used for selected queries.
    """
    if num_tokens == 1 or selection.tokens is None or (selection.keeps_last and context_len == num_tokens):
        return None
    positions = selection.positions(num_tokens, device)
    return (positions[:, None] >= torch.arange(context_len, device=device))[None, None]
