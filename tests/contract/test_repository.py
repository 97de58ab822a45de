"""What every database must do for jobs, models, deployments and leases: SQLite and PostgreSQL alike."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text

from swiftkv_platform.database.catalog import SqlCatalog
from swiftkv_platform.database.leases import SqlLeases
from swiftkv_platform.database.repository import SqlJobRepository
from swiftkv_platform.database.session import Database, alembic_config
from swiftkv_platform.database.tables import Base
from swiftkv_platform.errors import (
    ConflictError,
    DatabaseUnavailableError,
    IdempotencyConflictError,
    InvalidInputError,
    NotFoundError,
    StaleVersionError,
)
from swiftkv_platform.orchestration.job import (
    Attempt,
    Event,
    Failure,
    Job,
    JobStatus,
    MetricPoint,
    Model,
    Pace,
    Reason,
    new_id,
    start,
    status_event,
    transition,
)
from swiftkv_platform.orchestration.ports import (
    Deployment,
    DeploymentSpec,
    DeploymentState,
    DeploymentStatus,
    Idempotency,
    JobFilter,
    Page,
)
from swiftkv_platform.specs import JobSpec

TENANT = "acme"


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    url = f"sqlite:///{tmp_path / 'test.db'}" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    database = Database(url)
    if request.param == "postgresql":
        with database.writing() as session:
            Base.metadata.drop_all(session.connection())
            session.execute(text("DROP TABLE IF EXISTS alembic_version"))
    database.upgrade()
    yield database
    database.close()


@pytest.fixture
def jobs(database: Database) -> SqlJobRepository:
    return SqlJobRepository(database)


@pytest.fixture
def catalog(database: Database) -> SqlCatalog:
    return SqlCatalog(database)


def make_job(*, tenant: str = TENANT, **spec: Any) -> Job:
    return Job(
        id=new_id("job"), tenant=tenant, created_by="ann", spec=JobSpec(**{"name": "test", **spec}), created_at=100
    )


def store(jobs: SqlJobRepository, job: Job, *, key: str | None = None, body: str = "a") -> Job:
    idempotency = None if key is None else Idempotency(key, body)
    return jobs.create(job, status_event(job, now=100), idempotency=idempotency)


def message(job: Job, text: str) -> Event:
    return Event(new_id("evt"), job.id, 100, "message", text)


def make_model(job: Job) -> Model:
    return Model(
        id=new_id("mdl"),
        tenant=job.tenant,
        name="test",
        job_id=job.id,
        attempt=1,
        created_at=200,
        artifact_uri="s3://bucket/artifact",
        manifest_digest="d" * 64,
        size=1 << 40,
        lineage={"teacher": "tiny"},
        metrics={"kl": 0.1},
    )


def test_upgrade_makes_the_schema_that_the_tables_declare_and_can_be_repeated(database: Database) -> None:
    database.upgrade()
    database.check_schema()
    with database.reading() as session:
        context = MigrationContext.configure(session.connection(), opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def test_every_migration_can_be_taken_back(database: Database) -> None:
    with database.writing() as session:
        config = alembic_config()
        config.attributes["connection"] = session.connection()
        command.downgrade(config, "base")
        tables = inspect(session.connection()).get_table_names()
    assert tables == ["alembic_version"]
    database.upgrade()
    database.check_schema()


def test_check_schema_names_the_way_out_for_an_old_database(database: Database) -> None:
    with database.writing() as session:
        session.execute(text("DELETE FROM alembic_version"))
    with pytest.raises(InvalidInputError, match=r"python -m swiftkv_platform\.database"):
        database.check_schema()


def test_a_job_comes_back_as_it_was_stored(jobs: SqlJobRepository) -> None:
    job = replace(
        make_job(metadata={"team": "blue"}),
        attempt=Attempt(
            number=2,
            submission_id="job-2",
            submitted_at=1.5,
            resume_from="jobs/x/checkpoints/1",
            cursor={"driver": 3},
            pace=Pace(4, 5.25),
            failure=Failure(Reason("worker_lost", "gone", "a.b"), retryable=True),
        ),
        tracking={"url": None},
        retries=1,
        not_before=7.5,
    )
    store(jobs, job)
    assert jobs.get(job.id, tenant=TENANT) == job


def test_another_tenants_job_does_not_exist(jobs: SqlJobRepository) -> None:
    job = store(jobs, make_job())
    with pytest.raises(NotFoundError, match=job.id):
        jobs.get(job.id, tenant="other")
    assert jobs.list(Page(), tenant="other").items == []


def test_an_update_of_an_old_version_changes_nothing(jobs: SqlJobRepository) -> None:
    read = store(jobs, make_job())
    started, event = start(read, now=101)
    stored = jobs.update(started, events=[event])
    cancelled, late = transition(read, JobStatus.CANCELLING, now=102)
    with pytest.raises(StaleVersionError):
        jobs.update(cancelled, events=[late], points=[MetricPoint(1, 1, 0.0, {})], model=make_model(read))
    assert jobs.get(read.id, tenant=TENANT) == stored
    assert [item.data["status"] for item in jobs.events(read.id, Page(order="asc")).items] == ["queued", "starting"]
    assert jobs.points(read.id, Page()).items == []


def test_of_updates_at_the_same_time_one_wins(jobs: SqlJobRepository) -> None:
    job = store(jobs, make_job())
    outcomes: list[str] = []
    barrier = threading.Barrier(4)

    def contend(number: int) -> None:
        barrier.wait()
        try:
            jobs.update(job, events=[message(job, str(number))])
            outcomes.append("won")
        except StaleVersionError:
            outcomes.append("stale")

    threads = [threading.Thread(target=contend, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["stale", "stale", "stale", "won"]
    assert len(jobs.events(job.id, Page()).items) == 2


def test_a_key_stands_for_one_job_of_its_tenant(jobs: SqlJobRepository) -> None:
    first = store(jobs, make_job(), key="k")
    assert store(jobs, make_job(), key="k") == first
    other = store(jobs, make_job(tenant="other"), key="k")
    assert other.id != first.id
    with pytest.raises(IdempotencyConflictError, match=first.id):
        store(jobs, make_job(), key="k", body="b")
    assert [job.id for job in jobs.list(Page(), tenant=TENANT).items] == [first.id]


def test_one_key_from_many_requests_at_once_gives_one_job(jobs: SqlJobRepository) -> None:
    barrier = threading.Barrier(6)
    found: list[str] = []

    def submit() -> None:
        barrier.wait()
        found.append(store(jobs, make_job(), key="k").id)

    threads = [threading.Thread(target=submit) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert set(found) == {job.id for job in jobs.live()}
    assert len(set(found)) == 1


def test_lists_are_paged_in_both_directions(jobs: SqlJobRepository) -> None:
    ids = [store(jobs, make_job()).id for _ in range(5)]
    newest = jobs.list(Page(limit=2), tenant=TENANT)
    assert [job.id for job in newest.items] == [ids[4], ids[3]]
    assert newest.has_more
    rest = jobs.list(Page(after=ids[3], limit=3), tenant=TENANT)
    assert [job.id for job in rest.items] == [ids[2], ids[1], ids[0]]
    assert not rest.has_more
    assert [job.id for job in jobs.list(Page(after=ids[1], order="asc"), tenant=TENANT).items] == ids[2:]
    with pytest.raises(InvalidInputError, match="after"):
        jobs.list(Page(after="job_unknown"), tenant=TENANT)


def test_lists_are_filtered(jobs: SqlJobRepository) -> None:
    blue = store(jobs, make_job(metadata={"team": "blue", "a.b": "1"}))
    red = store(jobs, make_job(metadata={"team": "red"}, model={"name_or_path": "org/big"}))
    started, _ = start(red, now=101)
    jobs.update(started)

    def ids(**where: Any) -> list[str]:
        return [job.id for job in jobs.list(Page(), tenant=TENANT, where=JobFilter(**where)).items]

    assert ids(metadata={"team": "blue"}) == [blue.id]
    assert ids(metadata={"team": "blue", "a.b": "1"}) == [blue.id]
    assert ids(metadata={"team": "blue", "a.b": "2"}) == []
    assert ids(model="org/big") == [red.id]
    assert ids(status=JobStatus.QUEUED) == [blue.id]
    assert ids(status=JobStatus.STARTING, model="org/big") == [red.id]


def test_live_jobs_are_those_that_have_not_ended(jobs: SqlJobRepository) -> None:
    waiting = store(jobs, make_job())
    ended = store(jobs, make_job(tenant="other"))
    failed, event = transition(ended, JobStatus.FAILED, now=101, reason=Reason("data_error", "empty"))
    jobs.update(failed, events=[event])
    assert [job.id for job in jobs.live()] == [waiting.id]
    counts = jobs.count_by_status()
    assert (counts[JobStatus.QUEUED], counts[JobStatus.FAILED], counts[JobStatus.RUNNING]) == (1, 1, 0)


def test_events_keep_the_order_in_which_they_were_stored(jobs: SqlJobRepository) -> None:
    job = store(jobs, make_job())
    for start_number in range(0, 60, 20):
        job = jobs.update(job, events=[message(job, str(n)) for n in range(start_number, start_number + 20)])
    everything = jobs.events(job.id, Page(limit=100, order="asc")).items
    assert [event.message for event in everything[1:]] == [str(number) for number in range(60)]
    page = jobs.events(job.id, Page(after=everything[10].id, limit=5, order="asc"))
    assert page.items == everything[11:16]
    assert page.has_more
    with pytest.raises(InvalidInputError, match="after"):
        jobs.events(job.id, Page(after=new_id("evt")))


def test_a_repeated_step_replaces_the_earlier_one(jobs: SqlJobRepository) -> None:
    job = store(jobs, make_job())
    job = jobs.update(job, points=[MetricPoint(step, 1, 10.5 + step, {"loss": 1.0}) for step in range(1, 1200)])
    job = jobs.update(job, points=[MetricPoint(2, 2, 99.0, {"loss": None}), MetricPoint(2, 2, 99.5, {"loss": 0.25})])
    first = jobs.points(job.id, Page(limit=3, order="asc"))
    assert first.items == [
        MetricPoint(1, 1, 11.5, {"loss": 1.0}),
        MetricPoint(2, 2, 99.5, {"loss": 0.25}),
        MetricPoint(3, 1, 13.5, {"loss": 1.0}),
    ]
    assert first.has_more
    assert [point.step for point in jobs.points(job.id, Page(after="1198", order="asc")).items] == [1199]
    with pytest.raises(InvalidInputError, match="after"):
        jobs.points(job.id, Page(after="x"))


def test_a_model_is_stored_with_its_job(jobs: SqlJobRepository, catalog: SqlCatalog) -> None:
    job = store(jobs, make_job())
    model = make_model(job)
    jobs.update(replace(job, distilled_model=model.id), model=model)
    assert catalog.get_model(model.id, tenant=TENANT) == model
    assert catalog.list_models(Page(), tenant=TENANT).items == [model]
    with pytest.raises(NotFoundError):
        catalog.get_model(model.id, tenant="other")


@pytest.fixture
def model(jobs: SqlJobRepository) -> Model:
    job = store(jobs, make_job())
    model = make_model(job)
    jobs.update(job, model=model)
    return model


def make_deployment(model: Model, route_prefix: str = "/") -> Deployment:
    spec = DeploymentSpec(
        id=new_id("dep"),
        model=model.id,
        artifact_uri=model.artifact_uri,
        route_prefix=route_prefix,
        engine={"dtype": "bfloat16"},
    )
    return Deployment(spec, TENANT, 300)


def test_a_route_is_held_until_its_deployment_is_being_deleted(catalog: SqlCatalog, model: Model) -> None:
    holder = catalog.create_deployment(make_deployment(model))
    assert catalog.get_deployment(holder.spec.id, tenant=TENANT) == holder
    with pytest.raises(ConflictError, match=holder.spec.id):
        catalog.create_deployment(make_deployment(model))
    other = catalog.create_deployment(make_deployment(model, "/other"))
    catalog.set_deployment_state(holder.spec.id, DeploymentState(DeploymentStatus.DELETING))
    heir = catalog.create_deployment(make_deployment(model))
    assert [item.spec.id for item in catalog.all_deployments()] == [holder.spec.id, other.spec.id, heir.spec.id]


def test_a_deployment_that_is_being_deleted_stays_so(catalog: SqlCatalog, model: Model) -> None:
    deployment = catalog.create_deployment(make_deployment(model)).spec.id
    running = DeploymentState(DeploymentStatus.RUNNING, "ready", 2)
    catalog.set_deployment_state(deployment, running)
    assert catalog.get_deployment(deployment, tenant=TENANT).state == running
    catalog.set_deployment_state(deployment, DeploymentState(DeploymentStatus.DELETING))
    catalog.set_deployment_state(deployment, running)
    assert catalog.get_deployment(deployment, tenant=TENANT).state.status is DeploymentStatus.DELETING
    catalog.remove_deployment(deployment)
    catalog.remove_deployment(deployment)
    with pytest.raises(NotFoundError):
        catalog.get_deployment(deployment, tenant=TENANT)


def test_a_change_of_a_deployment_outlives_what_was_said_of_the_one_before(catalog: SqlCatalog, model: Model) -> None:
    before = catalog.create_deployment(make_deployment(model)).spec
    after = replace(before, engine={"dtype": "float32"}, max_replicas=3)
    swapping = DeploymentState(DeploymentStatus.SWAPPING)
    changed = catalog.update_deployment(after, swapping, tenant=TENANT)
    assert (changed.spec, changed.state) == (after, swapping)
    catalog.set_deployment_state(after.id, DeploymentState(DeploymentStatus.RUNNING), of=before)
    assert catalog.get_deployment(after.id, tenant=TENANT) == changed
    catalog.set_deployment_state(after.id, DeploymentState(DeploymentStatus.RUNNING), of=after)
    assert catalog.get_deployment(after.id, tenant=TENANT).state.status is DeploymentStatus.RUNNING
    with pytest.raises(NotFoundError):
        catalog.update_deployment(after, swapping, tenant="other")
    catalog.set_deployment_state(after.id, DeploymentState(DeploymentStatus.DELETING))
    with pytest.raises(ConflictError, match="being deleted"):
        catalog.update_deployment(after, swapping, tenant=TENANT)


def test_a_database_that_is_away_is_said_to_be(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}")  # a directory
    with pytest.raises(DatabaseUnavailableError):
        SqlJobRepository(database).live()
    with pytest.raises(InvalidInputError, match="postgresql"):
        Database("nonsense")


def test_a_lease_is_held_by_one_until_it_runs_out_or_is_given_up(database: Database) -> None:
    leases = SqlLeases(database)
    assert leases.take("jobs", "a", now=100.0, until=105.0)
    assert leases.take("deployments", "b", now=100.0, until=105.0)
    assert not leases.take("jobs", "b", now=104.0, until=109.0)
    assert leases.take("jobs", "a", now=104.0, until=109.0), "renewed"
    assert not leases.take("jobs", "b", now=108.0, until=113.0)
    assert leases.take("jobs", "b", now=109.0, until=114.0), "run out"
    leases.give_up("jobs", "a")
    assert not leases.take("jobs", "a", now=110.0, until=115.0), "not its own to give up"
    leases.give_up("jobs", "b")
    assert leases.take("jobs", "a", now=110.0, until=115.0)


def test_of_many_who_want_a_lease_at_once_one_gets_it(database: Database) -> None:
    leases, start_line = SqlLeases(database), threading.Barrier(8)
    taken: list[str] = []

    def take(holder: str) -> None:
        start_line.wait()
        if leases.take("jobs", holder, now=100.0, until=105.0):
            taken.append(holder)

    threads = [threading.Thread(target=take, args=(str(number),)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 1
