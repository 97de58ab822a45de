"""The classes that vLLM's registry loads by name, one per architecture: the head, and loading of weights."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import AutoWeightsLoader, maybe_prefix
from vllm.sequence import IntermediateTensors
from vllm.transformers_utils.repo_utils import get_hf_file_to_dict

from swiftkv_platform.configs.adapter import ADAPTER, AdapterConfig
from swiftkv_platform.errors import ModelError
from swiftkv_platform.families import FAMILIES, Family
from swiftkv_platform.vllm.model import SwiftKVDecoder
from swiftkv_platform.vllm.names import StudentNames


class SwiftKVForCausalLM(nn.Module):
    """A student, or its teacher with `swiftkv: false`; each subclass sets its family."""

    family: ClassVar[Family]

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config: Any = vllm_config.model_config.hf_config
        self.config = config
        self.adapter = adapter_of(vllm_config.model_config)
        if self.adapter is not None:
            self.secondary_weights = [base_weights(self.adapter)]
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
            config.vocab_size, scale=1 / self.family.multiplier(config, "logits_scaling")
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


def _define(name: str, **members: Any) -> None:
    """Define a subclass that is importable from this module as `name`."""
    globals()[name] = type(name, (SwiftKVForCausalLM,), {"__module__": __name__, **members})


# Refused families need a class too: the registry inspects it before `checks.py` can refuse the model.
for _family in FAMILIES.values():
    _define(_family.student_class, family=_family)


BASE_PREFIX = "base_model/"
"""Prefix that marks the base's tensors among the adapter's; no tensor's name has a slash."""
_UNREAD = ("s3://", "builtin:")


def adapter_of(model: ModelConfig) -> AdapterConfig | None:
    """Return the adapter that vLLM is to serve; None for a whole model. Raises `ModelError`: the adapter is damaged, or
    vLLM cannot find its base."""
    document = get_hf_file_to_dict(ADAPTER, model.model, model.revision)
    if document is None:
        return None
    adapter = AdapterConfig.parse(document, model.model)
    adapter.check_shape(model.hf_config, model.model)
    check_readable(adapter.base.name_or_path, model.model)
    return adapter


def check_readable(name: str, source: str) -> None:
    """Raise `ModelError` if the base `name` is neither a directory of this machine nor a hub id."""
    is_missing = Path(name).is_absolute() and not Path(name).is_dir()
    if name.startswith(_UNREAD) or name.endswith(".gguf") or is_missing:
        raise ModelError(
            f"base.name_or_path is {name!r}, but vLLM needs a directory of this machine or a hub id; serve the whole "
            f"model that `swiftkv export {source} WHOLE` writes (with --base DIRECTORY if the base has moved)",
            field="base.name_or_path",
            value=name,
        )


def base_weights(adapter: AdapterConfig) -> DefaultModelLoader.Source:
    """Describe the base's weight files to vLLM's loader."""
    return DefaultModelLoader.Source(
        model_or_path=adapter.base.name_or_path, revision=adapter.base.revision, prefix=BASE_PREFIX
    )
