"""Whether tasks that a job is measured on can be what they are called. Knows names and files, no harness.

Names of the harness and what files say are left to the worker, which looks before it trains.
"""

from __future__ import annotations

import os.path
from collections.abc import Sequence

from swiftkv_platform.errors import DataError, InvalidInputError
from swiftkv_platform.sources import OPEN, Access, PathSource, parse_location
from swiftkv_platform.specs import TaskSpec
from swiftkv_platform.specs.evaluation import BUILTIN_TASKS


def check_tasks(tasks: Sequence[str | TaskSpec], access: Access = OPEN) -> None:
    """Refuse the first task that cannot be run, naming its field.

    Raises:
        InvalidInputError: an unknown built-in task, one without `data_dir`, a task's file that is not there, or what is
            closed.
        DataError: `data_dir` is not there, lacks the files of a built-in task, or leads to what may not be read.
    """
    for index, task in enumerate(tasks):
        _check_task(TaskSpec(name=task) if isinstance(task, str) else task, f"evaluation.tasks[{index}]", access)


def _check_task(task: TaskSpec, field: str, access: Access) -> None:
    access.check_task(task, field)
    name, is_builtin = task.name, task.name.startswith("builtin:")
    if is_builtin and name not in BUILTIN_TASKS:
        known = " and ".join(BUILTIN_TASKS)
        raise InvalidInputError(f"{field} is {name!r}; the built-in tasks are {known}", field=field, value=name)
    if is_builtin and BUILTIN_TASKS[name] and task.data_dir is None:
        wanted = " and ".join(BUILTIN_TASKS[name])
        raise InvalidInputError(
            f"{field} is {name!r} without data_dir; a directory that holds {wanted} would do",
            field=f"{field}.data_dir",
            value=None,
        )
    file = parse_location(name, field=field) if task.names_file else None
    if isinstance(file, PathSource) and not os.path.isfile(file.path):  # noqa: PTH113 (which raises for some)
        raise InvalidInputError(
            f"{field} is {name!r}: no such file; a task's .yaml file, or a name that the harness knows, would do",
            field=field,
            value=name,
        )
    if (is_builtin or task.names_file) and task.data_dir is not None:
        _check_data(task.data_dir, BUILTIN_TASKS.get(name, ()), f"{field}.data_dir", access)


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
