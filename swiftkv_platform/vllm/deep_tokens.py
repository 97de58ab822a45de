"""Deep tokens in vLLM: their rows in a step, and the write of their own K and V (`docs/model.md`).

A deep token is a prompt's last token or a later one. A step's attention metadata has a row's position in its request,
but not the length of the prompt. vLLM passes prompt lengths to logits processors, before each forward pass and in the
order of its rows. So a logits processor copies the position of each row's first deep token to a buffer that the model
reads. In model runner V2 a `ModelState` does this (`model_state.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from swiftkv_platform.vllm.requests import PromptLogprobsCheck

WRITE_OPERATOR = "vllm::swiftkv_write_own"


class FirstDeepTokens(PromptLogprobsCheck):
    """A logits processor that validates parameters and tracks the batch's prompt lengths; it does not change logits."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._vllm_config = vllm_config
        self._is_pin_memory = is_pin_memory
        self._prompt_lengths: dict[int, int] = {}
        """Prompt length of each row of the batch."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        process_dict_updates(self._prompt_lengths, batch_update, lambda _params, prompt, _output: len(prompt or ()))
        first = [self._prompt_lengths.get(row, 1) - 1 for row in range(batch_update.batch_size)]
        get_first_deep_buffer(self._vllm_config)[: len(first)].copy_(
            torch.tensor(first, pin_memory=self._is_pin_memory), non_blocking=True
        )


def get_first_deep_buffer(vllm_config: Any) -> torch.Tensor:
    """Return the buffer [max_num_batched_tokens] from which the model reads each row's first deep position."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    target: torch.Tensor = next(layer.first_deep for layer in layers if hasattr(layer, "first_deep"))
    return target


def compute_own_slots(
    slots: torch.Tensor, positions: torch.Tensor, first_deep: torch.Tensor, selected: tuple[torch.Tensor, int] | None
) -> torch.Tensor:
    """Return the cache slot for each row's own K and V in the upper half; -1 for rows that are not deep.

    Args:
        slots: the cache slot of each token of the step [num_tokens]. positions: position of each row in its request
        [num_rows]. first_deep: by request of the batch, the position of its first deep token. selected: token index per
        row, one row per request, and the number of rows before padding; None: a row per token.
    """
    num_rows = positions.shape[0]
    is_deep = positions >= first_deep[:num_rows]
    if selected is not None:
        tokens, num_selected = selected
        slots = slots[tokens]
        is_deep = is_deep & (torch.arange(num_rows, device=positions.device) < num_selected)
    return torch.where(is_deep, slots, -1)


def _write_own_kv(key: torch.Tensor, value: torch.Tensor, layer_name: str) -> None:
    """Write keys and values, each [num_rows, num_kv_heads, stored_dim], to the layer's slots in the forward context.
    The operator is declared to mutate the key, so that compilers keep the write before the attention."""
    unified_kv_cache_update(key, value, layer_name)


def _write_own_kv_fake(key: torch.Tensor, value: torch.Tensor, layer_name: str) -> None:
    pass


direct_register_custom_op(
    op_name=WRITE_OPERATOR.removeprefix("vllm::"),
    op_func=_write_own_kv,
    mutates_args=["key"],
    fake_impl=_write_own_kv_fake,
)


def write_own_kv(key: torch.Tensor, value: torch.Tensor, layer_name: str) -> None:
    """Write the deep rows of [num_rows, num_kv_heads, stored_dim] to a group's cache, before the layer's attention."""
    torch.ops.vllm.swiftkv_write_own(key, value, layer_name)
