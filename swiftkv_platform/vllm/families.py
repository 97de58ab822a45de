"""The model families that vLLM serves, as one table of differences. It imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from swiftkv_platform.configs import PREFIXES

FeedForward = Literal["dense", "mixtral", "qwen3_moe"]


def _never(_config: Any) -> bool:
    return False


def _always(_config: Any) -> bool:
    return True


def _attention_bias(config: Any) -> bool:
    return bool(config.attention_bias)


@dataclass(frozen=True)
class VLLMFamily:
    """Differences of one family's decoder layers from the others'."""

    model_type: str
    """The teacher's `model_type`."""
    input_bias: Callable[[Any], bool] = _never
    """Whether a configuration gives the query, key and value projections biases."""
    output_bias: Callable[[Any], bool] = _never
    """Whether it gives the output projection of attention one."""
    head_norms: bool = False
    """RMSNorms on queries and keys, head by head, before RoPE."""
    feed_forward: FeedForward = "dense"

    @property
    def architecture(self) -> str:
        return architecture(self.model_type)


def architecture(model_type: str) -> str:
    """The name in `architectures` of a `config.json`, and of the class that serves it."""
    return f"{PREFIXES[model_type]}SwiftKVForCausalLM"


FAMILIES = {
    family.model_type: family
    for family in (
        VLLMFamily("llama", input_bias=_attention_bias, output_bias=_attention_bias),
        VLLMFamily("mistral"),
        VLLMFamily("qwen2", input_bias=_always),
        VLLMFamily("qwen3", input_bias=_attention_bias, output_bias=_attention_bias, head_norms=True),
        VLLMFamily("mixtral", feed_forward="mixtral"),
        VLLMFamily(
            "qwen3_moe",
            input_bias=_attention_bias,
            output_bias=_attention_bias,
            head_norms=True,
            feed_forward="qwen3_moe",
        ),
    )
}
"""Families that vLLM serves, by the teacher's `model_type`."""

UNSERVED = {
    "deepseek_v2": "vLLM's multi-head latent attention cannot share a KV cache between layers; "
    "this project's own engine serves DeepSeek-V2 students"
}
"""Families without a row above: the reason, and what serves them."""


def layer_windows(config: Any) -> list[int | None]:
    """List each layer's window in tokens, None for full attention."""
    window, count = getattr(config, "sliding_window", None), config.num_hidden_layers
    types = getattr(config, "layer_types", None)
    if types is None:
        return [window] * count
    return [window if kind == "sliding_attention" else None for kind in types]
