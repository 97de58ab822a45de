"""Outside services that jobs need, as protocols beside their consumer. Knows no implementation.

Every method may raise the errors its docstring names and no other; network and database failures arrive as
`ClusterUnavailableError`, `StorageError` and `DatabaseUnavailableError`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.contract.attempts import AttemptRequest, Manifest
from swiftkv_platform.contract.events import AttemptEvent
from swiftkv_platform.control_plane.base import Fence, Page, Slice
from swiftkv_platform.control_plane.jobs.job import Event, Job, JobStatus, MetricPoint
from swiftkv_platform.control_plane.jobs.queue import Claim, Placed, Standing, Usage
from swiftkv_platform.control_plane.models.model import Model

# Database


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


class JobRepository(Protocol):
    """Jobs with their events and metrics. Each method is one transaction."""

    def create(
        self, job: Job, event: Event, *, idempotency: Idempotency | None = None, limits: StoredJobs = UNLIMITED
    ) -> Job:
        """Store a new job; with a key the tenant has used before, return that key's job and store nothing.

        Args:
            limits: jobs that the tenant may have.

        Raises:
            IdempotencyConflictError: the key came with another body.
            QuotaExceededError: the tenant has as many as it may have.
            InvalidInputError: the spec names an uploaded file that is not there any more.
            ConflictError: it publishes where another tenant does.
        """
        ...

    def recall(self, tenant: str, idempotency: Idempotency) -> Job | None:
        """The job that the tenant's key stands for already. Raises `IdempotencyConflictError` for another body."""
        ...

    def get(self, job_id: str, *, tenant: str) -> Job:
        """Raises `NotFoundError`, also for another tenant's job, and `UnreadableRowError`."""
        ...

    def list(self, page: Page, *, tenant: str, where: JobFilter = ...) -> Slice[Job]:
        """The page ends early where its jobs come to megabytes. Raises `InvalidInputError` if `page.after` names no job
        of the tenant."""
        ...

    def on_cluster(self) -> Sequence[Placed]:
        """All tenants' jobs that may have an attempt on the cluster, oldest first; no spec is read."""
        ...

    def load(self, ids: Sequence[str]) -> Sequence[Job]:
        """These jobs, in this order; one that is gone, or cannot be read, is left out."""
        ...

    def live_among(self, ids: Collection[str]) -> set[str]:
        """Those of the ids whose jobs are not in a final status."""
        ...

    def standing(self, *, most: int, now: float, without: Collection[str] = ()) -> Standing:
        """The queue as it is now, decided by columns alone.

        Args:
            most: jobs of each tenant that are named.
            now: retries that are due later are not named.
            without: ids of jobs that are not named.
        """
        ...

    def queue_places(self, tenant: str) -> Mapping[str, int]:
        """Place of each of the tenant's queued jobs among them, by priority, then by age; the first has 1."""
        ...

    def usage(self, tenant: str) -> Usage: ...

    def claim(
        self, starts: Sequence[tuple[Job, Event]], *, most: int, fits: Claim, fence: Fence | None = None
    ) -> Sequence[Job]:
        """Give waiting jobs their places on the cluster, counted anew while no other control plane does the same.

        Args:
            starts: jobs in the status `starting`, of the version that they were read at, with the event that says so.
            most: jobs on the cluster at the same time.
            fits: whether a tenant may have this much more beside its jobs and deployments.

        Returns the jobs that have got a place. One that has changed since, or has none, is left out; of a tenant whose
        first job has none no other gets one. Raises `LeaseLostError`.
        """
        ...

    def watch(self, job_id: str, until: float) -> None:
        """Have the job's events read often until then. Its version stays."""
        ...

    def count_by_status(self) -> Mapping[JobStatus, int]: ...

    def attempts_on_cluster(self) -> Mapping[str, int | None]:
        """Number of the present attempt of each job that may have one on the cluster; None where it cannot be read."""
        ...

    def update(
        self,
        job: Job,
        *,
        events: Sequence[Event] = (),
        points: Sequence[MetricPoint] = (),
        model: Model | None = None,
        fence: Fence | None = None,
    ) -> Job:
        """Replace the row of the version that `job` was read at, and add what happened, all or nothing.

        Returns the job with its new version. Raises `StaleVersionError` if the row has moved on, and `LeaseLostError`
        if the lease of `fence` is another's.
        """
        ...

    def events(self, job_id: str, page: Page) -> Slice[Event]:
        """A job's events in the order in which they were stored. Raises `InvalidInputError` for an unknown `after`."""
        ...

    def points(self, job_id: str, page: Page) -> Slice[MetricPoint]:
        """Metrics by step; `page.after` is a step in decimal. Raises `InvalidInputError` if it is not."""
        ...


# Training cluster


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


@dataclass(frozen=True)
class Node:
    """Resources of a node by Ray's names: `CPU`, `GPU`, `memory` (bytes), `accelerator_type:H100`."""

    total: Mapping[str, float]
    free: Mapping[str, float]
    """Resources that no task, actor or placement group holds."""


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


class StoredEvent(Protocol):
    """An event object and its place among its writer's."""

    @property
    def writer(self) -> str: ...

    @property
    def sequence(self) -> int: ...

    @property
    def event(self) -> AttemptEvent: ...


class AttemptStore(Protocol):
    """The objects below `jobs/{id}/attempts/{n}/`. Every method raises `StorageError` when the store fails."""

    def write_request(self, request: AttemptRequest) -> None:
        """Write `attempt.json`; writing the same request again changes nothing."""
        ...

    def request_pause(self, attempt: AttemptId) -> None:
        """Ask the attempt to checkpoint and end; asking again changes nothing."""
        ...

    def read_events(
        self, attempt: AttemptId, cursor: Mapping[str, int], most: int | None = None, turn: int | None = None
    ) -> Sequence[StoredEvent]:
        """Events after `cursor` (last sequence number read, by writer), each writer's in order and without gaps.
        `most`: events read; what is beyond comes with the next cursor. `turn`: number of the look, by which it is one
        request that lists a part: every part has its turn. None lists all."""
        ...

    def newest_checkpoint(self, job_id: str, before_attempt: int | None = None) -> str | None:
        """Key of the newest complete checkpoint of the attempts before `before_attempt` (of all, if None)."""
        ...

    def artifact_manifest(self, attempt: AttemptId) -> Manifest | None:
        """Return the manifest of an attempt's artifact; None until it is complete."""
        ...

    def artifact_uri(self, attempt: AttemptId) -> str: ...

    def save_logs(self, attempt: AttemptId, pieces: Iterable[bytes]) -> None:
        """Keep the log of an attempt that has ended."""
        ...

    def discard_inputs(self, job_id: str) -> None:
        """Delete what attempts had prepared and only another attempt would need."""
        ...


# Serving cluster
