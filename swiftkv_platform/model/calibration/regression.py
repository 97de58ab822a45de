"""Sums over tokens that calibration collects, and the regressions solved from them, for any kind of attention."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from swiftkv_platform.errors import InvalidInputError

TokenBatch = torch.Tensor | Mapping[str, torch.Tensor]
"""Token ids [batch, num_tokens] or [num_tokens], or a mapping with `input_ids` and `position_ids` of one shape (packed
rows)."""
MAX_ACTIVATION_BYTES = 4 << 30
"""Default limit in bytes for the activations that a worker holds in host memory."""


class LayerSource(Protocol):
    """A student, and functions that load and free its weights module by module."""

    model: Any

    def load_parameters(self, module: nn.Module, *, with_added: bool = True) -> None:
        """Load the parameters of `module`; without `with_added`, only those that the teacher has too."""

    def free_parameters(self, module: nn.Module) -> None:
        """Free the parameters of `module`."""


@contextmanager
def load_module(source: LayerSource, module: nn.Module, *, with_added: bool = True) -> Iterator[None]:
    source.load_parameters(module, with_added=with_added)
    yield
    source.free_parameters(module)


def make_decoder_inputs(batch: TokenBatch, decoder: Any, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Return the decoder's arguments for a batch. Raises `InvalidInputError`: it does not hold ids of this model."""
    given = batch if isinstance(batch, Mapping) else {"input_ids": batch}
    ids, vocab_size = given.get("input_ids"), decoder.config.vocab_size
    if not isinstance(ids, torch.Tensor) or ids.ndim not in (1, 2) or ids.dtype not in (torch.int64, torch.int32):
        shown = f"{ids.dtype} of shape {list(ids.shape)}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise InvalidInputError(
            f"calibration has a batch of {shown}; expected int64 or int32 token ids, "
            "[batch, num_tokens] or [num_tokens]",
            field="calibration",
            value=shown,
        )
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        invalid = next(i for i in ids.flatten().tolist() if not 0 <= i < vocab_size)
        raise InvalidInputError(
            f"calibration has the token id {invalid}; this model's vocabulary accepts 0..{vocab_size - 1}",
            field="calibration",
            value=invalid,
        )
    named = {name: given[name] for name in ("input_ids", "position_ids") if name in given}
    return {name: (t[None] if t.ndim == 1 else t).to(device) for name, t in named.items()}


class StoredActivation:
    """A tensor in an `ActivationStore`. Deleting this object frees its memory or file."""

    def __init__(self, store: ActivationStore, tensor: torch.Tensor | None, path: Path | None) -> None:
        self._store, self._tensor, self._path = store, tensor, path

    def load(self, device: torch.device | str) -> torch.Tensor:
        if self._tensor is not None:
            return self._tensor.to(device)
        assert self._path is not None, "a stored activation has a tensor or a file"
        return load_file(self._path)["x"].to(device)

    def __del__(self) -> None:
        if self._tensor is not None:
            self._store.num_bytes -= self._tensor.nbytes
        elif self._path is not None:
            self._path.unlink(missing_ok=True)


class ActivationStore:
    """Stores tensors, up to `max_bytes` in host memory and the rest in files.

    Args:
        max_bytes: maximum bytes in memory.
        directory: directory of the files.
    """

    def __init__(self, max_bytes: int, directory: Path) -> None:
        self.num_bytes = 0
        """Bytes in memory."""
        self._max_bytes = max_bytes
        self._directory = directory
        self._num_files = 0

    @classmethod
    @contextmanager
    def open(cls, max_bytes: int) -> Iterator[ActivationStore]:
        """Open a store whose files are deleted when the block ends."""
        with tempfile.TemporaryDirectory(prefix="activations-") as directory:
            yield cls(max_bytes, Path(directory))

    def save(self, tensor: torch.Tensor) -> StoredActivation:
        if self.num_bytes + tensor.nbytes <= self._max_bytes:
            self.num_bytes += tensor.nbytes
            return StoredActivation(self, tensor.cpu(), None)
        self._num_files += 1
        path = self._directory / f"{self._num_files:08d}.safetensors"
        save_file({"x": tensor.detach().cpu().contiguous()}, path)
        return StoredActivation(self, None, path)


RIDGE = 1e-4
"""Ridge penalty as a share of the mean diagonal of the Gram matrix."""
_MIN_EIGENVALUE_SHARE = 1e-3
"""Minimum eigenvalue of a metric before inversion, as a share of the mean eigenvalue."""


@dataclass
class GroupSums:
    """Sums over tokens for a group of layers."""

    cross: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    """Sum of [h, 1]^T output, [hidden_size + 1, outputs], by layer and recorded module of its attention."""
    queries: dict[int, torch.Tensor] = field(default_factory=dict)
    """Sum of `CalibrationMethod.query_statistic` of the queries before RoPE, by layer."""
    own_gram: torch.Tensor | None = None
    """Sum of [n, 1]^T [n, 1], [hidden_size + 1, hidden_size + 1], for the input n of the leader's projections; set for
    a group of several layers if deep tokens keep their own K and V."""
    own_cross: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)
    """Sum of [n, 1]^T output, as `cross`; set with `own_gram`."""


def factor_with_ridge(gram: torch.Tensor) -> torch.Tensor:
    """Return the lower Cholesky factor of a Gram matrix plus the ridge penalty."""
    penalty = RIDGE * gram.diagonal().mean()
    factor: torch.Tensor = torch.linalg.cholesky(
        gram + penalty * torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    )
    return factor


def compute_root_and_inverse(metric: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the symmetric square root of a metric [..., dim, dim], and the root's inverse."""
    values, vectors = torch.linalg.eigh(metric)
    values = values.clamp_min(0) + _MIN_EIGENVALUE_SHARE * values.mean(-1, keepdim=True).clamp_min(1e-30)
    return vectors * values.sqrt()[..., None, :] @ vectors.mT, vectors * values.rsqrt()[..., None, :] @ vectors.mT


@dataclass(frozen=True)
class WeightedMap:
    """A linear map of h by head, in a basis in which errors in all directions have equal weight."""

    weights: torch.Tensor
    """[inputs, num_heads, dim]."""
    restore: torch.Tensor
    """Matrices [num_heads, dim, dim] that, multiplied from the right, turn `weights` back into the original basis."""


def fit_shared_map(
    parts: Sequence[torch.Tensor], metrics: Sequence[torch.Tensor], gram: torch.Tensor
) -> tuple[WeightedMap, list[torch.Tensor]]:
    """Return one shared map by head for a group, and by layer the matrix F_i [num_heads, dim, dim] with part_i = F_i
    shared: the best approximation in `dim` dimensions, for layers that can absorb any linear map.

    Args:
        parts: by layer, a linear map of h, [inputs, num_heads, dim].
        metrics: by layer, the weight of errors by direction, [num_heads, dim, dim].
        gram: sum of h^T h; the maps' rows for h come first, and rows for other inputs get no weight.
    """
    dim = parts[0].shape[-1]
    roots = [compute_root_and_inverse(metric) for metric in metrics]
    weighted = torch.cat([torch.einsum("nhd,hde->nhe", p, root) for p, (root, _) in zip(parts, roots, strict=True)], -1)
    of_h = weighted[: len(gram)]
    images = torch.einsum("nm,mhd->nhd", gram, of_h)
    _, vectors = torch.linalg.eigh(torch.einsum("nhd,nhe->hde", of_h, images))  # ascending
    principal = vectors[..., -dim:]  # [heads, group * dim, dim]
    by_layer = principal.unflatten(1, (len(parts), dim)).unbind(1)
    # Any basis of the components has the same error; this rotation and size changes the absorbing projections least.
    agreement = torch.stack([u.mT @ root for u, (root, _) in zip(by_layer, roots, strict=True)]).sum(0)
    left, _, right = torch.linalg.svd(agreement)
    rotation = left @ right
    maps = torch.stack([inverse @ u @ rotation for u, (_, inverse) in zip(by_layer, roots, strict=True)])
    size = (maps.square().sum((-1, -2)).mean(0) / dim).sqrt()[:, None, None]
    return WeightedMap(torch.einsum("nhd,hde->nhe", weighted, principal), rotation * size), list(maps / size)


class Regression:
    """Ridge regression of recorded outputs on h.

    Args:
        gram: sum over tokens of [h, 1]^T [h, 1], [hidden_size + 1, hidden_size + 1].
        intercept: whether the fitted projection has a bias.
    """

    def __init__(self, gram: torch.Tensor, num_tokens: int, *, intercept: bool) -> None:
        self._inputs = slice(None if intercept else -1)
        self.num_tokens = num_tokens
        self.gram = gram[self._inputs, self._inputs]
        self.factor = factor_with_ridge(self.gram)

    def solve(self, cross: torch.Tensor) -> torch.Tensor:
        """Return the weights [inputs, outputs] for sums [hidden_size + 1, outputs]."""
        return torch.cholesky_solve(cross[self._inputs], self.factor)

    def make_group_regression(self, leader: Any, layer: int, sums: GroupSums) -> GroupRegression:
        """Return the regressions of a group. `leader`, `layer`: its leader's attention and layer number."""
        factor = None
        if sums.own_gram is not None:
            factor = factor_with_ridge(sums.own_gram[self._inputs, self._inputs])
        return GroupRegression(self, leader, layer, sums, factor)


@dataclass(frozen=True)
class GroupRegression:
    """Regressions of the recorded outputs of a group's layers: on h and, if deep tokens keep their own K and V, also on
    the input n of the leader's projections.

    Maps have one row for each input, first those of h, then those of n. The layers of a group are merged by a linear
    combination of their maps, which `gram` determines from h alone and which is then applied to the rows of n too.
    """

    regression: Regression
    leader: Any
    layer: int
    sums: GroupSums
    own_factor: torch.Tensor | None

    @property
    def num_inputs(self) -> int:
        """Number of rows for h."""
        return len(self.regression.gram)

    @property
    def has_own_key_value(self) -> bool:
        return bool(self.leader.config.layer_map.deep_leaders)

    @property
    def gram(self) -> torch.Tensor:
        """Sum of h^T h, [inputs, inputs]."""
        return self.regression.gram

    @property
    def num_tokens(self) -> int:
        return self.regression.num_tokens

    def predict(self, i: int, name: str) -> torch.Tensor:
        """Return the map to the outputs of the module `name` in layer i's attention, [rows, outputs]."""
        solved = self.regression.solve(self.sums.cross[i, name])
        if not self.has_own_key_value:
            return solved
        if i == self.layer and name in self.leader.decode_modules:
            projection = self.leader.get_teacher_module(name)
            own = projection.weight.double().T
            if len(own) < self.num_inputs:
                own = torch.cat((own, projection.bias.double()[None]))
        else:
            assert self.own_factor is not None, "groups of several layers collect `own_gram`"
            cross = self.sums.own_cross[i, name]
            own = torch.cholesky_solve(cross[: self.num_inputs], self.own_factor)
        return torch.cat((solved, own.to(solved.device)))

    def set_projections(self, name: str, maps: torch.Tensor) -> None:
        """Write maps [rows, outputs] into the leader's twins of the module `name`."""
        set_projection(getattr(self.leader, f"{name}_swiftkv"), maps[: self.num_inputs].T)
        if self.has_own_key_value:
            set_projection(getattr(self.leader, f"{name}_decode_swiftkv"), maps[self.num_inputs :].T)


@dataclass(frozen=True)
class CalibrationMethod:
    """Calibration method for a kind of attention."""

    recorded: tuple[str, ...]
    """Modules of the teacher's attention whose outputs are regressed on h."""
    query_statistic: Callable[[torch.Tensor], torch.Tensor]
    """Function that sums a statistic of queries before RoPE, [num_tokens, num_attention_heads, dim], over tokens."""
    fit: Callable[[Sequence[Any], Sequence[int], GroupRegression], None]
    """Function that sets the SwiftKV projections of a group, given its attention modules (leader first) and layers."""


def set_projection(projection: nn.Linear, weight_and_bias: torch.Tensor) -> None:
    """Write [outputs, inputs (+ 1 for the intercept)] into a projection."""
    inputs = projection.in_features
    projection.weight.copy_(weight_and_bias[:, :inputs])
    if projection.bias is not None:
        projection.bias.copy_(weight_and_bias[:, inputs])
