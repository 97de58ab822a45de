"""The calibrated start of a model that does not fit into a process: layer by layer, with rows divided among workers.

A layer is read, runs over the activations of this worker's rows, which wait in memory or on disk, and is freed. Sums
over tokens are reduced over the workers after each layer, and a group is fitted after its last layer. A worker holds
one layer at a time, its rows' activations and the sums of one group; the first worker also holds the attention of a
group. The mathematics is in `calibration`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model.activations import MAX_ACTIVATION_BYTES, ActivationStore, KeptTensor
from swiftkv_platform.model.calibration import (
    TokenBatch,
    calibrate_exit_head,
    decoder_inputs,
    exit_sums,
    method_of,
    recording,
    with_intercept,
)
from swiftkv_platform.model.calibration_statistics import (
    CalibrationStatistics,
    OwnSums,
    Regression,
)
from swiftkv_platform.model.workers import Workers


class LayerSource(Protocol):
    """A student on the meta device, and the source of its weights."""

    model: Any

    def fill(self, module: nn.Module, *, own: bool = True) -> None:
        """Load the parameters of `module`; without `own`, only those that the teacher has too."""

    def release(self, module: nn.Module) -> None:
        """Free the parameters of `module`."""


@torch.no_grad()
def calibrate_streamed(
    source: LayerSource,
    batches: Iterable[TokenBatch],
    *,
    workers: Workers,
    device: torch.device | str = "cpu",
    max_activation_bytes: int = MAX_ACTIVATION_BYTES,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of the calibrated start, one at a time, on the first worker; the others yield nothing
    but must run it to its end. Raises `InvalidInputError`: no worker has tokens, or a batch has ids that are not the
    model's.

    Args:
        batches: this worker's share of the rows.
        max_activation_bytes: maximum bytes of activations in memory; the rest goes to disk.
        progress: called with the number of layers done and the number of all layers.
    """
    with ActivationStore.open(max_activation_bytes) as store:
        yield from _Stream(source, workers, device, store).run(batches, progress)


class _Stream:
    """One pass of this worker's rows over all layers."""

    def __init__(
        self, source: LayerSource, workers: Workers, device: torch.device | str, store: ActivationStore
    ) -> None:
        self._source = source
        self._workers = workers
        self._device = device
        self._store = store
        self._decoder = source.model.model
        self._config = source.model.config
        self._first = self._config.num_key_value_layers
        self._positions: list[torch.Tensor] = []
        self._hidden: list[KeptTensor] = []
        self._x: list[KeptTensor] = []
        """Outputs of layer l - 1 by row, with every token taken as a skipped prompt token."""
        self._deep_x: list[KeptTensor] = []
        """Outputs of the teacher's layer l - 1 by row; they differ from `_x` if prompts bypass layers below l."""
        self._own_inputs: list[KeptTensor] = []
        """Inputs of the projections of a group's leader, by row, if deep tokens keep their own K and V."""
        self._scale = 1.0
        """Weight of the rows: 0 for a worker without rows, which runs one token to take part in the reductions."""

    def run(
        self, batches: Iterable[TokenBatch], progress: Callable[[int, int], None]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        decoder, layer_map, num_layers = self._decoder, self._config.layer_map, self._config.num_hidden_layers
        progress(0, num_layers)
        num_tokens = self._embed(batches)
        upper = {i: decoder.layers[i] for i in range(self._first, num_layers)}
        self._method = method_of(upper)
        first_gap = layer_map.first_gap
        for i in range(self._first):
            if i == first_gap:
                self._x = list(self._hidden)
            with self._filled(decoder.layers[i]):
                for row in range(len(self._hidden)):
                    self._step(i, self._hidden, row)
                    if i > first_gap and i not in layer_map.gaps:
                        self._step(i, self._x, row)
            progress(i + 1, num_layers)
        self._deep_x = list(self._hidden)
        if not layer_map.gaps:
            self._x = self._deep_x
        with self._filled(decoder.norm_swiftkv, own=True):
            if self._workers.is_first:
                for name, parameter in decoder.norm_swiftkv.named_parameters():
                    yield f"model.norm_swiftkv.{name}", parameter
            gram = self._gram()
            fitted = upper[self._first].self_attn.input_projections[0]
            sums = CalibrationStatistics(gram, {}, {}, (), num_tokens)
            regression = Regression(sums, intercept=fitted.bias is not None) if self._workers.is_first else None
            for leader in layer_map.leaders:
                for i in layer_map.group(leader):
                    with self._filled(decoder.layers[i]):
                        self._observe(i, sums, leader)
                    progress(i + 1, num_layers)
                if regression is not None:
                    yield from self._fit(layer_map.group(leader), sums, regression)
                sums.cross, sums.queries, sums.own, self._own_inputs = {}, {}, {}, []
        if self._config.early_exit:
            yield from self._fit_exit_head()

    def _embed(self, batches: Iterable[TokenBatch]) -> int:
        """Embed this worker's rows; returns the number of tokens of all workers."""
        decoder, num_tokens = self._decoder, 0
        with self._filled(decoder.embed_tokens):
            for batch in batches:
                inputs = decoder_inputs(batch, decoder)
                num_tokens += inputs["input_ids"].numel()
                self._add(inputs)
            if not self._hidden:
                self._scale = 0.0
                self._add({"input_ids": torch.zeros(1, 1, dtype=torch.int64, device=self._device)})
        total = int(self._workers.sum_(torch.tensor(num_tokens, device=self._device)))
        if not total:
            raise InvalidInputError(
                "calibration got no tokens; give at least one batch of token ids", field="calibration"
            )
        return total

    def _add(self, inputs: dict[str, torch.Tensor]) -> None:
        context = self._decoder.begin(**inputs)
        self._positions.append(context.position_ids)
        self._hidden.append(self._store.keep(context.hidden))

    def _step(self, i: int, states: list[KeptTensor], row: int) -> None:
        """Run layer i over the hidden states of a row."""
        # Masks are rebuilt each time: kept for all rows, they could be larger than the rows.
        hidden = states[row].load(self._device)
        context = self._decoder.begin(inputs_embeds=hidden, position_ids=self._positions[row])
        states[row] = self._store.keep(self._decoder.run_layer(i, context.hidden, context))

    def _inputs(self, row: int) -> torch.Tensor:
        """Return h with a 1 for the intercept, [num_tokens, hidden_size + 1]."""
        return with_intercept(self._decoder.norm_swiftkv(self._x[row].load(self._device))) * self._scale

    def _gram(self) -> torch.Tensor:
        total: torch.Tensor | None = None
        for row in range(len(self._x)):
            inputs = self._inputs(row)
            total = inputs.T @ inputs if total is None else total.addmm_(inputs.T, inputs)
        assert total is not None, "there is a row, or one that counts nothing"
        return self._workers.sum_(total)

    def _observe(self, i: int, sums: CalibrationStatistics, leader: int) -> None:
        """Run an upper layer of the teacher, and add its statistics, reduced over all workers, to `sums`."""
        config, queries = self._config, None
        takes_own = bool(config.layer_map.deep_leaders) and len(config.layer_map.group(leader)) > 1
        own_gram: torch.Tensor | None = None
        own_cross: dict[tuple[int, str], torch.Tensor] = {}
        cross: dict[tuple[int, str], torch.Tensor] = {}
        with recording({i: self._decoder.layers[i]}, self._method) as recorder:
            for row in range(len(self._hidden)):
                self._step(i, self._hidden, row)
                inputs = self._inputs(row)
                for key, output in recorder.outputs.items():
                    product = inputs.T @ output
                    cross[key] = product if key not in cross else cross[key].add_(product)
                if takes_own:
                    if i == leader:
                        self._own_inputs.append(self._store.keep(recorder.inputs[i]))
                    n = with_intercept(self._own_inputs[row].load(self._device)) * self._scale
                    if i == leader:
                        own_gram = n.T @ n if own_gram is None else own_gram.addmm_(n.T, n)
                    for key, output in recorder.outputs.items():
                        product = n.T @ output
                        own_cross[key] = product if key not in own_cross else own_cross[key].add_(product)
                by_head = recorder.queries[i].unflatten(-1, (config.num_attention_heads, -1))
                statistic = self._method.query_statistic(by_head) * self._scale
                queries = statistic if queries is None else queries.add_(statistic)
        assert queries is not None, "there is a row, or one that counts nothing"
        sums.cross |= {key: self._workers.sum_(cross[key]) for key in sorted(cross)}
        sums.queries[i] = self._workers.sum_(queries)
        if own_gram is not None:
            sums.own[leader] = OwnSums(self._workers.sum_(own_gram), {})
        if takes_own:
            sums.own[leader].cross |= {key: self._workers.sum_(own_cross[key]) for key in sorted(own_cross)}

    def _fit(
        self, group: Iterable[int], sums: CalibrationStatistics, regression: Regression
    ) -> Iterator[tuple[str, torch.Tensor]]:
        layers = list(group)
        attentions = [self._decoder.layers[i].self_attn for i in layers]
        for attention in attentions:
            self._source.fill(attention)
        self._method.fit(attentions, layers, regression.of_group(attentions[0], layers[0], sums))
        for i, attention in zip(layers, attentions, strict=True):
            for name, parameter in attention.named_parameters():
                if "_swiftkv" in name:
                    yield f"model.layers.{i}.self_attn.{name}", parameter
            self._source.release(attention)

    def _fit_exit_head(self) -> Iterator[tuple[str, torch.Tensor]]:
        model, sums = self._source.model, None
        with self._filled(model.exit_norm, own=True), self._filled(self._decoder.norm):
            for kept, x in zip(self._hidden, self._deep_x, strict=True):
                final = self._decoder.normalise(kept.load(self._device))
                inputs = model.exit_norm(x.load(self._device))
                parts = [part * self._scale for part in exit_sums(inputs, final)]
                sums = parts if sums is None else [a.add_(b) for a, b in zip(sums, parts, strict=True)]
            assert sums is not None, "there is a row, or one that counts nothing"
            gram, cross = (self._workers.sum_(part) for part in sums)
            if self._workers.is_first:
                yield "exit_norm.weight", model.exit_norm.weight
        if self._workers.is_first:
            with self._filled(model.lm_head):
                head = model.lm_head.weight
                yield "exit_head.weight", calibrate_exit_head(gram, cross, head).to(head.dtype)

    @contextmanager
    def _filled(self, module: nn.Module, *, own: bool = False) -> Iterator[None]:
        self._source.fill(module, own=own)
        yield
        self._source.release(module)
