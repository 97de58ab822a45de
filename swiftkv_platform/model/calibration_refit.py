"""Output projections fitted to the student's own states: the `refitted` start.

A calibrated layer is fitted to the teacher's states, and in the student it gets others, since the layers before it are
only close to the teacher's. What has gone wrong until a layer's attention is known, though, and as attention is linear
in its output projection, that can make up for as much of it as least squares find: `o_proj_swiftkv` is regressed, layer
after layer, on the outputs of the student's own heads, towards what the teacher's hidden state is behind its attention.
It knows no rows and no files.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

RIDGE = 1e-2
"""Penalty of the distance to the projection at first, as a share of the mean diagonal of the Gram matrix."""


@dataclass
class OutputSums:
    """Sums over tokens for one layer's output projection; those of two rows, or of two workers, add up."""

    gram: torch.Tensor
    """Sum of a^T a for the heads' outputs a, [num_heads * head_dim, num_heads * head_dim]."""
    cross: torch.Tensor
    """Sum of a^T missing, [num_heads * head_dim, hidden_size]: what is to be added to the student's hidden state."""

    @classmethod
    def of(cls, heads: torch.Tensor, missing: torch.Tensor, scale: float) -> OutputSums:
        """The sums of [batch, num_tokens, num_heads * head_dim] and [batch, num_tokens, hidden_size]; with `scale` 0
        they count nothing."""
        a, missing = heads.flatten(0, 1).double() * scale, missing.flatten(0, 1).double()
        return cls(a.T @ a, a.T @ missing)

    def add_(self, other: OutputSums) -> OutputSums:
        """Add another row's sums, in place."""
        self.gram.add_(other.gram)
        self.cross.add_(other.cross)
        return self


def refit_output(projection: nn.Linear, sums: OutputSums) -> None:
    """Set an output projection to the ridge regression of `sums`, which keeps what they do not tell; its bias stays."""
    start = projection.weight.double().T  # [num_heads * head_dim, hidden_size]
    penalty = RIDGE * sums.gram.diagonal().mean()
    metric = sums.gram + penalty * torch.eye(len(sums.gram), dtype=sums.gram.dtype, device=sums.gram.device)
    factor = torch.linalg.cholesky(metric)
    projection.weight.copy_(torch.cholesky_solve(sums.cross + penalty * start, factor).T)
