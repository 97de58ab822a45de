"""The model families, as one table. A row names a transformers module; the SwiftKV classes are made from it.

A family fits when its decoder embeds, runs its layers and normalises, no more; its layers hand keyword arguments on to
their attention; and that is of a kind that there is: by head with `q_proj`, `k_proj`, `v_proj`, `o_proj` and Llama's
RoPE (rotated halves), or DeepSeek-V2's latent attention. What differs further is a column here, not a fork of the
forward pass.
"""

from __future__ import annotations

import importlib
import types
from dataclasses import dataclass
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from swiftkv_platform import configs
from swiftkv_platform.model.attention import HeadAttentionMixin, SwiftKVAttentionMixin
from swiftkv_platform.model.causal_lm import SwiftKVForCausalLMMixin
from swiftkv_platform.model.decoder import SwiftKVDecoderLayerMixin, SwiftKVDecoderMixin
from swiftkv_platform.model.latent_attention import LatentAttentionMixin
from swiftkv_platform.planning import check_family


@dataclass(frozen=True)
class Family:
    """One teacher architecture of transformers."""

    model_type: str
    """Teacher's `model_type`; the student's is `{model_type}_swiftkv`."""
    attention: type[SwiftKVAttentionMixin] = HeadAttentionMixin
    """The kind of attention."""

    @property
    def prefix(self) -> str:
        return configs.PREFIXES[self.model_type]

    def teacher_class(self, suffix: str) -> type[Any]:
        """The family's class `{prefix}{suffix}`, from its modelling module."""
        path = f"transformers.models.{self.model_type}.modeling_{self.model_type}"
        teacher: type[Any] = getattr(importlib.import_module(path), f"{self.prefix}{suffix}")
        return teacher


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama"),
        Family("mistral"),
        Family("qwen2"),
        Family("qwen3"),
        Family("mixtral"),
        Family("qwen3_moe"),
        Family("deepseek_v2", LatentAttentionMixin),
    )
}


_TEACHER_KEYS = ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype")
"""Keys that a student's configuration does not take over from its teacher's."""


@dataclass(frozen=True)
class StudentClasses:
    """The classes made for one family."""

    config: type[Any]
    causal_lm: type[Any]

    def config_from(self, teacher: Any, **fields: Any) -> Any:
        """The student's configuration: the teacher's with `fields` of `SwiftKVConfigMixin`; without l it is dense."""
        values = {key: value for key, value in teacher.to_dict().items() if key not in _TEACHER_KEYS}
        config = self.config(**values, **fields)
        config.dtype = teacher.dtype
        return config


def _derive(family: Family, suffix: str, mixin: type, **members: Any) -> type[Any]:
    """`{prefix}SwiftKV{suffix}`: the mixin before the family's own class, importable from this module."""
    teacher = family.teacher_class(suffix)
    name = f"{family.prefix}SwiftKV{suffix}"
    body = {"__module__": __name__, "__qualname__": name, **members}
    student = types.new_class(name, (mixin, teacher), exec_body=lambda namespace: namespace.update(body))
    globals()[name] = student
    return student


def _build(family: Family) -> StudentClasses:
    """Make the classes of one family and register them with transformers.

    transformers keeps experts fused in memory and one by one on disk; how a tensor is named and shaped there is looked
    up by `model_type`, so a student inherits its teacher's entry.
    """
    config = configs.config_class(family.model_type)
    attention = _derive(family, "Attention", family.attention)
    layer = _derive(family, "DecoderLayer", SwiftKVDecoderLayerMixin, attention_class=attention)
    # transformers looks for experts that it can call by groups in the source of a class's own module.
    shared = {
        "config_class": config,
        "_can_set_experts_implementation_cached_value": family.teacher_class("Model")._can_set_experts_implementation(),
    }
    decoder = _derive(family, "Model", SwiftKVDecoderMixin, layer_class=layer, **shared)
    causal_lm = _derive(family, "ForCausalLM", SwiftKVForCausalLMMixin, decoder_class=decoder, **shared)
    AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
    if (conversions := get_checkpoint_conversion_mapping(family.model_type)) is not None:
        register_checkpoint_conversion_mapping(config.model_type, conversions, overwrite=True)
    return StudentClasses(config, causal_lm)


configs.register()
STUDENTS = {model_type: _build(family) for model_type, family in FAMILIES.items()}


def student_classes(model_type: str) -> StudentClasses:
    """The classes that serve teachers of `model_type`. Raises `ModelError`: naming the families there are."""
    check_family({"model_type": model_type}, STUDENTS)
    return STUDENTS[model_type]
