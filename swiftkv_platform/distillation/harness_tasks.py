"""Tasks of lm-evaluation-harness: what a spec's names mean, files and those of this package included. Runs none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from swiftkv_platform.errors import DataError, InvalidInputError
from swiftkv_platform.specs import PAPER_TASKS, TaskSpec
from swiftkv_platform.specs.evaluation import BUILTIN_TASKS

FIELD = "evaluation.tasks"
_BUILTIN = "builtin:"
Fetch = Callable[[str], Path]
"""Brings an `s3://` object or prefix to this machine."""


@dataclass(frozen=True)
class Task:
    """A task as the harness takes it."""

    spec: TaskSpec
    source: str | Mapping[str, Any]
    """A name that the harness knows, or the configuration of a task, or of a group that holds those of its tasks."""


def resolve_tasks(specs: Sequence[str | TaskSpec], *, fetch: Fetch | None = None) -> list[Task]:
    """The tasks that a spec names, `paper` spelt out.

    Args:
        fetch: for `s3://` tasks and data.

    Raises:
        InvalidInputError: a file that is no task, or an unknown built-in one.
        DataError: a task's data is not where the spec says.
    """
    if specs:
        _check_installed()
    tasks = []
    for spec in (TaskSpec(name=spec) if isinstance(spec, str) else spec for spec in specs):
        tasks += [Task(paper, paper.name) for paper in PAPER_TASKS] if spec.name == "paper" else [_resolve(spec, fetch)]
    return tasks


def _check_installed() -> None:
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"{FIELD} needs {error.name}; pip install 'swiftkv-platform[eval]' would do", field=FIELD
        ) from error


def _resolve(spec: TaskSpec, fetch: Fetch | None) -> Task:
    if spec.name.startswith(_BUILTIN):
        return Task(spec, _builtin(spec, fetch))
    if not spec.names_file:
        return Task(spec, spec.name)
    parent, slash, name = spec.name.rpartition("/")
    path = _local(parent + slash, fetch) / name
    if not path.is_file():
        raise InvalidInputError(f"{FIELD}: there is no file {spec.name!r}", field=FIELD, value=spec.name)
    return Task(spec, _read(path, spec.name, _local(spec.data_dir, fetch) if spec.data_dir else path.parent))


def _local(address: str | None, fetch: Fetch | None) -> Path:
    if address is None:
        raise InvalidInputError(f"{FIELD}: a built-in task needs data_dir, where its files lie", field=FIELD)
    if not address.startswith("s3://"):
        return Path(address).expanduser().absolute()
    if fetch is None:
        raise InvalidInputError(f"{FIELD}: {address!r} cannot be fetched here", field=FIELD, value=address)
    try:
        return fetch(address)
    except DataError as error:
        raise DataError(f"{FIELD}: there is nothing at {address!r}", field=FIELD, value=address) from error


def _read(path: Path, name: str, data: Path) -> dict[str, Any]:
    """The configuration in a task's file, its `data_files` taken from the directory `data`."""
    from lm_eval.tasks._yaml_loader import load_yaml  # keeps `include` and `!function` what they are in the harness

    try:
        config: dict[str, Any] = load_yaml(path)
    except (OSError, ValueError, ImportError, AttributeError, yaml.YAMLError) as error:
        raise InvalidInputError(f"{FIELD}: {name} is no task: {error}", field=FIELD, value=name) from error
    if "group" in config:  # lm_eval 0.4.13 takes the list of its tasks for its name
        raise InvalidInputError(
            f"{FIELD}: {name} is a group, which the harness loads from no file; files of its tasks would do",
            field=FIELD,
            value=name,
        )
    if "task" not in config:
        raise InvalidInputError(f"{FIELD}: {name} names no task", field=FIELD, value=name)
    arguments = config.get("dataset_kwargs") or {}
    if "data_files" in arguments:
        config["dataset_kwargs"] = {**arguments, "data_files": _below(data, arguments["data_files"])}
    return config


def _below(directory: Path, names: Any) -> Any:
    """`data_files` of datasets, in whatever shape, with relative paths below `directory`."""
    if isinstance(names, Mapping):
        return {split: _below(directory, name) for split, name in names.items()}
    if isinstance(names, list):
        return [_below(directory, name) for name in names]
    if "://" in names:
        return names
    path = directory / names
    if not any(path.parent.glob(path.name)):
        raise DataError(f"{FIELD}: there is no file {str(path)!r}", field=FIELD, value=str(path))
    return str(path)


def _builtin(spec: TaskSpec, fetch: Fetch | None) -> dict[str, Any]:
    """A task of this package over its authors' own files, for machines that reach no hub."""
    if spec.name not in BUILTIN_TASKS:
        raise InvalidInputError(
            f"{FIELD} has {spec.name!r}; {' and '.join(BUILTIN_TASKS)} are known", field=FIELD, value=spec.name
        )
    data = _local(spec.data_dir, fetch)
    package = Path(str(files("swiftkv_platform.distillation") / "tasks"))
    if spec.name == "builtin:gsm8k":
        return _read(package / "gsm8k.yaml", spec.name, data)
    template = yaml.safe_load((package / "mmlu.yaml").read_text(encoding="utf-8"))
    subjects = sorted(path.name.removesuffix("_test.csv") for path in data.glob("test/*_test.csv"))
    if not subjects:
        raise DataError(f"{FIELD}: {str(data)!r} holds no test/*_test.csv", field=FIELD, value=str(data))
    return {
        "group": "mmlu_local",
        "task": [_subject(template, subject, data) for subject in subjects],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }


def _subject(template: Mapping[str, Any], subject: str, data: Path) -> dict[str, Any]:
    names = {"dev": f"dev/{subject}_dev.csv", "test": f"test/{subject}_test.csv"}
    title = subject.replace("_", " ")
    return {
        **template,
        "task": f"mmlu_local_{subject}",
        "description": f"The following are multiple choice questions (with answers) about {title}.\n\n",
        "dataset_kwargs": {**template["dataset_kwargs"], "data_files": _below(data, names)},
    }


@cache
def task_manager(include_defaults: bool) -> Any:
    """The harness's loader of tasks; its own ones, thousands of files to look at, only where they are asked for."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=include_defaults)


@contextmanager
def named(spec: TaskSpec) -> Iterator[None]:
    """Say which task it is that the harness stumbles over."""
    try:
        yield
    except (AttributeError, KeyError, OSError, ValueError, TypeError) as error:
        raise InvalidInputError(
            f"{FIELD}: the harness cannot load {spec.name!r}: {error}; `lm_eval ls tasks` lists what it knows",
            field=FIELD,
            value=spec.name,
        ) from error


def configurations(task: Task) -> list[Mapping[str, Any]]:
    """Return the configuration of a task or group, `!function` left unresolved where the harness holds it; of a tag,
    those of all its tasks."""
    from lm_eval.tasks._index import TaskIndex
    from lm_eval.tasks._yaml_loader import load_yaml

    if isinstance(task.source, Mapping):
        return [task.source]
    index = task_manager(True).task_index
    entry = index.get(task.source) or TaskIndex.entry_from_path(Path(task.source))
    if entry is None:
        close = get_close_matches(task.source, index, n=3)
        raise ValueError(f"it has no task of that name{', but ' + ', '.join(close) if close else ''}")
    members = [index[name] for name in sorted(entry.tags) if name in index] if entry.yaml_path is None else [entry]
    return [load_yaml(member.yaml_path, resolve_func=False) for member in members]
