"""The configuration classes of SwiftKV checkpoints, apart from the layers: what reads a `config.json` needs no more.

They derive from transformers' configuration classes, so importing them imports transformers, but no model code.
"""

import importlib
import types
from typing import Any

from transformers import AutoConfig

from swiftkv_platform.configs.mixin import SwiftKVConfigMixin
from swiftkv_platform.families import FAMILIES, Family

__all__ = ["CONFIGS", "SwiftKVConfigMixin", "layer_windows", "register"]


def register() -> None:
    """Make `AutoConfig` read the `config.json` of every family's students."""
    for config in CONFIGS.values():
        AutoConfig.register(config.model_type, config, exist_ok=True)


def layer_windows(config: Any) -> list[int | None]:
    """List each layer's window in tokens, None for full attention. `config`: a teacher's or a student's."""
    window, count = getattr(config, "sliding_window", None), config.num_hidden_layers
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * count
    return [window if kind == "sliding_attention" else None for kind in types]


def _derive(family: Family) -> type[Any]:
    """`{prefix}SwiftKVConfig`, importable from this module."""
    path = f"transformers.models.{family.model_type}.configuration_{family.model_type}"
    teacher: type[Any] = getattr(importlib.import_module(path), f"{family.prefix}Config")
    name = f"{family.prefix}SwiftKVConfig"
    body = {
        "__module__": __name__,
        "__qualname__": name,
        "__annotations__": SwiftKVConfigMixin.__annotations__,
        "model_type": family.student_type,
    }
    config = types.new_class(name, (SwiftKVConfigMixin, teacher), exec_body=lambda namespace: namespace.update(body))
    globals()[name] = config
    return config


CONFIGS = {model_type: _derive(family) for model_type, family in FAMILIES.items()}
"""Configuration classes of students, e.g. `LlamaSwiftKVConfig`, by a teacher's `model_type`."""
