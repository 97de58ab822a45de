"""Measured cost of prefill with and without SwiftKV, on forward passes of the same weights. `planning` has
estimates."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.evaluation.quality import run_in_evaluation_mode
from swiftkv_platform.model.cache import count_cache_bytes
from swiftkv_platform.planning import read_architecture
from swiftkv_platform.planning.prefill import count_prefill_flops


@dataclass(frozen=True)
class ModeCost:
    """Cost of one mode for a prompt, with logits of its last token only."""

    flops_per_token: float
    """FLOPs of all matrix products, with attention over the whole square. Bypassed layers count as in serving."""
    kv_bytes_per_token: float
    """Bytes in the cache, in the model's dtype."""
    ttft_ms: float
    """Median time to first token in milliseconds; here prompts run bypassed layers too."""


@dataclass(frozen=True)
class PrefillCost:
    """Prefill cost of teacher and student mode, on one prompt."""

    prompt_length: int
    dense: ModeCost
    swiftkv: ModeCost

    @property
    def flops_ratio(self) -> float:
        return self.swiftkv.flops_per_token / self.dense.flops_per_token

    @property
    def kv_bytes_ratio(self) -> float:
        return self.swiftkv.kv_bytes_per_token / self.dense.kv_bytes_per_token


@torch.no_grad()
def measure_prefill(model: Any, *, prompt_length: int, rounds: int) -> PrefillCost:
    """Count and time the prefill of a random prompt in teacher and in student mode.

    Args:
        model: a SwiftKV causal language model with its teacher's projections; its mode does not change.
        prompt_length: tokens, at most the model's context.
        rounds: timed passes of each mode, which alternate to see the same noise, after one warm-up pass of each.

    Raises:
        InvalidInputError: the prompt is longer than the context, or empty.
        ModelError: the model was exported without its teacher.
    """
    context = model.config.max_position_embeddings
    if not 1 <= prompt_length <= context:
        raise InvalidInputError.for_field("prompt_length", prompt_length, f"; use 1..{context} tokens for this model")
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (1, prompt_length), generator=generator).to(model.device)
    counted: dict[bool, tuple[float, float]] = {}
    milliseconds: dict[bool, list[float]] = {False: [], True: []}
    with run_in_evaluation_mode(model):
        for mode in (False, True):
            counted[mode] = _count_costs(model.swiftkv(mode), prompt)
        for round_ in range(rounds + 1):
            for mode in (False, True):
                elapsed = _time_first_token(model.swiftkv(mode), prompt)
                if round_:
                    milliseconds[mode].append(elapsed)
    dense, swiftkv = (ModeCost(*counted[mode], statistics.median(milliseconds[mode])) for mode in (False, True))
    return PrefillCost(prompt_length, dense, swiftkv)


def _count_costs(model: Any, prompt: torch.Tensor) -> tuple[float, float]:
    """Return FLOPs and cache bytes per token of a prompt [1, prompt_length]. Uses plain attention, since the counter
    does not see fused kernels on all devices."""
    counter = FlopCounterMode(display=False)
    with _use_plain_attention(model), counter:
        outputs = model(prompt, use_cache=True, logits_to_keep=1)
    num_tokens = prompt.numel()
    total = counter.get_total_flops() - (
        _count_skipped_flops(model.config, prompt) if model.model.swiftkv_enabled else 0
    )
    return total / num_tokens, count_cache_bytes(outputs.past_key_values) / num_tokens


def _count_skipped_flops(config: Any, prompt: torch.Tensor) -> float:
    """Return the FLOPs of a pass that serving skips: those of prompts in bypassed layers."""
    if not config.layer_map.bypassed_layers:
        return 0
    model, layer_map = read_architecture(config.to_dict()), config.layer_map
    whole, served = (
        count_prefill_flops(model, each, prompt.shape[1], "executed", square=True).total
        for each in (layer_map.without_bypassed_layers(), layer_map)
    )
    return whole - served


def _time_first_token(model: Any, prompt: torch.Tensor) -> float:
    begin = time.perf_counter()
    logits = model(prompt, use_cache=True, logits_to_keep=1).logits
    logits.argmax(-1).tolist()  # reading the tokens synchronizes with the device
    return (time.perf_counter() - begin) * 1000


@contextmanager
def _use_plain_attention(model: Any) -> Iterator[None]:
    implementation = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        model.set_attn_implementation(implementation)
