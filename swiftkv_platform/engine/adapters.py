"""Adapters of one resident base: their models share the weights that they take from the base.

An adapter's model is built without weights. Modules whose tensors are all the base's are replaced by those of a
resident model, which are fused, packed and rounded already. Only the other modules are read, so an adapter takes the
memory of its own tensors, and the base is not read again.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from swiftkv_platform.configs.adapter import (
    ADAPTER_FILE,
    AdapterConfig,
    BaseModelReference,
    BaseTensor,
    compute_base_digest,
    read_adapter,
)
from swiftkv_platform.engine.kernels.packing import PackedWeight
from swiftkv_platform.engine.weights import FusedLinearPart, drop_teacher_projections
from swiftkv_platform.errors import ModelError
from swiftkv_platform.model.causal_lm import get_student_classes
from swiftkv_platform.model.weights.adapters import FindBase, open_merged_model
from swiftkv_platform.model.weights.checkpoint import Checkpoint
from swiftkv_platform.model.weights.loading import StoredWeights, build_on_meta, make_name_converter
from swiftkv_platform.model.weights.quantization import is_quantized
from swiftkv_platform.student_shape import StudentShape

_CONTAINERS = re.compile(r"model|model\.layers(\.\d+(\.self_attn)?)?")
"""Modules that are never shared whole, since their classes depend on the student's shape."""
_FIELD = "adapters"


@dataclass(frozen=True)
class WeightsOrigin:
    """Origin of a resident model's tensors."""

    adapter: AdapterConfig
    """A model that is no adapter is its own base, of which it changes nothing."""
    vectors: Mapping[str, torch.Tensor]
    """Norms and biases by name in memory, before they were prepared for inference."""

    @classmethod
    def from_model(cls, model: Any, adapter: AdapterConfig) -> WeightsOrigin:
        """Make the origin of a model whose weights are not fused or packed yet."""
        vectors = {name: each.detach().clone() for name, each in model.named_parameters() if each.ndim == 1}
        return cls(adapter, vectors)


def read_origin(directory: Path, config: Any) -> AdapterConfig:
    """Return what the model in `directory` takes from its base. Reads the whole model unless it is an adapter."""
    if (adapter := read_adapter(directory)) is not None:
        return adapter
    checkpoint = Checkpoint.open(directory)
    tensors = {name: BaseTensor.from_tensor(checkpoint.read(name)) for name in checkpoint.shards}
    base = BaseModelReference(name_or_path=str(directory), digest=compute_base_digest(tensors), tensors=tensors)
    return AdapterConfig(base=base, swiftkv=StudentShape.from_config(config), added=())


def read_resident_adapter(directory: Path, resident: AdapterConfig) -> AdapterConfig:
    """Read the adapter in `directory`. Raises `ModelError`: it is no adapter, its files are incomplete, or its base is
    not that of the `resident` model."""
    adapter = read_adapter(directory)
    if adapter is None:
        raise ModelError.for_field(
            _FIELD, str(directory), f", which has no {ADAPTER_FILE}; name models that `swiftkv export --adapter` made"
        )
    own, base = adapter.base, resident.base
    if (own.digest, own.tensors) != (base.digest, base.tensors):
        raise ModelError.for_field(
            _FIELD,
            str(directory),
            f", whose base is {own.name_or_path!r} with digest {own.digest}, but the resident base is "
            f"{base.name_or_path!r} with digest {base.digest}; serve it in a deployment of its own base",
        )
    return adapter


@contextmanager
def open_adapter_model(
    directory: Path,
    model_config: Any,
    adapter: AdapterConfig,
    residents: Sequence[tuple[Any, WeightsOrigin]],
    *,
    dtype: torch.dtype,
    find_base: FindBase | None,
) -> Iterator[tuple[Any, Checkpoint]]:
    """Yield the adapter's model, which shares the base's weights with the resident models, and its checkpoint.

    Args:
        residents: models that are prepared for inference, with the origin of their weights.
        dtype: dtype of the resident models' weights.
        find_base: see `open_merged_model`. The base is read only for an adapter that replaces some of its tensors.

    Raises:
        ModelError: the adapter's files are incomplete, or its base cannot be read.
    """
    own = Checkpoint.from_directory(directory)
    adapter.check_adapter_tensor_names(own.shards, str(directory))
    model_class = get_student_classes(model_config.model_type.removesuffix("_swiftkv")).causal_lm
    # 1. read only the adapter's own tensors, if resident models have all others
    if not any(origin.adapter.replaced for origin in (WeightsOrigin(adapter, {}), residents[0][1])):
        model = _build_without_weights(model_class, model_config, own, residents[0][0].config, dtype)
        weights = StoredWeights(own, model_config, dtype)
        _share_weights(model, adapter, residents)
        if all(name in weights for name in _name_meta_parameters(model).values()):
            _read_parameters(model, weights)
            yield model, own
            return
    # 2. otherwise read the others from the base
    with open_merged_model(directory, find_base=find_base) as (whole, _):
        model, weights = model_class.open_without_weights(whole, config=model_config, dtype=dtype)
        _share_weights(model, adapter, residents)
        _read_parameters(model, weights)
        yield model, Checkpoint.open(whole)


def _build_without_weights(
    model_class: Any, model_config: Any, own: Checkpoint, resident_config: Any, dtype: torch.dtype
) -> Any:
    """Build the model of an adapter that replaces no tensor of its base, whose head is tied as the resident model's."""
    config = copy.deepcopy(model_config)
    config.tie_word_embeddings = resident_config.tie_word_embeddings
    if is_quantized(config):
        del config.quantization_config
    return build_on_meta(lambda: model_class._from_config(config, dtype=dtype), own)


def _share_weights(model: Any, adapter: AdapterConfig, residents: Sequence[tuple[Any, WeightsOrigin]]) -> None:
    """Replace the modules of `model`, on the meta device, whose weights a resident model has too by its modules, and
    set the vectors that it has too."""
    drop_teacher_projections(model.model)
    aliases: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(parameter, []).append(name)
    find_target = make_name_converter(model.config.model_type)
    for resident, origin in residents:
        changed = {find_target(name).rpartition(".")[0] for name in _find_differences(adapter, origin.adapter)}

        def is_shared(parameter: nn.Parameter, changed: set[str] = changed) -> bool:
            names = aliases.get(parameter, ())  # those of shared modules are not on the list
            return bool(names) and all(name.rpartition(".")[0] not in changed for name in names)

        _share_children(model, resident, "", is_shared)
        shared = {
            name: nn.Parameter(origin.vectors[name].to(parameter.dtype), requires_grad=False)
            for name, parameter in model.named_parameters()
            if name in origin.vectors and parameter.is_meta and is_shared(parameter)
        }
        model.load_state_dict(shared, strict=False, assign=True)


def _find_differences(adapter: AdapterConfig, other: AdapterConfig) -> set[str]:
    """Return the names of tensors that two adapters of one base do not both take from it in the same dtype."""
    own = {name for each in (adapter, other) for name in (*each.added, *each.replaced, *each.dropped)}
    return own | {name for name in adapter.base.tensors if adapter.cast.get(name) != other.cast.get(name)}


def _share_children(
    target: nn.Module, resident: nn.Module, prefix: str, is_shared: Callable[[nn.Parameter], bool]
) -> None:
    """Replace children of `target`, or their children, by those of `resident` if all their weights are shared."""
    twins = {name: twin for name, twin in resident.named_children() if name in target._modules}
    whole = {
        name
        for name in twins
        if not _CONTAINERS.fullmatch(prefix + name)
        and (parameters := list(target.get_submodule(name).parameters()))
        and all(map(is_shared, parameters))
        and max(parameter.ndim for parameter in parameters) > 1
    }
    # The parts of a fused projection are computed together, so either all of them are shared or none.
    parts = {name: twin for name, twin in twins.items() if isinstance(twin, FusedLinearPart)}
    counts = Counter(id(twin.fused) for name, twin in parts.items() if name in whole)
    split = {name for name, twin in parts.items() if counts[id(twin.fused)] < len(twin.fused.sizes)}
    for name, twin in twins.items():
        if name in whole - split:
            setattr(target, name, twin)
        elif not isinstance(twin, FusedLinearPart):
            _share_children(target.get_submodule(name), twin, f"{prefix}{name}.", is_shared)


def _name_meta_parameters(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return a name of each parameter without weights."""
    return {parameter: name for name, parameter in model.named_parameters() if parameter.is_meta}


def _read_parameters(model: nn.Module, weights: StoredWeights) -> None:
    """Read all parameters that are on the meta device. Tied parameters are read once."""
    read = {
        parameter: nn.Parameter(weights.read(name), requires_grad=False)
        for parameter, name in _name_meta_parameters(model).items()
    }
    named = model.named_parameters(remove_duplicate=False)
    model.load_state_dict({name: read[each] for name, each in named if each in read}, strict=False, assign=True)


def map_weight_bytes_by_address(model: nn.Module) -> dict[int, int]:
    """Return the bytes of each tensor of a model by address, without the unused memory of arenas."""
    found: dict[int, int] = {}
    fused = [module.fused.linear for module in model.modules() if isinstance(module, FusedLinearPart)]
    for module in (*model.modules(), *fused):
        values = (*module._parameters.values(), *module._buffers.values(), *vars(module).values())
        tensors = [part for value in values for part in (value if isinstance(value, PackedWeight) else (value,))]
        found |= {each.data_ptr(): each.nbytes for each in tensors if isinstance(each, torch.Tensor)}
    return found
