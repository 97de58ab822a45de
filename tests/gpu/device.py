"""The device of the tests in this directory, and how they are left out where there is none."""

import os

import pytest
import torch

DEVICE = "cpu" if os.environ.get("SWIFTKV_GPU_TESTS") == "cpu" else "cuda"
"""`SWIFTKV_GPU_TESTS=cpu` runs the tests themselves on a machine without a GPU, where plain operators take the place of
FlashAttention."""
ON_GPU = DEVICE == "cuda"
needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(ON_GPU and not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
]
