"""Attention over packed samples that are concatenated in one row: each sample attends to itself, without a mask.

On a GPU PyTorch's `varlen_attn` (FlashAttention) takes the samples' borders. Elsewhere SDPA runs once per sample with
its causal flag: on a CPU that is 11 times as fast as a mask in rows of 2,048 tokens with samples of 133, and 38 times
in rows of 8,192. Batching samples of equal length into one call was slower at either size: gathering them, and
scattering their gradients, costs more than the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, Self, cast

import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.model.attention import KeyValue
from swiftkv_platform.model.context import PACKED, DecoderContext, Masks, TokenSelection, layer_windows

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_CAPABILITY = (8, 0)
"""Minimum compute capability of a GPU for FlashAttention: Ampere."""
MAX_FLASH_HEAD_DIM, FLASH_HEAD_DIM_MULTIPLE = 256, 8


def flash_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why FlashAttention cannot run a model on this GPU; None: it can."""
    capability = torch.cuda.get_device_capability(device)
    if capability < FLASH_CAPABILITY:
        return f"the GPU has compute capability {capability}; {FLASH_CAPABILITY} or more is needed"
    return flash_refusal_of_heads(dtype, head_dim)


def flash_refusal_of_heads(dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why FlashAttention cannot run such heads on any GPU; None: it can on those that it supports."""
    if dtype not in FLASH_DTYPES:
        return f"the model computes in {dtype}; float16 or bfloat16 is needed"
    if head_dim > MAX_FLASH_HEAD_DIM or head_dim % FLASH_HEAD_DIM_MULTIPLE:
        return f"head_dim is {head_dim}; a multiple of 8 up to {MAX_FLASH_HEAD_DIM} is needed"
    return None


SAMPLES = "packed_samples"
"""Keyword argument with which every attention layer of a pass gets the samples."""

TOKENS_STEP = 64
"""Training pads sizes of operators to multiples of this many tokens where it can. On a CPU, operators of narrow dtypes
are compiled for each new size, which takes longer than running them, and the code is kept: some 5 MiB for each length
in attention's backward pass. With padding few sizes occur."""

VarlenOperator = Callable[..., Any]
"""Function with the signature of `torch.nn.attention.varlen.varlen_attn`."""


@dataclass(frozen=True)
class Turn:
    """A run of consecutive deep tokens in a sample; all indices count the tokens of the whole row."""

    sample: int
    """First token of the sample."""
    begin: int
    end: int
    """The token after its last one."""


@dataclass(frozen=True)
class _Reads:
    """Rows of the queries of all turns, and rows of the keys and values that each turn reads, turn by turn."""

    asking: Tensor
    read: Tensor
    sizes: list[int]
    """Number of queries of each turn."""
    num_read: list[int]
    """Number of keys of each turn."""
    borders: tuple[Tensor, Tensor]
    """Borders of the turns among queries and among keys, see `_borders`."""


@dataclass(frozen=True)
class PackedSamples:
    """Samples concatenated in a batch of one row; tokens after the last sample (padding) attend to nothing. A
    `SelectsTokens`."""

    lengths: tuple[int, ...]
    windows: tuple[int | None, ...]
    """By layer, the number of tokens that a query sees, including itself; None: all before it."""
    dtype: torch.dtype
    """Dtype in which the model computes; the operator gets its inputs in it."""
    operator: VarlenOperator | None = None
    """Attention operator; None: SDPA, sample by sample."""
    borders: Tensor | None = None
    """First token of each sample and the end of the last one, int32 on the device; set if there is an operator."""
    kept: Tensor | None = None
    """Tokens that have queries, int64 [num_kept]; None: all."""
    turns: tuple[Turn, ...] | None = None
    """Turns whose tokens have queries, in a student whose deep tokens keep their own K and V; None: all tokens have.
    If there are turns, kept tokens begin with those of all turns."""
    num_tokens: int = 0
    """Number of all tokens, including padding; set if there are turns."""
    device: torch.device | None = None
    """Device of the tokens; set if there are turns."""

    @classmethod
    def create(
        cls,
        config: Any,
        lengths: Sequence[int],
        *,
        device: torch.device,
        dtype: torch.dtype,
        operator: VarlenOperator | None = None,
    ) -> Self:
        borders = None if operator is None else _borders(lengths, device)
        return cls(tuple(lengths), layer_windows(config), dtype, operator, borders)

    def with_turns(self, counts: Tensor) -> Self:
        """Return the samples for layers >= l of a student whose deep tokens, marked by `counts` [num_tokens], keep
        their own K and V. The keys and values must be those from x of all tokens, followed by the kept tokens' own.
        Reads `counts` on the host."""
        turns: list[Turn] = []
        deep, begin = counts.tolist(), 0
        for length in self.lengths:
            end = begin + length
            edges = [at for at in range(begin, end + 1) if (at < end and deep[at]) != (at > begin and deep[at - 1])]
            turns += [Turn(begin, *pair) for pair in zip(edges[::2], edges[1::2], strict=True)]
            begin = end
        return replace(self, turns=tuple(turns), num_tokens=len(deep), device=counts.device)

    def select_tokens(self, selection: TokenSelection) -> Self:
        assert isinstance(selection.tokens, Tensor), "training keeps the tokens that count"
        return replace(self, kept=selection.tokens)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, layer: int) -> Tensor:
        """Attend within samples: [1, num_tokens, num_heads, dim] from queries, keys and values [1, heads, num_tokens,
        dim], the queries of the kept tokens only."""
        if self.turns is not None:
            return self._attend_turns(query, key, value, scaling, self.windows[layer])
        if self.kept is None:
            return self._attend(query, key, value, scaling, self.windows[layer])
        # Kernels need causal runs, but any tokens may be kept: put their queries at their places among all tokens.
        shape = (1, query.shape[1], key.shape[2], query.shape[3])
        asked = query.new_zeros(shape).index_copy(2, self.kept, query)
        return self._attend(asked, key, value, scaling, self.windows[layer]).index_select(1, self.kept)

    @cached_property
    def _reads(self) -> _Reads:
        """Rows of the turns' queries, keys and values, which are the same in every layer: copied to the device once."""
        assert self.turns is not None
        assert self.device is not None, "there are turns"
        sizes = [turn.end - turn.begin for turn in self.turns]
        first_rows = [turn.begin for turn in self.turns] if self.kept is None else list(accumulate(sizes, initial=0))
        asking: list[int] = []
        read: list[int] = []
        num_read: list[int] = []
        for turn, first, size in zip(self.turns, first_rows, sizes, strict=False):
            own = range(first, first + size)
            asking += own
            read += [*range(turn.sample, turn.begin), *(self.num_tokens + row for row in own)]
            num_read.append(turn.begin - turn.sample + size)
        rows = [torch.tensor(some).to(self.device, non_blocking=True) for some in (asking, read)]
        borders = _borders(sizes, self.device), _borders(num_read, self.device)
        return _Reads(rows[0], rows[1], sizes, num_read, borders)

    def _attend_turns(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Attend from each turn's tokens to the K and V from x before the turn and to the turn's own; other tokens'
        output is zero."""
        output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
        if not self.turns:
            return output + 0.0 * (query.sum() + key.sum() + value.sum())  # other workers wait for these gradients
        reads = self._reads
        query, key, value = (
            tensor.index_select(2, rows)
            for tensor, rows in ((query, reads.asking), (key, reads.read), (value, reads.read))
        )
        if self.operator is None:
            parts = zip(
                query.split(reads.sizes, 2), key.split(reads.num_read, 2), value.split(reads.num_read, 2), strict=True
            )
            attended = torch.cat(
                [_attend_causally(*part, scaling, window or self.num_tokens).transpose(1, 2) for part in parts], dim=1
            )
        else:
            longest = max(reads.sizes), max(reads.num_read)
            attended = self._run_operator(query, key, value, reads.borders, longest, scaling, window)
        return output.index_copy(1, reads.asking, attended.to(output.dtype))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
        num_tokens, used = query.shape[2], sum(self.lengths)
        query, key, value = (tensor[:, :, :used] for tensor in (query, key, value))
        if self.operator is None:
            output = _attend_by_sample(query, key, value, self.lengths, scaling, window)
        else:
            assert self.borders is not None
            borders, longest = (self.borders, self.borders), (max(self.lengths),) * 2
            output = self._run_operator(query, key, value, borders, longest, scaling, window)
        return output if used == num_tokens else F.pad(output, (0, 0, 0, 0, 0, num_tokens - used))

    def _run_operator(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        borders: tuple[Tensor, Tensor],
        longest: tuple[int, int],
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        assert self.operator is not None
        value_dim = value.shape[-1]
        value = F.pad(value, (0, query.shape[-1] - value_dim))  # MLA's values are narrower than its keys
        # A trained norm is float32, and so are its outputs under autocast.
        query, key, value = (tensor[0].transpose(0, 1).to(self.dtype) for tensor in (query, key, value))
        output: Tensor = self.operator(
            query,
            key,
            value,
            *borders,
            *longest,
            scale=scaling,
            window_size=(-1 if window is None or window >= longest[1] else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output[..., :value_dim].unsqueeze(0)


def _borders(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return the beginnings of consecutive runs and the end of the last one, int32 [num_runs + 1]."""
    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
    return ends.to(device, non_blocking=True)


def sample_lengths(position_ids: Tensor) -> list[int]:
    """Return the lengths of the samples in all rows of `position_ids` [batch, num_tokens]. Reads them on the host."""
    begins = torch.ones_like(position_ids, dtype=torch.bool)
    begins[:, 1:] = position_ids.diff() != 1
    starts = [*begins.flatten().nonzero().flatten().tolist(), position_ids.numel()]
    return [end - begin for begin, end in pairwise(starts)]


def _attend_by_sample(
    query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scaling: float | None, window: int | None
) -> Tensor:
    samples = (tensor.split(list(lengths), dim=2) for tensor in (query, key, value))
    parts = [
        part.transpose(1, 2)
        for queries, keys, values in zip(*samples, strict=True)
        for part in _attend_in_windows(queries, keys, values, scaling, window)
    ]
    return torch.cat(parts, dim=1)


def _attend_in_windows(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
) -> list[Tensor]:
    """Attend within a sample, in runs of `window` queries, each of which sees at most two windows of keys."""
    length = query.shape[2]
    window = length if window is None else min(window, length)
    parts = []
    for begin in range(0, length, window):
        end, first = min(begin + window, length), max(begin - window + 1, 0)
        keys, values = key[:, :, first:end], value[:, :, first:end]
        parts.append(_attend_causally(query[:, :, begin:end], keys, values, scaling, window))
    return parts


def _attend_causally(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int) -> Tensor:
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask = None
    if num_keys > min(num_queries, window):
        positions = torch.arange(num_keys - num_queries, num_keys, device=query.device)[:, None]
        keys_at = torch.arange(num_keys, device=query.device)
        mask = (keys_at <= positions) & (keys_at > positions - window)
    elif query.device.type == "cpu" and query.dtype != torch.float32:
        padding = (0, 0, 0, -num_queries % TOKENS_STEP)  # at the end, where no real query sees it
        query, key, value = (F.pad(tensor, padding) for tensor in (query, key, value))
    output = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output[:, :, :num_queries]


# A compiled layer would be recompiled for the lengths of each batch.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function of transformers' interface; without samples it is SDPA."""
    samples: PackedSamples | None = arguments.pop(SAMPLES, None)
    if samples is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **arguments
        )
        return output
    assert not arguments.get("dropout"), "a fork is trained without dropout"
    return samples.attend(query, key, value, scaling=scaling, layer=module.layer_idx), None  # type: ignore[arg-type]


ALL_ATTENTION_FUNCTIONS.register(PACKED, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED, sdpa_mask)


def to_tensors(batch: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    """Return the arrays of `PackedRows.batch` as tensors that share their memory."""
    return {name: torch.from_numpy(array) for name, array in batch.items()}


AttentionImplementation = Literal["auto", "varlen_attn", "sdpa"]


def choose_operator(
    implementation: AttentionImplementation, config: Any, device: torch.device, dtype: torch.dtype
) -> VarlenOperator | None:
    """Return `varlen_attn`, or None for SDPA, one sample after the other. Raises `InvalidInputError`: `varlen_attn` is
    asked for, and the device cannot run it."""
    return _choose(implementation, attention_head_dim(config), device, dtype)


@cache  # called in every pass; warns once
def _choose(
    implementation: AttentionImplementation, head_dim: int, device: torch.device, dtype: torch.dtype
) -> VarlenOperator | None:
    if implementation == "sdpa" or (implementation == "auto" and device.type != "cuda"):
        return None
    reason = flash_refusal(device, dtype, head_dim) if device.type == "cuda" else "it needs a GPU"
    if reason is None:
        return varlen_attn
    if implementation == "varlen_attn":
        raise InvalidInputError(
            f"training.attn_implementation is varlen_attn, and {reason}; use auto or sdpa",
            field="training.attn_implementation",
            value=implementation,
        )
    get_logger().warning("flash_attention_unavailable", reason=reason, instead="SDPA, one sample after the other")
    return None


def attention_head_dim(config: Any) -> int:
    """Return the head size of queries and keys."""
    if getattr(config, "kv_lora_rank", None) is not None:
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def begin_packed(
    decoder: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    attention: AttentionImplementation = "auto",
    dtype: torch.dtype,
) -> DecoderContext:
    """Begin a pass over all rows, concatenated; each sample attends to itself.

    Args:
        input_ids: int64 [batch, num_tokens].
        position_ids: int64 [batch, num_tokens]; they restart with every sample.
        lengths: lengths of the samples; None: derived from the positions, which are then read on the host.
        attention: see `training.attn_implementation`.
        dtype: dtype in which the model computes.
    """
    config, device = decoder.config, input_ids.device
    lengths = sample_lengths(position_ids) if lengths is None else lengths
    operator = choose_operator(attention, config, device, dtype)
    samples = PackedSamples.create(config, lengths, device=device, dtype=dtype, operator=operator)
    masks = Masks((None,) * config.num_hidden_layers)
    flat, positions = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
    return cast("DecoderContext", decoder.begin(flat, position_ids=positions, masks=masks, **{SAMPLES: samples}))


def with_turns(context: DecoderContext, counts: Tensor) -> DecoderContext:
    """Return the context for layers >= l of a student whose deep tokens, marked by `counts` [num_tokens], keep their
    own K and V. Deep tokens are those that predict a token of an answer; each run of them is a turn. A turn reads
    everything before it, including earlier answers, as a prompt, as in serving."""
    samples: PackedSamples = context.layer_arguments[SAMPLES]
    return replace(context, layer_arguments={**context.layer_arguments, SAMPLES: samples.with_turns(counts)})


class _LayerKeyValues:
    """Cache stand-in that records the K and V of each layer."""

    def __init__(self) -> None:
        self.by_layer: dict[int, KeyValue] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> KeyValue:
        self.by_layer[layer] = key, value
        return key, value


@dataclass(frozen=True)
class _TurnKeyValues:
    """Cache stand-in that returns a layer's K and V of all tokens as a prompt's, followed by the deep tokens' own."""

    prompt: _LayerKeyValues

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> KeyValue:
        keys, values = self.prompt.by_layer[layer]
        return torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2)


def lower_turns(
    decoder: Any, context: DecoderContext, turns: DecoderContext, kept: TokenSelection | None
) -> tuple[Tensor, Tensor]:
    """Run layers < l of a student; returns x of all tokens as a prompt's, and of the `kept` ones (None: all) as deep.

    The two differ if prompts bypass layers. From the first of these layers on, deep tokens run separately, over the K
    and V before their turn and their own, as they do in layers >= l. `turns`: result of `with_turns(context)`.
    """
    layer_map = decoder.layer_map
    if not layer_map.gaps:
        x = decoder.lower(context)
        return x, x if kept is None else kept.take(x)
    prompt = _LayerKeyValues()
    reading = replace(context, past_key_values=cast("Any", prompt))
    first, x = layer_map.first_gap, context.hidden
    for i in range(first):
        x = decoder.run_layer(i, x, context)
    deep = x if kept is None else kept.take(x)
    writing = replace(
        turns if kept is None else turns.select(kept), past_key_values=cast("Any", _TurnKeyValues(prompt))
    )
    for i in range(first, layer_map.num_key_value_layers):
        output = decoder.run_layer(i, x, reading)
        x = x if i in layer_map.gaps else output
        deep = decoder.run_layer(i, deep, writing)
    return x, deep


@dataclass(frozen=True)
class DeepTurns:
    """A `DeepWriter` for `PackedSamples.with_turns`: returns K and V from x of all tokens, followed by the kept tokens'
    own."""

    shared: Sequence[KeyValue]

    def write(self, group: int, own: KeyValue) -> KeyValue:
        keys, values = (
            torch.cat((shared, part.to(shared.dtype)), dim=2)
            for shared, part in zip(self.shared[group], own, strict=True)
        )
        return keys, values

    def write_shared(self, group: int) -> None:
        """Do nothing: without a token in layers >= l, nothing attends."""
