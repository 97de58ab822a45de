"""Places on the cluster: those that a job's workers need, and those that running jobs leave free.

A running job takes its places phase by phase: one worker prepares, all train, all evaluate. Places that it has not
taken yet are reserved for it, so that no job starts that would make it wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from swiftkv_platform.contract.events import ReasonCode, phase_of
from swiftkv_platform.control_plane.jobs.job import Event, Job, JobStatus, Reason, wait
from swiftkv_platform.control_plane.jobs.ports import JobCluster
from swiftkv_platform.control_plane.jobs.rows import JobRepository
from swiftkv_platform.control_plane.ray.places import Bundle, EmptyNodes, Node, fit, plain, resource, take
from swiftkv_platform.errors import ClusterUnavailableError, InvalidInputError
from swiftkv_platform.settings import NodeGroup, Settings
from swiftkv_platform.specs import JobSpec

GIB = 1 << 30
_LAG_S = 10.0
"""Seconds after which Ray's report includes what was taken; it is renewed every 5 s."""
WHOLE = ("train", "evaluate")
"""Phases in which all workers have a place; in other phases one worker has."""
_MOST_NEEDS = 10_000


@dataclass(frozen=True)
class Needs:
    """Places that a job needs to start."""

    bundles: Sequence[Bundle]
    words: str

    @classmethod
    def of(cls, spec: JobSpec, driver: Bundle) -> Needs:
        """Needs of the fewest workers that the spec allows, of one trial at a time, and of the attempt's driver."""
        workers = workers_of(spec)
        bundles = [driver, *workers] if any(driver.values()) else workers
        return cls(bundles, spec.resources.described(len(workers)))

    @property
    def nowhere(self) -> Reason:
        """Reason of a job that the present nodes could not hold even if they were empty."""
        message = f"waits for {self.words}: no node is large enough, or too few are; more must join"
        return Reason(ReasonCode.WAITING_FOR_RESOURCES, message, field="resources")


def driver_needs(settings: Settings) -> Bundle:
    """Return the place of an attempt's driver; one that reserves nothing runs on Ray's head."""
    return {"CPU": settings.entrypoint_num_cpus, "memory": settings.entrypoint_memory}


def workers_of(spec: JobSpec) -> list[Bundle]:
    """Return the places of the fewest workers that the spec allows, of one trial at a time."""
    resources = spec.resources
    each = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker}
    each["memory"] = resources.memory_per_worker or 0
    if resources.accelerator_type:
        each[resource(f"accelerator_type:{resources.accelerator_type}")] = 0.001  # as Ray asks for it
    return [each] * (1 if spec.only_publishes else resources.min_workers)


def outstanding(job: Job, driver: Bundle, now: float) -> Sequence[Bundle]:
    """Return the places that a job has yet to take on the cluster, beyond those in Ray's report."""
    attempt = job.attempt
    if not job.status.holds_cluster or job.status in (JobStatus.PAUSING, JobStatus.CANCELLING) or attempt.stopping:
        return ()
    if not attempt.cursor:  # it has reported nothing yet
        return Needs.of(job.spec, driver).bundles
    phases = [*map(phase_of, (*attempt.placed, *attempt.waiting))]
    if job.spec.sweep is not None and attempt.has_trained:
        return ()  # running trials leave their places to waiting ones
    workers = workers_of(job.spec)
    phase = phases[-1] if phases else "train" if attempt.has_trained else ""  # old workers report no places
    needed = 1 if phase == "publish" else len(workers)
    if not phase or attempt.waiting or now < (attempt.placed_at or 0.0) + _LAG_S:
        return workers[:needed]
    return [] if phase in WHOLE else workers[1:needed]


def most_of(spec: JobSpec) -> Bundle:
    """Return the resources that a job holds at the most workers that its spec allows, over all trials."""
    return {name: amount * spec.most_workers for name, amount in workers_of(spec)[0].items()}


class ClusterPlaces:
    """Free places in one round of the queue, taken job by job."""

    def __init__(
        self,
        nodes: Sequence[Node],
        kept: Iterable[Sequence[Bundle]],
        admission: Admission,
        freed: Sequence[Bundle] = (),
    ) -> None:
        self._empty = EmptyNodes(node.total for node in nodes)
        self._free = [plain(node) for node in (*(node.free for node in nodes), *freed)]
        self._admission = admission
        self._possible: set[str] = set()
        self.refused: dict[str, Reason] = {}
        """By job that found no place: the reason."""
        for bundles in kept:
            for bundle in bundles:
                take(self._free, [bundle])

    def could_fit(self, job_id: str) -> bool:
        """Whether the nodes could hold the job if they were empty."""
        needs = self._admission.needs(job_id)
        if job_id in self._possible or needs is None or self._empty.hold(needs.bundles):
            self._possible.add(job_id)
            return True
        self.refused[job_id] = needs.nowhere
        self._admission.never.add(job_id)
        return False

    def fits(self, job_id: str) -> bool:
        """Whether the job's places are free now."""
        needs = self._admission.needs(job_id)
        if job_id in self.refused:
            return False
        if needs is None or fit(self._free, needs.bundles):
            return True
        message = f"waits for {needs.words}, which others hold or are about to take"
        self.refused[job_id] = Reason(ReasonCode.WAITING_FOR_RESOURCES, message, field="resources")
        return False

    def take(self, job_id: str) -> None:
        """Give the job the places that `fits` has found."""
        needs = self._admission.needs(job_id)
        if needs is not None:
            take(self._free, needs.bundles)


@dataclass(frozen=True)
class GroupLimits:
    """Bounds of a cluster with an autoscaler. Without named node groups there are none: nodes come and go."""

    groups: Mapping[str, NodeGroup]
    driver: Bundle
    told: Callable[[], Sequence[Node] | None]
    """Nodes that Ray reports, some of which may be in no group; called only for needs that the groups do not hold."""

    def check(self, spec: JobSpec) -> None:
        """Raise `InvalidInputError` for a job that neither the full groups nor the present nodes can hold."""
        needs = Needs.of(spec, self.driver)
        most = len(needs.bundles)
        full = [group.resources for group in self.groups.values() for _ in range(min(group.max_nodes, most))]
        if not self.groups or fit(full, needs.bundles):
            return
        nodes = self.told()
        if nodes is not None and not fit([node.total for node in nodes], needs.bundles):
            there = "; ".join(f"{name}: {group.described()}" for name, group in self.groups.items())
            raise InvalidInputError(
                f"the job needs {needs.words}, more than all nodes that the cluster may have can hold ({there}); use "
                "fewer or smaller resources.num_workers, or another accelerator_type",
                field="resources",
                value=spec.resources.num_workers,
            )


NO_GROUPS = GroupLimits({}, {}, lambda: None)


def nodes_of(cluster: JobCluster) -> Sequence[Node] | None:
    """Return the nodes that a cluster reports; None if it does not report them or does not answer."""
    try:
        return cluster.capacity()
    except ClusterUnavailableError:  # starting a job raises it as well
        return None


class Admission:
    """Running jobs and their needs, remembered between rounds; a control plane that takes over begins anew."""

    def __init__(self, jobs: JobRepository, cluster: JobCluster, driver: Bundle) -> None:
        self._jobs = jobs
        self._cluster = cluster
        self._driver = driver
        self._running: dict[str, Job] = {}
        self._needs: dict[str, Needs] = {}
        self._nodes: Sequence[Bundle] = ()
        self.never: set[str] = set()
        """Jobs that the present nodes cannot hold. They are skipped until the nodes change, and other jobs of their
        tenant may start before them, since those take nothing that they could have."""

    def saw(self, jobs: Iterable[Job]) -> None:
        """Record the present state of these jobs."""
        self._running |= {job.id: job for job in jobs}

    @property
    def running(self) -> Sequence[Job]:
        """Jobs on the cluster, as they were last seen."""
        return [*self._running.values()]

    def told(self) -> Sequence[Node] | None:
        """Return the nodes that the cluster reports; None if it does not report them or does not answer."""
        return nodes_of(self._cluster)

    def places(self, now: float, *, stuck: Sequence[Job] = (), over: Sequence[Job] = ()) -> ClusterPlaces | None:
        """Return the places that are free now; None if the cluster does not report its nodes.

        Args:
            stuck: jobs for which no outstanding places are reserved.
            over: jobs that count as gone: what each holds is free, as if it were on one node.
        """
        nodes = self.told()
        there = [] if nodes is None else [node.total for node in nodes]
        if there != self._nodes:
            self._nodes, self.never = there, set()
        if nodes is None:
            return None
        present = [placed.id for placed in self._jobs.on_cluster()]
        unknown = [job_id for job_id in present if job_id not in self._running]
        self.saw(self._jobs.load(unknown) if unknown else ())
        self._running = {job_id: self._running[job_id] for job_id in present if job_id in self._running}
        gone = {job.id for job in (*stuck, *over)}
        kept = [outstanding(job, self._driver, now) for job in self._running.values() if job.id not in gone]
        return ClusterPlaces(nodes, kept, self, [most_of(job.spec) for job in over])

    def needs(self, job_id: str) -> Needs | None:
        """Return the needs of a job; None for one that is gone or unreadable."""
        if job_id not in self._needs:
            if len(self._needs) >= _MOST_NEEDS:
                self._needs.clear()
            self._needs |= {job.id: Needs.of(job.spec, self._driver) for job in self._jobs.load([job_id])}
        return self._needs.get(job_id)

    def untold(self, places: ClusterPlaces | None, now: int) -> Sequence[tuple[Job, Event]]:
        """Return, ready to be stored, queued jobs that were refused places, if their reason is not stored yet."""
        if places is None or not places.refused:
            return ()
        waiting = self._jobs.load([*places.refused])
        return [
            wait(job, now=now, reason=places.refused[job.id])
            for job in waiting
            if job.status is JobStatus.QUEUED and job.status_reason != places.refused[job.id]
        ]
