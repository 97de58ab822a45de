"""Contract of a database for its schema, the queue and leases: no place is given twice. SQLite and PostgreSQL alike."""

import random
import tarfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import (
    PrimaryKeyConstraint,
    Table,
    UniqueConstraint,
    column,
    delete,
    inspect,
    select,
    table,
    text,
    update,
)

from swiftkv_platform.contract.attempts import new_file_id
from swiftkv_platform.control_plane.access.demand import Demand
from swiftkv_platform.control_plane.base import Fence, Page
from swiftkv_platform.control_plane.database.session import (
    Database,
    alembic_config,
    newest_revision,
)
from swiftkv_platform.control_plane.database.tables import Base, JobRow, UseRow
from swiftkv_platform.control_plane.jobs.job import Event, Job, JobStatus, start, transition
from swiftkv_platform.control_plane.jobs.queue import Claim
from swiftkv_platform.control_plane.jobs.rows import JobRepository
from swiftkv_platform.control_plane.jobs.uses import live_users
from swiftkv_platform.control_plane.loops.rows import Leases
from swiftkv_platform.control_plane.models.registry import RegistryService
from swiftkv_platform.control_plane.models.rows import Registry
from swiftkv_platform.errors import DatabaseUnavailableError, InvalidInputError, LeaseLostError
from tests.old_home import ARCHIVES
from tests.postgres import emptied
from tests.records import TENANT, make_job, make_model, standing_of, store
from tests.threads import at_once

RELEASE = "0005"
"""Schema of the last release, 0.1.0."""

VERSION = table("alembic_version", column("version_num"))


def anything_fits(_tenant: str, _held: Demand, _demand: Demand) -> bool:
    return True


def at_most(limit: int) -> Claim:
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
        found = jobs.standing(most=most, now=now, without=without)
        assert found == standing_of(made, most=most, now=now, without=without)
    for tenant in "abc":
        usage = jobs.usage(tenant)
        own = [job for job in made if job.tenant == tenant]
        assert usage.waiting == sum(job.status in (JobStatus.QUEUED, JobStatus.PAUSED) for job in own)
        assert usage.held == found.held.get(tenant, Demand())
        queue = [item.id for item in standing_of(made, most=60, now=99.0).waiting.get(tenant, ())]
        assert jobs.queue_places(tenant) == {job_id: place for place, job_id in enumerate(queue, 1)}
    held = {job.id: job.attempt.number for job in made if job.status.holds_cluster}
    assert [item.id for item in jobs.on_cluster()] == sorted(held)
    assert jobs.attempts_on_cluster() == held
    ids = [job.id for job in made]
    assert jobs.live_among(ids) == {job.id for job in made if not job.status.is_terminal}
    assert jobs.load(ids[::-1]) == made[::-1]
    counts = {status: sum(job.status is status for job in made) for status in JobStatus}
    assert jobs.count_by_status() == counts


def starting(waiting: list[Job]) -> list[tuple[Job, Event]]:
    return [start(job, now=101) for job in waiting]


def test_of_many_who_claim_at_once_no_more_get_a_place_than_there_are(jobs: JobRepository) -> None:
    """Each claims another job, like control planes with different views of the queue."""
    waiting = [store(jobs, make_job(tenant=f"t{number % 2}")) for number in range(16)]
    claims = at_once(partial(jobs.claim, starting([job]), most=6, fits=at_most(4)) for job in waiting)
    claimed = [job for found in claims for job in found]
    assert len(claimed) == 6
    assert {job.id for job in claimed} == {item.id for item in jobs.on_cluster()}
    assert max(demand.jobs for demand in jobs.standing(most=1, now=0.0).held.values()) <= 4


def test_a_claim_takes_neither_what_has_changed_nor_what_follows_a_job_that_does_not_fit(
    jobs: JobRepository,
) -> None:
    first, cancelled, large, small = (store(jobs, make_job(tenant=tenant)) for tenant in ("a", "a", "b", "b"))
    gone, event = transition(cancelled, JobStatus.CANCELLING, now=100)
    jobs.update(gone, events=[event])

    def fits(tenant: str, _held: Demand, _demand: Demand) -> bool:
        return tenant == "a"

    claimed = jobs.claim(starting([first, cancelled, large, small]), most=10, fits=fits)
    assert [job.id for job in claimed] == [first.id]
    assert jobs.get(first.id, tenant="a").status is JobStatus.STARTING
    assert jobs.get(cancelled.id, tenant="a").status is JobStatus.CANCELLING
    assert jobs.claim(starting([large]), most=1, fits=anything_fits) == [], "two are on the cluster"


def test_a_lease_is_held_by_one_until_it_runs_out_or_is_given_up(database: Database) -> None:
    leases = Leases(database)
    assert leases.take("jobs", "a", now=100.0, until=105.0)
    assert leases.take("deployments", "b", now=100.0, until=105.0)
    assert not leases.take("jobs", "b", now=104.0, until=109.0)
    assert leases.take("jobs", "a", now=104.0, until=109.0), "renewed"
    assert not leases.take("jobs", "b", now=108.0, until=113.0)
    assert leases.take("jobs", "b", now=109.0, until=114.0), "the lease of a has run out"
    leases.give_up("jobs", "a")
    assert not leases.take("jobs", "a", now=110.0, until=115.0), "another's lease cannot be given up"
    leases.give_up("jobs", "b")
    takers = [partial(leases.take, "jobs", str(number), now=110.0, until=115.0) for number in range(8)]
    assert sum(token is not None for token in at_once(takers)) == 1


def test_nothing_is_stored_under_a_lease_that_is_anothers(database: Database, jobs: JobRepository) -> None:
    leases, job = Leases(database), store(jobs, make_job())
    token = leases.take("jobs", "a", now=100.0, until=105.0)
    assert token is not None
    fence = Fence("jobs", "a", token)
    job = jobs.update(job, fence=fence)
    assert leases.take("jobs", "a", now=104.0, until=109.0) == token, "renewed"
    assert leases.take("jobs", "b", now=110.0, until=115.0) == token + 1
    for _ in range(2):  # also once the other has given it up
        with pytest.raises(LeaseLostError):
            jobs.update(job, fence=fence)
        with pytest.raises(LeaseLostError):
            jobs.claim(starting([job]), most=1, fits=anything_fits, fence=fence)
        leases.give_up("jobs", "b")
    assert jobs.get(job.id, tenant=TENANT) == job
    assert leases.take("jobs", "a", now=111.0, until=116.0) == token + 2
    with pytest.raises(LeaseLostError):
        jobs.update(job, fence=fence)


def test_watching_a_job_is_no_change_of_it(jobs: JobRepository) -> None:
    job = store(jobs, make_job())
    jobs.watch(job.id, 300.0)
    [placed_job] = jobs.claim(starting([job]), most=1, fits=anything_fits)
    [placed] = jobs.on_cluster()
    assert (placed.version, placed.watched_until) == (placed_job.version, 300.0)
    jobs.update(placed_job)
    assert jobs.on_cluster()[0].watched_until == 300.0


def test_upgrade_makes_the_schema_that_the_tables_declare_and_can_be_repeated(database: Database) -> None:
    database.upgrade()
    database.check_schema()
    with database.reading() as session:
        context = MigrationContext.configure(session.connection(), opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


@pytest.mark.parametrize("table", Base.metadata.sorted_tables, ids=str)
def test_every_foreign_key_leads_an_index(table: Table) -> None:
    """Deleting a row searches every table that refers to it: without an index, the whole table is read."""
    indexes = [list(index.columns) for index in table.indexes] + [
        list(constraint.columns)
        for constraint in table.constraints
        if isinstance(constraint, PrimaryKeyConstraint | UniqueConstraint)
    ]
    for constraint in table.foreign_key_constraints:
        columns = list(constraint.columns)
        assert any(index[: len(columns)] == columns for index in indexes), f"{table}: {constraint.column_keys}"


def test_every_migration_can_be_taken_back(database: Database) -> None:
    with database.writing() as session:
        config = alembic_config()
        config.attributes["connection"] = session.connection()
        command.downgrade(config, "base")
        tables = inspect(session.connection()).get_table_names()
    assert tables == ["alembic_version"]
    database.upgrade()
    database.check_schema()


def test_two_who_migrate_at_once_take_turns(postgres_url: str) -> None:
    with closing(Database(emptied(postgres_url))) as first, closing(Database(postgres_url)) as second:
        first.downgrade("base")
        with ThreadPoolExecutor(1) as pool:
            with first._migrating() as session:
                command.upgrade(alembic_config(session.connection()), "head")
                other = pool.submit(second.upgrade)
                waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
                while not session.scalar(waiting) and not other.done():
                    pass
            other.result()
        second.check_schema()


def columns(database: Database) -> dict[str, dict[str, tuple[str, bool, bool]]]:
    """(type, whether it is nullable, whether an INSERT may leave it out) of the columns of each table."""
    with database.reading() as session:
        found = inspect(session.connection())
        return {
            table: {
                column["name"]: (str(column["type"]), column["nullable"], column["nullable"] or bool(column["default"]))
                for column in found.get_columns(table)
            }
            for table in found.get_table_names()
        }


def unique_indexes(database: Database, tables: Iterable[str]) -> set[str | None]:
    with database.reading() as session:
        found = inspect(session.connection())
        return {index["name"] for table in tables for index in found.get_indexes(table) if index["unique"]}


def test_programs_of_the_last_release_can_go_on_writing_after_the_upgrade(database: Database) -> None:
    """During a rolling upgrade old control planes write to the new schema: it keeps the columns that they write, and
    requires no new ones. A migration that cannot keep to that begins the next thousand (`can_use`)."""
    database.downgrade(RELEASE)
    before = columns(database)
    unique = unique_indexes(database, before)
    database.upgrade()
    after = columns(database)
    # Null only for imported models, which old control planes do not make.
    before["models"]["job_id"] = (before["models"]["job_id"][0], True, True)
    for name, old in before.items():
        assert old.items() <= after[name].items(), name
        assert {key for key in after[name].keys() - old.keys() if not after[name][key][2]} == set(), name
    # During the upgrade a second promotion of an alias by 0.1.0 is refused, since 0.1.0 writes no version.
    assert unique_indexes(database, before) - unique == {"ix_promotions_tenant_alias_version"}


def test_the_database_that_the_last_release_wrote_is_upgraded_and_read(tmp_path: Path) -> None:
    path = tmp_path / "swiftkv.db"
    with tarfile.open(ARCHIVES / "home-0.1.0.tar.xz") as archive:
        [member] = [member for member in archive if member.name.endswith("/swiftkv.db")]
        file = archive.extractfile(member)
        assert file is not None
        path.write_bytes(file.read())
    with closing(Database(f"sqlite:///{path}")) as database:
        with pytest.raises(InvalidInputError, match=f"schema revision {RELEASE}"):
            database.check_schema()
        database.upgrade()
        database.check_schema()
        found = JobRepository(database).list(Page(limit=9), tenant="default")
        assert {job.spec.name: job.status for job in found.items} == {
            "finished": JobStatus.SUCCEEDED,
            "paused": JobStatus.PAUSED,
        }
        assert found.left_out == []


@pytest.mark.parametrize(("revision", "is_usable"), [("0999", True), ("1001", False)])
def test_an_older_program_starts_on_a_later_schema_unless_that_is_in_the_next_thousand(
    database: Database, revision: str, is_usable: bool
) -> None:
    with database.writing() as session:
        session.execute(update(VERSION).values(version_num=revision))
    for step in (database.upgrade, database.check_schema):
        with nullcontext() if is_usable else pytest.raises(InvalidInputError, match="a later version"):
            step()
    with database.writing() as session:
        assert session.scalar(select(VERSION.c.version_num)) == revision
        session.execute(update(VERSION).values(version_num=newest_revision()))


def test_aliases_from_before_versions_are_numbered(database: Database, jobs: JobRepository) -> None:
    models = []
    for _ in range(3):
        job = store(jobs, make_job())
        models.append(make_model(job).id)
        jobs.update(job, model=replace(make_model(job), id=models[-1]))
    registry = Registry(database)
    service = RegistryService(registry, clock=lambda: 1.0)
    for alias, model in [("a", models[0]), ("b", models[1]), ("a", models[1]), ("a", models[2])]:
        service.promote(model, alias, tenant=TENANT, by="ann", reason="better")
    before = registry.promotions(tenant=TENANT)
    assert [(item.alias, item.version) for item in before] == [("a", 1), ("b", 1), ("a", 2), ("a", 3)]
    with database.writing() as session:
        config = alembic_config()
        config.attributes["connection"] = session.connection()
        command.downgrade(config, "0005")
    database.upgrade()
    assert registry.promotions(tenant=TENANT) == before


def test_the_queue_of_before_its_columns_is_decided_as_before(database: Database, jobs: JobRepository) -> None:
    resources = {"num_workers": 2, "gpus_per_worker": 1, "cpus_per_worker": 3}
    many: dict[str, Any] = {"resources": resources | {"num_workers": {"min": 1, "max": 3}}, "evaluation": {"max_kl": 1}}
    many["sweep"] = {"learning_rate": [1e-4, 2e-4], "key_value_group_size": [1, 2], "max_concurrent": 3}
    late = store(jobs, make_job(limits={"priority": "low"}, resources=resources))
    urgent = store(jobs, make_job(limits={"priority": "high"}, **many))
    retry = jobs.update(replace(store(jobs, make_job()), not_before=50.0))
    damaged = store(jobs, make_job())
    before = jobs.standing(most=9, now=40.0, without=[damaged.id])
    assert [item.id for item in before.waiting[TENANT]] == [urgent.id, late.id]
    with database.writing() as session:
        session.execute(text("UPDATE jobs SET spec = '7' WHERE id = :id"), {"id": damaged.id})
    database.downgrade("0007")
    database.upgrade()
    after = jobs.standing(most=9, now=40.0, without=[damaged.id])
    assert after.waiting == before.waiting
    assert [item.id for item in jobs.standing(most=9, now=60.0).waiting[TENANT]] == [
        urgent.id,
        *sorted([retry.id, damaged.id]),
        late.id,
    ]


def test_who_uses_what_is_known_of_jobs_from_before_the_table(database: Database, jobs: JobRepository) -> None:
    file_id, model = new_file_id(), "mdl_01ABCDEFGHJKMNPQRSTVWXYZ01"
    parent = store(jobs, make_job(training={"from": f"{model}"}))
    naming = {"data": {"sources": [{"name_or_path": "s3://b/" + f"jobs/{parent.id}/rows"}, {"name_or_path": "org/x"}]}}
    child = store(jobs, make_job(**naming, training={"from": f"{parent.id}:100"}))
    damaged = store(jobs, make_job())
    spec = {"data": {"sources": [{"name_or_path": file_id, "unknown": [1, None, {"a": model}]}]}}
    ended = store(jobs, make_job(training={"from": f"{parent.id}:100"}))
    jobs.update(replace(ended, status=JobStatus.CANCELLED))
    with database.writing() as session:
        session.execute(update(JobRow).where(JobRow.id == damaged.id).values(spec=spec))
    for back in (False, True):
        if back:
            database.downgrade("0011")
            database.upgrade()
        with database.reading() as session:
            assert list(live_users(session, [parent.id], tenant=TENANT, limit=9, without=parent.id)) == [child.id]
            assert list(live_users(session, [model], tenant=TENANT, limit=9)) == [parent.id]
            assert list(live_users(session, [file_id], tenant=TENANT, limit=9)) == [damaged.id] * back


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
        with database.writing() as session:  # as earlier versions stored the uses of any text
            session.execute(delete(UseRow))
            session.add_all(UseRow(used=each, job_id=job) for job in session.scalars(select(JobRow.id)) for each in ids)
            assert list(live_users(session, [used], tenant=TENANT, limit=9)) == [own.id], spec
            assert list(live_users(session, ids, tenant="other", limit=9)) == [theirs.id], spec
        for each in (own, theirs):
            jobs.update(replace(each, status=JobStatus.CANCELLED))


def test_the_way_back_is_a_command_that_refuses_what_there_is_not(database: Database) -> None:
    database.upgrade()
    database.downgrade("0005")
    with pytest.raises(InvalidInputError, match="schema revision 0005"):
        database.check_schema()
    with pytest.raises(InvalidInputError, match="revision is 'nine'"):
        database.downgrade("nine")
    database.upgrade()
    database.check_schema()


def test_check_schema_names_the_way_out_for_an_old_database(database: Database) -> None:
    with database.writing() as session:
        session.execute(text("DELETE FROM alembic_version"))
    with pytest.raises(InvalidInputError, match=r"python -m swiftkv_platform\.control_plane\.database"):
        database.check_schema()


def test_a_database_that_is_away_is_said_to_be(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}")  # a directory
    with pytest.raises(DatabaseUnavailableError):
        JobRepository(database).on_cluster()
    with pytest.raises(InvalidInputError, match="postgresql"):
        Database("nonsense")
