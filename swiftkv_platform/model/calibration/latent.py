"""Calibrating latent attention (MLA): latent and rotary key are regressed on h, and a group's layers are merged.

A group of one layer copies the other projections. In a longer group a mean of latents would be noise, since each layer
has its own latent basis, so the layers are merged by the keys and values that they expand their latents to:

- Keys without RoPE. Scores q_i . k_i do not change under a linear map of a head's keys that its queries absorb. Per
  head the shared key is the leading qk_nope_head_dim components of the layers' predicted keys, each weighted by the
  second moment Q_i of the queries that will meet it: k_i = F_i k_shared, and layer i's queries become F_i^T q_i.
- Rotary key. As in `heads`: one complex factor per frequency, here the same for all heads.
- Values. As in `heads`: merged in the metric of each layer's o_proj, or shared with the student's own
  output projections.
- Latent. The shared keys and values together are a linear map of h. Its best approximation of rank kv_lora_rank, with
  equal weight on keys and values, splits into the down projection (component scores, scaled to the size of the layers'
  latents) and the up projection. The norm between them is approximated by its mean over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from swiftkv_platform.model.calibration.heads import compose_outputs, merge_keys, merge_values, share_values
from swiftkv_platform.model.calibration.regression import (
    CalibrationMethod,
    GroupRegression,
    WeightedMap,
    compute_root_and_inverse,
    share_components,
)


def _sum_second_moments(queries: torch.Tensor) -> torch.Tensor:
    """Sum q q^T over tokens by head: [num_attention_heads, qk_head_dim, qk_head_dim]."""
    return torch.einsum("thd,the->hde", queries, queries)


def _fit_group(attentions: Sequence[Any], layers: Sequence[int], regression: GroupRegression) -> None:
    leader, num_tokens = attentions[0], regression.num_tokens
    rank, plain = leader.kv_lora_rank, leader.qk_nope_head_dim
    compressed = [regression.predict(i, "kv_a_proj_with_mqa") for i in layers]
    if len(attentions) == 1:
        regression.set_projections("kv_a_proj_with_mqa", compressed[0])
        return
    queries = [regression.sums.queries[i] / num_tokens for i in layers]
    energies = [_to_halves(moments.diagonal(dim1=-2, dim2=-1)[:, plain:]) for moments in queries]
    rotary, factors = merge_keys([_to_halves(w[:, rank:]) for w in compressed], energies, regression.gram, 1)

    latents = [regression.predict(i, "kv_a_layernorm") for i in layers]
    expanded = [
        (latent @ attention.kv_b_proj.weight.double().T).unflatten(1, (-1, plain + attention.v_head_dim))
        for latent, attention in zip(latents, attentions, strict=True)
    ]
    keys, maps = share_components(
        [y[..., :plain] for y in expanded], [q[:, :plain, :plain] for q in queries], regression.gram
    )
    values = _merge_weighted_values([y[..., plain:] for y in expanded], attentions, regression)
    down, up = _factorize(keys, values, rank, regression)
    down = down * torch.stack([_compute_rms(w[:, :rank], regression) for w in compressed]).mean()

    regression.set_projections("kv_a_proj_with_mqa", torch.cat((down, _to_pairs(rotary)), dim=1))
    leader.kv_a_layernorm_swiftkv.weight.fill_(1.0)
    leader.kv_b_proj_swiftkv.weight.copy_(up.flatten(1).T)
    for attention, linear, factor in zip(attentions, maps, factors, strict=True):
        _absorb_into_query(attention, linear, factor[0])


LATENT_CALIBRATION = CalibrationMethod(
    recorded=("kv_a_proj_with_mqa", "kv_a_layernorm"), query_statistic=_sum_second_moments, fit=_fit_group
)


def _merge_weighted_values(
    values: list[torch.Tensor], attentions: Sequence[Any], regression: GroupRegression
) -> WeightedMap:
    """Merge a group's values by head, weighting errors by the layers' o_proj."""
    num_heads, dim = values[0].shape[1:]
    outputs = [attention.o_proj.weight.double().unflatten(1, (num_heads, dim)) for attention in attentions]
    flat = [value.flatten(1) for value in values]
    if attentions[0].config.own_output_projection:
        merged, maps = share_values(flat, outputs, regression.gram, num_heads)
        outputs = [compose_outputs(output, one).flatten(2) for output, one in zip(outputs, maps, strict=True)]
        for attention, output in zip(attentions, outputs, strict=True):
            attention.o_proj_swiftkv.weight.copy_(output.flatten(1))
    else:
        merged = merge_values(flat, outputs, num_heads)
    root, inverse = compute_root_and_inverse(torch.stack([torch.einsum("ohd,ohe->hde", o, o) for o in outputs]).sum(0))
    return WeightedMap(torch.einsum("nhd,hde->nhe", merged.unflatten(1, (num_heads, dim)), root), inverse)


def _factorize(
    keys: WeightedMap, values: WeightedMap, rank: int, regression: GroupRegression
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the down projection [rows, rank] to latents of mean square 1, and the up projection [rank, heads, dim].

    `dim` is the dimensions of keys and values together.
    """
    of_h, factor = slice(regression.num_inputs), regression.regression.factor
    images = [torch.einsum("ni,nhd->ihd", factor, part.weights[of_h]) for part in (keys, values)]
    sizes = [image.norm() for image in images]  # gives keys and values equal weight
    target = torch.cat([(image / size).flatten(1) for image, size in zip(images, sizes, strict=True)], dim=1)
    scores, energies, components = torch.linalg.svd(target, full_matrices=False)
    scores = scores[:, :rank] * energies[:rank]
    maps = [(part.weights / size).flatten(1) for part, size in zip((keys, values), sizes, strict=True)]
    down = torch.cat(maps, dim=1) @ components[:rank].T
    norm = (scores.square().sum() / (rank * regression.num_tokens)).sqrt()
    split = (components[:rank] * norm).split([part.weights[0].numel() for part in (keys, values)], dim=1)
    up = [
        torch.einsum("rhd,hde->rhe", (columns * size).unflatten(1, part.weights.shape[1:]), part.restore)
        for columns, size, part in zip(split, sizes, (keys, values), strict=True)
    ]
    return down / norm, torch.cat(up, dim=-1)


def _compute_rms(weights: torch.Tensor, regression: GroupRegression) -> torch.Tensor:
    """Return the root mean square over tokens of the outputs of `weights` [rows, outputs] on h."""
    of_h = weights[: regression.num_inputs]
    total = torch.einsum("no,nm,mo->", of_h, regression.gram, of_h)
    return (total / (regression.num_tokens * weights.shape[1])).sqrt()


def _absorb_into_query(attention: Any, linear: torch.Tensor, factor: torch.Tensor) -> None:
    """Set the last query projection to the teacher's queries: F^T q without RoPE, q conj(factor) with it."""
    name = attention.list_query_modules(attention.config)[-1]
    teacher, student = getattr(attention, name), getattr(attention, f"{name}_swiftkv")
    by_head = teacher.weight.double().unflatten(0, (len(linear), -1))
    plain, rotary = by_head.split([attention.qk_nope_head_dim, attention.qk_rope_head_dim], dim=1)
    real, imaginary = _to_halves(rotary.mT).chunk(2, dim=-1)
    turned = torch.complex(real.contiguous(), imaginary.contiguous()) * factor.conj()
    rotary = _to_pairs(torch.cat((turned.real, turned.imag), dim=-1)).mT
    student.weight.copy_(torch.cat((linear.mT @ plain, rotary), dim=1).flatten(0, 1))


def _to_halves(x: torch.Tensor) -> torch.Tensor:
    """[..., dim] with RoPE's pairs at (2j, 2j + 1) -> at (j, j + dim / 2)."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)


def _to_pairs(x: torch.Tensor) -> torch.Tensor:
    """Invert `_to_halves`."""
    return torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)
