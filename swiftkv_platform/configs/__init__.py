"""The configuration classes of SwiftKV checkpoints, apart from the layers: what reads a `config.json` needs no more.

They derive from transformers' configuration classes, so importing them imports transformers, but no model code.
"""

from swiftkv_platform.configs.families import CONFIGS, PREFIXES, config_class, register
from swiftkv_platform.configs.mixin import SwiftKVConfigMixin

__all__ = ["CONFIGS", "PREFIXES", "SwiftKVConfigMixin", "config_class", "register"]
