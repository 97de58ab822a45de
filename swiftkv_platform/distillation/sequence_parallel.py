"""Sequence parallelism: each worker of a group holds a slice of the tokens of the same rows. Around every attention an
all-to-all exchanges tokens for heads, so that each worker attends to whole rows with its share of the heads (Ulysses,
arXiv 2309.14509).

DeepSpeed's Ulysses drops masks, and so the borders of packed samples, except for flash and flex attention, and takes
one number of heads, while a student's may differ from its teacher's. PyTorch's context parallelism takes no masks. This
module exchanges the arguments of transformers' attention functions, so it supports every family.
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
from swiftkv_platform.model.packed_attention import SAMPLES_KEY, PackedLayout

ATTENTION_IMPLEMENTATION = "sequence_parallel"
"""Name of the attention implementation in a model's configuration."""
_GROUP_ARGUMENT = "sequence_group"
"""Keyword argument that passes the group to attention."""


@dataclass(frozen=True)
class SequenceGroup:
    """Workers with consecutive ranks that split the same rows, and this worker's rank among them."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def create(cls, size: int, device: torch.device) -> SequenceGroup:
        """Make groups of `size` and return this worker's. Collective over the default group."""
        mesh = init_device_mesh(device.type, (dist.get_world_size() // size, size), mesh_dim_names=("data", "sequence"))
        return cls(mesh.get_group("sequence"), mesh.get_local_rank("sequence"), size)

    def get_own_positions(self, num_tokens: int) -> slice:
        """Return this worker's positions in a row."""
        count = num_tokens // self.size
        return slice(self.rank * count, (self.rank + 1) * count)

    def shard_context(self, context: DecoderContext) -> DecoderContext:
        """Return the context of this worker's tokens. Samples stay whole, because its heads attend over whole
        samples."""
        own = self.get_own_positions(context.num_tokens)
        rotation = context.rotation
        return replace(
            context,
            hidden=context.hidden[:, own].clone(),  # so that the whole rows can be freed
            position_ids=context.position_ids[:, own],
            rotation=tuple(part[:, own] for part in rotation) if isinstance(rotation, tuple) else rotation[:, own],
            layer_arguments={**context.layer_arguments, _GROUP_ARGUMENT: self},
        )

    def unite_masks(self, mask: Tensor) -> Tensor:
        """Return the union of all workers' masks of whole rows. Collective."""
        marked = mask.to(torch.int32)
        dist.all_reduce(marked, group=self.group)
        return marked > 0

    def exchange_heads_and_tokens(self, tensor: Tensor) -> Tensor:
        """Split axis 1 over the group and gather axis 2: [batch, n, m / size, dim] -> [batch, n / size, m, dim].
        Exchanges heads for tokens, or tokens for heads. Collective."""
        parts = tensor.unflatten(1, (self.size, -1)).movedim(1, 0)  # one part per worker
        received = cast("Tensor", _AllToAll.apply(parts, self.group))  # type: ignore[no-untyped-call]
        return torch.cat(received.unbind(0), dim=2)


def check_head_counts(config: Any, size: int) -> None:
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
                "sharding.sequence_parallel_size", size, f"; it must divide {name} = {count}"
            )


class _AllToAll(torch.autograd.Function):
    """Sends part i, along the first axis, to worker i. It is its own inverse, so backward does the same."""

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
    """Attend over whole samples with this worker's heads. Inputs and output are those of this worker's tokens."""
    group: SequenceGroup = arguments[_GROUP_ARGUMENT]
    samples: PackedLayout = arguments[SAMPLES_KEY]
    # K and V projected from x may be followed by the same number of K and V of the tokens themselves.
    key, value = (
        torch.cat([group.exchange_heads_and_tokens(part) for part in tensor.split(query.shape[2], dim=2)], dim=2)
        for tensor in (key, value)
    )
    query = group.exchange_heads_and_tokens(query)
    output = samples.attend(query, key, value, scaling=arguments["scaling"], layer=module.layer_idx)  # type: ignore[arg-type]
    return group.exchange_heads_and_tokens(output), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_IMPLEMENTATION, _attend)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_IMPLEMENTATION, sdpa_mask)
