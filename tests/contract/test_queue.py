"""Contract of a database for its schema, the queue and leases: no place is given twice. SQLite and PostgreSQL alike."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import (
    delete,
    select,
)

from swiftkv_platform.contract.attempts import new_file_id
from swiftkv_platform.control_plane.access.tenants import Demand, TenantPolicies
from swiftkv_platform.control_plane.base import FencingToken
from swiftkv_platform.control_plane.database.session import (
    Database,
)
from swiftkv_platform.control_plane.database.tables import JobReferenceRow, JobRow
from swiftkv_platform.control_plane.files.repository import find_referencing_jobs
from swiftkv_platform.control_plane.jobs.job import Event, Job, JobStatus, start_attempt, transition
from swiftkv_platform.control_plane.jobs.repository import JobRepository, QuotaCheck
from swiftkv_platform.control_plane.loops import Leases
from swiftkv_platform.errors import DatabaseUnavailableError, InvalidInputError, LeaseLostError
from tests.support.records import TENANT, make_job, snapshot_of, store
from tests.support.threads import at_once


def anything_fits(_tenant: str, _held: Demand, _demand: Demand) -> bool:
    return True


def at_most(limit: int) -> QuotaCheck:
    """Rule that lets each tenant hold up to `limit` jobs."""
    return lambda _tenant, held, demand: held.jobs + demand.jobs <= limit


def random_jobs(jobs: JobRepository, number: int) -> list[Job]:
    """Store jobs of three tenants in random statuses, with different demands."""
    rng, made = random.Random(7), []
    for _ in range(number):
        resources = {"num_workers": rng.randint(1, 4), "gpus_per_worker": rng.choice([0, 1]), "cpus_per_worker": 2}
        training, priority = {"batch_size": 12}, rng.choice(["low", "normal", "high"])
        spec = {"resources": resources, "training": training, "limits": {"priority": priority}}
        job = store(jobs, make_job(tenant=rng.choice("abc"), **spec))
        status = rng.choice([JobStatus.QUEUED, JobStatus.QUEUED, *JobStatus])
        made.append(jobs.update(replace(job, status=status, not_before=rng.choice([0.0, 0.0, 50.0]))))
    return made


def test_the_queue_is_what_the_jobs_say(jobs: JobRepository) -> None:
    made = random_jobs(jobs, 60)
    left_alone = [job.id for job in made if job.status is JobStatus.QUEUED][:3]
    for now, without, most in ((40.0, [], 60), (60.0, left_alone, 60), (60.0, [], 2)):
        found = jobs.read_queue(most=most, now=now, without=without)
        assert found == snapshot_of(made, most=most, now=now, without=without)
    for tenant in "abc":
        assert jobs.sum_tenant_demand(tenant) == found.used.get(tenant, Demand())
        queue = [item.id for item in snapshot_of(made, most=60, now=99.0).waiting.get(tenant, ())]
        assert jobs.list_queue_positions(tenant) == {job_id: place for place, job_id in enumerate(queue, 1)}
    held = {job.id: job.attempt.number for job in made if job.status.is_on_cluster}
    assert [item.id for item in jobs.list_cluster_jobs()] == sorted(held)
    assert jobs.list_attempts_on_cluster() == held
    ids = [job.id for job in made]
    assert jobs.find_live_jobs(ids) == {job.id for job in made if not job.status.is_terminal}
    assert jobs.load_jobs(ids[::-1]) == made[::-1]
    counts = {status: sum(job.status is status for job in made) for status in JobStatus}
    assert jobs.count_by_status() == counts


def starting(waiting: list[Job]) -> list[tuple[Job, Event]]:
    return [start_attempt(job, now=101) for job in waiting]


def test_of_many_who_claim_at_once_no_more_get_a_place_than_there_are(jobs: JobRepository) -> None:
    """Each claims another job, like control planes with different views of the queue."""
    waiting = [store(jobs, make_job(tenant=f"t{number % 2}")) for number in range(16)]
    claims = at_once(partial(jobs.claim_slots, starting([job]), most=6, fits=at_most(4)) for job in waiting)
    claimed = [job for found in claims for job in found]
    assert len(claimed) == 6
    assert {job.id for job in claimed} == {item.id for item in jobs.list_cluster_jobs()}
    assert max(demand.jobs for demand in jobs.read_queue(most=1, now=0.0).used.values()) <= 4


def test_a_claim_takes_neither_what_has_changed_nor_what_follows_a_job_that_does_not_fit(
    jobs: JobRepository,
) -> None:
    first, cancelled, large, small = (store(jobs, make_job(tenant=tenant)) for tenant in ("a", "a", "b", "b"))
    gone, event = transition(cancelled, JobStatus.CANCELLING, now=100)
    jobs.update(gone, events=[event])

    def fits(tenant: str, _held: Demand, _demand: Demand) -> bool:
        return tenant == "a"

    claimed = jobs.claim_slots(starting([first, cancelled, large, small]), most=10, fits=fits)
    assert [job.id for job in claimed] == [first.id]
    assert jobs.get(first.id, tenant="a").status is JobStatus.STARTING
    assert jobs.get(cancelled.id, tenant="a").status is JobStatus.CANCELLING
    assert jobs.claim_slots(starting([large]), most=1, fits=anything_fits) == [], "two are on the cluster"


def test_a_lease_is_held_by_one_until_it_runs_out_or_is_given_up(database: Database) -> None:
    leases = Leases(database)
    assert leases.acquire("jobs", "a", now=100.0, until=105.0)
    assert leases.acquire("deployments", "b", now=100.0, until=105.0)
    assert not leases.acquire("jobs", "b", now=104.0, until=109.0)
    assert leases.acquire("jobs", "a", now=104.0, until=109.0), "renewed"
    assert not leases.acquire("jobs", "b", now=108.0, until=113.0)
    assert leases.acquire("jobs", "b", now=109.0, until=114.0), "the lease of a has run out"
    leases.release("jobs", "a")
    assert not leases.acquire("jobs", "a", now=110.0, until=115.0), "another's lease cannot be given up"
    leases.release("jobs", "b")
    takers = [partial(leases.acquire, "jobs", str(number), now=110.0, until=115.0) for number in range(8)]
    assert sum(token is not None for token in at_once(takers)) == 1


def test_nothing_is_stored_under_a_lease_that_is_anothers(database: Database, jobs: JobRepository) -> None:
    leases, job = Leases(database), store(jobs, make_job())
    token = leases.acquire("jobs", "a", now=100.0, until=105.0)
    assert token is not None
    fence = FencingToken("jobs", "a", token)
    job = jobs.update(job, fence=fence)
    assert leases.acquire("jobs", "a", now=104.0, until=109.0) == token, "renewed"
    assert leases.acquire("jobs", "b", now=110.0, until=115.0) == token + 1
    for _ in range(2):  # also once the other has given it up
        with pytest.raises(LeaseLostError):
            jobs.update(job, fence=fence)
        with pytest.raises(LeaseLostError):
            jobs.claim_slots(starting([job]), most=1, fits=anything_fits, fence=fence)
        leases.release("jobs", "b")
    assert jobs.get(job.id, tenant=TENANT) == job
    assert leases.acquire("jobs", "a", now=111.0, until=116.0) == token + 2
    with pytest.raises(LeaseLostError):
        jobs.update(job, fence=fence)


def test_watching_a_job_is_no_change_of_it(jobs: JobRepository) -> None:
    job = store(jobs, make_job())
    jobs.mark_watched(job.id, 300.0)
    [placed_job] = jobs.claim_slots(starting([job]), most=1, fits=anything_fits)
    [placed] = jobs.list_cluster_jobs()
    assert (placed.version, placed.watched_until) == (placed_job.version, 300.0)
    jobs.update(placed_job)
    assert jobs.list_cluster_jobs()[0].watched_until == 300.0


def test_only_typed_references_of_the_same_tenant_use_an_object(database: Database, jobs: JobRepository) -> None:
    file_id, model, other_model = new_file_id(), "mdl_01ABCDEFGHJKMNPQRSTVWXYZ01", "mdl_01ABCDEFGHJKMNPQRSTVWXYZ02"
    parent = store(jobs, make_job())
    address = f"s3://b/jobs/{parent.id}"
    untyped: dict[str, Any] = {
        "metadata": {"file": file_id, "model": model, "parent": f"{address}/x"},
        "tracking": {"wandb": {"tags": [file_id, model, f"{address}/x"]}},
        "model": {"name_or_path": f"org/{other_model}", "revision": model},
        "data": {"sources": [{"name_or_path": "org/rows", "split": model, "subset": f"jobs/{parent.id}/x"}]},
    }
    typed: list[tuple[str, dict[str, Any]]] = [
        (model, {"training": {"from": model}}),
        (parent.id, {"training": {"from": f"{parent.id}:100"}}),
        (parent.id, {"model": {"name_or_path": f"{address}/attempts/1/artifact"}}),
        (parent.id, {"data": {"sources": [{"name_or_path": address}]}}),
        (parent.id, {"evaluation": {"tasks": [f"{address}/task.yaml"]}}),
        (parent.id, {"evaluation": {"tasks": [{"name": "builtin:gsm8k", "data_dir": f"/store/jobs/{parent.id}/"}]}}),
        (other_model, {"model": {"name_or_path": f"/store/models/{other_model}/student"}}),
    ]
    ids = [file_id, model, other_model, parent.id]
    store(jobs, make_job(**untyped))
    for used, spec in typed:
        theirs = store(jobs, make_job(tenant="other", **spec))
        own = store(jobs, make_job(**spec))
        with database.begin_write() as session:  # as earlier versions stored the uses of any text
            session.execute(delete(JobReferenceRow))
            session.add_all(
                JobReferenceRow(used=each, job_id=job) for job in session.scalars(select(JobRow.id)) for each in ids
            )
            assert list(find_referencing_jobs(session, [used], tenant=TENANT, limit=9)) == [own.id], spec
            assert list(find_referencing_jobs(session, ids, tenant="other", limit=9)) == [theirs.id], spec
        for each in (own, theirs):
            jobs.update(replace(each, status=JobStatus.CANCELLED))


def test_a_database_that_is_away_is_said_to_be(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}")  # a directory
    with pytest.raises(DatabaseUnavailableError):
        JobRepository(database, TenantPolicies()).list_cluster_jobs()
    with pytest.raises(InvalidInputError, match="postgresql"):
        Database("nonsense")
