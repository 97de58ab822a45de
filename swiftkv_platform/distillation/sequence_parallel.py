"""Sequence parallelism: the workers of a group hold the same rows, each a run of their tokens. Around every attention
they swap tokens for heads, so that each attends with its share of the heads to whole rows (Ulysses, arXiv 2309.14509).

DeepSpeed's Ulysses drops masks, and so the borders of packed samples, except for flash and flex attention, and takes
one number of heads, while a student's may differ from its teacher's. PyTorch's context parallelism takes no masks. Here
the arguments of transformers' attention functions are exchanged, so every family is supported.

Needs attention's tensors and a process group only.
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
from swiftkv_platform.model.context import DecoderContext
from swiftkv_platform.model.packed_attention import SAMPLES, PackedSamples

ATTENTION = "sequence_parallel"
"""The attention implementation's name in a model's configuration."""
_GROUP = "sequence_group"
"""Keyword argument by which attention gets its group."""


@dataclass(frozen=True)
class SequenceGroup:
    """The workers that hold the same rows, with consecutive ranks, and this worker's rank in the group."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def create(cls, size: int, device: torch.device) -> SequenceGroup:
        """Make groups of `size` and return this worker's. Collective over the default group."""
        mesh = init_device_mesh(device.type, (dist.get_world_size() // size, size), mesh_dim_names=("data", "sequence"))
        return cls(mesh.get_group("sequence"), mesh.get_local_rank("sequence"), size)

    def own(self, num_tokens: int) -> slice:
        """Return the positions of a row that belong to this worker."""
        count = num_tokens // self.size
        return slice(self.rank * count, (self.rank + 1) * count)

    def shard(self, context: DecoderContext) -> DecoderContext:
        """The context of this worker's tokens. The samples stay whole: its heads attend over whole ones."""
        own = self.own(context.num_tokens)
        rotation = context.rotation
        return replace(
            context,
            hidden=context.hidden[:, own].clone(),  # so that the whole rows can be freed
            position_ids=context.position_ids[:, own],
            rotation=tuple(part[:, own] for part in rotation) if isinstance(rotation, tuple) else rotation[:, own],
            layer_arguments={**context.layer_arguments, _GROUP: self},
        )

    def union(self, mask: Tensor) -> Tensor:
        """Return the positions that any worker of the group marks in its mask of whole rows. Collective."""
        marked = mask.to(torch.int32)
        dist.all_reduce(marked, group=self.group)
        return marked > 0

    def swap(self, tensor: Tensor) -> Tensor:
        """Split axis 1 over the group and gather axis 2: [batch, n, m / size, dim] -> [batch, n / size, m, dim]. The
        axes are heads and tokens, in either order. Collective."""
        parts = tensor.unflatten(1, (self.size, -1)).movedim(1, 0)  # one part for each worker
        received = cast("Tensor", _AllToAll.apply(parts, self.group))  # type: ignore[no-untyped-call]
        return torch.cat(received.unbind(0), dim=2)


def check_heads(config: Any, size: int) -> None:
    """Raise `InvalidInputError` if `sharding.sequence_parallel_size` does not divide the query heads and the key-value
    heads of teacher and student."""
    heads = {
        "num_attention_heads": config.num_attention_heads,
        # MLA expands its latent to keys and values of every query head.
        "num_key_value_heads": None if hasattr(config, "kv_lora_rank") else config.num_key_value_heads,
        "num_key_value_heads_swiftkv": getattr(config, "num_key_value_heads_swiftkv", None),
    }
    for name, count in heads.items():
        if count is not None and count % size:
            raise InvalidInputError.for_field(
                "sharding.sequence_parallel_size", size, f", which must divide {name} = {count}"
            )


class _AllToAll(torch.autograd.Function):
    """Sends part i, along the first axis, to worker i. This is its own inverse, so backward does the same."""

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
    """Attend over whole samples with this worker's heads; inputs and outputs are of this worker's tokens, as in
    transformers."""
    group: SequenceGroup = arguments[_GROUP]
    samples: PackedSamples = arguments[SAMPLES]
    # Keys and values made from x may be followed by as many of the tokens' own.
    key, value = (
        torch.cat([group.swap(part) for part in tensor.split(query.shape[2], dim=2)], dim=2) for tensor in (key, value)
    )
    query = group.swap(query)
    output = samples.attend(query, key, value, scaling=arguments["scaling"], layer=module.layer_idx)  # type: ignore[arg-type]
    return group.swap(output), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, sdpa_mask)
