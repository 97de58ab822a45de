"""The queue: chooses the jobs that start next, and the attempts that are preempted. It starts and ends nothing itself.

Between tenants it is dominant resource fairness (Ghodsi et al., NSDI 2011): the tenant with the smallest dominant
share, relative to its weight, goes first. If shares are equal, as in a cluster that runs one job at a time, the tenant
with the smallest share since this process started goes first. Within a tenant, jobs go by priority and age.

A running job takes its bundles phase by phase: one worker prepares, all train, all evaluate. Bundles that it has not
taken yet are reserved for it, so that no job starts that would make it wait.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache

from swiftkv_platform.contract.events import ReasonCode, parse_phase
from swiftkv_platform.control_plane.access.tenants import Demand, TenantPolicies
from swiftkv_platform.control_plane.base import CachedCall
from swiftkv_platform.control_plane.components import RAY_TIMEOUT_S
from swiftkv_platform.control_plane.deployments.repository import (
    DeploymentRepository,
    DeploymentStatus,
    make_replica_bundle,
)
from swiftkv_platform.control_plane.jobs.attempt_events import has_used_time_slice
from swiftkv_platform.control_plane.jobs.job import Event, Job, JobStatus, Reason, set_wait_reason
from swiftkv_platform.control_plane.jobs.repository import JobRepository, QueuedJob, QueueSnapshot
from swiftkv_platform.control_plane.ray import (
    Bundle,
    EmptyNodePlacement,
    Node,
    RayJobs,
    can_place,
    compute_max_deployment_resources,
    normalize_resource_name,
    normalize_resources,
    reserve,
)
from swiftkv_platform.errors import ClusterUnavailableError, InvalidInputError
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs import JobSpec


class FairScheduler:
    """Chooses fairly between tenants. It remembers their shares; a new leader starts afresh."""

    def __init__(self, policies: TenantPolicies) -> None:
        self._policies = policies
        self._shares_given: dict[str, float] = {}
        """Shares given so far, relative to the tenant's weight."""

    def choose_next(self, snapshot: QueueSnapshot, capacity: ClusterCapacity, *, max_starts: int) -> list[QueuedJob]:
        """Choose at most `max_starts` waiting jobs, in the order in which they should start.

        If the first job of a tenant exceeds its quota or cannot be scheduled, no job of that tenant is chosen, since
        smaller jobs that overtake it could block it forever. A job that the nodes can never hold is skipped.
        """
        used = defaultdict(Demand, snapshot.used)
        queues = {tenant: deque(jobs) for tenant, jobs in snapshot.waiting.items()}
        self._raise_to_min_share(queues)
        chosen: list[QueuedJob] = []
        while len(chosen) < max_starts:
            for queue in queues.values():
                while queue and not capacity.fits_empty_nodes(queue[0].id):
                    queue.popleft()
            fitting = [
                tenant
                for tenant, queue in queues.items()
                if queue and self.fits_quota(tenant, used[tenant], queue[0].demand) and capacity.fits_now(queue[0].id)
            ]
            if not fitting:
                break
            tenant = min(fitting, key=lambda name: self._rank(name, used[name], snapshot.total, queues[name][0]))
            job = queues[tenant].popleft()
            used[tenant] += job.demand
            self._shares_given[tenant] += job.demand.dominant_share(snapshot.total) / self._policies.get(tenant).weight
            chosen.append(job)
            capacity.reserve(job.id)
        return chosen

    def choose_preempted(self, stuck: Sequence[Job], snapshot: QueueSnapshot, capacity: ClusterCapacity) -> list[Job]:
        """Choose the jobs of `stuck` that give way to a job of another tenant. Their tenants then go to the end of the
        queue."""
        self._raise_to_min_share(snapshot.waiting)
        chosen, taken = list[Job](), set[str]()
        for job in stuck:
            for tenant, (first, *_) in snapshot.waiting.items():
                holds = snapshot.used.get(tenant, Demand())
                may_start = tenant not in {job.tenant, *taken} and self.fits_quota(tenant, holds, first.demand)
                if may_start and capacity.fits_empty_nodes(first.id) and capacity.fits_now(first.id):
                    chosen.append(job)
                    self._shares_given[job.tenant] = max(self._shares_given.values()) + 1.0
                    taken.add(tenant)
                    capacity.reserve(first.id)
                    break
        return chosen

    def fits_quota(self, tenant: str, used: Demand, demand: Demand) -> bool:
        """Whether a tenant that uses `used` may have `demand` in addition."""
        return (used + demand).find_exceeded_limit(self._policies.get(tenant), adding=demand) is None

    def _rank(self, tenant: str, used: Demand, total: Demand, first: QueuedJob) -> tuple[float, float, str]:
        return (used.dominant_share(total) / self._policies.get(tenant).weight, self._shares_given[tenant], first.id)

    def _raise_to_min_share(self, queues: Collection[str]) -> None:
        """Raise each tenant's share to the smallest share of the waiting tenants, so that idle time earns no credit."""
        least = min((self._shares_given[tenant] for tenant in queues if tenant in self._shares_given), default=0.0)
        self._shares_given = {tenant: max(self._shares_given.get(tenant, least), least) for tenant in queues}


def explain_wait(
    job: Job,
    *,
    place: int,
    running: int,
    slots: int,
    exceeded: tuple[str, float, float] | None,
    now: float,
    away: str | None = None,
    lacking: Reason | None = None,
) -> Reason:
    """Explain why a queued job has not started, including the stored reason.

    Args:
        place: position in the queue of its tenant.
        running: number of all tenants' jobs on the cluster.
        slots: max jobs on the cluster.
        exceeded: quota that it would exceed: name, use with this job, and limit.
        away: problem with the cluster.
        lacking: reason, if the present nodes cannot hold it even when idle.
    """
    said = job.status_reason
    parts = [away] if away is not None else []
    if said is not None:
        parts.append(said.message)
    if lacking is not None and (said is None or said.code != lacking.code):
        parts.append(lacking.message)
    if job.not_before > now:
        parts.append(f"the next attempt starts in {job.not_before - now:.0f} s at the earliest")
    if place > 1:
        parts.append(f"position {place} in the queue of its tenant")
    if exceeded is not None:
        name, asked, most = exceeded
        parts.append(f"quota {name} reached: with this job the tenant would use {asked:g} of {most:g}")
    if running >= slots:
        parts.append(f"all job slots are in use ({running} of {slots})")
    if not parts:
        parts.append("next in the queue; starts within seconds")
    first = said or lacking or Reason(ReasonCode.WAITING_FOR_TURN, "")
    code = first.code if away is None else ClusterUnavailableError.code
    return Reason(code, "; ".join(parts), first.field)


_REPORT_LAG_S = 10.0
"""Seconds until Ray's report includes newly taken resources; Ray renews the report every 5 s."""
WHOLE_GROUP_PHASES = ("train", "evaluate")
"""Phases with all workers; other phases have one worker."""
_MAX_CACHED_REQUESTS = 10_000


@dataclass(frozen=True)
class ResourceRequest:
    """Bundles that a job needs to start."""

    bundles: Sequence[Bundle]
    description: str

    @classmethod
    def for_job(cls, spec: JobSpec, driver: Bundle) -> ResourceRequest:
        """Request for the fewest workers that the spec allows, of one trial at a time, and for the attempt's driver."""
        workers = make_worker_bundles(spec)
        bundles = [driver, *workers] if any(driver.values()) else workers
        return cls(bundles, spec.resources.describe(len(workers)))

    @property
    def wait_reason(self) -> Reason:
        """Reason of a job that the present nodes could not hold even if they were empty."""
        message = (
            f"waiting for {self.description}: the nodes of this cluster cannot hold them, even when idle; "
            "add a node, or request fewer or smaller workers"
        )
        return Reason(ReasonCode.WAITING_FOR_RESOURCES, message, field="resources")


def make_driver_bundle(settings: Settings) -> Bundle:
    """Return the bundle of an attempt's driver. A driver without reservation runs on Ray's head node."""
    return {"CPU": settings.entrypoint_num_cpus, "memory": settings.entrypoint_memory}


def make_worker_bundles(spec: JobSpec) -> list[Bundle]:
    """Return one bundle for each of the min workers of a spec, for one trial at a time."""
    resources = spec.resources
    each = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker}
    each["memory"] = resources.memory_per_worker or 0
    if resources.accelerator_type:
        name = normalize_resource_name(f"accelerator_type:{resources.accelerator_type}")
        each[name] = 0.001  # the amount that Ray itself requests for a type
    return [each] * (1 if spec.is_publish_only else resources.min_workers)


def list_unclaimed_bundles(job: Job, driver: Bundle, now: float) -> Sequence[Bundle]:
    """Return the bundles that a job still has to take on the cluster, beyond those in Ray's report."""
    attempt = job.attempt
    if not job.status.is_on_cluster or job.status in (JobStatus.PAUSING, JobStatus.CANCELLING) or attempt.stopping:
        return ()
    if not attempt.cursor:  # it has reported nothing yet
        return ResourceRequest.for_job(job.spec, driver).bundles
    phases = [*map(parse_phase, (*attempt.placed, *attempt.waiting))]
    if job.spec.sweep is not None and attempt.has_trained:
        return ()  # running trials leave their resources to waiting ones
    workers = make_worker_bundles(job.spec)
    phase = phases[-1] if phases else "train" if attempt.has_trained else ""  # old workers do not report placements
    needed = 1 if phase == "publish" else len(workers)
    if not phase or attempt.waiting or now < (attempt.placed_at or 0.0) + _REPORT_LAG_S:
        return workers[:needed]
    return [] if phase in WHOLE_GROUP_PHASES else workers[1:needed]


def compute_max_resources(spec: JobSpec) -> Bundle:
    """Return the resources of a job with its max number of workers, over all trials."""
    return {name: amount * spec.max_total_workers for name, amount in make_worker_bundles(spec)[0].items()}


def check_fits_node_groups(spec: JobSpec, settings: Settings, nodes: CachedCall[Sequence[Node] | None]) -> None:
    """Raise `InvalidInputError` for a job that neither the full node groups nor the present nodes can hold. Without
    named node groups there are no bounds: nodes come and go. Ray is asked only for what the groups do not hold."""
    groups, needs = settings.node_groups, ResourceRequest.for_job(spec, make_driver_bundle(settings))
    most = len(needs.bundles)
    full = [group.resources for group in groups.values() for _ in range(min(group.max_nodes, most))]
    if not groups or can_place(full, needs.bundles):
        return
    present = nodes.get(RAY_TIMEOUT_S, None)
    if present is not None and not can_place([node.total for node in present], needs.bundles):
        there = "; ".join(f"{name}: {group.describe()}" for name, group in groups.items())
        raise InvalidInputError(
            f"the job needs {needs.description}, which do not fit even if every node group has its max size "
            f"({there}); use a smaller resources.num_workers, smaller workers, or another accelerator_type",
            field="resources",
            value=spec.resources.num_workers,
        )


def list_reported_nodes(cluster: RayJobs) -> Sequence[Node] | None:
    """Return the nodes that a cluster reports; None if it does not report them or does not answer."""
    try:
        return cluster.list_nodes()
    except ClusterUnavailableError:  # starting a job raises it as well
        return None


class ClusterCapacity:
    """Free resources of the cluster in one scheduling cycle, reserved job by job. Running jobs and requests are
    remembered between cycles; a new leader starts afresh."""

    def __init__(self, jobs: JobRepository, cluster: RayJobs, driver: Bundle) -> None:
        self._jobs = jobs
        self._cluster = cluster
        self._driver = driver
        self._running: dict[str, Job] = {}
        self._requests: dict[str, ResourceRequest] = {}
        self._totals: Sequence[Bundle] = ()
        self._empty: EmptyNodePlacement | None = None
        """Nodes of this cycle; None if the cluster does not report them, and every job fits."""
        self._free: list[dict[str, float]] = []
        self._possible: set[str] = set()
        self.refused: dict[str, Reason] = {}
        """By job that could not be scheduled in this cycle: the reason."""
        self.cannot_fit: set[str] = set()
        """Jobs that the present nodes cannot hold. They are skipped until the nodes change, and other jobs of their
        tenant may start before them, since those take nothing that they could have."""

    def remember_jobs(self, jobs: Iterable[Job]) -> None:
        """Record the present state of these jobs."""
        self._running |= {job.id: job for job in jobs}

    @property
    def running_jobs(self) -> Sequence[Job]:
        """Jobs on the cluster, as they were last seen."""
        return [*self._running.values()]

    def reported_nodes(self) -> Sequence[Node] | None:
        """Return the nodes that the cluster reports; None if it does not report them or does not answer."""
        return list_reported_nodes(self._cluster)

    def begin_cycle(self, now: float, *, stuck: Sequence[Job] = (), over: Sequence[Job] = ()) -> None:
        """Find the resources that are free now.

        Args:
            stuck: jobs for which no unclaimed bundles are reserved.
            over: jobs that count as gone: what each holds is free, as if it were on one node.
        """
        nodes = self.reported_nodes()
        totals = [] if nodes is None else [node.total for node in nodes]
        if totals != self._totals:
            self._totals, self.cannot_fit = totals, set()
        self._possible, self.refused = set(), {}
        self._empty = None if nodes is None else EmptyNodePlacement(totals)
        if nodes is None:
            return
        present = [placed.id for placed in self._jobs.list_cluster_jobs()]
        unknown = [job_id for job_id in present if job_id not in self._running]
        self.remember_jobs(self._jobs.load_jobs(unknown) if unknown else ())
        self._running = {job_id: self._running[job_id] for job_id in present if job_id in self._running}
        self._free = [
            normalize_resources(free)
            for free in (*(node.free for node in nodes), *(compute_max_resources(job.spec) for job in over))
        ]
        gone = {job.id for job in (*stuck, *over)}
        for job in self._running.values():
            for bundle in () if job.id in gone else list_unclaimed_bundles(job, self._driver, now):
                reserve(self._free, [bundle])

    def fits_empty_nodes(self, job_id: str) -> bool:
        """Whether the nodes could hold the job if they were empty."""
        needs = self._load_request(job_id)
        if job_id in self._possible or needs is None or self._empty is None or self._empty.can_place(needs.bundles):
            self._possible.add(job_id)
            return True
        self.refused[job_id] = needs.wait_reason
        self.cannot_fit.add(job_id)
        return False

    def fits_now(self, job_id: str) -> bool:
        """Whether the job's resources are free now."""
        if job_id in self.refused:
            return False
        needs = self._load_request(job_id)
        if needs is None or can_place(self._free, needs.bundles):
            return True
        message = f"waiting for {needs.description}: other jobs use or have reserved them"
        self.refused[job_id] = Reason(ReasonCode.WAITING_FOR_RESOURCES, message, field="resources")
        return False

    def reserve(self, job_id: str) -> None:
        """Reserve the resources that `fits_now` has found for the job."""
        needs = self._load_request(job_id)
        if needs is not None:
            reserve(self._free, needs.bundles)

    def _load_request(self, job_id: str) -> ResourceRequest | None:
        """Return the needs of a job; None for one that is gone or unreadable, or if the nodes are not known."""
        if self._empty is not None and job_id not in self._requests:
            if len(self._requests) >= _MAX_CACHED_REQUESTS:
                self._requests.clear()
            self._requests |= {
                job.id: ResourceRequest.for_job(job.spec, self._driver) for job in self._jobs.load_jobs([job_id])
            }
        return None if self._empty is None else self._requests.get(job_id)

    def jobs_with_new_wait_reason(self, now: int) -> Sequence[tuple[Job, Event]]:
        """Return (job with the reason, event) of queued jobs without free resources whose reason is not stored yet."""
        return [
            set_wait_reason(job, now=now, reason=self.refused[job.id])
            for job in (self._jobs.load_jobs([*self.refused]) if self.refused else ())
            if job.status is JobStatus.QUEUED and job.status_reason != self.refused[job.id]
        ]


GetNodes = Callable[[], Sequence[Node] | None]
_ACTIVE = (JobStatus.STARTING, JobStatus.RUNNING, JobStatus.EVALUATING)
_STARTING_STATUSES = (DeploymentStatus.DEPLOYING, DeploymentStatus.UNHEALTHY)
_PHASE_PLACEMENT_TIMEOUT_S = 30.0
"""Seconds that a phase may wait for free resources before it counts as not placed."""
_REPLICA_PLACEMENT_TIMEOUT_S = 60.0
"""Seconds that a deployment's first replica may wait for resources before a job is preempted for it."""


@dataclass
class Preemption:
    """Chooses attempts that end to make room for others; remembers since when deployments wait."""

    jobs: JobRepository
    capacity: ClusterCapacity
    queue: FairScheduler
    deployments: DeploymentRepository
    settings: Settings
    _lacking: dict[str, float] = field(default_factory=dict, init=False)
    """Unix seconds since which an applied deployment has had no replica, by id."""

    @property
    def _deployments_share(self) -> float:
        """Share of the jobs' nodes that is open to deployments; if it is 1, jobs make no room for them."""
        return 1.0 if self.settings.serve_dashboard_url else self.settings.resolved_deployments_share

    def choose_preemptions(self, now: float, resting: Collection[str]) -> list[tuple[Job, Reason]]:
        """Return (job, reason) of attempts that must end: at once if `not_placed`, at a checkpoint if `preempted`.
        `resting`: queued jobs that do not start now."""
        going = [job for job in self.capacity.running_jobs if job.status in _ACTIVE and job.attempt.stopping is None]
        nodes = cache(self.capacity.reported_nodes)  # asks Ray
        return [*self._choose_for_job(going, nodes, now, resting), *self._choose_for_deployment(going, nodes, now)]

    def _choose_for_job(
        self, going: Sequence[Job], nodes: GetNodes, now: float, resting: Collection[str]
    ) -> list[tuple[Job, Reason]]:
        """Return (job, reason) of running jobs whose resources go to a job of another tenant."""
        staying = [job for job in going if job.attempt.yields is None]
        over = [job for job in staying if not job.attempt.waiting and has_used_time_slice(job, now, self.settings)]
        stuck = [job for job in staying if job.attempt.waiting and self._is_stuck(job, nodes, now)]
        if not stuck and not over:
            return []
        snapshot = self.jobs.read_queue(most=1, now=now, without={*resting, *self.capacity.cannot_fit})
        if not any(snapshot.waiting.values()):
            return []
        self.capacity.begin_cycle(now, stuck=stuck, over=over)
        chosen = self.queue.choose_preempted([*stuck, *over], snapshot, self.capacity)
        return [
            (job, _make_placement_reason(job) if job in stuck else _make_time_slice_reason(job, now)) for job in chosen
        ]

    def _is_stuck(self, job: Job, nodes: GetNodes, now: float) -> bool:
        """Whether a phase waits for resources that others hold, and no part of the job makes progress."""
        waited = now - (now if job.attempt.waiting_since is None else job.attempt.waiting_since)
        if waited < _PHASE_PLACEMENT_TIMEOUT_S:
            return False
        told = nodes()
        if told is None or (job.spec.sweep and job.attempt.has_trained):  # nodes may join, other trials may go on
            return waited > self.settings.placement_timeout_s
        phase = parse_phase([*job.attempt.waiting][-1])
        needed = make_worker_bundles(job.spec)[: None if phase in WHOLE_GROUP_PHASES else 1]
        return not can_place([node.free for node in told], needed)

    def _choose_for_deployment(self, going: Sequence[Job], nodes: GetNodes, now: float) -> list[tuple[Job, Reason]]:
        """Return (job, reason) of a job with the resources for the first replica of another tenant's deployment.

        Applied deployments are within their tenant's share. At most one job at a time, and none if jobs use no more
        than their share."""
        waiting = [
            item
            for item in (
                self.deployments.list_all_deployments().items if going and self._deployments_share < 1.0 else ()
            )
            if item.state.status in _STARTING_STATUSES and not item.state.replicas and item.spec.min_replicas
        ]
        self._lacking = {item.spec.id: self._lacking.get(item.spec.id, now) for item in waiting}
        for item in waiting:
            needs = make_replica_bundle(item.spec)
            told = nodes() if now - self._lacking[item.spec.id] >= _REPLICA_PLACEMENT_TIMEOUT_S else None
            if told is None or can_place([node.free for node in told], [needs]):
                continue
            if not any(self._jobs_exceed_share(name, going, told) for name, amount in needs.items() if amount):
                continue
            holds = {job.id: compute_max_resources(job.spec) for job in going}
            others = [job for job in going if job.tenant != item.tenant and can_place([holds[job.id]], [needs])]
            if any(job.attempt.yields for job in others):
                return []
            if others:
                most = max(others, key=lambda job: (holds[job.id]["GPU"], holds[job.id]["CPU"], job.id))
                return [(most, _make_deployment_reason(most))]
        return []

    def _jobs_exceed_share(self, name: str, jobs: Sequence[Job], nodes: Sequence[Node]) -> bool:
        total = sum(node.total.get(name, 0.0) for node in nodes)
        used = sum(compute_max_resources(job.spec)[name] for job in jobs)
        return used > total - compute_max_deployment_resources(total, self._deployments_share)


def _make_placement_reason(job: Job) -> Reason:
    needs = "; ".join(job.attempt.waiting.values())
    message = f"attempt {job.attempt.number} was ended to start another job, since it could not be scheduled: {needs}"
    return Reason(ReasonCode.NOT_PLACED, message, field="resources")


def _make_time_slice_reason(job: Job, now: float) -> Reason:
    used = now - (job.attempt.submitted_at or now)
    message = f"attempt {job.attempt.number} used its time slice ({used:.0f} s), and a job of another tenant is waiting"
    return Reason(ReasonCode.PREEMPTED, message)


def _make_deployment_reason(job: Job) -> Reason:
    message = (
        f"attempt {job.attempt.number} was preempted: it used resources that are reserved for deployments, and a "
        "deployment of another tenant needs them; use fewer or smaller workers"
    )
    return Reason(ReasonCode.PREEMPTED, message, field="resources")
