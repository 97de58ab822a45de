"""Results of single rows of an evaluation, and the comparison of two models on the rows that both have answered.

An attempt stores the results of each task as JSON Lines at `rows/{name}.jsonl` (`contract.attempts`). They are data of
the job, like its log. Texts are cut, and rows beyond `MAX_FILE_BYTES` left out, so that any number of rows can be
evaluated.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from swiftkv_platform.frozen import FrozenBaseModel

MAX_PROMPT_CHARACTERS = 1000
"""Max characters of a stored prompt, the last ones."""
MAX_ANSWER_CHARACTERS = 2000
"""Max characters of a stored answer, the first ones."""
MAX_FILE_BYTES = 16 << 20
"""Max bytes of the stored rows of a task."""
MAX_COMPARED_BYTES = 64 << 20
"""Max bytes of a model's stored rows that one comparison reads; it leaves out later tasks."""
_ELLIPSIS = "…"
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,255}")
"""Names of files in reports, which workers write: no path."""
_NAMES_OF_SCORE = ("task", "metric", "row_results")
_MIN_UNBOUNDED_ROWS = 30
"""Min rows for the interval of an unbounded score, by normal theory."""
_Z_975 = 1.959963984540054
"""97.5% quantile of the normal distribution, for two-sided 95% intervals."""

Interval = tuple[float, float]


Answer = Annotated[str, Field(max_length=MAX_ANSWER_CHARACTERS)]


class ModeResult(FrozenBaseModel):
    """Answer of the teacher or the student to a row."""

    score: float
    answer: Answer | None = None
    """Null if the metric generates none, such as a likelihood."""


class RowResult(FrozenBaseModel):
    """Results of one row of a task."""

    key: Annotated[str, Field(max_length=64)]
    """Hash of the prompt, equal for all jobs; a repeated prompt has a number after it."""
    prompt: Annotated[str, Field(max_length=MAX_PROMPT_CHARACTERS)]
    expected: Answer | None = None
    """Expected answer; null if the metric needs none."""
    teacher: ModeResult
    student: ModeResult


_ADAPTER = TypeAdapter(RowResult)


def shorten_prompt(text: str) -> str:
    return text if len(text) <= MAX_PROMPT_CHARACTERS else _ELLIPSIS + text[1 - MAX_PROMPT_CHARACTERS :]


def shorten_answer(text: str) -> str:
    return text if len(text) <= MAX_ANSWER_CHARACTERS else text[: MAX_ANSWER_CHARACTERS - 1] + _ELLIPSIS


def dump_rows(rows: Iterable[RowResult]) -> tuple[bytes, int]:
    """Return (the rows as JSON Lines, number of rows left out: those beyond `MAX_FILE_BYTES`, and those without a
    finite score, which JSON cannot express)."""
    lines, size, num_left_out = list[bytes](), 0, 0
    for row in rows:
        line = _ADAPTER.dump_json(row) + b"\n"
        if not _has_finite_scores(row) or size + len(line) > MAX_FILE_BYTES:
            num_left_out += 1
            continue
        lines.append(line)
        size += len(line)
    return b"".join(lines), num_left_out


def load_rows(data: bytes) -> list[RowResult]:
    """Return the rows of JSON Lines. Raises `ValueError` for rows that `dump_rows` of this version would not write."""
    rows = [_ADAPTER.validate_json(line) for line in data.splitlines()]
    if not all(map(_has_finite_scores, rows)):
        raise ValueError("a row has a score that is not finite")
    return rows


def _has_finite_scores(row: RowResult) -> bool:
    return math.isfinite(row.teacher.score) and math.isfinite(row.student.score)


def make_keys_unique(keys: Sequence[str]) -> list[str]:
    """Return unique keys: the second row with a key gets `-2`, and so on."""
    seen: dict[str, int] = {}
    unique = []
    for key in keys:
        seen[key] = seen.get(key, 0) + 1
        unique.append(key if seen[key] == 1 else f"{key}-{seen[key]}")
    return unique


def find_shared_tasks(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Return the scores of the tasks that two reports (`evaluation.json`) share and whose rows both have stored: those
    with the same name and metric."""
    found: dict[tuple[str, str], Mapping[str, Any]] = {}
    for score in _iter_scores_with_rows(b):
        found.setdefault((score["task"], score["metric"]), score)
    pairs: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {}
    for score in _iter_scores_with_rows(a):
        other = found.get((score["task"], score["metric"]))
        if other is not None:
            pairs.setdefault(score["task"], (score, other))
    return list(pairs.values())


def _iter_scores_with_rows(report: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the scores with stored rows of a report, which a worker of another version may have written."""
    tasks = report.get("tasks")
    for score in tasks if isinstance(tasks, list | tuple) else ():
        named = isinstance(score, Mapping) and all(isinstance(score.get(key), str) for key in _NAMES_OF_SCORE)
        if named and _FILE_NAME.fullmatch(score["row_results"]):
            yield score


Change = Literal["worse", "better"]


@dataclass(frozen=True)
class ChangedRow:
    """A row on which the students of two models have different scores."""

    key: str
    prompt: str
    expected: str | None
    change: Change
    """Whether b is worse or better than a."""
    a: ModeResult
    b: ModeResult


@dataclass(frozen=True)
class RowComparison:
    """Two models on the rows of a task that both have answered."""

    num_rows: int
    """Rows of both models."""
    num_only_a: int
    num_only_b: int
    a: float | None
    """Mean score of model a's student on the rows of both; None without such rows."""
    b: float | None
    interval: Interval | None
    """95% interval of b - a, from the paired differences of the rows. None for few rows of an unbounded score."""
    changed: tuple[ChangedRow, ...]
    """Rows with different scores, the largest difference first. For scores of 0 and 1, these are the rows that went
    from pass to fail, or back."""

    def count_changes(self, change: Change) -> int:
        return sum(row.change == change for row in self.changed)


def compare_rows(a: Sequence[RowResult], b: Sequence[RowResult], *, higher_is_better: bool = True) -> RowComparison:
    """Compare the students of two models, joining their rows by key and expected answer: a row whose expected answer
    was corrected meanwhile says nothing about the models."""
    # 1. join the rows  2. interval of the mean difference  3. rows that changed
    others = {(row.key, row.expected): row for row in b}
    pairs = [(row, other) for row in a if (other := others.get((row.key, row.expected))) is not None]
    differences = [theirs.student.score - ours.student.score for ours, theirs in pairs]
    changed = [
        ChangedRow(
            ours.key,
            ours.prompt,
            ours.expected,
            "better" if (difference > 0.0) == higher_is_better else "worse",
            ours.student,
            theirs.student,
        )
        for (ours, theirs), difference in zip(pairs, differences, strict=True)
        if difference
    ]
    scores = [(ours.student.score, theirs.student.score) for ours, theirs in pairs]
    return RowComparison(
        num_rows=len(pairs),
        num_only_a=len(a) - len(pairs),
        num_only_b=len(b) - len(pairs),
        a=math.fsum(score for score, _ in scores) / len(scores) if scores else None,
        b=math.fsum(score for _, score in scores) / len(scores) if scores else None,
        interval=_compute_interval(differences, are_shares=all(0.0 <= each <= 1.0 for pair in scores for each in pair)),
        changed=tuple(sorted(changed, key=lambda row: (-abs(row.b.score - row.a.score), row.key))),
    )


def _compute_interval(differences: Sequence[float], *, are_shares: bool) -> Interval | None:
    if are_shares and differences:
        return compute_mean_loss_interval(differences)
    count = len(differences)
    if count < _MIN_UNBOUNDED_ROWS:
        return None
    mean = math.fsum(differences) / count
    variance = math.fsum((each - mean) ** 2 for each in differences) / (count - 1)
    margin = _Z_975 * math.sqrt(variance / count)
    return mean - margin, mean + margin


def compute_mean_loss_interval(losses: Sequence[float]) -> Interval:
    """Return the interval of the mean of losses within -1..1, one per sample.

    Agresti and Min's interval adds two samples, half a sample for each of the four outcomes of a pair. So a few samples
    without a difference give a wide interval, although their variance is 0.
    """
    num_samples = len(losses) + 2
    mean = math.fsum(losses) / num_samples
    variance = (math.fsum(loss**2 for loss in losses) + 1.0) / num_samples - mean**2
    margin = _Z_975 * math.sqrt(variance / num_samples)
    return max(mean - margin, -1.0), min(mean + margin, 1.0)
