"""The cluster that jobs run on, as a protocol, and what callers ask the rows of jobs for. Knows no implementation.

Every method may raise the errors its docstring names and no other; network and database failures arrive as
`ClusterUnavailableError`, `StorageError` and `DatabaseUnavailableError`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from swiftkv_platform.control_plane.jobs.job import JobStatus
from swiftkv_platform.control_plane.ray.places import Node


@dataclass(frozen=True)
class JobFilter:
    status: JobStatus | None = None
    model: str | None = None
    """The teacher's `name_or_path`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """All of these pairs."""


@dataclass(frozen=True)
class Idempotency:
    """A caller's promise that requests with this key are one request."""

    key: str
    body_hash: str


@dataclass(frozen=True)
class StoredJobs:
    """Jobs that a tenant may have at a time, a new one included; None is no limit."""

    waiting: int | None = None
    """Queued or paused."""
    unfinished: int | None = None
    stored: int | None = None
    """Those that have ended included."""


UNLIMITED = StoredJobs()


class SubmissionStatus(StrEnum):
    """Ray's view of a submission."""

    PENDING = "PENDING"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"

    @property
    def is_terminal(self) -> bool:
        return self not in (SubmissionStatus.PENDING, SubmissionStatus.RUNNING)


@dataclass(frozen=True)
class Submission:
    status: SubmissionStatus
    message: str = ""
    """Ray's own explanation."""


@dataclass(frozen=True)
class ListedSubmission:
    """A submission as the cluster lists it."""

    submission_id: str
    entrypoint: str
    """Its command, as it was submitted."""
    ended_at: float | None = None
    """Unix seconds; None until it has ended."""


class JobCluster(Protocol):
    """The cluster on which attempts run. Every method raises `ClusterUnavailableError` when it does not answer."""

    def submit(self, submission_id: str, entrypoint: str, env: Mapping[str, str]) -> None:
        """Start a command under an id that can be used once; does nothing if that id is already known."""
        ...

    def status(self, submission_id: str) -> Submission | None:
        """Return the submission as it stands; None where the cluster does not know the id."""
        ...

    def listed(self) -> Sequence[ListedSubmission]:
        """Return all submissions that the cluster knows, whoever submitted them."""
        ...

    def stop(self, submission_id: str) -> None:
        """Ask for the end of a submission; harmless for one that has ended or is unknown."""
        ...

    def remove(self, submission_id: str) -> None:
        """Have the cluster forget a submission that has ended; harmless for one that is unknown. Raises
        `ClusterUnavailableError` for one that has not ended."""
        ...

    def logs(self, submission_id: str, *, tail_lines: int | None = None) -> Iterator[bytes]:
        """Return what the entrypoint has printed so far (its last lines, where a number is given), as UTF-8 in pieces
        and without this process's credentials; nothing for an unknown id."""
        ...

    def follow_logs(self, submission_id: str) -> AsyncGenerator[bytes, None]:
        """Stream what the entrypoint prints, as `logs` has it, from its beginning until the submission has ended."""
        ...

    def capacity(self) -> Sequence[Node] | None:
        """Return the nodes that run, as they were seconds ago; None where the cluster does not tell, or grows by itself
        when an attempt asks for more."""
        ...

    def check(self) -> None:
        """Returns if the cluster answers and has a node that is alive."""
        ...
