"""Quantized weights: reading of several formats as floats or integers, and rounding to integers.

Read formats: an 8-bit weight (float8 or int8) has scales in `{name}_scale` (fbgemm: per row or tensor;
compressed-tensors: per row, tensor or block) or `{name}_scale_inv` (fine-grained FP8: per block); its values are weight
x scale. compressed-tensors packs 4- or 8-bit integers into the int32 tensor `{name}_packed` and stores `{name}_shape`.
transformers runs such weights only on some GPUs with the format's library. Here they are dequantized when read, which
gives the same teacher on any machine.

Written formats: compressed-tensors' int8 with a scale per row, W8A8 (`int-quantized`; inputs are quantized per token at
run time), and int4 with a scale per group of inputs, W4A16 (`pack-quantized`; inputs stay unquantized). vLLM and
llm-compressor read both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.weights.checkpoint import Checkpoint, Part, TensorInfo, expand_ranges
from swiftkv_platform.planning import has_quantized_weights

QUANTIZED_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
_SCALE_SUFFIXES = ("_scale", "_scale_inv")
_ACTIVATION_SUFFIXES = (".input_scale", ".input_scale_ub", ".activation_scale", ".q_scale", ".k_scale", ".v_scale")
"""Suffixes of scales for quantized activations and caches, which are ignored."""
PACKED_SUFFIX, SHAPE_SUFFIX = "_packed", "_shape"
_ZERO_POINT_SUFFIX, _GROUP_INDEX_SUFFIX = "_zero_point", "_g_idx"
"""Suffixes of tensors that some programs store although they change nothing; others are refused."""


def is_quantized(config: Any) -> bool:
    """Whether a configuration has quantized weights. Raises `ModelError` for an unsupported format."""
    return has_quantized_weights({"quantization_config": get_quantization_fields(config)})


def get_quantization_fields(config: Any) -> dict[str, Any] | None:
    """Return the `quantization_config` of a configuration, or None."""
    fields = getattr(config, "quantization_config", None)
    return fields if fields is None or isinstance(fields, dict) else fields.to_dict()


def dequantize_checkpoint(checkpoint: Checkpoint) -> DequantizedCheckpoint:
    """Return a view of the checkpoint with unquantized names and shapes; weights are dequantized when read. Reading
    raises `ModelError` for missing or misshapen scales."""
    own = {name for name in checkpoint.shards if not _is_quantization_parameter(name, checkpoint)}
    shards = {name.removesuffix(PACKED_SUFFIX): shard for name, shard in checkpoint.shards.items() if name in own}
    return DequantizedCheckpoint(checkpoint.source, shards, checkpoint.hub_arguments, stored=checkpoint)


def exclude_swiftkv_modules(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a teacher's `quantization_config` for its student, whose own tensors are not quantized."""
    if fields["quant_method"] == "compressed-tensors":
        ignored = [*(fields.get("ignore") or []), "re:.*_swiftkv$", "exit_head"]
        return {**fields, "ignore": ignored}
    names = fields.get("modules_to_not_convert")
    own = [*(f"{name}_proj_swiftkv" for name in "qkvo"), "k_proj_decode_swiftkv", "v_proj_decode_swiftkv", "exit_head"]
    # A list replaces the default, which excludes the head.
    return {**fields, "modules_to_not_convert": [*(names if names is not None else ["lm_head"]), *own]}


@dataclass(frozen=True, eq=False)
class DequantizedCheckpoint(Checkpoint):
    """A checkpoint whose quantized weights are read as floats."""

    stored: Checkpoint = field(kw_only=True)

    @cached_property
    def headers(self) -> dict[str, TensorInfo]:
        found = {name: self._get_info(name) for name in self.shards}
        for name in self.stored.shards.keys() - self.shards.keys():
            weight = found.get(name.removesuffix(_ZERO_POINT_SUFFIX).removesuffix(_GROUP_INDEX_SUFFIX))
            if weight is not None and name.endswith(_ZERO_POINT_SUFFIX):
                self._check_zero_points(name, weight.shape[0])
            elif weight is not None:
                self._check_group_index(name)
        return found

    def _check_zero_points(self, name: str, num_rows: int) -> None:
        """Raise `ModelError` unless all zero points of a weight are 0, as of symmetric ones."""
        points = self.stored.read(name)
        if points.dtype == torch.int32 and points.dim() == 2 and len(points) < num_rows:  # packed by columns
            points = unpack_int32(points.t().contiguous(), 32 // -(-num_rows // len(points)))[:, :num_rows]
        if points.any():
            raise self._make_error(f"{name} has zero points other than 0; use symmetric weights")

    def _check_group_index(self, name: str) -> None:
        """Raise `ModelError` if columns of a weight are not in the order of their groups. -1 is a column without a
        group index."""
        index = self.stored.read(name).flatten()
        scale = self.stored.headers.get(f"{name.removesuffix(_GROUP_INDEX_SUFFIX)}{_SCALE_SUFFIXES[0]}")
        num_groups = scale.shape[-1] if scale is not None and len(scale.shape) == 2 else 1
        ordered = torch.arange(len(index)) // max(-(-len(index) // num_groups), 1)
        if not (bool((index == -1).all()) or torch.equal(index.long(), ordered)):
            raise self._make_error(f"{name} reorders columns; quantize with actorder null or 'static'")

    def read_tensors(self, names: Iterable[str], part: Part | None = None) -> dict[str, torch.Tensor]:
        return {name: self.read(name, part) for name in names}

    @cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the packed weights."""
        packed = [name for name in self.shards if name not in self.stored.shards]
        if missing := [name for name in packed if f"{name}{SHAPE_SUFFIX}" not in self.stored.shards]:
            raise self._make_error(f"{missing[0]}{PACKED_SUFFIX} has no matching {missing[0]}{SHAPE_SUFFIX}")
        read = self.stored.read_tensors(f"{name}{SHAPE_SUFFIX}" for name in packed)
        shapes = {name: tuple(read[f"{name}{SHAPE_SUFFIX}"].tolist()) for name in packed}
        for name, shape in shapes.items():
            info = self.stored.headers[f"{name}{PACKED_SUFFIX}"]
            fits = len(shape) == 2 and len(info.shape) == 2 and shape[0] == info.shape[0]
            if info.dtype != torch.int32 or not fits or info.shape[1] not in (-(-shape[1] // 8), -(-shape[1] // 4)):
                raise self._make_error(
                    f"{name}{PACKED_SUFFIX} is {list(info.shape)}, which does not hold {list(shape)} integers"
                )
        return shapes

    def read_integers(self, name: str) -> IntegerWeight | None:
        """Read a weight as integers with a scale for each row or group of inputs; None if it is stored differently."""
        stored, scales = self.stored, f"{name}{_SCALE_SUFFIXES[0]}"
        packed = f"{name}{PACKED_SUFFIX}" in stored.shards
        if not packed and (name not in stored.shards or stored.headers[name].dtype != torch.int8):
            return None
        if scales not in stored.shards:
            return None
        integers, bits = self._read_packed_integers(name, None) if packed else (stored.read(name), 8)
        scale = stored.read(scales)
        rows, size = integers.shape
        scale = scale.expand(rows, 1) if scale.numel() == 1 else scale.reshape(len(scale), -1)
        fits = len(scale) == rows and size % scale.shape[1] == 0
        if not fits or (bits == 8 and scale.shape[1] > 1):
            return None
        return IntegerWeight(integers, scale, "int4" if bits == 4 else "int8")

    def _get_info(self, name: str) -> TensorInfo:
        if name in self.stored.shards:
            return self.stored.headers[name]
        info = self.stored.headers[f"{name}{PACKED_SUFFIX}"]
        return replace(info, shape=self._shapes[name], dtype=None)

    def read(self, name: str, part: Part | None = None, /) -> torch.Tensor:
        """Read a tensor; a quantized one times its scales in float32. `part`: read only this part, except for scales,
        which are read whole."""
        if name not in self.stored.shards:
            weight, _ = self._read_packed_integers(name, part)
        else:
            weight = self.stored.read(name, part)
            if weight.dtype not in QUANTIZED_DTYPES:
                return weight
        names = (f"{name}{suffix}" for suffix in _SCALE_SUFFIXES)
        scales = next((each for each in names if each in self.stored.shards), None)
        if scales is None:
            raise self._make_error(f"{name} is quantized but has no {name}_scale or {name}_scale_inv")
        return self._apply_scales(name, weight, self.stored.read(scales), part)

    def _read_packed_integers(self, name: str, part: Part | None) -> tuple[torch.Tensor, int]:
        """Read the integers of a packed weight, int8, and the number of bits of each."""
        size = self._shapes[name][1]
        packed = f"{name}{PACKED_SUFFIX}"
        count = 8 if self.stored.headers[packed].shape[1] == -(-size // 8) else 4  # integers of one int32
        rows, columns = expand_ranges(part, 2)
        first, last, _ = columns.indices(size)
        read = self.stored.read(packed, (rows, slice(first // count, -(-last // count))))
        start = first - first // count * count
        return unpack_int32(read, 32 // count)[:, start : start + last - first], 32 // count

    def _apply_scales(self, name: str, weight: torch.Tensor, scale: torch.Tensor, part: Part | None) -> torch.Tensor:
        """Multiply `weight`, a `part` of a tensor, by the scales of the whole tensor."""
        rows, columns = shape = self.headers[name].shape
        grid = scale.float()
        grid = grid.reshape(1, 1) if grid.numel() == 1 else grid.reshape(len(grid), -1)
        if len(grid) > rows or grid.shape[1] > columns:
            raise self._make_error(f"{name} is {rows} x {columns}, which its scales {tuple(scale.shape)} do not fit")
        for dim, (size, kept) in enumerate(zip(shape, expand_ranges(part, 2), strict=True)):
            if grid.shape[dim] > 1:
                # Blocks have equal size, except that the last one may be shorter.
                block = torch.arange(size)[kept] // _get_block_size(size, grid.shape[dim])
                grid = grid.index_select(dim, block)
        return weight.float() * grid

    def _make_error(self, why: str) -> ModelError:
        return ModelError(
            f"cannot read the quantized weights of {self.source!r}: {why}",
            field="model.name_or_path",
            value=self.source,
        )


def _is_quantization_parameter(name: str, checkpoint: Checkpoint) -> bool:
    """Whether a tensor belongs to another one's quantization, such as its scales."""
    if name.endswith(_ACTIVATION_SUFFIXES):
        return True
    for suffix in (*_SCALE_SUFFIXES, SHAPE_SUFFIX, _ZERO_POINT_SUFFIX, _GROUP_INDEX_SUFFIX):
        base = name.removesuffix(suffix)
        if base != name and (base in checkpoint.shards or f"{base}{PACKED_SUFFIX}" in checkpoint.shards):
            return True
    return False


def _get_block_size(size: int, count: int) -> int:
    """Return the rows or columns of a block if `count` blocks cover `size`; the usual 128 if that fits."""
    return 128 if -(-size // 128) == count else -(-size // count)


WeightFormat = Literal["int8", "int4"]
BITS: dict[WeightFormat, int] = {"int8": 8, "int4": 4}
GROUP_SIZES = (128, 64, 32)
"""Numbers of inputs that share a scale in int4; the first that divides a model's projections is used."""
_SCALE_RATIOS: dict[WeightFormat, tuple[float, float, int]] = {"int8": (0.9, 1.0, 6), "int4": (0.6, 1.08, 17)}
"""Range of the scales that are tried, relative to the one that maps the largest weight to the largest integer, and the
number of scales tried."""
MAX_MULTIPLIER = 15
"""Maximum multiple of a row's step that an int4 scale can be. The multiple times a 4-bit integer fits into int8, so an
int4 product can be computed as an int8 product with a scale per row."""
_PROJECTION_PATTERN = re.compile(r"(.*_proj|.*_with_mqa|w[123])(_decode)?(_swiftkv)?")
"""Names of the quantized linear modules in each layer, e.g. `q_proj`."""
_QKV_PATTERN = r".*self_attn\.(?!o_proj)\w+"
"""Projections that make queries, keys and values. vLLM fuses them, so they all have one form."""
DAMPING = 0.05
"""Damping of calibrated rounding: share of the Gram matrix's mean diagonal that is added to the diagonal."""
_GPTQ_BLOCK_COLUMNS = 128
"""Number of columns that are rounded before the error is propagated to later columns."""


def is_projection(name: str) -> bool:
    """Whether a tensor is the weight of a linear module in the layers that is quantized, which a router's is not."""
    module, _, leaf = name.rpartition(".")
    return leaf == "weight" and ".layers." in module and bool(_PROJECTION_PATTERN.fullmatch(module.rpartition(".")[2]))


def make_int8_pattern(num_layers: int) -> str:
    """Return the pattern of the linear modules that `mixed` stores in int8, the others in int4: those that make
    queries, keys and values, which are small, and the MLPs of the last eighth of a model's layers. Both are most
    sensitive to rounding."""
    last = range(num_layers - max(1, round(num_layers / 8)), num_layers)
    return rf"{_QKV_PATTERN}|.*layers\.({'|'.join(map(str, last))})\.mlp\.\w+_proj$"


def is_mixed_int8(name: str, num_layers: int) -> bool:
    """Whether `mixed` stores a projection of a model with `num_layers` layers in int8."""
    return bool(re.fullmatch(make_int8_pattern(num_layers), name.removesuffix(".weight")))


class IntegerWeight(NamedTuple):
    """A projection's weight in integers."""

    integers: torch.Tensor
    """Integers, int8 [size_out, size_in]; -8..7 in int4."""
    scale: torch.Tensor
    """Scales [size_out, num_groups]; one group in int8."""
    form: WeightFormat

    @property
    def shape(self) -> torch.Size:
        """Shape of the weight, [size_out, size_in]."""
        return self.integers.shape

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale."""
        return self.integers.shape[1] // self.scale.shape[1]

    def slice_part(self, index: Sequence[slice]) -> IntegerWeight | None:
        """Return rows, or rows and columns, of the weight; None if the columns would split a group."""
        rows, columns = (*index, slice(None))[:2]
        first, last, _ = columns.indices(self.integers.shape[1])
        if self.scale.shape[1] == 1:
            groups = slice(None)
        elif first % self.group_size or last % self.group_size:
            return None
        else:
            groups = slice(first // self.group_size, last // self.group_size)
        return IntegerWeight(self.integers[rows, columns].clone(), self.scale[rows, groups].clone(), self.form)

    def chunk(self, count: int) -> list[IntegerWeight]:
        """Split into `count` weights with equally many outputs."""
        parts = zip(self.integers.chunk(count), self.scale.chunk(count), strict=True)
        return [IntegerWeight(integers, scale, self.form) for integers, scale in parts]

    @classmethod
    def cat(cls, weights: Sequence[IntegerWeight]) -> IntegerWeight:
        """Concatenate the outputs of weights of the same form and group size."""
        return cls(
            torch.cat([one.integers for one in weights]), torch.cat([one.scale for one in weights]), weights[0].form
        )

    def find_multipliers(self) -> torch.Tensor | None:
        """Return the scales as multiples 1 to `MAX_MULTIPLIER` of a step per row, uint8 [size_out, num_groups]; None if
        they are not such multiples."""
        scale = self.scale.float()
        found = torch.zeros_like(scale)
        for top in range(MAX_MULTIPLIER, 0, -1):
            base = scale.amax(1, keepdim=True) / top
            multiples = (scale / base).round()
            fits = ((multiples * base == scale) & (multiples >= 1)).all(1, keepdim=True)
            found = torch.where(fits, multiples, found)
        return found.to(torch.uint8) if bool(found.all()) else None


def choose_scale_group_size(sizes: Sequence[int], *, smallest: bool = False) -> int | None:
    """Return the largest group size, or the smallest, that divides all `sizes` (the projections' numbers of inputs)
    that the smallest divides; None if it divides none."""
    usable = [size for size in sizes if size % GROUP_SIZES[-1] == 0]
    groups = GROUP_SIZES[-1:] if smallest else GROUP_SIZES
    return next((group for group in groups if usable and all(size % group == 0 for size in usable)), None)


@torch.no_grad()
def quantize_weight(
    weight: torch.Tensor, form: WeightFormat, group: int | None = None, gram: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight; returns integers [size_out, size_in], int8, and scales [size_out, size_in / group] in the
    dtype of `weight`, or [size_out, 1] without groups. Several scales are tried with rounding to nearest, and the one
    with the least squared error is used; it may clip the largest weights. int4 scales are multiples of a step of their
    row (`MAX_MULTIPLIER`).

    Args:
        gram: sum of x^T x over inputs x, float32 [size_in, size_in]. With it the error is measured on the outputs for
            these inputs, and columns are rounded one after another (GPTQ, Frantar et al. 2022).
    """
    blocks = weight.float().unflatten(1, (-1, group or weight.shape[1]))  # [size_out, num_groups, group]
    largest = blocks.abs().amax(-1, keepdim=True)
    top = 2 ** (BITS[form] - 1) - 1

    def measure_error(scale: torch.Tensor) -> torch.Tensor:
        rounded = round_to_integers(blocks, scale, form).mul_(scale)
        squares: torch.Tensor = (rounded - blocks).square_().mul_(counts).sum(-1, keepdim=True)
        return squares

    best, error = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    counts = torch.ones(1)
    if gram is not None:
        gram = gram + (DAMPING * gram.diagonal().mean()).clamp(min=1e-9) * torch.eye(len(gram))
        counts = gram.diagonal().unflatten(0, (-1, blocks.shape[2]))
    for ratio in torch.linspace(*_SCALE_RATIOS[form]).tolist():
        scale = (largest * (ratio / (top + (form == "int4") * 0.5))).to(weight.dtype).float()
        scale = torch.where(scale > 0, scale, 1.0)
        found = measure_error(scale)
        best, error = torch.where(found < error, scale, best), torch.minimum(found, error)
    if form == "int4":
        best = _round_scales_to_multiples(torch.where(largest > 0, best, 0.0), measure_error)
    if gram is None:
        integers = round_to_integers(blocks, best, form).flatten(1)
    else:
        integers = _round_with_gptq(weight.float(), best.expand_as(blocks).flatten(1), form, gram)
    return integers.to(torch.int8), best.squeeze(-1).to(weight.dtype)


def _round_scales_to_multiples(scale: torch.Tensor, measure: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return scales [size_out, num_groups, 1] near `scale` that are 1 to `MAX_MULTIPLIER` times a step of their row; of
    the steps and multiples tried, those of least error. Steps have four significant bits, so that the products are
    exact in any dtype."""
    best, least = scale, torch.full_like(scale[:, :1], torch.inf)
    largest = scale.amax(1, keepdim=True)
    for top in (15, 13, 11):
        mantissa, exponent = torch.frexp(torch.where(largest > 0, largest, 1.0) / top)
        step = torch.ldexp((mantissa * 16).round() / 16, exponent)
        chosen, error = step, torch.full_like(scale, torch.inf)
        for shift in (-1, 0, 1):
            tried = ((scale / step).round() + shift).clamp(1, MAX_MULTIPLIER) * step
            found = measure(tried)
            chosen, error = torch.where(found < error, tried, chosen), torch.minimum(found, error)
        total = error.sum(1, keepdim=True)
        best, least = torch.where(total < least, chosen, best), torch.minimum(total, least)
    return best


def _round_with_gptq(weight: torch.Tensor, scale: torch.Tensor, form: WeightFormat, gram: torch.Tensor) -> torch.Tensor:
    """Round by GPTQ: columns are rounded one after another, those with the largest inputs first, and later columns are
    adjusted for the error in the output. Scales are fixed in advance, so that groups stay in place."""
    order = gram.diagonal().argsort(descending=True)
    weight, scale, gram = weight[:, order], scale[:, order], gram[order][:, order]
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(gram)), upper=True)
    integers = torch.empty_like(weight)
    for begin in range(0, weight.shape[1], _GPTQ_BLOCK_COLUMNS):
        block = slice(begin, begin + _GPTQ_BLOCK_COLUMNS)
        part, of_block, errors = weight[:, block], inverse[block, block], torch.empty_like(weight[:, block])
        for j in range(part.shape[1]):
            rounded, step = integers[:, begin + j], scale[:, begin + j]
            rounded.copy_(round_to_integers(part[:, j], step, form))
            errors[:, j] = (part[:, j] - rounded * step) / of_block[j, j]
            part[:, j:].addr_(errors[:, j], of_block[j, j:], alpha=-1)
        weight[:, begin + _GPTQ_BLOCK_COLUMNS :].addmm_(errors, inverse[block, begin + _GPTQ_BLOCK_COLUMNS :], alpha=-1)
    return integers[:, order.argsort()]


def dequantize_weight(integers: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Undo `quantize_weight`; returns float32 [size_out, size_in]."""
    blocks: torch.Tensor = integers.unflatten(1, (scale.shape[1], -1)) * scale.float().unsqueeze(-1)
    return blocks.flatten(1)


def round_to_integers(blocks: torch.Tensor, scale: torch.Tensor, form: WeightFormat) -> torch.Tensor:
    """Return the integers of the format that are nearest to `blocks / scale`, as floats."""
    top = 2 ** (BITS[form] - 1) - 1
    return (blocks / scale).round_().clamp_(-top - (form == "int4"), top)


def pack_int4(integers: torch.Tensor) -> torch.Tensor:
    """Pack int8 [size_out, size_in] in -8..7 -> int32 [size_out, size_in / 8]: add 8, the first in the lowest bits."""
    shifts = torch.arange(0, 32, 4)
    packed: torch.Tensor = ((integers.long() + 8).unflatten(1, (-1, 8)) << shifts).sum(-1).to(torch.int32)
    return packed


def unpack_int32(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Undo `pack_int4` or its 8-bit form: int32 [size_out, count] -> int8 [size_out, count * 32 / bits]."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    mask, offset = (1 << bits) - 1, 1 << (bits - 1)
    return (((packed.unsqueeze(-1) >> shifts) & mask) - offset).to(torch.int8).flatten(1)


def make_stored_tensors(
    name: str, integers: torch.Tensor, scale: torch.Tensor, form: WeightFormat
) -> dict[str, torch.Tensor]:
    """Return the tensors by name in which a checkpoint stores a quantized weight."""
    if form == "int8":
        return {name: integers, f"{name}_scale": scale}
    return {
        f"{name}_packed": pack_int4(integers),
        f"{name}_scale": scale,
        f"{name}_shape": torch.tensor(integers.shape, dtype=torch.int64),
    }


def make_compressed_tensors_config(
    targets: Mapping[WeightFormat, str], group: int | None, ignored: Sequence[str], *, calibrated: bool
) -> dict[str, Any]:
    """Return the `quantization_config` of a model in compressed-tensors' form.

    Args:
        targets: target of each format: a pattern of linear modules' names (`re:...`), or all others (`Linear`).
        group: number of inputs that share a scale in int4.
        ignored: linear modules that are not quantized.
        calibrated: whether columns were rounded in the order of their inputs.
    """
    schemes = {form: _make_scheme(form, group, target, calibrated=calibrated) for form, target in targets.items()}
    layouts = {scheme["format"] for scheme in schemes.values()}
    return {
        "config_groups": {f"group_{i}": scheme for i, scheme in enumerate(schemes.values())},
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "global_compression_ratio": None,
        "ignore": list(ignored),
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _make_scheme(form: WeightFormat, group: int | None, target: str, *, calibrated: bool) -> dict[str, Any]:
    group = None if form == "int8" else group
    common: dict[str, Any] = {
        "actorder": None,
        "block_structure": None,
        "num_bits": BITS[form],
        "symmetric": True,
        "type": "int",
    }
    weights: dict[str, Any] = {
        **common,
        "actorder": "static" if calibrated and group else None,
        "dynamic": False,
        "group_size": group,
        "observer": "mse",
        "observer_kwargs": {},
    }
    weights["strategy"] = "channel" if group is None else "group"
    inputs: dict[str, Any] = {**common, "dynamic": True, "group_size": None, "observer": None, "observer_kwargs": {}}
    return {
        "format": "int-quantized" if form == "int8" else "pack-quantized",
        "input_activations": {**inputs, "strategy": "token"} if form == "int8" else None,
        "output_activations": None,
        "targets": [target],
        "weights": weights,
    }
