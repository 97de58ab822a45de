"""Tasks of lm-evaluation-harness for teacher and student, one set of weights in either mode. Knows how tasks are named
and scored, not what their scores decide.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict

from swiftkv_platform.errors import DataError, InvalidInputError
from swiftkv_platform.specs import PAPER_TASKS, TaskSpec
from swiftkv_platform.specs.evaluation import BUILTIN_TASKS, points_lost

_FIELD = "evaluation.tasks"
_BUILTIN = "builtin:"
_BOOTSTRAP_ITERATIONS = 1000
"""For standard errors that have no closed form."""
Fetch = Callable[[str], Path]
"""Brings an `s3://` object or prefix to this machine."""


class TaskScore(BaseModel):
    """One task, answered by teacher and student."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    task: str
    metric: str
    """The harness's name of it, with its filter where it has one: `acc_norm`, `exact_match,strict_match`."""
    num_fewshot: int
    chat_template: bool
    num_samples: int
    teacher: float
    student: float
    teacher_stderr: float | None
    """Standard error of the teacher's score; None where the harness gives none."""
    student_stderr: float | None
    higher_is_better: bool = True
    """False for a metric of which the harness says that less is better."""

    @property
    def drop(self) -> float:
        """What the student loses against the teacher, negative where it wins: points of a hundred; of a metric outside
        0..1, or of which less is better, percent of the teacher's score."""
        return points_lost(self.teacher, self.student, higher_is_better=self.higher_is_better)


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


def check_tasks(specs: Sequence[str | TaskSpec], tokenizer: Any, *, fetch: Fetch | None = None) -> None:
    """Refuse, without a model, network or any data read, what `run_tasks` would refuse of these tasks.

    Tasks of the harness that only their own code describes are taken at their word as to metrics.

    Args:
        fetch: for `s3://` tasks and data.

    Raises:
        InvalidInputError: a task or metric that the harness does not know, a file that is no task, or a chat template
            that the tokenizer lacks.
        DataError: a task's data is not where the spec says.
    """
    for task in resolve_tasks(specs, fetch=fetch):
        _templated(task.spec, tokenizer)
        with _quiet(), _named(task.spec):
            configs = _configs(task)
            declared = [(config.get("group") or config["task"], _declared_metrics(config)) for config in configs]
        for name, metrics in declared:
            if metrics is not None:
                _choose_metric(task.spec, name, metrics)


def run_tasks(
    model: Any, tokenizer: Any, tasks: Sequence[Task], *, batch_size: int, limit: int | None = None
) -> list[TaskScore]:
    """Let both modes of `model` answer every task.

    Log-likelihoods come from a forward pass of every token through every layer (no `logits_to_keep` is given), so
    nothing that SwiftKV skips in prefill is scored.

    Args:
        model: a SwiftKV causal language model with its teacher's projections; left in the mode it came in.
        limit: samples of each task; None takes all.

    Raises:
        InvalidInputError: a task or metric that the harness does not know, or a chat template that the tokenizer lacks.
        ModelError: the model was exported without its teacher.
    """
    if not tasks:
        return []
    from lm_eval.models.huggingface import HFLM

    mode, was_training = model.model.swiftkv_enabled, model.training
    model.eval()
    scores: list[TaskScore] = []
    try:
        with _quiet():
            manager = task_manager(any(isinstance(task.source, str) for task in tasks))
            language_model = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=batch_size)
            for task in tasks:
                loaded = _load(manager, task)
                answers = []
                for enabled in (False, True):
                    model.swiftkv(enabled)
                    answers.append(_answer(language_model, manager, task, loaded, limit))
                scores += _scores(task, *answers)
    finally:
        model.swiftkv(mode).train(was_training)
    return scores


@cache
def task_manager(include_defaults: bool) -> Any:
    """The harness's loader of tasks; its own ones, thousands of files to look at, only where they are asked for."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_defaults=include_defaults)


def _check_installed() -> None:
    try:
        import lm_eval  # noqa: F401
    except ModuleNotFoundError as error:
        raise InvalidInputError(
            f"{_FIELD} needs {error.name}; pip install 'swiftkv-platform[eval]' would do", field=_FIELD
        ) from error


def _resolve(spec: TaskSpec, fetch: Fetch | None) -> Task:
    if spec.name.startswith(_BUILTIN):
        return Task(spec, _builtin(spec, fetch))
    if not spec.names_file:
        return Task(spec, spec.name)
    parent, slash, name = spec.name.rpartition("/")
    path = _local(parent + slash, fetch) / name
    if not path.is_file():
        raise InvalidInputError(f"{_FIELD}: there is no file {spec.name!r}", field=_FIELD, value=spec.name)
    return Task(spec, _read(path, spec.name, _local(spec.data_dir, fetch) if spec.data_dir else path.parent))


def _local(address: str | None, fetch: Fetch | None) -> Path:
    if address is None:
        raise InvalidInputError(f"{_FIELD}: a built-in task needs data_dir, where its files lie", field=_FIELD)
    if not address.startswith("s3://"):
        return Path(address).expanduser().absolute()
    if fetch is None:
        raise InvalidInputError(f"{_FIELD}: {address!r} cannot be fetched here", field=_FIELD, value=address)
    try:
        return fetch(address)
    except DataError as error:
        raise DataError(f"{_FIELD}: there is nothing at {address!r}", field=_FIELD, value=address) from error


def _read(path: Path, name: str, data: Path) -> dict[str, Any]:
    """The configuration in a task's file, its `data_files` taken from the directory `data`."""
    from lm_eval.tasks._yaml_loader import load_yaml  # keeps `include` and `!function` what they are in the harness

    try:
        config: dict[str, Any] = load_yaml(path)
    except (OSError, ValueError, ImportError, AttributeError, yaml.YAMLError) as error:
        raise InvalidInputError(f"{_FIELD}: {name} is no task: {error}", field=_FIELD, value=name) from error
    if "group" in config:  # lm_eval 0.4.13 takes the list of its tasks for its name
        raise InvalidInputError(
            f"{_FIELD}: {name} is a group, which the harness loads from no file; files of its tasks would do",
            field=_FIELD,
            value=name,
        )
    if "task" not in config:
        raise InvalidInputError(f"{_FIELD}: {name} names no task", field=_FIELD, value=name)
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
        raise DataError(f"{_FIELD}: there is no file {str(path)!r}", field=_FIELD, value=str(path))
    return str(path)


def _builtin(spec: TaskSpec, fetch: Fetch | None) -> dict[str, Any]:
    """A task of this package over its authors' own files, for machines that reach no hub."""
    if spec.name not in BUILTIN_TASKS:
        raise InvalidInputError(
            f"{_FIELD} has {spec.name!r}; {' and '.join(BUILTIN_TASKS)} are known", field=_FIELD, value=spec.name
        )
    data = _local(spec.data_dir, fetch)
    package = Path(str(files("swiftkv_platform.distillation") / "tasks"))
    if spec.name == "builtin:gsm8k":
        return _read(package / "gsm8k.yaml", spec.name, data)
    template = yaml.safe_load((package / "mmlu.yaml").read_text(encoding="utf-8"))
    subjects = sorted(path.name.removesuffix("_test.csv") for path in data.glob("test/*_test.csv"))
    if not subjects:
        raise DataError(f"{_FIELD}: {str(data)!r} holds no test/*_test.csv", field=_FIELD, value=str(data))
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


def _load(manager: Any, task: Task) -> Any:
    """The harness's own task or group, its data read, or a list of them."""
    from lm_eval.api.group import Group, GroupConfig
    from lm_eval.api.task import ConfigurableTask

    if isinstance(task.source, Mapping) and "group" in task.source:
        group = Group.from_config(GroupConfig(**{**task.source, "task": []}))
        for member in task.source["task"]:
            group.add(ConfigurableTask(config=dict(member)))
        return [group]
    with _named(task.spec):
        loaded = manager.load([task.source])
    inner = {name for names in loaded["group_map"].values() for name in names}
    inner |= {member.task_name for group in loaded["groups"].values() for member in group.get_all_tasks()}
    return [item for kind in ("groups", "tasks") for name, item in loaded[kind].items() if name not in inner]


@contextmanager
def _named(spec: TaskSpec) -> Iterator[None]:
    """Say which task it is that the harness stumbles over."""
    try:
        yield
    except (AttributeError, KeyError, OSError, ValueError, TypeError) as error:
        raise InvalidInputError(
            f"{_FIELD}: the harness cannot load {spec.name!r}: {error}; `lm_eval ls tasks` lists what it knows",
            field=_FIELD,
            value=spec.name,
        ) from error


def _configs(task: Task) -> list[Mapping[str, Any]]:
    """What is written of a task or group, `!function` left unresolved where the harness holds it; of a tag, of all its
    tasks."""
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


def _declared_metrics(config: Mapping[str, Any]) -> dict[str, bool | None] | None:
    """Whether more is better, by the keys of the scores that a configuration promises, a key without a filter for any;
    None where only a run can tell."""
    import lm_eval.api.metrics  # noqa: F401 (registers the metrics)
    from lm_eval.api.registry import DEFAULT_METRIC_REGISTRY, METRIC_REGISTRY, is_higher_better

    if "group" in config:
        listed = config.get("aggregate_metric_list") or []
        listed = [listed] if isinstance(listed, Mapping) else listed
        keys: dict[str, bool | None] = {}
        for item in listed:
            filters = item.get("filter_list") or []
            filters = [filters] if isinstance(filters, str) else filters
            keys |= dict.fromkeys([f"{item['metric']},{name}" for name in filters] or [item["metric"]], True)
        return keys
    if "class" in config or config.get("process_results"):
        return None
    names = DEFAULT_METRIC_REGISTRY[config.get("output_type", "generate_until")]
    metrics = config.get("metric_list") or [{"metric": name} for name in names]
    if any(item.get("hf_evaluate") or item["metric"] not in METRIC_REGISTRY for item in metrics):
        return None
    return {
        f"{item['metric']},{name}": item.get("higher_is_better", is_higher_better(item["metric"]))
        for item in metrics
        for name in [chain["name"] for chain in config.get("filter_list") or ()] or ["none"]
    }


def _answer(language_model: Any, manager: Any, task: Task, loaded: Any, limit: int | None) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    templated = _templated(task.spec, language_model.tokenizer)
    try:
        answers: dict[str, Any] = simple_evaluate(
            model=language_model,
            tasks=loaded,
            num_fewshot=task.spec.num_fewshot,
            limit=limit,
            bootstrap_iters=_BOOTSTRAP_ITERATIONS,
            log_samples=False,
            apply_chat_template=templated,
            fewshot_as_multiturn=templated,
            task_manager=manager,
        )
    except (AssertionError, ValueError) as error:  # how the harness refuses, e.g. a prompt longer than the context
        raise InvalidInputError(
            f"{_FIELD}: the harness cannot run {task.spec.name!r}: {error}", field=_FIELD, value=task.spec.name
        ) from error
    return answers


def _templated(spec: TaskSpec, tokenizer: Any) -> bool:
    if spec.chat_template and not tokenizer.chat_template:
        if spec in PAPER_TASKS:
            return False  # a base model has no template, and its scores are compared with its own teacher's
        raise InvalidInputError(
            f"{_FIELD}: {spec.name} asks for chat_template, and the model's tokenizer has none", field=_FIELD
        )
    return spec.chat_template


def _scores(task: Task, teacher: dict[str, Any], student: dict[str, Any]) -> Iterator[TaskScore]:
    """Of the tasks in the answers those that belong to no group in them."""
    members = {name for names in teacher["group_subtasks"].values() for name in names}
    for name, row in teacher["results"].items():
        if name in members:
            continue
        metrics = _measured_metrics(name, row, teacher)
        metric = _choose_metric(task.spec, name, metrics)
        error = metric.replace(",", "_stderr,", 1)
        yield TaskScore(
            task=name,
            metric=metric.removesuffix(",none"),
            num_fewshot=_num_fewshot(name, teacher),
            chat_template=bool(task.spec.chat_template and teacher.get("chat_template_sha")),
            num_samples=_num_samples(name, teacher),
            teacher=row[metric],
            student=student["results"][name][metric],
            teacher_stderr=_number(row.get(error)),
            student_stderr=_number(student["results"][name].get(error)),
            higher_is_better=metrics[metric] is not False,
        )


def _measured_metrics(name: str, row: Mapping[str, Any], answers: Mapping[str, Any]) -> dict[str, bool | None]:
    """Whether more is better, by the keys of a row's scores; None where the harness does not say."""
    better: dict[str, bool | None] = {}
    for leaf in (name, *_leaves(name, answers)):
        better |= answers["higher_is_better"].get(leaf, {})
    return {
        key: better.get(key.partition(",")[0])
        for key, value in row.items()
        if "," in key and "_stderr" not in key and _number(value) is not None
    }


def _choose_metric(spec: TaskSpec, name: str, metrics: Mapping[str, bool | None]) -> str:
    """The key of `spec.metric`, or of the first metric of which more is better."""
    for key, more_is_better in metrics.items():
        if more_is_better if spec.metric is None else _means(spec.metric, key):
            return key
    if not metrics:
        raise InvalidInputError(
            f"{_FIELD}: {name} has no score of its own; its tasks by their names would do", field=_FIELD, value=name
        )
    known = ", ".join(key.removesuffix(",none") for key in metrics)
    raise InvalidInputError(
        f"{_FIELD}: {name} has no metric {spec.metric!r}; it has {known}"
        if spec.metric
        else f"{_FIELD}: {name} has no metric of which more is better; name one of {known}",
        field=_FIELD,
        value=spec.metric,
    )


def _means(wanted: str, key: str) -> bool:
    """Whether two names of a metric are one, where only one has a filter too."""
    both_filtered = "," in wanted and "," in key
    return wanted == key if both_filtered else wanted.partition(",")[0] == key.partition(",")[0]


def _leaves(name: str, answers: Mapping[str, Any]) -> Iterator[str]:
    """The tasks below a group, groups in groups included."""
    for child in answers["group_subtasks"].get(name, ()):
        yield child
        yield from _leaves(child, answers)


def _num_fewshot(name: str, answers: Mapping[str, Any]) -> int:
    shots = [answers["n-shot"][leaf] for leaf in (name, *_leaves(name, answers)) if leaf in answers["n-shot"]]
    return int(shots[0]) if shots else 0


def _num_samples(name: str, answers: Mapping[str, Any]) -> int:
    samples = answers["n-samples"]
    leaves = {leaf for leaf in (name, *_leaves(name, answers)) if leaf in samples}
    return sum(int(samples[leaf]["effective"]) for leaf in leaves)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the harness's notes and progress bars, hundreds for a large group, out of a job's log."""
    import datasets

    logger, level = logging.getLogger("lm_eval"), logging.getLogger("lm_eval").level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
            yield
    finally:
        logger.setLevel(level)
