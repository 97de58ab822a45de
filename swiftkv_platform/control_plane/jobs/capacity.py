"""Places on the cluster: those that a job's workers need, and those that are left beside the jobs that run.

A job that runs takes its places one phase after the other: a worker prepares, all train, all measure. What it has not
taken yet is kept for it, so that none starts beside it for which it would have to wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swiftkv_platform.contract.events import ReasonCode, phase_of
from swiftkv_platform.control_plane.jobs.job import Event, Job, JobStatus, Reason, wait
from swiftkv_platform.control_plane.jobs.limits import AttemptLimits
from swiftkv_platform.control_plane.jobs.ports import JobCluster
from swiftkv_platform.control_plane.jobs.rows import JobRepository
from swiftkv_platform.control_plane.ray.places import Bundle, Node, fit, plain, resource, take
from swiftkv_platform.errors import ClusterUnavailableError
from swiftkv_platform.specs import JobSpec

GIB = 1 << 30
_LAG_S = 10.0
"""Seconds after which Ray's report has what was taken; it is renewed every 5 s."""
_PATIENCE_S = 30.0
"""Seconds for which a phase looks for its places before it is said to find none."""
_GOES_ON = (JobStatus.STARTING, JobStatus.RUNNING, JobStatus.EVALUATING)
_WHOLE = ("train", "evaluate")
"""Phases in which all workers have a place; in others one has."""
_MOST_NEEDS = 10_000


@dataclass(frozen=True)
class Needs:
    """Places that a job begins with."""

    bundles: Sequence[Bundle]
    words: str

    @classmethod
    def of(cls, spec: JobSpec, driver: Bundle) -> Needs:
        """Needs of the fewest workers that the spec allows, of one trial at a time, and of the attempt's driver."""
        workers = _workers(spec)
        bundles = [driver, *workers] if any(driver.values()) else workers
        return cls(bundles, spec.resources.described(len(workers)))


def _workers(spec: JobSpec) -> list[Bundle]:
    resources = spec.resources
    each = {"CPU": resources.cpus_per_worker, "GPU": resources.gpus_per_worker}
    each["memory"] = resources.memory_per_worker or 0
    if resources.accelerator_type:
        each[resource(f"accelerator_type:{resources.accelerator_type}")] = 0.001  # as Ray asks for it
    return [each] * (1 if spec.only_publishes else resources.min_workers)


def outstanding(job: Job, driver: Bundle, now: float) -> Sequence[Bundle]:
    """Places that a job has still to take on the cluster, as far as Ray's report tells."""
    attempt = job.attempt
    if not job.status.holds_cluster or job.status in (JobStatus.PAUSING, JobStatus.CANCELLING) or attempt.stopping:
        return ()
    if not attempt.cursor:  # nothing was heard of it
        return Needs.of(job.spec, driver).bundles
    phases = [*map(phase_of, (*attempt.placed, *attempt.waiting))]
    if job.spec.sweep is not None and attempt.has_trained:
        return ()  # trials that run leave their places to those that wait
    workers = _workers(job.spec)
    phase = phases[-1] if phases else "train" if attempt.has_trained else ""  # old workers tell of no places
    needed = 1 if phase == "publish" else len(workers)
    if not phase or attempt.waiting or now < (attempt.placed_at or 0.0) + _LAG_S:
        return workers[:needed]
    return [] if phase in _WHOLE else workers[1:needed]


def _sum(bundles: Sequence[Bundle]) -> Bundle:
    return {name: sum(bundle[name] for bundle in bundles) for name in bundles[0]}


def _since(job: Job, now: float) -> float:
    since = job.attempt.waiting_since
    return now if since is None else since


class ClusterPlaces:
    """Places that are free in one round of the queue, taken one job after the other."""

    def __init__(
        self,
        nodes: Sequence[Node],
        kept: Iterable[Sequence[Bundle]],
        admission: Admission,
        freed: Sequence[Bundle] = (),
    ) -> None:
        self._total = [node.total for node in nodes]
        self._free = [plain(node) for node in (*(node.free for node in nodes), *freed)]
        self._admission = admission
        self._possible: set[str] = set()
        self.refused: dict[str, Reason] = {}
        """Reasons of the jobs that have found none."""
        for bundles in kept:
            for bundle in bundles:
                take(self._free, [bundle])

    def could_fit(self, job_id: str) -> bool:
        """Whether the nodes would hold the job if nothing else were on them."""
        needs = self._admission.needs(job_id)
        if job_id in self._possible or needs is None or fit(self._total, needs.bundles):
            self._possible.add(job_id)
            return True
        self._refuse(job_id, f"waits for {needs.words}: no node has such places, or too few have; some have to join")
        self._admission.never.add(job_id)
        return False

    def fits(self, job_id: str) -> bool:
        """Whether the job finds its places now."""
        needs = self._admission.needs(job_id)
        if job_id in self.refused:
            return False
        if needs is None or fit(self._free, needs.bundles):
            return True
        self._refuse(job_id, f"waits for {needs.words}, which others hold or have still to take")
        return False

    def take(self, job_id: str) -> None:
        """Give the job the places that `fits` has found."""
        needs = self._admission.needs(job_id)
        if needs is not None:
            take(self._free, needs.bundles)

    def _refuse(self, job_id: str, message: str) -> None:
        self.refused[job_id] = Reason(ReasonCode.WAITING_FOR_RESOURCES, message, field="resources")


class Admission:
    """Knows what runs, from round to round; another control plane that takes over begins anew."""

    def __init__(self, jobs: JobRepository, cluster: JobCluster, driver: Bundle) -> None:
        self._jobs = jobs
        self._cluster = cluster
        self._driver = driver
        self._running: dict[str, Job] = {}
        self._needs: dict[str, Needs] = {}
        self._nodes: Sequence[Bundle] = ()
        self.never: set[str] = set()
        """Jobs that the nodes there are cannot hold. They are not asked about again before the nodes change, and keep
        no other job of their tenant waiting: it takes nothing that they could have."""

    def saw(self, jobs: Iterable[Job]) -> None:
        """Note how far these jobs are."""
        self._running |= {job.id: job for job in jobs}

    def in_the_way(self, now: float, limits: AttemptLimits) -> tuple[Sequence[Job], Sequence[Job]]:
        """Return the jobs of which a phase waits for places that others hold, and no part of which goes on; and those
        that have had their turn."""
        going = [
            job
            for job in self._running.values()
            if job.status in _GOES_ON and not (job.attempt.stopping or job.attempt.yields)
        ]
        over = [job for job in going if not job.attempt.waiting and limits.has_had_its_turn(job, now)]
        waiting = [job for job in going if job.attempt.waiting and now - _since(job, now) >= _PATIENCE_S]
        nodes = self._told() if waiting else None
        stuck: list[Job] = []
        for job in waiting:
            phase = phase_of([*job.attempt.waiting][-1])
            if nodes is None or (job.spec.sweep and job.attempt.has_trained):  # nodes, or other trials, may come
                finds_none = now - _since(job, now) > limits.placement_s
            else:
                needed = _workers(job.spec)[: None if phase in _WHOLE else 1]
                finds_none = not fit([node.free for node in nodes], needed)
            stuck += [job] if finds_none else []
        return stuck, over

    def _told(self) -> Sequence[Node] | None:
        try:
            return self._cluster.capacity()
        except ClusterUnavailableError:  # the start of a job meets it as well
            return None

    def places(self, now: float, *, stuck: Sequence[Job] = (), over: Sequence[Job] = ()) -> ClusterPlaces | None:
        """Return the places that are free now; None where the cluster does not tell.

        Args:
            stuck: jobs for which none are kept.
            over: jobs that count as gone; what they hold, as if it were on one node.
        """
        nodes = self._told()
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
        return ClusterPlaces(nodes, kept, self, [_sum(_workers(job.spec)) for job in over])

    def needs(self, job_id: str) -> Needs | None:
        """Return the needs of a job; None for one that is gone, or cannot be read."""
        if job_id not in self._needs:
            if len(self._needs) >= _MOST_NEEDS:
                self._needs.clear()
            self._needs |= {job.id: Needs.of(job.spec, self._driver) for job in self._jobs.load([job_id])}
        return self._needs.get(job_id)

    def untold(self, places: ClusterPlaces | None, now: int) -> Sequence[tuple[Job, Event]]:
        """Return the jobs that have been refused places and do not say so yet, as they are to be stored."""
        if places is None or not places.refused:
            return ()
        waiting = self._jobs.load([*places.refused])
        return [
            wait(job, now=now, reason=places.refused[job.id])
            for job in waiting
            if job.status is JobStatus.QUEUED and job.status_reason != places.refused[job.id]
        ]
