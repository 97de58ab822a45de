"""Read what PEFT's LoRA adapters say about themselves in `adapter_config.json`. Reads no weights.

A PEFT adapter changes a teacher. This package's own adapters (`swiftkv_adapter.json`, `configs.adapter`) hold students.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import ConfigDict, PositiveInt, ValidationError, field_validator

from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.frozen import FiniteBaseModel
from swiftkv_platform.sources.loader_rules import ADAPTER_FILE
from swiftkv_platform.sources.names import Access, ModelSource, PathSource, check_revision, is_relative
from swiftkv_platform.sources.untrusted_files import UNBOUNDED, Boundary, UnusableFileError, read_object

PEFT_WEIGHTS = "adapter_model.safetensors"
BASE_FIELD = "base_model_name_or_path"
MERGE_ADVICE = "save the merged model (merge_and_unload of peft, then save_pretrained) to a new directory and use that"
Number = TypeVar("Number", int, float)
_IGNORED_FIELDS = frozenset(
    {
        *("auto_mapping", "task_type", "peft_version", "inference_mode", "runtime_config"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
        *("lora_dropout", "bias", "megatron_core", "qalora_group_size", "eva_config"),
        "fan_in_fan_out",  # of Conv1D, which no supported family has; PEFT ignores it for linear layers
    }
)
"""Fields that training read, or that the names of the stored tensors repeat. Any other unknown field that is set may
change the model, so it is refused."""


class LoraConfig(FiniteBaseModel):
    """The fields of a LoRA adapter that its merge depends on."""

    model_config = ConfigDict(extra="ignore")

    peft_type: Literal["LORA"]
    base_model_name_or_path: str
    """The model to change, named as a job's `model.name_or_path`."""
    revision: str | None = None
    """Hub revision of the base model."""
    r: PositiveInt
    lora_alpha: float
    use_rslora: bool = False
    use_dora: bool = False
    rank_pattern: dict[str, PositiveInt] = {}
    alpha_pattern: dict[str, float] = {}
    init_lora_weights: Literal[True, False, "gaussian", "orthogonal", "eva"] = True
    """How training began. Other values, such as `pissa`, changed the base model too."""

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def _check_patterns(cls, patterns: dict[str, float]) -> dict[str, float]:
        for pattern in patterns:
            try:
                _compile_pattern(pattern)
            except (re.error, RecursionError, OverflowError) as error:
                raise ValueError(f"{pattern[:64]!r} is not a regular expression") from error
        return patterns

    def get_rank(self, module: str) -> int:
        return next(_find_by_pattern(self.rank_pattern, module), self.r)

    def get_scale(self, module: str) -> float:
        """Return the factor of a module's B A."""
        rank = self.get_rank(module)
        alpha = next(_find_by_pattern(self.alpha_pattern, module), self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def parse_lora_config(values: Mapping[str, Any], name: str, field: str) -> LoraConfig:
    """Return the configuration of the adapter `name`. Raises `ModelError` for other methods than LoRA, and for variants
    that are not a sum of base and adapter."""
    set_values = {key: value for key, value in values.items() if value not in (None, False, "", [], {})}
    unknown = sorted(set_values.keys() - _IGNORED_FIELDS - LoraConfig.model_fields.keys())
    try:
        config = LoraConfig.model_validate_json(json.dumps(set_values))
    except (ValidationError, ValueError) as error:
        key = str(error.errors()[0]["loc"][0]) if isinstance(error, ValidationError) else ADAPTER_FILE
        raise _make_adapter_error(key, values.get(key), name, field) from error
    if unknown:
        raise _make_adapter_error(unknown[0], values[unknown[0]], name, field)
    return config


def read_lora_config(directory: Path, name: str, *, field: str, boundary: Boundary = UNBOUNDED) -> LoraConfig | None:
    """Return the configuration of the PEFT adapter in a directory; None if there is no `adapter_config.json`. `name`:
    name of the directory in messages. Raises `ModelError` as `parse_lora_config`, and for an adapter beside other
    weights."""
    path = directory / ADAPTER_FILE
    try:
        if not path.exists():
            return None
        refuse_other_weights(directory, name, field=field)
        return parse_lora_config(read_object(boundary.check_path(path, field, error=ModelError)), name, field)
    except OSError as error:
        raise ModelError.for_field(field, name, f": its {ADAPTER_FILE} cannot be read ({error.strerror})") from error
    except UnusableFileError as error:
        raise ModelError.for_field(field, name, f": its {ADAPTER_FILE} {error}") from error


def refuse_other_weights(directory: Path, name: str, *, field: str) -> None:
    """Raise `ModelError` if weights are beside an adapter: they may be its base model, or include the adapter already,
    so that neither merging nor ignoring the adapter is right for both."""
    found = sorted({*directory.glob("*.safetensors"), *directory.glob("pytorch_model*.bin")})
    others = [path.name for path in found if path.name != PEFT_WEIGHTS]
    if others:
        raise ModelError.for_field(
            field,
            name,
            f": the directory has a PEFT adapter ({ADAPTER_FILE}) and other weights ({others[0]}); if the weights "
            f"include the adapter, remove {ADAPTER_FILE}, otherwise move {ADAPTER_FILE} and {PEFT_WEIGHTS} to another "
            "directory",
        )


def refuse_peft_adapter(directory: Path, name: str, *, field: str) -> None:
    """Raise `ModelError` if a directory has a PEFT adapter, alone or beside full weights: loaders would ignore it, or
    load the model that it names. `name`: name of the directory in the message."""
    if (directory / ADAPTER_FILE).exists():
        refuse_other_weights(directory, name, field=field)
        raise ModelError.for_field(
            field, name, f": its {ADAPTER_FILE} belongs to a PEFT adapter, which is not merged here; {MERGE_ADVICE}"
        )


def parse_base_model(lora: LoraConfig, access: Access) -> ModelSource:
    """Return where an adapter's base model is. Raises `InvalidInputError` for a relative path, which depends on the
    process, for an invalid revision, and as `Access.parse_model`."""
    if lora.revision is not None:
        check_revision(lora.revision, "revision")
    source = access.parse_model(lora.base_model_name_or_path, BASE_FIELD)
    if isinstance(source, PathSource) and is_relative(source.name):
        raise InvalidInputError.for_field(
            BASE_FIELD, source.name, f", a relative path; use an absolute path or a hub id in {ADAPTER_FILE}"
        )
    return source


@contextmanager
def explain_base_errors(field: str, name: str) -> Iterator[None]:
    """Turn errors about the base model of the adapter `name` into a `ModelError` about `field`, which names it."""
    try:
        yield
    except InvalidInputError as error:
        raise ModelError.for_field(field, name, f": its {error.message}") from error


def _find_by_pattern(patterns: Mapping[str, Number], module: str) -> Iterator[Number]:
    """Yield the values of the patterns that match the module's name or its end. PEFT takes the first."""
    return (value for pattern, value in patterns.items() if _compile_pattern(pattern).match(module))


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(.*\.)?({pattern})$")


def _make_adapter_error(key: str, value: Any, name: str, field: str) -> ModelError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
    advice = "set it to the model that the adapter was trained on" if key == BASE_FIELD else MERGE_ADVICE
    return ModelError.for_field(
        field, name, f": its {ADAPTER_FILE} has {key} {shown}, which cannot be merged; {advice}"
    )
