"""Deep tokens in vLLM: which rows of a step they are, and the write of their own K and V (`docs/model.md`).

A deep token is its prompt's last one or a later one. The attention metadata of a step tell where a row stands in its
request, not where the request's prompt ended; vLLM tells that to logits processors, before each forward pass and in the
order of its rows. So one of them keeps the position of each row's first deep token where the model reads it. In the
second model runner (V2) a `ModelState` does (`model_state.py`).
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from swiftkv_platform.vllm.requests import RefusePromptLogprobs

WRITE_OPERATOR = "vllm::swiftkv_write_own"


class FirstDeepTokens(RefusePromptLogprobs):
    """A logits processor that validates parameters and follows the prompt lengths of the batch. Touches no logits."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._vllm_config = vllm_config
        self._is_pin_memory = is_pin_memory
        self._prompt_lengths: dict[int, int] = {}
        """By row of the batch."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        process_dict_updates(self._prompt_lengths, batch_update, lambda _params, prompt, _output: len(prompt or ()))
        first = [self._prompt_lengths.get(row, 1) - 1 for row in range(batch_update.batch_size)]
        first_deep_tokens(self._vllm_config)[: len(first)].copy_(
            torch.tensor(first, pin_memory=self._is_pin_memory), non_blocking=True
        )


def first_deep_tokens(vllm_config: Any) -> torch.Tensor:
    """Where the model reads the position of each row's first deep token [max_num_batched_tokens]."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    target: torch.Tensor = next(layer.first_deep for layer in layers if hasattr(layer, "first_deep"))
    return target


def own_slots(
    slots: torch.Tensor, positions: torch.Tensor, first_deep: torch.Tensor, kept: tuple[torch.Tensor, int] | None
) -> torch.Tensor:
    """Where each row of the upper half writes its own K and V, -1 for a row that does not.

    Args:
        slots: the cache slot of each token of the step [num_tokens].
        positions: position of each row in its request [num_rows].
        first_deep: by request of the batch, the position of its first deep token.
        kept: the token of each row, one row a request, and how many rows are not padding; None: every token is a row.
    """
    num_rows = positions.shape[0]
    writes = positions >= first_deep[:num_rows]
    if kept is not None:
        tokens, num_kept = kept
        slots = slots[tokens]
        writes = writes & (torch.arange(num_rows, device=positions.device) < num_kept)
    return torch.where(writes, slots, -1)


def _write_own(key: torch.Tensor, value: torch.Tensor, layer_name: str) -> None:
    """Write rows' keys and values, each [num_rows, num_kv_heads, stored_dim], to the slots that the forward context has
    for the layer. The key is declared as changed, which keeps a compiler from moving the write behind the attention
    that takes it."""
    unified_kv_cache_update(key, value, layer_name)


def _write_nothing(key: torch.Tensor, value: torch.Tensor, layer_name: str) -> None:
    pass


direct_register_custom_op(
    op_name=WRITE_OPERATOR.removeprefix("vllm::"), op_func=_write_own, mutates_args=["key"], fake_impl=_write_nothing
)


def write_own(key: torch.Tensor, value: torch.Tensor, layer_name: str) -> None:
    """Write the deep rows among [num_rows, num_kv_heads, stored_dim] to a group's cache, before a layer attends."""
    torch.ops.vllm.swiftkv_write_own(key, value, layer_name)
