"""K and V that deep tokens write for themselves in layers >= l (`swiftkv_decode_key_value: own`).

A skipped prompt token has no hidden state in layers >= l, so its K and V there come from x. A *deep* token, a prompt's
last token or a later one, runs through these layers anyway; in this form it projects K and V of each group from its own
hidden state in the group's first layer, as its teacher does. Which tokens are deep depends only on the prompt's length
(`docs/model.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from swiftkv_platform.model.attention import KeyValue, Rotation, SwiftKVAttentionMixin
from swiftkv_platform.model.cache import Stored, append, read, take_rows
from swiftkv_platform.model.context import TokenSelection


class DeepWriter(Protocol):
    """Writer of the K and V of a pass's deep tokens, to which layers >= l attend."""

    def write(self, group: int, own: KeyValue) -> Stored:
        """Write `own` and return K and V of a group over the whole context. `own`: the kept tokens' K and V from their
        own hidden states, in the form that the cache stores, [num_rows, num_heads, num_kept, dim] each."""
        ...

    def write_shared(self, group: int) -> None:
        """Write only K and V from x for the group, since no token of the pass runs through its layers."""
        ...


class DeepGroup:
    """A `MakeKeyValue` for one group and pass, which makes keys and values when the group's leader attends."""

    def __init__(
        self, group: int, leader: SwiftKVAttentionMixin, writer: DeepWriter, kept: TokenSelection | None
    ) -> None:
        self.group, self.writer = group, writer
        self.key_value: KeyValue | None = None
        """None until the leader has attended."""
        self._leader = leader
        self._kept = kept or TokenSelection()

    def __call__(self, attention: SwiftKVAttentionMixin, hidden_states: torch.Tensor, rotation: Rotation) -> KeyValue:
        if attention is self._leader:
            stored = self.writer.write(self.group, attention.project_own_key_value(hidden_states, rotation))
            self.key_value = attention.expand_key_value(read(take_rows(stored, self._kept)))
        assert self.key_value is not None, "a group's leader attends first"
        return self.key_value


@dataclass(frozen=True)
class DeepSuffix:
    """A `DeepWriter` for a pass whose rows end with their deep tokens."""

    shared: Sequence[KeyValue]
    """By group, K and V of all tokens of the pass from x; may be empty if every token is deep."""
    first: int | torch.Tensor
    """The first deep token of the pass, or of each row, int64 [batch]; the number of tokens if none is deep."""
    num_tokens: int
    kept: TokenSelection | None = None
    """Tokens for which `write` gets own K and V, including all deep ones; None: all."""
    cache: Any = None
    first_cache_layer: int = 0
    """Cache layer of the first group."""

    def write(self, group: int, own: KeyValue) -> Stored:
        return self._store(group, (self._merge(group, 0, own[0]), self._merge(group, 1, own[1])))

    def write_shared(self, group: int) -> None:
        self._store(group, self.shared[group])

    def _store(self, group: int, key_value: KeyValue) -> Stored:
        if self.cache is None:
            return key_value
        return append(self.cache, *key_value, self.first_cache_layer + group)

    def _merge(self, group: int, which: int, own: torch.Tensor) -> torch.Tensor:
        """Return K or V of all tokens of the pass, [batch, num_heads, num_tokens, dim]."""
        kept, first = self.kept or TokenSelection(), self.first
        if kept.rows is None and isinstance(first, int) and own.shape[2] == self.num_tokens - first:
            return own if first == 0 else torch.cat((self.shared[group][which][:, :, :first], own), dim=2)
        shared, at = self.shared[group][which], kept.positions(self.num_tokens, own.device)
        own = own.to(shared.dtype)
        if kept.rows is not None:  # the other rows' last tokens stopped at layer l and keep K and V from x
            return shared.index_copy(0, kept.rows, shared.index_select(0, kept.rows).index_copy(2, at, own))
        begins = first if isinstance(first, int) else first[:, None]
        deep = (torch.arange(self.num_tokens, device=own.device) >= begins).view(-1, 1, self.num_tokens, 1)
        return torch.where(deep, shared.index_copy(2, at, own), shared)


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
