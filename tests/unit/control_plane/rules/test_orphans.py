"""Attempts without a job are stopped, and attempts that find no place give their slot back after a while."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import delete, text

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.control_plane.database.tables import EventRow, JobRow
from swiftkv_platform.control_plane.jobs.job import Job, JobStatus, transition
from swiftkv_platform.control_plane.jobs.reconciler import OrphanCleaner, Reconciler
from swiftkv_platform.control_plane.ray import Entrypoint, RayJobs, SubmissionStatus
from swiftkv_platform.errors import ClusterUnavailableError
from tests.support.fakes.attempt_store import FakeWorker
from tests.support.fakes.scripted_server import Script, json_answer, serve
from tests.unit.control_plane.rules.conftest import Plane

STORE = "memory://test"


def orphans(plane: Plane) -> OrphanCleaner:
    return OrphanCleaner(plane.parts)


def started(plane: Plane) -> Job:
    job = plane.submit()
    plane.reconciler(max_running_jobs=9).tick()
    return plane.get(job)


def runs(plane: Plane, name: str) -> bool:
    return not plane.cluster.submissions[name].state.status.is_terminal


def test_a_submission_that_arrives_after_its_job_was_cancelled_is_stopped(plane: Plane) -> None:
    """Ray started the submission after the request had timed out and the job, found without it, had ended."""
    job = plane.submit()
    entrypoint = Entrypoint(("python", "-m", "swiftkv_platform.jobs.distill"), STORE)
    for status in (JobStatus.STARTING, JobStatus.CANCELLING, JobStatus.CANCELLED):
        moved, event = transition(plane.get(job), status, now=1000)
        plane.jobs.update(moved, events=[event])
    plane.cluster.submit(f"{job.id}-1", entrypoint.format_command(AttemptId(job.id, 1)), {})
    orphans(plane).tick()
    assert not runs(plane, f"{job.id}-1")


def test_it_looks_once_a_minute_and_waits_for_a_cluster_that_is_away(plane: Plane) -> None:
    stopper = orphans(plane)
    plane.cluster.away = True
    stopper.tick()
    plane.cluster.away = False
    plane.cluster.submit("job_1-1", Entrypoint(("python",), STORE).format_command(AttemptId("job_1", 1)), {})
    stopper.tick()
    assert runs(plane, "job_1-1")
    plane.clock.now += 60
    stopper.tick()
    assert not runs(plane, "job_1-1")


def test_what_no_job_has_is_stopped_and_what_one_has_runs_on(plane: Plane) -> None:
    lost, replaced, damaged, kept = (started(plane) for _ in range(4))
    with plane.database.begin_write() as session:  # as in a restored database
        session.execute(delete(EventRow).where(EventRow.job_id == lost.id))
        session.execute(delete(JobRow).where(JobRow.id == lost.id))
        damage = text("UPDATE jobs SET state = 'damaged', status = 'unheard-of' WHERE id = :id")
        session.execute(damage, {"id": damaged.id})
    later = replace(replaced.attempt, number=2, submission_id=f"{replaced.id}-2")
    plane.jobs.update(replace(replaced, attempt=later))
    others = (
        ("job_1-1", Entrypoint(("python",), "s3://another/store").format_command(AttemptId("job_1", 1))),
        ("job_1-9", Entrypoint(("python",), STORE).format_command(AttemptId("job_1", 1))),
        ("raysubmit_1", "python train.py --store memory://test"),
        ("raysubmit_2", "echo 'unfinished"),
    )
    for name, entrypoint in others:
        plane.cluster.submit(name, entrypoint, {})
    stopper = orphans(plane)
    stopper.tick()
    assert plane.cluster.submissions[f"{lost.id}-1"].state.status is SubmissionStatus.STOPPED
    assert not runs(plane, f"{replaced.id}-1")
    assert stopper.stopped == 2
    for name in (f"{kept.id}-1", f"{damaged.id}-1", *(name for name, _ in others)):
        assert runs(plane, name), "another control plane's, its job's own, or of an unreadable row"


def test_what_ended_is_forgotten_a_day_later_but_for_what_a_job_follows(plane: Plane) -> None:
    """Ray itself forgets no submission; logs are saved before they are deleted there."""
    followed, retried, done = (started(plane) for _ in range(3))
    plane.worker(done).artifact()
    for job in (retried, done):
        plane.cluster.submissions[f"{job.id}-1"].log = "trained\n"
        plane.end(job, SubmissionStatus.SUCCEEDED if job is done else SubmissionStatus.FAILED)
    plane.cluster.finish(f"{followed.id}-1", SubmissionStatus.SUCCEEDED)  # before any control plane has seen it
    other = Entrypoint(("python",), "s3://another/store").format_command(AttemptId("job_1", 1))
    plane.cluster.submit("job_1-1", other, {})
    plane.cluster.finish("job_1-1", SubmissionStatus.SUCCEEDED)
    stopper, ended = orphans(plane), {f"{job.id}-1" for job in (retried, done)}
    stopper.tick()
    assert ended < plane.cluster.submissions.keys(), "they stay in Ray's dashboard for a day"
    plane.clock.now += 24 * 3600 + 1
    for _ in range(2):
        stopper.stop_orphans()
        assert not ended & plane.cluster.submissions.keys()
        assert {f"{followed.id}-1", "job_1-1"} <= plane.cluster.submissions.keys()
    assert stopper.stopped == 0
    for job in (retried, done):
        saved = plane.store.open_saved_logs(AttemptId(job.id, 1))
        assert saved is not None
        assert b"".join(saved.stream(0)) == b"trained\n"


def test_a_driver_reserves_what_is_set_and_nothing_else() -> None:
    """Ray moves a driver off the head once any reservation is named, even one of zero."""
    for reserved in ({}, {"entrypoint_num_cpus": 0.5}, {"entrypoint_num_cpus": 1.0, "entrypoint_memory": 2 << 30}):
        script = Script()
        script.on("POST", "/api/jobs/", json_answer({"submission_id": "job_1-1"}))
        with serve(script) as url:
            RayJobs(url, **reserved).submit("job_1-1", "true", {})  # type: ignore[arg-type]
        [request] = script.sent("POST", "/api/jobs/")
        assert {name: value for name, value in request.body.items() if name.startswith("entrypoint_")} == reserved


def test_submissions_are_listed_with_their_ends() -> None:
    """Ray's list also has drivers without a submission, which are left out."""
    script = Script()
    listed = [
        {"type": "SUBMISSION", "submission_id": "a-1", "entrypoint": "one", "status": "RUNNING"},
        {"type": "SUBMISSION", "submission_id": "a-2", "entrypoint": "two", "status": "PENDING"},
        {"submission_id": "a-3", "entrypoint": "three", "status": "STOPPED", "start_time": 1000, "end_time": 7500},
        {"submission_id": "a-4", "entrypoint": "lost", "status": "FAILED", "start_time": 1000, "end_time": None},
        {"type": "DRIVER", "submission_id": None, "entrypoint": "four", "status": "RUNNING"},
    ]
    script.on("GET", "/api/jobs/", json_answer(listed))
    with serve(script) as url:
        found = [(each.submission_id, each.entrypoint, each.ended_at) for each in RayJobs(url).list_submissions()]
    assert found == [("a-1", "one", None), ("a-2", "two", None), ("a-3", "three", 7.5), ("a-4", "lost", 1.0)]


@pytest.mark.parametrize("state", ["alive", "dead", "silent"])
def test_a_dashboard_without_a_live_node_is_no_cluster(state: str) -> None:
    """While a head starts or its node hangs, the dashboard answers, but it takes no submission."""
    nodes = [{"node_id": "a", "state": "ALIVE"}] if state == "alive" else []
    script = Script()
    script.on(
        "GET", "/api/v0/nodes", json_answer({"data": {"result": {"result": nodes}}}, 500 if state == "silent" else 200)
    )
    with serve(script) as url, nullcontext() if state == "alive" else pytest.raises(ClusterUnavailableError) as raised:
        RayJobs(url).check_alive()
    assert raised is None or ("no live node" in str(raised.value)) is (state == "dead")


DEADLINE_S = 1800
"""The default of the operator's limit."""

NEEDS = "2 workers with 8 GPUs and 1 CPU each; the cluster has 0 GPUs and 4 CPUs"


@pytest.fixture
def reconciler(plane: Plane) -> Reconciler:
    return plane.reconciler()


def on_cluster(plane: Plane, reconciler: Reconciler, **spec: Any) -> Job:
    job = plane.submit(resources={"num_workers": 2, "gpus_per_worker": 8}, **spec)
    reconciler.tick()
    return job


def later(plane: Plane, reconciler: Reconciler, seconds: float) -> None:
    plane.clock.now += seconds
    reconciler.tick()


def check_not_placed(plane: Plane, reconciler: Reconciler, job: Job, missing: str) -> None:
    """Check that the job is in the queue again, for lack of `missing`, and that the next job has the slot."""
    plane.submit()
    assert plane.cluster.submissions[f"{job.id}-1"].state.status is SubmissionStatus.STOPPED
    reconciler.tick()
    waits = plane.get(job)
    assert (waits.status, waits.attempt.number, waits.retries) == (JobStatus.QUEUED, 2, 0)
    reason = plane.reason(job)
    assert (reason.code, reason.field) == ("not_placed", "resources")
    assert missing in reason.message
    [placed] = plane.jobs.list_cluster_jobs()
    assert placed.id != job.id, "another job has the slot"


def waiting(plane: Plane, reconciler: Reconciler, phase: str = "prepare", **spec: Any) -> tuple[Job, FakeWorker]:
    """Return a job whose worker has reported that it waits for a place, and that worker."""
    job = on_cluster(plane, reconciler, **spec)
    worker = plane.worker(job)
    worker.say("status", status="running")
    worker.say("placement", phase=phase, state="waiting", needs=NEEDS)
    return job, worker


def test_a_process_that_finds_no_place_gives_the_slot_back(plane: Plane, reconciler: Reconciler) -> None:
    job = on_cluster(plane, reconciler)
    plane.cluster.finish(f"{job.id}-1", SubmissionStatus.PENDING)
    later(plane, reconciler, DEADLINE_S + 1)
    check_not_placed(plane, reconciler, job, "its driver is still pending")


def test_a_process_that_says_nothing_costs_a_retry(plane: Plane, reconciler: Reconciler) -> None:
    job = on_cluster(plane, reconciler, fault_tolerance={"max_retries": 1})
    for _ in range(2):
        later(plane, reconciler, DEADLINE_S + 1)
        later(plane, reconciler, 60)
        later(plane, reconciler, 60)
    failed = plane.get(job)
    assert (failed.status, failed.retries, failed.attempt.number) == (JobStatus.FAILED, 1, 2)
    assert failed.error is not None
    assert failed.error.code == "worker_lost"
    assert "has reported no event" in failed.error.message


@pytest.mark.parametrize("first", ["waiting", "placed"])
def test_placed_workers_have_all_the_time_they_need(plane: Plane, reconciler: Reconciler, first: str) -> None:
    """In whatever order the events of driver and worker arrive."""
    job = on_cluster(plane, reconciler)
    driver, worker = plane.worker(job, writer="driver"), plane.worker(job, writer="worker")
    driver.say("status", status="running")
    times = {"waiting": 2.0, "placed": 3.0} if first == "waiting" else {"waiting": 3.0, "placed": 2.0}
    driver.say("placement", time=times["waiting"], phase="prepare", state="waiting", needs=NEEDS)
    worker.say("placement", time=times["placed"], phase="prepare", state="placed")
    later(plane, reconciler, 5)
    later(plane, reconciler, 10 * DEADLINE_S)
    assert plane.get(job).status is JobStatus.RUNNING


def test_each_phase_has_its_own_deadline(plane: Plane, reconciler: Reconciler) -> None:
    job = on_cluster(plane, reconciler)
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


@pytest.mark.parametrize("phase", ["train of trial-2", "evaluate of test", "publish of test"])
def test_a_job_that_has_trained_waits_as_long_as_it_lasts(plane: Plane, reconciler: Reconciler, phase: str) -> None:
    """Time spent waiting does not count as running time."""
    job, worker = waiting(plane, reconciler, "train of test", limits={"max_runtime_s": DEADLINE_S})
    worker.say("placement", phase="train of test", state="placed")
    worker.step(1, time=plane.clock.now)
    later(plane, reconciler, 60)
    worker.say("placement", phase=phase, state="waiting", needs=NEEDS)
    for seconds in (1, 10 * DEADLINE_S, 10 * DEADLINE_S):
        later(plane, reconciler, seconds)
    worker.say("placement", phase=phase, state="placed")
    later(plane, reconciler, 60)
    later(plane, reconciler, 60)
    assert plane.get(job).status is JobStatus.RUNNING
    later(plane, reconciler, DEADLINE_S)
    assert plane.cluster.submissions[f"{job.id}-1"].state.status is SubmissionStatus.STOPPED
    reconciler.tick()
    failed = plane.get(job).error
    assert failed is not None
    assert failed.code == "max_runtime_exceeded"


def test_a_finished_run_of_an_earlier_attempt_waits_for_its_evaluation(plane: Plane, reconciler: Reconciler) -> None:
    job, worker = waiting(plane, reconciler, "prepare of test")
    worker.say("placement", phase="prepare of test", state="placed")
    worker.say("status", status="evaluating")
    worker.say("placement", phase="evaluate of test", state="waiting", needs=NEEDS)
    for _ in range(3):
        later(plane, reconciler, 10 * DEADLINE_S)
    assert plane.get(job).status is JobStatus.EVALUATING


def test_a_pause_overtakes_the_way_back_to_the_queue(plane: Plane, reconciler: Reconciler) -> None:
    job, _ = waiting(plane, reconciler)
    later(plane, reconciler, 5)
    stopping, event = transition(plane.get(job), JobStatus.PAUSING, now=int(plane.clock()))
    plane.jobs.update(stopping, events=[event])
    plane.clock.now += DEADLINE_S + 1
    for _ in range(3):
        reconciler.tick()
    assert plane.get(job).status is JobStatus.PAUSED


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
