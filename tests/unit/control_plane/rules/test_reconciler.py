"""Jobs through the reconciler: submission, following, retries, and what a broken cluster does to them."""

import threading

import pytest

from swiftkv_platform.contract.attempts import MANIFEST, PROTOCOL, AttemptId
from swiftkv_platform.control_plane.base import PageQuery
from swiftkv_platform.control_plane.jobs.job import JobStatus
from swiftkv_platform.control_plane.ray import SubmissionStatus
from tests.support.fakes.attempt_store import METRICS
from tests.unit.control_plane.rules.conftest import TENANT, Plane


def test_a_job_is_submitted_followed_and_its_model_stored(plane: Plane) -> None:
    job = plane.started()
    assert plane.get(job).status is JobStatus.STARTING
    submission = plane.cluster.submissions[f"{job.id}-1"]
    arguments = f"--job-id {job.id} --attempt 1 --store memory://test --protocol {PROTOCOL}"
    assert submission.entrypoint == f"python -m swiftkv_platform.jobs.distill {arguments}"
    assert submission.env == {"OMP_NUM_THREADS": "1"}
    request = plane.store.read_request(AttemptId(job.id, 1))
    assert (request.spec, request.resume_from, request.run_id) == (job.spec, None, job.id)

    worker = plane.worker(job)
    worker.say("status", time=1001, status="running")
    worker.say("tracking", time=1001, provider="wandb", run_id=job.id, url="http://w", mode="offline")
    worker.step(1, 2, time=1010, total=12)
    plane.tick()
    running = plane.get(job)
    assert (running.status, running.started_at) == (JobStatus.RUNNING, 1000)
    assert running.tracking == {"provider": "wandb", "run_id": job.id, "url": "http://w", "mode": "offline"}
    assert (running.progress.step, running.progress.seconds_remaining) == (2, None)

    worker.step(3, 4, time=1020, total=12)
    worker.say("checkpoint", time=1021, step=4, key="k", size=1, sha256="0")
    plane.tick()
    running = plane.get(job)
    assert running.progress.step == 4
    assert running.progress.tokens == 400
    assert running.progress.percent == pytest.approx(33.33)
    assert running.progress.seconds_remaining == 40  # two steps took ten seconds, eight are left
    assert running.estimated_finish == 1060

    worker.say("status", time=1061, status="evaluating")
    plane.tick()
    assert plane.get(job).status is JobStatus.EVALUATING
    manifest = worker.artifact()
    submission.log = "trained\n"
    plane.cluster.finish(f"{job.id}-1", SubmissionStatus.SUCCEEDED)
    plane.clock.now = 1070
    plane.tick()

    done = plane.get(job)
    assert (done.status, done.finished_at, done.progress.percent) == (JobStatus.SUCCEEDED, 1070, 100.0)
    assert done.result == METRICS
    assert done.distilled_model is not None
    model = plane.catalog.get_model(done.distilled_model, tenant=TENANT)
    assert (model.artifact_uri, model.size, model.metrics) == (done.artifact_uri, manifest.size, METRICS)
    assert model.artifact_uri == plane.store.get_artifact_uri(AttemptId(job.id, 1))
    assert (model.lineage, model.job_id, model.attempt) == ({"teacher": "tiny"}, job.id, 1)
    saved = plane.store.open_saved_logs(AttemptId(job.id, 1))
    assert saved is not None
    assert b"".join(saved.stream()) == b"trained\n"
    assert plane.statuses(job) == ["queued", "starting", "running", "evaluating", "succeeded"]
    assert [point.step for point in plane.jobs.list_points(job.id, PageQuery(order="asc")).items] == [1, 2, 3, 4]
    assert [event.type for event in plane.events(job)].count("metrics") == 2


def test_the_end_of_a_sweep_is_not_foreseen(plane: Plane) -> None:
    """Between the steps of two trials come a calibration and a measurement, so no time left is told."""
    job = plane.started(sweep={"num_key_value_layers": [2, 4]}, evaluation={"max_kl": 0.2})
    worker = plane.worker(job)
    worker.say("status", time=1001, status="running")
    for time, step in ((1010, 1), (1020, 3)):
        worker.step(step, time=time, total=12)
        plane.tick()
    running = plane.get(job)
    assert (running.progress.step, running.progress.total_steps) == (3, 12)
    assert (running.progress.seconds_remaining, running.estimated_finish) == (None, None)


def test_a_failure_that_another_try_can_mend_goes_on_from_the_newest_checkpoint(plane: Plane) -> None:
    job = plane.started(fault_tolerance={"max_retries": 1})
    worker = plane.worker(job)
    worker.say("status", status="running")
    worker.step(5, time=1001)
    worker.checkpoint(3)
    newest = worker.checkpoint(5)
    worker.say("error", "the object store was away", level="error", code="storage_error", retryable=True)
    plane.end(job, SubmissionStatus.FAILED, "exit code 1")

    waiting = plane.get(job)
    assert (waiting.status, waiting.attempt.number, waiting.retries) == (JobStatus.QUEUED, 2, 1)
    assert plane.reason(job).code == "storage_error"
    assert plane.cluster.started == [f"{job.id}-1"], "a retry waits first"

    plane.clock.now += 1
    plane.tick()
    assert plane.cluster.started == [f"{job.id}-1", f"{job.id}-2"]
    assert plane.store.read_request(AttemptId(job.id, 2)).resume_from == newest
    assert plane.get(job).attempt.resume_from == newest

    plane.worker(job, attempt=2).say("error", "again", code="storage_error", retryable=True)
    plane.end(job, SubmissionStatus.FAILED, attempt=2)
    failed = plane.get(job)
    assert (failed.status, failed.attempt.number) == (JobStatus.FAILED, 2)
    assert (failed.error, plane.reason(job).code, plane.reason(job).message) == (
        plane.reason(job),
        "storage_error",
        "again",
    )


def test_prepared_rows_are_kept_for_another_attempt_and_for_no_longer(plane: Plane) -> None:
    job = plane.submit(fault_tolerance={"max_retries": 1})
    reconciler = plane.reconciler()
    rows = f"{AttemptId(job.id, 1).data_prefix}/{MANIFEST}"
    for attempt, kept in ((1, True), (2, False)):
        plane.clock.now += 1
        reconciler.tick()
        plane.objects.put_bytes(rows, b"{}")
        plane.cluster.finish(f"{job.id}-{attempt}", SubmissionStatus.FAILED)
        reconciler.tick()
        assert (plane.objects.head(rows) is not None) is kept
    assert plane.get(job).status is JobStatus.FAILED


def test_a_failure_without_a_word_is_a_lost_worker(plane: Plane) -> None:
    job = plane.started(fault_tolerance={"max_retries": 0})
    plane.end(job, SubmissionStatus.FAILED, "exit code -9, last logs:\npassword=hunter2")
    error = plane.get(job).error
    assert error is not None
    assert (error.code, "exit code -9" in error.message, "hunter2" in error.message) == ("worker_lost", True, False)


@pytest.mark.parametrize(
    ("manifest", "code", "status"),
    [(None, "storage_error", JobStatus.FAILED), (b"nonsense", "artifact_corrupt", JobStatus.QUEUED)],
)
def test_a_run_that_ends_well_has_a_whole_artifact(
    plane: Plane, manifest: bytes | None, code: str, status: JobStatus
) -> None:
    """Without an artifact the job fails; a damaged one leads to another attempt."""
    job = plane.started()
    if manifest is not None:
        plane.objects.put_bytes(f"{AttemptId(job.id, 1).artifact_prefix}/{MANIFEST}", manifest)
    ended = plane.end(job)
    assert (ended.status, ended.attempt.number, plane.reason(job).code) == (status, 1 if manifest is None else 2, code)


@pytest.mark.parametrize("forgotten", [True, False])
def test_a_process_that_is_lost_after_its_artifact_is_complete_has_succeeded(plane: Plane, forgotten: bool) -> None:
    job = plane.started()
    plane.worker(job).artifact()
    if forgotten:
        plane.cluster.forget()
        plane.tick()
    else:
        plane.end(job, SubmissionStatus.FAILED, "exit code 139")
    assert plane.statuses(job) == ["queued", "starting", "running", "succeeded"]


def test_a_head_that_forgot_a_run_costs_an_attempt_and_no_retry(plane: Plane) -> None:
    job = plane.started(fault_tolerance={"max_retries": 0})
    plane.worker(job).say("status", status="running")
    plane.tick()
    plane.cluster.forget()
    plane.tick()
    waiting = plane.get(job)
    assert (waiting.status, waiting.attempt.number, waiting.retries) == (JobStatus.QUEUED, 2, 0)
    plane.clock.now += 60
    plane.tick()
    assert plane.cluster.started == [f"{job.id}-1", f"{job.id}-2"]
    # The orphan of the first attempt writes where nothing reads any more.
    plane.worker(job, attempt=1).say("error", "orphaned", code="data_error", retryable=False)
    plane.tick()
    assert plane.get(job).status is JobStatus.STARTING
    plane.cluster.stop(f"{job.id}-2")  # as another user of Ray would
    plane.tick()
    assert (plane.reason(job).code, plane.get(job).attempt.number) == ("preempted", 3)


def test_while_ray_is_away_jobs_keep_their_status(plane: Plane) -> None:
    running = plane.submit()
    reconciler = plane.reconciler(max_running_jobs=2)
    reconciler.tick()
    waiting = plane.submit()
    plane.cluster.away = True
    before = plane.get(running)
    for _ in range(8):
        reconciler.tick()
        plane.clock.now += 1
    assert plane.get(running) == before
    assert plane.get(waiting).status is JobStatus.QUEUED
    plane.cluster.away = False
    plane.clock.now += 30
    reconciler.tick()
    assert plane.cluster.started == [f"{running.id}-1", f"{waiting.id}-1"]


def test_failing_calls_are_repeated_less_and_less_often(plane: Plane) -> None:
    plane.submit()
    reconciler = plane.reconciler()
    reconciler.tick()
    plane.cluster.away = True
    calls: list[float] = []
    check = plane.cluster.check_alive
    plane.cluster.check_alive = lambda: (calls.append(plane.clock.now), check())  # type: ignore[assignment, return-value]
    for _ in range(40):
        reconciler.tick()
        plane.clock.now += 1
    assert [call - 1000 for call in calls] == [0, 1, 3, 7, 15, 31]


def test_steps_repeated_after_a_worker_was_lost_count_once(plane: Plane) -> None:
    job = plane.started()
    first = plane.worker(job, writer="rank-0-a")
    for step in range(1, 6):
        first.step(step, time=1000 + step)
    second = plane.worker(job, writer="rank-0-b")
    second.step(4, time=1100)
    second.step(5, time=1110)
    second.step(6, time=1120)
    plane.tick()
    points = plane.jobs.list_points(job.id, PageQuery(order="asc")).items
    assert [(point.step, point.time) for point in points][2:] == [(3, 1003), (4, 1100), (5, 1110), (6, 1120)]
    assert plane.get(job).progress.step == 6
    assert plane.get(job).progress.seconds_remaining == 40  # ten seconds a step since the restart, four are left


def test_an_event_that_makes_no_sense_becomes_a_warning(plane: Plane) -> None:
    job = plane.started()
    worker = plane.worker(job)
    worker.say_nonsense("metrics", points="none")
    worker.say_nonsense("status", status="dancing")
    worker.say("metrics", points=[{"step": 1, "loss": float("nan"), "name": "a\0b"}])
    worker.say("course", action="rollback", code="held_out_kl_diverged", step=5, best_step=3)
    plane.tick()
    events = plane.events(job)
    warnings = [event for event in events if event.level == "warn" and event.data.get("action") is None]
    assert len(warnings) == 2
    assert all(word in warnings[0].message for word in ("/events/", "points"))
    [point] = plane.jobs.list_points(job.id, PageQuery()).items
    assert point.values == {"loss": None, "name": "ab"}
    [turn] = [event for event in events if event.data.get("action") == "rollback"]
    assert (turn.type, turn.data["code"], turn.data["best_step"]) == ("message", "held_out_kl_diverged", 3)


def test_an_attempt_that_has_ended_is_settled_when_all_its_events_are_read(plane: Plane) -> None:
    """There are more events than one look reads, such as after an hour without the store."""
    job = plane.started()
    worker = plane.worker(job)
    worker.say("status", status="running")
    for number in range(300):
        worker.say("message", str(number), time=float(number))
    worker.artifact()
    plane.end(job)
    assert plane.get(job).status is JobStatus.RUNNING
    plane.tick()
    assert plane.get(job).status is JobStatus.SUCCEEDED
    told = [event.message for event in plane.events(job) if event.type == "message"]
    assert told == [str(number) for number in range(300)]


class _Meeting:
    """An attempt store whose readers wait until a number of them read at once."""

    def __init__(self, store: object, readers: int) -> None:
        self._store = store
        self._barrier = threading.Barrier(readers, timeout=60)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def read_events(self, *arguments: object) -> object:
        self._barrier.wait()
        return self._store.read_events(*arguments)  # type: ignore[attr-defined]


def test_jobs_are_looked_at_several_at_a_time(plane: Plane) -> None:
    jobs = [plane.submit() for _ in range(8)]
    reconciler = plane.reconciler(max_running_jobs=8, concurrency=4, parts={"attempts": _Meeting(plane.store, 4)})
    reconciler.tick()
    assert sorted(plane.cluster.started) == sorted(f"{job.id}-1" for job in jobs)
    for job in jobs:
        plane.worker(job).artifact()
        plane.end(job)
    assert {plane.get(job).status for job in jobs} == {JobStatus.SUCCEEDED}
    assert len(plane.cluster.started) == 8
