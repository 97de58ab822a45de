"""What the layers of a forward pass get besides hidden states: masks, and the context that holds them.

A `TokenSelection` says which tokens go on to layers >= l: prompt tokens, rows of a decode batch, or any tokens of a
flat batch. All callers that drop tokens at layer l use it, and it cuts the context accordingly.

Masks are full or sliding by layer, and sized for the cache layer that the layer reads. If the layers of a group have
different windows, their shared cache layer keeps the longest one and each layer masks by its own. So a mask depends on
the layer's type and on the length of its cache layer.
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
    """A selection of rows of the batch and of tokens in each of them. `TokenSelection()` keeps everything.

    Taking the last n tokens of every row gives views; rows and indices are gathered.
    """

    tokens: int | torch.Tensor | None = None
    """The last n tokens of each row (0: none), or indices into the token dimension, int64 [num_kept]; None: all."""
    rows: torch.Tensor | None = None
    """Rows of the batch, int64 [num_rows]; None: all."""
    indices: tuple[int, ...] | None = None
    """The indices of `tokens` on the host, if known, since reading them from a GPU would wait for it."""

    def count(self, num_tokens: int) -> int:
        """Return how many tokens of a row with `num_tokens` are kept."""
        if self.tokens is None:
            return num_tokens
        return self.tokens.numel() if isinstance(self.tokens, torch.Tensor) else min(self.tokens, num_tokens)

    @property
    def keeps_last(self) -> bool:
        """Whether only the last token of each row is kept, as far as known without reading a tensor."""
        return not isinstance(self.tokens, torch.Tensor) and self.tokens == 1

    def take(self, x: torch.Tensor) -> torch.Tensor:
        """[batch or 1, num_tokens, ...] -> [num_rows or 1, num_kept, ...]; a first dimension of 1 serves every row."""
        return self.take_rows(self._take_tokens(x, 1))

    def take_queries(self, mask: torch.Tensor) -> torch.Tensor:
        """[batch or 1, 1, num_tokens, context_len] -> [num_rows or 1, 1, num_kept, context_len]."""
        return self.take_rows(self._take_tokens(mask, 2))

    def take_rows(self, x: torch.Tensor) -> torch.Tensor:
        """[batch or 1, ...] -> [num_rows or 1, ...]."""
        if self.rows is None or (x.shape[0] == 1 and self.rows.numel() != 0):
            return x
        return x.index_select(0, self.rows)

    def positions(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """Return the indices of the kept tokens in a row, [num_kept]."""
        return self._take_tokens(torch.arange(num_tokens, device=device), 0)

    def _take_tokens(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        if self.tokens is None:
            return x
        if isinstance(self.tokens, torch.Tensor):
            return x.index_select(dim, self.tokens)
        num_kept = self.count(x.shape[dim])
        return x.narrow(dim, x.shape[dim] - num_kept, num_kept)


@runtime_checkable
class SelectsTokens(Protocol):
    """Attention metadata in a context's `layer_arguments` that has to change with a token selection."""

    def select_tokens(self, selection: TokenSelection) -> Self:
        """Return new metadata for the kept tokens as queries; keys remain the whole context. This one is unchanged."""
        ...


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
    context_lens = masks.context_lens or (num_tokens,) * len(masks.by_layer)
    keys = [(id(mask), context_len) for mask, context_len in zip(masks.by_layer, context_lens, strict=True)]
    for key, mask in zip(keys, masks.by_layer, strict=True):
        if key in selected:
            continue
        if mask is None:
            selected[key] = _write_out(selection, num_tokens, key[1], device) if masks.causal_flag else None
        else:
            # Backends without a dense mask take [batch, context_len] and align causal queries to the last keys.
            selected[key] = selection.take_queries(mask) if mask.ndim == 4 else selection.take_rows(mask)
    return replace(masks, by_layer=tuple(selected[key] for key in keys))


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


@dataclass(frozen=True)
class DecoderContext:
    """The data on the tokens of a forward pass that every layer needs."""

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

    def select(self, kept: TokenSelection) -> DecoderContext:
        """Return a new context for the kept tokens, for the upper layers; this one is unchanged."""
        rotation = self.rotation
        return DecoderContext(
            hidden=kept.take(self.hidden),
            position_ids=kept.take(self.position_ids),
            rotation=tuple(map(kept.take, rotation)) if isinstance(rotation, tuple) else kept.take(rotation),
            masks=select_queries(self.masks, kept, self.num_tokens, self.hidden.device),
            past_key_values=self.past_key_values,
            layer_arguments={
                name: value.select_tokens(kept) if isinstance(value, SelectsTokens) else value
                for name, value in self.layer_arguments.items()
            },
        )
