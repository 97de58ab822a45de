"""Resolve the task names of a spec, including files and this package's tasks, for lm-evaluation-harness. Runs none.

The task files of the harness and of this package are trusted code. A name is looked up in the harness's index only,
since the harness itself would also open a file of that name. A job may bring its own files only if its sources are
unrestricted: their templates are rendered in a sandbox like all others, but `!function` runs the code it names.
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
from typing import Any

import yaml
from jinja2 import TemplateError

from swiftkv_platform.contract.verdicts import NEEDLE_PREFIX
from swiftkv_platform.errors import DataError, InvalidInputError
from swiftkv_platform.evaluation.harness.builtin import IFEVAL_FILE, ifeval, needle, tool_calls
from swiftkv_platform.evaluation.harness.trust import why_untrusted
from swiftkv_platform.installing import make_install_command
from swiftkv_platform.sources import UNRESTRICTED, Access, PathSource
from swiftkv_platform.specs import PAPER_TASKS, TaskSpec
from swiftkv_platform.specs.evaluation import BUILTIN_TASKS, is_task_file_name

FIELD = "evaluation.tasks"
_BUILTIN = "builtin:"
Fetch = Callable[[str], Path]
"""Downloads an `s3://` object or prefix to this machine and returns its path."""


def refusal(what: str, value: str | None = None) -> InvalidInputError:
    """Return an error about `evaluation.tasks`."""
    return InvalidInputError(f"{FIELD}: {what}", field=FIELD, value=value)


def _missing(what: str, path: object) -> DataError:
    return DataError(f"{FIELD}: {what}", field=FIELD, value=str(path))


@dataclass(frozen=True)
class Task:
    """A task in the harness's form."""

    spec: TaskSpec
    source: str | Mapping[str, Any]
    """A name in the harness's index, or the configuration of a task or of a group with its tasks."""
    runs_code: bool = False
    """Whether it may run text as code, which the operator has to allow."""


def resolve_tasks(
    specs: Sequence[str | TaskSpec], *, fetch: Fetch | None = None, access: Access = UNRESTRICTED
) -> list[Task]:
    """Resolve the tasks that a spec names; `paper` expands to its tasks.

    Args:
        fetch: for `s3://` tasks and data.
        access: the job's read permissions, and whether its tasks may run code.

    Raises:
        InvalidInputError: a file that is no task, an unknown built-in task, or one that `access` forbids.
        DataError: a task's data is not where the spec says, or may not be read.
    """
    if specs:
        _check_installed()
        _sandbox_templates()
    tasks = []
    for spec in (TaskSpec(name=spec) if isinstance(spec, str) else spec for spec in specs):
        access.check_task(spec, FIELD)
        paper = [Task(paper, paper.name) for paper in PAPER_TASKS]
        tasks += paper if spec.name == "paper" else [_resolve(spec, fetch, access)]
    return [_allowed(task, access) for task in tasks]


def _check_installed() -> None:
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"{FIELD} needs {error.name}; use {make_install_command('eval')}", field=FIELD
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


def _allowed(task: Task, access: Access) -> Task:
    """`task`, marked if it may run code. Raises `InvalidInputError` if it may not."""
    if isinstance(task.source, str):
        with named(task.spec):
            why = why_untrusted(task.source, task_manager(True))
    else:  # a file of the job or a task of this package
        why = "it is marked as unsafe" if _is_marked(task.source) else None
    if why is None:
        return task
    if not access.code_tasks:
        raise refusal(
            f"{task.spec.name!r} may run text, such as the model's answers, as code ({why}), which this platform's "
            "operator does not allow (SWIFTKV_ALLOW_CODE_TASKS); use a task that compares text",
            task.spec.name,
        )
    return replace(task, runs_code=True)


def _is_marked(source: Mapping[str, Any]) -> bool:
    """Whether the configuration of a task, or one in a group, is marked as running generated code."""
    members = source.get("task")
    inner = members if isinstance(members, list) else []
    return bool(source.get("unsafe_code")) or any(_is_marked(each) for each in inner if isinstance(each, Mapping))


def _resolve(spec: TaskSpec, fetch: Fetch | None, access: Access) -> Task:
    if spec.name.startswith(_BUILTIN):
        return Task(spec, _builtin(spec, fetch, access))
    if not is_task_file_name(spec.name):
        return Task(spec, spec.name)
    parent, slash, name = spec.name.rpartition("/")
    path = _local(parent + slash, fetch, access) / name
    if not path.is_file():
        raise refusal(f"there is no file {spec.name!r}", spec.name)
    return Task(spec, _read(path, spec.name, _local(spec.data_dir, fetch, access) if spec.data_dir else path.parent))


def _local(address: str | None, fetch: Fetch | None, access: Access) -> Path:
    if address is None:
        raise refusal("a built-in task needs data_dir, the directory of its files")
    location = access.parse_location(address, FIELD)
    if isinstance(location, PathSource):
        directory = access.boundary.check_path(location.path.absolute(), FIELD)
        if directory.is_dir():
            access.boundary.check_tree(directory, FIELD)
        return directory
    if fetch is None:
        raise refusal(f"{address!r} cannot be fetched here", address)
    try:
        return fetch(address)
    except DataError as error:
        raise _missing(f"there is nothing at {address!r}", address) from error


def _read(path: Path, name: str, data: Path) -> dict[str, Any]:
    """The configuration in a task's file, its `data_files` taken from the directory `data`."""
    from lm_eval.tasks._yaml_loader import load_yaml  # leaves `include` and `!function` as they are in the harness

    try:
        config: dict[str, Any] = load_yaml(path)
    except (OSError, ValueError, ImportError, AttributeError, yaml.YAMLError) as error:
        raise refusal(f"{name} is not a task: {error}", name) from error
    if "group" in config:  # lm_eval 0.4.13 takes the list of tasks for the name
        raise refusal(
            f"{name} is a group, which the harness cannot load from a file; name the files of its tasks", name
        )
    if "task" not in config:
        raise refusal(f"{name} names no task", name)
    arguments = config.get("dataset_kwargs") or {}
    if "data_files" in arguments:
        config["dataset_kwargs"] = {**arguments, "data_files": _below(data, arguments["data_files"])}
    return config


def _below(directory: Path, names: Any) -> Any:
    """Resolve `data_files` of datasets, of any shape, below `directory`. They are glob patterns; the directory's name
    is escaped."""
    if isinstance(names, Mapping):
        return {split: _below(directory, name) for split, name in names.items()}
    if isinstance(names, list):
        return [_below(directory, name) for name in names]
    if "://" in names:
        return names
    path = directory / names
    named = names if Path(names).is_absolute() else str(Path(glob.escape(str(directory)), names))
    if "::" in str(path):  # `datasets` would read the rest as another location
        raise _missing(f"{str(path)!r} has '::' in it; use a path without", path)
    if not any(path.parent.glob(path.name)):
        raise _missing(f"there is no file {str(path)!r}", path)
    return named


def _builtin(spec: TaskSpec, fetch: Fetch | None, access: Access) -> dict[str, Any]:
    """A task of this package over its authors' own files, for machines that reach no hub."""
    if spec.name not in BUILTIN_TASKS:
        raise InvalidInputError(
            f"{FIELD} has {spec.name!r}; {', '.join(BUILTIN_TASKS)} are accepted", field=FIELD, value=spec.name
        )
    if spec.name == "builtin:tool-calls":
        return tool_calls()
    data = _local(spec.data_dir, fetch, access)
    if spec.name == "builtin:ifeval":
        return ifeval(_below(data, IFEVAL_FILE))
    package = Path(str(files("swiftkv_platform.distillation") / "tasks"))
    if spec.name == "builtin:gsm8k":
        return _read(package / "gsm8k.yaml", spec.name, data)
    template = yaml.safe_load((package / "mmlu.yaml").read_text(encoding="utf-8"))
    subjects = sorted(path.name.removesuffix("_test.csv") for path in data.glob("test/*_test.csv"))
    if not subjects:
        raise _missing(f"{str(data)!r} holds no test/*_test.csv", data)
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


def needle_tasks(lengths: Sequence[int], num_samples: int, tokenizer: Any, *, chat: bool) -> list[Task]:
    """A task for each length.

    Args:
        lengths: tokens of a prompt without the chat template's.
        chat: prompt through the chat template.
    """
    return [
        Task(TaskSpec(name=f"{NEEDLE_PREFIX}{length}", chat_template=chat), needle(tokenizer, length, num_samples))
        for length in lengths
    ]


def is_instruction_tuned(tokenizer: Any) -> bool:
    """Whether the chat template contains added tokens of the vocabulary, so that the model was trained on turns.
    Templates lent to a base model, or with markers in plain text, contain none."""
    templates = tokenizer.chat_template
    if not templates:
        return False
    text = "".join(templates.values()) if isinstance(templates, dict) else str(templates)
    return any(token.content in text for token in tokenizer.added_tokens_decoder.values() if token.content.strip())


@cache
def task_manager(include_defaults: bool) -> Any:
    """Return the harness's task loader; its own tasks, thousands of files to index, are included on request only."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=include_defaults)


@contextmanager
def named(spec: TaskSpec) -> Iterator[None]:
    """Add the task's name to errors that the harness raises."""
    try:
        yield
    except (AttributeError, KeyError, OSError, ValueError, TypeError, TemplateError) as error:
        what = f"the harness cannot load {spec.name!r}: {error}; `lm_eval ls tasks` lists what it knows"
        raise refusal(what, spec.name) from error


def known(name: str) -> Any:
    """Return the harness's index entry for a task, group or tag. Raises `ValueError` if there is none."""
    index = task_manager(True).task_index
    if name not in index:
        close = get_close_matches(name, index, n=3)
        raise ValueError(f"it has no task of that name{', but ' + ', '.join(close) if close else ''}")
    return index[name]


def configurations(task: Task) -> list[Mapping[str, Any]]:
    """Return the configuration of a task or group, or for a tag those of all its tasks. `!function` in the harness's
    files is left unresolved."""
    from lm_eval.tasks._yaml_loader import load_yaml

    if isinstance(task.source, Mapping):
        return [task.source]
    index = task_manager(True).task_index
    entry = known(task.source)
    members = [index[name] for name in sorted(entry.tags) if name in index] if entry.yaml_path is None else [entry]
    return [load_yaml(member.yaml_path, resolve_func=False) for member in members]
