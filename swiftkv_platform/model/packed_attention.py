"""Attention over packed samples that are concatenated in one row: each sample attends to itself, without a mask, and to
the prefix that it shares with the sample before it.

A GPU runs PyTorch's `varlen_attn` (FlashAttention) on cumulative sequence lengths. Other devices run SDPA once per
sample with its causal flag, unless no input needs gradients and the caller has a faster operator for that. On a CPU,
SDPA by sample is 11 times faster than a mask for rows of 2,048 tokens with samples of 133 tokens, and 38 times faster
for rows of 8,192 tokens. Batching samples of equal length is slower: gathering them and scattering their gradients
costs more than the calls.
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
from swiftkv_platform.model.context import PACKED_ATTENTION, DecoderContext, Masks, TokenSelection, get_layer_windows

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_CAPABILITY = (8, 0)
"""Minimum compute capability of a GPU for FlashAttention: Ampere."""
MAX_FLASH_HEAD_DIM, FLASH_HEAD_DIM_MULTIPLE = 256, 8


def find_flash_obstacle(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why FlashAttention cannot run a model on this GPU; None if it can."""
    capability = torch.cuda.get_device_capability(device)
    if capability < FLASH_CAPABILITY:
        return f"the GPU has compute capability {capability}; {FLASH_CAPABILITY} or more is needed"
    return find_flash_head_obstacle(dtype, head_dim)


def find_flash_head_obstacle(dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why FlashAttention supports heads of this dtype and size on no GPU; None if it supports them."""
    if dtype not in FLASH_DTYPES:
        return f"the model computes in {dtype}; float16 or bfloat16 is needed"
    if head_dim > MAX_FLASH_HEAD_DIM or head_dim % FLASH_HEAD_DIM_MULTIPLE:
        return f"head_dim is {head_dim}; a multiple of 8 up to {MAX_FLASH_HEAD_DIM} is needed"
    return None


SAMPLES_KEY = "packed_samples"
"""Keyword argument that passes the samples to every attention layer."""

TOKENS_MULTIPLE = 64
"""Training pads operator sizes to multiples of this number of tokens. On a CPU, operators of 16-bit dtypes are compiled
for each new size. Compiling takes longer than running, and the code stays in memory, about 5 MiB per length in
attention's backward pass. Padding limits the number of sizes."""

VarlenOperator = Callable[..., Any]
"""Function with the signature of `torch.nn.attention.varlen.varlen_attn`."""


@dataclass(frozen=True)
class DeepTokenSpan:
    """Consecutive deep tokens in a sample, such as an assistant message of a conversation and the deep tail of its
    prompt. All but `sample` are positions in the sample."""

    sample: Sequence[int]
    """Indices of the sample's tokens in the row, those of a shared prefix first."""
    begin: int
    counted_begin: int
    """The prompt's last token, which is the first that predicts a generated token."""
    end: int
    """First token after the span."""


@dataclass(frozen=True)
class _AttentionIndices:
    """Indices of the queries of all parts (samples or spans), and of the keys and values that each part attends to, by
    part. A part's queries are those of its last keys."""

    queries: Tensor
    keys: Tensor
    num_queries: list[int]
    """Number of queries per part."""
    num_keys: list[int]
    """Number of keys per part."""
    cu_seqlens: tuple[Tensor, Tensor]
    """Cumulative lengths of the parts' queries and keys, see `_compute_cumulative_lengths`."""

    @classmethod
    def create(cls, parts: Sequence[tuple[Sequence[int], Sequence[int]]], device: torch.device) -> Self:
        """`parts`: (indices of the queries, indices of the keys) of each part."""
        num_queries, num_keys = [len(queries) for queries, _ in parts], [len(keys) for _, keys in parts]
        queries = _make_index_tensor([row for queries, _ in parts for row in queries], device)
        keys = _make_index_tensor([row for _, keys in parts for row in keys], device)
        cu_seqlens = _compute_cumulative_lengths(num_queries, device), _compute_cumulative_lengths(num_keys, device)
        return cls(queries, keys, num_queries, num_keys, cu_seqlens)


@dataclass(frozen=True)
class PackedLayout:
    """Samples concatenated in a batch of one row. Padding after the last sample attends to nothing. Implements
    `TokenSelectable`."""

    lengths: tuple[int, ...]
    """Number of tokens per sample, without its shared prefix."""
    windows: tuple[int | None, ...]
    """Sliding window per layer in tokens, including the query itself; None: no window."""
    dtype: torch.dtype
    """Compute dtype of the model and of the operator's inputs."""
    device: torch.device
    prefix_lengths: tuple[int, ...] | None = None
    """Number of tokens that each sample shares with the sample before it, whose first tokens they are; None: all 0."""
    operator: VarlenOperator | None = None
    """Attention operator; None: SDPA, sample by sample."""
    inference_operator: VarlenOperator | None = None
    """Faster operator without a backward pass, for inputs that need no gradients."""
    cu_seqlens: Tensor | None = None
    """Cumulative lengths of the samples, int32 on the device; set if an operator is set."""
    query_tokens: Tensor | None = None
    """Tokens with queries, int64 [num_queries]; None: all."""
    spans: tuple[DeepTokenSpan, ...] | None = None
    """Spans whose tokens have queries, for a student whose deep tokens have their own K and V; None: all tokens have
    queries. `query_tokens` then begins with the tokens of all spans."""
    num_tokens: int = 0
    """Number of tokens including padding; set if `spans` is set."""

    @classmethod
    def create(
        cls,
        config: Any,
        lengths: Sequence[int],
        prefix_lengths: Sequence[int] = (),
        *,
        device: torch.device,
        dtype: torch.dtype,
        operator: VarlenOperator | None = None,
        inference_operator: VarlenOperator | None = None,
    ) -> Self:
        has_operator = operator is not None or inference_operator is not None
        return cls(
            tuple(lengths),
            get_layer_windows(config),
            dtype,
            device,
            prefix_lengths=tuple(prefix_lengths) if any(prefix_lengths) else None,
            operator=operator,
            inference_operator=inference_operator,
            cu_seqlens=_compute_cumulative_lengths(lengths, device) if has_operator else None,
        )

    def add_conversation_spans(self, counted_mask: Tensor, deep_tail: int, *, overlapping: bool) -> Self:
        """Return the samples for layers >= l of a student whose deep tokens have their own K and V. Attention then
        expects the K and V from x of all tokens, followed by the deep tokens' own. See `find_conversation_spans`.

        Args:
            counted_mask: [num_tokens], nonzero for tokens that predict a generated token. It is read on the host.
        """
        counted = counted_mask.tolist()
        spans = find_conversation_spans(counted, self._samples, deep_tail, overlapping=overlapping)
        return replace(self, spans=tuple(spans), num_tokens=len(counted))

    @cached_property
    def _samples(self) -> list[Sequence[int]]:
        """Indices of each sample's tokens, those of its shared prefix first."""
        samples: list[Sequence[int]] = []
        begin = 0
        for length, prefix_length in zip(self.lengths, self.prefix_lengths or (0,) * len(self.lengths), strict=True):
            own = range(begin, begin + length)
            samples.append([*samples[-1][:prefix_length], *own] if prefix_length else own)
            begin += length
        return samples

    @cached_property
    def deep_tokens(self) -> Tensor:
        """Token indices of all spans, span by span, int64. Tokens of overlapping spans occur several times."""
        tokens = [token for span in self.spans or () for token in span.sample[span.begin : span.end]]
        return _make_index_tensor(tokens, self.device)

    @cached_property
    def counted_rows(self) -> Tensor:
        """Rows among `deep_tokens` of the tokens that predict a generated token, int64."""
        rows: list[int] = []
        first = 0
        for span in self.spans or ():
            rows += range(first + span.counted_begin - span.begin, first + span.end - span.begin)
            first += span.end - span.begin
        return _make_index_tensor(rows, self.device)

    def select_tokens(self, selection: TokenSelection) -> Self:
        assert isinstance(selection.tokens, Tensor), "training selects tokens by index"
        return replace(self, query_tokens=selection.tokens)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None, layer: int) -> Tensor:
        """Attend within samples.

        Args:
            query: [1, num_heads, num_queries, dim], of the tokens with queries.
            key: [1, num_key_value_heads, num_tokens, dim], like `value`.

        Returns:
            [1, num_queries, num_heads, dim].
        """
        if self.spans is not None:
            if not self.spans:  # other workers wait for these gradients
                output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
                return output + 0.0 * (query.sum() + key.sum() + value.sum())
            return self._attend_by_index(query, key, value, self._span_indices, scaling, self.windows[layer])
        if self.query_tokens is None:
            return self._attend(query, key, value, scaling, self.windows[layer])
        # Kernels need consecutive queries, so scatter the selected ones into a tensor of all tokens.
        shape = (1, query.shape[1], key.shape[2], query.shape[3])
        scattered = query.new_zeros(shape).index_copy(2, self.query_tokens, query)
        return self._attend(scattered, key, value, scaling, self.windows[layer]).index_select(1, self.query_tokens)

    @cached_property
    def _span_indices(self) -> _AttentionIndices:
        """Indices of the spans' queries, keys and values. All layers share them, so they are copied to the device
        once."""
        parts: list[tuple[Sequence[int], Sequence[int]]] = []
        first = 0
        for span in self.spans or ():
            own = span.sample[span.begin : span.end]
            if self.query_tokens is not None:  # which begins with the tokens of all spans
                own = range(first, first + len(own))
                first += len(own)
            # keys: from x before the span, then the span's own, which follow those of all tokens
            parts.append((own, [*span.sample[: span.begin], *(self.num_tokens + row for row in own)]))
        return _AttentionIndices.create(parts, self.device)

    @cached_property
    def _indices_within_samples(self) -> _AttentionIndices:
        """Indices of the samples' queries, keys and values, for samples that share prefixes."""
        samples = zip(self._samples, self.lengths, strict=True)
        return _AttentionIndices.create([(tokens[-length:], tokens) for tokens, length in samples], self.device)

    def _attend_by_index(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        indices: _AttentionIndices,
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        """Attend from the queries to the keys and values at `indices`. The output of other tokens is zero."""
        output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
        # 1. gather the queries, keys and values of each part
        query = query.index_select(2, indices.queries)
        key, value = key.index_select(2, indices.keys), value.index_select(2, indices.keys)
        # 2. attend part by part, or all parts in one operator call
        operator = self._choose_operator(query, key, value)
        if operator is None:
            num_keys = indices.num_keys
            parts = zip(
                query.split(indices.num_queries, 2), key.split(num_keys, 2), value.split(num_keys, 2), strict=True
            )
            attended = torch.cat(
                [each.transpose(1, 2) for part in parts for each in _attend_in_windows(*part, scaling, window)], dim=1
            )
        else:
            max_lengths = max(indices.num_queries), max(indices.num_keys)
            attended = self._run_operator(operator, query, key, value, indices.cu_seqlens, max_lengths, scaling, window)
        # 3. scatter the outputs
        return output.index_copy(1, indices.queries, attended.to(output.dtype))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None) -> Tensor:
        if self.prefix_lengths is not None:
            return self._attend_by_index(query, key, value, self._indices_within_samples, scaling, window)
        num_tokens, num_sample_tokens = query.shape[2], sum(self.lengths)
        query, key, value = (tensor[:, :, :num_sample_tokens] for tensor in (query, key, value))
        operator = self._choose_operator(query, key, value)
        if operator is None:
            output = _attend_by_sample(query, key, value, self.lengths, scaling, window)
        else:
            assert self.cu_seqlens is not None
            cu_seqlens, max_lengths = (self.cu_seqlens, self.cu_seqlens), (max(self.lengths),) * 2
            output = self._run_operator(operator, query, key, value, cu_seqlens, max_lengths, scaling, window)
        num_padding = num_tokens - num_sample_tokens
        return F.pad(output, (0, 0, 0, 0, 0, num_padding)) if num_padding else output

    def _choose_operator(self, *inputs: Tensor) -> VarlenOperator | None:
        needs_gradients = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        return self.operator if needs_gradients else self.inference_operator or self.operator

    def _run_operator(
        self,
        operator: VarlenOperator,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: tuple[Tensor, Tensor],
        max_lengths: tuple[int, int],
        scaling: float | None,
        window: int | None,
    ) -> Tensor:
        value_dim = value.shape[-1]
        value = F.pad(value, (0, query.shape[-1] - value_dim))  # MLA's values are narrower than its keys
        # A trained norm is float32, and so are its outputs under autocast.
        query, key, value = (tensor[0].transpose(0, 1).to(self.dtype) for tensor in (query, key, value))
        output: Tensor = operator(
            query,
            key,
            value,
            *cu_seqlens,
            *max_lengths,
            scale=scaling,
            window_size=(-1 if window is None or window >= max_lengths[1] else window - 1, 0),
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return output[..., :value_dim].unsqueeze(0)


def _compute_cumulative_lengths(lengths: Sequence[int], device: torch.device) -> Tensor:
    """Return FlashAttention's `cu_seqlens`, int32: [3, 2] -> [0, 3, 5]."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32).to(device, non_blocking=True)


def _make_index_tensor(indices: list[int], device: torch.device) -> Tensor:
    return torch.tensor(indices, dtype=torch.long).to(device, non_blocking=True)


def find_conversation_spans(
    counted: Sequence[bool | int], samples: Sequence[Sequence[int]], deep_tail: int = 1, *, overlapping: bool = False
) -> list[DeepTokenSpan]:
    """Return the spans of deep tokens in samples.

    Args:
        counted: a flag per token, set for tokens that predict a generated token. Consecutive ones are an answer.
        samples: indices of each sample's tokens.
        deep_tail: number of the prompt's last tokens in each span; the last of them is counted.
        overlapping: whether a deep tail may begin inside an earlier answer, as in serving; else it begins after it.
    """
    spans: list[DeepTokenSpan] = []
    for sample in samples:
        # where an answer begins or ends: the flag differs from the previous token's
        flags = [False, *(bool(counted[token]) for token in sample), False]
        edges = [at for at, (before, here) in enumerate(pairwise(flags)) if before != here]
        previous_end = 0
        for first, stop in zip(edges[::2], edges[1::2], strict=True):
            spans.append(
                DeepTokenSpan(sample, max(first - deep_tail + 1, 0 if overlapping else previous_end), first, stop)
            )
            previous_end = stop
    return spans


def get_sample_lengths(position_ids: Tensor) -> list[int]:
    """Return the lengths of the samples in all rows of `position_ids` [batch, num_tokens], which is read on the
    host."""
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
    """Attend within a sample, in chunks of `window` queries, each of which attends to at most two windows of keys. The
    queries are those of the last keys."""
    length = key.shape[2]
    num_earlier = length - query.shape[2]
    window = length if window is None else min(window, length)
    parts = []
    for begin in range(num_earlier, length, window):
        end, first = min(begin + window, length), max(begin - window + 1, 0)
        queries = query[:, :, begin - num_earlier : end - num_earlier]
        parts.append(_attend_causally(queries, key[:, :, first:end], value[:, :, first:end], scaling, window))
    return parts


def _attend_causally(query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int) -> Tensor:
    num_queries, num_keys = query.shape[2], key.shape[2]
    mask = None
    if num_keys > min(num_queries, window):
        positions = torch.arange(num_keys - num_queries, num_keys, device=query.device)[:, None]
        keys_at = torch.arange(num_keys, device=query.device)
        mask = (keys_at <= positions) & (keys_at > positions - window)
    elif query.device.type == "cpu" and query.dtype != torch.float32:
        padding = (0, 0, 0, -num_queries % TOKENS_MULTIPLE)  # at the end, so that no real query attends to it
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
def _attend_to_samples(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention function in transformers' interface. Without samples it runs SDPA."""
    samples: PackedLayout | None = arguments.pop(SAMPLES_KEY, None)
    if samples is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **arguments
        )
        return output
    assert not arguments.get("dropout"), "distillation trains without dropout"
    return samples.attend(query, key, value, scaling=scaling, layer=module.layer_idx), None  # type: ignore[arg-type]


ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, _attend_to_samples)
ALL_MASK_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, sdpa_mask)


def to_tensors(batch: Mapping[str, npt.NDArray[Any]]) -> dict[str, Tensor]:
    """Return the arrays of `PackedRows.batch` as tensors that share their memory."""
    return {name: torch.from_numpy(array) for name, array in batch.items()}


AttentionImplementation = Literal["auto", "varlen_attn", "sdpa"]


def choose_operator(
    implementation: AttentionImplementation, config: Any, device: torch.device, dtype: torch.dtype
) -> VarlenOperator | None:
    """Return `varlen_attn`, or None for SDPA, sample by sample. Raises `InvalidInputError` if `implementation` is
    `varlen_attn` and the device cannot run it."""
    return _select_operator(implementation, get_attention_head_dim(config), device, dtype)


@cache  # called in every pass; warns once
def _select_operator(
    implementation: AttentionImplementation, head_dim: int, device: torch.device, dtype: torch.dtype
) -> VarlenOperator | None:
    if implementation == "sdpa" or (implementation == "auto" and device.type != "cuda"):
        return None
    reason = find_flash_obstacle(device, dtype, head_dim) if device.type == "cuda" else "the device is no GPU"
    if reason is None:
        return varlen_attn
    if implementation == "varlen_attn":
        raise InvalidInputError(
            f"training.attn_implementation is varlen_attn, but {reason}; use auto or sdpa",
            field="training.attn_implementation",
            value=implementation,
        )
    get_logger().warning("flash_attention_unavailable", reason=reason, instead="SDPA, sample by sample")
    return None


def get_attention_head_dim(config: Any) -> int:
    """Return the head size of queries and keys."""
    if getattr(config, "kv_lora_rank", None) is not None:
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def make_packed_context(
    decoder: Any,
    input_ids: Tensor,
    position_ids: Tensor,
    lengths: Sequence[int] | None = None,
    *,
    attention: AttentionImplementation = "auto",
    inference_operator: VarlenOperator | None = None,
    dtype: torch.dtype,
) -> DecoderContext:
    """Make the context of a forward pass over all rows, concatenated. Each sample attends to itself, and to the prefix
    that it shares with the sample before it.

    Args:
        input_ids: int64 [batch, num_tokens].
        position_ids: int64 [batch, num_tokens]; positions restart with every sample, at the length of its shared
            prefix, e.g. 0 1 2 3 4 2 3.
        lengths: lengths of the samples, which share no prefixes; None derives both from the positions, which are then
            read on the host.
        attention: see `training.attn_implementation`.
        inference_operator: operator for inputs that need no gradients, unless `attention` names another one.
        dtype: compute dtype of the model.
    """
    config, device = decoder.config, input_ids.device
    prefix_lengths: Sequence[int] = ()
    if lengths is None:
        lengths = get_sample_lengths(position_ids)
        prefix_lengths = position_ids.flatten()[list(accumulate(lengths[:-1], initial=0))].tolist()
    operator = choose_operator(attention, config, device, dtype)
    samples = PackedLayout.create(
        config,
        lengths,
        prefix_lengths,
        device=device,
        dtype=dtype,
        operator=operator,
        inference_operator=inference_operator if attention == "auto" else None,
    )
    masks = Masks((None,) * config.num_hidden_layers)
    flat, positions = input_ids.reshape(1, -1), position_ids.reshape(1, -1)
    return cast(
        "DecoderContext", decoder.make_context(flat, position_ids=positions, masks=masks, **{SAMPLES_KEY: samples})
    )


def get_packed_samples(context: DecoderContext) -> PackedLayout:
    """Return the samples of a context from `make_packed_context`."""
    samples: PackedLayout = context.layer_arguments[SAMPLES_KEY]
    return samples


def add_conversation_spans(
    context: DecoderContext, counted_mask: Tensor, deep_tail: int, *, overlapping: bool
) -> DecoderContext:
    """Return the context for layers >= l of a student whose deep tokens have their own K and V.

    The tokens in `counted_mask` [num_tokens] predict a generated token. Consecutive ones and the last `deep_tail`
    tokens of their prompt form a span. A span attends to everything before it, including earlier answers, as a prompt,
    as in serving. `overlapping`: as in `find_conversation_spans`; only for passes over the selected `deep_tokens`."""
    samples = get_packed_samples(context).add_conversation_spans(counted_mask, deep_tail, overlapping=overlapping)
    with_spans = {SAMPLES_KEY: samples}
    return replace(context, layer_arguments={**context.layer_arguments, **with_spans})


class _LayerKeyValues:
    """Cache stand-in that records the K and V of each layer."""

    def __init__(self) -> None:
        self.by_layer: dict[int, KeyValue] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> KeyValue:
        self.by_layer[layer] = key, value
        return key, value


@dataclass(frozen=True)
class _SpanKeyValues:
    """Cache stand-in that returns the prompt's K and V of all tokens in a layer, followed by the deep tokens' own."""

    prompt: _LayerKeyValues

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any) -> KeyValue:
        keys, values = self.prompt.by_layer[layer]
        return torch.cat((keys, key), dim=2), torch.cat((values, value), dim=2)


def run_lower_layers_by_span(
    decoder: Any, context: DecoderContext, span_context: DecoderContext, selection: TokenSelection | None
) -> tuple[Tensor, Tensor]:
    """Run layers < l of a student. Returns x of all tokens as prompt tokens, and x of the selected tokens as deep ones.

    Both are equal unless prompts bypass layers. From the first bypassed layer on, deep tokens run separately: they
    attend to the K and V before their span and to their own, as in layers >= l.

    Args:
        span_context: result of `add_conversation_spans(context)`.
        selection: selected tokens; None: all.
    """
    layer_map = decoder.layer_map
    if not layer_map.bypassed_layers:
        x = decoder.run_lower_layers(context)
        return x, x if selection is None else selection.select(x)
    # 1. run the layers below the first bypassed one for all tokens
    first, x = layer_map.first_bypassed_layer, context.hidden
    for i in range(first):
        x = decoder.run_layer(i, x, context)
    # 2. run the others twice: all tokens as prompt tokens, then the selected ones as deep tokens
    deep = x if selection is None else selection.select(x)
    prompt = _LayerKeyValues()
    prompt_context = replace(context, past_key_values=cast("Any", prompt))
    deep_context = span_context if selection is None else span_context.select(selection)
    deep_context = replace(deep_context, past_key_values=cast("Any", _SpanKeyValues(prompt)))
    for i in range(first, layer_map.num_key_value_layers):
        output = decoder.run_layer(i, x, prompt_context)
        x = x if i in layer_map.bypassed_layers else output
        deep = decoder.run_layer(i, deep, deep_context)
    return x, deep


@dataclass(frozen=True)
class DeepSpanWriter:
    """A `DeepWriter` for contexts with conversation spans: returns the K and V from x of all tokens, followed by the
    selected tokens' own."""

    shared_key_values: Sequence[KeyValue]

    def write(self, group: int, key_value: KeyValue) -> KeyValue:
        keys, values = (
            torch.cat((shared, part.to(shared.dtype)), dim=2)
            for shared, part in zip(self.shared_key_values[group], key_value, strict=True)
        )
        return keys, values

    def write_shared(self, group: int) -> None:
        """Do nothing, since no token of the pass attends in layers >= l."""
