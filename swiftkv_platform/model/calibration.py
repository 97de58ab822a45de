"""Calibrated initialisation: closed-form K, V and q of the SwiftKV projections from the teacher's own activations.

Copying the teacher's weights feeds them the wrong input: layer i >= l expects its own hidden state, and SwiftKV gives
it h = norm_swiftkv(x). Here each upper layer's K and V (before RoPE) are regressed on h, and the layers of an AcrossKV
group are then merged into one K and one V:

- Keys. RoPE turns each frequency (the pair of dimensions j, j + d/2, one complex number) by itself, so a group may mix
  its layers' keys by one complex factor a frequency without disturbing positions. Per head and frequency the shared key
  is the principal component of the layers' predicted keys, each weighted by the energy of the queries that will meet
  it, and every layer's query takes up the factor that leads back: where k_i = c_i k_shared, q_i . k_i equals
  (q_i conj(c_i)) . k_shared.
  The mean of keys, whose signs and phases are arbitrary, cancels where this does not.
- Values. o_proj is frozen, so the shared value minimises the sum over layers of |O_i (v_i - v)|^2:
  v = (sum M_i)^-1 sum M_i v_i with M_i = O_i^T O_i, per key-value head.

One forward pass of the teacher; everything is linear in Gram matrices kept in float64, which add up over workers.
It knows no files and no training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from swiftkv_platform.errors import InvalidInputError

TokenBatch = torch.Tensor | Mapping[str, torch.Tensor]
"""Token ids [batch, num_tokens], or a mapping with `input_ids` and `position_ids` of that shape (packed rows)."""

RIDGE = 1e-4
"""Ridge penalty as a share of the mean diagonal of the Gram matrix."""


@dataclass
class CalibrationStatistics:
    """Sums over tokens; `+` of two workers' statistics is the statistics of all their tokens."""

    gram: torch.Tensor
    """Sum of [h, 1]^T [h, 1], [hidden_size + 1, hidden_size + 1]."""
    keys: dict[int, torch.Tensor]
    """By upper layer: sum of [h, 1]^T k, [hidden_size + 1, num_key_value_heads * head_dim]; k before RoPE."""
    values: dict[int, torch.Tensor]
    queries: dict[int, torch.Tensor]
    """By upper layer: sum of squared queries, [num_attention_heads, head_dim]."""
    num_tokens: int

    def tensors(self) -> Iterator[torch.Tensor]:
        """Every sum, in a fixed order, so that workers can reduce them in place."""
        yield self.gram
        for sums in (self.keys, self.values, self.queries):
            yield from (sums[layer] for layer in sorted(sums))


class _Recorder:
    """Keeps the last output of the teacher's upper q, k and v projections while the teacher runs."""

    def __init__(self, layers: Mapping[int, nn.Module]) -> None:
        self.outputs: dict[tuple[int, str], torch.Tensor] = {}
        self._handles = [
            getattr(layer.self_attn, f"{kind}_proj").register_forward_hook(self._keep(i, kind))
            for i, layer in layers.items()
            for kind in "qkv"
        ]

    def _keep(self, layer: int, kind: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            self.outputs[layer, kind] = output.flatten(0, 1).double()

        return hook

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


@contextmanager
def _recording(layers: Mapping[int, nn.Module]) -> Iterator[_Recorder]:
    recorder = _Recorder(layers)
    try:
        yield recorder
    finally:
        recorder.close()


@torch.no_grad()
def collect(model: Any, batches: Iterable[TokenBatch]) -> CalibrationStatistics:
    """Run the teacher over `batches` and sum what calibration needs.

    Raises:
        InvalidInputError: no tokens.
    """
    decoder, config = model.model, model.config
    first = config.num_key_value_layers
    layers = {i: decoder.layers[i] for i in range(first, config.num_hidden_layers)}
    statistics: CalibrationStatistics | None = None
    with _recording(layers) as recorder:
        for batch in batches:
            inputs = batch if isinstance(batch, Mapping) else {"input_ids": batch}
            device = decoder.embed_tokens.weight.device
            context = decoder.begin(
                **{k: v.to(device) for k, v in inputs.items() if k in ("input_ids", "position_ids")}
            )
            x = decoder.lower(context)
            decoder.teacher_upper(x, context)
            hidden = decoder.norm_swiftkv(x).flatten(0, 1).double()
            ones = hidden.new_ones(hidden.shape[0], 1)
            if statistics is None:
                statistics = _empty(config, layers, recorder, hidden)
            _accumulate(statistics, torch.cat((hidden, ones), dim=1), recorder)
    if statistics is None:
        raise InvalidInputError("calibration got no tokens; give at least one batch of token ids", field="calibration")
    return statistics


def _empty(config: Any, layers: Mapping[int, Any], recorder: _Recorder, hidden: torch.Tensor) -> CalibrationStatistics:
    rows = hidden.shape[1] + 1

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float64, device=hidden.device)

    return CalibrationStatistics(
        gram=zeros(rows, rows),
        keys={i: zeros(rows, recorder.outputs[i, "k"].shape[1]) for i in layers},
        values={i: zeros(rows, recorder.outputs[i, "v"].shape[1]) for i in layers},
        queries={i: zeros(config.num_attention_heads, layer.self_attn.head_dim) for i, layer in layers.items()},
        num_tokens=0,
    )


def _accumulate(statistics: CalibrationStatistics, inputs: torch.Tensor, recorder: _Recorder) -> None:
    statistics.gram += inputs.T @ inputs
    statistics.num_tokens += inputs.shape[0]
    for i in statistics.keys:
        statistics.keys[i] += inputs.T @ recorder.outputs[i, "k"]
        statistics.values[i] += inputs.T @ recorder.outputs[i, "v"]
        statistics.queries[i] += recorder.outputs[i, "q"].square().sum(0).view_as(statistics.queries[i])


@torch.no_grad()
def calibrate(model: Any, statistics: CalibrationStatistics) -> None:
    """Set `{q,k,v}_proj_swiftkv` of every group of `model` from `statistics`, in place."""
    layer_map, layers = model.config.layer_map, model.model.layers
    num_heads = model.config.num_key_value_heads
    with_bias = layers[layer_map.leaders[0]].self_attn.k_proj_swiftkv.bias is not None
    gram = statistics.gram
    if not with_bias:  # no intercept: leave the constant column out
        gram = gram[:-1, :-1]
    penalty = RIDGE * gram.diagonal().mean()
    factor = torch.linalg.cholesky(gram + penalty * torch.eye(len(gram), dtype=gram.dtype, device=gram.device))

    def regress(cross: torch.Tensor) -> torch.Tensor:
        return torch.cholesky_solve(cross[: len(gram)], factor)  # [inputs, outputs]

    for leader in layer_map.leaders:
        group = list(layer_map.group(leader))
        keys = [regress(statistics.keys[i]) for i in group]
        if layers[leader].self_attn.normalises_heads:  # a factor on the query would be lost in its norm
            shared = torch.stack(keys).mean(0)
        else:
            shared, factors = _merge_keys(keys, [statistics.queries[i] for i in group], gram, num_heads)
            for i, factor_i in zip(group, factors, strict=True):
                _turn_query(layers[i].self_attn, factor_i)
        values = _merge_values(
            [regress(statistics.values[i]) for i in group],
            [layers[i].self_attn.o_proj.weight for i in group],
            num_heads,
        )
        _assign(layers[leader].self_attn.k_proj_swiftkv, shared.T)
        _assign(layers[leader].self_attn.v_proj_swiftkv, values.T)


def _complex(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[..., num_heads * head_dim] -> complex [..., num_heads, head_dim / 2]: RoPE's pairs (j, j + head_dim / 2)."""
    real, imaginary = x.unflatten(-1, (-1, head_dim)).chunk(2, dim=-1)
    return torch.complex(real.contiguous(), imaginary.contiguous())


def _real(z: torch.Tensor) -> torch.Tensor:
    """The inverse of `_complex`."""
    return torch.cat((z.real, z.imag), dim=-1).flatten(-2)


def _merge_keys(
    keys: list[torch.Tensor], queries: list[torch.Tensor], gram: torch.Tensor, num_key_value_heads: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """One key projection for a group and, by layer, the complex factor its queries take up.

    Args:
        keys: by layer, the regression of its keys on h, [inputs, num_key_value_heads * head_dim].
        queries: by layer, summed squared queries, [num_attention_heads, head_dim].

    Returns:
        The shared projection, shaped like one of `keys`, and factors [num_key_value_heads, head_dim / 2].
    """
    head_dim = queries[0].shape[1]
    predicted = torch.stack([_complex(w, head_dim) for w in keys])  # [group, inputs, kv_heads, frequencies]
    energy = []
    for q in queries:  # a key meets every query head of its group of heads, and both halves of its pair
        real, imaginary = q.unflatten(0, (num_key_value_heads, -1)).sum(1).chunk(2, dim=-1)
        energy.append((real + imaginary).clamp_min(1e-30).sqrt())
    scale = torch.stack(energy)  # [group, kv_heads, frequencies]
    scale = scale / scale.mean(0)
    weighted = predicted * scale[:, None]
    images = torch.einsum("nm,gmhf->gnhf", gram.to(weighted.dtype), weighted)
    covariance = torch.einsum("anhf,bnhf->hfab", weighted, images.conj())
    _, vectors = torch.linalg.eigh(covariance)  # ascending
    principal = vectors[..., -1].movedim(-1, 0)  # [group, kv_heads, frequencies]
    principal = principal * torch.exp(-1j * principal[:1].angle())  # the leader's own factor is real
    shared = (principal.conj()[:, None] * weighted).sum(0)
    factors = principal / scale  # k_i is close to factors_i * shared
    size = factors.abs().square().mean(0).sqrt()
    return _real(shared * size), list(factors / size)


def _merge_values(values: list[torch.Tensor], outputs: list[torch.Tensor], num_key_value_heads: int) -> torch.Tensor:
    """One value projection for a group, [inputs, num_key_value_heads * head_dim], weighted by o_proj."""
    head_dim = values[0].shape[1] // num_key_value_heads
    metrics = []
    for weight in outputs:  # [hidden_size, num_attention_heads * head_dim]
        heads = weight.double().unflatten(1, (num_key_value_heads, -1, head_dim))
        metrics.append(torch.einsum("okqd,okqe->kde", heads, heads))
    metric = torch.stack(metrics)  # [group, kv_heads, head_dim, head_dim]
    total = metric.sum(0)
    identity = torch.eye(head_dim, dtype=total.dtype, device=total.device)
    total = total + RIDGE * total.diagonal(dim1=-2, dim2=-1).mean() * identity
    split = torch.stack([w.unflatten(1, (num_key_value_heads, -1)) for w in values])
    mean = split.mean(0)
    # Solved for the deviation from the mean, so that where o_proj ignores a direction the ridge leaves the mean there.
    weighted = torch.einsum("gkde,gnke->knd", metric, split - mean)
    deviation = torch.linalg.solve(total, weighted.transpose(1, 2)).permute(2, 0, 1)
    merged: torch.Tensor = mean + deviation
    return merged.flatten(1)


def _assign(projection: nn.Linear, weight_and_bias: torch.Tensor) -> None:
    """Write [outputs, inputs (+ 1 for the intercept)] into a projection."""
    inputs = projection.in_features
    projection.weight.copy_(weight_and_bias[:, :inputs])
    if projection.bias is not None:
        projection.bias.copy_(weight_and_bias[:, inputs])


def _turn_query(attention: Any, factor: torch.Tensor) -> None:
    """Set q_proj_swiftkv to the teacher's queries times conj(factor) [num_key_value_heads, head_dim / 2]."""
    teacher, student, head_dim = attention.q_proj, attention.q_proj_swiftkv, attention.head_dim
    by_head = factor.conj().repeat_interleave(attention.num_key_value_groups, dim=0)
    # score = Re(q conj(k)) with k = factor * shared, hence q takes conj(factor).
    student.weight.copy_(_real(_complex(teacher.weight.double().T, head_dim) * by_head).T)
    if teacher.bias is not None:
        student.bias.copy_(_real(_complex(teacher.bias.double(), head_dim) * by_head))
