"""The SwiftKV classes of each model family, derived from transformers' own."""

from __future__ import annotations

import importlib
import types
from dataclasses import dataclass
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping

from swiftkv_platform import configs
from swiftkv_platform.families import FAMILIES, Family, find_family, refuse_student
from swiftkv_platform.model.attention import HeadAttentionMixin, LatentAttentionMixin
from swiftkv_platform.model.causal_lm import SwiftKVForCausalLMMixin
from swiftkv_platform.model.decoder import SwiftKVDecoderLayerMixin, SwiftKVDecoderMixin
from swiftkv_platform.planning.config import check_no_student_keys
from swiftkv_platform.student_shape import ShapeRequest, StudentShape

_ATTENTION_MIXINS = {"head": HeadAttentionMixin, "latent": LatentAttentionMixin}
_TEACHER_ONLY_KEYS = ("model_type", "architectures", "transformers_version", "dtype", "torch_dtype")
"""Keys of a teacher's configuration that a student's does not inherit."""


@dataclass(frozen=True)
class StudentClasses:
    """The classes derived for one family."""

    teacher: type[Any]
    """The causal language model of transformers."""
    config: type[Any]
    causal_lm: type[Any]

    def make_config(self, teacher: Any, shape: StudentShape | None = None) -> Any:
        """Make a student's configuration from its teacher's; without `shape` it is dense. Raises `ModelError`: the
        teacher's configuration has a student's keys."""
        of_teacher = teacher.to_dict()
        check_no_student_keys(of_teacher)
        values = {key: value for key, value in of_teacher.items() if key not in _TEACHER_ONLY_KEYS}
        config = self.config(**values, **({} if shape is None else shape.to_config()))
        config.dtype = teacher.dtype
        return config


def _import_teacher_class(family: Family, suffix: str) -> type[Any]:
    """Import the family's class `{prefix}{suffix}` of transformers."""
    module = importlib.import_module(family.get_teacher_module_path("modeling"))
    teacher: type[Any] = getattr(module, family.get_teacher_class_name(suffix))
    return teacher


def _derive_class(family: Family, suffix: str, mixin: type, **members: Any) -> type[Any]:
    """Define `{prefix}SwiftKV{suffix}`, importable from this module: `mixin` before the family's own class."""
    teacher = _import_teacher_class(family, suffix)
    name = f"{family.class_prefix}SwiftKV{suffix}"
    body = {"__module__": __name__, "__qualname__": name, **members}
    student = types.new_class(name, (mixin, teacher), exec_body=lambda namespace: namespace.update(body))
    globals()[name] = student
    return student


def _build_classes(family: Family) -> StudentClasses:
    """Make the classes of one family and register them with transformers.

    transformers keeps experts fused in memory and one by one on disk, and looks up the conversion by `model_type`, so a
    student gets its teacher's entry.
    """
    config = configs.CONFIG_CLASSES[family.model_type]
    attention = _derive_class(family, "Attention", _ATTENTION_MIXINS[family.attention])
    layer = _derive_class(family, "DecoderLayer", SwiftKVDecoderLayerMixin, attention_class=attention)
    # transformers detects grouped experts in the source of a class's module, so a derived class takes its answer.
    shared = {
        "config_class": config,
        "_can_set_experts_implementation_cached_value": _import_teacher_class(
            family, "Model"
        )._can_set_experts_implementation(),
    }
    decoder = _derive_class(family, "Model", SwiftKVDecoderMixin, layer_class=layer, **shared)
    causal_lm = _derive_class(family, "ForCausalLM", SwiftKVForCausalLMMixin, decoder_class=decoder, **shared)
    AutoModelForCausalLM.register(config, causal_lm, exist_ok=True)
    if (conversions := get_checkpoint_conversion_mapping(family.model_type)) is not None:
        register_checkpoint_conversion_mapping(config.model_type, conversions, overwrite=True)
    return StudentClasses(_import_teacher_class(family, "ForCausalLM"), config, causal_lm)


configs.register_configs()
STUDENT_CLASSES = {model_type: _build_classes(family) for model_type, family in FAMILIES.items()}


def get_student_classes(model_type: str) -> StudentClasses:
    """Return the classes of a family, given the `model_type` of a teacher or a student. Raises `ModelError`: it is
    unknown; the message lists the families."""
    return STUDENT_CLASSES[find_family({"model_type": model_type}).model_type]


def make_student_config(teacher: Any, request: ShapeRequest) -> Any:
    """Make a student's configuration from its teacher's. Raises the errors of `convert` that need no weights."""
    refuse_student(teacher.model_type, teacher.name_or_path, "model.name_or_path")
    classes = get_student_classes(teacher.model_type)
    return classes.make_config(teacher, request.resolve(teacher.num_hidden_layers, teacher.num_attention_heads))
