"""Loading of checkpoints through transformers, with checks of the files before weights are read.

It compares index and headers with the model that the configuration describes, and dequantises weights.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import GENERATION_CONFIG_NAME
from transformers.utils.import_utils import is_peft_available

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.checkpoint import Checkpoint
from swiftkv_platform.model.configuration import made_without_weights, read_generation_config, refusing
from swiftkv_platform.model.stored_quantization import as_floats, is_quantized, read_all
from swiftkv_platform.model.stored_weights import StoredWeights, check_finite, settle_head
from swiftkv_platform.sources.loader_rules import ADAPTER

_SHOWN = 3
"""Maximum number of tensor names in a message."""
_HARMLESS = re.compile(r"rotary_emb\.inv_freq$")
"""Buffers that old checkpoints store."""
_UNREADABLE = (OSError, ValueError, LookupError, AttributeError, TypeError, AssertionError, SafetensorError)
"""Errors of a load other than lack of memory."""

Load = Callable[..., Any]
"""A `from_pretrained` function."""


def find_checkpoint(source: str | Path, arguments: dict[str, Any]) -> Checkpoint | None:
    """Return the checkpoint that `from_pretrained` would read with `arguments`; None for a state dict or GGUF file."""
    if arguments.get("state_dict") is not None or arguments.get("gguf_file") is not None:
        return None
    return Checkpoint.open(source, **arguments)


def load_checked(
    load: Load,
    build: Callable[[Any], Any],
    config: Any,
    source: str | Path,
    checkpoint: Checkpoint | None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call `load(source, *args, config=config, **kwargs)` after checking that `checkpoint` fits the model.

    Args:
        load: the `from_pretrained` of transformers.
        build: function that makes the model of a configuration; called on the meta device, so it takes no memory.
        checkpoint: result of `find_checkpoint`; None checks nothing.

    Raises:
        ModelError: tensors are missing, unexpected, of another shape or not finite; the quantisation is unknown.
    """
    if checkpoint is None:
        return load(source, *args, config=config, **kwargs)
    if is_peft_available() and checkpoint.find(ADAPTER):  # transformers would load what it names
        raise ModelError.of(
            "model.name_or_path", checkpoint.source, f": its {ADAPTER} names another model; use merged weights"
        )
    settle_head(config, checkpoint)
    quantized = is_quantized(config)
    with made_without_weights(checkpoint.source):
        model = build(copy.deepcopy(config))
    check_tensors(checkpoint, model, quantized=quantized)
    generation = read_generation_config(checkpoint.find(GENERATION_CONFIG_NAME), checkpoint.source)
    if not quantized:
        with refusing(checkpoint.source, "its weights cannot be read", errors=_UNREADABLE):
            loaded = load(source, *args, config=config, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        for name, parameter in model.named_parameters():
            check_finite(name, parameter.detach(), checkpoint.source)
        if generation is not None:
            model.generation_config = generation  # transformers has read the whole file
        return loaded
    dtype = _compute_dtype(kwargs.pop("dtype", kwargs.pop("torch_dtype", None)), config)
    config = copy.deepcopy(config)
    del config.quantization_config
    weights = read_all(as_floats(checkpoint), dtype)
    for name, weight in weights.items():
        check_finite(name, weight, checkpoint.source)
    model = load(None, *args, config=config, state_dict=weights, dtype=dtype, **kwargs)
    if generation is not None:
        model.generation_config = generation
    return model


def open_checked(
    model_class: Any, config: Any, checkpoint: Checkpoint, *, dtype: torch.dtype | str | None = None
) -> tuple[Any, StoredWeights]:
    """Return the model that `load_checked` would load, without its weights, and the reader of these. Raises
    `ModelError`: as `load_checked` and `build_empty`."""
    settle_head(config, checkpoint)
    quantized = is_quantized(config)
    dtype = _compute_dtype(dtype, config, torch.bfloat16 if quantized else first_dtype(checkpoint))
    weights = StoredWeights(checkpoint, config, dtype)
    config = copy.deepcopy(config)
    if quantized:
        del config.quantization_config
    model = build_empty(lambda: model_class._from_config(config, dtype=dtype), checkpoint)
    check_tensors(checkpoint, model, quantized=quantized)
    return model, weights


def build_empty(build: Callable[[], Any], checkpoint: Checkpoint, device: torch.device | str = "cpu") -> Any:
    """Make a model on the meta device, except for its positional buffers, with the generation defaults of `checkpoint`.

    Args:
        build: function that makes the model; called on the meta device.
        device: device of the buffers.

    Raises:
        ModelError: the model has other buffers, which no file holds.
    """
    with made_without_weights(checkpoint.source):
        model = build()
        model.tie_weights()
        # Make it again: its buffers are on the meta device too, and no file stores them.
        with torch.device("cpu"):
            model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    generation = read_generation_config(checkpoint.find(GENERATION_CONFIG_NAME), checkpoint.source)
    if generation is not None:
        model.generation_config = generation
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise ModelError(
            f"{checkpoint.source} has buffers that are in no file: {', '.join(empty[:_SHOWN])}",
            field="model.name_or_path",
            value=checkpoint.source,
        )
    return model.eval()


def check_tensors(checkpoint: Checkpoint, model: Any, *, quantized: bool = False) -> None:
    """Compare the tensors of `checkpoint` with those that `model` (on the meta device) would store.

    Names are compared first: for a sharded checkpoint they are in the index, before any shard is downloaded.

    Raises:
        ModelError: tensors are missing, unexpected or of another shape; the message names the first ones.
    """
    if quantized:
        checkpoint = as_floats(checkpoint)
    with made_without_weights(checkpoint.source):
        expected = _stored(model, checkpoint)
    stored = set(checkpoint.shards)
    missing = [name for name in expected if name not in stored and not _is_tied(name, model, stored)]
    if missing:
        raise _refused(checkpoint, model, f"lacks {_count(missing)} that its config.json requires", missing)
    added = [name for name in sorted(stored - expected.keys()) if not _is_ignored(name, model)]
    if added:
        raise _refused(checkpoint, model, f"holds {_count(added)} that its config.json has no place for", added)
    headers = checkpoint.headers
    misshapen = [
        f"{name} is {list(headers[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in stored and headers[name].shape != tuple(shape)
    ]
    if misshapen:
        raise _refused(
            checkpoint, model, f"holds {_count(misshapen)} of another shape than its config.json says", misshapen
        )


def _stored(model: Any, checkpoint: Checkpoint) -> dict[str, torch.Size]:
    """Return the shapes by name in which a checkpoint stores `model`. Families that fuse tensors in memory may store
    them fused or separate: the layout of `checkpoint` is used."""
    in_memory = model.state_dict()
    on_disk = revert_weight_conversion(model, dict(in_memory))
    fused = in_memory.keys() - on_disk.keys()
    chosen = in_memory if fused and fused <= checkpoint.shards.keys() else on_disk
    return {name: tensor.shape for name, tensor in chosen.items()}


def _is_tied(name: str, model: Any, stored: set[str]) -> bool:
    """Whether the checkpoint stores the same parameter under another name."""
    names = defaultdict(set)
    for alias, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].add(alias)
    return any(name in aliases and not aliases.isdisjoint(stored) for aliases in names.values())


def _is_ignored(name: str, model: Any) -> bool:
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    tied = name == "lm_head.weight" and model.config.tie_word_embeddings
    return tied or bool(_HARMLESS.search(name)) or any(re.search(pattern, name) for pattern in patterns)


def first_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype that transformers uses if the configuration has none: that of the first floating tensor."""
    found = (info.dtype for info in checkpoint.headers.values())
    return next((dtype for dtype in found if dtype is not None and dtype.is_floating_point), torch.float32)


def _compute_dtype(wanted: Any, config: Any, default: torch.dtype = torch.bfloat16) -> torch.dtype:
    if isinstance(wanted, torch.dtype):
        return wanted
    if isinstance(wanted, str) and wanted != "auto":
        named: torch.dtype = getattr(torch, wanted)
        return named
    return config.dtype if isinstance(config.dtype, torch.dtype) else default


def _count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


def _refused(checkpoint: Checkpoint, model: Any, what: str, which: list[str]) -> ModelError:
    config = model.config
    shown = ", ".join(which[:_SHOWN]) + (", ..." if len(which) > _SHOWN else "")
    shape = f"model_type {config.model_type}, {config.num_hidden_layers} layers"
    if hasattr(config, "layer_map"):
        shape += (
            f", num_key_value_layers={config.num_key_value_layers}, key_value_group_size={config.key_value_group_size}"
        )
    return ModelError(
        f"{checkpoint.source} {what} ({shape}): {shown}", field="model.name_or_path", value=checkpoint.source
    )
