"""Choice of attempts that must end for others: attempts that are not placed, that have had their turn, or that hold
resources open to other tenants' deployments. Ends nothing itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache

from swiftkv_platform.contract.events import ReasonCode, phase_of
from swiftkv_platform.control_plane.deployments.deployment import Deployment, DeploymentStatus, replica_needs
from swiftkv_platform.control_plane.jobs.capacity import WHOLE, Admission, most_of, workers_of
from swiftkv_platform.control_plane.jobs.job import Job, JobStatus, Reason
from swiftkv_platform.control_plane.jobs.limits import AttemptLimits
from swiftkv_platform.control_plane.jobs.queue import FairQueue
from swiftkv_platform.control_plane.jobs.rows import JobRepository
from swiftkv_platform.control_plane.ray.places import Node, fit, open_to_deployments

Nodes = Callable[[], Sequence[Node] | None]
_GOES_ON = (JobStatus.STARTING, JobStatus.RUNNING, JobStatus.EVALUATING)
_COMES_UP = (DeploymentStatus.DEPLOYING, DeploymentStatus.UNHEALTHY)
_PATIENCE_S = 30.0
"""Seconds that a phase may look for places before it counts as not placed."""
_REPLICA_PATIENCE_S = 60.0
"""Seconds that a deployment's first replica may wait for its place before a job makes room for it."""


@dataclass
class MakingRoom:
    """Chooses attempts that end to make room for others; remembers since when deployments wait."""

    jobs: JobRepository
    admission: Admission
    queue: FairQueue
    limits: AttemptLimits
    deployments: Callable[[], Sequence[Deployment]]
    """Deployments of all tenants, which count against quotas."""
    share: float
    """Share of the jobs' nodes that is open to deployments; if it is 1, jobs make no room for them."""
    _lacking: dict[str, float] = field(default_factory=dict, init=False)
    """Unix seconds since which an applied deployment has had no replica, by id."""

    def endings(self, now: float, resting: Collection[str]) -> list[tuple[Job, Reason]]:
        """Return the jobs whose attempts must end, and why: `not_placed` at once, `preempted` at a checkpoint.
        `resting`: queued jobs that do not start now."""
        going = [job for job in self.admission.running if job.status in _GOES_ON and job.attempt.stopping is None]
        nodes = cache(self.admission.told)  # asks Ray
        return [*self._overtaken(going, nodes, now, resting), *self._displaced(going, nodes, now)]

    def _overtaken(
        self, going: Sequence[Job], nodes: Nodes, now: float, resting: Collection[str]
    ) -> list[tuple[Job, Reason]]:
        """Return the jobs in whose place another tenant's job would start."""
        staying = [job for job in going if job.attempt.yields is None]
        over = [job for job in staying if not job.attempt.waiting and self.limits.has_had_its_turn(job, now)]
        stuck = [job for job in staying if job.attempt.waiting and self._is_stuck(job, nodes, now)]
        if not stuck and not over:
            return []
        standing = self.jobs.standing(most=1, now=now, without={*resting, *self.admission.never})
        if not any(standing.waiting.values()):
            return []
        places = self.admission.places(now, stuck=stuck, over=over)
        chosen = self.queue.overtaken([*stuck, *over], standing, deployments=self.deployments(), places=places)
        return [(job, _not_placed(job) if job in stuck else _had_its_turn(job, now)) for job in chosen]

    def _is_stuck(self, job: Job, nodes: Nodes, now: float) -> bool:
        """Whether a phase waits for places that others hold, and no part of the job makes progress."""
        waited = now - (now if job.attempt.waiting_since is None else job.attempt.waiting_since)
        if waited < _PATIENCE_S:
            return False
        told = nodes()
        if told is None or (job.spec.sweep and job.attempt.has_trained):  # nodes may join, other trials may go on
            return waited > self.limits.placement_s
        phase = phase_of([*job.attempt.waiting][-1])
        needed = workers_of(job.spec)[: None if phase in WHOLE else 1]
        return not fit([node.free for node in told], needed)

    def _displaced(self, going: Sequence[Job], nodes: Nodes, now: float) -> list[tuple[Job, Reason]]:
        """Return a job that holds what another tenant's deployment needs for its first replica. Applied deployments are
        within their tenant's share. At most one at a time, and none if jobs hold no more than their share."""
        waiting = [
            item
            for item in (self.deployments() if going and self.share < 1.0 else ())
            if item.state.status in _COMES_UP and not item.state.replicas and item.spec.min_replicas
        ]
        self._lacking = {item.spec.id: self._lacking.get(item.spec.id, now) for item in waiting}
        for item in waiting:
            needs = replica_needs(item.spec)
            told = nodes() if now - self._lacking[item.spec.id] >= _REPLICA_PATIENCE_S else None
            if told is None or fit([node.free for node in told], [needs]):
                continue
            if not any(self._hold_too_much(name, going, told) for name, amount in needs.items() if amount):
                continue
            holds = {job.id: most_of(job.spec) for job in going}
            others = [job for job in going if job.tenant != item.tenant and fit([holds[job.id]], [needs])]
            if any(job.attempt.yields for job in others):
                return []
            if others:
                most = max(others, key=lambda job: (holds[job.id]["GPU"], holds[job.id]["CPU"], job.id))
                return [(most, _displaces(most))]
        return []

    def _hold_too_much(self, name: str, jobs: Sequence[Job], nodes: Sequence[Node]) -> bool:
        total = sum(node.total.get(name, 0.0) for node in nodes)
        held = sum(most_of(job.spec)[name] for job in jobs)
        return held > total - open_to_deployments(total, self.share)


def _not_placed(job: Job) -> Reason:
    needs = "; ".join(job.attempt.waiting.values())
    message = f"attempt {job.attempt.number} finds no place on the cluster, and another job gets its slot: {needs}"
    return Reason(ReasonCode.NOT_PLACED, message, field="resources")


def _had_its_turn(job: Job, now: float) -> Reason:
    held = now - (job.attempt.submitted_at or now)
    message = f"attempt {job.attempt.number} has had its slot for {held:.0f} s, and another tenant's job waits"
    return Reason(ReasonCode.PREEMPTED, message)


def _displaces(job: Job) -> Reason:
    message = (
        f"attempt {job.attempt.number} holds resources that are open to deployments, and another tenant's deployment "
        "finds none; use fewer or smaller workers to leave them free"
    )
    return Reason(ReasonCode.PREEMPTED, message, field="resources")
