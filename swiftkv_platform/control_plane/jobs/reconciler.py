"""Brings jobs to their wanted state, one step a tick. Knows no Ray, no SQL, no HTTP.

Every step may be the last before a `kill -9`. Each action is stored before it is taken, under an id that Ray or the
store can be asked for afterwards, and each step may be repeated:

    store `starting` and the submission id ─▶ write attempt.json ─▶ submit ─▶ store `submitted_at`

A `starting` job that was not seen submitted is submitted again under the same id if Ray does not know it; Ray refuses
an id it knows. Events are read after Ray's status, so that an ended attempt's events are complete. The cursor is stored
together with what was read, so that each event counts once.

A tick's work is bounded: `polls` chooses the jobs on the cluster to poll, several at a time, and the number of events
read of each is limited. The queue is decided by columns of the database, and places are claimed there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any

from swiftkv_platform.contract.attempts import AttemptRequest, Manifest
from swiftkv_platform.contract.events import ReasonCode
from swiftkv_platform.control_plane.access.tenants import NO_LIMITS, Tenants
from swiftkv_platform.control_plane.base import Clock
from swiftkv_platform.control_plane.deployments.deployment import Deployment
from swiftkv_platform.control_plane.files.file import FilesOf, no_files
from swiftkv_platform.control_plane.jobs.attempt_outcome import AttemptOutcomes
from swiftkv_platform.control_plane.jobs.capacity import Admission
from swiftkv_platform.control_plane.jobs.costs import FREE, Prices, over_cap
from swiftkv_platform.control_plane.jobs.job import Event, Job, JobStatus, Reason, start, transition
from swiftkv_platform.control_plane.jobs.limits import DEFAULT_LIMITS, AttemptLimits
from swiftkv_platform.control_plane.jobs.making_room import MakingRoom
from swiftkv_platform.control_plane.jobs.parents import NOWHERE, ParentOf, PublishRules, no_parents
from swiftkv_platform.control_plane.jobs.polling import PollSchedule
from swiftkv_platform.control_plane.jobs.ports import Entrypoint, JobCluster, Submission
from swiftkv_platform.control_plane.jobs.queue import FairQueue
from swiftkv_platform.control_plane.jobs.reading import NO_INSTRUMENTS, Instruments, Reading, read
from swiftkv_platform.control_plane.jobs.rows import JobRepository
from swiftkv_platform.control_plane.loops.leadership import UNDISPUTED, Lease
from swiftkv_platform.control_plane.loops.loop import Backoff
from swiftkv_platform.errors import (
    ArtifactCorruptError,
    ClusterUnavailableError,
    DatabaseUnavailableError,
    LeaseLostError,
    ObjectNotFoundError,
    StaleVersionError,
    StorageError,
)
from swiftkv_platform.logs import get_logger
from swiftkv_platform.redaction import redact
from swiftkv_platform.sources import NO_RULES, SourceRules
from swiftkv_platform.storage.attempt_store import AttemptStore

_LONGEST_BACKOFF_S = 30.0
_CLUSTER = "cluster"
_MOST_SURPRISES = 5
"""Unexpected failures in a row after which a job is failed: some 15 seconds with the default interval."""
_LONGEST_CAUSE = 500
_MOST_STARTS = 64
"""Most jobs that a tick submits."""
_MOST_EVENTS = 256
"""Most events of a job that one poll reads."""


@dataclass(kw_only=True)
class Reconciler:
    """Reconciles all jobs, from one thread; of several control planes only the leader does."""

    jobs: JobRepository
    cluster: JobCluster
    store: AttemptStore
    digest: InitVar[Callable[[Manifest], str]]
    """SHA-256 of a manifest."""
    clock: Clock
    entrypoint: Entrypoint
    max_running_jobs: int
    """Most attempts on the cluster at the same time."""
    driver: Mapping[str, float] = field(default_factory=dict)
    """Resources that Ray reserves for the process of each attempt, by Ray's names."""
    interval_s: InitVar[float]
    """Pause after a first failure, in seconds; it doubles with every further one."""
    policies: Tenants = NO_LIMITS
    """Quotas and weights of tenants."""
    rules: SourceRules = NO_RULES
    """Sources that attempts may read, by tenant."""
    publishing: PublishRules = NOWHERE
    """Targets that models may be published to."""
    prices: Prices = FREE
    limits: AttemptLimits = DEFAULT_LIMITS
    retry_delay_s: InitVar[float] = 1.0
    """Pause before a job's second attempt; it doubles with every further one."""
    deployments: Callable[[], Sequence[Deployment]] = tuple
    """Deployments of all tenants, whose replicas count against quotas as jobs do."""
    deployments_share: float = 1.0
    """Share of the jobs' nodes that is open to deployments; jobs that hold more than the rest make room for them."""
    files: FilesOf = no_files
    """Uploaded files that a job's spec names."""
    parents: ParentOf = no_parents
    """Model or checkpoint that a job's spec continues from."""
    polls: PollSchedule = field(default_factory=PollSchedule)
    """Choice of the jobs that a tick polls; by default all."""
    concurrency: InitVar[int] = 1
    """Jobs that are polled, or submitted, at the same time."""
    lease: Lease = UNDISPUTED
    """Lease to hold for any change; the default is for the only control plane."""
    instruments: Instruments = NO_INSTRUMENTS
    jobs_put_off: int = field(default=0, init=False)
    """Jobs whose last step failed, as of the latest tick."""

    def __post_init__(
        self, digest: Callable[[Manifest], str], interval_s: float, retry_delay_s: float, concurrency: int
    ) -> None:
        self._outcomes = AttemptOutcomes(self.store, digest, retry_delay_s)
        self._queue = FairQueue(self.policies)
        self._admission = Admission(self.jobs, self.cluster, self.driver)
        self._room = MakingRoom(
            self.jobs, self._admission, self._queue, self.limits, self.deployments, self.deployments_share
        )
        self._backoff = Backoff(first_s=interval_s, longest_s=_LONGEST_BACKOFF_S)
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="jobs") if concurrency > 1 else None
        self._lock = Lock()
        self._surprises: dict[str, list[str]] = {}  # unexpected failures in a row, by job
        self._log = get_logger(loop="jobs")

    def tick(self) -> None:
        """Do the next step of each job that is due. Raises `DatabaseUnavailableError` and `LeaseLostError`."""
        placed, now = self.jobs.on_cluster(), self.clock()
        if self._backoff.ready(_CLUSTER, now):
            due = [job_id for job_id in self.polls.due(placed, now) if self._backoff.ready(job_id, now)]
            after = self._each(self._loaded(due), lambda job: self._attend(job, self._follow))
            self._admission.saw(after)
            ended = sum(not job.status.holds_cluster for job in after)
            self._start_waiting(self.max_running_jobs - len(placed) + ended)
            self._make_room()
        self._forget_ended()

    def _loaded(self, ids: Sequence[str]) -> Sequence[Job]:
        """Read these jobs. An unreadable one is put off for a while."""
        jobs = self.jobs.load(ids) if ids else ()
        for job_id in {*ids} - {job.id for job in jobs}:
            self._backoff.failed(job_id, self.clock())
        return jobs

    def _each(self, jobs: Sequence[Job], step: Callable[[Job], Job]) -> list[Job]:
        """Run a step for several jobs at a time; raises the first error once all are done."""
        if self._threads is None or len(jobs) < 2:
            return [*map(step, jobs)]
        tasks = [self._threads.submit(step, job) for job in jobs]
        wait(tasks)
        return [task.result() for task in tasks]

    def _start_waiting(self, room: int) -> None:
        """Start queued jobs, as room allows. One that is put off after a failure takes no other's place."""
        room = min(room, _MOST_STARTS)
        while room > 0:
            now = self.clock()
            left_out = {*self._backoff.resting(now), *self._admission.never}
            standing = self.jobs.standing(most=room, now=now, without=left_out)
            waits = any(standing.waiting.values())
            places = self._admission.places(now) if waits or left_out else None
            deployments = self.deployments() if waits else ()
            queue = self._queue.next(standing, room=room, deployments=deployments, places=places)
            jobs = self._loaded([job.id for job in queue])
            room -= self._start(jobs)
            for job, event in self._admission.untold(places, int(now)):
                self._attend(job, partial(self._store_change, events=[event]))
            if len(jobs) == len(queue):
                return

    def _make_room(self) -> None:
        """End attempts that must make room: those that are not placed at once, the others at a checkpoint."""
        now = self.clock()
        for job, reason in self._room.endings(now, self._backoff.resting(now)):
            step = self._end if reason.code == ReasonCode.NOT_PLACED else self._ask_to_end
            self._admission.saw([self._attend(job, partial(step, reason))])

    def _end(self, reason: Reason, job: Job) -> Job:
        ended = self._store_change(replace(job, attempt=replace(job.attempt, stopping=reason)))
        self._stop(_submission_id(ended))
        return ended

    def _ask_to_end(self, reason: Reason, job: Job) -> Job:
        self.lease.check()
        self.store.announce_preemption(job.attempt_id)
        return self._store_change(replace(job, attempt=replace(job.attempt, yields=reason, yields_at=self.clock())))

    def _start(self, jobs: Sequence[Job]) -> int:
        """Claim places for the jobs that can be prepared, and submit them; returns how many got a place."""
        starts: dict[str, tuple[Job, Event]] = {}

        def prepare(job: Job) -> Job:
            starts[job.id] = self._prepared(job)
            return job

        self._each(jobs, lambda job: self._attend(job, prepare))
        if not starts:
            return 0
        self.lease.check()
        claimed = self.jobs.claim(
            [starts[job.id] for job in jobs if job.id in starts],
            most=self.max_running_jobs,
            fits=self._queue.fits,
            fence=self.lease.fence,
        )
        waited = {job.id: job for job in jobs}
        for job in claimed:
            self.instruments.started(waited[job.id], self.clock())
        self._admission.saw(self._each(claimed, lambda job: self._attend(job, self._submit)))
        return len(claimed)

    def _prepared(self, job: Job) -> tuple[Job, Event]:
        """Return the job as it starts, not stored yet, and the event that reports it."""
        self.cluster.check()  # while Ray is away, a job keeps its place in the queue
        number = job.attempt.number
        resume_from = self.store.newest_checkpoint(job.id, before_attempt=number) if number > 1 else None
        return start(job, now=int(self.clock()), resume_from=resume_from)

    def _attend(self, job: Job, step: Callable[[Job], Job]) -> Job:
        """Run a job's step and return the job; unchanged while the job or the cluster is put off after a failure.

        A failure of one job does not stop the others; an unavailable cluster or a lost lease stops all. Unavailable
        services come back, so the job waits for them. Any other failure is a bug of ours, or a job made to cause one:
        after a few in a row the job is failed.
        """
        self.lease.check()
        now = self.clock()
        if not (self._backoff.ready(_CLUSTER, now) and self._backoff.ready(job.id, now)):
            return job
        try:
            is_hopeless = len(self._surprises.get(job.id, ())) >= _MOST_SURPRISES
            after = self._give_up(job) if is_hopeless else step(job)
        except LeaseLostError:
            raise
        except StaleVersionError as error:
            self._log.info("changed elsewhere; the next tick reads it again", reason=error.message)
        except ClusterUnavailableError as error:
            with self._lock:  # of several concurrent failures only one counts
                if self._backoff.ready(_CLUSTER, self.clock()):
                    self._put_off(_CLUSTER, job, error)
        except Exception as error:
            self._put_off(job.id, job, error)
            if not _will_pass(error):
                self._log.exception("unexpected", job_id=job.id)
                self._surprises.setdefault(job.id, []).append(_described(error))
        else:
            self._backoff.succeeded(_CLUSTER)
            self._backoff.succeeded(job.id)
            self._surprises.pop(job.id, None)
            return after
        return job

    def _give_up(self, job: Job) -> Job:
        """Fail a job that cannot be handled, and stop its attempt."""
        latest = self.jobs.get(job.id, tenant=job.tenant)  # the step that failed may have stored a change
        if latest.status.is_terminal:
            return latest
        if latest.status.holds_cluster and latest.attempt.submission_id is not None:
            self._stop(latest.attempt.submission_id)
        causes = self._surprises[job.id]
        message = f"the control plane failed to handle this job {len(causes)} times in a row: {causes[-1]}"
        now, reason = int(self.clock()), Reason(ReasonCode.INTERNAL, message)
        failed, event = transition(latest, JobStatus.FAILED, now=now, reason=reason)
        self._log.error("given up", job_id=job.id, causes=causes)
        return self._store_change(failed, events=[event])

    def _store_change(self, job: Job, **told: Any) -> Job:
        """Store a changed job, unless another control plane leads by now."""
        return self.jobs.update(job, fence=self.lease.fence, **told)

    def _stop(self, submission_id: str) -> None:
        self.lease.check()
        self.cluster.stop(submission_id)

    def _forget_ended(self) -> None:
        """Forget the failures of jobs that have ended."""
        failing = self._backoff.names() - {_CLUSTER}
        live = self.jobs.live_among(failing | self._surprises.keys()) if failing or self._surprises else set()
        self._surprises = {job_id: causes for job_id, causes in self._surprises.items() if job_id in live}
        self._backoff.keep({_CLUSTER, *live})
        self.jobs_put_off = len(failing & live)

    def _put_off(self, name: str, job: Job, error: Exception) -> None:
        delay = self._backoff.failed(name, self.clock())
        self._log.warning("put off", subject=name, job_id=job.id, reason=str(error), retry_in_s=delay)

    def _submit(self, job: Job) -> Job:
        with self.instruments.spans.span("submit", job.traceparent, job_id=job.id, attempt=job.attempt.number):
            return self._submit_traced(job)

    def _submit_traced(self, job: Job) -> Job:
        attempt = job.attempt
        organizations = self.policies.policy(job.tenant).hub_organizations
        access = self.rules.access(job.tenant, organizations, self.files(job.spec, job.tenant))
        found = self.parents(job.spec, job.tenant)
        self.store.write_request(
            AttemptRequest(
                job_id=job.id,
                attempt=attempt.number,
                spec=job.spec,
                resume_from=attempt.resume_from,
                run_id=job.id,
                allowed_roots=access.roots,
                hub_organizations=access.hub_organizations,
                publish_targets=None if job.spec.publish.to is None else self.publishing.opened(job.tenant),
                code_tasks=access.code_tasks,
                files=dict(access.files or {}),
                parent=None if found is None else found.parent,
                traceparent=job.traceparent,
            )
        )
        self.lease.check()  # another control plane may have submitted it while the request was written
        self.cluster.submit(_submission_id(job), self.entrypoint.shell(job.attempt_id), self.entrypoint.env)
        submitted = self._store_change(self._seen_by_ray(job))
        self._log.info("submitted", job_id=job.id, submission_id=attempt.submission_id)
        return submitted

    def _follow(self, job: Job) -> Job:
        submission = self.cluster.status(_submission_id(job))
        if submission is None and job.attempt.submitted_at is None and job.status is JobStatus.STARTING:
            return self._submit(job)
        seen = job if submission is None else self._seen_by_ray(job)
        # All events of an ended attempt are listed, so none can appear later.
        over = submission is None or submission.status.is_terminal
        turn = None if over else self.polls.turn(job.id)
        stored = self.store.read_events(job.attempt_id, job.attempt.cursor, _MOST_EVENTS, turn)
        reading = read(seen, stored, now=int(self.clock()))
        self.instruments.read(stored, self.clock())
        has_more = len(stored) == _MOST_EVENTS
        after = self._finish(reading, submission) if over and not has_more else self._keep(job, reading, submission)
        self.polls.looked(job.id, now=self.clock(), version=after.version, heard=bool(stored), has_more=has_more)
        return after

    def _finish(self, reading: Reading, submission: Submission | None) -> Job:
        ended = reading.job
        self.lease.check()
        if submission is not None:
            self.store.save_logs(ended.attempt_id, self.cluster.logs(_submission_id(ended)))
        model = self._outcomes.decide(reading, submission)
        settled = self._store_change(reading.job, events=reading.events, points=reading.points, model=model)
        self._log.info("attempt over", job_id=ended.id, attempt=ended.attempt.number, status=settled.status.value)
        if settled.status.is_terminal:
            self._tidy_up(ended.id)
        return settled

    def _tidy_up(self, job_id: str) -> None:
        """Discard the job's inputs. If the store is away they stay, which does not affect the job."""
        try:
            self.store.discard_inputs(job_id)
        except StorageError as error:
            self._log.warning("inputs left behind", job_id=job_id, reason=error.message)

    def _keep(self, before: Job, reading: Reading, submission: Submission | None) -> Job:
        """Store what a running attempt has reported, and stop it if it must not go on."""
        reason = reading.job.attempt.stopping or self.limits.exceeded(reading.job, self.clock(), submission)
        if reason is not None:
            reading.job = replace(reading.job, attempt=replace(reading.job.attempt, stopping=reason))
        over = over_cap(reading.job, self.policies.policy(reading.job.tenant), self.prices, self.clock())
        if over is not None:
            reading.move(JobStatus.PAUSING, over)
        if reading.job.status is JobStatus.PAUSING and not reading.job.attempt.pause_requested:
            self.lease.check()
            self.store.request_pause(reading.job.attempt_id)
            reading.job = replace(reading.job, attempt=replace(reading.job.attempt, pause_requested=True))
        job = reading.job
        if job != before:
            job = self._store_change(job, events=reading.events, points=reading.points)
        if _is_to_end(job):
            self._stop(_submission_id(job))
        return job

    def _seen_by_ray(self, job: Job) -> Job:
        return replace(job, attempt=replace(job.attempt, submitted_at=job.attempt.submitted_at or self.clock()))


def _is_to_end(job: Job) -> bool:
    """Whether the attempt must be stopped now. One that pauses while it waits for a place has nothing to save."""
    waits = job.status is JobStatus.PAUSING and bool(job.attempt.waiting)
    return job.status is JobStatus.CANCELLING or job.attempt.stopping is not None or job.attempt.paused or waits


def _will_pass(error: Exception) -> bool:
    """Whether a service is temporarily away. A missing or damaged object stays so."""
    is_lasting = isinstance(error, (ObjectNotFoundError, ArtifactCorruptError))
    return not is_lasting and isinstance(error, (ClusterUnavailableError, DatabaseUnavailableError, StorageError))


def _described(error: Exception) -> str:
    """Return an unexpected error as text that can be stored and shown."""
    text = redact(f"{type(error).__name__}: {error}")[:_LONGEST_CAUSE]
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "")


def _submission_id(job: Job) -> str:
    assert job.attempt.submission_id is not None, f"{job.id} is {job.status} without a submission id"
    return job.attempt.submission_id
