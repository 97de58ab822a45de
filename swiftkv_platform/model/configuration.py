"""A model's `config.json` and `generation_config.json` as transformers reads them, or one sentence on what is wrong.

transformers raises what its code comes upon: a missing attribute, a division by zero, an assertion. Every reader here
goes through this module, so that none of it reaches a caller.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN

from swiftkv_platform import configs
from swiftkv_platform.errors import ModelError, SwiftKVError
from swiftkv_platform.families import FAMILIES, teacher_type
from swiftkv_platform.planning import check_generation_values, has_quantized_weights, read_architecture

FIELD = "model.name_or_path"
_LONGEST = 300
"""Characters of an error of transformers in a message of ours."""


configs.register()


def read_config(
    source: str | Path, *, field: str = FIELD, any_family: bool = False, config_class: Any = AutoConfig, **hub: Any
) -> Any:
    """transformers' configuration of a model.

    Args:
        field: what messages call `source`.
        any_family: whether what only vLLM serves is accepted, families and quantisations.
        config_class: class that reads it.
        hub: arguments of `from_pretrained` that say where on the hub.

    Raises:
        ModelError: no `config.json`, another family, a quantisation that is not read, or a value that no model can
            have.
    """
    try:
        values, _ = PreTrainedConfig.get_config_dict(source, **hub)
        assert isinstance(values, Mapping), "config.json holds no object"
        assert values.keys() - {"_commit_hash"}, "there is no config.json, or an empty one"
    except Exception as error:
        raise ModelError(
            f"{field} is {str(source)!r}: cannot read a model configuration; give a directory with config.json or a "
            f"hub id that this machine can reach ({one_line(error)})",
            field=field,
            value=str(source),
        ) from error
    try:
        if not any_family or teacher_type(values.get("model_type")) in FAMILIES:
            read_architecture(values)  # as the control plane does
            _check_activation(values)
        if not any_family:
            has_quantized_weights(values)
    except ModelError as error:
        raise ModelError.of(field, str(source), f": its {error.message}") from error
    with refusing(source, "its config.json is refused", field):
        config = config_class.from_pretrained(source, trust_remote_code=False, **hub)
    config._attn_implementation = None  # loading chooses one that this machine has
    return config


def check_whole(config: Any, source: str | Path) -> None:
    """Raises `ModelError`: a student without the layers that give tokens."""
    if config.swiftkv_prefill_only:
        raise ModelError(
            f"{str(source)!r} was exported with prefill_only: it has what fills KV caches in vLLM, and no layers that "
            "give tokens; use the student that it was exported from",
            field="model.name_or_path",
            value=str(source),
        )


def read_generation_config(file: Path | None, source: str | Path, *, field: str = FIELD) -> GenerationConfig | None:
    """The defaults of generation in `file`; None for no file. Raises `ModelError`: it has values that cannot be."""
    if file is None:
        return None
    with refusing(source, f"its {file.name} is refused", field):
        values = json.loads(file.read_bytes())
        assert isinstance(values, dict), "it holds no object"
        try:
            check_generation_values(values)
        except ModelError as error:
            raise ModelError.of(field, str(source), f": its {error.message}") from error
        return GenerationConfig.from_pretrained(file.parent)


@contextmanager
def made_without_weights(source: str | Path) -> Iterator[None]:
    """Make a model on the meta device, where what goes wrong is its configuration's. Raises `ModelError`."""
    with refusing(source, "its config.json describes no model that can be made"), torch.device("meta"):
        yield


@contextmanager
def refusing(
    source: str | Path, what: str, field: str = FIELD, errors: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Turn `errors` of transformers into a `ModelError` that says `what`."""
    try:
        yield
    except SwiftKVError:
        raise
    except errors as error:
        raise ModelError.of(field, str(source), f": {what} ({one_line(error)})") from error


def one_line(error: Exception) -> str:
    """An error in one line, with its type where its text alone says little."""
    text = " ".join(line.strip() for line in str(error).splitlines() if line.strip())[:_LONGEST]
    plain = isinstance(error, OSError | ValueError | StrictDataclassError) or (
        isinstance(error, AssertionError) and text
    )
    return text if plain else f"{type(error).__name__}: {text}"


def _check_activation(values: Mapping[str, Any]) -> None:
    for key in ("hidden_act", "hidden_activation"):
        if (name := values.get(key, "silu")) not in ACT2FN:
            raise ModelError(
                f"config.json has {key} {name!r}; one of transformers' activations is accepted, as silu is",
                field=key,
                value=name,
            )
