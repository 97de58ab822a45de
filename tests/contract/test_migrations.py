"""Contract of the schema's migrations: every former schema becomes the present one and keeps its rows. SQLite and
PostgreSQL alike."""

import tarfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import (
    Connection,
    PrimaryKeyConstraint,
    Table,
    UniqueConstraint,
    column,
    inspect,
    select,
    table,
    text,
    update,
)

from swiftkv_platform.contract.attempts import new_file_id
from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.base import PageQuery
from swiftkv_platform.control_plane.database.session import Database, get_newest_revision, make_alembic_config
from swiftkv_platform.control_plane.database.tables import Base, DeploymentRow, JobReferenceRow, JobRow
from swiftkv_platform.control_plane.deployments.repository import Deployment, ResolvedDeployment
from swiftkv_platform.control_plane.jobs.job import JobStatus
from swiftkv_platform.control_plane.jobs.repository import JobRepository
from swiftkv_platform.control_plane.models.registry import RegistryService
from swiftkv_platform.control_plane.models.repository import ModelRepository
from swiftkv_platform.errors import InvalidInputError
from tests.support.old_home import ARCHIVES
from tests.support.postgres import emptied
from tests.support.records import TENANT, make_job, make_model, store

RELEASE = "0005"
"""Schema of the last release, 0.1.0."""
ADDED = {
    "0002": "leases",
    "0003": "deliveries",
    "0004": "promotions",
    "0005": "ix_jobs_tenant_status_id",
    "0006": "deployments.version promotions.version ix_promotions_tenant_alias_version",
    "0007": "sessions",
    "0008": "jobs.priority jobs.not_before jobs.gpus jobs.cpus jobs.watched_until leases.token ix_jobs_queue",
    "0009": "jobs.finished_at jobs.swept ix_jobs_finished_at deletions",
    "0010": "files",
    "0011": "key_uses audit",
    "0012": "ix_deliveries_event_id ix_deployments_model ix_idempotency_keys_job_id ix_promotions_model",
    "0013": "uses",
    "0014": "",
    "0015": "deployments.alias deployments.candidate deployments.replicas deployments.gpus deployments.cpus "
    "deliveries.tenant deletions.tenant deletions.size ix_deployments_tenant_alias ix_deployments_candidate "
    "ix_deployments_demand ix_models_tenant_job_id_size ix_models_tenant_name ix_files_tenant_size "
    "ix_deletions_tenant_size ix_deliveries_tenant_status ix_sessions_key_name_expires_at",
    "0016": "rollouts",
}
"""Tables, columns and indexes that each migration added before 0006 to 0015 became one."""

VERSION = table("alembic_version", column("version_num"))


def take_back(connection: Connection, revision: str) -> None:
    """Remove what the migrations after `revision` added."""
    for number, names in reversed(ADDED.items()):
        if number <= revision:
            break
        for name in reversed(names.split()):
            owner, _, part = name.partition(".")
            if part:
                statement = f"ALTER TABLE {owner} DROP COLUMN {part}"
            else:
                statement = f"DROP {'INDEX' if name.startswith('ix_') else 'TABLE'} {name}"
            connection.execute(text(statement))
    if revision < "0014" and connection.dialect.name == "postgresql":  # SQLite cannot change a column
        connection.execute(text("ALTER TABLE models ALTER job_id SET NOT NULL"))
    connection.execute(update(VERSION).values(version_num=revision))


def rows(database: Database, tables: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
    with database.begin_read() as session:
        return {
            name: sorted((dict(row) for row in session.execute(select(Base.metadata.tables[name])).mappings()), key=str)
            for name in tables
        }


def check_newest(database: Database) -> None:
    """Check that the schema is the one that the tables declare."""
    database.check_schema()
    with database.begin_read() as session:
        context = MigrationContext.configure(session.connection(), opts={"compare_type": True})
        assert compare_metadata(context, Base.metadata) == []


def fill(database: Database) -> None:
    """Store rows with each column that a migration fills. It leaves out ended jobs, and documents that it cannot
    read."""
    jobs, registry = JobRepository(database, TenantPolicies()), ModelRepository(database)
    models = []
    for _ in range(3):
        ended = store(jobs, make_job())
        models.append(make_model(ended))
        jobs.update(replace(ended, status=JobStatus.SUCCEEDED, finished_at=7), model=models[-1])
    damaged = store(jobs, make_job())
    with database.begin_write() as session:
        session.execute(update(JobRow).values(cpus=0.0))
        session.execute(update(JobRow).where(JobRow.id == damaged.id).values(spec=7))
    older = store(jobs, make_job())  # of a version with other fields
    with database.begin_write() as session:
        file_id = new_file_id()
        written = {"data": {"sources": [{"name_or_path": file_id, "unknown": [1, None]}]}}
        session.execute(update(JobRow).where(JobRow.id == older.id).values(spec=written))
        session.add(JobReferenceRow(used=file_id, job_id=older.id))
    resources = {"num_workers": {"min": 1, "max": 3}, "gpus_per_worker": 1, "cpus_per_worker": 3}
    sweep = {"learning_rate": [1e-4, 2e-4], "key_value_group_size": [1, 2], "max_concurrent": 3}
    store(jobs, make_job(resources=resources, sweep=sweep, evaluation={"max_kl": 1}, limits={"priority": "high"}))
    sources = [{"name_or_path": f"s3://b/jobs/{older.id}/rows"}]
    store(jobs, make_job(training={"from": models[0].id}, data={"sources": sources}, publish={"to": "hf://Acme/One"}))
    jobs.update(replace(store(jobs, make_job(limits={"priority": "low"})), not_before=50.0))

    engine = {"device": "cuda", "tensor_parallel_size": 2, "num_threads": 3}
    candidate = {"model": models[1].id, "artifact_uri": "s3://b/y"}
    options: dict[str, Any] = {"alias": "served", "max_replicas": 4, "engine": engine, "candidate": candidate}
    for name, fields in (("whole", options), ("damaged", {})):
        spec = ResolvedDeployment(
            id=f"dep_{name}", model=models[0].id, artifact_uri="s3://b/x", route_prefix=f"/{name}", **fields
        )
        registry.create_deployment(Deployment(spec, TENANT, 300))
    with database.begin_write() as session:
        row = update(DeploymentRow).where(DeploymentRow.id == "dep_damaged")
        session.execute(row.values(spec=[], replicas=0, cpus=0.0))
    service = RegistryService(registry, lambda: 1.0, TenantPolicies())
    for alias, at in (("a", 0), ("b", 1), ("a", 1), ("a", 2)):
        service.promote(models[at].id, alias, tenant=TENANT, by="ann", reason="better")


@pytest.mark.parametrize("revision", sorted(ADDED.keys() - {get_newest_revision()} | {"0001"}))
def test_a_database_at_any_former_revision_is_upgraded_with_its_rows(database: Database, revision: str) -> None:
    fill(database)
    kept = ["jobs", "models", "deployments", "uses", *(["promotions"] if revision >= "0004" else [])]
    before = rows(database, kept)
    with database.begin_write() as session:
        take_back(session.connection(), revision)
    database.upgrade()
    check_newest(database)
    assert rows(database, kept) == before


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


def test_migrations_are_taken_back_and_repeated(database: Database) -> None:
    fill(database)
    before = rows(database, ["jobs", "deployments", "promotions"])
    database.downgrade(RELEASE)
    with pytest.raises(
        InvalidInputError, match=rf"schema revision {RELEASE}.*python -m swiftkv_platform\.control_plane\.database"
    ):
        database.check_schema()
    with pytest.raises(InvalidInputError, match="revision is 'nine'"):
        database.downgrade("nine")
    database.upgrade()
    assert rows(database, before) == before
    database.downgrade("base")
    with database.begin_read() as session:
        assert inspect(session.connection()).get_table_names() == ["alembic_version"]
    database.upgrade()
    check_newest(database)


def test_two_who_migrate_at_once_take_turns(postgres_url: str) -> None:
    with closing(Database(emptied(postgres_url))) as first, closing(Database(postgres_url)) as second:
        first.downgrade("base")
        with ThreadPoolExecutor(1) as pool:
            with first._begin_migration() as session:
                command.upgrade(make_alembic_config(session.connection()), "head")
                other = pool.submit(second.upgrade)
                waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
                while not session.scalar(waiting) and not other.done():
                    pass
            other.result()
        second.check_schema()


def columns(database: Database) -> dict[str, dict[str, tuple[str, bool, bool]]]:
    """(type, whether it is nullable, whether an INSERT may leave it out) of the columns of each table."""
    with database.begin_read() as session:
        found = inspect(session.connection())
        return {
            table: {
                column["name"]: (str(column["type"]), column["nullable"], column["nullable"] or bool(column["default"]))
                for column in found.get_columns(table)
            }
            for table in found.get_table_names()
        }


def unique_indexes(database: Database, tables: Iterable[str]) -> set[str | None]:
    with database.begin_read() as session:
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


@pytest.mark.parametrize(("version", "revision"), [("0.1.0", RELEASE), ("d4594dd", "0011"), ("325f057f", "0014")])
def test_the_database_that_an_earlier_version_wrote_is_upgraded_and_read(
    tmp_path: Path, version: str, revision: str
) -> None:
    path = tmp_path / "swiftkv.db"
    with tarfile.open(ARCHIVES / f"home-{version}.tar.xz") as archive:
        [member] = [member for member in archive if member.name.endswith("/swiftkv.db")]
        file = archive.extractfile(member)
        assert file is not None
        path.write_bytes(file.read())
    with closing(Database(f"sqlite:///{path}")) as database:
        with pytest.raises(InvalidInputError, match=f"schema revision {revision}"):
            database.check_schema()
        database.upgrade()
        database.check_schema()
        found = JobRepository(database, TenantPolicies()).list(PageQuery(limit=9), tenant="default")
        assert {job.spec.name: job.status for job in found.items} == {
            "finished": JobStatus.SUCCEEDED,
            "paused": JobStatus.PAUSED,
        }
        assert found.unreadable_ids == []


@pytest.mark.parametrize(("revision", "is_usable"), [("0999", True), ("1001", False)])
def test_an_older_program_starts_on_a_later_schema_unless_that_is_in_the_next_thousand(
    database: Database, revision: str, is_usable: bool
) -> None:
    with database.begin_write() as session:
        session.execute(update(VERSION).values(version_num=revision))
    for step in (database.upgrade, database.check_schema):
        with nullcontext() if is_usable else pytest.raises(InvalidInputError, match="a newer version"):
            step()
    with database.begin_write() as session:
        assert session.scalar(select(VERSION.c.version_num)) == revision
        session.execute(update(VERSION).values(version_num=get_newest_revision()))
