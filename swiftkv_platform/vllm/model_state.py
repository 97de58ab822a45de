"""Batch state with prompt lengths, for vLLM's model runner V2, which gets this class from the model."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from swiftkv_platform.vllm.deep_tokens import get_first_deep_buffer


class OwnKVModelState(DefaultModelState):
    """Batch state that writes each row's first deep position to the model's buffer before each forward pass."""

    supports_prompt_embeds = False

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, torch.Tensor | None]:
        first = req_states.prompt_len.gpu[input_batch.idx_mapping] - 1
        get_first_deep_buffer(self.vllm_config)[: len(first)].copy_(first)
        inputs: dict[str, torch.Tensor | None] = super().prepare_inputs(input_batch, req_states)
        return inputs
