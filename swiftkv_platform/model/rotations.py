"""Rotary factors of a pass's tokens, for models with the same factors in all layers or different ones by layer type."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from swiftkv_platform.model.attention import Rotation

LENGTH_DEPENDENT = ("longrope", "dynamic")
"""Kinds of RoPE whose factors depend on the length of the sequence."""


class LayerRotations:
    """Rotations by layer of a model, whose layer types may each have their own RoPE."""

    def __init__(self, config: Any) -> None:
        self._layer_types: list[str] = config.layer_types if config.family.rotates_by_layer_type else []
        self._types = sorted(set(self._layer_types))

    def make(self, rotary_emb: nn.Module, hidden: torch.Tensor, position_ids: torch.Tensor) -> Rotation:
        """Make the tokens' rotation for all layers: the outputs of `rotary_emb` for each layer type, concatenated."""
        if not self._types:
            one: Rotation = rotary_emb(hidden, position_ids=position_ids)
            return one
        return tuple(part for kind in self._types for part in rotary_emb(hidden, position_ids, kind))

    def of(self, i: int, rotation: Rotation) -> Rotation:
        """Return layer i's part of a rotation from `make`."""
        if not self._types:
            return rotation
        first = 2 * self._types.index(self._layer_types[i])
        return rotation[first : first + 2]


def rope_parameters(config: Any) -> dict[str | None, dict[str, Any]]:
    """Return RoPE's parameters in a transformers configuration by layer type; under None if all layers share them."""
    rope = getattr(config, "rope_parameters", None) or {}
    by_type = {kind: values for kind, values in rope.items() if isinstance(values, dict)}
    return by_type or {None: rope}
