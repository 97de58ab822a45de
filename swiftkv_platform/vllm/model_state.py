"""Where prompts end, for vLLM's second model runner (V2), which asks the model what it needs of a step's requests."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from swiftkv_platform.vllm.deep_tokens import first_deep_tokens


class OwnState(DefaultModelState):
    """Tells the model, before each forward pass and in the order of its rows, where the requests' prompts end."""

    supports_prompt_embeds = False

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, torch.Tensor | None]:
        first = req_states.prompt_len.gpu[input_batch.idx_mapping] - 1
        first_deep_tokens(self.vllm_config)[: len(first)].copy_(first)
        inputs: dict[str, torch.Tensor | None] = super().prepare_inputs(input_batch, req_states)
        return inputs
