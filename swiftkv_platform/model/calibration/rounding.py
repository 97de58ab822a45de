"""Integer quantization of a student's projections with minimal change of its hidden states on calibration text (GPTQ,
Frantar et al. 2022), layer by layer.

Each layer runs over the outputs of the quantized layers before it, so that every projection sees its inputs in serving.
Then its projections are rounded and it runs again. In layers >= l, K and V come from x for all tokens, and only deep
tokens run through the layer, as in serving.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model.attention import KeyValue, Rotation
from swiftkv_platform.model.calibration.regression import (
    MAX_ACTIVATION_BYTES,
    ActivationStore,
    LayerSource,
    StoredActivation,
    TokenBatch,
    load_module,
    make_decoder_inputs,
)
from swiftkv_platform.model.context import PACKED_ATTENTION, DecoderContext, TokenSelection
from swiftkv_platform.model.decoder import SwiftKVDecoderMixin
from swiftkv_platform.model.deep_tokens import DeepGroup
from swiftkv_platform.model.packed_attention import (
    DeepSpanWriter,
    add_conversation_spans,
    get_packed_samples,
    get_sample_lengths,
    make_packed_context,
)
from swiftkv_platform.model.weights.quantization import WeightFormat, dequantize_weight, quantize_weight


@torch.no_grad()
def quantize_layerwise(
    source: LayerSource,
    batches: Iterable[TokenBatch],
    formats: Mapping[str, tuple[WeightFormat, int | None]],
    *,
    dtype: torch.dtype,
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield, layer by layer, the integers and scales (see `quantize_weight`) of each weight in `formats` whose linear
    module received tokens. Raises `InvalidInputError` without tokens, or for ids outside the vocabulary.

    Args:
        source: the student, without the modules that only its teacher runs.
        batches: rows of packed samples; `loss_mask` marks the deep tokens. In a sample without a prompt, or in rows
            without a mask, the first half counts as the prompt.
        formats: format and group size by weight.
        dtype: dtype of the scales.
    """
    with ActivationStore.open(MAX_ACTIVATION_BYTES) as store:
        yield from _RoundingPass(source, store, formats, dtype).run(batches)


class _RoundingPass:
    """One pass of all rows over all layers."""

    def __init__(
        self,
        source: LayerSource,
        store: ActivationStore,
        formats: Mapping[str, tuple[WeightFormat, int | None]],
        dtype: torch.dtype,
    ) -> None:
        self._source, self._store, self._formats, self._dtype = source, store, formats, dtype
        self._decoder: SwiftKVDecoderMixin = source.model.model
        self._config = source.model.config
        self._config._attn_implementation = PACKED_ATTENTION
        self._contexts: list[DecoderContext] = []
        """Contexts by row, without hidden states."""
        self._deep: list[torch.Tensor] = []
        """Masks of tokens that predict a generated token, by row, bool [num_tokens]."""
        self._hidden: list[StoredActivation] = []
        self._x: list[StoredActivation] = []
        """Outputs of layer l - 1, by row."""
        self._key_value: list[tuple[StoredActivation, ...]] = []
        """K and V of the group, by row."""

    def run(self, batches: Iterable[TokenBatch]) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
        """Yield the name, and integers and scales, of each rounded weight."""
        decoder, layer_map = self._decoder, self._config.layer_map
        with load_module(self._source, decoder.embed_tokens):
            for batch in batches:
                self._embed_batch(batch)
        if not self._hidden:
            raise InvalidInputError("calibration got no tokens; give more text", field="calibration")
        for i in range(layer_map.num_key_value_layers):
            yield from self._round_layer(i)
        self._x, deep = self._hidden, [self._select_deep_tokens(row)[0] for row in range(len(self._deep))]
        self._hidden = [self._store.save(kept.select(x.load("cpu"))) for kept, x in zip(deep, self._x, strict=True)]
        with load_module(self._source, decoder.norm_swiftkv):
            for leader in layer_map.leaders:
                self._key_value = [()] * len(deep)
                for i in layer_map.get_group(leader):
                    yield from self._round_layer(i)

    def _embed_batch(self, batch: TokenBatch) -> None:
        inputs = make_decoder_inputs(batch, self._decoder, "cpu")
        ids = inputs["input_ids"]
        if not ids.numel():
            return
        positions = inputs.get("position_ids", torch.arange(ids.shape[1]).expand_as(ids))
        lengths = get_sample_lengths(positions)
        counted = batch["loss_mask"].flatten() if isinstance(batch, Mapping) and "loss_mask" in batch else None
        deep, begin = torch.zeros(ids.numel(), dtype=torch.bool), 0
        for length in lengths:
            sample = slice(begin, begin + length)
            deep[sample] = True if counted is None else counted[sample]
            if deep[begin]:
                deep[begin : begin + length // 2] = False
            begin += length
        context = make_packed_context(self._decoder, ids, positions, lengths, dtype=torch.float32)
        self._hidden.append(self._store.save(context.hidden))
        self._contexts.append(replace(context, hidden=torch.empty(0)))
        self._deep.append(deep)

    def _round_layer(self, i: int) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
        layer = self._decoder.layers[i]
        modules = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
        weights = {f"model.layers.{i}.{name}.weight": module for name, module in modules.items()}
        with load_module(self._source, layer):
            with _record_grams([module for name, module in weights.items() if name in self._formats]) as grams:
                for row in range(len(self._hidden)):
                    self._run_layer(i, row)
            for name, module in weights.items():
                if module in grams:
                    weight = module.weight.to(self._dtype)
                    integers, scale = quantize_weight(weight, *self._formats[name], gram=grams.pop(module))
                    module.weight.copy_(dequantize_weight(integers, scale))
                    yield name, (integers, scale)
            self._round_experts(i, layer)
            for row in range(len(self._hidden)):
                self._hidden[row] = self._store.save(self._run_layer(i, row))

    def _round_experts(self, i: int, layer: nn.Module) -> None:
        """Round experts to nearest, in the format in which they will be stored; in memory they are fused."""
        stored = (name for name in self._formats if name.startswith(f"model.layers.{i}.") and ".experts." in name)
        for form, group in {self._formats[name] for name in stored}:
            for experts in layer.parameters():
                if experts.ndim == 3 and experts.shape[2] % (group or 1) == 0:
                    rounded = quantize_weight(experts.flatten(0, 1).to(self._dtype), form, group)
                    experts.copy_(dequantize_weight(*rounded).view_as(experts))

    def _run_layer(self, i: int, row: int) -> torch.Tensor:
        """Return the hidden states of a row after layer i."""
        hidden, context = self._hidden[row].load("cpu"), self._contexts[row]
        first, config = self._config.num_key_value_layers, self._config
        if i < first:
            return self._decoder.run_layer(i, hidden, replace(context, hidden=hidden))
        x = self._x[row].load("cpu")
        kept, context = self._select_deep_tokens(row)
        context = replace(context, hidden=x)
        key_value: Any = tuple(kept_tensor.load("cpu") for kept_tensor in self._key_value[row])
        if i in config.layer_map.leaders:
            key_value = self._make_key_value(i, row, x, self._decoder.layer_rotations.select(i, context.rotation), kept)
        return self._decoder.run_layer(i, hidden, context.select(kept), shared_key_value=key_value)

    def _select_deep_tokens(self, row: int) -> tuple[TokenSelection, DecoderContext]:
        """Return the selection of a row's deep tokens, and the row's context for layers >= l."""
        counted, context, layer_map = self._deep[row], self._contexts[row], self._config.layer_map
        if not layer_map.deep_leaders:
            return TokenSelection(counted.nonzero().squeeze(1)), context
        deep_tail = layer_map.shape.swiftkv_deep_tail
        context = add_conversation_spans(context, counted, deep_tail, overlapping=True)
        return TokenSelection(get_packed_samples(context).deep_tokens), context

    def _make_key_value(self, i: int, row: int, x: torch.Tensor, rotation: Rotation, kept: TokenSelection) -> Any:
        """Return a group's keys and values, or a function that makes them; stores them for the group's other layers."""
        leader = self._decoder.layers[i].self_attn
        inputs = self._decoder.norm_swiftkv(x)
        shared = leader.make_cache_entry([project(inputs) for project in leader.input_projections], rotation)

        def store_key_value(key_value: KeyValue) -> KeyValue:
            if len(self._config.layer_map.get_group(i)) > 1:
                self._key_value[row] = tuple(map(self._store.save, key_value))
            return key_value

        if not self._config.layer_map.deep_leaders:
            return store_key_value(leader.expand_key_value(shared))
        own = DeepGroup(0, leader, DeepSpanWriter([shared]), kept)
        return lambda *of_layer: store_key_value(own(*of_layer))


@contextmanager
def _record_grams(modules: Iterable[nn.Module]) -> Iterator[dict[nn.Module, torch.Tensor]]:
    """Yield the sums over tokens of x^T x by module, for inputs x of `modules` while the block runs."""
    grams: dict[nn.Module, torch.Tensor] = {}

    def add_gram(module: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        x = inputs[0].flatten(0, -2)
        if len(x):
            grams[module] = grams[module].addmm_(x.T, x) if module in grams else x.T @ x

    handles = [module.register_forward_pre_hook(add_gram) for module in modules]
    try:
        yield grams
    finally:
        for handle in handles:
            handle.remove()
