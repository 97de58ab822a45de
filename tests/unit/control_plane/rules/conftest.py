"""A control plane without a network: real database and attempt store, a cluster and a clock that a test commands."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pytest

from swiftkv_platform.control_plane.base import CachedCall, PageQuery, new_id
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.health import ControlPlaneHistograms
from swiftkv_platform.control_plane.jobs.job import Event, Job, Reason, make_status_event
from swiftkv_platform.control_plane.jobs.reconciler import PollIntervals, PollSchedule, Reconciler
from swiftkv_platform.control_plane.jobs.service import JobService
from swiftkv_platform.control_plane.loops import Leadership
from swiftkv_platform.control_plane.parsing import make_spec_parsers
from swiftkv_platform.control_plane.ray import Entrypoint, SubmissionStatus
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.traces import DISABLED_SPAN_RECORDER
from tests.support.components import make_components
from tests.support.fakes.attempt_store import FakeWorker
from tests.support.fakes.cluster import FakeCluster
from tests.support.fakes.object_store import InMemoryObjectStore
from tests.support.fakes.serve_cluster import FakeServeCluster
from tests.support.records import UNDISPUTED

TENANT = "acme"
STORE = "memory://test"


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
        command = ("python", "-m", "swiftkv_platform.jobs.distill")
        self.parts = replace(
            make_components(self.database, self.objects, cluster=self.cluster, clock=self.clock),
            entrypoint=Entrypoint(command, STORE, {"OMP_NUM_THREADS": "1"}),
            serving=self.serving,
        )
        self.nodes = CachedCall(self.cluster.list_nodes, self.clock, ttl_s=0.0)
        self.jobs, self.catalog, self.store = self.parts.jobs, self.parts.registry, self.parts.attempts

    @property
    def service(self) -> JobService:
        return JobService(self.parts, Settings(_env_file=None), self.nodes, make_spec_parsers())

    def reconciler(
        self,
        *,
        lease: Leadership = UNDISPUTED,
        polls: PollSchedule | None = None,
        concurrency: int = 1,
        parts: Mapping[str, object] = {},
        **settings: Any,
    ) -> Reconciler:
        """Build a reconciler that polls every job at every tick. `parts`: replace those of the plane."""
        return Reconciler(
            replace(self.parts, **parts),
            Settings(_env_file=None, **settings),
            lease,
            ControlPlaneHistograms(),
            DISABLED_SPAN_RECORDER,
            polls=polls or PollSchedule(PollIntervals(0.0, 0.0, 0.0)),
            concurrency=concurrency,
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
        return self.jobs.create(job, make_status_event(job, now=job.created_at))

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
        return list(self.jobs.list_events(job.id, PageQuery(limit=1000, order="asc")).items)

    def statuses(self, job: Job) -> list[str]:
        """Every status the job has had, in order."""
        return [event.data["status"] for event in self.events(job) if event.type == "status"]


@pytest.fixture
def plane(sqlite_database: Database) -> Plane:
    return Plane(sqlite_database)
