"""Calibration methods by kind of attention: by head, and latent (MLA).

By head, each upper layer's K and V (before RoPE) are regressed on h, and the layers of a group are merged into one K
and one V.

- Keys. RoPE rotates each frequency (the pair of dimensions j, j + d/2, one complex number) separately, so a group may
  mix its layers' keys with one complex factor per frequency without affecting positions. Per head and frequency the
  shared key is the principal component of the layers' predicted keys, each weighted by the energy of the queries that
  will meet it. Each layer's query absorbs the factor: if k_i = c_i k_shared, then q_i . k_i equals
  (q_i conj(c_i)) . k_shared.
  The signs and phases of keys are arbitrary, so their mean would cancel; the principal component does not.
- Heads. With other key-value heads than the teacher's (paper, appendix C) the same merge applies: if one head replaces
  several, they join the group as if they were layers; if the teacher's are repeated, each copy is fitted to the query
  heads that read it.
- Values. If o_proj is frozen, the shared value minimizes the sum over layers of |O_i (v_i - v)|^2:
  v = (sum M_i)^-1 sum M_i v_i with M_i = O_i^T O_i, per key-value head.
- Own output projections. Each layer may then map the shared value linearly, and only the part that does not fit into
  head_dim dimensions is lost: v and O'_i are the best approximation of that rank to all O_i v_i. A layer's heads may
  also join the group in another order, which its q_proj and o_proj absorb: the order that loses least of the keys.

With latent attention, latent and rotary key are regressed on h, and a group's layers are merged. A group of one layer
copies the other projections. In a longer group a mean of latents would be noise, since each layer has its own latent
basis, so the layers are merged by the keys and values that they expand their latents to:

- Keys without RoPE. Scores q_i . k_i do not change under a linear map of a head's keys that its queries absorb. Per
  head the shared key is the leading qk_nope_head_dim components of the layers' predicted keys, each weighted by the
  second moment Q_i of the queries that will meet it: k_i = F_i k_shared, and layer i's queries become F_i^T q_i.
- Rotary key. As above: one complex factor per frequency, here the same for all heads.
- Values. As above: merged in the metric of each layer's o_proj, or shared with the student's own
  output projections.
- Latent. The shared keys and values together are a linear map of h. Its best approximation of rank kv_lora_rank, with
  equal weight on keys and values, splits into the down projection (component scores, scaled to the size of the layers'
  latents) and the up projection. The norm between them is approximated by its mean over tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from swiftkv_platform.model.calibration.regression import (
    RIDGE,
    CalibrationMethod,
    GroupRegression,
    WeightedMap,
    compute_root_and_inverse,
    fit_shared_map,
)
from swiftkv_platform.model.weights.lazy_student import share_heads


@dataclass
class _Layer:
    """A layer's attention as part of its group: one member, or several if a shared head replaces several of its own."""

    attention: Any
    num_heads: int
    """Number of shared key-value heads."""
    keys: list[torch.Tensor]
    """Maps from h by member, each [rows, num_heads * head_dim], dimensions ordered by `_order_by_pairs`."""
    values: list[torch.Tensor]
    """Maps from h by member, each [rows, num_heads * head_dim]."""
    queries: list[torch.Tensor]
    """Summed squared queries by member, each [query heads, head_dim], ordered by `_order_by_pairs`."""
    order: Sequence[int]
    """The teacher's head that joins each shared head."""

    @classmethod
    def from_attention(cls, attention: Any, i: int, regression: GroupRegression) -> _Layer:
        config = attention.config
        num_heads: int = config.num_key_value_heads_swiftkv or config.num_key_value_heads
        merged = max(config.num_key_value_heads // num_heads, 1)
        keys, values = (
            _split_members(regression.predict(i, name), config.num_key_value_heads, num_heads)
            for name in ("k_proj", "v_proj")
        )
        by_head = regression.sums.queries[i].unflatten(0, (num_heads, merged, -1)).unbind(1)
        pairs = _get_pair_order(attention)
        queries = [_order_by_pairs(heads.flatten(0, 1), pairs) for heads in by_head]
        keys = [_order_by_pairs(key, pairs) for key in keys]
        return cls(attention, num_heads, keys, values, queries, range(num_heads))

    @property
    def outputs(self) -> list[torch.Tensor]:
        """The teacher's o_proj by member, each [hidden_size, num_heads, its query heads * head_dim], in its dtype."""
        weight = _reorder_heads(self.attention.o_proj.weight, 1, self.order)
        return list(weight.unflatten(1, (self.num_heads, len(self.keys), -1)).unbind(2))

    def reorder_heads(self, order: Sequence[int]) -> None:
        """Let head `order[n]` join the shared head n; for a layer of one member."""
        self.order = order
        for tensors, dim in ((self.keys, 1), (self.values, 1), (self.queries, 0)):
            tensors[:] = [_reorder_heads(tensor, dim, order) for tensor in tensors]

    def absorb_into_query(self, factor: torch.Tensor) -> None:
        """Set q_proj_swiftkv to the teacher's queries times conj(factor) [key-value heads, head_dim / 2]."""
        teacher, student = self.attention.get_teacher_module("q_proj"), self.attention.q_proj_swiftkv
        head_dim, pairs = self.attention.head_dim, _get_pair_order(self.attention)
        by_head = factor.conj().repeat_interleave(teacher.out_features // head_dim // len(factor), dim=0)

        def multiply(x: torch.Tensor) -> torch.Tensor:
            return _undo_pair_order(_to_real(_to_complex(_order_by_pairs(x, pairs), head_dim) * by_head), pairs)

        # score = Re(q conj(k)) with k = factor * shared, so q is multiplied by conj(factor)
        student.weight.copy_(multiply(_reorder_heads(teacher.weight.double(), 0, self.order).T).T)
        if teacher.bias is not None:
            student.bias.copy_(multiply(_reorder_heads(teacher.bias.double(), 0, self.order)))

    def absorb_into_output(self, maps: Sequence[torch.Tensor]) -> None:
        """Set o_proj_swiftkv to the teacher's o_proj composed with `maps`, one per member, see `fit_shared_values`."""
        turned = [compose_outputs(output, one).flatten(2) for output, one in zip(self.outputs, maps, strict=True)]
        self.attention.o_proj_swiftkv.weight.copy_(torch.stack(turned, dim=2).flatten(1))


def _fit_group(attentions: Sequence[Any], layers: Sequence[int], regression: GroupRegression) -> None:
    leader, config = attentions[0], attentions[0].config
    group = [_Layer.from_attention(attention, i, regression) for attention, i in zip(attentions, layers, strict=True)]
    num_heads, merged = group[0].num_heads, len(group[0].keys)
    if config.own_output_projection and not leader.has_head_norms and num_heads == config.num_key_value_heads:
        firsts = [(layer.keys[0], layer.queries[0]) for layer in group]
        for layer, order in zip(group, match_heads(firsts, regression.gram, num_heads), strict=True):
            layer.reorder_heads(order)
    keys = [key for layer in group for key in layer.keys]
    values = [value for layer in group for value in layer.values]
    outputs = [output for layer in group for output in layer.outputs]
    if leader.has_head_norms:  # the norm would cancel a factor on the query
        shared = torch.stack(keys).mean(0)
    else:
        queries = [query for layer in group for query in layer.queries]
        shared, factors = merge_key_projections(keys, queries, regression.gram, num_heads)
        for n, layer in enumerate(group):
            of_layer = torch.stack(factors[n * merged : (n + 1) * merged], dim=1)
            layer.absorb_into_query(of_layer.flatten(0, 1))
    regression.set_projections("k_proj", _undo_pair_order(shared, _get_pair_order(leader)))
    if config.own_output_projection and len(values) > 1:
        value, maps = fit_shared_values(values, outputs, regression.gram, num_heads)
        for n, layer in enumerate(group):
            layer.absorb_into_output(maps[n * merged : (n + 1) * merged])
    else:
        value = merge_value_projections(values, outputs, num_heads)
    regression.set_projections("v_proj", value)


HEAD_CALIBRATION = CalibrationMethod(
    recorded=("k_proj", "v_proj"),
    query_statistic=lambda queries: queries.square().sum(0),  # [num_attention_heads, head_dim]
    fit=_fit_group,
)


def _split_members(projection: torch.Tensor, num_heads: int, num_shared: int) -> list[torch.Tensor]:
    """Split or repeat heads: [inputs, num_heads * head_dim] -> members, each [inputs, num_shared * head_dim]."""
    if num_shared >= num_heads:
        return [share_heads(projection.T, num_heads, num_shared).T]
    return [part.flatten(1) for part in projection.unflatten(1, (num_shared, num_heads // num_shared, -1)).unbind(2)]


def _reorder_heads(x: torch.Tensor, dim: int, order: Sequence[int]) -> torch.Tensor:
    """Return `x` with head `order[n]` at place n; dimension `dim` consists of heads of equal size."""
    if list(order) == list(range(len(order))):
        return x
    heads: torch.Tensor = x.unflatten(dim, (len(order), -1))
    return heads.index_select(dim, torch.tensor(order, device=x.device)).flatten(dim, dim + 1)


def _get_pair_order(attention: Any) -> torch.Tensor | None:
    """Return the order of a head's dimensions in which pairs are (j, j + head_dim / 2), if RoPE rotates only the first
    dimensions, else None. Dimensions that are not rotated, and can be mixed freely, are paired as well."""
    head_dim: int = attention.head_dim
    rope = attention.config.rope_parameters or {}
    rotated = int(head_dim * (rope.get("partial_rotary_factor") or 1.0))
    if rotated == head_dim:
        return None
    parts = torch.arange(head_dim).split([rotated, head_dim - rotated])
    first, second = zip(*(part.chunk(2) for part in parts), strict=True)
    return torch.cat((*first, *second))


def _order_by_pairs(x: torch.Tensor, pairs: torch.Tensor | None) -> torch.Tensor:
    """Put each head's dimensions in `[..., num_heads * head_dim]` in the order `pairs` (`_get_pair_order`)."""
    if pairs is None:
        return x
    paired: torch.Tensor = x.unflatten(-1, (-1, len(pairs)))[..., pairs.to(x.device)].flatten(-2)
    return paired


def _undo_pair_order(x: torch.Tensor, pairs: torch.Tensor | None) -> torch.Tensor:
    """Invert `_order_by_pairs`."""
    return x if pairs is None else _order_by_pairs(x, pairs.argsort())


def _to_complex(x: torch.Tensor, head_dim: int) -> torch.Tensor:
    """[..., num_heads * head_dim] -> complex [..., num_heads, head_dim / 2]: RoPE's pairs (j, j + head_dim / 2)."""
    real, imaginary = x.unflatten(-1, (-1, head_dim)).chunk(2, dim=-1)
    return torch.complex(real.contiguous(), imaginary.contiguous())


def _to_real(z: torch.Tensor) -> torch.Tensor:
    """Invert `_to_complex`."""
    return torch.cat((z.real, z.imag), dim=-1).flatten(-2)


def merge_key_projections(
    keys: list[torch.Tensor], queries: list[torch.Tensor], gram: torch.Tensor, num_key_value_heads: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Merge a group's keys into one projection; returns it and, by layer, the complex factor for its queries.

    Args:
        keys: by layer, the regression of its keys on h, [inputs, num_key_value_heads * head_dim].
        queries: by layer, summed squared queries, [num_attention_heads, head_dim].
        gram: sum of h^T h; the keys' rows for h come first, and rows for other inputs get no weight.

    Returns:
        The shared projection, shaped like one of `keys`, and factors [num_key_value_heads, head_dim / 2].
    """
    head_dim = queries[0].shape[1]
    predicted = torch.stack([_to_complex(w, head_dim) for w in keys])  # [group, inputs, kv_heads, frequencies]
    scale = torch.stack([_compute_query_norms(q, num_key_value_heads) for q in queries])
    scale = scale / scale.mean(0)  # [group, kv_heads, frequencies]
    weighted = predicted * scale[:, None]
    of_h = weighted[:, : len(gram)]
    images = torch.einsum("nm,gmhf->gnhf", gram.to(weighted.dtype), of_h)
    covariance = torch.einsum("anhf,bnhf->hfab", of_h, images.conj())
    _, vectors = torch.linalg.eigh(covariance)  # ascending
    principal = vectors[..., -1].movedim(-1, 0)  # [group, kv_heads, frequencies]
    principal = principal * torch.exp(-1j * principal[:1].angle())  # the leader's own factor is real
    shared = (principal.conj()[:, None] * weighted).sum(0)
    factors = principal / scale  # k_i is close to factors_i * shared
    size = factors.abs().square().mean(0).sqrt()
    return _to_real(shared * size), list(factors / size)


def _compute_query_norms(squares: torch.Tensor, num_key_value_heads: int) -> torch.Tensor:
    """Return the norms of the queries that a key meets, by head and frequency, [num_key_value_heads, head_dim / 2].

    A key meets all query heads of its group of heads, and both dimensions of its pair.
    """
    real, imaginary = squares.unflatten(0, (num_key_value_heads, -1)).sum(1).chunk(2, dim=-1)
    norms: torch.Tensor = (real + imaginary).clamp_min(1e-30).sqrt()
    return norms


def match_heads(
    layers: Sequence[tuple[torch.Tensor, torch.Tensor]], gram: torch.Tensor, num_key_value_heads: int
) -> list[list[int]]:
    """Return, by layer of a group, which of its heads joins each shared head: the first layer's in their own order,
    each later layer's in the order with which `merge_key_projections` loses least. `layers`: predicted keys and
    summed squared queries, as `merge_key_projections` takes them."""
    orders = [list(range(num_key_value_heads))]
    joined: list[tuple[torch.Tensor, torch.Tensor]] = []  # weighted keys and gram @ them, in the heads' new order
    for keys, queries in layers:
        weighted = _to_complex(keys[: len(gram)], queries.shape[1]) * _compute_query_norms(queries, num_key_value_heads)
        image = torch.einsum("nm,mhf->nhf", gram.to(weighted.dtype), weighted)
        if joined:
            orders.append(assign_heads(_compute_lost_energy(joined, weighted, image)))
        joined.append((weighted[:, orders[-1]], image[:, orders[-1]]))
    return orders


def assign_heads(lost: torch.Tensor) -> list[int]:
    """Return, for each shared head (row), the head that joins it (column), minimizing the sum of `lost`."""
    from scipy.optimize import linear_sum_assignment  # slow to import; replicas, which never call this, may lack it

    columns: list[int] = linear_sum_assignment(lost.cpu().numpy())[1].tolist()
    return columns


def _compute_lost_energy(
    joined: Sequence[tuple[torch.Tensor, torch.Tensor]], weighted: torch.Tensor, image: torch.Tensor
) -> torch.Tensor:
    """Return the energy outside the principal component if a layer's head (column) joins a shared head (row)."""
    members = torch.stack([keys for keys, _ in joined])
    inner = torch.einsum("anhf,bnhf->hfab", members.conj(), torch.stack([images for _, images in joined]))
    outer = torch.einsum("anhf,nkf->hkfa", members.conj(), image)
    own = torch.einsum("nkf,nkf->kf", weighted.conj(), image)
    inner = inner[:, None].expand(-1, len(own), -1, -1, -1)
    rows = torch.cat((inner, outer[..., None]), dim=-1)
    last = torch.cat((outer.conj(), own[None, :, :, None].expand(len(own), -1, -1, 1)), dim=-1)
    energies = torch.linalg.eigvalsh(torch.cat((rows, last[..., None, :]), dim=-2))  # ascending
    lost: torch.Tensor = energies[..., :-1].sum((-1, -2))
    return lost


def fit_shared_values(
    values: list[torch.Tensor], outputs: list[torch.Tensor], gram: torch.Tensor, num_key_value_heads: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Merge a group's values into one projection; returns it and, by layer, the map from the shared value to its own.

    Args:
        values: by layer, the regression of its values on h, [inputs, num_key_value_heads * head_dim].
        outputs: by layer, its o_proj, [hidden_size, num_key_value_heads, query heads of each * head_dim].

    Returns:
        The shared projection, shaped like one of `values`, and maps [num_key_value_heads, head_dim, head_dim] to apply
        before a layer's output projection.
    """
    head_dim = values[0].shape[1] // num_key_value_heads
    shared, maps = fit_shared_map(
        [value.unflatten(1, (num_key_value_heads, -1)) for value in values],
        [_compute_output_gram(output, head_dim) for output in outputs],
        gram,
    )
    return torch.einsum("nkd,kde->nke", shared.weights, shared.restore).flatten(1), maps


def compose_outputs(output: torch.Tensor, maps: torch.Tensor) -> torch.Tensor:
    """Compose an output projection with a map of each key-value head's values. Returns [hidden_size,
    num_key_value_heads, query heads of each, head_dim] in float64."""
    return torch.einsum("okqd,kde->okqe", output.double().unflatten(2, (-1, maps.shape[1])), maps)


def _compute_output_gram(output: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Return O^T O of an output projection by key-value head, [num_key_value_heads, head_dim, head_dim]."""
    heads = output.double().unflatten(2, (-1, head_dim))
    return torch.einsum("okqd,okqe->kde", heads, heads)


def merge_value_projections(
    values: list[torch.Tensor], outputs: list[torch.Tensor], num_key_value_heads: int
) -> torch.Tensor:
    """Merge a group's values into one projection [inputs, num_key_value_heads * head_dim], weighted by o_proj."""
    head_dim = values[0].shape[1] // num_key_value_heads
    metric = torch.stack([_compute_output_gram(output, head_dim) for output in outputs])
    total = metric.sum(0)  # [kv_heads, head_dim, head_dim]
    identity = torch.eye(head_dim, dtype=total.dtype, device=total.device)
    total = total + RIDGE * total.diagonal(dim1=-2, dim2=-1).mean() * identity
    split = torch.stack([w.unflatten(1, (num_key_value_heads, -1)) for w in values])
    mean = split.mean(0)
    # Solve for the deviation from the mean: in directions that o_proj ignores, the ridge then leaves the mean.
    weighted = torch.einsum("gkde,gnke->knd", metric, split - mean)
    deviation = torch.linalg.solve(total, weighted.transpose(1, 2)).permute(2, 0, 1)
    merged: torch.Tensor = mean + deviation
    return merged.flatten(1)


def _sum_second_moments(queries: torch.Tensor) -> torch.Tensor:
    """Sum q q^T over tokens by head: [num_attention_heads, qk_head_dim, qk_head_dim]."""
    return torch.einsum("thd,the->hde", queries, queries)


def _fit_latent_group(attentions: Sequence[Any], layers: Sequence[int], regression: GroupRegression) -> None:
    leader, num_tokens = attentions[0], regression.num_tokens
    rank, plain = leader.kv_lora_rank, leader.qk_nope_head_dim
    compressed = [regression.predict(i, "kv_a_proj_with_mqa") for i in layers]
    if len(attentions) == 1:
        regression.set_projections("kv_a_proj_with_mqa", compressed[0])
        return
    queries = [regression.sums.queries[i] / num_tokens for i in layers]
    energies = [_to_halves(moments.diagonal(dim1=-2, dim2=-1)[:, plain:]) for moments in queries]
    rotary, factors = merge_key_projections([_to_halves(w[:, rank:]) for w in compressed], energies, regression.gram, 1)

    latents = [regression.predict(i, "kv_a_layernorm") for i in layers]
    expanded = [
        (latent @ attention.kv_b_proj.weight.double().T).unflatten(1, (-1, plain + attention.v_head_dim))
        for latent, attention in zip(latents, attentions, strict=True)
    ]
    keys, maps = fit_shared_map(
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
    recorded=("kv_a_proj_with_mqa", "kv_a_layernorm"), query_statistic=_sum_second_moments, fit=_fit_latent_group
)


def _merge_weighted_values(
    values: list[torch.Tensor], attentions: Sequence[Any], regression: GroupRegression
) -> WeightedMap:
    """Merge a group's values by head, weighting errors by the layers' o_proj."""
    num_heads, dim = values[0].shape[1:]
    outputs = [attention.o_proj.weight.double().unflatten(1, (num_heads, dim)) for attention in attentions]
    flat = [value.flatten(1) for value in values]
    if attentions[0].config.own_output_projection:
        merged, maps = fit_shared_values(flat, outputs, regression.gram, num_heads)
        outputs = [compose_outputs(output, one).flatten(2) for output, one in zip(outputs, maps, strict=True)]
        for attention, output in zip(attentions, outputs, strict=True):
            attention.o_proj_swiftkv.weight.copy_(output.flatten(1))
    else:
        merged = merge_value_projections(flat, outputs, num_heads)
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
