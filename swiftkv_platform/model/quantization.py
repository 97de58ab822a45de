"""Keys and values in 8 bits: `float8_e4m3fn` or int8, one scale per token and head. It knows tensors, no cache.

A row is what one head stores of one token: d elements of K or of V, or a latent. Its scale is bfloat16, which has the
range of float32, so that no calibration keeps it from overflowing; it is rounded up, and the row is quantised with the
rounded scale, so that the largest element never saturates. FP8 has no use for powers of two as scales either: the
largest element then lands at the top of the payload's range, where the steps are smallest beside it. A row takes d + 2
bytes, 2d / (d + 2) times less than in bfloat16: 1.94 at d = 64, 1.97 at d = 128.
"""

from __future__ import annotations

from typing import Any

import torch

from swiftkv_platform.errors import InvalidInputError

SCALE_DTYPE = torch.bfloat16
PAYLOAD_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Stored data types by `kv_cache_dtype`; `auto` stores what the model computes."""
_TOP = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny
_FP8_SHIFT = 2.0**120
"""Factor from a bfloat16 with an e4m3 number's bits to that number: the exponents are biased by 127 and 7."""


def payload_dtype(kv_cache_dtype: Any) -> torch.dtype | None:
    """Return the data type that a cache stores for `kv_cache_dtype`; None for `auto`, the model's own type. Raises
    `InvalidInputError`: naming the values there are."""
    if kv_cache_dtype in (None, "auto"):
        return None
    if kv_cache_dtype not in PAYLOAD_DTYPES:
        raise InvalidInputError.of(
            "kv_cache_dtype", kv_cache_dtype, f"; it must be auto, {' or '.join(PAYLOAD_DTYPES)}"
        )
    return PAYLOAD_DTYPES[kv_cache_dtype]


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Payload of `dtype` [..., d] and bfloat16 scales [...] of the rows of `x` [..., d].

    A row with a NaN or an infinity gets the scale NaN and comes back as NaN throughout, so that an overflow upstream
    stays visible. Elements within 1/16 of the largest number of `x`'s type saturate there: rounding up would overflow.
    """
    wide = x.float()
    limit = torch.finfo(x.dtype).max * (1 - 1 / 16)
    largest = wide.abs().amax(-1, keepdim=True)
    scale = _round_up((largest.clamp(max=limit) / _TOP[dtype]).clamp(min=_SMALLEST_SCALE))
    scaled = wide.clamp(-limit, limit) / scale
    payload = scaled.to(dtype) if dtype.is_floating_point else scaled.nan_to_num().round().to(dtype)
    scale = torch.where(largest.isfinite(), scale, torch.nan)
    return payload, scale.squeeze(-1).to(SCALE_DTYPE)


def dequantize(payload: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Undo `quantize`, with a result in `dtype`: payload [..., d], scales [...] -> [..., d]."""
    # float16 lacks the scales' range, so that product is taken in float32.
    through = torch.float32 if dtype == torch.float16 else dtype
    scale = scale.unsqueeze(-1).to(through)
    if payload.dtype == torch.float8_e4m3fn and payload.device.type == "cpu":
        # Converting float8 element by element is some 15 times slower on CPU than moving its bits to where a bfloat16
        # has them. The payload holds no NaN (0x7f): a row that is not finite has it in its scale.
        bits = payload.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(-0x8000 | 0x07F0)
        elements = bits.view(torch.bfloat16).to(through).mul_(_FP8_SHIFT)
    else:
        elements = payload.to(through)
    return elements.mul_(scale).to(dtype)


def pack(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`quantize` into one tensor of bytes: [..., d] -> uint8 [..., d + 2], each row's payload before its scale."""
    payload, scale = quantize(x, dtype)
    return torch.cat((payload.view(torch.uint8), scale.unsqueeze(-1).view(torch.uint8)), dim=-1)


def unpack(packed: torch.Tensor, dtype: torch.dtype, to: torch.dtype) -> torch.Tensor:
    """The rows that `pack(x, dtype)` made, dequantised: uint8 [..., d + 2] -> `to` [..., d]."""
    size = packed.shape[-1] - SCALE_DTYPE.itemsize
    scale = packed[..., size:].contiguous().view(SCALE_DTYPE).squeeze(-1)
    return dequantize(packed[..., :size].view(dtype), scale, to)


def _round_up(scale: torch.Tensor) -> torch.Tensor:
    """The next bfloat16 of positive float32 numbers, as float32: the low 16 bits of the mantissa become 0."""
    return ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
