"""Attempts that run for no job are stopped; whatever else runs on the cluster is left alone."""

from __future__ import annotations

from dataclasses import replace

from sqlalchemy import delete, text

from swiftkv_platform.cluster.ray_jobs import RayJobs
from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.database.tables import EventRow, JobRow
from swiftkv_platform.orchestration.job import Job, JobStatus, transition
from swiftkv_platform.orchestration.orphans import Orphans
from swiftkv_platform.orchestration.ports import SubmissionStatus
from swiftkv_platform.orchestration.reconciler import Entrypoint
from tests.fakes.scripted_server import Script, json_answer, serve
from tests.unit.orchestration.conftest import Plane

STORE = "memory://test"


def orphans(plane: Plane) -> Orphans:
    return Orphans(plane.jobs, plane.cluster, STORE, plane.clock)


def started(plane: Plane) -> Job:
    job = plane.submit()
    plane.reconciler(max_running_jobs=9).tick()
    return plane.get(job)


def runs(plane: Plane, name: str) -> bool:
    return not plane.cluster.submissions[name].state.status.is_terminal


def test_a_submission_that_arrives_after_its_job_was_cancelled_is_stopped(plane: Plane) -> None:
    """Ray took longer than the request: when the job was looked at it was not there, so the job has ended."""
    job = plane.submit()
    entrypoint = Entrypoint(("python", "-m", "swiftkv_platform.jobs.distill"), STORE)
    for status in (JobStatus.STARTING, JobStatus.CANCELLING, JobStatus.CANCELLED):
        moved, event = transition(plane.get(job), status, now=1000)
        plane.jobs.update(moved, events=[event])
    plane.cluster.submit(f"{job.id}-1", entrypoint.shell(AttemptId(job.id, 1)), {})
    orphans(plane).tick()
    assert not runs(plane, f"{job.id}-1")


def test_it_looks_once_a_minute_and_waits_for_a_cluster_that_is_away(plane: Plane) -> None:
    stopper = orphans(plane)
    plane.cluster.away = True
    stopper.tick()
    plane.cluster.away = False
    plane.cluster.submit("job_1-1", Entrypoint(("python",), STORE).shell(AttemptId("job_1", 1)), {})
    stopper.tick()
    assert runs(plane, "job_1-1")
    plane.clock.now += 60
    stopper.tick()
    assert not runs(plane, "job_1-1")


def test_what_no_job_has_is_stopped_and_what_one_has_runs_on(plane: Plane) -> None:
    lost, replaced, damaged, kept = (started(plane) for _ in range(4))
    with plane.database.writing() as session:  # as one that was restored
        session.execute(delete(EventRow).where(EventRow.job_id == lost.id))
        session.execute(delete(JobRow).where(JobRow.id == lost.id))
        damage = text("UPDATE jobs SET state = 'damaged', status = 'unheard-of' WHERE id = :id")
        session.execute(damage, {"id": damaged.id})
    later = replace(replaced.attempt, number=2, submission_id=f"{replaced.id}-2")
    plane.jobs.update(replace(replaced, attempt=later))
    others = (
        ("job_1-1", Entrypoint(("python",), "s3://another/store").shell(AttemptId("job_1", 1))),
        ("job_1-9", Entrypoint(("python",), STORE).shell(AttemptId("job_1", 1))),
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
        assert runs(plane, name), "it is not this control plane's, or its row cannot be read"


def test_a_driver_reserves_what_is_set_and_nothing_else() -> None:
    """Ray moves a driver off its head as soon as one reservation is named, be it of nothing."""
    for reserved in ({}, {"entrypoint_num_cpus": 0.5}, {"entrypoint_num_cpus": 1.0, "entrypoint_memory": 2 << 30}):
        script = Script()
        script.on("POST", "/api/jobs/", json_answer({"submission_id": "job_1-1"}))
        with serve(script) as url:
            RayJobs(url, **reserved).submit("job_1-1", "true", {})  # type: ignore[arg-type]
        [request] = script.sent("POST", "/api/jobs/")
        assert {name: value for name, value in request.body.items() if name.startswith("entrypoint_")} == reserved


def test_submissions_that_have_not_ended_are_listed() -> None:
    """Drivers that connected by themselves have no submission, and are in the list as well."""
    script = Script()
    listed = [
        {"type": "SUBMISSION", "submission_id": "a-1", "entrypoint": "one", "status": "RUNNING"},
        {"type": "SUBMISSION", "submission_id": "a-2", "entrypoint": "two", "status": "PENDING"},
        {"type": "SUBMISSION", "submission_id": "a-3", "entrypoint": "three", "status": "STOPPED"},
        {"type": "DRIVER", "submission_id": None, "entrypoint": "four", "status": "RUNNING"},
    ]
    script.on("GET", "/api/jobs/", json_answer(listed))
    with serve(script) as url:
        running = RayJobs(url).running()
    assert [(each.submission_id, each.entrypoint) for each in running] == [("a-1", "one"), ("a-2", "two")]
