"""The tensors of the paged KV cache: `num_kv_cache_layers` layers of two tensors each. Knows no sequences.

The model determines what the two hold: K and V, or, for multi-head latent attention, the latent and the RoPE key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from swiftkv_platform.engine import kernels
from swiftkv_platform.engine.varlen import Pages
from swiftkv_platform.model.cache import SCALE_DTYPE, pack, unpack
from swiftkv_platform.model.packed_attention import VarlenOperator

Run = tuple[int, int]
"""Adjacent slots: the first, and the one after the last. A slot holds one token."""


@dataclass(frozen=True)
class TensorShape:
    """Shape of a token in a cached tensor."""

    num_heads: int
    dim: int


LayerShape = tuple[TensorShape, TensorShape]


@dataclass(frozen=True)
class StorageFormat:
    """Dtypes in which cached numbers are stored and read."""

    computed: torch.dtype
    stored: torch.dtype
    """Dtype of the cache's tensors; uint8 if it is quantised."""
    payload: torch.dtype | None = None
    """Dtype of quantised numbers: float8_e4m3fn or int8."""

    @property
    def converts(self) -> bool:
        """Whether numbers are stored unquantised, but in another dtype than the model's."""
        return self.payload is None and self.stored != self.computed

    def row_size(self, dim: int) -> int:
        return dim if self.payload is None else dim * self.payload.itemsize + SCALE_DTYPE.itemsize

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of `dim` numbers, including the scale."""
        return self.row_size(dim) * self.stored.itemsize


class PagedTensor:
    """One of a layer's two tensors, for all slots, unquantised or in 8 bits with a scale per token and head.

    On a CPU the first dimension in memory is heads, so that a head's tokens are contiguous; on a GPU it is tokens, as
    kernels with block tables expect.
    """

    def __init__(
        self, shape: TensorShape, num_slots: int, format_: StorageFormat, device: torch.device, *, native: bool = False
    ) -> None:
        heads, size, dtype = shape.num_heads, format_.row_size(shape.dim), format_.stored
        if device.type == "cpu":
            self.rows = torch.empty(heads, num_slots, size, dtype=dtype, device=device)
        else:
            self.rows = torch.empty(num_slots, heads, size, dtype=dtype, device=device).transpose(0, 1)
        """Contents [num_heads, num_slots, dim], or [.., bytes of payload and scale]."""
        self._format = format_
        self.native = native
        """Whether the engine's kernels write and read it: on a CPU, in bfloat16."""

    @property
    def payload(self) -> torch.dtype | None:
        return self._format.payload

    def write(self, slots: torch.Tensor, x: torch.Tensor) -> None:
        """Write `x` [num_heads, num_tokens, dim] to `slots` [num_tokens]."""
        payload = self.payload
        if self.native:
            kernels.write(self.rows, slots, x, payload)
            return
        self.rows.index_copy_(1, slots, x.to(self.rows.dtype) if payload is None else pack(x, payload))

    def blocks(self, block_size: int) -> torch.Tensor:
        """Return a view of all slots, [num_blocks, block_size, num_heads, dim]."""
        return self.rows.transpose(0, 1).view(-1, block_size, self.rows.shape[0], self.rows.shape[2])

    def read_blocks(self, blocks: torch.Tensor, block_size: int) -> torch.Tensor:
        """Read whole blocks, one after another: [num_heads, tokens of `blocks`, dim]."""
        return self.blocks(block_size).index_select(0, blocks).flatten(0, 1).transpose(0, 1)

    def read(self, runs: Sequence[Run]) -> torch.Tensor:
        """Read runs: [num_heads, tokens of all runs, dim]; a view if it is one run, not quantised and not converted."""
        views = [self.rows[:, first:end] for first, end in runs]
        rows = views[0] if len(views) == 1 else torch.cat(views, dim=1)
        payload, computed = self._format.payload, self._format.computed
        return rows.to(computed) if payload is None else unpack(rows, payload, computed)


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
        expanded: bool = False,
        native: bool = False,
        operator: VarlenOperator | None = None,
    ) -> None:
        self.device = device
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.format = format_
        self.expanded = expanded
        """Whether the model expands cached tensors to keys and values, so that it gets contexts instead of storage."""
        self.pages = None if operator is None else Pages(operator, block_size, device, expanded)
        """Pages that attention reads by block tables; None if it reads runs."""
        num_slots = num_blocks * block_size
        self.layers = [
            (
                PagedTensor(first, num_slots, format_, device, native=native),
                PagedTensor(second, num_slots, format_, device, native=native),
            )
            for first, second in shapes
        ]


@dataclass(frozen=True)
class StepCache:
    """Cache of a step, the model's `past_key_values`: it writes to the step's slots, and attention reads."""

    cache: KVCache
    slots: torch.Tensor
    """Slots of the step's tokens, [num_tokens]."""
    contexts: Sequence[Run] | torch.Tensor
    """Runs or blocks of all sequences' contexts, only used if the model expands the cache's contents."""

    def update(
        self, first: torch.Tensor, second: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[PagedTensor, PagedTensor] | tuple[torch.Tensor, torch.Tensor]:
        """Write the step's tokens, each tensor [1, num_heads, num_tokens, dim]. Returns the layer's storage; or, for a
        model that expands its cache, all contexts concatenated, [1, num_heads, sum of context lengths, dim]."""
        self.write(first, second, layer)
        return self.read(layer)

    def write(self, first: torch.Tensor, second: torch.Tensor, layer: int) -> None:
        """Write as `update`, without reading."""
        stored_first, stored_second = self.cache.layers[layer]
        stored_first.write(self.slots, first[0])
        stored_second.write(self.slots, second[0])

    def read(self, layer: int) -> tuple[PagedTensor, PagedTensor] | tuple[torch.Tensor, torch.Tensor]:
        """Return what `update` returns, without writing."""
        stored_first, stored_second = self.cache.layers[layer]
        if self.cache.expanded:
            return self._context(stored_first)[None], self._context(stored_second)[None]
        return stored_first, stored_second

    def _context(self, stored: PagedTensor) -> torch.Tensor:
        if isinstance(self.contexts, torch.Tensor):
            return stored.read_blocks(self.contexts, self.cache.block_size)
        return stored.read(self.contexts)


def bytes_per_block(shapes: Sequence[LayerShape], block_size: int, format_: StorageFormat) -> int:
    """Return the bytes of a block in all layers, including scales."""
    return block_size * sum(shape.num_heads * format_.row_bytes(shape.dim) for layer in shapes for shape in layer)
