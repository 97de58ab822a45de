"""The context that the layers of a forward pass share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import Cache

from swiftkv_platform.model.attention import Rotation
from swiftkv_platform.model.masks import Masks, select_queries
from swiftkv_platform.model.selection import TokenSelection, select_arguments


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
            layer_arguments=select_arguments(self.layer_arguments, kept),
        )
