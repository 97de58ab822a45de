"""The table of transitions, and the order of starts: fair between tenants, by priority, never beyond a quota."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swiftkv_platform.control_plane.access.tenants import Demand, TenantPolicies, TenantPolicy
from swiftkv_platform.control_plane.base import new_id
from swiftkv_platform.control_plane.jobs.job import (
    TRANSITIONS,
    Job,
    JobStatus,
    Progress,
    Reason,
    requeue,
    start_attempt,
    transition,
)
from swiftkv_platform.control_plane.jobs.queue import FairScheduler, explain_wait
from swiftkv_platform.errors import IllegalTransitionError, InvalidInputError
from swiftkv_platform.specs import JobSpec
from tests.support.records import held_by, snapshot_of


@dataclass
class Granted(TenantPolicies):
    """Policies of tenants, without a file."""

    policies: Mapping[str, TenantPolicy] = field(default_factory=dict)

    def get(self, tenant: str) -> TenantPolicy:
        return self.policies.get(tenant, TenantPolicy())


def job(tenant: str, *, status: JobStatus = JobStatus.QUEUED, **spec: Any) -> Job:
    document = {"name": "test", **spec}
    return Job(new_id("job"), tenant, "ann", JobSpec.model_validate(document), 100, status=status)


EVERYTHING_FITS: Any = SimpleNamespace(fits_empty_nodes=lambda _: True, fits_now=lambda _: True, reserve=lambda _: None)
"""An admission to a cluster that does not report its nodes."""


def workers(count: int, gpus: float = 0, cpus: float = 1) -> dict[str, Any]:
    return {"num_workers": count, "gpus_per_worker": gpus, "cpus_per_worker": cpus}


def choose(queue: FairScheduler, live: list[Job], *, room: int, now: float = 0) -> list[Job]:
    """The queue's choice among these jobs, counted as the database counts them (`tests/contract/test_queue.py`)."""
    snapshot = snapshot_of(live, most=len(live), now=now)
    chosen = queue.choose_next(snapshot, EVERYTHING_FITS, max_starts=room)
    by_id = {item.id: item for item in live}
    return [by_id[item.id] for item in chosen]


def tenants(jobs: list[Job]) -> list[str]:
    return [job.tenant for job in jobs]


def test_one_at_a_time_tenants_take_turns() -> None:
    queue, live, started = FairScheduler(Granted()), [job("a") for _ in range(4)] + [job("b") for _ in range(2)], []
    for _ in range(6):
        [chosen] = choose(queue, live, room=1)
        live.remove(chosen)
        started.append(chosen.tenant)
    assert started == ["a", "b", "a", "b", "a", "a"]


def test_a_weight_of_two_gets_twice_as_much() -> None:
    granted = Granted({"heavy": TenantPolicy(weight=2)})
    live = [job(tenant) for tenant in ("heavy", "light") for _ in range(20)]
    assert tenants(choose(FairScheduler(granted), live, room=12)).count("heavy") == 8


def test_what_a_tenant_holds_most_of_counts() -> None:
    """A tenant weighs by the resource of which it holds the largest share: all GPUs outweigh a few CPUs."""
    live = [job("gpu", status=JobStatus.RUNNING, resources=workers(2, gpus=1))]
    live += [job("cpu", status=JobStatus.RUNNING) for _ in range(2)] + [job("gpu"), *(job("cpu") for _ in range(5))]
    assert tenants(choose(FairScheduler(Granted()), live, room=2)) == ["cpu", "cpu"]


def test_priorities_count_within_a_tenant_alone() -> None:
    a_low, b = job("a", limits={"priority": "low"}), job("b")
    a_high, b_high = job("a", limits={"priority": "high"}), job("b", limits={"priority": "high"})
    assert choose(FairScheduler(Granted()), [a_low, b, a_high, b_high], room=4) == [a_high, b_high, a_low, b]


def test_a_worker_counts_a_core_whatever_share_it_reserves() -> None:
    assert Demand.for_job(job("a", resources=workers(1000, cpus=0.1)).spec).cpus == 1000
    assert Demand.for_job(job("a", resources=workers(2, cpus=1.5)).spec).cpus == 3


def test_a_job_that_waits_for_its_quota_is_not_overtaken_by_its_tenants_smaller_ones() -> None:
    granted = Granted({"a": TenantPolicy(max_gpus=4)})
    live = [job("a", status=JobStatus.PAUSING, resources=workers(2, gpus=1))]
    live += [job("a", resources=workers(4, gpus=1)), job("a"), job("b")]
    assert tenants(choose(FairScheduler(granted), live, room=4)) == ["b"]


def test_a_retry_that_is_not_due_stops_nobody() -> None:
    later = replace(job("a"), not_before=10.0)
    other = job("a")
    assert choose(FairScheduler(Granted()), [later, other], room=1, now=9.0) == [other]
    assert choose(FairScheduler(Granted()), [later, other], room=1, now=10.0) == [later]


def test_an_elastic_job_and_a_sweep_count_with_their_most() -> None:
    elastic = {"num_workers": {"min": 1, "max": 8}, "gpus_per_worker": 1, "cpus_per_worker": 2}
    assert Demand.for_job(job("a", resources=elastic).spec) == Demand(1, 8.0, 16.0)
    sweep = {"learning_rate": [0.1, 0.2, 0.3], "max_concurrent": 8}
    spec = job("a", resources=workers(2, gpus=1), sweep=sweep, evaluation={"max_kl": 1}).spec
    assert Demand.for_job(spec) == Demand(1, 6.0, 6.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(1, 4)), max_size=12), st.integers(0, 6))
def test_whatever_waits_no_quota_is_passed_and_no_room_wasted(jobs: list[tuple[str, bool, int]], room: int) -> None:
    granted = Granted({name: TenantPolicy(max_gpus=4, max_running_jobs=3) for name in "abc"})
    live: list[Job] = []
    for tenant, running, gpus in jobs:
        spec = {"resources": workers(gpus, gpus=1), "training": {"batch_size": 12}}
        candidate = job(tenant, status=JobStatus.RUNNING, **spec)
        fits = (held_by([*live, candidate])[tenant]).find_exceeded_limit(granted.get(tenant)) is None
        live.append(candidate if running and fits else replace(candidate, status=JobStatus.QUEUED))
    chosen = choose(FairScheduler(granted), live, room=room)
    after = [replace(item, status=JobStatus.RUNNING) if item in chosen else item for item in live]
    for tenant, held in held_by(after).items():
        assert held.find_exceeded_limit(granted.get(tenant)) is None
    assert len({item.id for item in chosen}) == len(chosen) <= room
    if len(chosen) < room:
        for tenant in "abc":
            waiting = [item for item in after if item.tenant == tenant and item.status is JobStatus.QUEUED]
            if waiting:
                first = Demand.for_job(min(waiting, key=lambda item: item.id).spec)
                held = held_by(after).get(tenant, Demand()) + first
                assert held.find_exceeded_limit(granted.get(tenant)) is not None


def test_policies_come_from_a_file_that_may_change(tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text("default: {max_queued_jobs: 5}\ntenants:\n  acme: {weight: 2}\n")
    tenants = TenantPolicies(path)
    assert tenants.get("acme") == TenantPolicy(weight=2, max_queued_jobs=5)
    assert tenants.get("other") == TenantPolicy(max_queued_jobs=5)
    path.write_text("tenants: {acme: {max_gpus: 8}}  # changed\n")
    assert tenants.get("acme") == TenantPolicy(max_gpus=8)
    path.write_text("tenants: {acme: {max_gpu: 8}}  # misspelt")
    with pytest.raises(InvalidInputError, match="max_gpus") as caught:
        TenantPolicies(path)
    assert caught.value.field == "tenants_file"


REASON = Reason("worker_lost", "the node died", "resources.num_workers")


def make_job(status: JobStatus = JobStatus.QUEUED) -> Job:
    return Job("job_1", "acme", "ann", JobSpec(name="test"), 100, status=status)


def test_a_retry_says_why_it_is_one_and_what_it_waits_for() -> None:
    job = replace(make_job(), status_reason=REASON, not_before=160.0)
    told = explain_wait(job, place=1, running=2, slots=2, exceeded=None, now=100.0)
    assert (told.code, told.field) == (REASON.code, REASON.field)
    rest = "the next attempt starts in 60 s at the earliest; all job slots are in use (2 of 2)"
    assert told.message == f"{REASON.message}; {rest}"
    assert explain_wait(job, place=1, running=1, slots=2, exceeded=None, now=200.0) == REASON


def test_a_status_changes_only_as_the_table_says() -> None:
    for source, target in itertools.product(JobStatus, JobStatus):
        if target in TRANSITIONS[source]:
            changed, event = transition(make_job(source), target, now=200)
            assert changed.status is target
            assert (event.data["previous"], event.data["status"]) == (source.value, target.value)
        else:
            with pytest.raises(IllegalTransitionError) as caught:
                transition(make_job(source), target, now=200)
            assert all(status.value in caught.value.message for status in TRANSITIONS[source])


def test_every_live_job_can_fail_or_be_cancelled() -> None:
    live = [status for status in JobStatus if not status.is_terminal]
    assert {status for status in JobStatus if status.is_terminal} == {"succeeded", "failed", "cancelled"}
    for status in live:
        assert JobStatus.FAILED in TRANSITIONS[status]
        assert status is JobStatus.CANCELLING or JobStatus.CANCELLING in TRANSITIONS[status]


def test_times_and_reasons_follow_the_status() -> None:
    job, _ = start_attempt(make_job(), now=101, resume_from=None)
    assert job.attempt.submission_id == "job_1-1"
    job, _ = transition(job, JobStatus.RUNNING, now=102)
    job = replace(job, progress=Progress(seconds_remaining=7), estimated_finish=500)
    job, event = requeue(job, now=103, reason=REASON, delay_s=2.0, counts=True)
    assert (job.status_reason, job.error, event.level) == (REASON, None, "warn")
    assert (job.attempt.number, job.attempt.submission_id) == (2, None)
    assert (job.retries, job.not_before) == (1, 105.0)
    assert (job.estimated_finish, job.progress.seconds_remaining) == (None, None)
    job, _ = start_attempt(job, now=110, resume_from="checkpoint")
    assert (job.attempt.submission_id, job.attempt.resume_from) == ("job_1-2", "checkpoint")
    job, _ = transition(job, JobStatus.RUNNING, now=111)
    assert (job.started_at, job.status_reason) == (102, None)
    job, event = transition(job, JobStatus.FAILED, now=120, reason=REASON)
    assert (job.finished_at, job.error, event.level) == (120, REASON, "error")
    assert REASON.message in event.message
