"""Log-probabilities of a model at each place of a given text. Knows no schedule and no cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


@torch.inference_mode()
def log_probs(model: Any, token_ids: Sequence[int], num_positions: int) -> torch.Tensor:
    """Log-probabilities [num_positions, vocab_size], float32, of the last `num_positions` tokens, given those before
    each, at temperature 1. One forward pass without a cache."""
    input_ids = torch.tensor([token_ids[:-1]], device=model.device)
    logits: torch.Tensor = model(input_ids, logits_to_keep=num_positions, use_cache=False).logits[0]
    return logits.float().log_softmax(-1).cpu()
