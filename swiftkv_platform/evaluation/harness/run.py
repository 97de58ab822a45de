"""Run lm-evaluation-harness tasks on teacher and student, the two modes of one set of weights, and read the scores: the
metric, and the interval of the points lost, from samples that both modes answered.
"""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from swiftkv_platform.contract.row_results import Interval, compute_mean_loss_interval, dump_rows
from swiftkv_platform.evaluation.harness.builtin import set_environment
from swiftkv_platform.evaluation.harness.rows import collect_rows, iter_subtasks
from swiftkv_platform.evaluation.harness.tasks import (
    Fetch,
    Task,
    add_task_name_to_errors,
    is_instruction_tuned,
    load_configurations,
    load_task_manager,
    look_up_task,
    make_task_error,
    resolve_tasks,
)
from swiftkv_platform.evaluation.paired import (
    bootstrap_interval,
    compute_mean_interval,
    compute_unpaired_interval,
)
from swiftkv_platform.evaluation.parts import NoResultStore, ResultStore, load_or_measure
from swiftkv_platform.evaluation.quality import DEFAULT_WORKERS, run_in_evaluation_mode
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.sources import UNRESTRICTED, Access
from swiftkv_platform.specs import PAPER_TASKS, EvaluationSpec, TaskSpec
from swiftkv_platform.specs.evaluation import (
    INSTRUCTION_TASKS,
    compute_points_lost,
    compute_points_per_unit,
    uses_percentage_points,
)

Aggregations = Mapping[str, Callable[[Sequence[Any]], float]]
Answers = Mapping[str, Any]
_UNSAFE_CHARACTERS = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_NAME_LENGTH = 128
"""Max characters of a task's name in the name of a file."""


def compute_drop_interval(
    name: str, metric: str, teacher: Answers, student: Answers, aggregations: Mapping[str, Aggregations]
) -> Interval | None:
    """Return the 95% interval of the teacher's score minus the student's on a task or group.

    Args:
        metric: the harness's key, with its filter.
        aggregations: functions by task and metric.

    Returns:
        None if the harness returns neither samples nor standard errors.
    """
    modes = teacher, student
    scores = [float(answers["results"][name][metric]) for answers in modes]
    errors = [to_float(answers["results"][name].get(metric.replace(",", "_stderr,", 1))) for answers in modes]
    values = [dict(_collect_values(name, metric, answers)) for answers in modes]
    paired = None
    if values[0] and values[0].keys() == values[1].keys():
        tasks = list(values[0])
        of_teacher, of_student = ([mode[task] for task in tasks] for mode in values)
        if len(tasks) == 1:
            aggregate = aggregations.get(tasks[0], {}).get(metric.partition(",")[0])
            paired = _compute_task_interval(of_teacher[0], of_student[0], scores, aggregate)
        else:
            paired = _compute_group_interval(of_teacher, of_student, scores)
    return paired if paired is not None else compute_unpaired_interval(scores[0] - scores[1], *errors)


def _compute_task_interval(
    teacher: list[Any], student: list[Any], scores: Sequence[float], aggregate: Callable[[Sequence[Any]], float] | None
) -> Interval | None:
    if _is_mean_of_shares(teacher, scores[0]) and _is_mean_of_shares(student, scores[1]):
        return compute_mean_loss_interval(_subtract_scores(teacher, student))
    return None if aggregate is None else bootstrap_interval(teacher, student, aggregate)


def _compute_group_interval(
    teacher: list[list[Any]], student: list[list[Any]], scores: Sequence[float]
) -> Interval | None:
    """Return the interval of a group whose score is the mean of its tasks' samples, or of its tasks' scores."""
    if not all(_are_shares(values) for values in (*teacher, *student)):
        return None
    parts = [_subtract_scores(a, b) for a, b in zip(teacher, student, strict=True)]
    pooled = [np.mean(np.concatenate(mode)) for mode in (teacher, student)]
    if np.allclose(pooled, scores, rtol=1e-9):
        return compute_mean_loss_interval([loss for part in parts for loss in part])
    means = [np.mean([np.mean(values) for values in mode]) for mode in (teacher, student)]
    if np.allclose(means, scores, rtol=1e-9):
        return compute_mean_interval([compute_mean_loss_interval(part) for part in parts])
    return None


def _subtract_scores(teacher: Sequence[Any], student: Sequence[Any]) -> list[float]:
    losses: list[float] = np.subtract(teacher, student, dtype=np.float64).tolist()
    return losses


def _collect_values(name: str, metric: str, answers: Answers) -> Iterator[tuple[str, list[Any]]]:
    """Yield each task of `name` with the values of its samples, in order."""
    key, _, filtered = metric.partition(",")
    for leaf in dict.fromkeys((name, *iter_subtasks(name, answers))):
        samples = [row for row in answers["samples"].get(leaf, ()) if row["filter"] == filtered and key in row]
        if samples:
            yield leaf, [row[key] for row in sorted(samples, key=lambda row: row["doc_id"])]


def _is_mean_of_shares(values: Sequence[Any], score: float) -> bool:
    return _are_shares(values) and math.isclose(float(np.mean(values)), score, rel_tol=1e-9, abs_tol=1e-12)


def _are_shares(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float | np.number | np.bool_) and 0.0 <= value <= 1.0 for value in values)


def read_declared_metrics(config: Mapping[str, Any]) -> dict[str, bool | None] | None:
    """Return {metric: whether higher values are better} of the metrics that a task declares; a metric's value is None
    if its direction is unknown. Keys are "metric,filter", or "metric" for any filter. Returns None if the metrics are
    known only after a run."""
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


def read_measured_metrics(name: str, row: Mapping[str, Any], answers: Mapping[str, Any]) -> dict[str, bool | None]:
    """Return whether higher is better, for each score of a row; None if the harness does not know."""
    better: dict[str, bool | None] = {}
    for leaf in (name, *iter_subtasks(name, answers)):
        better |= answers["higher_is_better"].get(leaf, {})
    return {
        key: better.get(key.partition(",")[0])
        for key, value in row.items()
        if "," in key and "_stderr" not in key and to_float(value) is not None
    }


def choose_metric(spec: TaskSpec, name: str, metrics: Mapping[str, bool | None]) -> str:
    """Return the key of `spec.metric`, or of the first metric for which higher is better. Raises `InvalidInputError` if
    there is none."""
    for key, more_is_better in metrics.items():
        if more_is_better if spec.metric is None else _is_same_metric(spec.metric, key):
            return key
    if not metrics:
        raise make_task_error(f"{name} has no group score; list its tasks instead", name)
    known = ", ".join(key.removesuffix(",none") for key in metrics)
    if spec.metric:
        raise make_task_error(f"{name} has no metric {spec.metric!r}; use one of {known}", spec.metric)
    raise make_task_error(f"{name} has no metric for which higher is better; set `metric` to one of {known}")


def _is_same_metric(metric: str, other: str) -> bool:
    """Whether two names are the same metric; a missing filter matches any filter."""
    both_filtered = "," in metric and "," in other
    return metric == other if both_filtered else metric.partition(",")[0] == other.partition(",")[0]


def to_float(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


_BOOTSTRAP_ITERATIONS = 1000
_CODE_EVAL_VARIABLE = "HF_ALLOW_CODE_EVAL"
"""Environment variable that allows metrics to run generated code."""
NO_STORE = NoResultStore()


class TaskScore(FrozenBaseModel):
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
    """Standard error of the teacher's score, if known."""
    student_stderr: float | None
    higher_is_better: bool = True
    """False if lower is better."""
    drop_interval: tuple[float, float] | None = None
    """95% interval of `drop`, from paired differences of samples, or from standard errors. None without either, and in
    older reports."""
    row_results: str | None = None
    """File with the results of single rows, in the job's attempt. None for a task without a score per row, and in older
    reports."""
    rows_left_out: int = 0
    """Number of rows that this file lacks, because it would be too large."""

    @property
    def uses_percentage_points(self) -> bool:
        """Whether `drop` is in percentage points."""
        return uses_percentage_points(self.teacher, self.student, higher_is_better=self.higher_is_better)

    @property
    def drop(self) -> float:
        """Drop of the student's score from the teacher's, in percentage points; negative if the student is better. For
        a metric outside 0..1, or for which lower is better, in percent of the teacher's score."""
        return compute_points_lost(self.teacher, self.student, higher_is_better=self.higher_is_better)


def check_tasks(
    specs: Sequence[str | TaskSpec], tokenizer: Any, *, fetch: Fetch | None = None, access: Access = UNRESTRICTED
) -> None:
    """Check tasks before a run, without a model, network or data.

    Metrics of harness tasks that are defined in code are not checked. Raises `InvalidInputError` for an unknown task or
    metric, a file that is not a task, or a missing chat template; `DataError` for missing data.

    Args:
        fetch: downloads `s3://` tasks and data.
        access: the job's read permissions, and whether its tasks may run code.
    """
    for task in resolve_tasks(specs, fetch=fetch, access=access):
        _uses_chat_template(task.spec, tokenizer)
        with _silence_harness(), add_task_name_to_errors(task.spec):
            configs = load_configurations(task)
            declared = [(config.get("group") or config["task"], read_declared_metrics(config)) for config in configs]
        for name, metrics in declared:
            if metrics is not None:
                choose_metric(task.spec, name, metrics)


@dataclass(frozen=True)
class TaskResults:
    """Scores of all tasks."""

    scores: tuple[TaskScore, ...] = ()
    left_out: tuple[str, ...] = ()
    """Names of tasks that did not start within `EvaluationSpec.max_minutes`."""


def run_tasks(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task],
    spec: EvaluationSpec,
    *,
    workers: Workers = DEFAULT_WORKERS,
    parts: ResultStore = NO_STORE,
    prefix: str = "",
) -> TaskResults:
    """Run every task in both modes of `model`. No task starts after `max_minutes`.

    Log-likelihoods come from a forward pass of every token through every layer (without `logits_to_keep`), so they
    include no token that SwiftKV skips in prefill.

    Args:
        model: a SwiftKV causal language model with its teacher's projections; its mode does not change.
        workers: each answers a share of every task's requests; the first runs the harness, and all return the total.
        parts: store of each task's scores, so that none is repeated.
        prefix: beginning of the scores' names in the store, for a student besides the job's own.

    Raises:
        InvalidInputError: an unknown task or metric, or a missing chat template.
        ModelError: the model was exported without its teacher.
    """
    if not tasks:
        return TaskResults()
    with run_in_evaluation_mode(model), _silence_harness():
        return _TaskRunner(model, tokenizer, spec, workers, parts, prefix).run(tasks)


class _TaskRunner:
    """Runs one task after the other, each on all workers."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        spec: EvaluationSpec,
        workers: Workers,
        parts: ResultStore,
        prefix: str,
    ) -> None:
        from swiftkv_platform.evaluation.harness.shared import HarnessModel

        self._model, self._spec, self._workers, self._parts = model, spec, workers, parts
        self._prefix, self._part, self._passes = prefix, "", 0
        self._language_model = HarnessModel(
            model, tokenizer, workers, batch_size=spec.task_batch_size, progress=self._report_progress, parts=parts
        )

    def run(self, tasks: Sequence[Task]) -> TaskResults:
        manager = None
        if self._workers.is_first:
            manager = load_task_manager(any(isinstance(task.source, str) for task in tasks))
        minutes = self._spec.max_minutes
        ends_at = math.inf if minutes is None else time.monotonic() + 60.0 * minutes
        scores: list[TaskScore] = []
        left_out: list[str] = []
        for index, task in enumerate(tasks):
            if self._workers.broadcast_from_first(time.monotonic() >= ends_at):
                left_out.append(task.spec.name)
                continue
            self._part, self._passes = f"{self._prefix}task-{index:03d}", 0
            self._language_model.part = self._part
            run_task = partial(self._run_task, manager, task)
            scores += load_or_measure(self._parts, self._workers, self._part, tuple[TaskScore, ...], run_task)
        return TaskResults(tuple(scores), tuple(left_out))

    def _run_task(self, manager: Any, task: Task) -> tuple[TaskScore, ...]:
        if not self._workers.is_first:
            self._language_model.answer_assigned_requests()
            return self._workers.broadcast_from_first(())
        try:
            loaded = _load_task(manager, self._resolve_source(task))
            templated = _uses_chat_template(task.spec, self._language_model.tokenizer)
            # Own rows are rendered before the harness sees them.
            rendered = task.build is not None and bool(self._language_model.tokenizer.chat_template)
            limit = self._spec.task_limit
            answers: list[dict[str, Any]] = []
            for enabled in (False, True):
                self._model.swiftkv(enabled)
                answers.append(_run_harness(self._language_model, manager, task, loaded, limit, templated=templated))
            scores = tuple(
                self._store_rows(score, *answers)
                for score in _build_scores(
                    task, answers[0], answers[1], _get_aggregations(loaded), templated=templated or rendered
                )
            )
        except Exception as error:
            self._language_model.end_other_workers(error)
            raise
        self._language_model.end_other_workers()
        return self._workers.broadcast_from_first(scores)

    def _resolve_source(self, task: Task) -> Task:
        if task.build is None:
            return task
        return replace(task, source=task.build(self._generate_as_teacher))

    def _generate_as_teacher(self, prompts: Sequence[str], *, max_tokens: int, until: Sequence[str]) -> list[str]:
        self._model.swiftkv(False)
        return self._language_model.generate_texts(prompts, max_tokens=max_tokens, until=until)

    def _store_rows(self, score: TaskScore, teacher: Answers, student: Answers) -> TaskScore:
        """Store the results of a task's rows, if they have scores. Returns the score with their file."""
        metric = score.metric if "," in score.metric else f"{score.metric},none"
        rows = collect_rows(score.task, metric, teacher, student)
        if not rows:
            return score
        name = f"{self._part}-{_UNSAFE_CHARACTERS.sub('-', score.task)[:_MAX_NAME_LENGTH]}"
        data, num_left_out = dump_rows(rows)
        self._parts.store_rows(name, data)
        return score.model_copy(update={"row_results": name, "rows_left_out": num_left_out})

    def _report_progress(self, done: int, total: int) -> None:
        """Report a task's progress over both modes and all kinds of requests."""
        if done == total:
            self._passes += 1
            done = 0
        self._parts.report_progress(self._part, self._passes * total + done, max(2, self._passes + 1) * total)


def _load_task(manager: Any, task: Task) -> Any:
    """Load a task or group of the harness with its data, as a list."""
    from lm_eval.api.group import Group, GroupConfig
    from lm_eval.api.task import ConfigurableTask

    if isinstance(task.source, Mapping) and "group" in task.source:
        group = Group.from_config(GroupConfig(**{**task.source, "task": []}))
        for member in task.source["task"]:
            group.add(ConfigurableTask(config=dict(member)))
        return [group]
    with add_task_name_to_errors(task.spec):
        if isinstance(task.source, str):
            look_up_task(task.source)  # the harness would open a file with an unknown name
        loaded = manager.load([task.source])
    inner = {name for names in loaded["group_map"].values() for name in names}
    inner |= {member.task_name for group in loaded["groups"].values() for member in group.get_all_tasks()}
    return [item for kind in ("groups", "tasks") for name, item in loaded[kind].items() if name not in inner]


def _run_harness(
    language_model: Any, manager: Any, task: Task, loaded: Any, limit: int | None, *, templated: bool
) -> dict[str, Any]:
    from lm_eval import simple_evaluate

    try:
        allowed = {_CODE_EVAL_VARIABLE: "1"} if task.runs_code else {}
        with _skip_environment_report(), set_environment(allowed):
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
    except (AssertionError, ValueError, TemplateError) as error:  # e.g. for a prompt longer than the context
        raise make_task_error(f"the harness cannot run {task.spec.name!r}: {error}", task.spec.name) from error
    return answers


def _uses_chat_template(spec: TaskSpec, tokenizer: Any) -> bool:
    """Whether to use the tokenizer's chat template for the task."""
    if spec.chat_template is None:
        return spec.name in INSTRUCTION_TASKS and is_instruction_tuned(tokenizer)
    if spec.chat_template and not tokenizer.chat_template:
        if spec in PAPER_TASKS:
            return False  # base models have no template; the teacher runs without one too
        raise make_task_error(
            f"{spec.name} sets chat_template, but the model's tokenizer has none; use chat_template: false"
        )
    return spec.chat_template


def _get_aggregations(loaded: Sequence[Any]) -> dict[str, Aggregations]:
    """Return by task and metric the functions that aggregate samples to a score."""
    tasks = [task for item in loaded for task in (item.get_all_tasks() if hasattr(item, "get_all_tasks") else [item])]
    return {task.task_name: task.aggregation() for task in tasks}


def _build_scores(
    task: Task,
    teacher: dict[str, Any],
    student: dict[str, Any],
    aggregations: Mapping[str, Aggregations],
    *,
    templated: bool,
) -> Iterator[TaskScore]:
    """Yield the scores of groups, and of tasks outside groups."""
    members = {name for names in teacher["group_subtasks"].values() for name in names}
    for name, row in teacher["results"].items():
        if name in members:
            continue
        metrics = read_measured_metrics(name, row, teacher)
        metric = choose_metric(task.spec, name, metrics)
        error = metric.replace(",", "_stderr,", 1)
        interval = compute_drop_interval(name, metric, teacher, student, aggregations)
        better = metrics[metric] is not False
        values = float(row[metric]), float(student["results"][name][metric])
        unit = compute_points_per_unit(*values, higher_is_better=better)
        yield TaskScore(
            task=name,
            metric=metric.removesuffix(",none"),
            num_fewshot=_get_num_fewshot(name, teacher),
            chat_template=templated,
            num_samples=_count_samples(name, teacher),
            teacher=values[0],
            student=values[1],
            teacher_stderr=to_float(row.get(error)),
            student_stderr=to_float(student["results"][name].get(error)),
            higher_is_better=better,
            drop_interval=None if interval is None else tuple(sorted(round(unit * bound, 6) for bound in interval)),
        )


def _get_num_fewshot(name: str, answers: Mapping[str, Any]) -> int:
    shots = [answers["n-shot"][leaf] for leaf in (name, *iter_subtasks(name, answers)) if leaf in answers["n-shot"]]
    return int(shots[0]) if shots else 0


def _count_samples(name: str, answers: Mapping[str, Any]) -> int:
    samples = answers["n-samples"]
    counted = {leaf for leaf in (name, *iter_subtasks(name, answers)) if leaf in samples}
    return sum(int(samples[leaf]["effective"]) for leaf in counted)


@contextmanager
def _skip_environment_report() -> Iterator[None]:
    """Prevent the harness from running pip, git and other programs, which takes seconds per task."""
    from lm_eval import evaluator
    from torch.utils import collect_env

    before = collect_env.get_pretty_env_info, evaluator.get_git_commit_hash
    collect_env.get_pretty_env_info, evaluator.get_git_commit_hash = lambda: "", lambda: None
    try:
        yield
    finally:
        collect_env.get_pretty_env_info, evaluator.get_git_commit_hash = before


@contextmanager
def _silence_harness() -> Iterator[None]:
    """Suppress the harness's messages and progress bars, hundreds for a large group."""
    import datasets

    logger, level = logging.getLogger("lm_eval"), logging.getLogger("lm_eval").level
    logger.setLevel(logging.ERROR)
    datasets.disable_progress_bars()
    try:
        with Path(os.devnull).open("w") as devnull, redirect_stderr(devnull):
            yield
    finally:
        logger.setLevel(level)
