"""Calibrating attention by head: each upper layer's K and V (before RoPE) are regressed on h, and the layers of a group
are merged into one K and one V.

- Keys. RoPE turns each frequency (the pair of dimensions j, j + d/2, one complex number) by itself, so a group may mix
  its layers' keys by one complex factor a frequency without disturbing positions. Per head and frequency the shared key
  is the principal component of the layers' predicted keys, each weighted by the energy of the queries that will meet
  it, and every layer's query takes up the factor that leads back: where k_i = c_i k_shared, q_i . k_i equals
  (q_i conj(c_i)) . k_shared.
  The mean of keys, whose signs and phases are arbitrary, cancels where this does not.
- Heads. With other key-value heads than the teacher's (paper, appendix C) the same merge decides: where one head stands
  for several, they join the group as if they were layers; where the teacher's are repeated, each copy is fitted to the
  query heads that read it.
- Values. o_proj is frozen, so the shared value minimises the sum over layers of |O_i (v_i - v)|^2:
  v = (sum M_i)^-1 sum M_i v_i with M_i = O_i^T O_i, per key-value head.

It knows no tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from swiftkv_platform.model.calibration_statistics import RIDGE, CalibrationStatistics, Method, Regression, assign
from swiftkv_platform.model.initialization import share_heads


def _sum_of_squares(queries: torch.Tensor) -> torch.Tensor:
    """[num_attention_heads, head_dim]."""
    return queries.square().sum(0)


def _fit(
    attentions: Sequence[Any], layers: Sequence[int], statistics: CalibrationStatistics, regression: Regression
) -> None:
    leader, config = attentions[0], attentions[0].config
    num_heads: int = config.num_key_value_heads_swiftkv or config.num_key_value_heads
    merged = max(config.num_key_value_heads // num_heads, 1)  # heads of the teacher that one shared head stands for
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    queries, outputs = [], []
    for attention, i in zip(attentions, layers, strict=True):
        keys += _members(regression.solve(statistics.cross[i, "k_proj"]), config.num_key_value_heads, num_heads)
        values += _members(regression.solve(statistics.cross[i, "v_proj"]), config.num_key_value_heads, num_heads)
        by_head = statistics.queries[i].unflatten(0, (num_heads, merged, -1)).unbind(1)
        queries += [heads.flatten(0, 1) for heads in by_head]
        outputs += attention.o_proj.weight.unflatten(1, (num_heads, merged, -1)).unbind(2)
    if leader.normalises_heads:  # a factor on the query would be lost in its norm
        shared = torch.stack(keys).mean(0)
    else:
        shared, factors = merge_keys(keys, queries, regression.gram, num_heads)
        for n, attention in enumerate(attentions):
            of_layer = torch.stack(factors[n * merged : (n + 1) * merged], dim=1)
            _turn_query(attention, of_layer.flatten(0, 1))
    assign(leader.k_proj_swiftkv, shared.T)
    assign(leader.v_proj_swiftkv, merge_values(values, outputs, num_heads).T)


HEADS = Method(recorded=("k_proj", "v_proj"), query_statistic=_sum_of_squares, fit=_fit)


def _members(projection: torch.Tensor, num_heads: int, num_shared: int) -> list[torch.Tensor]:
    """[inputs, num_heads * head_dim] -> members of a group, each [inputs, num_shared * head_dim]."""
    if num_shared >= num_heads:
        return [share_heads(projection.T, num_heads, num_shared).T]
    return [part.flatten(1) for part in projection.unflatten(1, (num_shared, num_heads // num_shared, -1)).unbind(2)]


def _complex(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[..., num_heads * head_dim] -> complex [..., num_heads, head_dim / 2]: RoPE's pairs (j, j + head_dim / 2)."""
    real, imaginary = x.unflatten(-1, (-1, head_dim)).chunk(2, dim=-1)
    return torch.complex(real.contiguous(), imaginary.contiguous())


def _real(z: torch.Tensor) -> torch.Tensor:
    """The inverse of `_complex`."""
    return torch.cat((z.real, z.imag), dim=-1).flatten(-2)


def merge_keys(
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


def merge_values(values: list[torch.Tensor], outputs: list[torch.Tensor], num_key_value_heads: int) -> torch.Tensor:
    """One value projection for a group, [inputs, num_key_value_heads * head_dim], weighted by o_proj."""
    head_dim = values[0].shape[1] // num_key_value_heads
    metrics = []
    for weight in outputs:  # [hidden_size, num_key_value_heads, query heads of each * head_dim]
        heads = weight.double().unflatten(2, (-1, head_dim))
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


def _turn_query(attention: Any, factor: torch.Tensor) -> None:
    """Set q_proj_swiftkv to the teacher's queries times conj(factor) [key-value heads, head_dim / 2]."""
    teacher, student, head_dim = attention.q_proj, attention.q_proj_swiftkv, attention.head_dim
    num_heads = teacher.out_features // head_dim
    by_head = factor.conj().repeat_interleave(num_heads // len(factor), dim=0)
    # score = Re(q conj(k)) with k = factor * shared, hence q takes conj(factor).
    student.weight.copy_(_real(_complex(teacher.weight.double().T, head_dim) * by_head).T)
    if teacher.bias is not None:
        student.bias.copy_(_real(_complex(teacher.bias.double(), head_dim) * by_head))
