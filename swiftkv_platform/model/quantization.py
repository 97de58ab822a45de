"""Keys and values in 8 bits: `float8_e4m3fn` or int8, one scale per token and head.

A row is the part of a head and a token: d elements of K or of V, or a latent. Its scale is bfloat16, which has the
range of float32, so that it cannot overflow and needs no calibration. The scale is rounded up and the row quantised
with the rounded scale, so that the largest element never saturates. FP8 scales are not limited to powers of two either:
the largest element then lands at the top of the payload's range, where relative steps are smallest. A row takes d + 2
bytes, 2d / (d + 2) times less than in bfloat16: 1.94 at d = 64, 1.97 at d = 128.
"""

from __future__ import annotations

from typing import Any

import torch

from swiftkv_platform.errors import InvalidInputError

SCALE_DTYPE = torch.bfloat16
PAYLOAD_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""Stored data types by `kv_cache_dtype`; `auto` stores the model's own dtype."""
_TOP = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
_SMALLEST_SCALE = torch.finfo(torch.bfloat16).tiny
_FP8_SHIFT = 2.0**120
"""Factor from a bfloat16 with an e4m3 number's bits to that number: the exponents are biased by 127 and 7."""


def payload_dtype(kv_cache_dtype: Any) -> torch.dtype | None:
    """Return the dtype that a cache stores for `kv_cache_dtype`; None for `auto`, the model's own dtype. Raises
    `InvalidInputError`: the value is unknown; the message lists the accepted ones."""
    if kv_cache_dtype in (None, "auto"):
        return None
    if kv_cache_dtype not in PAYLOAD_DTYPES:
        raise InvalidInputError.of(
            "kv_cache_dtype", kv_cache_dtype, f"; it must be auto, {' or '.join(PAYLOAD_DTYPES)}"
        )
    return PAYLOAD_DTYPES[kv_cache_dtype]


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise the rows of `x` [..., d]; returns the payload of `dtype` [..., d] and bfloat16 scales [...].

    A row with a NaN or an infinity gets the scale NaN, so that all of it is NaN when read and an overflow upstream
    stays visible. Elements within 1/16 of the maximum of `x`'s dtype are clamped, since rounding up would overflow.
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
        # On CPU, converting float8 elements is some 15 times slower than shifting their bits to where bfloat16 has
        # them. The payload has no NaN (0x7f): rows that are not finite have a NaN scale.
        bits = payload.view(torch.int8).to(torch.int16).bitwise_left_shift_(4).bitwise_and_(-0x8000 | 0x07F0)
        elements = bits.view(torch.bfloat16).to(through).mul_(_FP8_SHIFT)
    else:
        elements = payload.to(through)
    return elements.mul_(scale).to(dtype)


def pack(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Quantise into one tensor of bytes: [..., d] -> uint8 [..., d + 2], each row's payload followed by its scale."""
    payload, scale = quantize(x, dtype)
    return torch.cat((payload.view(torch.uint8), scale.unsqueeze(-1).view(torch.uint8)), dim=-1)


def unpack(packed: torch.Tensor, dtype: torch.dtype, to: torch.dtype) -> torch.Tensor:
    """Dequantise the result of `pack(x, dtype)`: uint8 [..., d + 2] -> `to` [..., d]."""
    size = packed.shape[-1] - SCALE_DTYPE.itemsize
    scale = packed[..., size:].contiguous().view(SCALE_DTYPE).squeeze(-1)
    return dequantize(packed[..., :size].view(dtype), scale, to)


def _round_up(scale: torch.Tensor) -> torch.Tensor:
    """Round positive float32 numbers up to the next bfloat16, as float32: the low 16 bits become 0."""
    return ((scale.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
