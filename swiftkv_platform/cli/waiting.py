"""Print why a watched job waits, and its phase, neither of which is in its events."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console

from swiftkv_platform.cli.output import local_time
from swiftkv_platform.client import Client, Job
from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.local.terminal import count, duration, size

_ASKED_EVERY_S = 5.0
_PASSING = re.compile(r"[\d.]+ s\b")
"""Remaining seconds in a text, which change at each poll."""


@contextmanager
def telling_of_waits(client: Client, job: Job, console: Console) -> Iterator[None]:
    """Print why `job` is queued, or its phase, now and at each change until the context ends."""
    done = threading.Event()
    told = _print(job, console, None)
    thread = threading.Thread(target=_tell, args=(client, job.id, console, told, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _tell(client: Client, job_id: str, console: Console, told: str | None, done: threading.Event) -> None:
    while not done.wait(_ASKED_EVERY_S):
        try:
            told = _print(client.jobs.get(job_id), console, told)
        except SwiftKVError:  # following the events reports it
            continue


def _print(job: Job, console: Console, told: str | None) -> str | None:
    """Print what the job waits for, or its phase, unless it equals `told`, printed before. Returns it."""
    if job.status == "queued":
        reason = job.status_reason.message if job.status_reason else "no reason given"
        line = ": ".join(filter(None, ("queued", describe_queue(job), reason)))
    elif job.phase is None or job.finished:
        return None
    else:
        reason = line = f"phase: {job.phase}"
    if told is None or _PASSING.sub("", told) != _PASSING.sub("", reason):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return reason


def describe_phase(job: Job) -> str | None:
    """Return the phase of a job and its progress: `calibrate, layers 3 of 32, 20 s left`; None without a phase."""
    told = job.phase_progress
    if job.phase is None or told is None:
        return job.phase
    show = size if told.part == "bytes" else count
    left = f"{duration(told.seconds_remaining)} left" if told.seconds_remaining else None
    return ", ".join(filter(None, (job.phase, f"{told.part} {show(told.done)} of {show(told.total)}", left)))


def describe_queue(job: Job) -> str | None:
    """Describe a queued job's place in its tenant's queue, and the time since which it waits for resources."""
    since = local_time(job.waiting_since)
    return ", ".join(filter(None, (describe_place(job), since and f"waiting for resources since {since}"))) or None


def describe_place(job: Job) -> str | None:
    """Describe a queued job's place in its tenant's queue; None if it is not known."""
    return f"place {job.queue_place}" if job.queue_place else None
