"""The configuration classes of SwiftKV checkpoints, apart from the layers: what reads a `config.json` needs no more.

They derive from transformers' configuration classes, so importing them imports transformers, but no model code.
"""

import importlib
import types
from typing import Any

from transformers import AutoConfig

from swiftkv_platform.configs.mixin import SwiftKVConfigMixin

__all__ = ["CONFIGS", "PREFIXES", "SwiftKVConfigMixin", "config_class", "register"]


PREFIXES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
    "deepseek_v2": "DeepseekV2",
}
"""Prefixes of transformers' class names, by a teacher's `model_type`."""


def config_class(model_type: str) -> type[Any]:
    """The configuration class of students of a `model_type` of `PREFIXES`, e.g. `LlamaSwiftKVConfig`."""
    return CONFIGS[model_type]


def register() -> None:
    """Make `AutoConfig` read the `config.json` of every family's students."""
    for config in CONFIGS.values():
        AutoConfig.register(config.model_type, config, exist_ok=True)


def _derive(model_type: str, prefix: str) -> type[Any]:
    """`{prefix}SwiftKVConfig`, importable from this module."""
    path = f"transformers.models.{model_type}.configuration_{model_type}"
    teacher: type[Any] = getattr(importlib.import_module(path), f"{prefix}Config")
    name = f"{prefix}SwiftKVConfig"
    body = {
        "__module__": __name__,
        "__qualname__": name,
        "__annotations__": SwiftKVConfigMixin.__annotations__,
        "model_type": f"{model_type}_swiftkv",
    }
    config = types.new_class(name, (SwiftKVConfigMixin, teacher), exec_body=lambda namespace: namespace.update(body))
    globals()[name] = config
    return config


CONFIGS = {model_type: _derive(model_type, prefix) for model_type, prefix in PREFIXES.items()}
"""Configuration classes of students, by a teacher's `model_type`."""
