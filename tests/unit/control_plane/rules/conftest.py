"""A control plane without a network: real database and attempt store, a cluster and a clock that a test commands."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pytest

from swiftkv_platform.control_plane.base import Page, new_id
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.jobs.job import Event, Job, Reason, status_event
from swiftkv_platform.control_plane.jobs.ray_jobs import Entrypoint, SubmissionStatus
from swiftkv_platform.control_plane.jobs.reconciler import Reconciler
from swiftkv_platform.control_plane.jobs.rows import JobRepository
from swiftkv_platform.control_plane.models.rows import Registry
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.artifacts import manifest_digest
from swiftkv_platform.storage.attempt_store import AttemptStore
from tests.fakes.attempt_store import FakeWorker
from tests.fakes.cluster import FakeCluster
from tests.fakes.object_store import InMemoryObjectStore
from tests.fakes.serve_cluster import FakeServeCluster

TENANT = "acme"


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Plane:
    """Everything that a reconciler works on. New reconcilers can be built on the same state, as after a restart."""

    database: Database
    objects: InMemoryObjectStore = field(default_factory=InMemoryObjectStore)
    cluster: FakeCluster = field(default_factory=FakeCluster)
    serving: FakeServeCluster = field(default_factory=FakeServeCluster)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.jobs = JobRepository(self.database)
        self.catalog = Registry(self.database)
        self.store = AttemptStore(self.objects)

    def reconciler(self, *, max_running_jobs: int = 1, **replaced: Any) -> Reconciler:
        parts: dict[str, Any] = {"jobs": self.jobs, "cluster": self.cluster, "store": self.store, **replaced}
        return Reconciler(
            **parts,
            digest=manifest_digest,
            clock=self.clock,
            entrypoint=Entrypoint(
                ("python", "-m", "swiftkv_platform.jobs.distill"), "memory://test", {"OMP_NUM_THREADS": "1"}
            ),
            max_running_jobs=max_running_jobs,
            interval_s=1.0,
        )

    @cached_property
    def _loop(self) -> Reconciler:
        return self.reconciler()

    def tick(self) -> None:
        """Tick one reconciler, the same each time."""
        self._loop.tick()

    def started(self, **spec: Any) -> Job:
        """Submit a job and start it."""
        job = self.submit(**spec)
        self.tick()
        return job

    def end(
        self, job: Job, status: SubmissionStatus = SubmissionStatus.SUCCEEDED, message: str = "", attempt: int = 1
    ) -> Job:
        """End an attempt's process, and let the reconciler see it."""
        self.cluster.finish(f"{job.id}-{attempt}", status, message)
        self.tick()
        return self.get(job)

    def submit(self, *, tenant: str = TENANT, **spec: Any) -> Job:
        document = {"name": "test", **spec}
        job = Job(new_id("job"), tenant, "ann", JobSpec.model_validate(document), int(self.clock()))
        return self.jobs.create(job, status_event(job, now=job.created_at))

    def get(self, job: Job) -> Job:
        return self.jobs.get(job.id, tenant=job.tenant)

    def reason(self, job: Job) -> Reason:
        """Why the job has the status that it has."""
        found = self.get(job).status_reason
        assert found is not None
        return found

    def worker(self, job: Job, attempt: int = 1, writer: str = "driver") -> FakeWorker:
        return FakeWorker(self.objects, job.id, attempt, writer)

    def events(self, job: Job) -> list[Event]:
        return list(self.jobs.events(job.id, Page(limit=1000, order="asc")).items)

    def statuses(self, job: Job) -> list[str]:
        """Every status the job has had, in order."""
        return [event.data["status"] for event in self.events(job) if event.type == "status"]


@pytest.fixture
def plane(sqlite_database: Database) -> Plane:
    return Plane(sqlite_database)
