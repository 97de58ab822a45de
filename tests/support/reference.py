"""SwiftKV's forward pass implemented a second time in plain torch, without cache or batching.

It shares no code with the project: tests compare the project's model to it. It covers every family: attention by head
(biases, head norms, sliding windows) and latent attention, dense and mixture-of-experts MLPs.
"""

import math
from typing import Any

import torch
from torch.nn import functional as F

State = dict[str, torch.Tensor]
Heads = torch.Tensor
"""[T, heads, d]."""
Frequencies = torch.Tensor | dict[str, torch.Tensor]
"""RoPE's inverse frequencies, [d / 2]; a dict by layer type if these differ."""


def frequencies(rotary_emb: Any) -> Frequencies:
    """Return the frequencies of transformers' rotary module."""
    types = getattr(rotary_emb, "layer_types", None)
    if types is None:
        return rotary_emb.inv_freq
    return {kind: getattr(rotary_emb, f"{kind}_inv_freq") for kind in types}


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _linear(x: torch.Tensor, state: State, name: str) -> torch.Tensor:
    if f"{name}.weight" not in state:
        return F.linear(x, _fused(state, name))
    return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))


def _fused(state: State, name: str) -> torch.Tensor:
    """Return the part of Phi-3's fused weight that belongs to one projection."""
    layer, _, name = name.rpartition(".")
    if name in ("gate_proj", "up_proj"):
        return state[f"{layer}.gate_up_proj.weight"].chunk(2)[name == "up_proj"]
    whole, outputs = state[f"{layer}.qkv_proj.weight"], state[f"{layer}.o_proj.weight"].shape[1]
    keys = (len(whole) - outputs) // 2
    return whole.split([outputs, keys, keys])["qkv".index(name[0])]


def _rope(x: Heads, inv_freq: torch.Tensor, *, interleaved: bool, size: float = 1.0) -> Heads:
    """Rotate dimension j with j + d / 2 or, if interleaved, 2j with 2j + 1."""
    if 2 * len(inv_freq) < x.shape[-1]:  # Phi-4 rotates only the first dimensions
        first = x[..., : 2 * len(inv_freq)]
        return torch.cat((_rope(first, inv_freq, interleaved=interleaved, size=size), x[..., 2 * len(inv_freq) :]), -1)
    angle = torch.arange(x.shape[0]).float()[:, None] * inv_freq  # [T, d / 2]
    cos, sin = size * angle.cos()[:, None], size * angle.sin()[:, None]
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.stack(turned, dim=-1).flatten(-2) if interleaved else torch.cat(turned, dim=-1)


KeyValue = tuple[Heads, Heads]


def _attend(
    q: Heads, key_value: KeyValue, own: KeyValue | None, turns: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Return [T, H * d]; query head h reads key head h // (H / K). A turn's tokens read `own` K and V of that turn."""
    length, heads = q.shape[:2]
    (k, v), (own_k, own_v) = key_value, own or key_value
    age = torch.arange(length)[:, None] - torch.arange(length)
    hidden = (age < 0) | (age >= (window or length))
    of_turn = (turns[:, None] == turns) & (turns >= 0)
    outputs = []
    for h in range(heads):
        kv = h * k.shape[1] // heads
        scores = torch.where(of_turn, q[:, h] @ own_k[:, kv].T, q[:, h] @ k[:, kv].T) * scale
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        outputs.append((weights * of_turn) @ own_v[:, kv] + (weights * ~of_turn) @ v[:, kv])
    return torch.cat(outputs, dim=-1)


class _ByHead:
    def __init__(self, state: State, config: Any, inv_freq: Frequencies) -> None:
        self.state, self.config, self.inv_freq = state, config, inv_freq
        self.dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.scale = getattr(config, "attention_multiplier", getattr(config, "query_pre_attn_scalar", self.dim) ** -0.5)

    def _turned(self, heads: Heads, name: str, suffix: str) -> Heads:
        """Rotate heads; a student's layer rotates like the first layer of its group."""
        layer, config = int(name.split(".")[2]), self.config
        if suffix:
            layer -= (layer - config.num_key_value_layers) % config.key_value_group_size
        if not getattr(config, "no_rope_layers", [1] * config.num_hidden_layers)[layer]:
            return heads
        kind = config.layer_types[layer] if isinstance(self.inv_freq, dict) else None
        inv_freq = self.inv_freq if kind is None else self.inv_freq[kind]
        rope = config.rope_parameters if kind is None else config.rope_parameters[kind]
        return _rope(heads, inv_freq, interleaved=False, size=rope.get("attention_factor") or 1.0)

    def _heads(self, x: torch.Tensor, name: str, norm: str) -> Heads:
        projected, weight = _linear(x, self.state, name), self.state.get(norm)
        if weight is not None and len(weight) != self.dim:  # a norm over several heads at once
            projected, weight = _norm(projected, weight, self.config.rms_norm_eps), None
        heads = projected.unflatten(-1, (-1, self.dim))
        return heads if weight is None else _norm(heads, weight, self.config.rms_norm_eps)

    def query(self, x: torch.Tensor, name: str, suffix: str) -> Heads:
        return self._turned(self._heads(x, f"{name}.q_proj{suffix}", f"{name}.q_norm.weight"), name, suffix)

    def key_value(self, x: torch.Tensor, name: str, suffix: str) -> tuple[Heads, Heads]:
        keys = self._turned(self._heads(x, f"{name}.k_proj{suffix}", f"{name}.k_norm.weight"), name, suffix)
        return keys, self._heads(x, f"{name}.v_proj{suffix}", "")


class _Latent:
    """DeepSeek-V2, section 2.1: keys and values from a latent, one RoPE key for all heads; YaRN's two factors."""

    def __init__(self, state: State, config: Any, inv_freq: torch.Tensor) -> None:
        self.state, self.config, self.inv_freq = state, config, inv_freq
        rope = config.rope_parameters
        self.scale, self.size = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5, 1.0
        if rope["rope_type"] == "yarn":
            log = 0.1 * math.log(rope["factor"])
            all_dim = log * rope["mscale_all_dim"] + 1
            self.scale *= all_dim**2
            self.size = (log * rope["mscale"] + 1) / all_dim

    def _split(self, x: Heads) -> tuple[Heads, Heads]:
        plain, rotary = x.split([x.shape[-1] - self.config.qk_rope_head_dim, self.config.qk_rope_head_dim], dim=-1)
        return plain, _rope(rotary, self.inv_freq, interleaved=True, size=self.size)

    def query(self, x: torch.Tensor, name: str, suffix: str) -> Heads:
        if self.config.q_lora_rank is None:
            q = _linear(x, self.state, f"{name}.q_proj{suffix}")
        else:
            low = _linear(x, self.state, f"{name}.q_a_proj{suffix}")
            low = _norm(low, self.state[f"{name}.q_a_layernorm{suffix}.weight"], 1e-6)
            q = _linear(low, self.state, f"{name}.q_b_proj{suffix}")
        return torch.cat(self._split(q.unflatten(-1, (self.config.num_attention_heads, -1))), dim=-1)

    def key_value(self, x: torch.Tensor, name: str, suffix: str) -> tuple[Heads, Heads]:
        latent, rotary = self._split(_linear(x, self.state, f"{name}.kv_a_proj_with_mqa{suffix}")[:, None])
        suffix = suffix.replace("_decode", "")  # after the latent, the weights are the group's
        latent = _norm(latent, self.state[f"{name}.kv_a_layernorm{suffix}.weight"], 1e-6)
        heads = _linear(latent[:, 0], self.state, f"{name}.kv_b_proj{suffix}")
        heads = heads.unflatten(-1, (self.config.num_attention_heads, -1))
        keys, values = heads.split([self.config.qk_nope_head_dim, self.config.v_head_dim], dim=-1)
        return torch.cat((keys, rotary.expand(-1, keys.shape[1], -1)), dim=-1), values


def _mlp(x: torch.Tensor, state: State, name: str, config: Any) -> torch.Tensor:
    gate = _linear(x, state, f"{name}.gate_proj")
    gate = F.silu(gate) if not hasattr(config, "hidden_activation") else F.gelu(gate, approximate="tanh")
    return _linear(gate * _linear(x, state, f"{name}.up_proj"), state, f"{name}.down_proj")


def _route(weights: torch.Tensor, config: Any) -> torch.Tensor:
    """Map [T, experts] probabilities to the weight of each expert, zero if it is not chosen."""
    chosen = weights
    if getattr(config, "topk_method", "greedy") == "group_limited_greedy":
        groups = weights.unflatten(-1, (config.n_group, -1)).amax(-1)
        best = torch.zeros_like(groups).scatter(1, groups.topk(config.topk_group).indices, 1.0)
        chosen = weights * best.repeat_interleave(weights.shape[1] // config.n_group, dim=1)
    top = chosen.topk(config.num_experts_per_tok)
    kept = torch.zeros_like(weights).scatter(1, top.indices, top.values)
    if config.model_type.startswith("deepseek"):
        return kept * config.routed_scaling_factor
    return kept / kept.sum(-1, keepdim=True) if getattr(config, "norm_topk_prob", True) else kept


def _feed_forward(x: torch.Tensor, state: State, name: str, config: Any) -> torch.Tensor:
    if f"{name}.gate.weight" not in state:
        return _mlp(x, state, name, config)
    routes = _route((x @ state[f"{name}.gate.weight"].T).softmax(-1), config)
    out = (
        _mlp(x, state, f"{name}.shared_experts", config)
        if f"{name}.shared_experts.up_proj.weight" in state
        else 0.0 * x
    )
    for expert in range(routes.shape[1]):
        gate, up = (x @ state[f"{name}.experts.gate_up_proj"][expert].T).chunk(2, dim=-1)
        out = out + routes[:, expert, None] * ((F.silu(gate) * up) @ state[f"{name}.experts.down_proj"][expert].T)
    return out


def _window(config: Any, layer: int) -> int | None:
    types = getattr(config, "layer_types", None)
    sliding = types is None or types[layer] == "sliding_attention"
    return getattr(config, "sliding_window", None) if sliding else None


def logits(
    state: State,
    config: Any,
    ids: torch.Tensor,
    inv_freq: Frequencies,
    *,
    swiftkv: bool,
    turns: torch.Tensor | None = None,
    below: torch.Tensor | None = None,
    entering: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    """Map [T] token ids to [T, vocab_size] float32 logits. `turns`: for each token its turn if it is deep, else
    -1; None: only the last token is deep. It matters for deep tokens that keep their own K and V. `below`: the same for
    the layers below l, which tokens that exit at l run through; None: as `turns`. `entering` receives the hidden states
    that enter layers >= l, [T, hidden_size]."""
    if config.model_type.startswith("gemma"):  # norms multiply by 1 + weight
        state = {name: tensor + ("norm" in name) for name, tensor in state.items()}
    turns = torch.tensor([-1] * (len(ids) - 1) + [0]) if turns is None else turns
    below = turns if below is None else below
    keeps_own = swiftkv and getattr(config, "swiftkv_decode_key_value", "shared") == "own"
    own: KeyValue | None = None
    eps, first, group = config.rms_norm_eps, config.num_key_value_layers, config.key_value_group_size
    attention = (_Latent if hasattr(config, "kv_lora_rank") else _ByHead)(state, config, inv_freq)
    scale = config.hidden_size**0.5 if config.model_type.startswith("gemma") else 1.0
    x = state["model.embed_tokens.weight"][ids] * getattr(config, "embedding_multiplier", scale)
    branch = getattr(config, "residual_multiplier", 1.0)
    shared: dict[int, KeyValue] = {}
    run = getattr(config, "swiftkv_prefill_layers", None)
    bypassed = set(range(first)) - set(range(first) if run is None or not swiftkv else run)
    read = x  # the hidden states of every token read as a prompt token

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        """Apply a norm, or return x where OLMo has no norm before attention."""
        return _norm(x, state[f"{name}.weight"], eps) if f"{name}.weight" in state else x

    def behind_attention(x: torch.Tensor, attended: torch.Tensor, layer: str, suffix: str) -> torch.Tensor:
        """Return the layer's output, given its input and the outputs of its heads."""
        output = _linear(attended, state, f"{layer}.self_attn.o_proj{suffix}")
        behind = f"{layer}.post_feedforward_layernorm.weight" in state
        if behind:
            x = x + normed(output, f"{layer}.post_attention_layernorm")
            output = _feed_forward(normed(x, f"{layer}.pre_feedforward_layernorm"), state, f"{layer}.mlp", config)
            return x + normed(output, f"{layer}.post_feedforward_layernorm")
        x = x + branch * output
        return x + branch * _feed_forward(normed(x, f"{layer}.post_attention_layernorm"), state, f"{layer}.mlp", config)

    for i in range(config.num_hidden_layers):
        layer = f"model.layers.{i}"
        if i == first and swiftkv:
            exited = (below >= 0) & (turns < 0)
            h = normed(torch.where(exited[:, None], x, read), "model.norm_swiftkv")
            own = None
            if entering is not None:
                entering.append(x)
            for leader in range(first, config.num_hidden_layers, group):
                key_value = attention.key_value(h, f"model.layers.{leader}.self_attn", "_swiftkv")
                shared |= dict.fromkeys(range(leader, leader + group), key_value)
        normalised = normed(x, f"{layer}.input_layernorm")
        q = attention.query(normalised, f"{layer}.self_attn", "_swiftkv" if i in shared else "")
        if keeps_own and i >= first and (i - first) % group == 0:
            own = attention.key_value(normalised, f"{layer}.self_attn", "_decode_swiftkv")
        if i in shared:
            key_value = shared[i]
        else:
            reading = normed(read, f"{layer}.input_layernorm")
            key_value = attention.key_value(reading, f"{layer}.self_attn", "")
            own = attention.key_value(normalised, f"{layer}.self_attn", "")
        attended = _attend(q, key_value, own, below if i < first else turns, attention.scale, _window(config, i))
        own_output = i in shared and getattr(config, "own_output_projection", False)
        x = behind_attention(x, attended, layer, "_swiftkv" if own_output else "")
        if bypassed and i < first:
            if i not in bypassed:
                q = attention.query(reading, f"{layer}.self_attn", "")
                attended = _attend(q, key_value, None, turns, attention.scale, _window(config, i))
                read = behind_attention(read, attended, layer, "")
            x = torch.where(below[:, None] >= 0, x, read)
        elif i not in shared:
            read = x
    x = _norm(x, state["model.norm.weight"], eps) @ state["lm_head.weight"].T
    return x / getattr(config, "logits_scaling", 1.0)


def greedy(
    state: State, config: Any, prompt: list[int], inv_freq: Frequencies, count: int, *, swiftkv: bool = True
) -> list[int]:
    """Return `count` greedy tokens after `prompt`, each from a full forward pass."""
    ids, first_deep = list(prompt), max(len(prompt) - getattr(config, "swiftkv_deep_tail", 1), 0)
    for _ in range(count):
        turns = torch.tensor([-1] * first_deep + [0] * (len(ids) - first_deep))
        last = logits(state, config, torch.tensor(ids), inv_freq, swiftkv=swiftkv, turns=turns)[-1]
        ids.append(int(last.argmax()))
    return ids[len(prompt) :]
