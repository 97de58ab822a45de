"""The copied start, tensor by tensor: the teacher tensors from which each new tensor of a student is made.

    q_*, o_proj   the layer's own                 norm_swiftkv  layer l's input_layernorm
    k_*, v_*, ... the mean over the group         exit_norm, exit_head  the teacher's final norm and head

Source: paper, sections 3.1 and 3.2; with other key-value heads than the teacher's, appendix C. The teacher's tensors
may be in memory or in a checkpoint on disk.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

_SUFFIX = re.compile(r"(_decode)?_swiftkv")
_LAYER_TENSOR = re.compile(r"model\.layers\.(\d+)\.self_attn\.(\w+)\.(\w+)")


ReadTeacher = Callable[[str, slice | None], torch.Tensor]
"""Function that returns a teacher's tensor by name, or only the given rows of it."""


@dataclass(frozen=True)
class StartingTensor:
    """A tensor that the student adds to its teacher's."""

    name: str
    sources: tuple[str, ...]
    """Teacher tensors of which this tensor is the mean."""
    rows: slice | None = None
    """Rows of the sources to use; None: all."""
    heads: tuple[int, int] | None = None
    """Key-value heads of a source and of this tensor, if they differ; the first dimension is then heads x head_dim."""

    def made(self, read: ReadTeacher, rows: slice | None = None) -> torch.Tensor:
        """Return this tensor, or only the given rows, in the dtype of its sources. The mean is taken in float32."""
        if self.heads is not None:  # sharing heads changes the rows
            tensor = self._mean([read(source, self.rows) for source in self.sources])
            return tensor if rows is None else tensor[rows]
        wanted = self.rows
        if rows is not None:
            first = 0 if self.rows is None else self.rows.start
            wanted = slice(first + rows.start, first + rows.stop)
        return self._mean([read(source, wanted) for source in self.sources])

    def _mean(self, sources: Sequence[torch.Tensor]) -> torch.Tensor:
        if len(sources) == 1 and self.heads is None:
            return sources[0]
        mean = sources[0].float()
        for source in sources[1:]:
            mean = mean + source.float()
        mean = mean / len(sources)
        if self.heads is not None:
            mean = share_heads(mean, *self.heads)
        return mean.to(sources[0].dtype)


def share_heads(tensor: torch.Tensor, num_heads: int, num_shared: int) -> torch.Tensor:
    """[num_heads * head_dim, ...] -> [num_shared * head_dim, ...].

    Fewer heads: each is the mean of the consecutive heads that it replaces. More: each head is repeated for the query
    heads that read it, which does not change the output but gives training more parameters.
    """
    heads: torch.Tensor = tensor.unflatten(0, (num_heads, -1))
    if num_shared < num_heads:
        pools: torch.Tensor = heads.unflatten(0, (num_shared, -1))
        return pools.mean(1).flatten(0, 1)
    return heads.repeat_interleave(num_shared // num_heads, dim=0).flatten(0, 1)


def copied_start(student: Any) -> Iterator[StartingTensor]:
    """Yield every tensor that `student`, which may be on the meta device, adds to its teacher, layer by layer."""
    config, layer_map = student.config, student.config.layer_map
    attention_class = student.decoder_class.layer_class.attention_class
    heads = None
    if config.num_key_value_heads_swiftkv not in (None, config.num_key_value_heads):
        heads = (config.num_key_value_heads, config.num_key_value_heads_swiftkv)
    for name, _ in student.named_parameters():
        match = _LAYER_TENSOR.fullmatch(name)
        if match is None or not _SUFFIX.search(name):
            continue
        layer, module = int(match[1]), _SUFFIX.sub("", match[2])
        shared = not module.startswith(("q_", "o_"))
        layers = layer_map.group(layer) if shared else (layer,)
        module, rows = attention_class.rows_of_teacher(config, module)
        sources = tuple(f"model.layers.{i}.self_attn.{module}.{match[3]}" for i in layers)
        yield StartingTensor(name, sources, rows, heads if shared else None)
    first = layer_map.num_key_value_layers
    if first < layer_map.num_hidden_layers and config.family.normalises_inputs:
        yield StartingTensor("model.norm_swiftkv.weight", (f"model.layers.{first}.input_layernorm.weight",))
    if config.shape.has_exit_head:
        yield StartingTensor("exit_norm.weight", ("model.norm.weight",))
        yield StartingTensor("exit_head.weight", ("lm_head.weight",))
