"""Choice of the job that starts next: fair between tenants, by priority and age within one. A function of jobs and
deployments; starts nothing.

Between tenants it is dominant resource fairness (Ghodsi et al., NSDI 2011): the tenant with the smallest share of what
it holds most of goes first, relative to its weight. Where shares are equal, as in a cluster that runs one job at a
time, the tenant that has been given the least since this process began goes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swiftkv_platform.contract.autoscaling import replica_resources
from swiftkv_platform.orchestration.job import Job, JobStatus
from swiftkv_platform.orchestration.ports import Deployment
from swiftkv_platform.orchestration.tenants import Policies, TenantPolicy
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.deployment import ResolvedDeployment

_PRIORITIES = {"high": 0, "normal": 1, "low": 2}


@dataclass(frozen=True)
class Demand:
    """Share of the cluster that jobs and deployments hold, or ask for, counted with the most they may grow to."""

    jobs: int = 0
    gpus: float = 0.0
    cpus: float = 0.0
    replicas: int = 0

    @classmethod
    def of(cls, spec: JobSpec) -> Demand:
        trials = 1 if spec.sweep is None else min(spec.sweep.max_concurrent, spec.sweep.num_trials)
        workers = spec.resources.max_workers * trials
        return cls(1, workers * spec.resources.gpus_per_worker, workers * spec.resources.cpus_per_worker)

    @classmethod
    def of_deployment(cls, spec: ResolvedDeployment) -> Demand:
        resources, replicas = replica_resources(spec.engine), spec.max_replicas
        return cls(0, replicas * resources["num_gpus"], replicas * resources["num_cpus"], replicas)

    def __add__(self, other: Demand) -> Demand:
        return Demand(
            self.jobs + other.jobs,
            self.gpus + other.gpus,
            self.cpus + other.cpus,
            self.replicas + other.replicas,
        )

    def beyond(self, other: Demand) -> Demand:
        """Return what this has more than `other`; nothing of what it has less."""
        return Demand(
            max(self.jobs - other.jobs, 0),
            max(self.gpus - other.gpus, 0.0),
            max(self.cpus - other.cpus, 0.0),
            max(self.replicas - other.replicas, 0),
        )

    def exceeded_limit(self, policy: TenantPolicy, *, adding: Demand | None = None) -> tuple[str, float, float] | None:
        """Name, demand and limit of the first of a tenant's limits that this is above; None if it is within all.

        Args:
            adding: the part of this that is new. A limit of something that it has nothing of does not stop it, though
                what was there before is above.
        """
        limits = (
            ("max_running_jobs", self.jobs, policy.max_running_jobs, adding is None or adding.jobs > 0),
            ("max_gpus", self.gpus, policy.max_gpus, adding is None or adding.gpus > 0),
            ("max_cpus", self.cpus, policy.max_cpus, adding is None or adding.cpus > 0),
            ("max_replicas", self.replicas, policy.max_replicas, adding is None or adding.replicas > 0),
        )
        return next(
            (
                (name, asked, most)
                for name, asked, most, counts in limits
                if counts and most is not None and asked > most
            ),
            None,
        )

    def share(self, total: Demand) -> float:
        """The largest of its parts of `total`."""
        parts = ((self.jobs, total.jobs), (self.gpus, total.gpus), (self.cpus, total.cpus))
        return max((part / whole for part, whole in parts if whole), default=0.0)


def held_by(jobs: Iterable[Job], deployments: Iterable[Deployment] = ()) -> dict[str, Demand]:
    """Return what each tenant's jobs and deployments hold of the cluster; a deployment, until its replicas are gone."""
    held: dict[str, Demand] = {}
    for job in jobs:
        if job.status.holds_cluster:
            held[job.tenant] = held.get(job.tenant, Demand()) + Demand.of(job.spec)
    for item in deployments:
        held[item.tenant] = held.get(item.tenant, Demand()) + Demand.of_deployment(item.spec)
    return held


class FairQueue:
    """Remembers what it has given to whom; another control plane that takes over begins anew."""

    def __init__(self, policies: Policies) -> None:
        self._policies = policies
        self._given: dict[str, float] = {}
        """Shares started so far over the tenant's weight."""

    def next(self, live: Sequence[Job], *, room: int, now: float, deployments: Sequence[Deployment] = ()) -> list[Job]:
        """Choose at most `room` of the jobs that wait, in the order in which they should start beside the deployments.

        Of a tenant whose first job does not fit its quota none is taken: a smaller one that overtook it could keep it
        waiting for ever.
        """
        held, queues = held_by(live, deployments), _queues(live, now)
        total = sum((Demand.of(job.spec) for job in live if job.status is not JobStatus.PAUSED), Demand())
        total = sum((Demand.of_deployment(item.spec) for item in deployments), total)
        self._catch_up(queues)
        chosen: list[Job] = []
        while len(chosen) < room:
            fitting = [
                tenant
                for tenant, queue in queues.items()
                if queue and self._fits(tenant, held.get(tenant, Demand()), Demand.of(queue[0].spec))
            ]
            if not fitting:
                break
            tenant = min(fitting, key=lambda name: self._rank(name, held.get(name, Demand()), total, queues[name][0]))
            job = queues[tenant].popleft()
            demand = Demand.of(job.spec)
            held[tenant] = held.get(tenant, Demand()) + demand
            self._given[tenant] = self._given[tenant] + demand.share(total) / self._policies.policy(tenant).weight
            chosen.append(job)
        return chosen

    def _fits(self, tenant: str, held: Demand, demand: Demand) -> bool:
        return (held + demand).exceeded_limit(self._policies.policy(tenant), adding=demand) is None

    def _rank(self, tenant: str, held: Demand, total: Demand, first: Job) -> tuple[float, float, str]:
        return held.share(total) / self._policies.policy(tenant).weight, self._given[tenant], first.id

    def _catch_up(self, queues: dict[str, deque[Job]]) -> None:
        """A tenant that did not wait until now has saved nothing up."""
        least = min((self._given[tenant] for tenant in queues if tenant in self._given), default=0.0)
        self._given = {tenant: max(self._given.get(tenant, least), least) for tenant in queues}


def _queues(live: Sequence[Job], now: float) -> dict[str, deque[Job]]:
    """Each tenant's jobs that may start, first come, first served within a priority."""
    waiting = [job for job in live if job.status is JobStatus.QUEUED and job.not_before <= now]
    waiting.sort(key=lambda job: (_PRIORITIES[job.spec.limits.priority], job.id))
    queues: dict[str, deque[Job]] = {}
    for job in waiting:
        queues.setdefault(job.tenant, deque()).append(job)
    return queues
