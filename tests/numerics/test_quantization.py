"""Keys and values in 8 bits: round-trip error, bytes per row, and rows with extreme values."""

import math

import pytest
import torch

from swiftkv_platform.model.cache import PAYLOAD_DTYPES, dequantize, dequantize_from_bytes, quantize, quantize_to_bytes
from tests.support.parameters import in_turn

MODEL_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALF_A_STEP = {torch.float8_e4m3fn: 16 / 448, torch.int8: 0.5 / 127}
"""Largest rounding error, relative to a row's largest element."""


@pytest.fixture(params=PAYLOAD_DTYPES.values(), ids=PAYLOAD_DTYPES)
def payload(request: pytest.FixtureRequest) -> torch.dtype:
    dtype: torch.dtype = request.param
    return dtype


@pytest.mark.parametrize(("dtype", "shape"), in_turn(MODEL_DTYPES, [(2, 3, 5, 48), (7, 1, 96), (1, 1, 4, 17)]))
def test_rows_come_back_within_half_a_step(payload: torch.dtype, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    magnitude = torch.exp2(torch.randint(-12, 12, (*shape[:-1], 1), generator=generator))  # a magnitude for each row
    x = (torch.randn(shape, generator=generator) * magnitude).to(dtype)
    values, scale = quantize(x, payload)
    assert (values.dtype, values.shape) == (payload, shape)
    assert (scale.dtype, scale.shape) == (torch.bfloat16, shape[:-1])
    back = dequantize(values, scale, dtype)
    assert back.dtype == dtype
    rounding = torch.finfo(dtype).eps  # rounding of the product
    error = (back.double() - x.double()).abs().amax(-1) / x.double().abs().amax(-1)
    assert error.max() <= HALF_A_STEP[payload] * (1 + 2**-7) + rounding
    packed = quantize_to_bytes(x, payload)
    assert (packed.dtype, packed.shape) == (torch.uint8, (*shape[:-1], shape[-1] + 2)), "two bytes for the scale"
    assert torch.equal(dequantize_from_bytes(packed, payload, dtype), back)


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_the_scale_is_rounded_up_so_that_nothing_saturates(payload: torch.dtype, dtype: torch.dtype) -> None:
    largest = torch.linspace(1, 2, 257)[:, None].to(dtype)
    values, scale = quantize(largest, payload)
    top = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}[payload]
    assert (scale.double() * top >= largest[:, 0].double()).all()
    assert values.float().abs().max() <= top


def test_every_fp8_number_is_read_as_torch_reads_it() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    bits = bits[(bits & 0x7F) != 0x7F]  # leave out the two NaNs, which are never stored
    numbers = bits.view(torch.float8_e4m3fn)
    scale = torch.tensor([2.0**-126, 2.0**-20, 1.0, 2.0**100]).bfloat16()
    for dtype in (torch.float32, torch.bfloat16):
        back = dequantize(numbers.expand(4, -1), scale, dtype)
        assert torch.equal(back, numbers.to(dtype) * scale.to(dtype)[:, None])


@pytest.mark.parametrize("dtype", MODEL_DTYPES)
def test_odd_rows(payload: torch.dtype, dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    x = torch.zeros(5, 8, dtype=dtype)
    x[1] = limits.smallest_normal / 4  # subnormal
    x[2] = limits.max
    x[3, 0], x[3, 1] = -limits.max, limits.max
    x[4, 0] = limits.max / 2
    back = dequantize_from_bytes(quantize_to_bytes(x, payload), payload, dtype)
    assert torch.equal(back[0], x[0])
    assert (back[1] - x[1]).abs().max() <= limits.smallest_normal / 4
    assert back.isfinite().all()
    assert (back[2:].double() / x[2:].double()).nan_to_num(1.0).min() >= 1 - 1 / 8


def test_what_is_not_finite_stays_visible_and_in_its_row(payload: torch.dtype) -> None:
    for odd in (math.nan, math.inf, -math.inf):
        x = torch.ones(3, 8)
        x[1, 4] = odd
        back = dequantize_from_bytes(quantize_to_bytes(x, payload), payload, torch.float32)
        assert back.isnan().all(-1).tolist() == [False, True, False]
        torch.testing.assert_close(back[[0, 2]], x[[0, 2]], atol=0.01, rtol=0)
