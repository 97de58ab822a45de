"""Intervals of the points lost on tasks of lm-evaluation-harness, from the samples that both modes have answered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from swiftkv_platform.evaluation.harness.metrics import leaves, number
from swiftkv_platform.evaluation.paired import Interval, bootstrap_interval, mean_of, share_interval, unpaired_interval

Aggregations = Mapping[str, Callable[[Sequence[Any]], float]]
Answers = Mapping[str, Any]


def loss_interval(
    name: str, metric: str, teacher: Answers, student: Answers, aggregations: Mapping[str, Aggregations]
) -> Interval | None:
    """The 95% interval of the teacher's score less the student's on a task or group.

    Args:
        metric: the harness's key, with its filter.
        aggregations: by the names of tasks, then by those of metrics.

    Returns:
        None where the harness gives neither samples nor standard errors.
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
