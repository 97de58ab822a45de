"""The device for the tests in this directory, and the marker that skips them without one."""

import os

import pytest
import torch

DEVICE = "cpu" if os.environ.get("SWIFTKV_GPU_TESTS") == "cpu" else "cuda"
"""With `SWIFTKV_GPU_TESTS=cpu` the tests run on a machine without a GPU, where plain operators replace
FlashAttention."""
ON_GPU = DEVICE == "cuda"
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
]
