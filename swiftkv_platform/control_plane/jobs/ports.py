"""The cluster that jobs run on, as a protocol, and what callers ask the rows of jobs for. Knows no implementation.

Every method may raise the errors its docstring names and no other; network and database failures arrive as
`ClusterUnavailableError`, `StorageError` and `DatabaseUnavailableError`.
"""

from __future__ import annotations

import shlex
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.contract.attempts import PROTOCOL, PROTOCOL_OPTION
from swiftkv_platform.control_plane.jobs.job import LIVE, WAITING, JobStatus
from swiftkv_platform.control_plane.ray.places import Node
from swiftkv_platform.errors import IdempotencyConflictError, QuotaExceededError


@dataclass(frozen=True)
class JobFilter:
    status: JobStatus | None = None
    model: str | None = None
    """The teacher's `name_or_path`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """All of these pairs."""


EVERYTHING = JobFilter()


@dataclass(frozen=True)
class Idempotency:
    """A caller's promise that requests with this key are one request."""

    key: str
    body_hash: str

    def check(self, body_hash: str, job_id: str) -> None:
        """Raises `IdempotencyConflictError` where the key stands for a job whose body was another."""
        if body_hash != self.body_hash:
            raise IdempotencyConflictError(
                f"Idempotency-Key {self.key!r} was used for job {job_id} with another body; "
                "send the same body or take a new key",
                field="Idempotency-Key",
                value=self.key,
            )


@dataclass(frozen=True)
class StoredJobs:
    """Jobs that a tenant may have at a time, a new one included; None is no limit."""

    waiting: int | None = None
    """Queued or paused."""
    unfinished: int | None = None
    stored: int | None = None
    """Those that have ended included."""

    def check(self, tenant: str, count: Callable[[Sequence[str] | None], int]) -> None:
        """Raises `QuotaExceededError` where the tenant has as many jobs of a kind as it may have. `count` counts those
        in some statuses; None: in any."""
        kinds = (
            ("max_queued_jobs", self.waiting, WAITING, "that wait or are paused", "when one has started, or cancel"),
            ("max_unfinished_jobs", self.unfinished, LIVE, "that have not ended", "when one has ended, or cancel"),
            ("max_stored_jobs", self.stored, None, "that are kept, ended ones included", "when you have deleted"),
        )
        for field_name, most, statuses, which, then in kinds:
            if most is not None and (number := count(statuses)) >= most:
                raise QuotaExceededError(
                    f"tenant {tenant!r} has {number} jobs {which}; its quota {field_name} is {most}; submit again "
                    f"{then} one",
                    field=field_name,
                    value=number,
                )


UNLIMITED = StoredJobs()


@dataclass(frozen=True)
class Entrypoint:
    """The command that an attempt is."""

    command: Sequence[str]
    """Program and first arguments, e.g. `("python", "-m", "swiftkv_platform.jobs.distill")`."""
    store_uri: str
    """Address of the store in which the attempt finds `attempt.json` and leaves everything."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables; Ray shows them to all that may see its dashboard: no secrets."""

    def shell(self, attempt: AttemptId) -> str:
        """Join the command and its arguments to one line for a shell."""
        arguments = ["--job-id", attempt.job_id, "--attempt", str(attempt.number), "--store", self.store_uri]
        return shlex.join([*self.command, *arguments, PROTOCOL_OPTION, str(PROTOCOL)])


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
