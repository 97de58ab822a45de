"""Choice of the running jobs that are looked at in a tick. A function of what was heard of them; knows no port.

A look costs a request to Ray and one to the object store, and more where there is something to read. A job that is
followed, or is to end, is looked at often; one that speaks, now and then; a silent one less and less often. With few
jobs all are looked at in every tick.
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
    """Intervals between looks at a job, in seconds. They grow with the number of jobs, up to these."""

    watched_s: float = 4.0
    busy_s: float = 6.0
    quiet_s: float = 30.0
    watched_for_longest: int = 200
    """Watched jobs from which on `watched_s` holds."""
    jobs_for_longest: int = 100
    """Jobs on the cluster from which on `busy_s` and `quiet_s` hold."""


EVERY_TICK = PollIntervals(0.0, 0.0, 0.0)
SPARING = PollIntervals()
"""At 1,000 jobs, of which a tenth says something each second, some 9 requests to the store a job and minute."""


@dataclass
class _Look:
    at: float
    version: int
    silent: int
    """Looks in a row that brought nothing."""
    has_more: bool
    number: int


@dataclass
class PollSchedule:
    """Remembers when each job was looked at; another control plane that takes over looks at all of them. `most`: looks
    in a tick, which bounds what it takes. Jobs for which a caller waits come first, three quarters of them at most;
    then those that are due longest."""

    intervals: PollIntervals = EVERY_TICK
    most: int = 128
    _looks: dict[str, _Look] = field(default_factory=dict)

    def due(self, placed: Sequence[Placed], now: float) -> list[str]:
        """Ids of the jobs to look at, and forget all jobs that are not named."""
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
        """Number of the job's next look."""
        look = self._looks.get(job_id)
        return 0 if look is None else look.number

    def looked(self, job_id: str, *, now: float, version: int, heard: bool, has_more: bool) -> None:
        """Note a look.

        Args:
            version: the job's, as the look left it: a change by another is a reason to look at once.
            heard: whether it brought anything.
            has_more: whether there is more to read.
        """
        before = self._looks.get(job_id)
        silent = 0 if heard or before is None else before.silent + 1
        self._looks[job_id] = _Look(now, version, silent, has_more, self.turn(job_id) + 1)

    def _is_pressing(self, job: Placed, now: float) -> bool:
        """Whether a caller waits for what a look brings."""
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
