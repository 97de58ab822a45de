"""The configuration classes of SwiftKV checkpoints: enough to read a `config.json`, without the layers.

They derive from transformers' configuration classes, so importing them imports transformers, but no model code.

A checkpoint's `config.json` adds the keys of `StudentShape` to its teacher's. If they are absent, every layer computes
its own KV, groups have one layer, and the heads are the teacher's.
"""

from __future__ import annotations

import importlib
import types
from typing import Any, cast

from transformers import AutoConfig

from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import FAMILIES, Family, find_family
from swiftkv_platform.student_shape import LayerMap, StudentShape

__all__ = ["CONFIG_CLASSES", "SwiftKVConfigMixin", "get_layer_windows", "register"]


class SwiftKVConfigMixin:
    """Fields that a student's configuration adds to its teacher's, besides those of its `StudentShape`."""

    swiftkv: bool = True
    """Always True: a loaded model is the student. Teacher mode is a state of a model in memory and is never stored."""
    swiftkv_teacher_weights: bool = True
    """Whether layers >= l keep the projections that only the teacher uses."""
    swiftkv_prefill_only: bool = False
    """Whether the checkpoint holds only the part of a student that fills KV caches and generates no token: the
    embedding, layers < l, and the K and V projections of the groups."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[misc]  # the other base is a transformers configuration
        self.swiftkv = True
        if self.family.windows is None:  # transformers' layers of this family ignore both, so masks must too
            for name in ("sliding_window", "layer_types"):
                if getattr(self, name, None) is not None:
                    setattr(self, name, None)
        config = cast("Any", self)
        if config.num_key_value_layers is None:
            config.num_key_value_layers = config.num_hidden_layers
        self.validate_shape()

    def validate_shape(self) -> None:
        """Raise `InvalidInputError` for a shape that does not fit the teacher, before any weight is read."""
        config, heads = cast("Any", self), self.layer_map.shape.num_key_value_heads_swiftkv
        self.shape.check_family_support(config.model_type, caches_latents=self.family.attention == "latent")
        if heads is None:
            return
        self.family.check_head_sharing(heads, "swiftkv.sharing")
        theirs = config.num_key_value_heads
        fits = heads >= 1 and config.num_attention_heads % heads == 0
        if not fits or (theirs % heads and heads % theirs):
            raise ModelError(
                f"num_key_value_heads_swiftkv is {heads}; it must divide the {config.num_attention_heads} query heads, "
                f"and divide the teacher's {theirs} key-value heads or be a multiple of them",
                field="swiftkv.sharing",
                value=heads,
            )

    def get_cache_num_key_value_heads(self, cache_layer: int) -> int:
        """Return the number of key-value heads of a KV cache layer."""
        config = cast("Any", self)
        theirs: int = config.num_key_value_heads
        return theirs if cache_layer < config.num_key_value_layers else config.num_key_value_heads_swiftkv or theirs

    @property
    def family(self) -> Family:
        """The row of the family table for this `model_type`."""
        return find_family({"model_type": cast("Any", self).model_type})

    @property
    def shape(self) -> StudentShape:
        """Shape of the student. Assigning a shape changes the configuration's fields."""
        return StudentShape.from_config(self)

    @shape.setter
    def shape(self, shape: StudentShape) -> None:
        vars(self).update(shape.to_config())

    @property
    def layer_map(self) -> LayerMap:
        """Map from each layer to the KV-cache layer that it reads. No token of a prefill-only export is deep."""
        shape = self.shape.with_shared_decode_kv() if self.swiftkv_prefill_only else self.shape
        return LayerMap(cast("Any", self).num_hidden_layers, shape)


def register_configs() -> None:
    """Make `AutoConfig` read the `config.json` of every family's students."""
    for config in CONFIG_CLASSES.values():
        AutoConfig.register(config.model_type, config, exist_ok=True)


def get_layer_windows(config: Any) -> list[int | None]:
    """List each layer's window in tokens, None for full attention. `config`: a teacher's or a student's."""
    window, count = getattr(config, "sliding_window", None), config.num_hidden_layers
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * count
    return [window if kind == "sliding_attention" else None for kind in types]


def _define_config_class(family: Family) -> type[Any]:
    """Define `{prefix}SwiftKVConfig`, importable from this module."""
    module = importlib.import_module(family.get_transformers_import_path("configuration"))
    teacher: type[Any] = getattr(module, family.get_teacher_class_name("Config"))
    name = f"{family.class_prefix}SwiftKVConfig"
    fields = StudentShape.get_config_fields()
    body = {
        "__module__": __name__,
        "__qualname__": name,
        "__annotations__": {**SwiftKVConfigMixin.__annotations__, **{key: kind for key, (kind, _) in fields.items()}},
        "model_type": family.student_model_type,
        **{key: default for key, (_, default) in fields.items()},
    }
    config = types.new_class(name, (SwiftKVConfigMixin, teacher), exec_body=lambda namespace: namespace.update(body))
    globals()[name] = config
    return config


CONFIG_CLASSES = {model_type: _define_config_class(family) for model_type, family in FAMILIES.items()}
"""Configuration classes of students, e.g. `LlamaSwiftKVConfig`, by a teacher's `model_type`."""
