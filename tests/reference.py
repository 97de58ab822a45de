"""SwiftKV's forward pass written out once more in plain torch, one token matrix at a time, without cache or batching.

It shares no code with the project: tests compare the project's model against it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

State = dict[str, torch.Tensor]


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _linear(x: torch.Tensor, state: State, name: str) -> torch.Tensor:
    return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))


def _rope(x: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """x: [T, heads, d]."""
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[0]).float()[:, None] * inv_freq  # [T, d / 2]
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    a, b = x[..., :half], x[..., half:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [T, H, d], k and v [T, K, d] -> [T, H * d]; query head h reads key head h // (H / K)."""
    length, heads, dim = q.shape
    out = torch.empty_like(q)
    for h in range(heads):
        kv = h * k.shape[1] // heads
        scores = q[:, h] @ k[:, kv].T / dim**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        out[:, h] = scores.softmax(-1) @ v[:, kv]
    return out.flatten(1)


def logits(state: State, config: Any, ids: torch.Tensor, inv_freq: torch.Tensor, *, swiftkv: bool) -> torch.Tensor:
    """[T] token ids -> [T, vocab_size] float32 logits."""
    dim, eps = config.head_dim, config.rms_norm_eps
    first, group = config.num_key_value_layers, config.key_value_group_size
    x = state["model.embed_tokens.weight"][ids]
    shared: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        if i == first and swiftkv:
            h = _norm(x, state["model.norm_swiftkv.weight"], eps)
            for leader in range(first, config.num_hidden_layers, group):
                attention = f"model.layers.{leader}.self_attn"
                k = _linear(h, state, f"{attention}.k_proj_swiftkv").unflatten(-1, (-1, dim))
                v = _linear(h, state, f"{attention}.v_proj_swiftkv").unflatten(-1, (-1, dim))
                for member in range(leader, leader + group):
                    shared[member] = (_rope(k, inv_freq), v)
        normed = _norm(x, state[f"{layer}.input_layernorm.weight"], eps)
        if i in shared:
            q = _linear(normed, state, f"{layer}.self_attn.q_proj_swiftkv").unflatten(-1, (-1, dim))
            k, v = shared[i]
        else:
            q = _linear(normed, state, f"{layer}.self_attn.q_proj").unflatten(-1, (-1, dim))
            k = _rope(_linear(normed, state, f"{layer}.self_attn.k_proj").unflatten(-1, (-1, dim)), inv_freq)
            v = _linear(normed, state, f"{layer}.self_attn.v_proj").unflatten(-1, (-1, dim))
        x = x + _linear(_attend(_rope(q, inv_freq), k, v), state, f"{layer}.self_attn.o_proj")
        normed = _norm(x, state[f"{layer}.post_attention_layernorm.weight"], eps)
        gate = F.silu(_linear(normed, state, f"{layer}.mlp.gate_proj"))
        x = x + _linear(gate * _linear(normed, state, f"{layer}.mlp.up_proj"), state, f"{layer}.mlp.down_proj")
    return _norm(x, state["model.norm.weight"], eps) @ state["lm_head.weight"].T


def greedy(
    state: State, config: Any, prompt: list[int], inv_freq: torch.Tensor, count: int, *, swiftkv: bool = True
) -> list[int]:
    """`count` greedy continuations of `prompt`, each from a full forward."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits(state, config, torch.tensor(ids), inv_freq, swiftkv=swiftkv)[-1].argmax()))
    return ids[len(prompt) :]
