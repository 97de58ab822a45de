"""The classes that vLLM's registry loads by name, one per architecture: the head, and loading of weights.

A checkpoint's tensor names are translated to those of vLLM's modules, which fuse projections of the same input. vLLM
counts a fused tensor as loaded once one of its parts is, so the SwiftKV parts are counted here.
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
            bool(layer_map.leaders) and family.has_input_norm
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
            if self.prefill_only and not self.layer_map.is_prefill_tensor(name):
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


class SwiftKVForCausalLM(nn.Module):
    """A student, or its teacher with `swiftkv: false`; each subclass sets its family."""

    family: ClassVar[Family]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        self.config = config
        self.adapter = adapter_of(vllm_config.model_config)
        if self.adapter is not None:
            base = self.adapter.base
            source = DefaultModelLoader.Source(base.name_or_path, revision=base.revision, prefix=BASE_PREFIX)
            self.secondary_weights = [source]
        self.model = SwiftKVDecoder(family=self.family, vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        if not self.model.prefill_only:
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
        if self.model.prefill_only:
            return hidden_states.new_zeros(len(hidden_states), self.config.vocab_size)
        logits: torch.Tensor | None = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def get_model_state_cls(self) -> type[Any]:
        """Return the class in which vLLM's second model runner (V2) keeps a batch's state."""
        from vllm.v1.worker.gpu.model_states.default import DefaultModelState

        from swiftkv_platform.vllm.model_state import OwnState

        return OwnState if self.model.layer_map.deep_leaders else DefaultModelState

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load a checkpoint in this project's or the reference's format. For an adapter, `weights` also has the base's
        tensors, named with `BASE_PREFIX`. Raises `ModelError`: SwiftKV tensors are missing or unexpected, or the base
        is not the adapter's."""
        if self.adapter is not None:
            weights = self.adapter.apply(weights, base_prefix=BASE_PREFIX, source=self.config.name_or_path)
        groups = self.model.groups if self.model.layer_map.leaders else None
        names = StudentNames.of(self.family, self.config, self.model.layer_map, self)
        spread = None if groups is None else groups.spread_heads
        loaded: set[str] = AutoWeightsLoader(self).load_weights(names.check(weights, spread), mapper=names.mapper())
        return loaded


# Each family's class can be imported by its name. Refused families need one too: the registry inspects it before
# `checks.py` can refuse the model.
for _family in FAMILIES.values():
    _members = {"__module__": __name__, "family": _family}
    globals()[_family.student_class_name] = type(_family.student_class_name, (SwiftKVForCausalLM,), _members)


BASE_PREFIX = "base_model/"
"""Prefix that marks the base's tensors among the adapter's; no tensor's name has a slash."""
_UNREAD = ("s3://", "builtin:")


def adapter_of(model: ModelConfig) -> AdapterConfig | None:
    """Return the adapter that vLLM is to serve; None for a whole model. Raises `ModelError`: the adapter is damaged, or
    vLLM cannot find its base."""
    document = get_hf_file_to_dict(ADAPTER_FILE, model.model, model.revision)
    if document is None:
        return None
    adapter = AdapterConfig.parse(document, model.model)
    adapter.check_shape(model.hf_config, model.model)
    name = adapter.base.name_or_path
    is_missing = Path(name).is_absolute() and not Path(name).is_dir()
    if name.startswith(_UNREAD) or name.endswith(".gguf") or is_missing:
        raise ModelError(
            f"base.name_or_path is {name!r}, but vLLM needs a directory of this machine or a hub id; serve the whole "
            f"model that `swiftkv export {model.model} WHOLE` writes (with --base DIRECTORY if the base has moved)",
            field="base.name_or_path",
            value=name,
        )
    return adapter
