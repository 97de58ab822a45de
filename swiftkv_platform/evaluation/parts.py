"""Parts of an evaluation: each is kept when it has been measured, so that one that is cut off repeats none. Knows no
store but a protocol.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter

from swiftkv_platform.model.workers import Workers

T = TypeVar("T")


class Parts(Protocol):
    """Results of an evaluation by name, and a listener to how far it is. Only the first worker asks."""

    def get(self, name: str) -> bytes | None:
        """A finished part of this evaluation, or of an interrupted one before it; None if it is not measured yet."""

    def put(self, name: str, data: bytes) -> None:
        """Keep a part."""

    def progress(self, name: str, done: int, total: int) -> None:
        """Take note that `done` of a part's `total` pieces of work are done."""


class NoParts:
    """Keeps nothing."""

    def get(self, _name: str, /) -> bytes | None:
        return None

    def put(self, name: str, data: bytes) -> None:
        """Nothing is kept."""

    def progress(self, name: str, done: int, total: int) -> None:
        """No one listens."""


def measured(parts: Parts, workers: Workers, name: str, kind: Any, measure: Callable[[], T]) -> T:
    """The part `name`, of the type `kind`, on every worker: as it was kept, or measured now. Collective."""
    adapter: TypeAdapter[T] = TypeAdapter(kind)
    kept = workers.from_first(parts.get(name) if workers.is_first else None)
    if kept is not None:
        return adapter.validate_json(kept)
    value = measure()
    if workers.is_first:
        parts.put(name, adapter.dump_json(value))
        parts.progress(name, 1, 1)
    return value
