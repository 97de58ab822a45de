"""The background loop, its lease, and how often it looks at a job."""

import threading
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.control_plane.base import CachedCall
from swiftkv_platform.control_plane.jobs.job import JobStatus
from swiftkv_platform.control_plane.jobs.reconciler import PollIntervals, PollSchedule
from swiftkv_platform.control_plane.jobs.repository import ClusterJob
from swiftkv_platform.control_plane.loops import LEASE_S, MAX_LEASE_S, ControlLoop, Leadership, Leases
from swiftkv_platform.control_plane.ray import SubmissionStatus
from swiftkv_platform.errors import DatabaseUnavailableError, LeaseLostError
from tests.unit.control_plane.rules.conftest import Plane


@pytest.mark.parametrize("error", [DatabaseUnavailableError("away"), ZeroDivisionError("a bug")])
def test_a_loop_outlives_failures_and_ends_when_asked(error: Exception) -> None:
    failures = [error, error]
    recovered = threading.Event()

    def step() -> None:
        if failures:
            raise failures.pop()
        recovered.set()

    loop = ControlLoop("test", step, interval_s=0.001, clock=lambda: 7.0)
    assert loop.last_success is None
    loop.start()
    assert recovered.wait(30)
    loop.stop(30)
    assert loop.last_success == 7.0
    recovered.clear()
    assert not recovered.wait(0.05)


def test_a_loop_hangs_if_its_step_never_returns_but_not_if_it_fails() -> None:
    began, go_on, now = threading.Event(), threading.Event(), [0.0]

    def step() -> None:
        began.set()
        go_on.wait(30)
        raise DatabaseUnavailableError("away")

    loop = ControlLoop("test", step, interval_s=60.0, clock=lambda: now[0])
    assert not loop.is_hung, "not started"
    loop.start()
    assert began.wait(30)
    now[0] = 299.0
    assert (loop.is_stalled, loop.is_hung) == (True, False)
    now[0] = 301.0
    assert loop.is_hung
    go_on.set()
    while loop._step_began is not None:
        time.sleep(0.001)
    now[0] = 10_000.0
    assert (loop.is_stalled, loop.is_hung) == (True, False), "the step failed, and the loop tries again"
    loop.stop(30)
    assert not loop.is_hung


def test_one_of_two_leads_until_it_resigns_or_dies(plane: Plane) -> None:
    leases = Leases(plane.database)
    turns: list[str] = []
    first, second = (Leadership(leases, "jobs", holder, plane.clock) for holder in ("a", "b"))
    step_a, step_b = first.guard_step(lambda: turns.append("a")), second.guard_step(lambda: turns.append("b"))
    for _ in range(3):
        step_a()
        step_b()
        plane.clock.now += LEASE_S / 2
    assert turns == ["a", "a", "a"]
    first.release()
    step_b()
    step_a()
    assert turns[3:] == ["b"]
    plane.clock.now += LEASE_S
    step_a()
    assert turns[3:] == ["b", "a"], "b has been silent for as long as its lease"


def test_a_control_plane_whose_lease_ran_out_in_a_round_submits_nothing_more(plane: Plane) -> None:
    """Another control plane takes over while the first, frozen, is about to submit."""
    calls: list[str] = []
    submit = plane.cluster.submit

    def noted(submission_id: str, *arguments: Any) -> None:
        calls.append(submission_id)
        submit(submission_id, *arguments)

    plane.cluster.submit = noted  # type: ignore[method-assign]
    leases = Leases(plane.database)
    first, second = (Leadership(leases, "jobs", holder, plane.clock) for holder in ("a", "b"))
    other = second.guard_step(plane.reconciler(lease=second).tick)

    class Slow:
        """An attempt store in which one request takes longer than the lease."""

        def __getattr__(self, name: str) -> Any:
            return getattr(plane.store, name)

        def write_request(self, request: AttemptRequest) -> None:
            plane.store.write_request(request)
            plane.clock.now += LEASE_S
            other()

    job = plane.submit()
    with pytest.raises(LeaseLostError):
        first.guard_step(plane.reconciler(parts={"attempts": Slow()}, lease=first).tick)()
    assert calls == [f"{job.id}-1"]
    assert plane.get(job).attempt.submitted_at is not None
    with pytest.raises(LeaseLostError):
        first.check_leading()
    other()
    assert calls == [f"{job.id}-1"]


def test_a_lease_is_renewed_while_a_step_takes_longer_than_it(plane: Plane) -> None:
    leases, turns = Leases(plane.database), list[str]()
    first, second = (Leadership(leases, "jobs", holder, time.time, lease_s=0.2) for holder in ("a", "b"))
    other = second.guard_step(lambda: turns.append("b"))

    def long() -> None:
        began = time.monotonic()
        while time.monotonic() - began < 0.6:
            other()
            first.check_leading()
            time.sleep(0.01)

    first.guard_step(long)()
    assert turns == []


def test_a_step_ends_where_its_lease_cannot_be_renewed(plane: Plane) -> None:
    leases = Leases(plane.database)
    first = Leadership(leases, "jobs", "a", time.time, lease_s=0.2)
    began = threading.Event()

    def step() -> None:
        leases.acquire = lambda *_, **__: None  # type: ignore[assignment, method-assign, return-value]
        while True:
            first.check_leading()
            began.wait(0.01)

    with pytest.raises(LeaseLostError):
        first.guard_step(step)()
    with pytest.raises(LeaseLostError):
        first.check_leading()


def test_a_database_that_needs_longer_than_a_lease_slows_a_loop_down_and_does_not_stop_it(plane: Plane) -> None:
    leases = Leases(plane.database)
    take, turns, longest = leases.acquire, list[str](), list[float]()

    def slow(name: str, holder: str, *, now: float, until: float) -> int | None:
        longest.append(until - now)
        token = take(name, holder, now=now, until=until)
        plane.clock.now += seconds
        return token

    leases.acquire = slow  # type: ignore[method-assign]
    lease = Leadership(leases, "jobs", "a", plane.clock)

    def step() -> None:
        lease.check_leading()
        turns.append("a")

    seconds = LEASE_S + 1.0
    guarded = lease.guard_step(step)
    with pytest.raises(LeaseLostError):
        guarded()  # its loop reports a failure
    for _ in range(3):
        guarded()
    assert turns == ["a", "a", "a"]
    seconds = 1e4
    for _ in range(2):
        with pytest.raises(LeaseLostError):
            guarded()
    assert max(longest) == MAX_LEASE_S


def test_a_clock_that_is_set_back_keeps_nothing_waiting(plane: Plane) -> None:
    """A clock set back by an hour delays neither jobs, nor a cluster that was away, readiness or the lease."""
    lease = Leadership(Leases(plane.database), "jobs", "a", plane.clock)
    step = lease.guard_step(plane.reconciler(max_running_jobs=2, polls=PollSchedule(), lease=lease).tick)
    readiness = CachedCall(lambda: plane.clock.now, plane.clock, ttl_s=2.0)
    step()
    job = plane.submit()
    step()
    plane.cluster.away = True
    step()
    readiness.get_future().result(30)
    plane.cluster.away = False
    plane.cluster.finish(f"{job.id}-1", SubmissionStatus.SUCCEEDED)
    plane.worker(job).artifact()
    plane.clock.now -= 3600.0
    assert readiness.get_future().result(30) == plane.clock.now
    step()
    assert plane.get(job).status is JobStatus.SUCCEEDED
    plane.clock.now -= 3600.0
    restarted, turns = Leadership(Leases(plane.database), "jobs", "b", plane.clock), list[str]()
    restarted.guard_step(lambda: turns.append("b"))()
    assert turns == ["b"], "the killed one had a lease for an hour from now"
    lease.guard_step(lambda: turns.append("a"))()
    assert turns == ["b"]


def placed(count: int) -> list[ClusterJob]:
    return [ClusterJob(f"job_{number:04d}", JobStatus.RUNNING, version=1, watched_until=0.0) for number in range(count)]


def looks(polls: PollSchedule, jobs: list[ClusterJob], seconds: int, *, speaking: int = 0) -> dict[str, list[int]]:
    """Seconds at which each job is looked at, with a tick a second; the first jobs report something each second."""
    seen: dict[str, list[int]] = {job.id: [] for job in jobs}
    for now in range(seconds):
        for job_id in polls.choose_due_jobs(jobs, float(now)):
            seen[job_id].append(now)
            heard = int(job_id.removeprefix("job_")) < speaking
            polls.record_poll(job_id, now=float(now), version=1, found_events=heard, has_more=False)
    return seen


def gaps(times: list[int]) -> list[int]:
    return [later - earlier for earlier, later in pairwise(times)]


def test_jobs_that_speak_are_looked_at_more_often_than_silent_ones() -> None:
    jobs = placed(100)
    seen = looks(PollSchedule(), jobs, 200, speaking=10)
    assert gaps(seen["job_0005"])[-1] == PollIntervals().busy_s
    assert gaps(seen["job_0050"])[-1] == PollIntervals().quiet_s
    assert sorted(gaps(seen["job_0050"])) == gaps(seen["job_0050"]), "less and less often"


def test_a_watched_job_one_that_is_to_end_and_a_changed_one_do_not_wait() -> None:
    polls, jobs = PollSchedule(), placed(100)
    looks(polls, jobs, 100)
    watched = replace(jobs[0], watched_until=1000.0)
    cancelling = replace(jobs[1], status=JobStatus.CANCELLING)
    changed = replace(jobs[2], version=2)
    due = polls.choose_due_jobs([watched, cancelling, changed, *jobs[3:]], 101.0)
    assert {"job_0000", "job_0001", "job_0002"} <= set(due)
    assert due[0] == "job_0002", "the changed job comes first"
    assert len(due) < 20


def test_a_job_of_which_more_is_to_be_read_is_looked_at_again_at_once() -> None:
    polls, jobs = PollSchedule(), placed(100)
    looks(polls, jobs, 2)
    assert polls.choose_due_jobs(jobs, 2.0) == []
    polls.record_poll("job_0007", now=2.0, version=1, found_events=True, has_more=True)
    assert polls.choose_due_jobs(jobs, 2.0) == ["job_0007"]


def test_looks_of_a_tick_are_bounded_and_every_job_has_its_turn() -> None:
    polls, jobs = PollSchedule(max_polls=50), placed(400)
    seen = looks(polls, jobs, 120)
    for now in range(120):
        assert sum(now in times for times in seen.values()) <= 50
    assert all(times for times in seen.values())
    polls.choose_due_jobs(jobs[1:], 120.0)
    assert (polls.get_poll_number("job_0000"), polls.get_poll_number("job_0001") > 0) == (0, True), (
        "a job off the cluster is forgotten"
    )
    assert {min(times) for times in seen.values()} == set(range(8))


def test_a_watched_job_has_its_turn_in_every_tick_however_many_others_are_overdue() -> None:
    polls, jobs = PollSchedule(max_polls=16), placed(400)
    jobs[250] = replace(jobs[250], watched_until=1000.0)
    assert gaps(looks(polls, jobs, 100)["job_0250"])[-50:] == [1] * 50
    everyone = [replace(job, watched_until=1000.0) for job in jobs[:200]]
    seen = looks(polls, [*everyone, *jobs[200:]], 300)
    assert all(seen.values()), "many watched jobs do not keep the others out"
