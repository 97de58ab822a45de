"""What can be known of a spec before anything runs: the teacher's layers, the data's columns. Imports no torch.

Local paths and objects are looked at; a hub id is taken at its word, and the worker reports if it does not exist.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from swiftkv_platform.errors import ModelError, ObjectNotFoundError
from swiftkv_platform.orchestration.data_checks import check_sources
from swiftkv_platform.planning import student_layer_map
from swiftkv_platform.specs import BUILTIN_TEACHER, JobSpec

ReadObject = Callable[[str, str], bytes]
"""(store address, key) -> content. Raises `ObjectNotFoundError` and `StorageError`."""

_BUILTIN = "builtin:"
_MODEL_FIELD = "model.name_or_path"


@dataclass(frozen=True)
class Estimate:
    """What the job would make of its teacher. All None where the teacher's configuration is on the hub."""

    num_hidden_layers: int | None = None
    num_key_value_layers: int | None = None
    num_kv_cache_layers: int | None = None
    prefill_layers_ratio: float | None = None
    """Share of the layers that a prompt token runs through."""
    kv_bytes_ratio: float | None = None
    """KV bytes per token relative to the teacher's."""


def validate(spec: JobSpec, read_object: ReadObject) -> Estimate:
    """Check `spec` as far as this machine can.

    Raises:
        ModelError: the teacher's configuration cannot be read.
        DataError: a source is missing, empty or without the columns of a known format.
        InvalidInputError: the transformation does not fit the teacher.
        StorageError: an `s3://` address does not answer.
    """
    check_sources(spec.data.sources)
    config = _read_config(spec.model.name_or_path, read_object)
    if config is None:
        return Estimate()
    layers = student_layer_map(
        _num_hidden_layers(config, spec.model.name_or_path),
        num_key_value_layers=spec.swiftkv.num_key_value_layers,
        prefill_reduction=spec.swiftkv.prefill_reduction,
        key_value_group_size=spec.swiftkv.key_value_group_size,
    )
    total = layers.num_hidden_layers
    return Estimate(
        num_hidden_layers=total,
        num_key_value_layers=layers.num_key_value_layers,
        num_kv_cache_layers=layers.num_kv_cache_layers,
        prefill_layers_ratio=layers.num_key_value_layers / total,
        kv_bytes_ratio=layers.num_kv_cache_layers / total,
    )


def _read_config(name: str, read_object: ReadObject) -> dict[str, Any] | None:
    """The teacher's `config.json`; None for a hub id."""
    try:
        if name == BUILTIN_TEACHER:
            text = (files("swiftkv_platform.demo") / "teacher" / "config.json").read_bytes()
        elif name.startswith(_BUILTIN):
            raise _unusable(name, f"the only built-in teacher is {BUILTIN_TEACHER}")
        elif name.startswith("s3://"):
            text = read_object(name, "config.json")
        elif Path(name).expanduser().exists() or _looks_like_a_path(name):
            text = (Path(name).expanduser() / "config.json").read_bytes()
        else:
            return None
        config = json.loads(text)
    except (OSError, ObjectNotFoundError) as error:
        raise _unusable(name, "its config.json cannot be read; a Hugging Face model directory would do") from error
    except ValueError as error:
        raise _unusable(name, f"its config.json is no JSON ({error})") from error
    if not isinstance(config, dict):
        raise _unusable(name, "its config.json holds no object")
    return config


def _looks_like_a_path(name: str) -> bool:
    """Whether a name that does not exist here cannot be a hub id either."""
    return name.startswith(("/", ".", "~")) or name.count("/") > 1


def _num_hidden_layers(config: dict[str, Any], name: str) -> int:
    value = config.get("num_hidden_layers")
    if not isinstance(value, int) or value < 2:
        raise _unusable(
            name, f"its config.json has num_hidden_layers {value!r}; a decoder of 2 or more layers would do"
        )
    return value


def _unusable(name: str, why: str) -> ModelError:
    return ModelError(f"{_MODEL_FIELD} is {name!r}: {why}", field=_MODEL_FIELD, value=name)
