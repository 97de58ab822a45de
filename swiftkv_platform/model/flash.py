"""Limits of FlashAttention as PyTorch brings it. Knows devices and types, no layer."""

from __future__ import annotations

import torch

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_CAPABILITY = (8, 0)
"""Least compute capability of a GPU that FlashAttention runs on: Ampere."""
MAX_FLASH_HEAD_DIM, FLASH_HEAD_DIM_MULTIPLE = 256, 8


def flash_refusal(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Reason that FlashAttention cannot compute a model on a GPU; None: it can."""
    capability = torch.cuda.get_device_capability(device)
    if capability < FLASH_CAPABILITY:
        return f"the GPU has compute capability {capability}; {FLASH_CAPABILITY} or more is needed"
    return flash_refusal_of_heads(dtype, head_dim)


def flash_refusal_of_heads(dtype: torch.dtype, head_dim: int) -> str | None:
    """Reason that FlashAttention cannot compute such heads on any GPU; None: it can on those that it runs on."""
    if dtype not in FLASH_DTYPES:
        return f"the model computes in {dtype}; float16 or bfloat16 is needed"
    if head_dim > MAX_FLASH_HEAD_DIM or head_dim % FLASH_HEAD_DIM_MULTIPLE:
        return f"heads have {head_dim} numbers; a multiple of 8 up to {MAX_FLASH_HEAD_DIM} is needed"
    return None
