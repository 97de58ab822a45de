"""Sliding windows by layer, as transformers reads them from a configuration. It knows no attention."""

from __future__ import annotations

from typing import Any


def layer_windows(config: Any) -> list[int | None]:
    """List each layer's window in tokens, None for full attention."""
    window, count = getattr(config, "sliding_window", None), config.num_hidden_layers
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * count
    return [window if kind == "sliding_attention" else None for kind in types]
