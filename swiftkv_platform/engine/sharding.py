"""A model's layers cut among ranks: heads and columns apart, sums put together. Knows modules, no process.

Projections into heads and into the middle of an MLP are cut by rows of their weights (each rank makes its own heads and
columns), projections out of them by columns of theirs (each rank makes a part of the sum, and all add up). So there are
two sums a layer. Source: Megatron-LM, arXiv 1909.08053, section 3. Norms, routers and MLA's latents stay whole, and so
do the embedding and the heads, which only rank 0 keeps.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import nn

from swiftkv_platform.errors import ModelError

INTO_PARTS = {"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"}
"""Names of linear modules of which a rank keeps a part of the outputs; `_swiftkv` may follow."""
OUT_OF_PARTS = {"o_proj", "down_proj"}
"""Names of those of which a rank keeps a part of the inputs."""


class Ranks(Protocol):
    """Ranks as sharded modules need them."""

    rank: int
    size: int

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `x`, which is changed in place."""
        ...


def check_divides(config: Any, size: int) -> None:
    """Raises `ModelError` where heads or columns cannot be cut into `size` equal parts."""
    text = config.get_text_config()
    latent = getattr(text, "kv_lora_rank", None) is not None
    names = ["num_attention_heads", "intermediate_size", "moe_intermediate_size"]
    names += [] if latent else ["num_key_value_heads", "num_key_value_heads_swiftkv"]
    counts = {name: getattr(text, name, None) for name in names}
    wrong = {name: count for name, count in counts.items() if count is not None and count % size}
    if wrong:
        which = " and ".join(f"{name} {count}" for name, count in wrong.items())
        fits = [ranks for ranks in range(1, size) if not any(count % ranks for count in counts.values() if count)]
        raise ModelError(
            f"tensor_parallel_size is {size}, which does not divide this model's {which}; of fewer, "
            f"{', '.join(map(str, fits))} would do",
            field="tensor_parallel_size",
            value=size,
        )


def shard(model: Any, ranks: Ranks) -> None:
    """Keep this rank's part of a causal language model of ours, in place.

    Raises:
        ModelError: heads or columns that cannot be cut into equal parts.
    """
    check_divides(model.config, ranks.size)
    for parent, name, child in list(_children(model.model.layers)):
        base = name.removesuffix("_swiftkv")
        if isinstance(child, nn.Linear) and base in INTO_PARTS:
            setattr(parent, name, _into_parts(child, ranks))
        elif isinstance(child, nn.Linear) and base in OUT_OF_PARTS:
            setattr(parent, name, _Summed(_out_of_parts(child, ranks), ranks, child.bias))
        elif isinstance(getattr(child, "gate_up_proj", None), nn.Parameter):
            _cut_experts(child, ranks)
            setattr(parent, name, _Summed(child, ranks))
    if ranks.rank > 0:
        _drop_vocabulary(model)


class _Summed(nn.Module):
    """A module of whose output each rank makes a part."""

    def __init__(self, part: nn.Module, ranks: Ranks, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.part = part
        self.bias = bias
        self._ranks = ranks

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size], of all ranks."""
        output = self._ranks.all_reduce(self.part(*inputs))
        return output if self.bias is None else output + self.bias


def _children(root: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for parent in root.modules():
        for name, child in parent.named_children():
            yield parent, name, child


def _own(x: torch.Tensor, dim: int, ranks: Ranks) -> torch.Tensor:
    """Return this rank's part, in memory of its own, so that the whole can be freed."""
    return x.detach().chunk(ranks.size, dim)[ranks.rank].clone()


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    out_features, in_features = weight.shape
    made = nn.Linear(in_features, out_features, bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def _into_parts(whole: nn.Linear, ranks: Ranks) -> nn.Linear:
    return _linear(_own(whole.weight, 0, ranks), None if whole.bias is None else _own(whole.bias, 0, ranks))


def _out_of_parts(whole: nn.Linear, ranks: Ranks) -> nn.Linear:
    return _linear(_own(whole.weight, 1, ranks), None)


def _cut_experts(experts: Any, ranks: Ranks) -> None:
    """Weights of all experts in one: [num_experts, gate and up, hidden_size] and [num_experts, hidden_size, inner]."""
    parts = [_own(part, 1, ranks) for part in experts.gate_up_proj.chunk(2, dim=1)]
    experts.gate_up_proj = nn.Parameter(torch.cat(parts, dim=1), requires_grad=False)
    experts.down_proj = nn.Parameter(_own(experts.down_proj, 2, ranks), requires_grad=False)
    experts.intermediate_dim = experts.gate_up_proj.shape[1] // 2


def _drop_vocabulary(model: Any) -> None:
    """Rank 0 alone embeds tokens and computes logits; something of the model's type has to stand there."""
    model.model.embed_tokens = nn.Embedding(1, 1, dtype=model.dtype)
    for name in ("lm_head", "exit_head"):
        if hasattr(model, name):
            setattr(model, name, nn.Identity())
