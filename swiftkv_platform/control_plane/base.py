"""Values shared by the whole control plane: callers, the clock, pages of lists, fencing tokens, ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from ulid import ULID

T = TypeVar("T")


Clock = Callable[[], float]
"""Clock of Unix seconds."""


def is_due(at: float, now: float, *, within: float) -> bool:
    """Whether the time `at` has come. It was chosen at most `within` seconds ahead; if it is farther away now, the
    clock has been set back, and it counts as due."""
    return not 0.0 < at - now <= within


@dataclass(frozen=True)
class PageQuery:
    """A request for part of a list."""

    after: str | None = None
    """Id of the last item of the previous page."""
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    """Order by time of creation."""


@dataclass(frozen=True)
class Page(Generic[T]):
    """A page of a list."""

    items: Sequence[T]
    has_more: bool
    unreadable_ids: Sequence[str] = ()
    """Ids of rows of this page that cannot be read."""


@dataclass(frozen=True)
class FencingToken:
    """Fencing token of a held lease. Writes with it are refused after another holder has acquired the lease."""

    name: str
    holder: str
    token: int
    """Increases whenever another holder acquires the lease."""


@dataclass(frozen=True)
class Caller:
    """Tenant and name of a caller."""

    tenant: str
    name: str


def new_id(prefix: Literal["job", "evt", "mdl", "dep", "prm"]) -> str:
    """Return a new id such as `job_01J...`; ids with the same prefix sort by creation time."""
    return f"{prefix}_{ULID()}"
