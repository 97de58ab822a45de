"""Quantised checkpoints: which formats are read, and their weights as floats.

A weight of 8 bits, float8 or int8, comes with a grid of scales, `{name}_scale` (fbgemm and compressed-tensors: one per
row or one for all; compressed-tensors also one per block) or `{name}_scale_inv` (fine-grained FP8: one per block); a
value is the product of the two. compressed-tensors packs 4 or 8 bits into int32 as `{name}_packed`, and stores
`{name}_shape` with the scales. transformers runs such weights only on some GPUs and with the format's own library. Here
they are dequantised when read, which needs neither and gives the same teacher.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.checkpoint import Checkpoint, Part, TensorInfo, ranges
from swiftkv_platform.model.weight_formats import IntegerWeight, unpack_int32
from swiftkv_platform.planning import has_quantized_weights

QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_SCALES = ("_scale", "_scale_inv")
_ACTIVATIONS = (".input_scale", ".input_scale_ub", ".activation_scale", ".q_scale", ".k_scale", ".v_scale")
"""Suffixes of tensors that only quantised activations and caches need."""
PACKED, SHAPE = "_packed", "_shape"


def is_quantized(config: Any) -> bool:
    """Whether a configuration says that weights are quantised. Raises `ModelError`: the format is not supported."""
    return has_quantized_weights({"quantization_config": quantization_fields(config)})


def quantization_fields(config: Any) -> dict[str, Any] | None:
    """Return the `quantization_config` of a configuration, or None."""
    fields = getattr(config, "quantization_config", None)
    return fields if fields is None or isinstance(fields, dict) else fields.to_dict()


def as_floats(checkpoint: Checkpoint) -> Dequantized:
    """Return a view of the checkpoint with the names and shapes of its unquantised weights, which are dequantised when
    read. Reading raises `ModelError`: scales are missing or do not fit."""
    own = {name for name in checkpoint.shards if not _belongs_to_another(name, checkpoint)}
    shards = {name.removesuffix(PACKED): shard for name, shard in checkpoint.shards.items() if name in own}
    return Dequantized(checkpoint.source, shards, checkpoint.hub_arguments, stored=checkpoint)


def read_all(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Read every weight in `dtype`, file by file."""
    names = (name for names in checkpoint.names_in.values() for name in names)
    return {name: checkpoint.tensors([name])[name].to(dtype) for name in names}


def without_swiftkv(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a teacher's `quantization_config` changed for its student, whose own tensors are not quantised."""
    if fields["quant_method"] == "compressed-tensors":
        ignored = [*(fields.get("ignore") or []), "re:.*_swiftkv$", "exit_head"]
        return {**fields, "ignore": ignored}
    names = fields.get("modules_to_not_convert")
    own = [
        "q_proj_swiftkv",
        "k_proj_swiftkv",
        "v_proj_swiftkv",
        "o_proj_swiftkv",
        "k_proj_decode_swiftkv",
        "v_proj_decode_swiftkv",
        "exit_head",
    ]
    # A list replaces the default, which excludes the head.
    return {**fields, "modules_to_not_convert": [*(names if names is not None else ["lm_head"]), *own]}


@dataclass(frozen=True)
class Dequantized(Checkpoint):
    """A checkpoint whose quantised weights are read as floats."""

    stored: Checkpoint = field(kw_only=True)

    @cached_property
    def headers(self) -> dict[str, TensorInfo]:
        return {name: self._info(name) for name in self.shards}

    def tensors(self, names: Iterable[str], part: Part | None = None) -> dict[str, torch.Tensor]:
        """Read tensors, the quantised ones times their scales in float32. `part`: read only this part of each, except
        for scales, which are read whole."""
        return {name: self._tensor(name, part) for name in names}

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the packed weights."""
        packed = [name for name in self.shards if name not in self.stored.shards]
        if missing := [name for name in packed if f"{name}{SHAPE}" not in self.stored.shards]:
            raise self._misfit(f"{missing[0]}{PACKED} has no matching {missing[0]}{SHAPE}")
        read = self.stored.tensors(f"{name}{SHAPE}" for name in packed)
        shapes = {name: tuple(read[f"{name}{SHAPE}"].tolist()) for name in packed}
        for name, shape in shapes.items():
            info = self.stored.headers[f"{name}{PACKED}"]
            fits = len(shape) == 2 and len(info.shape) == 2 and shape[0] == info.shape[0]
            if info.dtype != torch.int32 or not fits or info.shape[1] not in (-(-shape[1] // 8), -(-shape[1] // 4)):
                raise self._misfit(f"{name}{PACKED} is {list(info.shape)}, which does not hold {list(shape)} integers")
        return shapes

    def integers(self, name: str) -> IntegerWeight | None:
        """Read a weight as integers with a scale for each row or group of inputs; None if it is not stored so."""
        stored, scales = self.stored, f"{name}{_SCALES[0]}"
        packed = f"{name}{PACKED}" in stored.shards
        if not packed and (name not in stored.shards or stored.headers[name].dtype != torch.int8):
            return None
        if scales not in stored.shards:
            return None
        integers, bits = self._unpack(name, None) if packed else (stored.tensors([name])[name], 8)
        scale = stored.tensors([scales])[scales]
        rows, size = integers.shape
        scale = scale.expand(rows, 1) if scale.numel() == 1 else scale.reshape(len(scale), -1)
        fits = len(scale) == rows and size % scale.shape[1] == 0
        if not fits or (bits == 8 and scale.shape[1] > 1):
            return None
        return IntegerWeight(integers, scale, "int4" if bits == 4 else "int8")

    def _info(self, name: str) -> TensorInfo:
        if name in self.stored.shards:
            return self.stored.headers[name]
        info = self.stored.headers[f"{name}{PACKED}"]
        return replace(info, shape=self._shapes[name], dtype=None)

    def _tensor(self, name: str, part: Part | None) -> torch.Tensor:
        if name not in self.stored.shards:
            weight, _ = self._unpack(name, part)
        else:
            weight = self.stored.tensors([name], part)[name]
            if weight.dtype not in QUANTIZED_DTYPES:
                return weight
        scales = next((f"{name}{suffix}" for suffix in _SCALES if f"{name}{suffix}" in self.stored.shards), None)
        if scales is None:
            raise self._misfit(f"{name} is quantised but has no {name}_scale or {name}_scale_inv")
        return self._multiply(name, weight, self.stored.tensors([scales])[scales], part)

    def _unpack(self, name: str, part: Part | None) -> tuple[torch.Tensor, int]:
        """Read the integers of a packed weight, int8, and the number of bits of each."""
        size = self._shapes[name][1]
        packed = f"{name}{PACKED}"
        count = 8 if self.stored.headers[packed].shape[1] == -(-size // 8) else 4  # integers of one int32
        rows, columns = ranges(part, 2)
        first, last, _ = columns.indices(size)
        read = self.stored.tensors([packed], (rows, slice(first // count, -(-last // count))))[packed]
        start = first - first // count * count
        return unpack_int32(read, 32 // count)[:, start : start + last - first], 32 // count

    def _multiply(self, name: str, weight: torch.Tensor, scale: torch.Tensor, part: Part | None) -> torch.Tensor:
        """Multiply `weight`, a `part` of a tensor, by the scales of the whole tensor."""
        rows, columns = shape = self.headers[name].shape
        grid = scale.float()
        grid = grid.reshape(1, 1) if grid.numel() == 1 else grid.reshape(len(grid), -1)
        if len(grid) > rows or grid.shape[1] > columns:
            raise self._misfit(f"{name} is {rows} x {columns}, which its scales {tuple(scale.shape)} do not fit")
        for dim, (size, kept) in enumerate(zip(shape, ranges(part, 2), strict=True)):
            if grid.shape[dim] > 1:
                # Blocks have equal size, except that the last one may be shorter.
                block = torch.arange(size)[kept] // _block(size, grid.shape[dim])
                grid = grid.index_select(dim, block)
        return weight.float() * grid

    def _misfit(self, why: str) -> ModelError:
        return ModelError(
            f"cannot read the quantised weights of {self.source!r}: {why}",
            field="model.name_or_path",
            value=self.source,
        )


def _belongs_to_another(name: str, checkpoint: Checkpoint) -> bool:
    """Whether a tensor belongs to another one's quantisation, such as its scales."""
    if name.endswith(_ACTIVATIONS):
        return True
    for suffix in (*_SCALES, SHAPE):
        base = name.removesuffix(suffix)
        if base != name and (base in checkpoint.shards or f"{base}{PACKED}" in checkpoint.shards):
            return True
    return False


def _block(size: int, count: int) -> int:
    """Return the rows or columns of a block if `count` blocks cover `size`; the usual 128 if that fits."""
    return 128 if -(-size // 128) == count else -(-size // count)
