"""Comparison of two models on the rows of an evaluation that both have answered. Reads the results that their jobs have
stored; knows no route.
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
        return find_shared_tasks(self.a.metrics, self.b.metrics)

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
        for model, score in ((self.a, ours), (self.b, theirs)):
            if model.job_id is None:  # an imported model has a report, but no job
                return None
            key = AttemptId(model.job_id, model.attempt).rows_key(score["row_results"])
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
