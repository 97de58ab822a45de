"""Sharding of a model's layers among tensor-parallel ranks, as in Megatron-LM (arXiv 1909.08053, section 3).

Column-parallel projections (into attention heads and into the MLP) divide their outputs: each rank computes its own
heads and columns. Row-parallel projections (out of them) divide their inputs: each rank computes a part of the sum. So
a layer has two all-reduces. Norms, routers and MLA's latents are not sharded. Only rank 0 keeps the embedding and the
heads. A norm over all attention heads is sharded by head, with its own all-reduce."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.weights.loading import StoredWeights

if TYPE_CHECKING:
    from swiftkv_platform.engine.ranks import TensorParallelGroup

COLUMN_PARALLEL_MODULES = {"q_proj", "k_proj", "v_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj"}
"""Linear modules whose outputs are sharded. Names may end with `_swiftkv` or `_decode_swiftkv`."""
ROW_PARALLEL_MODULES = {"o_proj", "down_proj"}
"""Linear modules whose inputs are sharded."""
HEAD_NORM_MODULES = {"q_norm", "k_norm"}
"""Norms of queries and keys. They are sharded if they normalize over all heads."""


def check_divisible(config: Any, size: int) -> None:
    """Raise `ModelError` if heads or columns cannot be divided into `size` equal parts."""
    text = config.get_text_config()
    latent = getattr(text, "kv_lora_rank", None) is not None
    names = ["num_attention_heads", "intermediate_size", "moe_intermediate_size"]
    names += [] if latent else ["num_key_value_heads", "num_key_value_heads_swiftkv"]
    counts = {name: getattr(text, name, None) for name in names}
    wrong = {name: count for name, count in counts.items() if count is not None and count % size}
    if wrong:
        which = " and ".join(f"{name} {count}" for name, count in wrong.items())
        fits = [ranks for ranks in range(1, size) if not any(count % ranks for count in counts.values() if count)]
        raise ModelError.for_field(
            "tensor_parallel_size",
            size,
            f", which does not divide this model's {which}; use {' or '.join(map(str, fits))}",
        )


@dataclass(frozen=True)
class ShardSpec:
    """How a tensor is divided among ranks."""

    dim: int
    """Dimension that is divided."""
    blocks: tuple[int, ...] = (1,)
    """Relative sizes of the blocks along `dim`, each of which is divided: e.g. (1, 1) for fused gate and up."""

    def get_indices(self, length: int, ranks: TensorParallelGroup) -> list[tuple[slice, ...]]:
        """Return the indices of a rank's parts in the whole tensor, one per block. `length`: size of all parts along
        `dim`."""
        unit, indices, before = length // sum(self.blocks), [], 0
        for share in self.blocks:
            start = (before * ranks.size + ranks.rank * share) * unit
            indices.append((*[slice(None)] * self.dim, slice(start, start + share * unit)))
            before += share
        return indices


EXPERT_SHARDS = {"gate_up_proj": ShardSpec(1, (1, 1)), "down_proj": ShardSpec(2)}
"""Tensors of all experts: [num_experts, gate and up, hidden_size] and [num_experts, hidden_size, inner size]."""


def get_shard_spec(name: str, config: Any) -> ShardSpec | None:
    """Return how a parameter is sharded; None: it is not sharded."""
    *_, module, leaf = name.split(".")
    if module in HEAD_NORM_MODULES and config.family.query_key_norms == "all heads":
        return ShardSpec(0)
    if module == "qkv_proj":
        return ShardSpec(0, (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads))
    if module == "gate_up_proj":
        return ShardSpec(0, (1, 1))
    if leaf in EXPERT_SHARDS:
        return EXPERT_SHARDS[leaf]
    base = module.removesuffix("_swiftkv").removesuffix("_decode")
    if base in COLUMN_PARALLEL_MODULES:
        return ShardSpec(0)
    return ShardSpec(1) if base in ROW_PARALLEL_MODULES and leaf == "weight" else None


def get_unsharded_name(name: str) -> str:
    """Return the unsharded model's name of a sharded model's parameter."""
    return name.replace(".part.", ".")


def shard_model(model: Any, ranks: TensorParallelGroup) -> None:
    """Reduce one of this project's causal language models to this rank's part, in place. It may be on the meta device.
    Raises `ModelError`: heads or columns cannot be divided into equal parts."""
    check_divisible(model.config, ranks.size)
    for parent, name, child in list(_iterate_children(model.model.layers)):
        leaves = [leaf for leaf, _ in child.named_parameters(recurse=False)]
        specs = {leaf: spec for leaf in leaves if (spec := get_shard_spec(f"{name}.{leaf}", model.config))}
        if not specs:
            continue
        # 1. shard the parameters
        for leaf, spec in specs.items():
            _keep_shard(child, leaf, spec, ranks)
        if name in HEAD_NORM_MODULES:
            setattr(parent, name, _ShardedRMSNorm(child, ranks))
            continue
        # 2. adapt sizes that the forward pass reads  3. all-reduce the outputs of row-parallel modules
        if name == "qkv_proj":
            parent.config = _RankConfig(parent.config, ranks.size)
            parent.num_key_value_heads //= ranks.size
        if isinstance(child, nn.Linear):
            child.out_features, child.in_features = child.weight.shape
        else:
            child.intermediate_dim = child.down_proj.shape[2]  # experts
        if not isinstance(child, nn.Linear) or name.removesuffix("_swiftkv") in ROW_PARALLEL_MODULES:
            setattr(parent, name, _AllReduced(child, ranks))
    if ranks.rank > 0:
        _drop_embedding_and_heads(model)


class _AllReduced(nn.Module):
    """A row-parallel module: its output is summed over all ranks."""

    def __init__(self, part: Any, ranks: TensorParallelGroup) -> None:
        super().__init__()
        self.part = part
        self.bias: torch.Tensor | None = None
        if isinstance(part, nn.Linear):
            self.bias = part.bias
            part.register_parameter("bias", None)
        self._ranks = ranks

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        output = self._ranks.all_reduce(self.part(*inputs))
        return output if self.bias is None else output + self.bias


class _RankConfig:
    """A configuration with a rank's number of heads, which attention modules read."""

    def __init__(self, config: Any, size: int) -> None:
        self._config = config
        self.num_attention_heads = config.num_attention_heads // size
        self.num_key_value_heads = config.num_key_value_heads // size

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class _ShardedRMSNorm(nn.Module):
    """RMSNorm over all heads, of which each rank has some."""

    def __init__(self, part: Any, ranks: TensorParallelGroup) -> None:
        super().__init__()
        self.weight = part.weight
        self._epsilon = part.variance_epsilon
        self._ranks = ranks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize [..., this rank's size]: y = w * x / sqrt(mean over all ranks of x^2 + epsilon)."""
        wide = x.float()
        mean = self._ranks.all_reduce(wide.square().mean(-1, keepdim=True)) / self._ranks.size
        normalized: torch.Tensor = self.weight * (wide * torch.rsqrt(mean + self._epsilon))
        return normalized.to(x.dtype)


def _iterate_children(root: nn.Module) -> Iterator[tuple[Any, str, Any]]:
    """Yield (parent, name, child) for each module below `root`."""
    for parent in root.modules():
        for name, child in parent.named_children():
            yield parent, name, child


def _keep_shard(module: nn.Module, leaf: str, spec: ShardSpec, ranks: TensorParallelGroup) -> None:
    """Replace a parameter by a copy of this rank's part, so that the whole parameter is freed."""
    whole = module.get_parameter(leaf).detach()
    indices = spec.get_indices(whole.shape[spec.dim] // ranks.size, ranks)
    own = torch.cat([whole[index] for index in indices], spec.dim)
    setattr(module, leaf, nn.Parameter(own, requires_grad=False))


def _drop_embedding_and_heads(model: Any) -> None:
    """Replace embedding and heads by stubs in the model's dtype. Only rank 0 embeds tokens and computes logits."""
    model.model.embed_tokens = nn.Embedding(1, 1, dtype=model.dtype)
    for name in ("lm_head", "exit_head"):
        if hasattr(model, name):
            setattr(model, name, nn.Identity())


def load_shard(
    directory: Path, model_class: Any, config: Any, *, dtype: str, ranks: TensorParallelGroup, device: torch.device
) -> Any:
    """Load this rank's part (as `shard_model`) of the model in `directory`, which must not be an adapter.

    Args:
        model_class: one of this project's causal language models.
        config: its configuration.
        dtype: name of a dtype, or "auto" for the checkpoint's dtype.
        device: device to which each tensor is moved after it is read.

    Raises:
        ModelError: the checkpoint cannot be read, or heads or columns cannot be divided into equal parts.
    """
    model, weights = model_class.open_without_weights(directory, config=config, dtype=dtype)
    shard_model(model, ranks)
    _load_parameters(model, weights, ranks, device, config)
    return model


def _load_parameters(
    model: nn.Module, weights: StoredWeights, ranks: TensorParallelGroup, device: torch.device, config: Any
) -> None:
    """Read all parameters that are on the meta device. Tied parameters are read once."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            names[parameter].append(name)
    own: dict[str, nn.Parameter] = {}
    for parameter, aliases in names.items():
        read = _read_shard(weights, get_unsharded_name(aliases[0]), parameter, ranks, config).to(device)
        own |= dict.fromkeys(aliases, nn.Parameter(read))
    model.load_state_dict(own, strict=False, assign=True)


def _read_shard(
    weights: StoredWeights, name: str, parameter: nn.Parameter, ranks: TensorParallelGroup, config: Any
) -> torch.Tensor:
    """Read this rank's part of the tensor `name`, with the shape of `parameter`."""
    if (spec := get_shard_spec(name, config)) is None:
        return weights.read(name)
    parts = [weights.read(name, index) for index in spec.get_indices(parameter.shape[spec.dim], ranks)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, spec.dim)
