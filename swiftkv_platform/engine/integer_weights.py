"""Integer weights of projections: from a quantized checkpoint, or rounded when a model is loaded.

A module has them as its attribute `integers`, and floats of the same values as `weight`. `weights.py` packs integers
for the kernels. Without a kernel for them, the floats are used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from swiftkv_platform.engine.kernels import packing
from swiftkv_platform.engine.ranks import TensorParallelGroup
from swiftkv_platform.engine.sharding import get_shard_spec, get_unsharded_name
from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.model.weights.quantization import (
    IntegerWeight,
    WeightFormat,
    dequantize_checkpoint,
    dequantize_weight,
    is_mixed_int8,
    is_projection,
    quantize_weight,
)


def attach_stored_integers(model: Any, checkpoint: Checkpoint, ranks: TensorParallelGroup | None = None) -> None:
    """Set `integers` of a model's projections from the checkpoint it was loaded from. `ranks`: only this rank's
    part."""
    weights = dequantize_checkpoint(checkpoint)
    for name, linear in _iterate_projections(model):
        weight = f"{get_unsharded_name(name)}.weight"
        stored = weights.read_integers(weight)
        if stored is not None:
            linear.integers = stored if ranks is None else _slice_integers(stored, weight, linear, ranks, model.config)


def quantize_weights(model: Any, form: WeightFormat) -> None:
    """Round the projections of a model's layers to integers, and its heads to int8, in place. Integers stay as they
    are.

    With `int4`, projections that the export format `mixed` stores in int8, or whose inputs cannot be grouped, are
    rounded to int8. A tied head keeps its floats, which the embedding uses. Raises `ModelError`: `int4` for a model
    whose projections are stored in int8."""
    num_layers = model.config.num_hidden_layers
    for name, linear in _iterate_projections(model):
        is_int4 = form == "int4" and not is_mixed_int8(name.removesuffix(".part"), num_layers)
        if getattr(linear, "is_rounded", False):  # a weight of the base, which an adapter shares
            continue
        if (stored := get_integer_weight(linear)) is not None:
            if is_int4 and stored.form == "int8":
                raise ModelError.for_field(
                    "weights",
                    form,
                    ", and the model is stored in int8; use auto, or export the unquantized model with --quantize int4",
                )
            continue
        _round_linear(linear, "int4" if is_int4 and linear.in_features % packing.INT4_GROUP_SIZE == 0 else "int8")
    embedding = model.get_input_embeddings().weight
    for name in ("lm_head", "exit_head"):
        if isinstance(head := getattr(model, name, None), nn.Linear):
            _round_linear(head, "int8", keeps_floats=head.weight is embedding)


def get_integer_weight(linear: nn.Module) -> IntegerWeight | None:
    return getattr(linear, "integers", None)


def get_common_weights(linears: Sequence[Any]) -> list[IntegerWeight] | list[torch.Tensor]:
    """Return the weights of modules that are fused: integers if all have them in one supported format, else floats."""
    found = [get_integer_weight(linear) for linear in linears]
    integers = [one for one in found if one is not None and packing.can_pack(one)]
    if len(integers) == len(linears) and len({(one.form, one.group_size) for one in integers}) == 1:
        return integers
    return [linear.weight.detach() for linear in linears]


def drop_integer_weights(model: nn.Module) -> None:
    for module in model.modules():
        module.__dict__.pop("integers", None)


def _iterate_projections(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the name and module of each linear projection that can be quantized."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and is_projection(f"{name.removesuffix('.part')}.weight"):
            yield name, module


def _round_linear(linear: Any, form: WeightFormat, *, keeps_floats: bool = False) -> None:
    group = packing.INT4_GROUP_SIZE if form == "int4" else None
    linear.is_rounded = True
    linear.integers = rounded = IntegerWeight(*quantize_weight(linear.weight.detach(), form, group), form)
    if not keeps_floats:
        linear.weight.data = dequantize_weight(rounded.integers, rounded.scale).to(linear.weight.dtype)


def _slice_integers(
    whole: IntegerWeight, name: str, linear: nn.Linear, ranks: TensorParallelGroup, config: Any
) -> IntegerWeight | None:
    """Return a rank's part of a weight; None: the part would divide a group of inputs with one scale."""
    if (spec := get_shard_spec(name, config)) is None:
        return whole
    first, *others = (whole.slice_part(index) for index in spec.get_indices(linear.weight.shape[spec.dim], ranks))
    return first if first is None or not others else IntegerWeight.cat([first, *(one for one in others if one)])
