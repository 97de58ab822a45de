"""SimScore: the similarity of the inputs of a decoder's layers over real text (paper, equation 1).

The quality that a depth really costs is measured by rewiring the model (`evaluation.depths`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model.calibration import TokenBatch

MIN_SIMSCORE = 0.5
"""SimScore that all of the paper's models exceed at around half of their depth (section 3.2)."""
_MASKS = ("loss_mask", "attention_mask")


@dataclass(frozen=True)
class Similarity:
    """Sums over tokens. `+` adds the sums of two workers."""

    cosines: torch.Tensor
    """Sum over tokens of the cosine between two layers' inputs, by pair of layers, [L, L] float64."""
    num_tokens: int

    def __add__(self, other: Similarity) -> Similarity:
        return Similarity(self.cosines + other.cosines, self.num_tokens + other.num_tokens)

    @property
    def scores(self) -> list[float]:
        """SimScores of the inputs of layers 0 .. L - 2.

        SimScore(l) is the mean over layers j > l of the mean cosine between the inputs of l and j: the similarity of x
        to the inputs that the later layers' projections were trained for.
        """
        mean = self.cosines / self.num_tokens
        return [float(mean[i, i + 1 :].mean()) for i in range(mean.shape[0] - 1)]


@torch.no_grad()
def collect_similarity(model: Any, batches: Iterable[TokenBatch]) -> Similarity:
    """Run a teacher over `batches` and compare the inputs of its layers, token by token.

    Args:
        model: a causal language model of transformers, or a SwiftKV model in teacher mode.
        batches: token ids [batch, num_tokens], or mappings with `input_ids` and `position_ids`. Tokens that a mapping's
            `loss_mask` or `attention_mask` excludes do not count.

    Raises:
        InvalidInputError: there are no tokens.
    """
    total: Similarity | None = None
    for batch in batches:
        inputs = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        counted = next((inputs[name] for name in _MASKS if name in inputs), torch.ones_like(inputs["input_ids"]))
        inputs.pop("loss_mask", None)
        outputs = model.base_model(**inputs, use_cache=False, output_hidden_states=True)
        # The last entry is the output of the last layer, which is no layer's input.
        states = torch.stack([state[counted.bool()] for state in outputs.hidden_states[:-1]])  # [L, tokens, hidden]
        part = _sum_cosines(states)
        total = part if total is None else total + part
    if total is None or not total.num_tokens:
        raise InvalidInputError("similarity got no tokens; give at least one batch of token ids", field="text")
    return total


def recommend_depth(scores: list[float]) -> int:
    """Return the smallest l >= L / 2 such that every SimScore from l on is at least `MIN_SIMSCORE`, else L - 1.

    It is never below half the depth: shallower layers may have scores as high, but quality falls there (table 2).
    """
    num_layers = len(scores) + 1
    depth = num_layers - 1
    while depth > -(-num_layers // 2) and scores[depth - 1] >= MIN_SIMSCORE:
        depth -= 1
    return max(depth, 1)


def _sum_cosines(states: torch.Tensor) -> Similarity:
    """Compute the sums for `states` [L, tokens, hidden]."""
    directions = torch.nn.functional.normalize(states.double(), dim=-1).flatten(1)
    return Similarity((directions @ directions.T).cpu(), states.shape[1])
