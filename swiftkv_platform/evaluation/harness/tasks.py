"""Resolve the tasks of a spec for lm-evaluation-harness: names in its index, files, and this package's tasks.

Task files of the harness and of this package are trusted code. Names are looked up only in the harness's index, since
the harness itself would also open a file of that name. A job may use its own task files only if its sources are
unrestricted: templates are rendered in a sandbox, but `!function` runs the code that it names.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Protocol

import yaml
from jinja2 import TemplateError

from swiftkv_platform.errors import DataError, InvalidInputError
from swiftkv_platform.evaluation.harness.builtin import (
    build_humaneval_task,
    build_ifeval_task,
    build_needle_task,
    build_tool_call_task,
)
from swiftkv_platform.evaluation.harness.trust import find_code_risk
from swiftkv_platform.installing import make_install_command
from swiftkv_platform.sources import UNRESTRICTED, Access, PathSource
from swiftkv_platform.specs import PAPER_TASKS, TaskSpec
from swiftkv_platform.specs.evaluation import BUILTIN_TASKS, NEEDLE_PREFIX, find_task_directory, is_task_file_name

TASKS_FIELD = "evaluation.tasks"
_BUILTIN_PREFIX = "builtin:"
Fetch = Callable[[str], Path]
"""Downloads an `s3://` object or prefix to this machine and returns its path."""


class Generate(Protocol):
    """Generates the teacher's answers."""

    def __call__(self, prompts: Sequence[str], *, max_tokens: int, until: Sequence[str]) -> list[str]:
        """Return the answers to rendered prompts. `until`: texts that end an answer."""


def make_task_error(message: str, value: str | None = None) -> InvalidInputError:
    """Make an error for the field `evaluation.tasks`."""
    return InvalidInputError(f"{TASKS_FIELD}: {message}", field=TASKS_FIELD, value=value)


def _make_missing_data_error(message: str, path: object) -> DataError:
    return DataError(f"{TASKS_FIELD}: {message}", field=TASKS_FIELD, value=str(path))


@dataclass(frozen=True)
class Task:
    """A resolved task."""

    spec: TaskSpec
    source: str | Mapping[str, Any]
    """A name in the harness's index, or the configuration of a task or of a group with its tasks."""
    runs_code: bool = False
    """Whether the task may run text as code, which the operator must allow."""
    build: Callable[[Generate], Mapping[str, Any]] | None = None
    """Makes the configuration when the task runs, in place of `source`."""


def resolve_tasks(
    specs: Sequence[str | TaskSpec], *, fetch: Fetch | None = None, access: Access = UNRESTRICTED
) -> list[Task]:
    """Resolve the tasks of a spec; `paper` expands to the paper's tasks.

    Args:
        fetch: downloads `s3://` tasks and data.
        access: the job's read permissions, and whether its tasks may run code.

    Raises:
        InvalidInputError: a file that is not a task, an unknown built-in task, or a task that `access` forbids.
        DataError: a task's data is missing or forbidden.
    """
    if specs:
        check_harness_installed(TASKS_FIELD)
        _sandbox_templates()
    tasks = []
    for spec in (TaskSpec(name=spec) if isinstance(spec, str) else spec for spec in specs):
        access.check_task(spec, TASKS_FIELD)
        paper = [Task(paper, paper.name) for paper in PAPER_TASKS]
        tasks += paper if spec.name == "paper" else [_resolve_task(spec, fetch, access)]
    return [_check_code_allowed(task, access) for task in tasks]


def check_harness_installed(field: str) -> None:
    """Raise `InvalidInputError` about `field` if the harness is not installed."""
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"{field} needs {error.name}; run {make_install_command('eval')}", field=field
        ) from error


@cache
def _sandbox_templates() -> None:
    """Make the harness render templates in a sandbox, without access to the interpreter's internals."""
    from jinja2.sandbox import SandboxedEnvironment
    from lm_eval import utils

    own = utils.env
    sandbox = SandboxedEnvironment(
        loader=own.loader, undefined=own.undefined, keep_trailing_newline=own.keep_trailing_newline
    )
    sandbox.filters.update(own.filters)
    utils.env = sandbox


def _check_code_allowed(task: Task, access: Access) -> Task:
    """Set `runs_code` of a task. Raises `InvalidInputError` if the task runs code and the operator forbids that."""
    if isinstance(task.source, str):
        with add_task_name_to_errors(task.spec):
            why = find_code_risk(task.source, load_task_manager(True))
    else:  # a file, or a task of this package
        why = "it is marked as unsafe" if _is_marked_unsafe(task.source) else None
    if why is None:
        return task
    if not access.code_tasks:
        raise make_task_error(
            f"{task.spec.name!r} may run text, such as the model's answers, as code ({why}), which is not allowed; "
            "use a task that compares text, or set SWIFTKV_ALLOW_CODE_TASKS=1 where the control plane or `swiftkv "
            "evaluate` runs",
            task.spec.name,
        )
    return replace(task, runs_code=True)


def _is_marked_unsafe(source: Mapping[str, Any]) -> bool:
    """Whether a configuration, or one of its group's tasks, is marked as running generated code."""
    members = source.get("task")
    inner = members if isinstance(members, list) else []
    return bool(source.get("unsafe_code")) or any(
        _is_marked_unsafe(each) for each in inner if isinstance(each, Mapping)
    )


def _resolve_task(spec: TaskSpec, fetch: Fetch | None, access: Access) -> Task:
    if spec.name.startswith(_BUILTIN_PREFIX):
        return Task(spec, _build_builtin_task(spec, fetch, access))
    if not is_task_file_name(spec.name):
        return Task(spec, spec.name)
    parent, slash, name = spec.name.rpartition("/")
    path = _get_local_path(parent + slash, fetch, access) / name
    if not path.is_file():
        raise make_task_error(f"the file {spec.name!r} does not exist", spec.name)
    return Task(
        spec,
        _load_task_file(
            path, spec.name, _get_local_path(spec.data_dir, fetch, access) if spec.data_dir else path.parent
        ),
    )


def _get_local_path(address: str | None, fetch: Fetch | None, access: Access) -> Path:
    if address is None:
        raise make_task_error("a built-in task needs data_dir, the directory with its files")
    location = access.parse_location(address, TASKS_FIELD)
    if isinstance(location, PathSource):
        directory = access.boundary.check_path(location.path.absolute(), TASKS_FIELD)
        if directory.is_dir():
            access.boundary.check_tree(directory, TASKS_FIELD)
        return directory
    if fetch is None:
        raise make_task_error(f"{address!r} cannot be downloaded here; use a local directory", address)
    try:
        return fetch(address)
    except DataError as error:
        raise _make_missing_data_error(f"{address!r} does not exist", address) from error


def _load_task_file(path: Path, name: str, data: Path) -> dict[str, Any]:
    """Return the configuration in a task file, with its `data_files` below the directory `data`."""
    from lm_eval.tasks._yaml_loader import load_yaml  # resolves `include` and `!function` like the harness

    try:
        config: dict[str, Any] = load_yaml(path)
    except (OSError, ValueError, ImportError, AttributeError, yaml.YAMLError) as error:
        raise make_task_error(f"{name} is not a task file: {error}", name) from error
    if "group" in config:  # lm_eval 0.4.13 would use the list of tasks as the name
        raise make_task_error(
            f"{name} is a group, which the harness cannot load from a file; list the files of its tasks", name
        )
    if "task" not in config:
        raise make_task_error(f"{name} has no field `task`", name)
    arguments = config.get("dataset_kwargs") or {}
    if "data_files" in arguments:
        config["dataset_kwargs"] = {**arguments, "data_files": _resolve_data_files(data, arguments["data_files"])}
    return config


def _resolve_data_files(directory: Path, names: Any) -> Any:
    """Resolve `data_files` (a name, list or mapping of glob patterns) below `directory`, whose own name is escaped."""
    if isinstance(names, Mapping):
        return {split: _resolve_data_files(directory, name) for split, name in names.items()}
    if isinstance(names, list):
        return [_resolve_data_files(directory, name) for name in names]
    if "://" in names:
        return names
    path = directory / names
    add_task_name_to_errors = names if Path(names).is_absolute() else str(Path(glob.escape(str(directory)), names))
    if "::" in str(path):  # `datasets` would read the rest as a second location
        raise _make_missing_data_error(f"{str(path)!r} contains '::'; use another path", path)
    if not any(path.parent.glob(path.name)):
        raise _make_missing_data_error(f"the file {str(path)!r} does not exist", path)
    return add_task_name_to_errors


def _build_builtin_task(spec: TaskSpec, fetch: Fetch | None, access: Access) -> dict[str, Any]:
    """Return a task of this package over its authors' own files, for machines without access to the hub."""
    if spec.name not in BUILTIN_TASKS:
        raise InvalidInputError(
            f"{TASKS_FIELD} has {spec.name!r}; {', '.join(BUILTIN_TASKS)} are accepted",
            field=TASKS_FIELD,
            value=spec.name,
        )
    if spec.name == "builtin:tool-calls":
        return build_tool_call_task()
    data = find_task_directory(spec.name, _get_local_path(spec.data_dir, fetch, access), TASKS_FIELD)
    if spec.name == "builtin:ifeval":
        return build_ifeval_task(_get_only_file(spec.name, data))
    if spec.name == "builtin:humaneval":
        return build_humaneval_task(_get_only_file(spec.name, data))
    package = Path(str(files("swiftkv_platform.distillation") / "tasks"))
    if spec.name == "builtin:gsm8k":
        return _load_task_file(package / "gsm8k.yaml", spec.name, data)
    template = yaml.safe_load((package / "mmlu.yaml").read_text(encoding="utf-8"))
    subjects = sorted(path.name.removesuffix("_test.csv") for path in data.glob("test/*_test.csv"))
    return {
        "group": "mmlu_local",
        "task": [_build_subject_task(template, subject, data) for subject in subjects],
        "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}],
    }


def _get_only_file(name: str, data: Path) -> str:
    """Return the file of a built-in task that has one, as `data_files` names it."""
    [pattern] = BUILTIN_TASKS[name]
    found: str = _resolve_data_files(data, min(path.name for path in data.glob(pattern)))
    return found


def _build_subject_task(template: Mapping[str, Any], subject: str, data: Path) -> dict[str, Any]:
    names = {"dev": f"dev/{subject}_dev.csv", "test": f"test/{subject}_test.csv"}
    title = subject.replace("_", " ")
    return {
        **template,
        "task": f"mmlu_local_{subject}",
        "description": f"The following are multiple choice questions (with answers) about {title}.\n\n",
        "dataset_kwargs": {**template["dataset_kwargs"], "data_files": _resolve_data_files(data, names)},
    }


def build_needle_tasks(lengths: Sequence[int], num_samples: int, tokenizer: Any, *, chat: bool) -> list[Task]:
    """Return a task for each length.

    Args:
        lengths: tokens of a prompt, without the chat template.
        chat: use the chat template.
    """
    return [
        Task(
            TaskSpec(name=f"{NEEDLE_PREFIX}{length}", chat_template=chat),
            build_needle_task(tokenizer, length, num_samples),
        )
        for length in lengths
    ]


def is_instruction_tuned(tokenizer: Any) -> bool:
    """Whether the chat template contains added tokens of the vocabulary. Templates that were added to a base model, or
    have plain-text markers, contain none."""
    templates = tokenizer.chat_template
    if not templates:
        return False
    text = "".join(templates.values()) if isinstance(templates, dict) else str(templates)
    return any(token.content in text for token in tokenizer.added_tokens_decoder.values() if token.content.strip())


@cache
def load_task_manager(include_defaults: bool) -> Any:
    """Return the harness's task loader, with or without its own tasks, thousands of files to index."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=include_defaults)


@contextmanager
def add_task_name_to_errors(spec: TaskSpec) -> Iterator[None]:
    """Add the task's name to errors of the harness."""
    try:
        yield
    except (AttributeError, KeyError, OSError, ValueError, TypeError, TemplateError) as error:
        message = f"the harness cannot load {spec.name!r}: {error}; `lm_eval ls tasks` lists its tasks"
        raise make_task_error(message, spec.name) from error


def look_up_task(name: str) -> Any:
    """Return the harness's index entry for a task, group or tag. Raises `ValueError` if there is none."""
    index = load_task_manager(True).task_index
    if name not in index:
        close = get_close_matches(name, index, n=3)
        raise ValueError(f"unknown task{', similar names: ' + ', '.join(close) if close else ''}")
    return index[name]


def load_configurations(task: Task) -> list[Mapping[str, Any]]:
    """Return the configuration of a task or group, or those of all tasks of a tag. `!function` in the harness's files
    is not resolved."""
    from lm_eval.tasks._yaml_loader import load_yaml

    if isinstance(task.source, Mapping):
        return [task.source]
    index = load_task_manager(True).task_index
    entry = look_up_task(task.source)
    members = [index[name] for name in sorted(entry.tags) if name in index] if entry.yaml_path is None else [entry]
    return [load_yaml(member.yaml_path, resolve_func=False) for member in members]
