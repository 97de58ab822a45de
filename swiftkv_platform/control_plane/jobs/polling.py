"""Choice of the running jobs that are polled in a tick. A function of what they reported; knows no port.

A poll costs a request to Ray and one to the object store, and more if there is something to read. A job that is
followed, or must end, is polled often; one that reports, now and then; a silent one less and less often. With few jobs
all are polled in every tick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from swiftkv_platform.control_plane.base import is_due
from swiftkv_platform.control_plane.jobs.job import JobStatus
from swiftkv_platform.control_plane.jobs.queue import Placed

_URGENT = (JobStatus.PAUSING, JobStatus.CANCELLING)
_AT_ONCE = float("-inf")


@dataclass(frozen=True)
class PollIntervals:
    """Intervals between polls of a job, in seconds. They grow with the number of jobs, up to these values."""

    watched_s: float = 4.0
    busy_s: float = 6.0
    quiet_s: float = 30.0
    watched_for_longest: int = 200
    """Number of watched jobs from which `watched_s` applies in full."""
    jobs_for_longest: int = 100
    """Number of jobs on the cluster from which `busy_s` and `quiet_s` apply in full."""


EVERY_TICK = PollIntervals(0.0, 0.0, 0.0)
SPARING = PollIntervals()
"""With 1,000 jobs, of which a tenth reports each second, some 9 requests to the store per job and minute."""


@dataclass
class _Look:
    at: float
    version: int
    silent: int
    """Polls in a row that found nothing."""
    has_more: bool
    number: int


@dataclass
class PollSchedule:
    """Remembers when each job was polled; a control plane that takes over polls all of them. `most`: polls in a tick,
    which bounds its time. Jobs for which a caller waits come first, up to three quarters of these; then those that have
    been due for longest."""

    intervals: PollIntervals = EVERY_TICK
    most: int = 128
    _looks: dict[str, _Look] = field(default_factory=dict)

    def due(self, placed: Sequence[Placed], now: float) -> list[str]:
        """Return the ids of jobs to poll, and forget all jobs that are not in `placed`."""
        present = {job.id for job in placed}
        self._looks = {job_id: look for job_id, look in self._looks.items() if job_id in present}
        watched = sum(job.watched_until > now for job in placed)
        due_at = {job.id: self._due_at(job, len(placed), watched, now) for job in placed}
        due = sorted((at, job_id) for job_id, at in due_at.items() if at <= now)
        pressing = {job.id for job in placed if self._is_pressing(job, now)}
        first = [job_id for _, job_id in due if job_id in pressing][: self.most * 3 // 4]
        taken = set(first)
        return [*first, *(job_id for _, job_id in due if job_id not in taken)][: self.most]

    def turn(self, job_id: str) -> int:
        """Return the number of the job's next poll."""
        look = self._looks.get(job_id)
        return 0 if look is None else look.number

    def looked(self, job_id: str, *, now: float, version: int, heard: bool, has_more: bool) -> None:
        """Record a poll.

        Args:
            version: the job's version after the poll; if another process changes it, the job is polled at once.
            heard: whether the poll found anything.
            has_more: whether there is more to read.
        """
        before = self._looks.get(job_id)
        silent = 0 if heard or before is None else before.silent + 1
        self._looks[job_id] = _Look(now, version, silent, has_more, self.turn(job_id) + 1)

    def _is_pressing(self, job: Placed, now: float) -> bool:
        """Whether a caller waits for the result of a poll."""
        look = self._looks.get(job.id)
        is_changed = look is not None and look.version != job.version
        return is_changed or job.watched_until > now or job.status in _URGENT

    def _due_at(self, job: Placed, running: int, watched: int, now: float) -> float:
        look = self._looks.get(job.id)
        if look is None or look.has_more or look.version != job.version:
            return _AT_ONCE
        intervals, size = self.intervals, min(running / self.intervals.jobs_for_longest, 1.0)
        interval = min(intervals.busy_s * 2.0 ** min(look.silent, 16), intervals.quiet_s) * size
        if job.watched_until > now or job.status in _URGENT:
            interval = min(interval, intervals.watched_s * min(watched / intervals.watched_for_longest, 1.0))
        due = look.at + interval
        return min(due, now) if is_due(due, now, within=interval) else due
