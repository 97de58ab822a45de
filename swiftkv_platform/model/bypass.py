"""Layers below l that skipped prompt tokens bypass (`swiftkv_prefill_layers`, `docs/model.md`): what becomes of hidden
states there. It knows no cache and no step; `engine/deep_rows.py` bypasses rows of one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Bypass = Callable[[Any, int, torch.Tensor, Any], torch.Tensor]
"""A pass's hidden states behind a layer that skipped tokens bypass, [batch, num_tokens, hidden_size]: it leaves these
tokens' K and V in the cache and their hidden states as they are, and deep ones go through the layer."""


def bypass_before(
    first_deep: int | torch.Tensor, decoder: Any, i: int, hidden: torch.Tensor, context: Any
) -> torch.Tensor:
    """A `Bypass` for rows that end with their deep tokens, from `first_deep` on (of all rows, or of each, [batch]). The
    others' way through the layer is computed for their K and V, and let go."""
    output = decoder.run_layer(i, hidden, context)
    begins = first_deep if isinstance(first_deep, int) else first_deep[:, None]
    deep = torch.arange(hidden.shape[1], device=hidden.device) >= begins
    return torch.where(deep.view(-1, hidden.shape[1], 1), output, hidden)


def bypass_all(_decoder: Any, _i: int, hidden: torch.Tensor, _context: Any) -> torch.Tensor:
    """Bypass a layer with tokens that are all a prompt's, and without a cache for their K and V."""
    return hidden
