"""A model's `config.json` and `generation_config.json` in transformers' classes, or a `ModelError` of one sentence.

transformers gets what `sources.loader_rules` keep of a file, never the file: it would open names that it finds there.

transformers raises whatever its code runs into: a missing attribute, a division by zero, an assertion. This module
turns such errors into `ModelError`, and all configurations are read through it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import CONFIG_MAPPING, GenerationConfig
from transformers.activations import ACT2FN
from transformers.utils.hub import cached_file

from swiftkv_platform import configs
from swiftkv_platform.errors import ModelError, SwiftKVError
from swiftkv_platform.families import FAMILIES, get_teacher_type
from swiftkv_platform.planning import check_generation_values, has_quantized_weights, read_architecture
from swiftkv_platform.planning.config import MODEL_FIELD
from swiftkv_platform.sources.loader_rules import ADAPTER_FILE, CONFIG, clean_config, clean_generation_config
from swiftkv_platform.sources.peft import refuse_peft_adapter
from swiftkv_platform.sources.untrusted_files import read_object

_MAX_ERROR_LENGTH = 300
"""Maximum characters of a transformers error in a message."""


configs.register_configs()


def read_config(
    source: str | Path, *, field: str = MODEL_FIELD, any_family: bool = False, config_class: Any = None, **hub: Any
) -> Any:
    """Read a model's configuration, of which transformers gets the known keys.

    Args:
        field: name of `source` in error messages.
        any_family: accept families and quantizations that only vLLM serves.
        config_class: class that reads it; None: the class of its `model_type`.
        hub: hub arguments of `from_pretrained`.

    Raises:
        ModelError: `config.json` is missing, or has an unknown family, an unsupported quantization or an impossible
            value; or the directory has a PEFT adapter.
    """
    refuse_peft_adapter(find_directory(source, hub), str(source), field=field)
    try:
        values = read_object(_find_config_file(source, hub))
        assert values, "config.json is empty"
    except Exception as error:
        raise ModelError(
            f"{field} is {str(source)!r}: cannot read a model configuration; give a directory with config.json or a "
            f"hub id that this machine can reach ({format_error(error)})",
            field=field,
            value=str(source),
        ) from error
    try:
        if not any_family or get_teacher_type(values.get("model_type")) in FAMILIES:
            read_architecture(values)  # the control plane's own check
            _check_activation(values)
        if not any_family:
            has_quantized_weights(values)
        cleaned = clean_config(values)
    except ModelError as error:
        raise ModelError.for_field(field, str(source), f": its {error.message}") from error
    with convert_errors(source, "its config.json is refused", field):
        config_class = config_class or CONFIG_MAPPING[str(cleaned.get("model_type"))]
        config = config_class.from_dict(cleaned, name_or_path=str(source))
    config._attn_implementation = None  # loading chooses one that this machine has
    return config


def refuse_prefill_only(config: Any, source: str | Path) -> None:
    """Raise `ModelError` for a prefill-only export, which cannot generate tokens."""
    if config.swiftkv_prefill_only:
        raise ModelError(
            f"{str(source)!r} was exported with prefill_only: it only fills KV caches in vLLM and cannot generate "
            "tokens; use the student that it was exported from",
            field="model.name_or_path",
            value=str(source),
        )


def read_generation_config(
    file: Path | None, source: str | Path, *, field: str = MODEL_FIELD
) -> GenerationConfig | None:
    """Read the generation defaults in `file`; None without a file. Raises `ModelError`: they have impossible values."""
    if file is None:
        return None
    with convert_errors(source, f"its {file.name} is refused", field):
        values = read_object(file)
        try:
            check_generation_values(values)
            cleaned = clean_generation_config(values)
        except ModelError as error:
            raise ModelError.for_field(field, str(source), f": its {error.message}") from error
        return GenerationConfig.from_dict(cleaned)


def _find_config_file(source: str | Path, hub: Mapping[str, Any]) -> Path:
    """Return the path of a `config.json` of a directory or hub id, or `source` if it is a file."""
    path = Path(source)
    if path.is_dir():
        file = find_directory(source, hub) / CONFIG
        assert file.is_file(), f"there is no {CONFIG}"
        return file
    found = str(source) if path.is_file() else cached_file(str(source), CONFIG, **hub)
    return Path(str(found))


def find_directory(source: str | Path, hub: Mapping[str, Any]) -> Path:
    """Return the model's directory, or for a hub id the cached directory with its `adapter_config.json` if it has one.
    Without that file, no error is raised: reading `config.json` reports what is wrong."""
    path = Path(source)
    if path.exists():
        return path / str(hub.get("subfolder", ""))
    try:
        found = cached_file(str(source), ADAPTER_FILE, _raise_exceptions_for_missing_entries=False, **hub)
    except OSError:
        found = None
    return path if found is None else Path(found).parent


@contextmanager
def use_meta_device(source: str | Path) -> Iterator[None]:
    """Make models on the meta device inside the block; errors are the configuration's and raise `ModelError`."""
    with convert_errors(source, "no model can be built from its config.json"), torch.device("meta"):
        yield


@contextmanager
def convert_errors(
    source: str | Path, problem: str, field: str = MODEL_FIELD, errors: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Turn `errors` of transformers in the block into a `ModelError` that names the `problem`."""
    try:
        yield
    except SwiftKVError:
        raise
    except errors as error:
        raise ModelError.for_field(field, str(source), f": {problem} ({format_error(error)})") from error


def format_error(error: Exception) -> str:
    """Return an error in one line, with its type unless its text is clear without it."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())[:_MAX_ERROR_LENGTH]
    plain = isinstance(error, OSError | ValueError | StrictDataclassError) or (
        isinstance(error, AssertionError) and text
    )
    return text if plain else f"{type(error).__name__}: {text}"


def _check_activation(values: Mapping[str, Any]) -> None:
    for key in ("hidden_act", "hidden_activation"):
        if (name := values.get(key, "silu")) not in ACT2FN:
            raise ModelError(
                f"config.json has {key} {name!r}; one of transformers' activations is accepted, such as silu",
                field=key,
                value=name,
            )
