"""Scores of lm-evaluation-harness tasks: the metric that counts, from the task's configuration or a run, and intervals
of the points lost, from samples that both modes answered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.evaluation.harness.tasks import FIELD
from swiftkv_platform.evaluation.paired import Interval, bootstrap_interval, mean_of, share_interval, unpaired_interval
from swiftkv_platform.specs import TaskSpec

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
        raise InvalidInputError(f"{FIELD}: {name} has no score of its own; name its tasks", field=FIELD, value=name)
    known = ", ".join(key.removesuffix(",none") for key in metrics)
    raise InvalidInputError(
        f"{FIELD}: {name} has no metric {spec.metric!r}; it has {known}"
        if spec.metric
        else f"{FIELD}: {name} has no metric for which higher is better; name one of {known}",
        field=FIELD,
        value=spec.metric,
    )


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
