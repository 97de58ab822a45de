"""What can be known of a spec before anything runs: the teacher's layers, the data's columns. Imports no torch.

Local paths and objects are looked at; a hub id is taken at its word, and the worker reports if it does not exist.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from swiftkv_platform.errors import InvalidInputError, ModelError, ObjectNotFoundError
from swiftkv_platform.orchestration.data_checks import check_sources
from swiftkv_platform.orchestration.estimates import Estimate, estimate
from swiftkv_platform.planning import student_layer_map
from swiftkv_platform.specs import BUILTIN_TEACHER, JobSpec, looks_like_a_path
from swiftkv_platform.sweeps import GROUP_SIZE_FIELD, expand

ReadObject = Callable[[str, str], bytes]
"""(store address, key) -> content. Raises `ObjectNotFoundError` and `StorageError`."""

_BUILTIN = "builtin:"
_MODEL_FIELD = "model.name_or_path"


def validate(spec: JobSpec, read_object: ReadObject, *, config: Path | None = None) -> Estimate:
    """Check `spec` as far as this machine can.

    Args:
        config: the teacher's `config.json`, or its directory, read instead of the one at `model.name_or_path`.

    Raises:
        ModelError: the teacher's configuration cannot be read.
        DataError: a source is missing, empty or without the columns of a known format.
        InvalidInputError: the transformation does not fit the teacher.
        StorageError: an `s3://` address does not answer.
    """
    sources = check_sources(spec.data.sources)
    name = spec.model.name_or_path if config is None else str(config)
    values = _read_config(name, read_object) if config is None else _read_config_file(config)
    if values is None:
        return Estimate(sources=sources)
    trial = _first_fitting_trial(spec, _num_hidden_layers(values, name))
    return estimate(trial, values, sources)


def _first_fitting_trial(spec: JobSpec, num_hidden_layers: int) -> JobSpec:
    """The job, or the first trial that fits: a sweep may name a g that is too large for some of its l, and reports
    those trials as failed."""
    refused: InvalidInputError | None = None
    fitting: list[JobSpec] = []
    for trial in expand(spec):
        try:
            _check_layers(trial.spec, num_hidden_layers)
            fitting.append(trial.spec)
        except InvalidInputError as error:
            if error.field != GROUP_SIZE_FIELD:
                raise
            refused = error
    if not fitting:
        assert refused is not None, "a spec has a trial"
        raise refused
    return fitting[0]


def _check_layers(spec: JobSpec, num_hidden_layers: int) -> None:
    student_layer_map(
        num_hidden_layers,
        num_key_value_layers=spec.swiftkv.num_key_value_layers,
        prefill_reduction=spec.swiftkv.prefill_reduction,
        key_value_group_size=spec.swiftkv.key_value_group_size,
    )


def _read_config(name: str, read_object: ReadObject) -> dict[str, Any] | None:
    """The teacher's `config.json`; None for a hub id."""
    if name.startswith("s3://"):
        try:
            return _parse(read_object(name, "config.json"), name)
        except ObjectNotFoundError as error:
            raise _unreadable(name) from error
    if name == BUILTIN_TEACHER:
        return _parse((files("swiftkv_platform.demo") / "teacher" / "config.json").read_bytes(), name)
    if name.startswith(_BUILTIN):
        raise _unusable(name, f"the only built-in teacher is {BUILTIN_TEACHER}")
    path = Path(name).expanduser()
    return _read_config_file(path / "config.json", name) if path.exists() or looks_like_a_path(name) else None


def _read_config_file(path: Path, name: str | None = None) -> dict[str, Any]:
    """The configuration in a file, or in the `config.json` of a directory; `name` is what messages call it."""
    name = str(path) if name is None else name
    try:
        return _parse((path / "config.json" if path.is_dir() else path).read_bytes(), name)
    except OSError as error:
        raise _unreadable(name) from error


def _parse(text: bytes, name: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise _unusable(name, f"its config.json is no JSON ({error})") from error
    if not isinstance(config, dict):
        raise _unusable(name, "its config.json holds no object")
    return config


def _num_hidden_layers(config: dict[str, Any], name: str) -> int:
    value = config.get("num_hidden_layers")
    if not isinstance(value, int) or value < 2:
        raise _unusable(
            name, f"its config.json has num_hidden_layers {value!r}; a decoder of 2 or more layers would do"
        )
    return value


def _unreadable(name: str) -> ModelError:
    return _unusable(name, "its config.json cannot be read; a Hugging Face model directory would do")


def _unusable(name: str, why: str) -> ModelError:
    return ModelError(f"{_MODEL_FIELD} is {name!r}: {why}", field=_MODEL_FIELD, value=name)
