"""Rotary factors of the tokens of a pass, where all layers have the same and where each type of layer has its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from swiftkv_platform.model.attention import Rotation

LENGTH_DEPENDENT = ("longrope", "dynamic")
"""Kinds of RoPE whose factors depend on how long a sequence is."""


class LayerRotations:
    """Knows a model's types of layers with a rotation of their own; none where all layers have the same."""

    def __init__(self, config: Any) -> None:
        self._layer_types: list[str] = config.layer_types if config.family.rotates_by_layer_type else []
        self._types = sorted(set(self._layer_types))

    def make(self, rotary_emb: nn.Module, hidden: torch.Tensor, position_ids: torch.Tensor) -> Rotation:
        """Rotation of tokens for all layers: what `rotary_emb` gives, of every type one behind the other."""
        if not self._types:
            one: Rotation = rotary_emb(hidden, position_ids=position_ids)
            return one
        return tuple(part for kind in self._types for part in rotary_emb(hidden, position_ids, kind))

    def of(self, i: int, rotation: Rotation) -> Rotation:
        """The part of what `make` gave that layer i takes."""
        if not self._types:
            return rotation
        first = 2 * self._types.index(self._layer_types[i])
        return rotation[first : first + 2]


def rope_parameters(config: Any) -> dict[str | None, dict[str, Any]]:
    """RoPE's parameters in a configuration of transformers by type of layer; under None those of all layers."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_type = {kind: values for kind, values in rope.items() if isinstance(values, dict)}
    return by_type or {None: rope}
