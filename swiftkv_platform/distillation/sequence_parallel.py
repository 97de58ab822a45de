"""Sequence parallelism: the workers of a group hold the same rows, each a run of their tokens. Around every attention
they swap tokens for heads, so that each attends with its share of the heads to whole rows (Ulysses, arXiv 2309.14509).

DeepSpeed's own Ulysses drops masks, and with them the borders of packed samples, but for flash and flex attention, and
knows one number of heads, where a student's may differ from its teacher's. PyTorch's context parallelism takes no masks
at all. What is exchanged here is what transformers' attention functions take, so every family goes through it.

It knows attention's tensors and a process group, no model and no loss.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import init_device_mesh
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.model.decoder import DecoderContext
from swiftkv_platform.model.packed_attention import SAMPLES, PackedSamples

ATTENTION = "sequence_parallel"
"""The attention implementation's name in a model's configuration."""
_GROUP = "sequence_group"
"""Keyword under which every attention of a pass gets its group."""


@dataclass(frozen=True)
class SequenceGroup:
    """The workers that hold the same rows, neighbours by rank, and this worker's place among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def create(cls, size: int, device: torch.device) -> SequenceGroup:
        """Make groups of `size` and return this worker's. Collective over the default group."""
        mesh = init_device_mesh(device.type, (dist.get_world_size() // size, size), mesh_dim_names=("data", "sequence"))
        return cls(mesh.get_group("sequence"), mesh.get_local_rank("sequence"), size)

    def own(self, num_tokens: int) -> slice:
        """Return this worker's positions of a row."""
        count = num_tokens // self.size
        return slice(self.rank * count, (self.rank + 1) * count)

    def shard(self, context: DecoderContext) -> DecoderContext:
        """The context of this worker's tokens. The samples stay whole: its heads attend over whole ones."""
        own = self.own(context.num_tokens)
        rotation = context.rotation
        return replace(
            context,
            hidden=context.hidden[:, own].clone(),  # so that the whole rows' can go
            position_ids=context.position_ids[:, own],
            rotation=tuple(part[:, own] for part in rotation) if isinstance(rotation, tuple) else rotation[:, own],
            layer_arguments={**context.layer_arguments, _GROUP: self},
        )

    def union(self, mask: Tensor) -> Tensor:
        """Positions that any worker of the group marks, of masks of whole rows: each marks those of its own tokens."""
        marked = mask.to(torch.int32)
        dist.all_reduce(marked, group=self.group)
        return marked > 0

    def swap(self, tensor: Tensor) -> Tensor:
        """Exchange parts: every worker keeps its part of axis 1, and gets all parts of axis 2, be axis 1 the heads and
        axis 2 the tokens or the other way round: [batch, n, m / size, dim] -> [batch, n / size, m, dim]."""
        parts = tensor.unflatten(1, (self.size, -1)).movedim(1, 0)  # one for each worker
        received = cast("Tensor", _AllToAll.apply(parts, self.group))  # type: ignore[no-untyped-call]
        return torch.cat(received.unbind(0), dim=2)


def check_heads(config: Any, size: int) -> None:
    """Every worker of a group takes equally many query heads, and equally many key-value heads. Raises
    `InvalidInputError`: `sharding.sequence_parallel_size` does not divide the heads of teacher or student."""
    heads = {
        "num_attention_heads": config.num_attention_heads,
        # MLA expands its latent to keys and values of every query head.
        "num_key_value_heads": None if hasattr(config, "kv_lora_rank") else config.num_key_value_heads,
        "num_key_value_heads_swiftkv": getattr(config, "num_key_value_heads_swiftkv", None),
    }
    for name, count in heads.items():
        if count is not None and count % size:
            raise InvalidInputError.of("sharding.sequence_parallel_size", size, f", which must divide {name} = {count}")


class _AllToAll(torch.autograd.Function):
    """Part i of every worker, along the first axis, goes to worker i. It is its own inverse: so gradients go back."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(parts, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grad, ctx.group), None


def _all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = parts.contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _attention_mask: Tensor | None, **arguments: Any
) -> tuple[Tensor, None]:
    """Attention of whole samples over this worker's heads; as transformers' functions, of this worker's tokens."""
    group: SequenceGroup = arguments[_GROUP]
    samples: PackedSamples = arguments[SAMPLES]
    # Behind keys and values from x there may be as many of the tokens' own.
    key, value = (
        torch.cat([group.swap(part) for part in tensor.split(query.shape[2], dim=2)], dim=2) for tensor in (key, value)
    )
    query = group.swap(query)
    output = samples.attend(query, key, value, scaling=arguments["scaling"], layer=module.layer_idx)  # type: ignore[arg-type]
    return group.swap(output), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)
