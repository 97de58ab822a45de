"""The configuration classes of SwiftKV checkpoints: enough to read a `config.json`, without the layers.

They derive from transformers' configuration classes, so importing them imports transformers, but no model code.

Keys that a checkpoint's `config.json` adds to its teacher's, shared with the reference implementation: `swiftkv`,
`num_key_value_layers`, `key_value_group_size`, `num_key_value_heads_swiftkv`. If they are absent, every layer computes
its own KV, groups have one layer, and the heads are the teacher's. Keys of this project only: `early_exit`,
`own_output_projection`, `swiftkv_decode_key_value`, `swiftkv_prefill_layers`.
"""

from __future__ import annotations

import importlib
import types
from typing import Any, cast, get_args

from transformers import AutoConfig

from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import FAMILIES, Family, find_family
from swiftkv_platform.planning import DecodeKeyValue, LayerMap, student_layer_map
from swiftkv_platform.planning.layers import refuse_bypassed_latents

__all__ = ["CONFIGS", "SwiftKVConfigMixin", "layer_windows", "register"]

DECODE_KEY_VALUES = get_args(DecodeKeyValue)


class SwiftKVConfigMixin:
    """Fields that a student's configuration adds to its teacher's."""

    swiftkv: bool = True
    """Always True: a loaded model is the student. Teacher mode is a state of a model in memory and is never stored."""
    num_key_value_layers: int | None = None
    """l: layers that compute their own KV; None means all of them."""
    key_value_group_size: int = 1
    """g: consecutive layers >= l that share one KV-cache layer."""
    num_key_value_heads_swiftkv: int | None = None
    """Key-value heads of layers >= l; None means the teacher's (paper, appendix C)."""
    early_exit: bool = False
    """Whether the checkpoint carries `exit_norm` and `exit_head`."""
    own_output_projection: bool = False
    """Whether layers >= l have their own output projection, `o_proj_swiftkv`, for the student's heads."""
    swiftkv_decode_key_value: str = "shared"
    """Source of the K and V of *deep* tokens, which run through layers >= l: `shared`, from x like a prompt's (the
    paper's form), or `own`, from their own hidden state in the first layer of each group."""
    swiftkv_prefill_layers: list[int] | None = None
    """Layers that skipped prompt tokens run through, ascending, the last of them l - 1; None: all layers < l."""
    swiftkv_teacher_weights: bool = True
    """Whether layers >= l keep the projections that only the teacher uses."""
    swiftkv_prefill_only: bool = False
    """Whether the checkpoint holds only the part of a student that fills KV caches and generates no token: the
    embedding, layers < l, and the K and V projections of the groups."""

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__(**kwargs)  # type: ignore[misc]  # the other base is a transformers configuration
        self.swiftkv = True
        if self.family.windows is None:  # transformers' layers of such a family ignore both, so masks must too
            for name in ("sliding_window", "layer_types"):
                if getattr(self, name, None) is not None:
                    setattr(self, name, None)
        if self.num_key_value_layers is None:
            self.num_key_value_layers = self.num_hidden_layers  # type: ignore[attr-defined]
        self.layer_map  # noqa: B018  # raises for values out of range, before any weight is read
        self._check_shared_heads()
        if self.swiftkv_decode_key_value not in DECODE_KEY_VALUES:
            raise ModelError(
                f"swiftkv_decode_key_value is {self.swiftkv_decode_key_value!r}; shared and own are accepted",
                field="swiftkv.decode_key_value",
                value=self.swiftkv_decode_key_value,
            )
        if self.layer_map.bypassed:
            self._check_bypassed()

    def _check_bypassed(self) -> None:
        if self.family.attention == "latent":
            refuse_bypassed_latents(self.swiftkv_prefill_layers, cast("Any", self).model_type)
        reason = None
        if self.swiftkv_decode_key_value != "own":
            reason = "only for students whose generated tokens have their own K and V; use swiftkv.decode_key_value own"
        elif self.swiftkv_prefill_only:
            reason = "not for exports with prefill_only; export the whole student"
        if reason is not None:
            raise ModelError(
                f"swiftkv.prefill_layers is {self.swiftkv_prefill_layers}, which is {reason}",
                field="swiftkv.prefill_layers",
                value=self.swiftkv_prefill_layers,
            )

    def _check_shared_heads(self) -> None:
        heads, config = self.num_key_value_heads_swiftkv, cast("Any", self)
        if heads is None:
            return
        self.family.check_sharing(heads, "swiftkv.sharing")
        theirs = config.num_key_value_heads
        fits = heads >= 1 and config.num_attention_heads % heads == 0
        if not fits or (theirs % heads and heads % theirs):
            raise ModelError(
                f"num_key_value_heads_swiftkv is {heads}; it must divide the {config.num_attention_heads} query heads, "
                f"and divide the teacher's {theirs} key-value heads or be a multiple of them",
                field="swiftkv.sharing",
                value=heads,
            )

    def cache_num_key_value_heads(self, cache_layer: int) -> int:
        """Return the number of key-value heads of a KV cache layer."""
        config = cast("Any", self)
        theirs: int = config.num_key_value_heads
        return theirs if cache_layer < config.num_key_value_layers else self.num_key_value_heads_swiftkv or theirs

    @property
    def family(self) -> Family:
        """The row of the family table for this `model_type`."""
        return find_family({"model_type": cast("Any", self).model_type})

    @property
    def decodes_own(self) -> bool:
        """Whether deep tokens keep their own K and V in layers >= l."""
        shares = self.swiftkv_decode_key_value == "shared" or self.swiftkv_prefill_only
        return not shares and bool(self.layer_map.leaders)

    @property
    def layer_map(self) -> LayerMap:
        """Map from each layer to the KV-cache layer that it reads."""
        num_hidden_layers: int = self.num_hidden_layers  # type: ignore[attr-defined]
        if self.swiftkv_prefill_layers is not None:
            return student_layer_map(
                num_hidden_layers,
                num_key_value_layers=self.num_key_value_layers,
                prefill_reduction=None,
                key_value_group_size=self.key_value_group_size,
                prefill_layers=self.swiftkv_prefill_layers,
            )
        return LayerMap(num_hidden_layers, self.num_key_value_layers or num_hidden_layers, self.key_value_group_size)


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
    """Define `{prefix}SwiftKVConfig`, importable from this module."""
    module = importlib.import_module(family.teacher_module("configuration"))
    teacher: type[Any] = getattr(module, family.teacher_class("Config"))
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
