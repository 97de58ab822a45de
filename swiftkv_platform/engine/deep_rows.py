"""The K and V that a step's rows leave in layers >= l, from x or their own, and rows that bypass layers below l. Knows
no request.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch

from swiftkv_platform.engine.batch import index_tensor, take
from swiftkv_platform.engine.kv_cache import StepCache
from swiftkv_platform.model.attention import KeyValue
from swiftkv_platform.model.context import DecoderContext
from swiftkv_platform.model.selection import TokenSelection


def write_shared(decoder: Any, x: torch.Tensor, context: DecoderContext, rows: Sequence[int]) -> None:
    """Write K and V from x of some rows, ascending, to the cache layers of all groups."""
    cache: Any = context.past_key_values
    rotation, first = context.rotation, decoder.layer_map.num_key_value_layers
    if len(rows) < x.shape[1]:
        kept = TokenSelection(index_tensor(rows, x.device))
        x, cache = kept.take(x), replace(cache, slots=take(cache.slots, rows))
        rotation = tuple(map(kept.take, rotation)) if isinstance(rotation, tuple) else kept.take(rotation)
    writer = getattr(decoder, "shared_writer", None)  # on the engine's kernels alone
    if writer is not None and writer.write(x, rotation, cache):
        return
    for group, key_value in enumerate(decoder.project_key_values(x, rotation)):
        cache.write(*key_value, first + group)


def share(decoder: Any, x: torch.Tensor, context: DecoderContext) -> list[Any]:
    """`shared_key_values` of a step: write K and V from x of all rows, and return what the cache holds by group."""
    write_shared(decoder, x, context, range(x.shape[1]))
    cache: Any = context.past_key_values
    layer_map = decoder.layer_map
    return [cache.read(layer_map.num_key_value_layers + group) for group in range(len(layer_map.leaders))]


class BypassRows:
    """The `Bypass` of a step: rows that are not deep leave K and V alone in a layer."""

    def __init__(self, deep: Sequence[int]) -> None:
        self.deep = tuple(deep)
        """Rows, ascending, that run through every layer."""
        self._parts: tuple[_Rows | None, _Rows | None] | None = None

    @classmethod
    def of(cls, decoder: Any, deep: Sequence[int], num_rows: int) -> BypassRows | None:
        """None: no row of the step bypasses a layer."""
        return cls(deep) if decoder.layer_map.gaps and len(deep) < num_rows else None

    def __call__(self, decoder: Any, i: int, hidden: torch.Tensor, context: DecoderContext) -> torch.Tensor:
        if self._parts is None:
            rest = sorted(set(range(hidden.shape[1])).difference(self.deep))
            nothing_attends = replace(context, layer_arguments={"paged": None})
            self._parts = _Rows.of(nothing_attends, rest), _Rows.of(context, self.deep)
        others, deep = self._parts
        assert others is not None, "some rows are not deep"
        decoder.write_key_values(i, others.kept.take(hidden), others.context)  # which deep rows read
        if deep is None:
            return hidden
        assert isinstance(deep.kept.tokens, torch.Tensor), "rows are selected one by one"
        return hidden.index_copy(1, deep.kept.tokens, decoder.run_layer(i, deep.kept.take(hidden), deep.context))


@dataclass(frozen=True)
class _Rows:
    """Some rows of a step, and the context that they are computed in by themselves."""

    kept: TokenSelection
    context: DecoderContext

    @classmethod
    def of(cls, context: DecoderContext, rows: Sequence[int]) -> _Rows | None:
        """None without rows."""
        if not rows:
            return None
        cache: Any = context.past_key_values
        kept = TokenSelection(index_tensor(rows, context.hidden.device), indices=tuple(rows))
        return cls(kept, replace(context.select(kept), past_key_values=replace(cache, slots=take(cache.slots, rows))))


@dataclass(frozen=True)
class DeepRows:
    """Rows of a step that run through layers >= l. A `DeepWriter`: the deep ones write before any of them attends."""

    cache: StepCache
    """The cache at the slots of the deep rows."""
    first_cache_layer: int
    deep: Sequence[int] | None
    """Places of the deep rows among those that run; None: all."""
    rows: tuple[int, ...]
    """The deep rows."""

    @classmethod
    def of(cls, decoder: Any, context: DecoderContext, rows: Sequence[int], deep: AbstractSet[int]) -> DeepRows:
        """`rows` of the pass run, and those among them that are `deep` write."""
        cache: Any = context.past_key_values
        writing = [row for row in rows if row in deep]
        places = None if len(writing) == len(rows) else [at for at, row in enumerate(rows) if row in deep]
        if len(writing) < len(cache.slots):
            cache = replace(cache, slots=take(cache.slots, writing))
        return cls(cache, decoder.layer_map.num_key_value_layers, places, tuple(writing))

    def place(self, group: int) -> tuple[Any, torch.Tensor]:
        """Return what the cache holds of a group, and the slots that its deep rows write to."""
        return self.cache.read(self.first_cache_layer + group), self.cache.slots

    def write(self, group: int, own: KeyValue) -> Any:
        layer = self.first_cache_layer + group
        if self.deep is None:
            return self.cache.update(*own, layer)
        if self.deep:
            keys, values = (take(part, self.deep, dim=2) for part in own)
            self.cache.write(keys, values, layer)
        return self.cache.read(layer)

    def write_shared(self, group: int) -> None:
        """Nothing: what comes from x is written by `write_shared`."""
