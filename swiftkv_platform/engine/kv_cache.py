"""The paged KV cache: its blocks, with reference counts and prefix caching, and its tensors. Knows no sequences.

There are two tensors in each of `num_kv_cache_layers` layers. They hold K and V or, for multi-head latent attention
(MLA), the latent and the RoPE key.

A block is cached once it is full and the KV of all its tokens is committed. Its hash is the SHA-256 of the preceding
block's hash and its own tokens. The first block's parent hash covers model, adapter, KV dtype, block size and tenant.
So a request never reads a block of another model, adapter, dtype, block size or tenant.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch

from swiftkv_platform.engine import kernels
from swiftkv_platform.engine.varlen import VarlenSettings
from swiftkv_platform.model.cache import SCALE_DTYPE, dequantize_from_bytes, quantize_to_bytes
from swiftkv_platform.model.packed_attention import VarlenOperator

MIN_EVICTED_BLOCKS = 8
"""Min number of cached blocks evicted at once. A growing sequence then finds adjacent blocks."""


@dataclass
class BlockTable:
    """The blocks of a sequence, in the order of its tokens."""

    blocks: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of the first full blocks, computed on demand. They stay valid when blocks are freed: tokens never
    change."""
    num_committed_blocks: int = 0
    """Number of leading blocks that were added to the prefix cache, or found in it."""
    runs: list[tuple[int, int]] = field(default_factory=list)
    """The blocks as runs [first, end) of adjacent blocks."""
    adapter_digest: str = ""
    """Digest of the sequence's adapter, whose K and V differ from other models'; empty without an adapter."""

    def append_block(self, block: int) -> None:
        self.blocks.append(block)
        if self.runs and self.runs[-1][1] == block:
            self.runs[-1] = (self.runs[-1][0], block + 1)
        else:
            self.runs.append((block, block + 1))

    def pop_block(self) -> int:
        block = self.blocks.pop()
        first, end = self.runs.pop()
        if first < end - 1:
            self.runs.append((first, end - 1))
        return block

    def clear(self) -> None:
        self.blocks.clear()
        self.runs.clear()
        self.num_committed_blocks = 0


class BlockManager:
    """Allocates `num_blocks` blocks of `block_size` tokens, counts their references and reuses them by prefix.

    A sequence gets adjacent blocks if possible: attention on a CPU reads a run of them without a copy.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool, fingerprint: str = "") -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._fingerprint = fingerprint
        self._reference_counts = [0] * num_blocks
        self._free_map = bytearray(b"\x01" * num_blocks)  # 1: empty
        self._num_empty = num_blocks
        self._evictable: OrderedDict[int, None] = OrderedDict()  # cached and unreferenced, least recently used first
        self._hash_by_block: dict[int, bytes] = {}
        self._block_by_hash: dict[bytes, int] = {}

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks available to sequences: empty ones and evictable ones of the prefix cache."""
        return self._num_empty + len(self._evictable)

    def count_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match_prefix(self, table: BlockTable, token_ids: list[int], tenant: str) -> list[int]:
        """Return the cached blocks of the longest prefix of `token_ids`, leaving at least one token to run."""
        if not self._enable_prefix_caching:
            return []
        matched: list[int] = []
        for index in range((len(token_ids) - 1) // self.block_size):
            block = self._block_by_hash.get(self._compute_hash(table, index, token_ids, tenant))
            if block is None:
                break
            matched.append(block)
        return matched

    def can_allocate(self, matched: list[int], num_tokens: int, *, num_spare: int = 0) -> bool:
        """Whether a new table over `num_tokens` tokens, beginning with `matched`, leaves `num_spare` blocks free."""
        revived = sum(self._reference_counts[block] == 0 for block in matched)
        num_blocks_wanted = self.count_blocks(num_tokens) - len(matched)
        return num_blocks_wanted + revived + num_spare <= self.num_free_blocks

    def allocate(self, table: BlockTable, matched: list[int], num_tokens: int) -> None:
        """Fill an empty table with the `matched` blocks and new blocks, for `num_tokens` tokens in total."""
        assert not table.blocks, "the table holds blocks already"
        for block in matched:
            self._evictable.pop(block, None)
            self._reference_counts[block] += 1
            table.append_block(block)
        table.num_committed_blocks = len(matched)
        self._append_blocks(table, self.count_blocks(num_tokens))

    def can_extend_table(self, table: BlockTable, num_tokens: int) -> bool:
        return self.count_blocks(num_tokens) - len(table.blocks) <= self.num_free_blocks

    def extend_table(self, table: BlockTable, num_tokens: int) -> None:
        self._append_blocks(table, self.count_blocks(num_tokens))

    def truncate_table(self, table: BlockTable, num_tokens: int) -> None:
        """Free the blocks that `num_tokens` tokens do not need, except committed ones."""
        while len(table.blocks) > max(self.count_blocks(num_tokens), table.num_committed_blocks):
            block = table.pop_block()
            assert self._reference_counts[block] == 1, f"block {block} is shared, yet not committed"
            self._reference_counts[block] = 0
            self._mark_empty(block)

    def cache_blocks(self, table: BlockTable, token_ids: list[int], num_committed_tokens: int, tenant: str) -> None:
        """Add the full blocks of the first `num_committed_tokens` tokens to the prefix cache. Do not count drafts,
        which may still be rejected."""
        if not self._enable_prefix_caching:
            return
        for index in range(table.num_committed_blocks, num_committed_tokens // self.block_size):
            name, block = self._compute_hash(table, index, token_ids, tenant), table.blocks[index]
            if name not in self._block_by_hash:
                self._block_by_hash[name] = block
                self._hash_by_block[block] = name
            table.num_committed_blocks += 1

    def free(self, table: BlockTable, *, discard: bool = False) -> None:
        """Free all blocks. Cached blocks stay in the prefix cache until eviction, a table's last blocks first.

        `discard`: remove them from the prefix cache too, because their contents are wrong.
        """
        for block in reversed(table.blocks):
            if discard and block in self._hash_by_block:
                del self._block_by_hash[self._hash_by_block.pop(block)]
            self._reference_counts[block] -= 1
            assert self._reference_counts[block] >= 0, f"block {block} was freed twice"
            if self._reference_counts[block] == 0:
                if block in self._hash_by_block:
                    self._evictable[block] = None
                else:
                    self._mark_empty(block)
        table.clear()

    def assert_consistent(self, tables: Iterable[BlockTable]) -> None:
        """Assert that every block is either in `tables`, which are all tables with blocks, or free."""
        references = Counter(block for table in tables for block in table.blocks)
        assert references == Counter({b: n for b, n in enumerate(self._reference_counts) if n}), "references differ"
        assert {block: name for name, block in self._block_by_hash.items()} == self._hash_by_block
        for block in range(self.num_blocks):
            states = (references[block] > 0, block in self._evictable, self._free_map[block] == 1)
            assert sum(states) == 1, f"block {block} is {states} (used, evictable, empty)"
            assert not (states[2] and block in self._hash_by_block), f"empty block {block} has a hash"
        assert all(block in self._hash_by_block for block in self._evictable)
        assert self._num_empty == sum(self._free_map)

    def _compute_hash(self, table: BlockTable, index: int, token_ids: list[int], tenant: str) -> bytes:
        """Return the hash of the sequence's block `index`. Missing hashes before it are computed too."""
        while len(table.hashes) <= index:
            at = len(table.hashes)
            root = f"{self._fingerprint}\n{table.adapter_digest}\n{self.block_size}\n{tenant}"
            parent = table.hashes[-1] if at else hashlib.sha256(root.encode()).digest()
            tokens = array("q", token_ids[at * self.block_size : (at + 1) * self.block_size])
            assert len(tokens) == self.block_size, "only full blocks have hashes"
            table.hashes.append(hashlib.sha256(parent + tokens.tobytes()).digest())
        return table.hashes[index]

    def _append_blocks(self, table: BlockTable, num_blocks: int) -> None:
        num_blocks_wanted = num_blocks - len(table.blocks)
        if num_blocks_wanted > self._num_empty:
            self._evict_blocks(max(num_blocks_wanted - self._num_empty, MIN_EVICTED_BLOCKS))
        for remaining in range(num_blocks_wanted, 0, -1):
            block = table.blocks[-1] + 1 if table.blocks else self.num_blocks
            if block >= self.num_blocks or not self._free_map[block]:
                block = self._find_longest_free_run(remaining)
            self._free_map[block] = 0
            self._num_empty -= 1
            self._reference_counts[block] = 1
            table.append_block(block)

    def _find_longest_free_run(self, num_blocks_wanted: int) -> int:
        """Choose the first of `num_blocks_wanted` new blocks in the longest run of empty blocks. Half of the run's
        other blocks stay empty on each side, so that the sequence before it can grow too."""
        start, size, at = -1, 0, self._free_map.find(1)
        while at >= 0:
            end = self._free_map.find(0, at)
            end = self.num_blocks if end < 0 else end
            if end - at > size:
                start, size = at, end - at
            at = self._free_map.find(1, end)
        assert size, "no block is empty"
        return start if start == 0 else start + max(size - num_blocks_wanted, 0) // 2

    def _evict_blocks(self, count: int) -> None:
        for _ in range(min(count, len(self._evictable))):
            block, _ = self._evictable.popitem(last=False)
            del self._block_by_hash[self._hash_by_block.pop(block)]
            self._mark_empty(block)

    def _mark_empty(self, block: int) -> None:
        self._free_map[block] = 1
        self._num_empty += 1


SlotRun = tuple[int, int]
"""Adjacent slots [first, end). A slot holds one token."""


@dataclass(frozen=True)
class TokenShape:
    """Shape of one token in a cached tensor."""

    num_heads: int
    dim: int


LayerShape = tuple[TokenShape, TokenShape]


@dataclass(frozen=True)
class KVCacheFormat:
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
        shape: TokenShape,
        num_slots: int,
        format_: KVCacheFormat,
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
        rows = x.to(self.rows.dtype) if quantized_dtype is None else quantize_to_bytes(x, quantized_dtype)
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
        return (
            rows.to(compute_dtype)
            if quantized_dtype is None
            else dequantize_from_bytes(rows, quantized_dtype, compute_dtype)
        )


class KVCache:
    """The cache tensors of all layers, for `num_blocks` blocks."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        format_: KVCacheFormat,
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


def get_bytes_per_block(shapes: Sequence[LayerShape], block_size: int, format_: KVCacheFormat) -> int:
    """Return the bytes of a block over all layers, including scales."""
    return block_size * sum(shape.num_heads * format_.get_row_bytes(shape.dim) for layer in shapes for shape in layer)
