"""Batch state of students, for vLLM's model runner V2, which gets this class from the model."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.model_states.default import DefaultModelState

from swiftkv_platform.vllm.deep_tokens import get_row_selector


class StudentModelState(DefaultModelState):
    """Batch state that tells the row selector the prompts' lengths before each forward pass."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompt_lengths: dict[int, int] = {}
        """Prompt length by index of a request in the runner's state."""

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        self._prompt_lengths[req_index] = len(new_req_data.prompt_token_ids or ())

    def prepare_attn(self, input_batch: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        selector = get_row_selector(self.vllm_config)
        selector.prompt_lengths = [self._prompt_lengths.get(index, 0) for index in input_batch.idx_mapping_np.tolist()]
        metadata: dict[str, Any] = super().prepare_attn(input_batch, *args, **kwargs)
        return metadata
