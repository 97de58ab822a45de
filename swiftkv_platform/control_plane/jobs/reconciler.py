"""The reconciler of jobs: brings each job to its wanted state, one step per tick.

Every step may be the last before a `kill -9`. Each action is stored before it is taken, under an id that Ray or the
store can be asked for afterwards, and each step may be repeated:

    store `starting` and the submission id ─▶ write attempt.json ─▶ submit ─▶ store `submitted_at`

A `starting` job that was not seen submitted is submitted again under the same id if Ray does not know it; Ray refuses
an id it knows. Events are read after Ray's status, so that an ended attempt's events are complete. The cursor is stored
together with what was read, so that each event counts once.

A tick's work is bounded: `polls` chooses the jobs on the cluster to poll, several at a time, and the number of events
read of each is limited. The queue is decided by columns of the database, and slots are claimed there.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, Any

from swiftkv_platform.contract.attempts import AttemptId, AttemptRequest
from swiftkv_platform.contract.events import (
    ReasonCode,
    TrackingEvent,
)
from swiftkv_platform.control_plane.access.tenants import make_source_rules
from swiftkv_platform.control_plane.base import is_due
from swiftkv_platform.control_plane.components import Components
from swiftkv_platform.control_plane.jobs.attempt_events import (
    AttemptUpdate,
    apply_attempt_end,
    apply_events,
    find_exceeded_limit,
)
from swiftkv_platform.control_plane.jobs.estimates import find_exceeded_cost_cap, get_prices
from swiftkv_platform.control_plane.jobs.job import (
    Event,
    Job,
    JobStatus,
    Reason,
    start_attempt,
    transition,
)
from swiftkv_platform.control_plane.jobs.queue import ClusterCapacity, FairScheduler, Preemption, make_driver_bundle
from swiftkv_platform.control_plane.jobs.repository import ClusterJob
from swiftkv_platform.control_plane.loops import Backoff, Leadership
from swiftkv_platform.control_plane.models.parents import list_publish_targets
from swiftkv_platform.control_plane.ray import ListedSubmission, Submission
from swiftkv_platform.errors import (
    ArtifactCorruptError,
    ClusterUnavailableError,
    DatabaseUnavailableError,
    LeaseLostError,
    ObjectNotFoundError,
    StaleVersionError,
    StorageError,
)
from swiftkv_platform.logs import get_logger, redact
from swiftkv_platform.settings import Settings
from swiftkv_platform.storage.attempt_store import StoredEvent
from swiftkv_platform.traces import SpanRecorder

if TYPE_CHECKING:
    from swiftkv_platform.control_plane.health import ControlPlaneHistograms

_STOPPING_STATUSES = (JobStatus.PAUSING, JobStatus.CANCELLING)
_IMMEDIATELY = float("-inf")


@dataclass(frozen=True)
class PollIntervals:
    """Intervals between polls of a job, in seconds. They grow with the number of jobs, up to these values."""

    watched_s: float = 4.0
    busy_s: float = 6.0
    quiet_s: float = 30.0
    watched_jobs_at_max: int = 200
    """Number of watched jobs from which `watched_s` applies in full."""
    jobs_at_max: int = 100
    """Number of jobs on the cluster from which `busy_s` and `quiet_s` apply in full."""


@dataclass
class _PollRecord:
    at: float
    version: int
    empty_polls: int
    """Consecutive polls that found no change."""
    has_more: bool
    number: int


@dataclass
class PollSchedule:
    """Remembers when each job was polled. A control plane that takes over polls all jobs.

    Awaited jobs come first, up to three quarters of `max_polls`; then the jobs that have been due for longest.
    """

    intervals: PollIntervals = PollIntervals()
    max_polls: int = 128
    """Polls per tick, which bounds its time."""
    _records: dict[str, _PollRecord] = field(default_factory=dict)

    def choose_due_jobs(self, placed: Sequence[ClusterJob], now: float) -> list[str]:
        """Return the ids of jobs to poll, and forget all jobs that are not in `placed`."""
        present = {job.id for job in placed}
        self._records = {job_id: record for job_id, record in self._records.items() if job_id in present}
        watched = sum(job.watched_until > now for job in placed)
        due_at = {job.id: self._compute_due_time(job, len(placed), watched, now) for job in placed}
        due = sorted((at, job_id) for job_id, at in due_at.items() if at <= now)
        awaited = {job.id for job in placed if self._is_awaited(job, now)}
        first = [job_id for _, job_id in due if job_id in awaited][: self.max_polls * 3 // 4]
        taken = set(first)
        return [*first, *(job_id for _, job_id in due if job_id not in taken)][: self.max_polls]

    def get_poll_number(self, job_id: str) -> int:
        """Return the number of the job's next poll."""
        record = self._records.get(job_id)
        return 0 if record is None else record.number

    def record_poll(self, job_id: str, *, now: float, version: int, found_events: bool, has_more: bool) -> None:
        """Record a poll.

        Args:
            version: the job's version after the poll; if another process changes it, the job is polled at once.
            found_events: whether the poll found anything.
            has_more: whether there is more to read.
        """
        before = self._records.get(job_id)
        empty_polls = 0 if found_events or before is None else before.empty_polls + 1
        self._records[job_id] = _PollRecord(now, version, empty_polls, has_more, self.get_poll_number(job_id) + 1)

    def _is_awaited(self, job: ClusterJob, now: float) -> bool:
        """Whether a caller waits for the result of a poll."""
        record = self._records.get(job.id)
        is_changed = record is not None and record.version != job.version
        return is_changed or job.watched_until > now or job.status in _STOPPING_STATUSES

    def _compute_due_time(self, job: ClusterJob, running: int, watched: int, now: float) -> float:
        record = self._records.get(job.id)
        if record is None or record.has_more or record.version != job.version:
            return _IMMEDIATELY
        intervals, size = self.intervals, min(running / self.intervals.jobs_at_max, 1.0)
        interval = min(intervals.busy_s * 2.0 ** min(record.empty_polls, 16), intervals.quiet_s) * size
        if job.watched_until > now or job.status in _STOPPING_STATUSES:
            interval = min(interval, intervals.watched_s * min(watched / intervals.watched_jobs_at_max, 1.0))
        due = record.at + interval
        return min(due, now) if is_due(due, now, within=interval) else due


_MAX_BACKOFF_S = 30.0
_CLUSTER_BACKOFF_KEY = "cluster"
_MAX_UNEXPECTED_ERRORS = 5
"""Unexpected failures in a row after which a job is failed: some 15 seconds with the default interval."""
_MAX_ERROR_CHARS = 500
_MAX_STARTS_PER_TICK = 64
"""Max jobs that a tick submits."""
_MAX_EVENTS_PER_POLL = 256
"""Max events of a job that one poll reads."""


class Reconciler:
    """Reconciles all jobs, from one thread; of several control planes only the leader does.

    Args:
        lease: held for any change.
        polls: choice of the jobs that a tick polls.
        concurrency: jobs that are polled, or submitted, at the same time.
    """

    def __init__(
        self,
        parts: Components,
        settings: Settings,
        lease: Leadership,
        histograms: ControlPlaneHistograms,
        spans: SpanRecorder,
        *,
        polls: PollSchedule,
        concurrency: int,
    ) -> None:
        self.num_backed_off_jobs = 0
        """Jobs whose last step failed, as of the latest tick."""
        self._parts, self._settings, self._lease = parts, settings, lease
        self._histograms, self._spans = histograms, spans
        self._jobs, self._cluster, self._store, self._clock = parts.jobs, parts.cluster, parts.attempts, parts.clock
        self._polls = polls
        self._queue = FairScheduler(parts.policies)
        self._capacity = ClusterCapacity(parts.jobs, parts.cluster, make_driver_bundle(settings))
        self._preemption = Preemption(parts.jobs, self._capacity, self._queue, parts.deployments, settings)
        self._backoff = Backoff(first_s=settings.reconcile_interval_s, max_s=_MAX_BACKOFF_S)
        self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="jobs") if concurrency > 1 else None
        self._lock = Lock()
        self._unexpected_errors: dict[str, list[str]] = {}  # unexpected failures in a row, by job
        self._log = get_logger(loop="jobs")

    def tick(self) -> None:
        """Do the next step of each job that is due. Raises `DatabaseUnavailableError` and `LeaseLostError`."""
        placed, now = self._jobs.list_cluster_jobs(), self._clock()
        if self._backoff.is_ready(_CLUSTER_BACKOFF_KEY, now):
            # 1. Poll running attempts.
            due = [job_id for job_id in self._polls.choose_due_jobs(placed, now) if self._backoff.is_ready(job_id, now)]
            after = self._run_for_each(self._load_jobs(due), lambda job: self._run_step(job, self._poll_attempt))
            self._capacity.remember_jobs(after)
            # 2. Start queued jobs in the free slots.
            ended = sum(not job.status.is_on_cluster for job in after)
            self._start_queued_jobs(self._settings.max_running_jobs - len(placed) + ended)
            # 3. End attempts that must make room for others.
            self._preempt_attempts()
        self._forget_ended_jobs()

    def _load_jobs(self, ids: Sequence[str]) -> Sequence[Job]:
        """Load these jobs. Unreadable ones are retried after a delay."""
        jobs = self._jobs.load_jobs(ids) if ids else ()
        for job_id in {*ids} - {job.id for job in jobs}:
            self._backoff.record_failure(job_id, self._clock())
        return jobs

    def _run_for_each(self, jobs: Sequence[Job], step: Callable[[Job], Job]) -> list[Job]:
        """Run a step for all jobs concurrently. Raises the first error once all steps are done."""
        if self._threads is None or len(jobs) < 2:
            return [*map(step, jobs)]
        tasks = [self._threads.submit(step, job) for job in jobs]
        wait(tasks)
        return [task.result() for task in tasks]

    def _start_queued_jobs(self, max_starts: int) -> None:
        """Start up to `max_starts` queued jobs. Jobs in back-off are skipped, and do not hold up others."""
        max_starts = min(max_starts, _MAX_STARTS_PER_TICK)
        while max_starts > 0:
            now = self._clock()
            left_out = {*self._backoff.list_waiting(now), *self._capacity.cannot_fit}
            snapshot = self._jobs.read_queue(most=max_starts, now=now, without=left_out)
            if not snapshot.waiting and not left_out:
                return
            self._capacity.begin_cycle(now)
            queue = self._queue.choose_next(snapshot, self._capacity, max_starts=max_starts)
            jobs = self._load_jobs([job.id for job in queue])
            max_starts -= self._claim_and_submit(jobs)
            for job, event in self._capacity.jobs_with_new_wait_reason(int(now)):
                self._run_step(job, partial(self._update_job, events=[event]))
            if len(jobs) == len(queue):
                return

    def _preempt_attempts(self) -> None:
        """End attempts that must make room: unscheduled attempts at once, others at their next checkpoint."""
        now = self._clock()
        for job, reason in self._preemption.choose_preemptions(now, self._backoff.list_waiting(now)):
            step = self._end_attempt if reason.code == ReasonCode.NOT_PLACED else self._request_preemption
            self._capacity.remember_jobs([self._run_step(job, partial(step, reason))])

    def _end_attempt(self, reason: Reason, job: Job) -> Job:
        ended = self._update_job(job.with_attempt(stopping=reason))
        self._stop_submission(_get_submission_id(ended))
        return ended

    def _request_preemption(self, reason: Reason, job: Job) -> Job:
        self._lease.check_leading()
        self._store.announce_preemption(job.attempt_id)
        return self._update_job(job.with_attempt(yields=reason, yields_at=self._clock()))

    def _claim_and_submit(self, jobs: Sequence[Job]) -> int:
        """Claim slots for these jobs and submit them. Returns the number of claimed slots."""
        # 1. Find the checkpoint that each job resumes from.
        starts: dict[str, tuple[Job, Event]] = {}

        def prepare(job: Job) -> Job:
            starts[job.id] = self._prepare_start(job)
            return job

        self._run_for_each(jobs, lambda job: self._run_step(job, prepare))
        if not starts:
            return 0
        # 2. Claim slots in one transaction.
        self._lease.check_leading()
        claimed = self._jobs.claim_slots(
            [starts[job.id] for job in jobs if job.id in starts],
            most=self._settings.max_running_jobs,
            fits=self._queue.fits_quota,
            fence=self._lease.fence,
        )
        # 3. Submit the claimed jobs to Ray.
        waited = {job.id: job for job in jobs}
        for job in claimed:
            self._report_queue_wait(waited[job.id])
        self._capacity.remember_jobs(self._run_for_each(claimed, lambda job: self._run_step(job, self._submit)))
        return len(claimed)

    def _report_queue_wait(self, job: Job) -> None:
        """Report an attempt that leaves the queue. A delay before a retry does not count as waiting."""
        now, since = self._clock(), max(job.created_at, job.not_before)
        self._histograms.waits.observe(max(0.0, now - since))
        named = {"job_id": job.id, "attempt": job.attempt.number}
        self._spans.record("queue wait", job.traceparent, min(since, now), now, **named)

    def _report_events(self, events: Sequence[StoredEvent]) -> None:
        now = self._clock()
        for item in events:
            self._histograms.lags.observe(max(0.0, now - item.event.time))
            if isinstance(item.event, TrackingEvent) and item.event.level == "warn":
                self._histograms.untracked.inc()

    def _prepare_start(self, job: Job) -> tuple[Job, Event]:
        """Return (started job, which is not stored yet; event)."""
        self._cluster.check_alive()  # while Ray is away, a job keeps its place in the queue
        number = job.attempt.number
        resume_from = self._store.find_newest_checkpoint(job.id, before_attempt=number) if number > 1 else None
        return start_attempt(job, now=int(self._clock()), resume_from=resume_from)

    def _run_step(self, job: Job, step: Callable[[Job], Job]) -> Job:
        """Run a job's step and return the job, unchanged during back-off of the job or the cluster.

        A failure of one job does not stop the others; an unavailable cluster or a lost lease stops all. Jobs wait for
        unavailable services. Any other error is a bug, or a job made to cause one: after several in a row, the job
        fails.
        """
        self._lease.check_leading()
        now = self._clock()
        if not (self._backoff.is_ready(_CLUSTER_BACKOFF_KEY, now) and self._backoff.is_ready(job.id, now)):
            return job
        try:
            is_hopeless = len(self._unexpected_errors.get(job.id, ())) >= _MAX_UNEXPECTED_ERRORS
            after = self._fail_job(job) if is_hopeless else step(job)
        except LeaseLostError:
            raise
        except StaleVersionError as error:
            self._log.info("job changed by another process; the next tick reads it again", reason=error.message)
        except ClusterUnavailableError as error:
            with self._lock:  # of several concurrent failures only one counts
                if self._backoff.is_ready(_CLUSTER_BACKOFF_KEY, self._clock()):
                    self._back_off(_CLUSTER_BACKOFF_KEY, job, error)
        except Exception as error:
            self._back_off(job.id, job, error)
            if not _is_transient(error):
                self._log.exception("unexpected error", job_id=job.id)
                self._unexpected_errors.setdefault(job.id, []).append(_describe_error(error))
        else:
            self._backoff.record_success(_CLUSTER_BACKOFF_KEY)
            self._backoff.record_success(job.id)
            self._unexpected_errors.pop(job.id, None)
            return after
        return job

    def _fail_job(self, job: Job) -> Job:
        """Fail a job after too many unexpected errors, and stop its attempt."""
        latest = self._jobs.get(job.id, tenant=job.tenant)  # the step that failed may have stored a change
        if latest.status.is_terminal:
            return latest
        if latest.status.is_on_cluster and latest.attempt.submission_id is not None:
            self._stop_submission(latest.attempt.submission_id)
        causes = self._unexpected_errors[job.id]
        message = f"the control plane failed to handle this job {len(causes)} times in a row: {causes[-1]}"
        now, reason = int(self._clock()), Reason(ReasonCode.INTERNAL, message)
        failed, event = transition(latest, JobStatus.FAILED, now=now, reason=reason)
        self._log.error("job failed after repeated errors", job_id=job.id, causes=causes)
        return self._update_job(failed, events=[event])

    def _update_job(self, job: Job, **told: Any) -> Job:
        """Store a changed job. Raises `LeaseLostError` if another control plane leads now."""
        return self._jobs.update(job, fence=self._lease.fence, **told)

    def _stop_submission(self, submission_id: str) -> None:
        self._lease.check_leading()
        self._cluster.stop(submission_id)

    def _forget_ended_jobs(self) -> None:
        """Forget the failures of jobs that have ended."""
        failing = self._backoff.list_failed() - {_CLUSTER_BACKOFF_KEY}
        live = (
            self._jobs.find_live_jobs(failing | self._unexpected_errors.keys())
            if failing or self._unexpected_errors
            else set()
        )
        self._unexpected_errors = {
            job_id: causes for job_id, causes in self._unexpected_errors.items() if job_id in live
        }
        self._backoff.retain_only({_CLUSTER_BACKOFF_KEY, *live})
        self.num_backed_off_jobs = len(failing & live)

    def _back_off(self, name: str, job: Job, error: Exception) -> None:
        delay = self._backoff.record_failure(name, self._clock())
        self._log.warning(
            "processing a job failed in this round; retrying",
            subject=name,
            job_id=job.id,
            reason=str(error),
            retry_in_s=delay,
        )

    def _submit(self, job: Job) -> Job:
        with self._spans.span("submit", job.traceparent, job_id=job.id, attempt=job.attempt.number):
            self._store.write_request(self._make_request(job))
            self._lease.check_leading()  # another control plane may have submitted it while the request was written
            entrypoint = self._parts.entrypoint
            self._cluster.submit(_get_submission_id(job), entrypoint.format_command(job.attempt_id), entrypoint.env)
            submitted = self._update_job(self._mark_submitted(job))
            self._log.info("attempt submitted", job_id=job.id, submission_id=job.attempt.submission_id)
            return submitted

    def _make_request(self, job: Job) -> AttemptRequest:
        """Return what the job's attempt reads when it starts."""
        organizations = self._parts.policies.get(job.tenant).hub_organizations
        files = self._parts.find_files(job.spec, job.tenant)
        access = make_source_rules(self._settings).build_access(job.tenant, organizations, files)
        targets = None if job.spec.publish.to is None else list_publish_targets(self._settings, job.tenant)
        found = self._parts.parents.find_parent(job.spec, job.tenant)
        return AttemptRequest(
            job_id=job.id,
            attempt=job.attempt.number,
            spec=job.spec,
            resume_from=job.attempt.resume_from,
            run_id=job.id,
            allowed_roots=access.roots,
            hub_organizations=access.hub_organizations,
            publish_targets=targets,
            code_tasks=access.code_tasks,
            files=dict(access.files or {}),
            traffic={name: each.uri for name, each in self._parts.locate_traffic(job.spec, job.tenant).items()},
            parent=None if found is None else found.parent,
            traceparent=job.traceparent,
        )

    def _poll_attempt(self, job: Job) -> Job:
        submission = self._cluster.get_submission(_get_submission_id(job))
        if submission is None and job.attempt.submitted_at is None and job.status is JobStatus.STARTING:
            return self._submit(job)
        # 1. Apply the attempt's new events.
        seen = job if submission is None else self._mark_submitted(job)
        # All events of an ended attempt are listed, so none can appear later.
        over = submission is None or submission.status.is_terminal
        poll_number = None if over else self._polls.get_poll_number(job.id)
        stored = self._store.read_events(job.attempt_id, job.attempt.cursor, _MAX_EVENTS_PER_POLL, poll_number)
        update = apply_events(seen, stored, now=int(self._clock()))
        self._report_events(stored)
        # 2. Settle an ended attempt, else enforce the limits of a running one.
        has_more = len(stored) == _MAX_EVENTS_PER_POLL
        after = (
            self._finish_attempt(update, submission)
            if over and not has_more
            else self._update_running_job(job, update, submission)
        )
        self._polls.record_poll(
            job.id, now=self._clock(), version=after.version, found_events=bool(stored), has_more=has_more
        )
        return after

    def _finish_attempt(self, update: AttemptUpdate, submission: Submission | None) -> Job:
        ended = update.job
        self._lease.check_leading()
        if submission is not None:
            self._store.save_logs(ended.attempt_id, self._cluster.read_logs(_get_submission_id(ended)))
        model = apply_attempt_end(update, submission, self._store)
        settled = self._update_job(update.job, events=update.events, points=update.points, model=model)
        self._log.info("attempt ended", job_id=ended.id, attempt=ended.attempt.number, status=settled.status.value)
        if settled.status.is_terminal:
            self._discard_inputs(ended.id)
        return settled

    def _discard_inputs(self, job_id: str) -> None:
        """Discard the job's inputs. If the store is away they stay, which does not affect the job."""
        try:
            self._store.discard_inputs(job_id)
        except StorageError as error:
            self._log.warning("attempt inputs not deleted", job_id=job_id, reason=error.message)

    def _update_running_job(self, before: Job, update: AttemptUpdate, submission: Submission | None) -> Job:
        """Store what a running attempt has reported. Stop it at a limit, and pause it at its cost cap."""
        reason = update.job.attempt.stopping or find_exceeded_limit(
            update.job, self._clock(), submission, self._settings
        )
        if reason is not None:
            update.job = update.job.with_attempt(stopping=reason)
        policy = self._parts.policies.get(update.job.tenant)
        over = find_exceeded_cost_cap(update.job, policy, get_prices(self._settings), self._clock())
        if over is not None:
            update.change_status(JobStatus.PAUSING, over)
        if update.job.status is JobStatus.PAUSING and not update.job.attempt.pause_requested:
            self._lease.check_leading()
            self._store.request_pause(update.job.attempt_id)
            update.job = update.job.with_attempt(pause_requested=True)
        job = update.job
        if job != before:
            job = self._update_job(job, events=update.events, points=update.points)
        if _must_stop(job):
            self._stop_submission(_get_submission_id(job))
        return job

    def _mark_submitted(self, job: Job) -> Job:
        return job.with_attempt(submitted_at=job.attempt.submitted_at or self._clock())


def _must_stop(job: Job) -> bool:
    """Whether the attempt must be stopped now. An attempt that is paused before it is scheduled has nothing to save."""
    waits = job.status is JobStatus.PAUSING and bool(job.attempt.waiting)
    return job.status is JobStatus.CANCELLING or job.attempt.stopping is not None or job.attempt.paused or waits


def _is_transient(error: Exception) -> bool:
    """Whether the error is a temporary outage. A missing or damaged object is permanent."""
    is_lasting = isinstance(error, (ObjectNotFoundError, ArtifactCorruptError))
    return not is_lasting and isinstance(error, (ClusterUnavailableError, DatabaseUnavailableError, StorageError))


def _describe_error(error: Exception) -> str:
    """Format an unexpected error as text without secrets."""
    text = redact(f"{type(error).__name__}: {error}")[:_MAX_ERROR_CHARS]
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "")


def _get_submission_id(job: Job) -> str:
    assert job.attempt.submission_id is not None, f"{job.id} is {job.status} without a submission id"
    return job.attempt.submission_id


_CLEANUP_INTERVAL_S = 60.0
_SUBMISSION_RETENTION_S = 24 * 3600.0
"""A day, to look at it in Ray's dashboard. A known id cannot be started again, so it must outlast a submission by a
process that was frozen in the middle of it."""
_MAX_DELETED_SUBMISSIONS = 100
"""Max submissions that are deleted in a round."""


@dataclass
class OrphanCleaner:
    """Stops running attempts without a stored job, every minute."""

    parts: Components
    stopped: int = field(default=0, init=False)
    """Attempts that this process has stopped."""
    _next: float = field(default=0.0, init=False)

    def tick(self) -> None:
        """Run once a minute. An unavailable cluster is asked again next time. Raises `DatabaseUnavailableError`."""
        now = self.parts.clock()
        if not is_due(self._next, now, within=_CLEANUP_INTERVAL_S):
            return
        self._next = now + _CLEANUP_INTERVAL_S
        try:
            self.stop_orphans()
        except ClusterUnavailableError as error:
            get_logger().info("orphan cleanup skipped", reason=error.message)

    def stop_orphans(self) -> None:
        """Stop every attempt that runs for no job, and delete those that ended a day ago. Raises
        `ClusterUnavailableError` and `DatabaseUnavailableError`.

        A job is stored as starting before it is submitted, so an attempt that was listed before the jobs were read, and
        belongs to none of them, has no job.
        """
        ended_before = self.parts.clock() - _SUBMISSION_RETENTION_S
        list_submissions = self.parts.cluster.list_submissions()
        looked_at = [each for each in list_submissions if each.ended_at is None or each.ended_at < ended_before]
        if not looked_at:
            return
        wanted = self.parts.jobs.list_attempts_on_cluster()
        num_deleted = 0
        for submission in looked_at:
            attempt = parse_attempt(submission, self.parts.entrypoint.store_uri)
            if attempt is None or (attempt.job_id in wanted and wanted[attempt.job_id] in (None, attempt.number)):
                continue
            if submission.ended_at is None:
                get_logger().warning("stopped an attempt without a job", job_id=attempt.job_id, attempt=attempt.number)
                self.parts.cluster.stop(submission.submission_id)
                self.stopped += 1
            elif num_deleted < _MAX_DELETED_SUBMISSIONS:
                self.parts.cluster.remove(submission.submission_id)
                num_deleted += 1


def parse_attempt(submission: ListedSubmission, store_uri: str) -> AttemptId | None:
    """Return the attempt of a submission; None if it has another store, or is no attempt."""
    try:
        words = shlex.split(submission.entrypoint)
    except ValueError:
        return None
    options = dict(itertools.pairwise(words))
    job_id, number = options.get("--job-id"), options.get("--attempt", "")
    if job_id is None or not number.isdecimal() or options.get("--store") != store_uri:
        return None
    attempt = AttemptId(job_id, int(number))
    return attempt if attempt.submission_id == submission.submission_id else None
