"""Logits to the next token, by a request's own parameters and random numbers. Knows no model and no sequence."""

from __future__ import annotations

import torch

from swiftkv_platform.engine.config import SamplingParams


def sample(logits: torch.Tensor, params: SamplingParams, generator: torch.Generator) -> int:
    """Choose a token.

    Args:
        logits: of one position, [vocab_size], any float type.
        params: temperature 0 is arg-max and draws nothing.
        generator: the request's own, so that its text does not depend on who else is served.
    """
    if params.temperature == 0.0:
        return int(logits.argmax())
    probs = _truncated_probs(logits.float() / params.temperature, params.top_k, params.top_p)
    return int(torch.multinomial(probs, num_samples=1, generator=generator))


def _truncated_probs(logits: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    """Probabilities of the k most probable tokens that make up top_p of the mass, at least one: [vocab_size]."""
    if 0 < top_k < logits.numel():
        best = logits.topk(top_k)
        logits = torch.full_like(logits, float("-inf")).scatter(0, best.indices, best.values)
    probs = logits.softmax(dim=-1)
    if top_p < 1.0:
        sorted_probs, token_ids = probs.sort(descending=True)
        mass_before = sorted_probs.cumsum(dim=-1) - sorted_probs
        probs = probs.index_fill(0, token_ids[mass_before >= top_p], 0.0)
    return probs  # multinomial normalises
