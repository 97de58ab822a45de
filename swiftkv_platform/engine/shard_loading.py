"""A rank's part of a checkpoint, read from the files while the other ranks read theirs; none holds more than its part.

Knows files, names and cuts, no process.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swiftkv_platform.engine.sharding import Ranks, cut_of, shard, whole_name
from swiftkv_platform.model.stored_weights import StoredWeights


def load_shard(
    directory: Path, model_class: Any, config: Any, *, dtype: str, ranks: Ranks, device: torch.device
) -> Any:
    """Load this rank's part of the model in `directory`, no adapter: the one that `shard` would keep of the whole.

    Args:
        model_class: one of our causal language models.
        config: its configuration.
        dtype: name of a dtype, or "auto": the checkpoint's.
        device: where values go, each as it is read.

    Raises:
        ModelError: a checkpoint that cannot be read, or heads or columns that cannot be cut into equal parts.
    """
    model, weights = model_class.without_weights(directory, config=config, dtype=dtype)
    shard(model, ranks)
    _fill(model, weights, ranks, device)
    return model


def _fill(model: nn.Module, weights: StoredWeights, ranks: Ranks, device: torch.device) -> None:
    """Read every parameter that is on the meta device."""
    names: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.is_meta:
            names[parameter].append(name)
    own: dict[str, nn.Parameter] = {}
    for parameter, aliases in names.items():
        # A tied parameter may be stored under each of its names; it stays tied, as in transformers, if those are equal.
        stored = [name for name in aliases if whole_name(name) in weights]
        read = [_read_own(weights, whole_name(name), parameter, ranks).to(device) for name in stored]
        if all(tensor.equal(read[0]) for tensor in read):
            own |= dict.fromkeys(aliases, nn.Parameter(read[0]))
        else:
            own |= {name: nn.Parameter(tensor) for name, tensor in zip(aliases, read, strict=True)}
    model.load_state_dict(own, strict=False, assign=True)


def _read_own(weights: StoredWeights, name: str, parameter: nn.Parameter, ranks: Ranks) -> torch.Tensor:
    """This rank's part of the tensor `name`, as large as `parameter`."""
    if (cut := cut_of(name)) is None:
        return weights.read(name)
    parts = [weights.read(name, index) for index in cut.indices(parameter.shape[cut.dim], ranks)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, cut.dim)
