"""Checks of a spec before anything runs: the teacher's layers, the data's columns, the tasks' files. Imports no torch.

Local paths and objects are read; a hub id is not checked, and the worker reports if it does not exist. The control
plane calls `check_spec` in a parser process.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from swiftkv_platform.contract.sweeps import GROUP_SIZE_FIELD, expand
from swiftkv_platform.control_plane.jobs.estimates import JobEstimate, estimate
from swiftkv_platform.data.checks import check_sources
from swiftkv_platform.errors import DataError, InvalidInputError, ModelError
from swiftkv_platform.planning import has_quantized_weights, read_architecture
from swiftkv_platform.planning.gates import forecast
from swiftkv_platform.sources import OPEN, Access, PathSource, S3Source, parse_location, parse_source
from swiftkv_platform.sources.names import refuse_relative_paths
from swiftkv_platform.sources.teacher_config import ReadObject, read_config_file, read_teacher_config, unusable
from swiftkv_platform.sources.untrusted_files import CONFIG_BYTES, checked_length
from swiftkv_platform.specs import JobSpec, TaskSpec
from swiftkv_platform.specs.base import MAX_LAYERS
from swiftkv_platform.specs.evaluation import BUILTIN_TASKS, name_and_data, names_task_file
from swiftkv_platform.storage.addresses import open_store

__all__ = ["ReadObject", "check_spec", "read_object", "validate"]


def read_object(store: str, key: str) -> bytes:
    """Read a small object of any store, to check a spec's sources. Raises `UnusableFileError` if it is too long."""
    data = b"".join(open_store(store, patient=False).stream(key, stop=CONFIG_BYTES + 1))
    return checked_length(data, CONFIG_BYTES)


def reads_files(spec: JobSpec) -> bool:
    """Whether checking a spec reads files or stored objects, rather than names only. Raises as `parse_source`."""
    names = {"model.name_or_path": spec.model.name_or_path}
    names |= {f"data.sources[{at}].name_or_path": source.name_or_path for at, source in enumerate(spec.data.sources)}
    parsed = (parse_source(name, field=field) for field, name in names.items())
    return any(isinstance(source, PathSource | S3Source) for source in parsed) or any(
        data is not None or names_task_file(name) for name, data in map(name_and_data, spec.evaluation.tasks)
    )


def check_spec(spec: JobSpec, access: Access) -> JobEstimate:
    """Check a spec that a caller sends to the control plane. Raises as `validate`, and `InvalidInputError` for a
    relative path."""
    access.check(spec)
    refuse_relative_paths(spec, relative_paths=not access.is_restricted)
    return validate(spec, access=access)


def validate(
    spec: JobSpec,
    read_object: ReadObject = read_object,
    *,
    config: Path | None = None,
    access: Access = OPEN,
    num_tokens: int | None = None,
) -> JobEstimate:
    """Check `spec` as far as this machine can.

    Args:
        config: the teacher's `config.json`, or its directory, read instead of the one at `model.name_or_path`.
        access: sources that the caller may read.
        num_tokens: tokens of an epoch, if they are known.

    Raises:
        ModelError: the teacher's configuration cannot be read, is of another family or quantisation, or has a value
            that no model can have.
        DataError: a source is missing, empty or without the columns of a known format, or a task's data is missing.
        InvalidInputError: the transformation does not fit the teacher, or a task does not exist. Names are checked
            before (`Access.check`).
        StorageError: an `s3://` address does not answer.
    """
    name = spec.model.name_or_path if config is None else str(config)
    values = read_teacher_config(name, read_object, access=access) if config is None else read_config_file(config)
    num_hidden_layers = None if values is None else _num_hidden_layers(values, name)
    sources = check_sources(spec.data.sources, access)
    check_tasks(spec.evaluation.tasks, access)
    if values is None or num_hidden_layers is None:
        return JobEstimate(sources=sources, gates=forecast(spec.evaluation))
    trial = _first_fitting_trial(spec, num_hidden_layers)
    return estimate(trial, values, sources, num_tokens=num_tokens)


def _first_fitting_trial(spec: JobSpec, num_hidden_layers: int) -> JobSpec:
    """The job, or the first trial that fits: a sweep may name a g that is too large for some of its l, and reports
    those trials as failed."""
    refused: InvalidInputError | None = None
    fitting: list[JobSpec] = []
    for trial in expand(spec):
        try:
            trial.spec.swiftkv.request.resolve(num_hidden_layers)
            fitting.append(trial.spec)
        except InvalidInputError as error:
            if error.field != GROUP_SIZE_FIELD:
                raise
            refused = error
    if not fitting:
        assert refused is not None, "a spec has a trial"
        raise refused
    return fitting[0]


def _num_hidden_layers(config: dict[str, Any], name: str) -> int:
    """Return the number of a teacher's layers. Raises `ModelError` for a `config.json` that no job can use."""
    try:
        read_architecture(config)
        has_quantized_weights(config)
    except ModelError as error:
        raise unusable(name, f"its {error.message}") from error
    value = config.get("num_hidden_layers")
    if not isinstance(value, int) or not 2 <= value <= MAX_LAYERS:
        accepted = f"expected a decoder of 2 to {MAX_LAYERS:,} layers"
        raise unusable(name, f"its config.json has num_hidden_layers {value!r:.80}; {accepted}")
    return value


def check_tasks(tasks: Sequence[str | TaskSpec], access: Access = OPEN) -> None:
    """Refuse the first task that cannot be run, naming its field. Raises `InvalidInputError`: an unknown built-in task,
    one without `data_dir`, or a task's file that does not exist; `DataError`: `data_dir` does not exist, lacks the
    files of a built-in task, or leads to files that may not be read."""
    for index, task in enumerate(tasks):
        _check_task(*name_and_data(task), f"evaluation.tasks[{index}]", access)


def _check_task(name: str, data_dir: str | None, field: str, access: Access) -> None:
    is_builtin, names_file = name.startswith("builtin:"), names_task_file(name)
    if is_builtin and name not in BUILTIN_TASKS:
        known = " and ".join(BUILTIN_TASKS)
        raise InvalidInputError(f"{field} is {name!r}; the built-in tasks are {known}", field=field, value=name)
    if is_builtin and BUILTIN_TASKS[name] and data_dir is None:
        wanted = " and ".join(BUILTIN_TASKS[name])
        message = f"{field} is {name!r} without data_dir; use a directory that holds {wanted}"
        raise InvalidInputError(message, field=f"{field}.data_dir", value=None)
    file = parse_location(name, field=field) if names_file else None
    if isinstance(file, PathSource) and not os.path.isfile(file.path):  # noqa: PTH113 (which raises for some)
        message = f"{field} is {name!r}: no such file; use a task's .yaml file, or a name that the harness knows"
        raise InvalidInputError(message, field=field, value=name)
    if (is_builtin or names_file) and data_dir is not None:
        _check_data(data_dir, BUILTIN_TASKS.get(name, ()), f"{field}.data_dir", access)


def _check_data(data_dir: str, patterns: Sequence[str], field: str, access: Access) -> None:
    location = access.location(data_dir, field)
    if not isinstance(location, PathSource):
        return
    try:
        directory = access.boundary.check(location.path, field)
        if not directory.is_dir():
            raise DataError(f"{field} is {data_dir!r}: no such directory", field=field, value=data_dir)
        missing = [pattern for pattern in patterns if not any(directory.glob(pattern))]
    except OSError as error:
        raise DataError(f"{field} is {data_dir!r}: it cannot be read", field=field, value=data_dir) from error
    if missing:
        raise DataError(f"{field} is {data_dir!r}: it holds no {missing[0]}", field=field, value=data_dir)
