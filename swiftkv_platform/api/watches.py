"""Jobs that callers follow through this process, told to the control plane that reads their events. Knows no HTTP."""

from __future__ import annotations

from swiftkv_platform.errors import DatabaseUnavailableError
from swiftkv_platform.logs import get_logger
from swiftkv_platform.orchestration.job import Event
from swiftkv_platform.orchestration.ports import Clock, JobRepository, Page, Slice

_WATCHED_S = 60.0
"""Seconds for which a job counts as followed after a caller has asked for it."""
_AGAIN_S = 20.0
_MOST = 1000
"""Jobs remembered; of more, some are told of more often than needed."""


class Watches:
    """Tells of each job at most once in a while, however often callers ask."""

    def __init__(self, jobs: JobRepository, clock: Clock) -> None:
        self._jobs = jobs
        self._clock = clock
        self._told: dict[str, float] = {}
        """When each job was told of, the latest one last."""

    def note(self, job_id: str) -> None:
        """Have the job's events read often for a while. A database that is away is told of by what is asked of it."""
        now = self._clock()
        if now - self._told.get(job_id, float("-inf")) < _AGAIN_S:
            return
        try:
            self._jobs.watch(job_id, now + _WATCHED_S)
        except DatabaseUnavailableError as error:
            get_logger().info("job not marked as followed", job_id=job_id, reason=error.message)
            return
        self._told.pop(job_id, None)
        self._told[job_id] = now
        for oldest in list(self._told)[:-_MOST]:
            self._told.pop(oldest, None)

    def events(self, job_id: str, page: Page) -> Slice[Event]:
        """A job's events, as `JobRepository.events` has them."""
        self.note(job_id)
        return self._jobs.events(job_id, page)
