"""An attempt whose workers find no place gives its slot back after a while and says what was missing."""

from __future__ import annotations

import pytest

from swiftkv_platform.orchestration.job import Job, JobStatus, transition
from swiftkv_platform.orchestration.ports import SubmissionStatus
from swiftkv_platform.orchestration.reconciler import Reconciler
from tests.fakes.attempt_store import FakeWorker
from tests.unit.orchestration.conftest import Plane

DEADLINE_S = 1800
"""Where the operator says nothing else."""

NEEDS = "2 workers with 8 GPUs and 1 CPU each; the cluster has 0 GPUs and 4 CPUs"


@pytest.fixture
def reconciler(plane: Plane) -> Reconciler:
    return plane.reconciler()


def started(plane: Plane, reconciler: Reconciler) -> Job:
    job = plane.submit(resources={"num_workers": 2, "gpus_per_worker": 8})
    reconciler.tick()
    return job


def later(plane: Plane, reconciler: Reconciler, seconds: float) -> None:
    plane.clock.now += seconds
    reconciler.tick()


def check_not_placed(plane: Plane, reconciler: Reconciler, job: Job, missing: str) -> None:
    assert plane.cluster.submissions[f"{job.id}-1"].state.status is SubmissionStatus.STOPPED
    reconciler.tick()
    failed = plane.get(job)
    assert failed.status is JobStatus.FAILED, "another try would ask for the same again"
    assert failed.error is not None
    assert (failed.error.code, failed.error.field) == ("not_placed", "resources")
    assert missing in failed.error.message
    following = plane.submit()
    reconciler.tick()
    assert plane.get(following).status is JobStatus.STARTING, "the slot is free"


def waiting(plane: Plane, reconciler: Reconciler, phase: str = "prepare") -> tuple[Job, FakeWorker]:
    """A job whose worker has said that it waits for a place."""
    job = started(plane, reconciler)
    worker = plane.worker(job)
    worker.say("status", status="running")
    worker.say("placement", phase=phase, state="waiting", needs=NEEDS)
    return job, worker


def test_workers_that_find_no_place_give_the_slot_back(plane: Plane, reconciler: Reconciler) -> None:
    job, _ = waiting(plane, reconciler)
    for seconds in (5, DEADLINE_S - 1):
        later(plane, reconciler, seconds)
        assert plane.get(job).status is JobStatus.RUNNING
    later(plane, reconciler, 2)
    check_not_placed(plane, reconciler, job, NEEDS)
    silent = next(iter(plane.jobs.on_cluster()))
    later(plane, reconciler, DEADLINE_S + 1)
    check_not_placed(plane, reconciler, plane.jobs.load([silent.id])[0], "the attempt itself")


@pytest.mark.parametrize("first", ["waiting", "placed"])
def test_placed_workers_have_all_the_time_they_need(plane: Plane, reconciler: Reconciler, first: str) -> None:
    """Whatever order the events of driver and worker arrive in."""
    job = started(plane, reconciler)
    driver, worker = plane.worker(job, writer="driver"), plane.worker(job, writer="worker")
    driver.say("status", status="running")
    times = {"waiting": 2.0, "placed": 3.0} if first == "waiting" else {"waiting": 3.0, "placed": 2.0}
    driver.say("placement", time=times["waiting"], phase="prepare", state="waiting", needs=NEEDS)
    worker.say("placement", time=times["placed"], phase="prepare", state="placed")
    later(plane, reconciler, 5)
    later(plane, reconciler, 10 * DEADLINE_S)
    assert plane.get(job).status is JobStatus.RUNNING


def test_each_phase_has_its_own_deadline(plane: Plane, reconciler: Reconciler) -> None:
    job = started(plane, reconciler)
    worker = plane.worker(job)
    worker.say("status", status="running")
    for phase in ("prepare", "train"):
        worker.say("placement", phase=phase, state="waiting", needs=f"{phase}: {NEEDS}")
        later(plane, reconciler, DEADLINE_S - 10)
        if phase == "prepare":
            worker.say("placement", phase=phase, state="placed")
            later(plane, reconciler, DEADLINE_S)
    assert plane.get(job).status is JobStatus.RUNNING
    later(plane, reconciler, 11)
    later(plane, reconciler, DEADLINE_S)
    check_not_placed(plane, reconciler, job, f"train: {NEEDS}")


def test_one_trial_may_wait_while_another_trains(plane: Plane, reconciler: Reconciler) -> None:
    job, worker = waiting(plane, reconciler, "train of trial-2")
    for step in range(1, 6):
        worker.step(step, time=plane.clock.now)
        later(plane, reconciler, DEADLINE_S - 10)
    assert plane.get(job).status is JobStatus.RUNNING
    later(plane, reconciler, DEADLINE_S)
    later(plane, reconciler, DEADLINE_S)
    check_not_placed(plane, reconciler, job, NEEDS)


@pytest.mark.parametrize(
    ("asked", "reached"),
    [(JobStatus.PAUSING, JobStatus.PAUSED), (JobStatus.CANCELLING, JobStatus.CANCELLED)],
)
def test_a_user_reaches_an_attempt_that_waits_for_a_place(
    plane: Plane, reconciler: Reconciler, asked: JobStatus, reached: JobStatus
) -> None:
    job, _ = waiting(plane, reconciler, "train")
    reconciler.tick()
    stopping, event = transition(plane.get(job), asked, now=int(plane.clock()))
    plane.jobs.update(stopping, events=[event])
    for _ in range(3):
        later(plane, reconciler, 1)
    assert plane.get(job).status is reached


def test_a_malformed_word_about_places_is_a_warning(plane: Plane, reconciler: Reconciler) -> None:
    job = started(plane, reconciler)
    plane.worker(job).say_nonsense("placement", phase="prepare", state="dancing")
    reconciler.tick()
    assert [event.level for event in plane.events(job)].count("warn") == 1
