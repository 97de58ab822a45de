"""What a SwiftKV checkpoint's `config.json` adds to its teacher's. It knows the layer map's bounds, no tensors.

Keys (shared with the reference implementation): `swiftkv`, `num_key_value_layers`, `key_value_group_size`. Absent keys
mean: every layer computes its own KV; groups of one.
"""

from __future__ import annotations

from typing import Any

from swiftkv_platform.planning import LayerMap


class SwiftKVConfigMixin:
    """Fields that every family's configuration gains."""

    swiftkv: bool = True
    """Always True: loading gives the student. The mode is a property of a model in memory and is never persisted."""
    num_key_value_layers: int | None = None
    """l: layers that compute their own KV; None means all of them."""
    key_value_group_size: int = 1
    """g: consecutive layers >= l that share one KV-cache layer."""
    early_exit: bool = False
    """Whether the checkpoint carries `exit_norm` and `exit_head`."""
    swiftkv_teacher_weights: bool = True
    """Whether layers >= l keep the teacher's own q, k and v projections."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[misc]  # the other base is a transformers configuration
        self.swiftkv = True
        if self.num_key_value_layers is None:
            self.num_key_value_layers = self.num_hidden_layers  # type: ignore[attr-defined]
        self.layer_map  # noqa: B018  # out-of-range values are refused here, before any weight is read

    @property
    def layer_map(self) -> LayerMap:
        """Which layer reads which KV-cache layer."""
        num_hidden_layers: int = self.num_hidden_layers  # type: ignore[attr-defined]
        return LayerMap(num_hidden_layers, self.num_key_value_layers or num_hidden_layers, self.key_value_group_size)
