"""Make relative paths of a spec absolute, or refuse them. Reads nothing, except whether a relative path exists.

A relative path has a meaning only in the caller's working directory. In a worker's, the same name may not exist, or may
be a hub id.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.sources.layout import ENDINGS
from swiftkv_platform.sources.names import PathSource, parse_location, parse_source
from swiftkv_platform.specs import JobSpec, TaskSpec
from swiftkv_platform.specs.evaluation import name_and_data, names_task_file

Section = TypeVar("Section", bound=BaseModel)
Kind = Literal["model", "data", "location"]
"""Kind of a named thing; a location is never a hub id."""
Change = Callable[[str, Kind, str], str]
"""(name, its kind, its place in the spec) -> new name."""


def absolute(name: str, kind: Kind, field: str) -> str:
    """Return `name`, made absolute if it is a path. Raises `InvalidInputError` if it is not a valid name."""
    path = _path(name, kind, field, relative_paths=True)
    return name if path is None else os.path.abspath(path)  # noqa: PTH100  # without resolving links


def absolute_paths(spec: JobSpec) -> JobSpec:
    """Return the spec with every path made absolute from this process's working directory. Raises `InvalidInputError`
    for a name that is not valid."""
    return _mapped(spec, absolute)


def absolute_change(place: str, value: Any) -> Any:
    """Return the value of the spec field at `place` with its paths made absolute."""
    if place == "model.name_or_path" and isinstance(value, str):
        return absolute(value, "model", place)
    if place == "data.sources" and isinstance(value, list):
        return [_absolute_source(source) for source in value]
    return value


def refuse_relative_paths(spec: JobSpec, *, relative_paths: bool) -> None:
    """Raise `InvalidInputError` for the first relative path, or path in another user's home: workers would resolve it
    differently.

    Args:
        relative_paths: as for `parse_source`.
    """

    def check(name: str, kind: Kind, field: str) -> str:
        path = _path(name, kind, field, relative_paths=relative_paths)
        if path is not None and is_relative(name):
            raise InvalidInputError.of(
                field, name, ", a relative path, which workers cannot resolve; use an absolute path that they can read"
            )
        return name

    _mapped(spec, check)


def is_relative(path: str) -> bool:
    """Whether another process sees something else at this path: below its own directory, or another user's home."""
    return not path.startswith("/")


def _path(name: str, kind: Kind, field: str, *, relative_paths: bool) -> Path | None:
    """Return the path that a name stands for; None if it is not a path."""
    source: Any
    if kind == "location":
        source = parse_location(name, field=field)
    else:
        suffixes = ENDINGS if kind == "data" else ()
        source = parse_source(name, field=field, suffixes=suffixes, relative_paths=relative_paths)
    return source.path if isinstance(source, PathSource) else None


def _absolute_source(source: Any) -> Any:
    name = source.get("name_or_path") if isinstance(source, dict) else None
    return {**source, "name_or_path": absolute(name, "data", "data.sources")} if isinstance(name, str) else source


def _mapped(spec: JobSpec, change: Change) -> JobSpec:
    """Return the spec with `change` applied to every name that may be a path; unchanged sections are not copied."""
    model = _updated(spec.model, name_or_path=change(spec.model.name_or_path, "model", "model.name_or_path"))
    sources = tuple(
        _updated(source, name_or_path=change(source.name_or_path, "data", f"data.sources[{i}].name_or_path"))
        for i, source in enumerate(spec.data.sources)
    )
    tasks = tuple(_task(task, f"evaluation.tasks[{i}]", change) for i, task in enumerate(spec.evaluation.tasks))
    data, evaluation = _updated(spec.data, sources=sources), _updated(spec.evaluation, tasks=tasks)
    return _updated(spec, model=model, data=data, evaluation=evaluation)


def _task(task: str | TaskSpec, field: str, change: Change) -> str | TaskSpec:
    name, data_dir = name_and_data(task)
    if names_task_file(name):
        name = change(name, "location", field)
    if isinstance(task, str):
        return name
    if data_dir is not None:
        data_dir = change(data_dir, "location", f"{field}.data_dir")
    return _updated(task, name=name, data_dir=data_dir)


def _updated(section: Section, **fields: Any) -> Section:
    """Return a copy of `section` with changed values, which count as set; itself if nothing differs."""
    changed = {name: value for name, value in fields.items() if getattr(section, name) != value}
    return section.model_copy(update=changed) if changed else section
