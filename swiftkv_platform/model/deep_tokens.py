"""Deep tokens with their own K and V in layers >= l (`swiftkv_decode_key_value: own`).

Skipped prompt tokens have no hidden state in layers >= l, so their K and V come from x. *Deep* tokens (a prompt's last
`deep_tail` tokens and all later ones) run through these layers. With `own`, their K and V in each group come from their
own hidden state in the group's first layer, as in the teacher. The prompt's length alone decides which tokens are deep
(`docs/concepts.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from swiftkv_platform.model.attention import KeyValue, Rotation, SwiftKVAttentionMixin
from swiftkv_platform.model.cache import CacheContents, append_key_value, read_key_value, select_rows
from swiftkv_platform.model.context import TokenSelection


class DeepWriter(Protocol):
    """Writer of the deep tokens' K and V in a pass, to which layers >= l attend."""

    def write(self, group: int, key_value: KeyValue) -> CacheContents:
        """Write a group's `key_value` and return the group's K and V over the whole context. `key_value`: K and V of
        the selected tokens from their own hidden states, as the cache stores them, each [num_rows, num_heads,
        num_selected, dim]."""
        ...

    def write_shared(self, group: int) -> None:
        """Write the group's K and V from x. Used if no token of the pass runs through layers >= l."""
        ...


class DeepGroup:
    """A `MakeKeyValue` for one group and pass. Its keys and values are made when the group's first layer attends."""

    def __init__(
        self, group: int, leader: SwiftKVAttentionMixin, writer: DeepWriter, selection: TokenSelection | None
    ) -> None:
        self.group, self.writer = group, writer
        self.key_value: KeyValue | None = None
        """Set when the group's first layer attends."""
        self._leader = leader
        self._selection = selection or TokenSelection()

    def __call__(self, attention: SwiftKVAttentionMixin, hidden_states: torch.Tensor, rotation: Rotation) -> KeyValue:
        if attention is self._leader:
            stored = self.writer.write(self.group, attention.project_own_key_value(hidden_states, rotation))
            self.key_value = attention.expand_key_value(read_key_value(select_rows(stored, self._selection)))
        assert self.key_value is not None, "the first layer of a group must run first"
        return self.key_value


@dataclass(frozen=True)
class DeepSuffixWriter:
    """A `DeepWriter` for a pass whose rows end with their deep tokens."""

    shared_key_values: Sequence[KeyValue]
    """K and V of all tokens from x, per group; empty if every token is deep."""
    first: int | torch.Tensor
    """Index of the first deep token, for all rows or per row, int64 [batch]; `num_tokens` if no token is deep."""
    num_tokens: int
    selection: TokenSelection | None = None
    """Tokens whose own K and V `write` receives, including all deep ones; None: all."""
    cache: Any = None
    first_cache_layer: int = 0
    """Cache layer of the first group."""

    def write(self, group: int, key_value: KeyValue) -> CacheContents:
        return self._append(group, (self._merge_kv(group, 0, key_value[0]), self._merge_kv(group, 1, key_value[1])))

    def write_shared(self, group: int) -> None:
        self._append(group, self.shared_key_values[group])

    def _append(self, group: int, key_value: KeyValue) -> CacheContents:
        if self.cache is None:
            return key_value
        return append_key_value(self.cache, *key_value, self.first_cache_layer + group)

    def _merge_kv(self, group: int, kv_index: int, own: torch.Tensor) -> torch.Tensor:
        """Return K (0) or V (1) of all tokens of the pass, [batch, num_heads, num_tokens, dim]."""
        selection, first = self.selection or TokenSelection(), self.first
        # `own` has exactly the deep tokens: concatenate
        if selection.rows is None and isinstance(first, int) and own.shape[2] == self.num_tokens - first:
            return own if first == 0 else torch.cat((self.shared_key_values[group][kv_index][:, :, :first], own), dim=2)
        shared, positions = (
            self.shared_key_values[group][kv_index],
            selection.get_positions(self.num_tokens, own.device),
        )
        own = own.to(shared.dtype)
        # tokens of unselected rows exited at layer l: they keep K and V from x
        if selection.rows is not None:
            selected = shared.index_select(0, selection.rows).index_copy(2, positions, own)
            return shared.index_copy(0, selection.rows, selected)
        # `own` has more than the deep tokens: select by mask
        first_deep = first if isinstance(first, int) else first[:, None]
        is_deep = (torch.arange(self.num_tokens, device=own.device) >= first_deep).view(-1, 1, self.num_tokens, 1)
        return torch.where(is_deep, shared.index_copy(2, positions, own), shared)


Bypass = Callable[[Any, int, torch.Tensor, Any], torch.Tensor]
"""Function that runs a bypassed layer and returns the hidden states [batch, num_tokens, hidden_size]. Skipped tokens
keep their hidden state and write K and V to the cache; deep tokens run through the layer."""


def run_bypassed_layer(
    first_deep: int | torch.Tensor, decoder: Any, i: int, hidden: torch.Tensor, context: Any
) -> torch.Tensor:
    """A `Bypass` for rows whose tokens from index `first_deep` on are deep (for all rows, or per row, [batch]). The
    other tokens run through the layer for their K and V only; their output is discarded."""
    output = decoder.run_layer(i, hidden, context)
    first_deep = first_deep if isinstance(first_deep, int) else first_deep[:, None]
    is_deep = torch.arange(hidden.shape[1], device=hidden.device) >= first_deep
    return torch.where(is_deep.view(-1, hidden.shape[1], 1), output, hidden)
