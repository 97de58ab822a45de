"""Map from a student's layers to those that compute KV and to KV-cache layers. Plain arithmetic: imports no torch.

Source: paper, section 3.1 (SingleInputKV) and 3.2 (AcrossKV).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.layer_lists import bypassed_layers

Sharing = Literal["gqa", "mqa", "mha"]
"""Heads that layers >= l cache: the teacher's key-value heads, one, or one for each query head (paper, appendix C)."""

DecodeKeyValue = Literal["shared", "own"]
"""Source of K and V for tokens that run through layers >= l: x, as for prompts (the paper's form), or the token's own
hidden state in the first layer of each group."""


_OF_GROUP = re.compile(r"self_attn\.([kv]_proj_swiftkv|k_norm)\.")


@dataclass(frozen=True)
class LayerMap:
    """Map from layers to KV-cache layers (L layers, l = `num_key_value_layers`, g = `key_value_group_size`).

    Layers below l own their cache layer; layers >= l form groups of g consecutive ones (the last may be shorter), and a
    group shares one cache layer, whose projections belong to the group's first layer, its leader.
    """

    num_hidden_layers: int
    num_key_value_layers: int
    key_value_group_size: int
    bypassed: tuple[int, ...] = ()
    """Layers below l that skipped prompt tokens bypass: only their K and V are computed there."""

    def __post_init__(self) -> None:
        _check_integer("num_key_value_layers", self.num_key_value_layers)
        _check_integer("key_value_group_size", self.key_value_group_size)
        if not 1 <= self.num_key_value_layers <= self.num_hidden_layers:
            raise InvalidInputError(
                f"swiftkv.num_key_value_layers is {self.num_key_value_layers}; this model of {self.num_hidden_layers} "
                f"layers accepts 1..{self.num_hidden_layers - 1} ({self.num_hidden_layers}: dense)",
                field="swiftkv.num_key_value_layers",
                value=self.num_key_value_layers,
            )
        skipped = max(self.num_hidden_layers - self.num_key_value_layers, 1)
        if not 1 <= self.key_value_group_size <= skipped:
            raise InvalidInputError.of(
                "swiftkv.key_value_group_size",
                self.key_value_group_size,
                f"; with {skipped} layers that do not compute their own KV, 1..{skipped} are accepted",
            )

    @property
    def prefill_layers(self) -> tuple[int, ...]:
        """The layers that skipped prompt tokens run through."""
        return tuple(sorted({*range(self.num_key_value_layers)} - {*self.bypassed}))

    @property
    def num_kv_cache_layers(self) -> int:
        """l + ceil((L - l) / g)."""
        return self.num_key_value_layers + len(self.leaders)

    @property
    def leaders(self) -> tuple[int, ...]:
        return tuple(range(self.num_key_value_layers, self.num_hidden_layers, self.key_value_group_size))

    def leader(self, layer: int) -> int:
        """Return the layer whose KV projections `layer` >= l uses."""
        offset = layer - self.num_key_value_layers
        return layer - offset % self.key_value_group_size

    def runs_in_prefill(self, name: str) -> bool:
        """Whether skipped prompt tokens need a checkpoint's tensor: the embedding, layers < l, and K and V of the
        groups."""
        found = re.match(r"model\.layers\.(\d+)\.(.*)", name)
        if found is None:
            return name.startswith(("model.embed_tokens.", "model.norm_swiftkv."))
        layer = int(found[1])
        in_group = layer in self.leaders and _OF_GROUP.match(found[2]) is not None
        return layer < self.num_key_value_layers or in_group

    def group(self, leader: int) -> range:
        return range(leader, min(leader + self.key_value_group_size, self.num_hidden_layers))

    def cache_layer(self, layer: int) -> int:
        """Index of the KV-cache layer that `layer` reads."""
        if layer < self.num_key_value_layers:
            return layer
        return self.num_key_value_layers + (layer - self.num_key_value_layers) // self.key_value_group_size


def _check_integer(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidInputError(
            f"swiftkv.{name} is {value!r}; an integer is accepted", field=f"swiftkv.{name}", value=value
        )


def read_prefill_layers(prefill_layers: object, num_hidden_layers: int | None = None) -> tuple[int, tuple[int, ...]]:
    """Return l and the bypassed layers below it for a list of the layers that prompts run through. Raises
    `InvalidInputError` if the list is not ascending, or names a layer that prompts cannot run through."""
    fits = isinstance(prefill_layers, list | tuple) and bool(prefill_layers)
    layers = list(prefill_layers) if fits else []  # type: ignore[call-overload]
    numbers = all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in layers)
    if not fits or not numbers or sorted(set(layers)) != layers:
        raise InvalidInputError.of(
            "swiftkv.prefill_layers",
            prefill_layers,
            "; an ascending list of layers is accepted, such as [0, 1, 2, 4, 5]",
        )
    if num_hidden_layers is not None and layers[-1] > num_hidden_layers - 2:
        raise InvalidInputError.of(
            "swiftkv.prefill_layers",
            prefill_layers,
            f"; with {num_hidden_layers} layers, 0..{num_hidden_layers - 2} are accepted, since prompts skip the last",
        )
    return layers[-1] + 1, bypassed_layers(layers)


def refuse_bypassed_latents(prefill_layers: object, model_type: str) -> None:
    """Raise `ModelError` for layers that prompts bypass in a model that caches latents."""
    raise ModelError.of(
        "swiftkv.prefill_layers",
        prefill_layers,
        f", which {model_type} does not support, since it caches latents (MLA); use swiftkv.num_key_value_layers",
    )


def resolve_num_key_value_layers(
    num_hidden_layers: int, num_key_value_layers: int | None, prefill_reduction: float | None
) -> int:
    """Return l from whichever of its two forms is given; half of the layers if neither is. Raises `InvalidInputError`
    if both are given, or a share is outside 0..1."""
    if num_key_value_layers is not None and prefill_reduction is not None:
        raise InvalidInputError(
            f"swiftkv.num_key_value_layers is {num_key_value_layers} and swiftkv.prefill_reduction is "
            f"{prefill_reduction}: both set the same value; leave one of them out",
            field="swiftkv.prefill_reduction",
            value=prefill_reduction,
        )
    if num_key_value_layers is not None:
        return num_key_value_layers
    share = 0.5 if prefill_reduction is None else prefill_reduction
    if not 0 < share < 1:
        raise InvalidInputError.of(
            "swiftkv.prefill_reduction", share, "; the share of layers that prefill skips is between 0 and 1"
        )
    skipped = min(max(round(share * num_hidden_layers), 1), num_hidden_layers - 1)
    return num_hidden_layers - skipped


def student_layer_map(
    num_hidden_layers: int,
    *,
    num_key_value_layers: int | None,
    prefill_reduction: float | None,
    key_value_group_size: int,
    prefill_layers: Sequence[int] | None = None,
) -> LayerMap:
    """Return the layer map of a student, which skips at least one layer. Raises `InvalidInputError` if l, its share, g
    or the list of prefill layers is out of range, naming what is accepted."""
    bypassed: tuple[int, ...] = ()
    if prefill_layers is not None:
        last, bypassed = read_prefill_layers(prefill_layers, num_hidden_layers)
        if prefill_reduction is not None or num_key_value_layers not in (None, last):
            raise InvalidInputError.of(
                "swiftkv.prefill_layers",
                list(prefill_layers),
                f", which sets l to {last}; leave num_key_value_layers and prefill_reduction out",
            )
        num_key_value_layers = last
    wanted = resolve_num_key_value_layers(num_hidden_layers, num_key_value_layers, prefill_reduction)
    _check_integer("num_key_value_layers", wanted)
    if not 1 <= wanted < num_hidden_layers:
        raise InvalidInputError.of(
            "swiftkv.num_key_value_layers",
            wanted,
            f"; the teacher has {num_hidden_layers} layers, so 1..{num_hidden_layers - 1} are accepted",
        )
    return LayerMap(num_hidden_layers, wanted, key_value_group_size, bypassed)


def shared_key_value_heads(sharing: Sharing, *, num_attention_heads: int, num_key_value_heads: int) -> int:
    """Key-value heads of each KV-cache layer >= l. Raises `InvalidInputError` for an unknown `sharing`."""
    heads = {"gqa": num_key_value_heads, "mqa": 1, "mha": num_attention_heads}
    if sharing not in heads:
        raise InvalidInputError.of("swiftkv.sharing", sharing, f"; {', '.join(heads)} are accepted")
    return heads[sharing]


def split_by_size(sizes: Sequence[int], limit: int) -> list[slice]:
    """Split a sequence into the fewest runs whose sizes add up to at most `limit`; a larger item is a run by itself.

    Decides which groups of a student have their K and V projections sharded and gathered together, with the size of a
    layer as the limit.
    """
    runs, begin, total = [], 0, 0
    for i, size in enumerate(sizes):
        if i > begin and total + size > limit:
            runs.append(slice(begin, i))
            begin, total = i, 0
        total += size
    return [*runs, slice(begin, len(sizes))] if sizes else []


def equal_cache_group_size(
    num_upper_layers: int, *, num_key_value_heads: int, num_key_value_heads_swiftkv: int, key_value_group_size: int = 1
) -> int:
    """Return the smallest g with which `num_key_value_heads_swiftkv` heads cache no more than the teacher's heads with
    `key_value_group_size`; `num_upper_layers` if even one group caches more.

    Llama-3.1-8B (16 upper layers, 8 of 32 heads): against g = 4, mha needs g = 16 and mqa g = 1 (table C.1).
    """
    num_heads = num_key_value_heads * -(-num_upper_layers // key_value_group_size)
    num_groups = max(num_heads // num_key_value_heads_swiftkv, 1)
    return -(-num_upper_layers // num_groups)
