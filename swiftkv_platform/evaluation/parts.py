"""Parts of an evaluation. Each is stored once measured, so that an interrupted evaluation repeats none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter

from swiftkv_platform.model.workers import Workers

T = TypeVar("T")


class Parts(Protocol):
    """Storage of an evaluation's results by name, and its progress callback. Called on the first worker only."""

    def get(self, name: str) -> bytes | None:
        """A finished part of this evaluation, or of an interrupted one before it; None if it is not measured yet."""

    def put(self, name: str, data: bytes) -> None:
        """Store a part."""

    def progress(self, name: str, done: int, total: int) -> None:
        """Take note that `done` of a part's `total` pieces of work are done."""


class NoParts:
    """Stores nothing."""

    def get(self, _name: str, /) -> bytes | None:
        return None

    def put(self, name: str, data: bytes) -> None:
        """Do nothing."""

    def progress(self, name: str, done: int, total: int) -> None:
        """Do nothing."""


def measured(parts: Parts, workers: Workers, name: str, kind: Any, measure: Callable[[], T]) -> T:
    """Return part `name`, of type `kind`, on every worker: the stored one, or measure and store it. Collective."""
    adapter: TypeAdapter[T] = TypeAdapter(kind)
    kept = workers.broadcast_from_first(parts.get(name) if workers.is_first else None)
    if kept is not None:
        return adapter.validate_json(kept)
    value = measure()
    if workers.is_first:
        parts.put(name, adapter.dump_json(value))
        parts.progress(name, 1, 1)
    return value
