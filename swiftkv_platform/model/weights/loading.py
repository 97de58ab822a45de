"""Loading of models: through transformers after checks of the files, or tensor by tensor.

`StoredWeights` reads tensors by their names and shapes in memory. It fuses experts that are stored separately, by
transformers' table of conversions, and dequantizes weights. Only the needed parts of the files are read.
"""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.utils import GENERATION_CONFIG_NAME

from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.configuration import convert_errors, read_generation_config, use_meta_device
from swiftkv_platform.model.weights.checkpoint import Checkpoint, Part, expand_ranges
from swiftkv_platform.model.weights.quantization import dequantize_checkpoint, is_quantized
from swiftkv_platform.planning.config import MODEL_FIELD
from swiftkv_platform.sources.loader_rules import ADAPTER_FILE
from swiftkv_platform.sources.peft import refuse_peft_adapter

_MAX_SHOWN_NAMES = 3
"""Maximum number of tensor names in a message."""
_IGNORED_BUFFERS = re.compile(r"rotary_emb\.inv_freq$")
"""Buffers that old checkpoints store."""
_LOAD_ERRORS = (OSError, ValueError, LookupError, AttributeError, TypeError, AssertionError, SafetensorError)
"""Exceptions of a failed `from_pretrained`, except out of memory."""

Load = Callable[..., Any]
"""A `from_pretrained` function."""


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
        checkpoint: the files that `load` reads; None (for a state dict or GGUF file) checks nothing.

    Raises:
        ModelError: tensors are missing, unexpected, of another shape or not finite; the quantization is unknown; or a
            PEFT adapter is beside them.
    """
    if checkpoint is None:
        return load(source, *args, config=config, **kwargs)
    if (adapter := checkpoint.find_file(ADAPTER_FILE)) is not None:  # a caller may have read the configuration
        refuse_peft_adapter(adapter.parent, checkpoint.source, field=MODEL_FIELD)
    quantized = check_checkpoint_fits(checkpoint, config, build)
    generation = read_generation_config(checkpoint.find_file(GENERATION_CONFIG_NAME), checkpoint.source)
    location: str | Path | None = source
    if quantized:
        dtype = _resolve_dtype(kwargs.pop("dtype", kwargs.pop("torch_dtype", None)), config)
        config = copy.deepcopy(config)
        del config.quantization_config
        floats = dequantize_checkpoint(checkpoint)
        weights = {name: floats.read(name).to(dtype) for names in floats.names_by_shard.values() for name in names}
        location, kwargs = None, {**kwargs, "state_dict": weights, "dtype": dtype}
    with convert_errors(checkpoint.source, "its weights cannot be read", errors=_LOAD_ERRORS):
        loaded = load(location, *args, config=config, **kwargs)
    model = loaded[0] if isinstance(loaded, tuple) else loaded  # with output_loading_info
    for name, parameter in model.named_parameters():
        check_finite(name, parameter.detach(), checkpoint.source)
    if generation is not None:
        model.generation_config = generation  # transformers has read the whole file
    return loaded


def check_checkpoint_fits(checkpoint: Checkpoint, config: Any, build: Callable[[Any], Any]) -> bool:
    """Resolve `config.tie_word_embeddings`, and compare the tensors of `checkpoint` with those of `build(config)`.
    Returns whether they are quantized. Raises `ModelError` as `check_tensors`."""
    resolve_tied_head(config, checkpoint)
    quantized = is_quantized(config)
    with use_meta_device(checkpoint.source):
        model = build(copy.deepcopy(config))
    check_tensors(checkpoint, model, quantized=quantized)
    return quantized


def open_checked(
    model_class: Any, config: Any, checkpoint: Checkpoint, *, dtype: torch.dtype | str | None = None
) -> tuple[Any, StoredWeights]:
    """Return the model that `load_checked` would load, on the meta device, and the reader of its weights. Raises
    `ModelError` as `load_checked` and `build_on_meta`."""
    resolve_tied_head(config, checkpoint)
    quantized = is_quantized(config)
    dtype = _resolve_dtype(dtype, config, torch.bfloat16 if quantized else get_first_dtype(checkpoint))
    weights = StoredWeights(checkpoint, config, dtype)
    config = copy.deepcopy(config)
    if quantized:
        del config.quantization_config
    model = build_on_meta(lambda: model_class._from_config(config, dtype=dtype), checkpoint)
    check_tensors(checkpoint, model, quantized=quantized)
    return model, weights


def build_on_meta(build: Callable[[], Any], checkpoint: Checkpoint, device: torch.device | str = "cpu") -> Any:
    """Make a model on the meta device, except for its positional buffers, with the generation defaults of `checkpoint`.

    Args:
        build: function that makes the model; called on the meta device.
        device: device of the buffers.

    Raises:
        ModelError: the model has other buffers, which no file holds.
    """
    with use_meta_device(checkpoint.source):
        model = build()
        model.tie_weights()
        # Make it again: its buffers are on the meta device too, and no file stores them.
        with torch.device("cpu"):
            model.model.rotary_emb = type(model.model.rotary_emb)(config=model.config).to(device)
    generation = read_generation_config(checkpoint.find_file(GENERATION_CONFIG_NAME), checkpoint.source)
    if generation is not None:
        model.generation_config = generation
    empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if empty:
        raise ModelError(
            f"the model of {checkpoint.source} has buffers that no file stores: {', '.join(empty[:_MAX_SHOWN_NAMES])}",
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
        checkpoint = dequantize_checkpoint(checkpoint)
    with use_meta_device(checkpoint.source):
        expected = _find_stored_shapes(model, checkpoint)
    stored = set(checkpoint.shards)
    missing = [name for name in expected if name not in stored and not _is_tied(name, model, stored)]
    if missing:
        raise _misfit_error(checkpoint, model, f"lacks {_format_count(missing)} that its config.json requires", missing)
    added = [name for name in sorted(stored - expected.keys()) if not _is_ignored(name, model)]
    if added:
        raise _misfit_error(
            checkpoint, model, f"holds {_format_count(added)} that its config.json has no place for", added
        )
    headers = checkpoint.headers
    misshapen = [
        f"{name} is {list(headers[name].shape)}, not {list(shape)}"
        for name, shape in expected.items()
        if name in stored and headers[name].shape != tuple(shape)
    ]
    if misshapen:
        raise _misfit_error(
            checkpoint, model, f"holds {_format_count(misshapen)} of another shape than its config.json says", misshapen
        )


def _find_stored_shapes(model: Any, checkpoint: Checkpoint) -> dict[str, torch.Size]:
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
    return tied or bool(_IGNORED_BUFFERS.search(name)) or any(re.search(pattern, name) for pattern in patterns)


def get_first_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """Return the dtype of the first floating tensor, which transformers uses if the configuration has none."""
    found = (info.dtype for info in checkpoint.headers.values())
    return next((dtype for dtype in found if dtype is not None and dtype.is_floating_point), torch.float32)


def _resolve_dtype(wanted: Any, config: Any, default: torch.dtype = torch.bfloat16) -> torch.dtype:
    if isinstance(wanted, torch.dtype):
        return wanted
    if isinstance(wanted, str) and wanted != "auto":
        named: torch.dtype = getattr(torch, wanted)
        return named
    return config.dtype if isinstance(config.dtype, torch.dtype) else default


def _format_count(names: list[str]) -> str:
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}"


def _misfit_error(checkpoint: Checkpoint, model: Any, what: str, which: list[str]) -> ModelError:
    config = model.config
    shown = ", ".join(which[:_MAX_SHOWN_NAMES]) + (", ..." if len(which) > _MAX_SHOWN_NAMES else "")
    shape = f"model_type {config.model_type}, {config.num_hidden_layers} layers"
    if hasattr(config, "layer_map"):
        shape += (
            f", num_key_value_layers={config.num_key_value_layers}, key_value_group_size={config.key_value_group_size}"
        )
    return ModelError(
        f"{checkpoint.source} {what} ({shape}): {shown}", field="model.name_or_path", value=checkpoint.source
    )


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TIED_NAMES = {HEAD: EMBEDDING, EMBEDDING: HEAD}
"""Names of tied tensors, each with the name of the tensor that it shares values with."""
_COMPARED_ROWS = 1024
"""Number of rows of head and embedding that are compared at a time."""


def resolve_tied_head(config: Any, checkpoint: Checkpoint) -> None:
    """Set `config.tie_word_embeddings` to False if the stored head differs from the stored embedding, as transformers
    does. Without a stored head the configuration decides.
    """
    if getattr(config, "tie_word_embeddings", False) and not {HEAD, EMBEDDING} - checkpoint.shards.keys():
        config.tie_word_embeddings = _are_equal(checkpoint, HEAD, EMBEDDING)


def check_finite(name: str, tensor: torch.Tensor, source: str | Path) -> None:
    """Raise `ModelError` for a weight with NaN or infinity, which would spoil all outputs."""
    # Min and max are NaN if any element is, and need no memory per element.
    if tensor.numel() and not tensor.is_meta and not torch.stack(torch.aminmax(tensor)).isfinite().all():
        raise ModelError.for_field(
            "model.name_or_path",
            str(source),
            f": its {name} has values that are not finite; save the model again, or use an earlier checkpoint",
        )


def _are_equal(checkpoint: Checkpoint, name: str, other: str) -> bool:
    """Whether the tensors `name` and `other` of a checkpoint are equal."""
    checkpoint = dequantize_checkpoint(checkpoint)
    shape = checkpoint.headers[name].shape
    if shape != checkpoint.headers[other].shape:
        return False
    for start in range(0, shape[0], _COMPARED_ROWS):
        a, b = checkpoint.read_tensors([name, other], slice(start, start + _COMPARED_ROWS)).values()
        if not torch.equal(a, b.to(a.dtype)):
            return False
    return True


@dataclass
class _TensorSources:
    """Stored tensors that make one tensor in memory."""

    converter: WeightConverter | None = None
    """Converter of transformers; None for unchanged tensors."""
    sources: dict[str, list[str]] = field(default_factory=dict)
    """Names in the checkpoint, by the matching pattern of the converter."""

    def add_source_name(self, pattern: str | None, name: str) -> None:
        self.sources.setdefault(pattern or "", []).append(name)

    @property
    def expert_blocks(self) -> list[list[str]] | None:
        """Names per block of experts to stack; blocks (gate, up) are concatenated by rows. None: other conversions."""
        if self.converter is None:
            return None
        merge, *concatenate = self.converter.operations
        stacked = isinstance(merge, MergeModulelist) and merge.dim == 0
        if not stacked or not all(isinstance(each, Concatenate) and each.dim == 1 for each in concatenate):
            return None
        return [self.sources[pattern] for pattern in self.converter.source_patterns]


class StoredWeights:
    """Reads the tensors of a teacher, or of a student by its teacher's conversions.

    Args:
        config: the model's configuration.
        dtype: dtype to read in; None keeps the stored one.
    """

    def __init__(self, checkpoint: Checkpoint, config: Any, dtype: torch.dtype | None = None) -> None:
        self.checkpoint = checkpoint
        self._config = config
        self._dtype = dtype
        self._stored: dict[str, _TensorSources] = {}
        self._weights = dequantize_checkpoint(checkpoint) if is_quantized(config) else checkpoint
        renamings, converters = _get_name_conversions(config.model_type)
        by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
        for name in sorted(self._weights.shards, key=_make_natural_sort_key):  # experts in their order
            target, pattern = rename_source_key(name, renamings, converters)
            stored = self._stored.setdefault(target, _TensorSources(by_pattern.get(pattern or "")))
            stored.add_source_name(pattern, name)

    def __contains__(self, name: str) -> bool:
        """Whether the checkpoint stores a tensor under this name; a tied tensor counts under one name only."""
        return name in self._stored

    def read(self, name: str, part: Part | None = None) -> torch.Tensor:
        """Read a tensor, or a part of it, by its name in memory. Raises `ModelError` for values that are not finite."""
        tensor = self._read(name, part)
        check_finite(name, tensor, self.checkpoint.source)
        return tensor

    def _read(self, name: str, part: Part | None) -> torch.Tensor:
        # A tied head is stored once, under either name.
        stored = self._stored[name if name in self._stored else TIED_NAMES.get(name, name)]
        if stored.converter is None:
            (source,) = stored.sources[""]
            return self._read_tensors([source], part)[0]
        if (blocks := stored.expert_blocks) is not None:
            return self._read_stacked_experts(blocks, part)
        made = self._apply_converter(name, stored, stored.converter)
        return made if part is None else made[part].clone()

    def _read_stacked_experts(self, blocks: list[list[str]], part: Part | None) -> torch.Tensor:
        """Read stacked experts [num_experts, rows, columns], with the rows of all blocks concatenated."""
        experts, rows, columns = expand_ranges(part, 3)
        heights = [self._weights.headers[block[0]].shape[0] for block in blocks]
        first, last, _ = rows.indices(sum(heights))
        read, start = [], 0
        for block, height in zip(blocks, heights, strict=True):
            own = slice(max(first - start, 0), min(last - start, height))
            if own.start < own.stop:
                read.append(torch.stack(self._read_tensors(block[experts], (own, columns))))
            start += height
        return read[0] if len(read) == 1 else torch.cat(read, dim=1)

    def _apply_converter(self, name: str, stored: _TensorSources, converter: WeightConverter) -> torch.Tensor:
        for pattern, sources in stored.sources.items():
            for tensor in self._read_tensors(sources):
                converter.add_tensor(name, name, pattern, tensor)  # type: ignore[arg-type]  # a tensor does as well
        made: torch.Tensor = converter.convert(name, config=self._config)[name]
        return made

    def _read_tensors(self, names: Sequence[str], part: Part | None = None) -> list[torch.Tensor]:
        read = []
        for name in names:
            tensor = self._weights.read(name, part)
            read.append(tensor if self._dtype is None else tensor.to(self._dtype))
        return read


def make_name_converter(model_type: str) -> Callable[[str], str]:
    """Return a function that converts the name of a stored tensor to the name of the tensor in memory made from it."""
    renamings, converters = _get_name_conversions(model_type)
    return lambda name: rename_source_key(name, renamings, converters)[0]


def _get_name_conversions(model_type: str) -> tuple[list[WeightRenaming], list[WeightConverter]]:
    transforms = get_checkpoint_conversion_mapping(model_type) or []
    return (
        [each for each in transforms if isinstance(each, WeightRenaming)],
        [each for each in transforms if isinstance(each, WeightConverter)],
    )


def _make_natural_sort_key(name: str) -> list[tuple[int, str]]:
    # By the number of its digits, since `int` refuses thousands of them.
    return [(len(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", name)]
