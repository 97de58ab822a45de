"""The model classes of vLLM's registry, one per architecture, with the head and loading of weights.

A checkpoint's tensor names are mapped to those of vLLM's modules, which fuse projections of the same input. vLLM counts
a fused tensor as loaded once one part is loaded, so the SwiftKV parts are counted here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper, maybe_prefix
from vllm.sequence import IntermediateTensors
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from swiftkv_platform.configs.adapter import ADAPTER_FILE, AdapterConfig
from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import FAMILIES, Family
from swiftkv_platform.student_shape import LayerMap
from swiftkv_platform.vllm.model import SwiftKVDecoder
from swiftkv_platform.vllm.quantized import GATE_UP, OPTIONAL_PARAMETERS, QKV

_MAX_SHOWN_NAMES = 3
_KEY_VALUE_PROJECTION_PATTERN = re.compile(r"\.[kv]_proj_swiftkv\.")


@dataclass(frozen=True)
class StudentTensorNames:
    """Names of the checkpoint's tensors that the served model loads."""

    layer_map: LayerMap
    """Layer map of the served model; in teacher mode no layer has a leader."""
    expected: frozenset[str]
    """Names of the configuration's SwiftKV tensors; empty in teacher mode."""
    has_key_norms: bool
    has_own_output: bool
    """Whether layers >= l have their own output projection."""
    is_prefill_only: bool
    """Whether the model has no layers >= l."""

    @classmethod
    def from_model(cls, family: Family, config: Any, layer_map: LayerMap, model: nn.Module) -> StudentTensorNames:
        """Return the names for a `model` without weights; its parameters determine each projection's tensors."""
        is_prefill_only = bool(layer_map.leaders) and config.swiftkv_prefill_only
        runs_above = bool(layer_map.leaders) and not is_prefill_only
        layers = range(layer_map.num_key_value_layers, layer_map.num_hidden_layers) if runs_above else ()
        has_own_output = runs_above and config.own_output_projection
        twins = ("swiftkv", "decode_swiftkv") if layer_map.deep_leaders else ("swiftkv",)
        parts = [
            f"{layer}.self_attn.{part}_proj_swiftkv" for layer in layers for part in ("qo" if has_own_output else "q")
        ]
        parts += [f"{leader}.self_attn.{part}_proj_{t}" for leader in layer_map.leaders for part in "kv" for t in twins]
        modules = [f"model.layers.{part}" for part in parts] + ["model.norm_swiftkv"] * (
            bool(layer_map.leaders) and family.has_input_norm
        )
        has_key_norms = family.query_key_norms is not None
        names = cls(layer_map, frozenset(), has_key_norms, has_own_output, is_prefill_only)
        mapper = names.make_mapper()
        expected = {f"{module}.{kind}" for module in modules for kind in _list_tensor_kinds(model, mapper, module)}
        return replace(names, expected=frozenset(expected))

    def check_weights(
        self,
        weights: Iterable[tuple[str, torch.Tensor]],
        repeat_heads: Callable[[str, torch.Tensor], torch.Tensor] | None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors, those of the groups' K and V projections after `repeat_heads(kind, tensor)`. At the end
        raises `ModelError` for missing or unexpected SwiftKV tensors."""
        seen = set()
        for name, tensor in weights:
            if self.is_prefill_only and not self.layer_map.is_prefill_tensor(name):
                continue
            kind = name.rpartition(".")[2]
            if "_swiftkv." in name and kind not in OPTIONAL_PARAMETERS:
                seen.add(name)
                if self.expected and name not in self.expected:
                    continue  # reported below
            if repeat_heads is not None and _KEY_VALUE_PROJECTION_PATTERN.search(name):
                tensor = repeat_heads(kind, tensor)  # noqa: PLW2901
            yield name, tensor
        for verb, names in (("lacks", self.expected - seen), ("does not have", seen - self.expected)):
            if self.expected and names:
                shown = ", ".join(sorted(names)[:_MAX_SHOWN_NAMES]) + (", ..." if len(names) > _MAX_SHOWN_NAMES else "")
                subject = "the checkpoint" if verb == "lacks" else "its config.json"
                l, g = self.layer_map.num_key_value_layers, self.layer_map.key_value_group_size  # noqa: E741
                raise ModelError(
                    f"{subject} {verb} {len(names)} SwiftKV tensors (num_key_value_layers={l}, "
                    f"key_value_group_size={g}): {shown}",
                    field="model",
                )

    def make_mapper(self) -> WeightsMapper:
        """Return the mapping to vLLM's names, which drops exit heads and the tensors of the other mode."""
        dropped = {re.compile(r"^exit_(norm|head)\."): None}
        stacked: dict[str, tuple[str, str | int]] = {}
        renamed: dict[str, str] = {}
        leaders, first = self.layer_map.leaders, self.layer_map.num_key_value_layers
        if leaders:
            upper = "|".join(str(layer) for layer in range(first, self.layer_map.num_hidden_layers))
            teacher_parts = "[qkvo]|qkv" if self.has_own_output else "[qkv]|qkv"
            dropped[re.compile(rf"^model\.layers\.({upper})\.self_attn\.({teacher_parts})_proj\.")] = None
            # A group's cache has scale 1; the layers' scales are for the teacher's K and V.
            dropped[re.compile(rf"^model\.layers\.({upper})\.self_attn\.(attn\.)?[qkv]_(scale|zero_point)$")] = None
            # the groups' K and V projections become one fused projection
            for group, leader in enumerate(leaders):
                leader_prefix = f"model.layers.{leader}.self_attn"
                for part, shard in (("k", group), ("v", len(leaders) + group)):
                    stacked[f"{leader_prefix}.{part}_proj_swiftkv."] = ("model.groups.projection.", shard)
                if self.layer_map.deep_leaders:  # fused as in other layers, but from other tensors
                    twins = ("q_proj_swiftkv", "k_proj_decode_swiftkv", "v_proj_decode_swiftkv")
                    renamed |= {f"{leader_prefix}.{twin}.": f"{leader_prefix}.{twin[0]}_proj." for twin in twins}
                else:
                    renamed[f"{leader_prefix}.k_norm."] = f"model.groups.k_norms.{group}."
            followers = "|".join(str(i) for i in range(first, self.layer_map.num_hidden_layers) if i not in leaders)
            if self.has_key_norms and followers:
                dropped[re.compile(rf"^model\.layers\.({followers})\.self_attn\.k_norm\.")] = None
            renamed |= {".q_proj_swiftkv.": ".query.", ".o_proj_swiftkv.": ".o_proj."}
        else:
            dropped[re.compile(r"_swiftkv\.")] = None
        # the teacher's projections are fused as in vLLM's own models
        for part in "qkv":
            stacked[f".self_attn.{part}_proj."] = (f".self_attn.{QKV}.", part)
        for shard, part in enumerate(("gate", "up")):
            stacked[f".mlp.{part}_proj."] = (f".mlp.{GATE_UP}.", shard)
        return WeightsMapper(orig_to_new_regex=dropped, orig_to_new_substr=renamed, orig_to_new_stacked=stacked)


def _list_tensor_kinds(model: nn.Module, mapper: WeightsMapper, module: str) -> Iterator[str]:
    """Yield the kinds of tensors (`weight`, `bias`, scales, ...) that a checkpoint must have for a module."""
    name = mapper._map_name(f"{module}.weight")
    assert name is not None
    for kind, _ in model.get_submodule(name.rpartition(".")[0]).named_parameters(recurse=False):
        if kind not in OPTIONAL_PARAMETERS:
            yield kind


class SwiftKVForCausalLM(nn.Module):
    """A student, or its teacher with `swiftkv: false`; subclasses set the family."""

    family: ClassVar[Family]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        self.config = config
        self.adapter = read_adapter(vllm_config.model_config)
        if self.adapter is not None:
            base = self.adapter.base
            source = DefaultModelLoader.Source(base.name_or_path, revision=base.revision, prefix=BASE_PREFIX)
            self.secondary_weights = [source]
        self.model = SwiftKVDecoder(family=self.family, vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        if not self.model.is_prefill_only:
            self.lm_head = ParallelLMHead(
                config.vocab_size,
                config.hidden_size,
                quant_config=vllm_config.quant_config,
                prefix=maybe_prefix(prefix, "lm_head"),
            )
            if config.tie_word_embeddings:
                self.lm_head = self.lm_head.tie_weights(self.model.embed_tokens)
        self.logits_processor = LogitsProcessor(
            config.vocab_size, scale=1 / self.family.get_multiplier(config, "logits_scaling")
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embeddings: torch.Tensor = self.model.embed_tokens(input_ids)
        return embeddings

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the final hidden states [num_tokens, hidden_size]; NaN for tokens whose logits are not needed."""
        assert intermediate_tensors is None, "pipeline parallelism is refused at load"
        hidden_states: torch.Tensor = self.model(input_ids, positions, inputs_embeds)
        return hidden_states

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """[num_tokens, hidden_size] -> [num_tokens, vocab_size]; zeros from a prefill-only model."""
        if self.model.is_prefill_only:
            return hidden_states.new_zeros(len(hidden_states), self.config.vocab_size)
        logits: torch.Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def get_model_state_cls(self) -> type[Any]:
        """Return the class in which vLLM's second model runner (V2) keeps a batch's state."""
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState

        from swiftkv_platform.vllm.model_state import StudentModelState

        skips = self.model.layer_map.leaders and not self.model.is_prefill_only
        return StudentModelState if skips else DefaultModelState

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint in this project's or the reference's format. For an adapter, `weights` also has the base's
        tensors, with `BASE_PREFIX`. Raises `ModelError`: missing or unexpected SwiftKV tensors, or a different base."""
        if self.adapter is not None:
            weights = self.adapter.apply_to_base(weights, base_prefix=BASE_PREFIX, source=self.config.name_or_path)
        groups = self.model.groups if self.model.layer_map.leaders else None
        names = StudentTensorNames.from_model(self.family, self.config, self.model.layer_map, self)
        checked = names.check_weights(weights, None if groups is None else groups.repeat_heads)
        loaded: set[str] = AutoWeightsLoader(self).load_weights(checked, mapper=names.make_mapper())
        return loaded


# A class per family, which the registry imports by name. Unsupported families have one too, since the registry inspects
# it before `checks.py` refuses the model.
for _family in FAMILIES.values():
    _members = {"__module__": __name__, "family": _family}
    globals()[_family.student_class_name] = type(_family.student_class_name, (SwiftKVForCausalLM,), _members)


BASE_PREFIX = "base_model/"
"""Prefix of the tensor names of an adapter's base model; other tensor names have no slash."""
_UNSUPPORTED_PREFIXES = ("s3://", "builtin:")


def read_adapter(model: ModelConfig) -> AdapterConfig | None:
    """Return the model's adapter configuration; None for a whole model. Raises `ModelError`: the adapter is damaged, or
    vLLM cannot load its base."""
    document = get_hf_file_to_dict(ADAPTER_FILE, model.model, model.revision)
    if document is None:
        return None
    adapter = AdapterConfig.parse(document, model.model)
    adapter.check_shape(model.hf_config, model.model)
    name = adapter.base.name_or_path
    is_missing = Path(name).is_absolute() and not Path(name).is_dir()
    if name.startswith(_UNSUPPORTED_PREFIXES) or name.endswith(".gguf") or is_missing:
        raise ModelError(
            f"base.name_or_path is {name!r}, but vLLM needs a directory of this machine or a hub id. Serve the whole "
            f"model: `swiftkv export {model.model} WHOLE` writes it (with --base DIRECTORY if the base has moved)",
            field="base.name_or_path",
            value=name,
        )
    return adapter
