"""Calibrated initialisation: closed-form SwiftKV projections from the teacher's own activations.

Copied teacher weights get the wrong input: layer i >= l expects its own hidden state, and SwiftKV gives it
h = norm_swiftkv(x). Here each upper layer's projections of its hidden state are regressed on h, and the layers of an
AcrossKV group are then merged: by head in `calibration_heads`, latents in `calibration_latent`. Likewise the exit head
starts as the language model's head applied to the final hidden state predicted from x, not to x itself.

It takes one forward pass of the teacher. All sums are Gram matrices in float64, which add up over workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model.bypass import bypass_all
from swiftkv_platform.model.calibration_heads import HEADS
from swiftkv_platform.model.calibration_latent import LATENTS
from swiftkv_platform.model.calibration_statistics import (
    CalibrationStatistics,
    Method,
    OwnSums,
    Regression,
    ridge_factor,
)
from swiftkv_platform.model.latent_attention import LatentAttentionMixin

TokenBatch = torch.Tensor | Mapping[str, torch.Tensor]
"""Token ids [batch, num_tokens] or [num_tokens], or a mapping with `input_ids` and `position_ids` of one shape (packed
rows)."""


def method_of(layers: Mapping[int, Any]) -> Method:
    attention = next(iter(layers.values())).self_attn
    return LATENTS if isinstance(attention, LatentAttentionMixin) else HEADS


class _Recorder:
    """Recorder of the latest outputs of modules in the teacher's upper attention layers while the teacher runs."""

    def __init__(self, layers: Mapping[int, Any], method: Method) -> None:
        self.outputs: dict[tuple[int, str], torch.Tensor] = {}
        self.queries: dict[int, torch.Tensor] = {}
        self.inputs: dict[int, torch.Tensor] = {}
        """Inputs of the projections by layer, [batch, num_tokens, hidden_size]."""
        self._handles: list[Any] = []
        for i, layer in layers.items():
            attention = layer.self_attn
            for name in method.recorded:
                self._follow(attention, name, self.outputs, (i, name))
            self._follow(attention, attention.query_modules(attention.config)[-1], self.queries, i)
            first = getattr(attention, attention.rows_of_teacher(attention.config, method.recorded[0])[0])
            self._handles.append(first.register_forward_pre_hook(partial(self._keep_input, i)))

    def _follow(self, attention: Any, name: str, outputs: dict[Any, torch.Tensor], key: Any) -> None:
        module, rows = attention.rows_of_teacher(attention.config, name)

        def keep(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            output = output if rows is None else output[..., rows]
            outputs[key] = output.flatten(0, -2).double()

        self._handles.append(getattr(attention, module).register_forward_hook(keep))

    def _keep_input(self, i: int, _module: nn.Module, inputs: Any) -> None:
        self.inputs[i] = inputs[0]

    def own_sums(self, layer_map: Any) -> dict[int, OwnSums]:
        """Return the sums of the recorded batch, by leader, for groups of more than one layer."""
        sums = {}
        for leader in layer_map.leaders:
            group = layer_map.group(leader)
            if len(group) > 1:
                n = with_intercept(self.inputs[leader])
                cross = {key: n.T @ output for key, output in self.outputs.items() if key[0] in group}
                sums[leader] = OwnSums(n.T @ n, cross)
        return sums

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


@contextmanager
def recording(layers: Mapping[int, Any], method: Method) -> Iterator[_Recorder]:
    recorder = _Recorder(layers, method)
    try:
        yield recorder
    finally:
        recorder.close()


def decoder_inputs(batch: TokenBatch, decoder: Any) -> dict[str, torch.Tensor]:
    """Return the decoder's arguments for a batch. Raises `InvalidInputError`: it does not hold ids of this model."""
    given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    ids, vocab_size = given.get("input_ids"), decoder.config.vocab_size
    if not isinstance(ids, torch.Tensor) or ids.ndim not in (1, 2) or ids.dtype not in (torch.int64, torch.int32):
        shown = f"{ids.dtype} of shape {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise InvalidInputError(
            f"calibration has a batch of {shown}; int64 or int32 tensors of token ids are accepted, "
            "[batch, num_tokens] or [num_tokens]",
            field="calibration",
            value=shown,
        )
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        strange = next(i for i in ids.flatten().tolist() if not 0 <= i < vocab_size)
        raise InvalidInputError(
            f"calibration has the token id {strange}; this model's vocabulary accepts 0..{vocab_size - 1}",
            field="calibration",
            value=strange,
        )
    device = decoder.embed_tokens.weight.device
    named = {name: given[name] for name in ("input_ids", "position_ids") if name in given}
    return {name: (t[None] if t.ndim == 1 else t).to(device) for name, t in named.items()}


@torch.no_grad()
def collect(model: Any, batches: Iterable[TokenBatch]) -> CalibrationStatistics:
    """Run the teacher over `batches` and sum the statistics of calibration. Raises `InvalidInputError`: there are no
    tokens, or a batch has ids that are not the model's."""
    decoder, config = model.model, model.config
    layers = {i: decoder.layers[i] for i in range(config.num_key_value_layers, config.num_hidden_layers)}
    method = method_of(layers)
    statistics: CalibrationStatistics | None = None
    with recording(layers, method) as recorder:
        for batch in batches:
            context = decoder.begin(**decoder_inputs(batch, decoder))
            teacher_x = decoder.lower(context)
            x = decoder.lower(context, bypass_all) if config.layer_map.gaps else teacher_x
            final = decoder.teacher_upper(teacher_x, context)
            hidden = with_intercept(decoder.norm_swiftkv(x))
            sums = CalibrationStatistics(
                gram=hidden.T @ hidden,
                cross={key: hidden.T @ output for key, output in recorder.outputs.items()},
                queries={
                    i: method.query_statistic(query.unflatten(-1, (config.num_attention_heads, -1)))
                    for i, query in recorder.queries.items()
                },
                exits=exit_sums(model.exit_norm(teacher_x), final) if config.early_exit else (),
                num_tokens=hidden.shape[0],
                own=recorder.own_sums(config.layer_map) if config.layer_map.deep_leaders else {},
            )
            statistics = sums if statistics is None else statistics.add_(sums)
    if statistics is None:
        raise InvalidInputError("calibration got no tokens; give at least one batch of token ids", field="calibration")
    return statistics


def with_intercept(states: torch.Tensor) -> torch.Tensor:
    """[batch, num_tokens, hidden_size] -> [batch * num_tokens, hidden_size + 1] in float64, with ones at the end."""
    states = states.flatten(0, 1).double()
    return torch.cat((states, states.new_ones(states.shape[0], 1)), dim=1)


def exit_sums(inputs: torch.Tensor, final: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return n^T n and n^T final, see `CalibrationStatistics.exits`. Inputs: [batch, num_tokens, hidden_size] each."""
    inputs, final = inputs.flatten(0, 1).double(), final.flatten(0, 1).double()
    return inputs.T @ inputs, inputs.T @ final


@torch.no_grad()
def calibrate(model: Any, statistics: CalibrationStatistics) -> None:
    """Set the SwiftKV projections of every group of `model`, and its exit head, from `statistics`, in place."""
    layer_map, layers = model.config.layer_map, model.model.layers
    leaders = {i: layers[i] for i in layer_map.leaders}
    method = method_of(leaders)
    fitted = next(iter(leaders.values())).self_attn.input_projections[0]
    regression = Regression(statistics, intercept=fitted.bias is not None)
    for leader in leaders:
        group = layer_map.group(leader)
        of_group = regression.of_group(layers[leader].self_attn, leader, statistics)
        method.fit([layers[i].self_attn for i in group], group, of_group)
    if statistics.exits:
        gram, cross = statistics.exits
        head = model.lm_head.weight
        model.exit_head.weight.copy_(calibrate_exit_head(gram, cross, head))


def calibrate_exit_head(gram: torch.Tensor, cross: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Return the exit head in float32: the language model's `head` applied to the final hidden state predicted from x.
    `gram`, `cross`: see `CalibrationStatistics.exits`."""
    expected = torch.cholesky_solve(cross, ridge_factor(gram))  # exit_norm(x) @ expected: the final hidden state
    calibrated: torch.Tensor = head.float() @ expected.T.to(head.device, torch.float32)
    return calibrated
