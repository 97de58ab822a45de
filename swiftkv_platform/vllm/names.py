"""Translation of a checkpoint's tensor names to those of vLLM's modules, which fuse projections of the same input.

vLLM counts a fused tensor as loaded once one of its parts is, so the SwiftKV parts are counted here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from vllm.model_executor.models.utils import WeightsMapper

from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import Family
from swiftkv_platform.student_shape import LayerMap
from swiftkv_platform.vllm.quantized import GATE_UP, OPTIONAL, QKV

_SHOWN = 3
"""Maximum number of tensor names in a message."""
_KEY_VALUE = re.compile(r"\.[kv]_proj_swiftkv\.")


@dataclass(frozen=True)
class StudentNames:
    """The tensors of a checkpoint that the served model loads."""

    layer_map: LayerMap
    """Layer map of the served model; in teacher mode no layer has a leader."""
    expected: frozenset[str]
    """Names of the SwiftKV tensors that the configuration calls for; empty in teacher mode."""
    has_key_norms: bool
    own_output: bool
    """Whether layers >= l have their own output projection."""
    prefill_only: bool
    """Whether the model has no layers >= l."""

    @classmethod
    def of(cls, family: Family, config: Any, layer_map: LayerMap, model: nn.Module) -> StudentNames:
        """Return the names for `model`, made but not loaded: its parameters determine each projection's tensors."""
        prefill_only = bool(layer_map.leaders) and config.swiftkv_prefill_only
        runs_above = bool(layer_map.leaders) and not prefill_only
        layers = range(layer_map.num_key_value_layers, layer_map.num_hidden_layers) if runs_above else ()
        own_output = runs_above and config.own_output_projection
        twins = ("swiftkv", "decode_swiftkv") if layer_map.deep_leaders else ("swiftkv",)
        parts = [f"{layer}.self_attn.{part}_proj_swiftkv" for layer in layers for part in ("qo" if own_output else "q")]
        parts += [f"{leader}.self_attn.{part}_proj_{t}" for leader in layer_map.leaders for part in "kv" for t in twins]
        modules = [f"model.layers.{part}" for part in parts] + ["model.norm_swiftkv"] * (
            bool(layer_map.leaders) and family.normalises_inputs
        )
        has_key_norms = family.query_key_norms is not None
        names = cls(layer_map, frozenset(), has_key_norms, own_output, prefill_only)
        expected = {f"{module}.{kind}" for module in modules for kind in _kinds(model, names.mapper(), module)}
        return replace(names, expected=frozenset(expected))

    def check(
        self, weights: Iterable[tuple[str, torch.Tensor]], spread: Callable[[str, torch.Tensor], torch.Tensor] | None
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass the tensors on, after `spread(kind, tensor)` for the groups' K and V projections. At the end raises
        `ModelError`, naming SwiftKV tensors that are missing or unexpected."""
        seen = set()
        for name, tensor in weights:
            if self.prefill_only and not self.layer_map.runs_in_prefill(name):
                continue
            kind = name.rpartition(".")[2]
            if "_swiftkv." in name and kind not in OPTIONAL:
                seen.add(name)
                if self.expected and name not in self.expected:
                    continue  # named below, with all others
            yield name, spread(kind, tensor) if spread is not None and _KEY_VALUE.search(name) else tensor
        for what, names in (("lacks", self.expected - seen), ("has no place for", seen - self.expected)):
            if self.expected and names:
                shown = ", ".join(sorted(names)[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
                of = "the checkpoint" if what == "lacks" else "its config.json"
                layer_map = self.layer_map
                raise ModelError(
                    f"{of} {what} {len(names)} SwiftKV tensors (num_key_value_layers={layer_map.num_key_value_layers}, "
                    f"key_value_group_size={layer_map.key_value_group_size}): {shown}",
                    field="model",
                )

    def mapper(self) -> WeightsMapper:
        """Return the mapping to vLLM's names; it drops exit heads and tensors that only the other mode uses."""
        dropped = {re.compile(r"^exit_(norm|head)\."): None}
        stacked: dict[str, tuple[str, str | int]] = {}
        renamed: dict[str, str] = {}
        leaders, first = self.layer_map.leaders, self.layer_map.num_key_value_layers
        if leaders:
            upper = "|".join(str(layer) for layer in range(first, self.layer_map.num_hidden_layers))
            of_teacher = "[qkvo]|qkv" if self.own_output else "[qkv]|qkv"
            dropped[re.compile(rf"^model\.layers\.({upper})\.self_attn\.({of_teacher})_proj\.")] = None
            # A group's cache is written and read with scale 1: the layers' scales are for the teacher's K and V.
            dropped[re.compile(rf"^model\.layers\.({upper})\.self_attn\.(attn\.)?[qkv]_(scale|zero_point)$")] = None
            for group, leader in enumerate(leaders):
                of_leader = f"model.layers.{leader}.self_attn"
                for part, shard in (("k", group), ("v", len(leaders) + group)):
                    stacked[f"{of_leader}.{part}_proj_swiftkv."] = ("model.groups.projection.", shard)
                if self.layer_map.deep_leaders:  # fused as in any other layer, but from other tensors
                    twins = ("q_proj_swiftkv", "k_proj_decode_swiftkv", "v_proj_decode_swiftkv")
                    renamed |= {f"{of_leader}.{twin}.": f"{of_leader}.{twin[0]}_proj." for twin in twins}
                else:
                    renamed[f"{of_leader}.k_norm."] = f"model.groups.k_norms.{group}."
            followers = "|".join(str(i) for i in range(first, self.layer_map.num_hidden_layers) if i not in leaders)
            if self.has_key_norms and followers:
                dropped[re.compile(rf"^model\.layers\.({followers})\.self_attn\.k_norm\.")] = None
            renamed |= {".q_proj_swiftkv.": ".query.", ".o_proj_swiftkv.": ".o_proj."}
        else:
            dropped[re.compile(r"_swiftkv\.")] = None
        for part in "qkv":
            stacked[f".self_attn.{part}_proj."] = (f".self_attn.{QKV}.", part)
        for shard, part in enumerate(("gate", "up")):
            stacked[f".mlp.{part}_proj."] = (f".mlp.{GATE_UP}.", shard)
        return WeightsMapper(orig_to_new_regex=dropped, orig_to_new_substr=renamed, orig_to_new_stacked=stacked)


def _kinds(model: nn.Module, mapper: WeightsMapper, module: str) -> Iterator[str]:
    """Yield the kinds of tensors (`weight`, `bias`, scales, ...) that a checkpoint must have for one of its modules."""
    name = mapper._map_name(f"{module}.weight")
    assert name is not None
    for kind, _ in model.get_submodule(name.rpartition(".")[0]).named_parameters(recurse=False):
        if kind not in OPTIONAL:
            yield kind
