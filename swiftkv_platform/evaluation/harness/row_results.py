"""Collect the results of single rows from the harness's logged samples of both modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from swiftkv_platform.contract.row_results import (
    ModeResult,
    RowResult,
    number_repeated_keys,
    shorten_answer,
    shorten_prompt,
)
from swiftkv_platform.evaluation.harness.rows import ROW_EXPECTED, ROW_KEY, ROW_PROMPT

Sample = Mapping[str, Any]
_KEY_LENGTH = 16


def collect_rows(name: str, metric: str, teacher: Mapping[str, Any], student: Mapping[str, Any]) -> list[RowResult]:
    """Return the results of a task's or group's rows.

    Args:
        metric: the harness's key, with its filter.

    Returns:
        An empty list if the harness has no number per row, or if both modes do not have the same rows.
    """
    modes = [list(_iter_samples(name, metric, answers)) for answers in (teacher, student)]
    if [sample["doc_hash"] for sample in modes[0]] != [sample["doc_hash"] for sample in modes[1]]:
        return []
    key = metric.partition(",")[0]
    if not all(isinstance(sample[key], int | float | np.number | np.bool_) for mode in modes for sample in mode):
        return []
    keys = number_repeated_keys([_get_key(sample) for sample in modes[0]])
    return [
        RowResult(
            key=row_key,
            prompt=shorten_prompt(_get_prompt(ours)),
            expected=_get_expected(ours),
            teacher=ModeResult(score=float(ours[key]), answer=_get_answer(ours)),
            student=ModeResult(score=float(theirs[key]), answer=_get_answer(theirs)),
        )
        for row_key, ours, theirs in zip(keys, *modes, strict=True)
    ]


def _iter_samples(name: str, metric: str, answers: Mapping[str, Any]) -> Iterator[Sample]:
    """Yield the samples of a task, or of all tasks of a group, in order."""
    key, _, filtered = metric.partition(",")
    for leaf in dict.fromkeys((name, *iter_subtasks(name, answers))):
        samples = [row for row in answers["samples"].get(leaf, ()) if row["filter"] == filtered and key in row]
        yield from sorted(samples, key=lambda row: int(row["doc_id"]))


def iter_subtasks(name: str, answers: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tasks of a group, including nested groups and their tasks."""
    for child in answers["group_subtasks"].get(name, ()):
        yield child
        yield from iter_subtasks(child, answers)


def _get_key(sample: Sample) -> str:
    """Return the key of an own row, or a hash of the harness's document."""
    own = sample["doc"].get(ROW_KEY) if isinstance(sample["doc"], Mapping) else None
    return str(own or sample["doc_hash"])[:_KEY_LENGTH]


def _get_prompt(sample: Sample) -> str:
    document = sample["doc"]
    if isinstance(document, Mapping) and ROW_PROMPT in document:
        return str(document[ROW_PROMPT])
    return str(sample["arguments"][0][0])


def _get_expected(sample: Sample) -> str | None:
    document, target = sample["doc"], sample["target"]
    if isinstance(document, Mapping) and ROW_EXPECTED in document:
        return shorten_answer(document[ROW_EXPECTED]) or None
    choices = _get_choices(sample)
    if isinstance(target, int) and 0 <= target < len(choices):
        return shorten_answer(choices[target])
    return shorten_answer(str(target)) or None


def _get_choices(sample: Sample) -> Sequence[str]:
    """Return the continuations that the harness compared by likelihood; empty for generated text."""
    return [str(arguments[1]).strip() for arguments in sample["arguments"] if isinstance(arguments[1], str)]


def _get_answer(sample: Sample) -> str | None:
    """Return the generated text, or the most likely of several continuations; None for a single likelihood."""
    found = sample["filtered_resps"]
    if isinstance(found[0], str):
        return shorten_answer(found[0])
    choices = _get_choices(sample)
    likelihoods = [each[0] for each in found if isinstance(each, tuple | list)]
    if len(choices) < 2 or len(likelihoods) != len(choices):
        return None
    return shorten_answer(choices[likelihoods.index(max(likelihoods))])
