"""K and V that deep tokens write for themselves in layers >= l (`swiftkv_decode_key_value: own`).

A skipped prompt token has no hidden state in layers >= l, so its K and V there come from x. A *deep* token, the last
one of a prompt or one behind it, runs through these layers anyway; in this form it projects K and V of each group from
its own hidden state in the group's first layer, as its teacher does. Which tokens are deep follows from the prompt's
length alone (`docs/model.md`). It knows keys and values, no layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from swiftkv_platform.model.attention import KeyValue, Rotation, SwiftKVAttentionMixin
from swiftkv_platform.model.cache import Stored, append, read, take_rows
from swiftkv_platform.model.selection import TokenSelection


class DeepWriter(Protocol):
    """Puts K and V of a pass's deep tokens where layers >= l attend to them."""

    def write(self, group: int, own: KeyValue) -> Stored:
        """K and V of a group over the whole context. `own`: what the group's cache layer is to store of the kept
        tokens, by their own hidden states, [num_rows, num_heads, num_kept, dim] each."""
        ...

    def write_shared(self, group: int) -> None:
        """Leave the group to K and V from x: no token of the pass is deep."""
        ...


class DeepGroup:
    """Keys and values of one group in a pass, made when its leader attends. A `MakeKeyValue`."""

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
            stored = self.writer.write(self.group, attention.own_key_value(hidden_states, rotation))
            self.key_value = attention.expand_key_value(read(take_rows(stored, self._kept)))
        assert self.key_value is not None, "a group's leader attends first"
        return self.key_value


@dataclass(frozen=True)
class DeepSuffix:
    """Deep tokens that end the rows of a pass. A `DeepWriter`."""

    shared: Sequence[KeyValue]
    """By group, K and V of all tokens of the pass from x; may be empty where every token is deep."""
    first: int | torch.Tensor
    """The first deep token of the pass, or of each row, int64 [batch]; the number of tokens where none is."""
    num_tokens: int
    kept: TokenSelection | None = None
    """Tokens that own K and V are handed over of, all deep ones among them; None: all."""
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
        """[batch, num_heads, num_tokens, dim] of all tokens of the pass."""
        kept, first = self.kept or TokenSelection(), self.first
        if kept.rows is None and isinstance(first, int) and own.shape[2] == self.num_tokens - first:
            return own if first == 0 else torch.cat((self.shared[group][which][:, :, :first], own), dim=2)
        shared, at = self.shared[group][which], kept.positions(self.num_tokens, own.device)
        own = own.to(shared.dtype)
        if kept.rows is not None:  # the others' last tokens stopped at layer l, and keep what x gave them
            return shared.index_copy(0, kept.rows, shared.index_select(0, kept.rows).index_copy(2, at, own))
        begins = first if isinstance(first, int) else first[:, None]
        deep = (torch.arange(self.num_tokens, device=own.device) >= begins).view(-1, 1, self.num_tokens, 1)
        return torch.where(deep, shared.index_copy(2, at, own), shared)
