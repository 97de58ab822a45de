"""Embeddings of families that multiply them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


class ScaledEmbedding(nn.Embedding):
    """Embeddings times a factor; the weight is the checkpoint's."""

    def __init__(self, config: Any, scale: float) -> None:
        super().__init__(config.vocab_size, config.hidden_size, config.pad_token_id)
        self._scale = scale

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids) * self._scale
