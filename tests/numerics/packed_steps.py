"""Packed rows of random tokens, an operator in place of the GPU's, and the comparison of two training steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from swiftkv_platform.data.packing import PackedRows, Samples, pack
from swiftkv_platform.engine.varlen import reference_varlen_attn


def pack_random_samples(
    rng: np.random.Generator,
    lengths: Sequence[int],
    counts: np.ndarray,
    *,
    max_length: int,
    vocab_size: int = 256,
    packing: bool = True,
) -> PackedRows:
    """Return samples of these lengths, laid end to end in `counts`, which says of each token whether it counts. The
    last one of a sample has no next token, so that it never does."""
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    counts[starts[1:] - 1] = False
    tokens = rng.integers(vocab_size, size=starts[-1]).astype(np.int32)
    samples = Samples(tokens, counts, starts)
    return pack(samples, np.arange(len(lengths)), max_length=max_length, pad_token_id=0, packing=packing)


def varlen_on_cpu(*arguments: Any, **options: Any) -> torch.Tensor:
    """Stand in for `varlen_attn` on a CPU, with plain operators."""
    borders = arguments[4]
    assert borders.dtype == torch.int32
    output: torch.Tensor = reference_varlen_attn(*arguments, **options, seqused_k=borders.diff(), block_table=None)
    return output


def assert_same_step(actual: Any, expected: Any, *, tolerance: float = 1e-5, floor: float = 0.0) -> None:
    """Compare losses and gradients of two steps. Differences of a gradient are relative to its size, or to `floor`."""
    (losses, gradients), (expected_losses, expected_gradients) = actual, expected
    assert losses == pytest.approx(expected_losses, rel=tolerance, abs=tolerance)
    assert gradients.keys() == expected_gradients.keys()
    for parameter, gradient in gradients.items():
        scale = max(float(expected_gradients[parameter].abs().max()), floor)
        assert (gradient - expected_gradients[parameter]).abs().max() <= 10 * tolerance * scale, parameter
