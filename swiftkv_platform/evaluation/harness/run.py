"""Run lm-evaluation-harness tasks on teacher and student, which are the two modes of one set of weights, and read the
scores: the metric that counts, from the task's configuration or a run, and intervals of the points lost, from samples
that both modes answered.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from swiftkv_platform.evaluation.harness.builtin import environment
from swiftkv_platform.evaluation.harness.tasks import (
    Fetch,
    Task,
    configurations,
    is_instruction_tuned,
    known,
    named,
    refusal,
    resolve_tasks,
    task_manager,
)
from swiftkv_platform.evaluation.paired import Interval, bootstrap_interval, mean_of, share_interval, unpaired_interval
from swiftkv_platform.evaluation.parts import NoParts, Parts, measured
from swiftkv_platform.evaluation.quality import ALONE, evaluation_mode
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.sources import UNRESTRICTED, Access
from swiftkv_platform.specs import PAPER_TASKS, EvaluationSpec, TaskSpec
from swiftkv_platform.specs.evaluation import INSTRUCTION_TASKS, compute_points_lost, compute_points_per_unit, is_share

Aggregations = Mapping[str, Callable[[Sequence[Any]], float]]
Answers = Mapping[str, Any]


def loss_interval(
    name: str, metric: str, teacher: Answers, student: Answers, aggregations: Mapping[str, Aggregations]
) -> Interval | None:
    """The 95% interval of the teacher's score less the student's on a task or group.

    Args:
        metric: the harness's key, with its filter.
        aggregations: functions by task and metric.

    Returns:
        None if the harness gives neither samples nor standard errors.
    """
    modes = teacher, student
    scores = [float(answers["results"][name][metric]) for answers in modes]
    errors = [number(answers["results"][name].get(metric.replace(",", "_stderr,", 1))) for answers in modes]
    values = [dict(_values(name, metric, answers)) for answers in modes]
    paired = None
    if values[0] and values[0].keys() == values[1].keys():
        tasks = list(values[0])
        of_teacher, of_student = ([mode[task] for task in tasks] for mode in values)
        if len(tasks) == 1:
            aggregate = aggregations.get(tasks[0], {}).get(metric.partition(",")[0])
            paired = _of_task(of_teacher[0], of_student[0], scores, aggregate)
        else:
            paired = _of_group(of_teacher, of_student, scores)
    return paired if paired is not None else unpaired_interval(scores[0] - scores[1], *errors)


def _of_task(
    teacher: list[Any], student: list[Any], scores: Sequence[float], aggregate: Callable[[Sequence[Any]], float] | None
) -> Interval | None:
    if _is_mean_of_shares(teacher, scores[0]) and _is_mean_of_shares(student, scores[1]):
        return share_interval(_losses(teacher, student))
    return None if aggregate is None else bootstrap_interval(teacher, student, aggregate)


def _of_group(teacher: list[list[Any]], student: list[list[Any]], scores: Sequence[float]) -> Interval | None:
    """The interval of a group whose score is the mean of its tasks' samples, or of its tasks' scores."""
    if not all(_are_shares(values) for values in (*teacher, *student)):
        return None
    parts = [_losses(a, b) for a, b in zip(teacher, student, strict=True)]
    pooled = [np.mean(np.concatenate(mode)) for mode in (teacher, student)]
    if np.allclose(pooled, scores, rtol=1e-9):
        return share_interval([loss for part in parts for loss in part])
    means = [np.mean([np.mean(values) for values in mode]) for mode in (teacher, student)]
    if np.allclose(means, scores, rtol=1e-9):
        return mean_of([share_interval(part) for part in parts])
    return None


def _losses(teacher: Sequence[Any], student: Sequence[Any]) -> list[float]:
    losses: list[float] = np.subtract(teacher, student, dtype=np.float64).tolist()
    return losses


def _values(name: str, metric: str, answers: Answers) -> Iterator[tuple[str, list[Any]]]:
    """Each task of `name` with its samples' values in the order of the samples."""
    key, _, filtered = metric.partition(",")
    for leaf in dict.fromkeys((name, *leaves(name, answers))):
        samples = [row for row in answers["samples"].get(leaf, ()) if row["filter"] == filtered and key in row]
        if samples:
            yield leaf, [row[key] for row in sorted(samples, key=lambda row: row["doc_id"])]


def _is_mean_of_shares(values: Sequence[Any], score: float) -> bool:
    return _are_shares(values) and math.isclose(float(np.mean(values)), score, rel_tol=1e-9, abs_tol=1e-12)


def _are_shares(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float | np.number | np.bool_) and 0.0 <= value <= 1.0 for value in values)


def declared_metrics(config: Mapping[str, Any]) -> dict[str, bool | None] | None:
    """Return whether higher is better for each score that a configuration declares; a key without a filter means any.
    None if only a run can tell."""
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


def measured_metrics(name: str, row: Mapping[str, Any], answers: Mapping[str, Any]) -> dict[str, bool | None]:
    """Return whether higher is better for each score of a row; None if the harness does not say."""
    better: dict[str, bool | None] = {}
    for leaf in (name, *leaves(name, answers)):
        better |= answers["higher_is_better"].get(leaf, {})
    return {
        key: better.get(key.partition(",")[0])
        for key, value in row.items()
        if "," in key and "_stderr" not in key and number(value) is not None
    }


def choose_metric(spec: TaskSpec, name: str, metrics: Mapping[str, bool | None]) -> str:
    """Return the key of `spec.metric`, or of the first metric of which higher is better. Raises `InvalidInputError` if
    there is none."""
    for key, more_is_better in metrics.items():
        if more_is_better if spec.metric is None else _means(spec.metric, key):
            return key
    if not metrics:
        raise refusal(f"{name} has no score of its own; name its tasks", name)
    known = ", ".join(key.removesuffix(",none") for key in metrics)
    if spec.metric:
        raise refusal(f"{name} has no metric {spec.metric!r}; it has {known}", spec.metric)
    raise refusal(f"{name} has no metric for which higher is better; name one of {known}")


def _means(wanted: str, key: str) -> bool:
    """Whether two names mean the same metric; a missing filter matches any."""
    both_filtered = "," in wanted and "," in key
    return wanted == key if both_filtered else wanted.partition(",")[0] == key.partition(",")[0]


def leaves(name: str, answers: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tasks below a group, including nested groups and their tasks."""
    for child in answers["group_subtasks"].get(name, ()):
        yield child
        yield from leaves(child, answers)


def number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


_BOOTSTRAP_ITERATIONS = 1000
"""Bootstrap iterations for standard errors without a closed form."""
_CODE_EVAL = "HF_ALLOW_CODE_EVAL"
"""Variable that allows the metric that runs generated code to do so."""
NO_PARTS = NoParts()


class TaskScore(FrozenModel):
    """Scores of teacher and student on one task."""

    task: str
    metric: str
    """Name in the harness, with its filter if it has one: `acc_norm`, `exact_match,strict_match`."""
    num_fewshot: int
    chat_template: bool
    num_samples: int
    teacher: float
    student: float
    teacher_stderr: float | None
    """Standard error of the teacher's score, if the harness gives one."""
    student_stderr: float | None
    higher_is_better: bool = True
    """False if the harness says that lower is better."""
    drop_interval: tuple[float, float] | None = None
    """95% interval of `drop`, from the paired differences of samples. None if neither the samples nor the harness's
    standard errors give one, and in older reports."""

    @property
    def is_share(self) -> bool:
        """Whether `drop` is points of a hundred."""
        return is_share(self.teacher, self.student, higher_is_better=self.higher_is_better)

    @property
    def drop(self) -> float:
        """Drop of the student's score against the teacher's, negative if the student wins, in points of a hundred. For
        a metric outside 0..1, or of which lower is better, in percent of the teacher's score."""
        return compute_points_lost(self.teacher, self.student, higher_is_better=self.higher_is_better)


def check_tasks(
    specs: Sequence[str | TaskSpec], tokenizer: Any, *, fetch: Fetch | None = None, access: Access = UNRESTRICTED
) -> None:
    """Raise the errors that `run_tasks` would raise for these tasks, without a model, network or reading data.

    Metrics are not checked for tasks of the harness that only their own code describes. Raises `InvalidInputError` for
    an unknown task or metric, a file that is no task, or a chat template that the tokenizer lacks; `DataError` if a
    task's data is not where the spec says.

    Args:
        fetch: for `s3://` tasks and data.
        access: the job's read permissions, and whether its tasks may run code.
    """
    for task in resolve_tasks(specs, fetch=fetch, access=access):
        _templated(task.spec, tokenizer)
        with _quiet(), named(task.spec):
            configs = configurations(task)
            declared = [(config.get("group") or config["task"], declared_metrics(config)) for config in configs]
        for name, metrics in declared:
            if metrics is not None:
                choose_metric(task.spec, name, metrics)


@dataclass(frozen=True)
class TaskResults:
    """Results of the tasks of a job."""

    scores: tuple[TaskScore, ...] = ()
    left_out: tuple[str, ...] = ()
    """Names of tasks that were not started within `EvaluationSpec.max_minutes`."""


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task],
    spec: EvaluationSpec,
    *,
    workers: Workers = ALONE,
    parts: Parts = NO_PARTS,
) -> TaskResults:
    """Answer every task in both modes of `model`, as `spec` says. No task starts after `max_minutes`.

    Log-likelihoods come from a forward pass of every token through every layer (no `logits_to_keep` is given), so
    nothing that SwiftKV skips in prefill is scored.

    Args:
        model: a SwiftKV causal language model with its teacher's projections; left in the mode it came in.
        workers: each answers a share of every task's requests; the first runs the harness, and all return the whole
            result.
        parts: keep each task's scores, so that none is answered twice.

    Raises:
        InvalidInputError: an unknown task or metric, or a chat template that the tokenizer lacks.
        ModelError: the model was exported without its teacher.
    """
    if not tasks:
        return TaskResults()
    with evaluation_mode(model), _quiet():
        return _Run(model, tokenizer, spec, workers, parts).all(tasks)


class _Run:
    """Tasks one after the other, each answered by all workers."""

    def __init__(self, model: Any, tokenizer: Any, spec: EvaluationSpec, workers: Workers, parts: Parts) -> None:
        from swiftkv_platform.evaluation.harness.shared import SharedModel

        self._model, self._spec, self._workers, self._parts = model, spec, workers, parts
        self._part, self._passes = "", 0
        self._language_model = SharedModel(
            model, tokenizer, workers, batch_size=spec.task_batch_size, progress=self._progress, parts=parts
        )

    def all(self, tasks: Sequence[Task]) -> TaskResults:
        manager = None
        if self._workers.is_first:
            manager = task_manager(any(isinstance(task.source, str) for task in tasks))
        minutes = self._spec.max_minutes
        ends_at = math.inf if minutes is None else time.monotonic() + 60.0 * minutes
        scores: list[TaskScore] = []
        left_out: list[str] = []
        for index, task in enumerate(tasks):
            if self._workers.broadcast_from_first(time.monotonic() >= ends_at):
                left_out.append(task.spec.name)
                continue
            self._part, self._passes = f"task-{index:03d}", 0
            self._language_model.part = self._part
            answer = partial(self._one, manager, task)
            scores += measured(self._parts, self._workers, self._part, tuple[TaskScore, ...], answer)
        return TaskResults(tuple(scores), tuple(left_out))

    def _one(self, manager: Any, task: Task) -> tuple[TaskScore, ...]:
        if not self._workers.is_first:
            self._language_model.follow()
            return self._workers.broadcast_from_first(())
        try:
            loaded = _load(manager, task)
            templated = _templated(task.spec, self._language_model.tokenizer)
            limit = self._spec.task_limit
            answers = []
            for enabled in (False, True):
                self._model.swiftkv(enabled)
                answers.append(_answer(self._language_model, manager, task, loaded, limit, templated=templated))
            scores = tuple(_scores(task, answers[0], answers[1], _aggregations(loaded), templated=templated))
        except Exception as error:
            self._language_model.end(error)
            raise
        self._language_model.end()
        return self._workers.broadcast_from_first(scores)

    def _progress(self, done: int, total: int) -> None:
        """Report a task's progress over both modes; a task with several kinds of requests reports each kind."""
        if done == total:
            self._passes += 1
            done = 0
        self._parts.progress(self._part, self._passes * total + done, max(2, self._passes + 1) * total)


def _load(manager: Any, task: Task) -> Any:
    """Load the harness's task or group with its data, as a list."""
    from lm_eval.api.group import Group, GroupConfig
    from lm_eval.api.task import ConfigurableTask

    if isinstance(task.source, Mapping) and "group" in task.source:
        group = Group.from_config(GroupConfig(**{**task.source, "task": []}))
        for member in task.source["task"]:
            group.add(ConfigurableTask(config=dict(member)))
        return [group]
    with named(task.spec):
        if isinstance(task.source, str):
            known(task.source)  # the harness would open a file of any other name
        loaded = manager.load([task.source])
    inner = {name for names in loaded["group_map"].values() for name in names}
    inner |= {member.task_name for group in loaded["groups"].values() for member in group.get_all_tasks()}
    return [item for kind in ("groups", "tasks") for name, item in loaded[kind].items() if name not in inner]


def _answer(
    language_model: Any, manager: Any, task: Task, loaded: Any, limit: int | None, *, templated: bool
) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    try:
        allowed = {_CODE_EVAL: "1"} if task.runs_code else {}
        with _without_surroundings(), environment(allowed):
            answers: dict[str, Any] = simple_evaluate(
                model=language_model,
                tasks=loaded,
                num_fewshot=task.spec.num_fewshot,
                limit=limit,
                bootstrap_iters=_BOOTSTRAP_ITERATIONS,
                log_samples=True,
                apply_chat_template=templated,
                fewshot_as_multiturn=templated,
                task_manager=manager,
                confirm_run_unsafe_code=task.runs_code,
            )
    except (AssertionError, ValueError, TemplateError) as error:  # a refusal, e.g. of a prompt longer than the context
        raise refusal(f"the harness cannot run {task.spec.name!r}: {error}", task.spec.name) from error
    return answers


def _templated(spec: TaskSpec, tokenizer: Any) -> bool:
    """Whether to use the tokenizer's chat template for the task."""
    if spec.chat_template is None:
        return spec.name in INSTRUCTION_TASKS and is_instruction_tuned(tokenizer)
    if spec.chat_template and not tokenizer.chat_template:
        if spec in PAPER_TASKS:
            return False  # base models have no template, and the score is compared with the own teacher's
        raise refusal(f"{spec.name} sets chat_template, but the model's tokenizer has none")
    return spec.chat_template


def _aggregations(loaded: Sequence[Any]) -> dict[str, Aggregations]:
    """Return the functions that aggregate a task's samples to a score, by task and metric."""
    tasks = [task for item in loaded for task in (item.get_all_tasks() if hasattr(item, "get_all_tasks") else [item])]
    return {task.task_name: task.aggregation() for task in tasks}


def _scores(
    task: Task,
    teacher: dict[str, Any],
    student: dict[str, Any],
    aggregations: Mapping[str, Aggregations],
    *,
    templated: bool,
) -> Iterator[TaskScore]:
    """Yield the scores of the tasks in the answers that belong to no group in them."""
    members = {name for names in teacher["group_subtasks"].values() for name in names}
    for name, row in teacher["results"].items():
        if name in members:
            continue
        metrics = measured_metrics(name, row, teacher)
        metric = choose_metric(task.spec, name, metrics)
        error = metric.replace(",", "_stderr,", 1)
        interval = loss_interval(name, metric, teacher, student, aggregations)
        better = metrics[metric] is not False
        values = float(row[metric]), float(student["results"][name][metric])
        unit = compute_points_per_unit(*values, higher_is_better=better)
        yield TaskScore(
            task=name,
            metric=metric.removesuffix(",none"),
            num_fewshot=_num_fewshot(name, teacher),
            chat_template=templated,
            num_samples=_num_samples(name, teacher),
            teacher=values[0],
            student=values[1],
            teacher_stderr=number(row.get(error)),
            student_stderr=number(student["results"][name].get(error)),
            higher_is_better=better,
            drop_interval=None if interval is None else tuple(sorted(round(unit * bound, 6) for bound in interval)),
        )


def _num_fewshot(name: str, answers: Mapping[str, Any]) -> int:
    shots = [answers["n-shot"][leaf] for leaf in (name, *leaves(name, answers)) if leaf in answers["n-shot"]]
    return int(shots[0]) if shots else 0


def _num_samples(name: str, answers: Mapping[str, Any]) -> int:
    samples = answers["n-samples"]
    counted = {leaf for leaf in (name, *leaves(name, answers)) if leaf in samples}
    return sum(int(samples[leaf]["effective"]) for leaf in counted)


@contextmanager
def _without_surroundings() -> Iterator[None]:
    """Keep the harness from querying pip, git and other programs, which takes seconds per task, and prints an error
    outside a repository."""
    from lm_eval import evaluator
    from torch.utils import collect_env

    before = collect_env.get_pretty_env_info, evaluator.get_git_commit_hash
    collect_env.get_pretty_env_info, evaluator.get_git_commit_hash = lambda: "", lambda: None
    try:
        yield
    finally:
        collect_env.get_pretty_env_info, evaluator.get_git_commit_hash = before


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
