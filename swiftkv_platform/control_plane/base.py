"""Values that all rooms of the control plane share: callers, the clock, pages of lists, fencing tokens, ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from ulid import ULID

T = TypeVar("T")


Clock = Callable[[], float]
"""Clock of Unix seconds."""


def is_due(at: float, now: float, *, within: float) -> bool:
    """Whether a time has come that was at most `within` seconds away when it was chosen. One that is farther away has,
    too: the clock has been set back since, and by nothing longer."""
    return not 0.0 < at - now <= within


@dataclass(frozen=True)
class Page:
    """A request for part of a list."""

    after: str | None = None
    """Id of the last item already seen, in the chosen order."""
    limit: int = 20
    order: Literal["asc", "desc"] = "desc"
    """Order by time of creation."""


@dataclass(frozen=True)
class Slice(Generic[T]):
    """Part of a list."""

    items: Sequence[T]
    has_more: bool
    unreadable_ids: Sequence[str] = ()
    """Ids of rows of this part that cannot be read."""


@dataclass(frozen=True)
class Fence:
    """Fencing token of a held lease. Writes made under it are refused once another holder has the lease."""

    name: str
    holder: str
    token: int
    """Increases each time that another holder takes the lease."""


@dataclass(frozen=True)
class Caller:
    """Tenant and name of a caller."""

    tenant: str
    name: str


def new_id(prefix: Literal["job", "evt", "mdl", "dep", "prm"]) -> str:
    """A fresh id such as `job_01J...`; ids of one kind sort by the time they were made."""
    return f"{prefix}_{ULID()}"
