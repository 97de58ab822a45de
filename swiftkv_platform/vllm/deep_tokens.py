"""Deep tokens in vLLM: which rows of a step they are, and the write of their own K and V (`docs/model.md`).

A deep token is its prompt's last token or a later one. A step's attention metadata has the position of a row in its
request, not the length of the request's prompt. vLLM gives prompt lengths to logits processors, before each forward
pass and in the order of its rows, so a logits processor copies the position of each row's first deep token to a buffer
that the model reads. In the second model runner (V2) a `ModelState` does this (`model_state.py`).
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
    """A logits processor that validates parameters and tracks the batch's prompt lengths. It changes no logits."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._vllm_config = vllm_config
        self._is_pin_memory = is_pin_memory
        self._prompt_lengths: dict[int, int] = {}
        """Prompt lengths by row of the batch."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        process_dict_updates(self._prompt_lengths, batch_update, lambda _params, prompt, _output: len(prompt or ()))
        first = [self._prompt_lengths.get(row, 1) - 1 for row in range(batch_update.batch_size)]
        first_deep_tokens(self._vllm_config)[: len(first)].copy_(
            torch.tensor(first, pin_memory=self._is_pin_memory), non_blocking=True
        )


def first_deep_tokens(vllm_config: Any) -> torch.Tensor:
    """Return the buffer [max_num_batched_tokens] from which the model reads each row's first deep position."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    target: torch.Tensor = next(layer.first_deep for layer in layers if hasattr(layer, "first_deep"))
    return target


def own_slots(
    slots: torch.Tensor, positions: torch.Tensor, first_deep: torch.Tensor, kept: tuple[torch.Tensor, int] | None
) -> torch.Tensor:
    """Return the slot to which each row of the upper half writes its own K and V, or -1 for a row that does not.

    Args:
        slots: the cache slot of each token of the step [num_tokens].
        positions: position of each row in its request [num_rows].
        first_deep: by request of the batch, the position of its first deep token.
        kept: the token of each row, one row per request, and the number of rows before padding; None: a row per token.
    """
    num_rows = positions.shape[0]
    writes = positions >= first_deep[:num_rows]
    if kept is not None:
        tokens, num_kept = kept
        slots = slots[tokens]
        writes = writes & (torch.arange(num_rows, device=positions.device) < num_kept)
    return torch.where(writes, slots, -1)


def _write_own(key: torch.Tensor, value: torch.Tensor, layer_name: str) -> None:
    """Write keys and values, each [num_rows, num_kv_heads, stored_dim], to the layer's slots in the forward context.
    The operator declares that it mutates the key, so that a compiler cannot move the write behind the attention."""
    unified_kv_cache_update(key, value, layer_name)


def _write_nothing(key: torch.Tensor, value: torch.Tensor, layer_name: str) -> None:
    pass


direct_register_custom_op(
    op_name=WRITE_OPERATOR.removeprefix("vllm::"), op_func=_write_own, mutates_args=["key"], fake_impl=_write_nothing
)


def write_own(key: torch.Tensor, value: torch.Tensor, layer_name: str) -> None:
    """Write the deep rows among [num_rows, num_kv_heads, stored_dim] to a group's cache, before a layer attends."""
    torch.ops.vllm.swiftkv_write_own(key, value, layer_name)
