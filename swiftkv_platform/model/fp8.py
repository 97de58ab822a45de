"""FP8 checkpoints: which are read, and their weights in the model's own dtype. It knows formats, no model family.

A weight is float8 with a grid of scales beside it, `{name}_scale` (fbgemm and compressed-tensors: one a row or one in
all; compressed-tensors: one a block too) or `{name}_scale_inv` (fine-grained: one a block); either way a value is the
product of the two. transformers runs such weights on some GPUs with the format's own library; here they are turned
back when they are read, which needs neither, and the teacher stays what its FP8 weights say.
"""

from __future__ import annotations

from typing import Any

import torch

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.checkpoint import Checkpoint, Part, ranges
from swiftkv_platform.planning import has_fp8_weights

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
_SCALES = ("_scale", "_scale_inv")
_ACTIVATIONS = (".input_scale", ".input_scale_ub", ".activation_scale", ".q_scale", ".k_scale", ".v_scale")
"""Endings of what only quantised activations and caches need."""


def is_fp8(config: Any) -> bool:
    """Whether a configuration announces FP8 weights. Raises `ModelError`: another quantisation."""
    quantization = getattr(config, "quantization_config", None)
    fields = quantization if quantization is None or isinstance(quantization, dict) else quantization.to_dict()
    return has_fp8_weights({"quantization_config": fields})


def is_scale(name: str, checkpoint: Checkpoint) -> bool:
    """Whether a tensor of an FP8 checkpoint belongs to the quantisation of another."""
    if name.endswith(_ACTIVATIONS):
        return True
    return any(name.endswith(suffix) and name.removesuffix(suffix) in checkpoint.shards for suffix in _SCALES)


def read_tensors(
    checkpoint: Checkpoint, names: list[str] | tuple[str, ...], part: Part | None = None
) -> dict[str, torch.Tensor]:
    """Some tensors by name; float8 ones times their scales, in float32. `part`: reads no more than this of each; scales
    are read whole. Raises `ModelError`: float8 without scales, or scales that do not fit."""
    scales = {name: found for name in names if (found := _scale_of(name, checkpoint)) is not None}
    read = checkpoint.tensors(names, part)
    grids = checkpoint.tensors(scales.values())
    return {name: _dequantize(checkpoint, name, read[name], grids.get(scales.get(name, "")), part) for name in names}


def read_all(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Every weight in `dtype`, a file at a time."""
    by_shard: dict[str, list[str]] = {}
    for name, shard in checkpoint.shards.items():
        if not is_scale(name, checkpoint):
            by_shard.setdefault(shard, []).append(name)
    weights = {}
    for names in by_shard.values():
        for name in names:
            weights[name] = read_tensors(checkpoint, [name])[name].to(dtype)
    return weights


def without_swiftkv(fields: dict[str, Any]) -> dict[str, Any]:
    """A teacher's `quantization_config` for its student, whose own tensors are not quantised."""
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
    # A list replaces the default, which spares the head.
    return {**fields, "modules_to_not_convert": [*(names if names is not None else ["lm_head"]), *own]}


def _scale_of(name: str, checkpoint: Checkpoint) -> str | None:
    return next((f"{name}{suffix}" for suffix in _SCALES if f"{name}{suffix}" in checkpoint.shards), None)


def _dequantize(
    checkpoint: Checkpoint, name: str, weight: torch.Tensor, scale: torch.Tensor | None, part: Part | None
) -> torch.Tensor:
    """`weight`, a `part` of a tensor, times the scales of the whole of it."""
    if weight.dtype not in FP8_DTYPES:
        return weight
    if scale is None:
        raise _misfit(checkpoint, f"{name} is float8 and has no {name}_scale or {name}_scale_inv beside it")
    rows, columns = shape = weight.shape if part is None else checkpoint.headers[name].shape
    grid = scale.float()
    grid = grid.reshape(1, 1) if grid.numel() == 1 else grid.reshape(len(grid), -1)
    if len(grid) > rows or grid.shape[1] > columns:
        raise _misfit(checkpoint, f"{name} is {rows} x {columns} and its scales {tuple(scale.shape)}")
    for dim, (size, kept) in enumerate(zip(shape, ranges(part, 2), strict=True)):
        if grid.shape[dim] > 1:
            # Blocks are of equal size, but for the last, which the weight may cut short.
            block = torch.arange(size)[kept] // _block(size, grid.shape[dim])
            grid = grid.index_select(dim, block)
    return weight.float() * grid


def _block(size: int, count: int) -> int:
    """Rows or columns of one block, where `count` blocks cover `size`; the usual 128 where that fits."""
    return 128 if -(-size // 128) == count else -(-size // count)


def _misfit(checkpoint: Checkpoint, why: str) -> ModelError:
    return ModelError(
        f"cannot read the FP8 weights of {checkpoint.source!r}: {why}",
        field="model.name_or_path",
        value=checkpoint.source,
    )
