"""The cluster that jobs run on, as a protocol, and arguments of queries for rows of jobs. Knows no implementation.

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
from swiftkv_platform.control_plane.access.tenants import TenantPolicy
from swiftkv_platform.control_plane.jobs.job import LIVE, WAITING, JobStatus
from swiftkv_platform.control_plane.ray.places import Node
from swiftkv_platform.errors import IdempotencyConflictError


@dataclass(frozen=True)
class JobFilter:
    status: JobStatus | None = None
    model: str | None = None
    """The teacher's `name_or_path`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Pairs that a job must all have."""


EVERYTHING = JobFilter()


@dataclass(frozen=True)
class Idempotency:
    """Idempotency key of a request: requests with the same key count as one."""

    key: str
    body_hash: str

    def check(self, body_hash: str, job_id: str) -> None:
        """Raise `IdempotencyConflictError` if the key was used for a job with another body."""
        if body_hash != self.body_hash:
            raise IdempotencyConflictError(
                f"Idempotency-Key {self.key!r} was used for job {job_id} with another body; send the same body, or use "
                "a new key",
                field="Idempotency-Key",
                value=self.key,
            )


def check_stored(tenant: str, policy: TenantPolicy, count: Callable[[Sequence[str] | None], int]) -> None:
    """Raise `QuotaExceededError` if the tenant has as many jobs as it may. `count`: counts its jobs in given statuses;
    None: in any."""
    kinds = (
        ("max_queued_jobs", WAITING, "that wait or are paused", "when one has started, or cancel"),
        ("max_unfinished_jobs", LIVE, "that have not ended", "when one has ended, or cancel"),
        ("max_stored_jobs", None, "that are stored, including ended ones", "when you have deleted"),
    )
    for name, statuses, which, then in kinds:
        if getattr(policy, name) is not None:
            number, cure = count(statuses), f"submit again {then} one"
            policy.check_number(name, number, tenant=tenant, kind=f"jobs {which}", cure=cure)


@dataclass(frozen=True)
class Entrypoint:
    """Command that runs an attempt."""

    command: Sequence[str]
    """Program and first arguments, e.g. `("python", "-m", "swiftkv_platform.jobs.distill")`."""
    store_uri: str
    """Address of the store from which the attempt reads `attempt.json` and to which it writes its results."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables. They must hold no secrets: Ray shows them to everyone with access to its dashboard."""

    def shell(self, attempt: AttemptId) -> str:
        """Join the command and its arguments to one line for a shell."""
        arguments = ["--job-id", attempt.job_id, "--attempt", str(attempt.number), "--store", self.store_uri]
        return shlex.join([*self.command, *arguments, PROTOCOL_OPTION, str(PROTOCOL)])


class SubmissionStatus(StrEnum):
    """Statuses of a submission in Ray."""

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
        """Start a command under an id that can be used once; do nothing if the id is already known."""
        ...

    def status(self, submission_id: str) -> Submission | None:
        """Return the submission's present state; None if the cluster does not know the id."""
        ...

    def listed(self) -> Sequence[ListedSubmission]:
        """Return all submissions that the cluster knows, whoever submitted them."""
        ...

    def stop(self, submission_id: str) -> None:
        """Ask the cluster to stop a submission; harmless for one that has ended or is unknown."""
        ...

    def remove(self, submission_id: str) -> None:
        """Delete an ended submission from the cluster; harmless for one that is unknown. Raises
        `ClusterUnavailableError` for one that has not ended."""
        ...

    def logs(self, submission_id: str, *, tail_lines: int | None = None) -> Iterator[bytes]:
        """Return the entrypoint's output so far, or its last `tail_lines` lines, as UTF-8 in pieces and without this
        process's credentials; nothing for an unknown id."""
        ...

    def follow_logs(self, submission_id: str) -> AsyncGenerator[bytes, None]:
        """Stream the entrypoint's output, in the form of `logs`, from its beginning until the submission has ended."""
        ...

    def capacity(self) -> Sequence[Node] | None:
        """Return the running nodes, as of seconds ago; None if the cluster does not report them, or grows by itself
        when an attempt asks for more."""
        ...

    def check(self) -> None:
        """Return if the cluster answers and has a live node, else raise."""
        ...
