"""Choice of the operator with which packed samples attend. Knows devices and a model's heads."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch.nn.attention.varlen import varlen_attn

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.model.flash import flash_refusal
from swiftkv_platform.model.packed_attention import VarlenOperator

AttentionImplementation = Literal["auto", "varlen_attn", "sdpa"]


def choose_operator(
    implementation: AttentionImplementation, config: Any, device: torch.device, dtype: torch.dtype
) -> VarlenOperator | None:
    """`varlen_attn`, or None: SDPA, one sample after the other.

    Raises:
        InvalidInputError: `varlen_attn` is asked for, and the device cannot run it.
    """
    return _choose(implementation, attention_head_dim(config), device, dtype)


@cache  # asked in every pass, and said once
def _choose(
    implementation: AttentionImplementation, head_dim: int, device: torch.device, dtype: torch.dtype
) -> VarlenOperator | None:
    if implementation == "sdpa" or (implementation == "auto" and device.type != "cuda"):
        return None
    reason = flash_refusal(device, dtype, head_dim) if device.type == "cuda" else "it needs a GPU"
    if reason is None:
        return varlen_attn
    if implementation == "varlen_attn":
        raise InvalidInputError(
            f"training.attn_implementation is varlen_attn, and {reason}; auto or sdpa would do",
            field="training.attn_implementation",
            value=implementation,
        )
    get_logger().warning("flash_attention_unavailable", reason=reason, instead="SDPA, one sample after the other")
    return None


def attention_head_dim(config: Any) -> int:
    """Numbers of a query's head."""
    if hasattr(config, "kv_lora_rank"):
        return int(config.qk_nope_head_dim + config.qk_rope_head_dim)
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)
