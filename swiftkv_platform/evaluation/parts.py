"""Results of an evaluation, stored one by one, so that an interrupted evaluation repeats none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter

from swiftkv_platform.model.workers import Workers

T = TypeVar("T")


class ResultStore(Protocol):
    """Store of results by name, and progress callback. Called on the first worker only."""

    def load_result(self, name: str) -> bytes | None:
        """Return a result of this evaluation or of an earlier, interrupted one; None if it does not exist."""

    def store_result(self, name: str, data: bytes) -> None:
        """Store a result."""

    def store_rows(self, name: str, data: bytes) -> None:
        """Store the results of a task's rows (`contract.row_results`) as `{name}.jsonl`."""

    def report_progress(self, name: str, done: int, total: int) -> None:
        """Report that `done` of `total` units of a result are complete."""


class NoResultStore:
    """Stores nothing."""

    def load_result(self, _name: str, /) -> bytes | None:
        return None

    def store_result(self, name: str, data: bytes) -> None:
        """Do nothing."""

    def store_rows(self, name: str, data: bytes) -> None:
        """Do nothing."""

    def report_progress(self, name: str, done: int, total: int) -> None:
        """Do nothing."""


def load_or_measure(parts: ResultStore, workers: Workers, name: str, kind: Any, measure: Callable[[], T]) -> T:
    """Return result `name`, of type `kind`, on every worker: the stored one, or else measure and store it.
    Collective."""
    adapter: TypeAdapter[T] = TypeAdapter(kind)
    stored = workers.broadcast_from_first(parts.load_result(name) if workers.is_first else None)
    if stored is not None:
        return adapter.validate_json(stored)
    value = measure()
    if workers.is_first:
        parts.store_result(name, adapter.dump_json(value))
        parts.report_progress(name, 1, 1)
    return value
