"""The rows of a step that run layers >= l in vLLM, and the write of deep tokens' own K and V (`docs/concepts.md`).

Layers >= l, and bypassed layers below l, run for a suffix of each request's tokens in the step: all tokens of a request
that decodes, and of a prompt its deep tokens, or only its last token if none is deep. They do not run in a step without
deep tokens. vLLM builds a step's attention metadata per backend, so these layers have a backend whose builder selects
the rows (`RowSelectingAttention`).

The prompts' lengths decide which tokens are deep and whether a step ends a prompt, and metadata lacks them. vLLM passes
prompts to logits processors, before each forward pass and in the order of its rows, so a logits processor stores their
lengths (`PromptLengths`). In model runner V2 a `ModelState` does this (`model_state.py`). Runner V1 has no logits
processors with drafts: the lengths are unknown, and such students must not keep own K and V (`checks.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import vllm
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention.attention import unified_kv_cache_update
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from swiftkv_platform.errors import ModelError
from swiftkv_platform.student_shape import find_deep_start
from swiftkv_platform.vllm.requests import PromptLogprobsCheck

WRITE_OPERATOR = "vllm::swiftkv_write_own"
_NEVER_DEEP = np.iinfo(np.int64).max


@dataclass(frozen=True)
class SelectedRows:
    """Rows of a step that run layers >= l."""

    tokens: torch.Tensor
    """Index of each row's token in the step, ascending; padded to a CUDA graph's size with the last index."""
    num_rows: int
    """Number of rows before padding; 0 if layers >= l do not run."""


NO_ROWS = SelectedRows(torch.empty(0, dtype=torch.int64), 0)


class RowSelector:
    """Selects the rows of each step that run layers >= l, for all attention layers of a model."""

    def __init__(self, vllm_config: VllmConfig, deep_tail: int | None, device: torch.device) -> None:
        """`deep_tail`: m of the layer map."""
        self.deep_tail = deep_tail
        self.prompt_lengths: Sequence[int] | None = None
        """Prompt length of each request in the batch, set before each step; None if vLLM does not report it."""
        self._graphs, speculative = vllm_config.compilation_config, vllm_config.speculative_config
        self._decode_length: int = 1 + (0 if speculative is None else speculative.num_speculative_tokens)
        """Max number of tokens of a request that decodes."""
        size = vllm_config.scheduler_config.max_num_batched_tokens
        self.first_deep = torch.zeros(size, dtype=torch.int64, device=device)
        """Position of the first deep token in the request of each selected row; not meaningful without `deep_tail`."""
        self._copied = np.empty(0, dtype=np.int64)
        """The values last copied to `first_deep`: the same in most decode steps."""

    def select_rows(self, step: CommonAttentionMetadata) -> tuple[CommonAttentionMetadata, SelectedRows | None]:
        """Return the metadata of a step's selected rows, and the rows; None if they are all. Sets `first_deep`. Raises
        `ModelError` if the rule needs a prompt's length and this vLLM has not reported any."""
        reads_prompt = step.is_prefilling is not None and bool(step.is_prefilling.any())
        if reads_prompt and self.deep_tail is not None and self.prompt_lengths is None:
            raise ModelError(
                "this vLLM has not reported where prompts end, which the SwiftKV plugin needs; use a tested version",
                field="vllm.version",
                value=vllm.__version__,
            )
        bounds = step.query_start_loc_cpu.numpy()
        counts = np.diff(bounds)
        needed = self._count_needed(step, counts)
        num_rows = int(needed.sum())
        if num_rows == 0:
            return step, NO_ROWS
        if self.deep_tail is not None:
            self._set_first_deep(needed, self._pad_size(num_rows))
        if num_rows == bounds[-1]:
            return step, None
        ends = np.cumsum(needed)
        tokens = np.arange(num_rows) + np.repeat(bounds[1:] - ends, needed)  # the last ones of each request
        padded = np.pad(tokens, (0, self._pad_size(num_rows) - num_rows), mode="edge")
        new_bounds = np.concatenate(([0], ends)).astype(bounds.dtype)
        selected = CommonAttentionMetadata(
            query_start_loc=_copy_to(new_bounds, step.query_start_loc.device),
            query_start_loc_cpu=torch.from_numpy(new_bounds),
            seq_lens=step.seq_lens,
            num_reqs=step.num_reqs,
            num_actual_tokens=num_rows,
            max_query_len=int(needed.max()),
            max_seq_len=step.max_seq_len,
            block_table_tensor=step.block_table_tensor,
            slot_mapping=step.slot_mapping,
            causal=True,
            seq_lens_cpu_upper_bound=step.seq_lens_cpu_upper_bound,
        )
        return selected, SelectedRows(_copy_to(padded, self.first_deep.device), num_rows)

    def _count_needed(self, step: CommonAttentionMetadata, counts: np.ndarray) -> np.ndarray:
        """Return the number of selected tokens per request. `counts`: its tokens in the step."""
        # Steps of this size may replay a full CUDA graph, in which all rows run all layers, also for short prompts.
        if step.max_query_len <= self._decode_length or step.is_prefilling is None:
            return counts
        num_deep = step.seq_lens_cpu_upper_bound.numpy() - self._find_deep_start(len(counts))
        if (num_deep <= 0).all():  # no request needs the logits of a next token
            return np.zeros_like(counts)
        needed = np.ones_like(counts) if self.deep_tail is None else np.maximum(num_deep, 1)
        return np.where(step.is_prefilling.numpy(), np.minimum(needed, counts), counts)

    def _find_deep_start(self, num_requests: int) -> np.ndarray:
        """Return the position of the first deep token per request, or of a prompt's last token without deep ones; 0 if
        the prompt is unknown, and for padding, which has no tokens."""
        lengths = np.zeros(num_requests, dtype=np.int64)
        known = (self.prompt_lengths or ())[:num_requests]
        lengths[: len(known)] = known
        return find_deep_start(lengths, self.deep_tail or 1)

    def _set_first_deep(self, needed: np.ndarray, size: int) -> None:
        values = np.full(size, _NEVER_DEEP)
        by_row = np.repeat(self._find_deep_start(len(needed)), needed)
        values[: len(by_row)] = by_row
        if not np.array_equal(values, self._copied):
            self.first_deep[:size].copy_(_copy_to(values, self.first_deep.device))
            self._copied = values

    def _pad_size(self, size: int) -> int:
        """Return the smallest size of a CUDA graph for `size` rows; `size` if there is none."""
        mode = self._graphs.cudagraph_mode
        sizes = self._graphs.cudagraph_capture_sizes if mode is not None and mode.has_piecewise_cudagraphs() else None
        return min((each for each in sizes or () if size <= each <= len(self.first_deep)), default=size)


def _copy_to(array: np.ndarray, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class RowSelectingAttention(Attention):
    """Attention of a layer that runs for the selected rows and reads another layer's KV cache."""

    def __init__(self, selector: RowSelector, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.row_selector = selector

    def get_attn_backend(self) -> type[AttentionBackend]:
        backend: type[AttentionBackend] = make_row_selecting_backend(super().get_attn_backend())
        return backend


@lru_cache
def make_row_selecting_backend(backend: type[AttentionBackend]) -> type[AttentionBackend]:
    """Return an attention backend like `backend` whose metadata is for the selected rows, and has them in the attribute
    `selected_rows`."""
    base: Any = backend.get_builder_cls()

    class RowSelectingBuilder(base):
        def build(
            self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
        ) -> Any:
            step, rows = get_row_selector(self.vllm_config).select_rows(common_attn_metadata)
            metadata: Any = super().build(common_prefix_len, step, fast_build)
            metadata.selected_rows = rows
            return metadata

    members = {"get_builder_cls": staticmethod(lambda: RowSelectingBuilder)}
    return type(f"RowSelecting{backend.__name__}", (backend,), members)


def get_row_selector(vllm_config: Any) -> RowSelector:
    """Return the selector of the model's layers."""
    layers = vllm_config.compilation_config.static_forward_context.values()
    selector: RowSelector = next(layer.row_selector for layer in layers if isinstance(layer, RowSelectingAttention))
    return selector


class PromptLengths(PromptLogprobsCheck):
    """A logits processor that validates parameters and tracks the batch's prompt lengths; it does not change logits."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._vllm_config = vllm_config
        self._lengths: dict[int, int] = {}
        """Prompt length of each row of the batch."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        process_dict_updates(self._lengths, batch_update, lambda _params, prompt, _output: len(prompt or ()))
        rows = range(batch_update.batch_size)
        get_row_selector(self._vllm_config).prompt_lengths = [self._lengths.get(row, 0) for row in rows]


def compute_own_slots(
    slots: torch.Tensor, positions: torch.Tensor, first_deep: torch.Tensor, rows: SelectedRows | None
) -> torch.Tensor:
    """Return the cache slot for each row's own K and V in layers >= l; -1 for rows that are not deep.

    Args:
        slots: the cache slot of each token of the step [num_tokens]. positions: position of each row in its request
        [num_rows]. first_deep: position of the first deep token in each row's request [num_rows].
    """
    return torch.where(positions >= first_deep, slots if rows is None else slots[rows.tokens], -1)


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
