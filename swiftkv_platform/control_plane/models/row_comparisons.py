"""Comparison of two models on the rows of an evaluation that both have answered. Reads the results that their jobs have
stored; knows no route. The job of a model that continues from the other one has results of both, on the same rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.contract.row_results import (
    MAX_COMPARED_BYTES,
    MAX_FILE_BYTES,
    RowComparison,
    compare_rows,
    find_shared_tasks,
    load_rows,
)
from swiftkv_platform.control_plane.base import Page, PageQuery
from swiftkv_platform.control_plane.models.model import Model
from swiftkv_platform.control_plane.models.responses import ChangedRowResponse, ComparedTaskResponse
from swiftkv_platform.errors import InvalidInputError, NotFoundError, ObjectNotFoundError
from swiftkv_platform.sources.untrusted_files import UnusableFileError
from swiftkv_platform.storage.object_store import ObjectStore, read_small_file

Score = Mapping[str, Any]
"""Entry of `tasks` of a report."""


@dataclass(frozen=True)
class _Results:
    """Results of a model's student, and the job that has them."""

    job: Model
    report: Mapping[str, Any]
    """Report with the scores as `tasks`."""


@dataclass(frozen=True)
class RowComparisons:
    """Comparisons of models `a` and `b`, of the same tenant."""

    store: ObjectStore
    a: Model
    b: Model

    def list_tasks(self) -> list[ComparedTaskResponse]:
        """Return the comparison of each shared task with stored rows, as far as `MAX_COMPARED_BYTES` allow."""
        return [ComparedTaskResponse.from_comparison(score, found) for score, found in self._iter_comparisons()]

    def list_changed_rows(self, task: str, change: str | None, page: PageQuery) -> Page[ChangedRowResponse]:
        """Return a page of the rows of a task with different scores, the largest difference first (last in descending
        order). `change`: only rows on which b is `worse` or `better`.

        Raises `NotFoundError` for a task that the models do not share, and `InvalidInputError` for an unknown row
        after which the page begins.
        """
        pair = next((pair for pair in self._find_pairs() if pair[0]["task"] == task), None)
        found = None if pair is None else self._compare(*pair, max_bytes=2 * MAX_FILE_BYTES)
        if found is None:
            raise NotFoundError(
                f"task is {task!r}, of which not both models have stored rows; GET /models/{self.a.id}/compare/"
                f"{self.b.id} lists the tasks that they share",
                field="task",
                value=task,
            )
        rows = [row for row in found[0].changed if change in (None, row.change)]
        rows = rows[::-1] if page.order == "desc" else rows
        begin = 0
        if page.after is not None:
            keys = [row.key for row in rows]
            if page.after not in keys:
                message = f"after is {page.after!r}, which is no row of this list; use last_id of the previous page"
                raise InvalidInputError(message, field="after", value=page.after)
            begin = keys.index(page.after) + 1
        end = begin + page.limit
        return Page([ChangedRowResponse.from_row(row) for row in rows[begin:end]], has_more=len(rows) > end)

    def _find_pairs(self) -> list[tuple[Score, Score]]:
        a, b = self._results
        return find_shared_tasks(a.report, b.report)

    @property
    def _results(self) -> tuple[_Results, _Results]:
        a, b = _Results(self.a, self.a.metrics), _Results(self.b, self.b.metrics)
        for model, other in ((self.a, self.b), (self.b, self.a)):
            parent, scores = model.lineage.get("parent"), model.metrics.get("parent_tasks")
            if scores and isinstance(parent, Mapping) and parent.get("name") == other.id:
                of_parent = _Results(model, {"tasks": scores})
                return (a, of_parent) if model is self.a else (of_parent, b)
        return a, b

    def _iter_comparisons(self) -> Iterator[tuple[Score, RowComparison]]:
        left = 2 * MAX_COMPARED_BYTES
        for pair in self._find_pairs():
            found = self._compare(*pair, max_bytes=left)
            if found is not None:
                left -= found[1]
                yield pair[0], found[0]

    def _compare(self, ours: Score, theirs: Score, *, max_bytes: int) -> tuple[RowComparison, int] | None:
        """Return (comparison, bytes read); None if the rows of either model are missing, unreadable or too large."""
        files = []
        for results, score in zip(self._results, (ours, theirs), strict=True):
            job = results.job
            if job.job_id is None:  # an imported model has a report, but no job
                return None
            key = AttemptId(job.job_id, job.attempt).rows_key(score["row_results"])
            try:
                files.append(read_small_file(self.store, key, min(MAX_FILE_BYTES, max_bytes)))
            except (ObjectNotFoundError, UnusableFileError):
                return None
            max_bytes -= len(files[-1])
        try:
            a, b = map(load_rows, files)
        except ValueError:  # of another version of the workers
            return None
        better = ours.get("higher_is_better", True) is not False
        return compare_rows(a, b, higher_is_better=better), sum(map(len, files))
