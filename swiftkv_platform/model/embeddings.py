"""Embeddings of families that multiply them by a factor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ScaledEmbedding(nn.Embedding):
    """Embedding whose output is multiplied by `scale`. `rounds`: round the factor to the weight's dtype."""

    def __init__(self, config: Any, scale: float, *, rounds: bool) -> None:
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self._scale, self._rounds = scale, rounds

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.scaled(super().forward(input_ids))

    def scaled(self, embedded: torch.Tensor) -> torch.Tensor:
        """Multiply embeddings read from the weight by the factor."""
        return embedded * (torch.tensor(self._scale).to(embedded.dtype).item() if self._rounds else self._scale)
