"""Calibration layer by layer, with rows divided among workers.

A layer is read, runs over the stored activations of this worker's rows, and is freed. After each layer the workers
reduce their sums over tokens; after the last layer of a group the first worker fits it. A worker holds one layer, its
rows' activations and the sums of one group; the first worker also holds a group's attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import nn

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model.attention import LatentAttentionMixin
from swiftkv_platform.model.calibration.attention import HEAD_CALIBRATION, LATENT_CALIBRATION
from swiftkv_platform.model.calibration.regression import (
    MAX_ACTIVATION_BYTES,
    ActivationStore,
    CalibrationMethod,
    GroupSums,
    LayerSource,
    Regression,
    StoredActivation,
    TokenBatch,
    factor_with_ridge,
    load_module,
    make_decoder_inputs,
)
from swiftkv_platform.model.workers import Workers

K = TypeVar("K")


@torch.no_grad()
def calibrate_layerwise(
    source: LayerSource,
    batches: Iterable[TokenBatch],
    *,
    workers: Workers,
    device: torch.device | str = "cpu",
    max_activation_bytes: int = MAX_ACTIVATION_BYTES,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the names and tensors of the calibrated start on the first worker. The others yield nothing but must
    exhaust the iterator. Raises `InvalidInputError` without tokens, or for ids outside the vocabulary.

    Args:
        batches: this worker's share of the rows.
        max_activation_bytes: max bytes of activations in memory; the rest goes to disk.
        progress: called with the number of finished layers and the total.
    """
    with ActivationStore.open(max_activation_bytes) as store:
        yield from _CalibrationPass(source, workers, device, store).run(batches, progress)


@torch.no_grad()
def calibrate(student: Any, batches: Iterable[TokenBatch]) -> None:
    """Replace the copied start of a student in memory by the calibrated one. Raises `InvalidInputError` as
    `calibrate_layerwise`."""
    parameters = dict(student.named_parameters())
    source: Any = SimpleNamespace(model=student, load_parameters=lambda *_, **__: None, free_parameters=lambda _: None)
    alone = Workers(alone=True)
    for name, tensor in calibrate_layerwise(source, batches, workers=alone, device=student.device):
        parameters[name].copy_(tensor)


class _Recorder:
    """Latest outputs of modules in a teacher's attention, recorded by hooks."""

    def __init__(self, attention: Any, method: CalibrationMethod) -> None:
        self.outputs: dict[str, torch.Tensor] = {}
        """Outputs of the modules that are regressed on h, float64 [num_tokens, outputs]."""
        self.query: torch.Tensor
        """Queries before RoPE, float64 [num_tokens, num_attention_heads * dim]."""
        self.input: torch.Tensor
        """Input of the projections, [batch, num_tokens, hidden_size]."""
        self.handles: list[Any] = []
        for name in method.recorded:
            self._record_output(attention, name, partial(self.outputs.__setitem__, name))
        self._record_output(
            attention, attention.list_query_modules(attention.config)[-1], partial(setattr, self, "query")
        )
        first = getattr(attention, attention.locate_teacher_rows(attention.config, method.recorded[0])[0])
        self.handles.append(first.register_forward_pre_hook(lambda _, inputs: setattr(self, "input", inputs[0])))

    def _record_output(self, attention: Any, name: str, store: Callable[[torch.Tensor], None]) -> None:
        module, rows = attention.locate_teacher_rows(attention.config, name)

        def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            output = output if rows is None else output[..., rows]
            store(output.flatten(0, -2).double())

        self.handles.append(getattr(attention, module).register_forward_hook(hook))


@contextmanager
def _record_attention(attention: Any, method: CalibrationMethod) -> Iterator[_Recorder]:
    recorder = _Recorder(attention, method)
    try:
        yield recorder
    finally:
        for handle in recorder.handles:
            handle.remove()


class _CalibrationPass:
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
        attention = self._decoder.layers[self._first].self_attn
        self._method = LATENT_CALIBRATION if isinstance(attention, LatentAttentionMixin) else HEAD_CALIBRATION
        self._intercept = attention.input_projections[0].bias is not None
        self._positions: list[torch.Tensor] = []
        self._hidden: list[StoredActivation] = []
        self._x: list[StoredActivation] = []
        """Outputs of layer l - 1 per row, with all tokens as skipped prompt tokens."""
        self._deep_x: list[StoredActivation] = []
        """Outputs of the teacher's layer l - 1 per row; equal to `_x` unless prompts bypass layers below l."""
        self._own_inputs: list[StoredActivation] = []
        """Inputs of the leader's projections per row, if deep tokens have their own K and V."""
        self._scale = 1.0
        """Weight of the rows: 0 for a worker without rows, which runs one token to join the reductions."""

    def run(
        self, batches: Iterable[TokenBatch], progress: Callable[[int, int], None]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        decoder, layer_map, num_layers = self._decoder, self._config.layer_map, self._config.num_hidden_layers
        progress(0, num_layers)
        num_tokens = self._embed_rows(batches)
        first_bypassed_layer = layer_map.first_bypassed_layer
        for i in range(self._first):
            if i == first_bypassed_layer:
                self._x = list(self._hidden)
            with self._load_teacher_module(decoder.layers[i]):
                for row in range(len(self._hidden)):
                    self._run_layer(i, self._hidden, row)
                    if i > first_bypassed_layer and i not in layer_map.bypassed_layers:
                        self._run_layer(i, self._x, row)
            progress(i + 1, num_layers)
        self._deep_x = list(self._hidden)
        if not layer_map.bypassed_layers:
            self._x = self._deep_x
        with load_module(self._source, decoder.norm_swiftkv):
            if self._workers.is_first:
                for name, parameter in decoder.norm_swiftkv.named_parameters():
                    yield f"model.norm_swiftkv.{name}", parameter
            gram = self._compute_gram()
            regression = Regression(gram, num_tokens, intercept=self._intercept) if self._workers.is_first else None
            for leader in layer_map.leaders:
                sums, self._own_inputs = GroupSums(), []
                for i in layer_map.get_group(leader):
                    with self._load_teacher_module(decoder.layers[i]):
                        self._collect_layer_sums(i, sums, leader)
                    progress(i + 1, num_layers)
                if regression is not None:
                    yield from self._fit_group(layer_map.get_group(leader), sums, regression)
        if self._config.shape.has_exit_head:
            yield from self._fit_exit_head()

    def _embed_rows(self, batches: Iterable[TokenBatch]) -> int:
        """Embed this worker's rows. Returns the number of tokens of all workers."""
        num_tokens = 0
        with self._load_teacher_module(self._decoder.embed_tokens):
            for batch in batches:
                inputs = make_decoder_inputs(batch, self._decoder, self._device)
                num_tokens += inputs["input_ids"].numel()
                self._embed_batch(inputs)
            if not self._hidden:
                self._scale = 0.0
                self._embed_batch({"input_ids": torch.zeros(1, 1, dtype=torch.int64, device=self._device)})
        total = int(self._workers.all_reduce_(torch.tensor(num_tokens, device=self._device)))
        if not total:
            raise InvalidInputError(
                "calibration got no tokens; give at least one batch of token ids", field="calibration"
            )
        return total

    def _embed_batch(self, inputs: dict[str, torch.Tensor]) -> None:
        context = self._decoder.make_context(**inputs)
        self._positions.append(context.position_ids)
        self._hidden.append(self._store.save(context.hidden))

    def _run_layer(self, i: int, states: list[StoredActivation], row: int) -> None:
        """Run layer i over the hidden states of a row."""
        # Masks are rebuilt per layer: the masks of all rows could be larger than the rows.
        hidden = states[row].load(self._device)
        context = self._decoder.make_context(inputs_embeds=hidden, position_ids=self._positions[row])
        states[row] = self._store.save(self._decoder.run_layer(i, context.hidden, context))

    def _compute_regression_inputs(self, row: int) -> torch.Tensor:
        """Return [h, 1], [num_tokens, hidden_size + 1]."""
        return _append_intercept(self._decoder.norm_swiftkv(self._x[row].load(self._device))) * self._scale

    def _compute_gram(self) -> torch.Tensor:
        total: torch.Tensor | None = None
        for row in range(len(self._x)):
            total = _add_gram(total, self._compute_regression_inputs(row))
        assert total is not None, "a worker without rows runs a token of weight 0"
        return self._workers.all_reduce_(total)

    def _collect_layer_sums(self, i: int, sums: GroupSums, leader: int) -> None:
        """Run a teacher layer >= l, and add its statistics over all workers to `sums`."""
        config, layer = self._config, self._decoder.layers[i]
        takes_own = bool(config.layer_map.deep_leaders) and len(config.layer_map.get_group(leader)) > 1
        of_layer = GroupSums()
        with _record_attention(layer.self_attn, self._method) as recorder:
            for row in range(len(self._hidden)):
                self._run_layer(i, self._hidden, row)
                inputs = self._compute_regression_inputs(row)
                for name, output in recorder.outputs.items():
                    _add_to_sum(of_layer.cross, (i, name), inputs.T @ output)
                if takes_own:
                    if i == leader:
                        self._own_inputs.append(self._store.save(recorder.input))
                    own = _append_intercept(self._own_inputs[row].load(self._device)) * self._scale
                    if i == leader:
                        of_layer.own_gram = _add_gram(of_layer.own_gram, own)
                    for name, output in recorder.outputs.items():
                        _add_to_sum(of_layer.own_cross, (i, name), own.T @ output)
                by_head = recorder.query.unflatten(-1, (config.num_attention_heads, -1))
                _add_to_sum(of_layer.queries, i, self._method.query_statistic(by_head) * self._scale)
        sums.cross |= self._sum_over_workers(of_layer.cross)
        sums.queries |= self._sum_over_workers(of_layer.queries)
        sums.own_cross |= self._sum_over_workers(of_layer.own_cross)
        if of_layer.own_gram is not None:
            sums.own_gram = self._workers.all_reduce_(of_layer.own_gram)

    def _sum_over_workers(self, sums: dict[K, torch.Tensor]) -> dict[K, torch.Tensor]:
        return {key: self._workers.all_reduce_(part) for key, part in sums.items()}

    def _fit_group(
        self, group: Iterable[int], sums: GroupSums, regression: Regression
    ) -> Iterator[tuple[str, torch.Tensor]]:
        layers = list(group)
        attentions = [self._decoder.layers[i].self_attn for i in layers]
        for attention in attentions:
            self._source.load_parameters(attention)
        self._method.fit(attentions, layers, regression.make_group_regression(attentions[0], layers[0], sums))
        for i, attention in zip(layers, attentions, strict=True):
            for name, parameter in attention.named_parameters():
                if "_swiftkv" in name:
                    yield f"model.layers.{i}.self_attn.{name}", parameter
            self._source.free_parameters(attention)

    def _fit_exit_head(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Apply the language model's head to the final hidden state predicted from x."""
        model, sums = self._source.model, None
        with load_module(self._source, model.exit_norm), self._load_teacher_module(self._decoder.norm):
            for kept, x in zip(self._hidden, self._deep_x, strict=True):
                final = self._decoder.apply_final_norm(kept.load(self._device)).flatten(0, 1).double()
                inputs = model.exit_norm(x.load(self._device)).flatten(0, 1).double()
                parts = [inputs.T @ inputs * self._scale, inputs.T @ final * self._scale]
                sums = parts if sums is None else [a.add_(b) for a, b in zip(sums, parts, strict=True)]
            assert sums is not None, "a worker without rows runs a token of weight 0"
            gram, cross = (self._workers.all_reduce_(part) for part in sums)
            if self._workers.is_first:
                yield "exit_norm.weight", model.exit_norm.weight
        if self._workers.is_first:
            with self._load_teacher_module(model.lm_head):
                head = model.lm_head.weight
                # exit_norm(x) @ expected is close to final
                expected = torch.cholesky_solve(cross, factor_with_ridge(gram))
                yield "exit_head.weight", (head.float() @ expected.T.to(head.device, torch.float32)).to(head.dtype)

    def _load_teacher_module(self, module: nn.Module) -> Any:
        return load_module(self._source, module, with_added=False)


def _append_intercept(states: torch.Tensor) -> torch.Tensor:
    """[batch, num_tokens, hidden_size] -> [batch * num_tokens, hidden_size + 1] in float64, with ones at the end."""
    states = states.flatten(0, 1).double()
    return torch.cat((states, states.new_ones(states.shape[0], 1)), dim=1)


def _add_gram(total: torch.Tensor | None, inputs: torch.Tensor) -> torch.Tensor:
    return inputs.T @ inputs if total is None else total.addmm_(inputs.T, inputs)


def _add_to_sum(sums: dict[Any, torch.Tensor], key: Any, part: torch.Tensor) -> None:
    sums[key] = sums[key].add_(part) if key in sums else part
