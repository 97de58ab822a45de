"""Prompt lengths for the model in vLLM's second model runner (V2), which asks the model for its batch state class."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from swiftkv_platform.vllm.deep_tokens import first_deep_tokens


class OwnState(DefaultModelState):
    """Batch state that, before each forward pass, gives the model the first deep position of each row's request."""

    supports_prompt_embeds = False

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, torch.Tensor | None]:
        first = req_states.prompt_len.gpu[input_batch.idx_mapping] - 1
        first_deep_tokens(self.vllm_config)[: len(first)].copy_(first)
        inputs: dict[str, torch.Tensor | None] = super().prepare_inputs(input_batch, req_states)
        return inputs
