"""Selection of the tokens that go on to layers >= l: prompt tokens, rows of a decode batch, or any tokens of a flat
batch. All callers that drop tokens at layer l use it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import torch


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


def select_arguments(arguments: dict[str, Any], selection: TokenSelection) -> dict[str, Any]:
    """Return `layer_arguments` for the kept tokens: `SelectsTokens` select, all other values are passed on."""
    return {
        name: value.select_tokens(selection) if isinstance(value, SelectsTokens) else value
        for name, value in arguments.items()
    }
