"""Choice of the job that starts next: fair between tenants, by priority and age within one. A function of what is held
and what waits; starts nothing.

Between tenants it is dominant resource fairness (Ghodsi et al., NSDI 2011): the tenant with the smallest dominant
share, relative to its weight, goes first. If shares are equal, as in a cluster that runs one job at a time, the tenant
that has been given the least since this process began goes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from swiftkv_platform.contract.events import ReasonCode
from swiftkv_platform.control_plane.access.demand import Demand
from swiftkv_platform.control_plane.access.tenants import Tenants
from swiftkv_platform.control_plane.deployments.deployment import Deployment
from swiftkv_platform.control_plane.jobs.job import Job, JobStatus, Reason
from swiftkv_platform.errors import ClusterUnavailableError

PRIORITIES = {"high": 0, "normal": 1, "low": 2}
"""Ranks of `limits.priority`; the lowest goes first."""


def held_by(jobs: Iterable[Job], deployments: Iterable[Deployment] = ()) -> dict[str, Demand]:
    """Return each tenant's demand of jobs on the cluster and of deployments; these count until their replicas are
    gone."""
    held: dict[str, Demand] = {}
    for job in jobs:
        if job.status.holds_cluster:
            held[job.tenant] = held.get(job.tenant, Demand()) + Demand.of(job.spec)
    for item in deployments:
        held[item.tenant] = held.get(item.tenant, Demand()) + Demand.of_deployment(item.spec)
    return held


class FairQueue:
    """Fair choice between tenants, which remembers what each was given; a control plane that takes over begins anew."""

    def __init__(self, policies: Tenants) -> None:
        self._policies = policies
        self._given: dict[str, float] = {}
        """Shares given so far, relative to the tenant's weight."""

    def next(
        self, standing: Standing, *, room: int, deployments: Sequence[Deployment] = (), places: FreePlaces | None = None
    ) -> list[Waiting]:
        """Choose at most `room` waiting jobs, in the order in which they should start.

        If the first job of a tenant does not fit its quota or finds no places, none of that tenant is chosen: smaller
        jobs that overtake it could keep it waiting for ever. A job that the nodes could never hold is skipped.
        """
        held, queues = dict(standing.held), {tenant: deque(jobs) for tenant, jobs in standing.waiting.items()}
        for tenant, demand in held_by((), deployments).items():
            held[tenant] = held.get(tenant, Demand()) + demand
        total = sum((Demand.of_deployment(item.spec) for item in deployments), standing.total)
        self._catch_up(queues)
        chosen: list[Waiting] = []
        while len(chosen) < room:
            for queue in queues.values():
                while queue and not (places is None or places.could_fit(queue[0].id)):
                    queue.popleft()
            fitting = [
                tenant
                for tenant, queue in queues.items()
                if queue
                and self.fits(tenant, held.get(tenant, Demand()), queue[0].demand)
                and (places is None or places.fits(queue[0].id))
            ]
            if not fitting:
                break
            tenant = min(fitting, key=lambda name: self._rank(name, held.get(name, Demand()), total, queues[name][0]))
            job = queues[tenant].popleft()
            held[tenant] = held.get(tenant, Demand()) + job.demand
            self._given[tenant] = self._given[tenant] + job.demand.share(total) / self._policies.policy(tenant).weight
            chosen.append(job)
            if places is not None:
                places.take(job.id)
        return chosen

    def overtaken(
        self,
        stuck: Sequence[Job],
        standing: Standing,
        *,
        deployments: Sequence[Deployment] = (),
        places: FreePlaces | None = None,
    ) -> list[Job]:
        """Choose those of the `stuck` jobs in whose place another tenant's would start. Their tenants go behind the
        others after that."""
        held = held_by((), deployments)
        self._catch_up(standing.waiting)
        chosen, taken = list[Job](), set[str]()
        for job in stuck:
            for tenant, (first, *_) in standing.waiting.items():
                holds = standing.held.get(tenant, Demand()) + held.get(tenant, Demand())
                may_start = tenant not in {job.tenant, *taken} and self.fits(tenant, holds, first.demand)
                if may_start and (places is None or (places.could_fit(first.id) and places.fits(first.id))):
                    chosen.append(job)
                    self._given[job.tenant] = max(self._given.values()) + 1.0
                    taken.add(tenant)
                    if places is not None:
                        places.take(first.id)
                    break
        return chosen

    def fits(self, tenant: str, held: Demand, demand: Demand) -> bool:
        """Whether a tenant that holds `held` may have `demand` in addition."""
        return (held + demand).exceeded_limit(self._policies.policy(tenant), adding=demand) is None

    def _rank(self, tenant: str, held: Demand, total: Demand, first: Waiting) -> tuple[float, float, str]:
        return held.share(total) / self._policies.policy(tenant).weight, self._given[tenant], first.id

    def _catch_up(self, queues: Collection[str]) -> None:
        """Raise each tenant's given share to the least of those waiting: time in which a tenant did not wait earns no
        credit."""
        least = min((self._given[tenant] for tenant in queues if tenant in self._given), default=0.0)
        self._given = {tenant: max(self._given.get(tenant, least), least) for tenant in queues}


@dataclass(frozen=True)
class Placed:
    """Columns of a job that may have an attempt on the cluster."""

    id: str
    status: JobStatus
    version: int
    watched_until: float
    """Unix seconds until which it is followed."""


@dataclass(frozen=True)
class Waiting:
    """A job of the queue."""

    id: str
    demand: Demand


@dataclass(frozen=True)
class Standing:
    """The queue, and what jobs hold of the cluster."""

    held: Mapping[str, Demand]
    """Sum over each tenant's jobs on the cluster."""
    total: Demand
    """Sum over all jobs on the cluster and in the queue."""
    waiting: Mapping[str, Sequence[Waiting]]
    """First jobs of each tenant that may start now: by priority, then by age."""


@dataclass(frozen=True)
class Usage:
    """Jobs of one tenant."""

    waiting: int
    """Jobs that wait or are paused."""
    stored: int
    """All jobs, including ended ones."""
    held: Demand


class FreePlaces(Protocol):
    """Free places on the cluster in a round of the queue."""

    def could_fit(self, job_id: str) -> bool:
        """Whether the nodes could hold the job if they were empty."""
        ...

    def fits(self, job_id: str) -> bool:
        """Whether the job's places are free now."""
        ...

    def take(self, job_id: str) -> None: ...


Claim = Callable[[str, Demand, Demand], bool]
"""(tenant, held, demand) -> whether a tenant that holds `held` may have `demand` in addition."""


def why_waiting(
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
    """Return why a queued job has not started, with the reason that was stored.

    Args:
        place: its position among its tenant's queued jobs.
        running: number of all tenants' jobs on the cluster.
        slots: most jobs on the cluster.
        exceeded: its tenant's limit that it would exceed: name, what would be held, and the limit.
        away: what is wrong with the cluster.
        lacking: the reason if the present nodes could not hold it even if they were empty.
    """
    said = job.status_reason
    parts = [away] if away is not None else []
    if said is not None:
        parts.append(said.message)
    if lacking is not None and (said is None or said.code != lacking.code):
        parts.append(lacking.message)
    if job.not_before > now:
        parts.append(f"its next attempt starts in {job.not_before - now:.0f} s or later")
    if place > 1:
        parts.append(f"{place - 1} of its tenant's jobs {'goes' if place == 2 else 'go'} first")
    if exceeded is not None:
        name, asked, most = exceeded
        parts.append(f"with it its tenant would hold {asked:g}, and the quota {name} is {most:g}")
    if running >= slots:
        runs = "1 job runs" if running == 1 else f"{running} jobs run"
        parts.append(f"{runs}, and there {'is 1 slot' if slots == 1 else f'are {slots} slots'} for all tenants")
    if not parts:
        parts.append("it is considered in the next round")
    first = said or lacking or Reason(ReasonCode.WAITING_FOR_TURN, "")
    code = first.code if away is None else ClusterUnavailableError.code
    return Reason(code, "; ".join(parts), first.field)
