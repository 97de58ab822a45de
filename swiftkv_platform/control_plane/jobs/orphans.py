"""Removal of attempts that belong to no job: running ones are stopped, ended ones are deleted from the cluster.

An attempt runs without a job after the database was restored from a backup, or if its submission was cancelled but
arrived late. An ended attempt is no longer needed once its log is saved; Ray keeps its submission for ever.
"""

from __future__ import annotations

import itertools
import shlex
from dataclasses import dataclass, field

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.control_plane.base import Clock, is_due
from swiftkv_platform.control_plane.jobs.ports import JobCluster, ListedSubmission
from swiftkv_platform.control_plane.jobs.rows import JobRepository
from swiftkv_platform.errors import ClusterUnavailableError
from swiftkv_platform.logs import get_logger

_INTERVAL_S = 60.0
_FORGOTTEN_AFTER_S = 24 * 3600.0
"""A day, to look at it in Ray's dashboard. A known id cannot be started again, so it must outlast a submission by a
process that was frozen in the middle of it."""
_MOST_FORGOTTEN = 100
"""Most submissions that are deleted in a round."""


@dataclass
class Orphans:
    """Compares running attempts with stored jobs, every minute."""

    jobs: JobRepository
    cluster: JobCluster
    store_uri: str
    """Address of this control plane's store. Attempts with another store belong to another control plane."""
    clock: Clock
    stopped: int = field(default=0, init=False)
    """Attempts that this process has stopped."""
    _next: float = field(default=0.0, init=False)

    def tick(self) -> None:
        """Run once a minute. An unavailable cluster is asked again next time. Raises `DatabaseUnavailableError`."""
        now = self.clock()
        if not is_due(self._next, now, within=_INTERVAL_S):
            return
        self._next = now + _INTERVAL_S
        try:
            self.stop()
        except ClusterUnavailableError as error:
            get_logger().info("orphans not looked for", reason=error.message)

    def stop(self) -> None:
        """Stop every attempt that runs for no job, and delete those that ended a day ago. Raises
        `ClusterUnavailableError` and `DatabaseUnavailableError`.

        A job is stored as starting before it is submitted, so an attempt that was listed before the jobs were read, and
        belongs to none of them, has no job.
        """
        forgotten_before = self.clock() - _FORGOTTEN_AFTER_S
        listed = self.cluster.listed()
        looked_at = [each for each in listed if each.ended_at is None or each.ended_at < forgotten_before]
        if not looked_at:
            return
        wanted = self.jobs.attempts_on_cluster()
        forgotten = 0
        for submission in looked_at:
            attempt = attempt_of(submission, self.store_uri)
            if attempt is None or (attempt.job_id in wanted and wanted[attempt.job_id] in (None, attempt.number)):
                continue
            if submission.ended_at is None:
                get_logger().warning("orphan stopped", job_id=attempt.job_id, attempt=attempt.number)
                self.cluster.stop(submission.submission_id)
                self.stopped += 1
            elif forgotten < _MOST_FORGOTTEN:
                self.cluster.remove(submission.submission_id)
                forgotten += 1


def attempt_of(submission: ListedSubmission, store_uri: str) -> AttemptId | None:
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
