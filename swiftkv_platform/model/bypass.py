"""Layers below l that skipped prompt tokens bypass (`LayerMap.gaps`, `docs/model.md`): the hidden states after
such a layer. `engine/deep_rows.py` does the same for the rows of an engine step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Bypass = Callable[[Any, int, torch.Tensor, Any], torch.Tensor]
"""Function that returns the hidden states after a layer that skipped tokens bypass, [batch, num_tokens, hidden_size].
Skipped tokens keep their hidden state and write K and V to the cache; deep tokens run through the layer."""


def bypass_before(
    first_deep: int | torch.Tensor, decoder: Any, i: int, hidden: torch.Tensor, context: Any
) -> torch.Tensor:
    """A `Bypass` for rows whose tokens from `first_deep` on are deep (one index for all rows, or one each, [batch]).
    The other tokens run through the layer too, for their K and V, but their output is discarded."""
    output = decoder.run_layer(i, hidden, context)
    begins = first_deep if isinstance(first_deep, int) else first_deep[:, None]
    deep = torch.arange(hidden.shape[1], device=hidden.device) >= begins
    return torch.where(deep.view(-1, hidden.shape[1], 1), output, hidden)
