"""Paths of a spec: seen from the caller's directory, or refused where there is none. Reads nothing but
whether a relative path exists.

A relative path means something to the process that is given it. Workers have working directories of their own, where
the same name may be nothing, or a hub id.
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
"""Kind of what a name names; a location is never a hub id."""
Change = Callable[[str, Kind, str], str]
"""(name, its kind, its place in the spec) -> name."""


def absolute(name: str, kind: Kind, field: str) -> str:
    """Return `name`, a path as this process's absolute one. Raises `InvalidInputError`: it names nothing."""
    path = _path(name, kind, field, relative_paths=True)
    return name if path is None else os.path.abspath(path)  # noqa: PTH100  # which follows no links


def absolute_paths(spec: JobSpec) -> JobSpec:
    """The spec with every path seen from the working directory of this process. Raises `InvalidInputError`: a field
    that names nothing."""
    return _mapped(spec, absolute)


def absolute_change(place: str, value: Any) -> Any:
    """The value of one field of a spec, likewise."""
    if place == "model.name_or_path" and isinstance(value, str):
        return absolute(value, "model", place)
    if place == "data.sources" and isinstance(value, list):
        return [_absolute_source(source) for source in value]
    return value


def refuse_relative_paths(spec: JobSpec, *, relative_paths: bool) -> None:
    """Raises `InvalidInputError` naming the first relative path, which workers would look for elsewhere: below another
    directory, or another user's home.

    Args:
        relative_paths: as for `parse_source`.
    """

    def check(name: str, kind: Kind, field: str) -> str:
        path = _path(name, kind, field, relative_paths=relative_paths)
        if path is not None and is_relative(name):
            raise InvalidInputError.of(
                field, name, ", a relative path, which workers do not find; use an absolute path that they see"
            )
        return name

    _mapped(spec, check)


def is_relative(path: str) -> bool:
    """Whether another process sees something else at this path: below its own directory, or another user's home."""
    return not path.startswith("/")


def _path(name: str, kind: Kind, field: str, *, relative_paths: bool) -> Path | None:
    """The path that a name is; None for what is no path."""
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
    """The spec with `change` applied to every name that may be a path; sections without a change stay as they are."""
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
    """`section` with other values, which count as set; itself where nothing differs."""
    changed = {name: value for name, value in fields.items() if getattr(section, name) != value}
    return section.model_copy(update=changed) if changed else section
