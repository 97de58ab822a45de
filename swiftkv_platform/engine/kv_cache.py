"""The tensors of the paged KV cache: two tensors in each of `num_kv_cache_layers` layers. Knows no sequences.

The two tensors hold K and V or, for multi-head latent attention (MLA), the latent and the RoPE key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swiftkv_platform.engine import kernels
from swiftkv_platform.engine.varlen import VarlenSettings
from swiftkv_platform.model.cache import SCALE_DTYPE, pack_rows, unpack_rows
from swiftkv_platform.model.packed_attention import VarlenOperator

SlotRun = tuple[int, int]
"""Adjacent slots [first, end). A slot holds one token."""


@dataclass(frozen=True)
class TensorShape:
    """Shape of one token in a cached tensor."""

    num_heads: int
    dim: int


LayerShape = tuple[TensorShape, TensorShape]


@dataclass(frozen=True)
class StorageFormat:
    """Dtypes of a cache: the model's, the stored one, and the quantized one."""

    compute_dtype: torch.dtype
    storage_dtype: torch.dtype
    """Dtype of the cache's tensors; uint8 for a quantized cache."""
    quantized_dtype: torch.dtype | None = None
    """Dtype of quantized numbers: float8_e4m3fn or int8."""

    @property
    def has_other_dtype(self) -> bool:
        """Whether numbers are stored unquantized, but not in the model's dtype."""
        return self.quantized_dtype is None and self.storage_dtype != self.compute_dtype

    def get_row_size(self, dim: int) -> int:
        return dim if self.quantized_dtype is None else dim * self.quantized_dtype.itemsize + SCALE_DTYPE.itemsize

    def get_row_bytes(self, dim: int) -> int:
        """Return the bytes of `dim` numbers and their scale."""
        return self.get_row_size(dim) * self.storage_dtype.itemsize


class PagedTensor:
    """One of a layer's two tensors, for all slots: unquantized, or 8 bits with a scale per token and head.

    On a CPU the outermost dimension in memory is heads, so that a head's tokens are contiguous. On a GPU it is tokens,
    as kernels with block tables expect.
    """

    def __init__(
        self,
        shape: TensorShape,
        num_slots: int,
        format_: StorageFormat,
        device: torch.device,
        *,
        uses_kernels: bool = False,
    ) -> None:
        heads, size, dtype = shape.num_heads, format_.get_row_size(shape.dim), format_.storage_dtype
        if device.type == "cpu":
            self.rows = torch.empty(heads, num_slots, size, dtype=dtype, device=device)
        else:
            self.rows = torch.empty(num_slots, heads, size, dtype=dtype, device=device).transpose(0, 1)
        """Contents [num_heads, num_slots, dim], or [num_heads, num_slots, bytes of numbers and scale]."""
        self._format = format_
        self.uses_kernels = uses_kernels
        """Whether the native kernels write and read the tensor: on a CPU, for a bfloat16 model."""

    @property
    def quantized_dtype(self) -> torch.dtype | None:
        return self._format.quantized_dtype

    def write(self, slots: torch.Tensor, x: torch.Tensor) -> None:
        """Write `x` [num_heads, num_tokens, dim] to `slots` [num_tokens]."""
        quantized_dtype = self.quantized_dtype
        if self.uses_kernels:
            kernels.write_slots(self.rows, slots, x, quantized_dtype)
            return
        rows = x.to(self.rows.dtype) if quantized_dtype is None else pack_rows(x, quantized_dtype)
        self.rows.index_copy_(1, slots, rows)

    def view_blocks(self, block_size: int) -> torch.Tensor:
        """Return a view of all slots, [num_blocks, block_size, num_heads, dim]."""
        return self.rows.transpose(0, 1).view(-1, block_size, self.rows.shape[0], self.rows.shape[2])

    def read_blocks(self, blocks: torch.Tensor, block_size: int) -> torch.Tensor:
        """Read whole blocks and concatenate them: [num_heads, tokens of `blocks`, dim]."""
        return self.view_blocks(block_size).index_select(0, blocks).flatten(0, 1).transpose(0, 1)

    def read(self, runs: Sequence[SlotRun]) -> torch.Tensor:
        """Read and concatenate runs: [num_heads, tokens of all runs, dim]. A view for one run in the model's dtype."""
        views = [self.rows[:, first:end] for first, end in runs]
        rows = views[0] if len(views) == 1 else torch.cat(views, dim=1)
        quantized_dtype, compute_dtype = self._format.quantized_dtype, self._format.compute_dtype
        return rows.to(compute_dtype) if quantized_dtype is None else unpack_rows(rows, quantized_dtype, compute_dtype)


class KVCache:
    """The cache tensors of all layers, for `num_blocks` blocks."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        format_: StorageFormat,
        device: torch.device,
        expands_contexts: bool = False,
        uses_kernels: bool = False,
        operator: VarlenOperator | None = None,
    ) -> None:
        self.device = device
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.format = format_
        self.expands_contexts = expands_contexts
        """Whether the model expands cached latents to keys and values (MLA). Then it gets copies of whole contexts."""
        self.varlen_settings = (
            None if operator is None else VarlenSettings(operator, block_size, device, expands_contexts)
        )
        """Settings of attention with block tables; None if attention reads runs of slots."""
        num_slots = num_blocks * block_size
        self.layers = [
            (
                PagedTensor(first, num_slots, format_, device, uses_kernels=uses_kernels),
                PagedTensor(second, num_slots, format_, device, uses_kernels=uses_kernels),
            )
            for first, second in shapes
        ]


@dataclass(frozen=True)
class StepCache:
    """The model's `past_key_values` in a step: writes the step's tokens to their slots, and returns the contents."""

    cache: KVCache
    slots: torch.Tensor
    """Slots of the step's tokens, [num_tokens]."""
    contexts: Sequence[SlotRun] | torch.Tensor
    """Runs or blocks of all sequences' contexts; used only with `KVCache.expands_contexts`."""

    def update(
        self, first: torch.Tensor, second: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[PagedTensor, PagedTensor] | tuple[torch.Tensor, torch.Tensor]:
        """Write the step's tokens: keys and values (for MLA: latents and RoPE keys), [1, num_heads, num_tokens, dim].
        Returns the layer's tensors or, with
        `KVCache.expands_contexts`, the concatenated contexts, [1, num_heads, sum of context lengths, dim]."""
        self.write(first, second, layer)
        return self.read(layer)

    def write(self, first: torch.Tensor, second: torch.Tensor, layer: int) -> None:
        """Write the step's tokens as `update` does, and return nothing."""
        stored_first, stored_second = self.cache.layers[layer]
        stored_first.write(self.slots, first[0])
        stored_second.write(self.slots, second[0])

    def read(self, layer: int) -> tuple[PagedTensor, PagedTensor] | tuple[torch.Tensor, torch.Tensor]:
        """Return what `update` returns, without writing."""
        stored_first, stored_second = self.cache.layers[layer]
        if self.cache.expands_contexts:
            return self._read_context(stored_first)[None], self._read_context(stored_second)[None]
        return stored_first, stored_second

    def _read_context(self, stored: PagedTensor) -> torch.Tensor:
        if isinstance(self.contexts, torch.Tensor):
            return stored.read_blocks(self.contexts, self.cache.block_size)
        return stored.read(self.contexts)


def get_bytes_per_block(shapes: Sequence[LayerShape], block_size: int, format_: StorageFormat) -> int:
    """Return the bytes of a block over all layers, including scales."""
    return block_size * sum(shape.num_heads * format_.get_row_bytes(shape.dim) for layer in shapes for shape in layer)
