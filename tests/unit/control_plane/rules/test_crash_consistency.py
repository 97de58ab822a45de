"""`kill -9` of the control plane before each of its effects: nothing is lost, nothing happens twice.

A run is recorded once without a kill. Then it is repeated, each time killed before another of its effects, and resumed
by a new reconciler on the same database, object store and cluster. A kill after an effect is one before the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.control_plane.base import Caller, PageQuery
from swiftkv_platform.control_plane.jobs.job import Job, JobStatus
from swiftkv_platform.control_plane.jobs.reconciler import Reconciler
from swiftkv_platform.control_plane.ray import SubmissionStatus
from tests.support.parameters import WIDE
from tests.unit.control_plane.rules.conftest import TENANT, Plane

ANN = Caller(TENANT, "ann")


EFFECTS = frozenset({"claim_slots", "update", "write_request", "request_pause", "submit", "stop", "save_logs"})
"""Calls with effects; a kill at any other call equals a kill before the next one of these."""


class KilledError(BaseException):
    """Takes the place of SIGKILL: no code may catch it."""


class Killer:
    """Counts the effects on every port that it wraps, and raises `KilledError` before a given one or after the last."""

    def __init__(self, at: int | None = None) -> None:
        self._at = at
        self.calls: list[str] = []

    def wrap(self, port: Any) -> Any:
        return _Mortal(port, self)

    def call(self, name: str, method: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if len(self.calls) == self._at:
            raise KilledError(name)
        self.calls.append(name)
        return method(*arguments, **named)


class _Mortal:
    def __init__(self, port: Any, killer: Killer) -> None:
        self._port = port
        self._killer = killer

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._port, name)
        if name not in EFFECTS:
            return method
        return lambda *arguments, **named: self._killer.call(name, method, *arguments, **named)


class World:
    """Events outside the control plane: each look at a submission takes it a step further."""

    def __init__(self, plane: Plane, job: Job, script: Callable[[World, int, int], None]) -> None:
        self.plane = plane
        self.job = job
        self._script = script
        self._ages: dict[str, int] = {}

    def move(self) -> None:
        self.plane.clock.now += 5
        for submission_id, submission in list(self.plane.cluster.submissions.items()):
            if not submission.state.status.is_terminal:
                age = self._ages[submission_id] = self._ages.get(submission_id, -1) + 1
                self._script(self, int(submission_id.rpartition("-")[2]), age)
        if self.plane.get(self.job).status is JobStatus.PAUSED:
            self.plane.service.resume(self.job.id, ANN)

    def finish(self, attempt: int, status: SubmissionStatus) -> None:
        self.plane.cluster.finish(f"{self.job.id}-{attempt}", status)


def succeed(world: World, attempt: int, age: int) -> None:
    """The attempt runs two steps, evaluates and publishes."""
    worker = world.plane.worker(world.job, attempt)
    if age == 0:
        worker.say("status", status="running")
        worker.step(1, time=world.plane.clock.now)
    elif age == 1:
        worker.step(2, time=world.plane.clock.now)
        worker.say("status", status="evaluating")
    else:
        worker.artifact()
        world.finish(attempt, SubmissionStatus.SUCCEEDED)


def fail_once(world: World, attempt: int, age: int) -> None:
    """The first attempt leaves a checkpoint and fails; the second succeeds."""
    if attempt > 1 or age == 0:
        succeed(world, attempt, age)
        return
    worker = world.plane.worker(world.job, attempt)
    worker.checkpoint(1)
    worker.say("error", "a worker was lost", code="worker_lost", retryable=True)
    world.finish(attempt, SubmissionStatus.FAILED)


def forgotten_once(world: World, attempt: int, age: int) -> None:
    """Ray's head restarts and forgets the first attempt."""
    if attempt == 1 and age == 1:
        world.plane.cluster.forget()
    else:
        succeed(world, attempt, age)


def cancelled(world: World, attempt: int, age: int) -> None:
    """The user cancels the job as soon as it runs."""
    if age == 0:
        succeed(world, attempt, age)
        world.plane.service.cancel(world.job.id, ANN)


def paused_once(world: World, attempt: int, age: int) -> None:
    """The user pauses the first attempt as soon as it runs, and resumes the job once it is paused."""
    if attempt > 1 or age == 0:
        succeed(world, attempt, age)
        if attempt == 1:
            world.plane.service.pause(world.job.id, ANN)
    elif world.plane.store.is_pause_requested(AttemptId(world.job.id, attempt)):
        worker = world.plane.worker(world.job, attempt)
        worker.checkpoint(1)
        worker.say("status", status="paused")


def carry_on(world: World, reconciler: Reconciler) -> Job:
    """Tick until the job has ended, and twice more; these ticks must change nothing."""
    for _ in range(25):
        reconciler.tick()
        world.move()
        job = world.plane.get(world.job)
        if job.status.is_terminal:
            reconciler.tick()
            reconciler.tick()
            assert world.plane.get(job) == job
            return job
    raise AssertionError(f"the job is still {job.status}: {world.plane.statuses(job)}")


def mortal(plane: Plane, killer: Killer) -> Reconciler:
    return plane.reconciler(
        parts={
            "jobs": killer.wrap(plane.jobs),
            "cluster": killer.wrap(plane.cluster),
            "attempts": killer.wrap(plane.store),
        }
    )


@pytest.mark.slow("runs a job once for each place of a kill")
@pytest.mark.parametrize(
    ("script", "outcome", "attempts"),
    [
        (fail_once, JobStatus.SUCCEEDED, 2),
        pytest.param(forgotten_once, JobStatus.SUCCEEDED, 2, marks=WIDE),
        (cancelled, JobStatus.CANCELLED, 1),
        (paused_once, JobStatus.SUCCEEDED, 2),
    ],
)
def test_a_kill_before_any_effect_changes_neither_the_outcome_nor_the_history(
    plane: Plane, script: Callable[[World, int, int], None], outcome: JobStatus, attempts: int
) -> None:
    world = World(plane, plane.submit(), script)
    unharmed = Killer()
    carry_on(world, mortal(plane, unharmed))
    history = plane.statuses(world.job)

    for at, effect in enumerate(unharmed.calls):
        plane = Plane(plane.database)
        world = World(plane, plane.submit(), script)
        with pytest.raises(KilledError):
            carry_on(world, mortal(plane, Killer(at)))
        job = carry_on(world, plane.reconciler())

        where = f"killed before effect {at}, {effect}"
        assert job.status is outcome, where
        assert plane.cluster.started == [f"{job.id}-{number}" for number in range(1, attempts + 1)], where
        assert plane.statuses(job) == history, where
        models = plane.catalog.list_models(PageQuery(limit=1000), tenant=TENANT).items
        found = [model.id for model in models if model.job_id == job.id]
        assert found == ([job.distilled_model] if job.distilled_model else []), where
        told = [event for event in plane.events(job) if event.type == "metrics"]
        assert len(told) == len(plane.jobs.list_points(job.id, PageQuery()).items) + (attempts - 1), where


def test_a_run_found_again_after_a_kill_is_not_submitted_a_second_time_when_ray_forgets_it(plane: Plane) -> None:
    job = plane.submit()
    killer = Killer(at=3)
    with pytest.raises(KilledError):
        mortal(plane, killer).tick()
    assert killer.calls[-1] == "submit"
    plane.tick()
    plane.cluster.forget()
    plane.tick()
    # Its process may live on and write below the first attempt's prefix, which no other attempt may then use.
    assert (plane.get(job).status, plane.get(job).attempt.number) == (JobStatus.QUEUED, 2)
