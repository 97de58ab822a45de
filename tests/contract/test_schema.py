"""The schema of SQLite and PostgreSQL alike: made and taken back by migrations."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext
from sqlalchemy import inspect, text

from swiftkv_platform.database.catalog import SqlRegistry
from swiftkv_platform.database.repository import SqlJobRepository
from swiftkv_platform.database.session import Database, alembic_config
from swiftkv_platform.database.tables import Base
from swiftkv_platform.errors import DatabaseUnavailableError, InvalidInputError
from swiftkv_platform.orchestration.registry import RegistryService
from tests.records import TENANT, make_job, make_model, store


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


def test_aliases_from_before_versions_are_numbered(database: Database, jobs: SqlJobRepository) -> None:
    models = []
    for _ in range(3):
        job = store(jobs, make_job())
        models.append(make_model(job).id)
        jobs.update(job, model=replace(make_model(job), id=models[-1]))
    registry = SqlRegistry(database)
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


def test_the_queue_of_before_its_columns_is_decided_as_before(database: Database, jobs: SqlJobRepository) -> None:
    resources = {"num_workers": 2, "gpus_per_worker": 1, "cpus_per_worker": 3}
    late, urgent = (store(jobs, make_job(limits={"priority": name}, resources=resources)) for name in ("low", "high"))
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
    with pytest.raises(InvalidInputError, match=r"python -m swiftkv_platform\.database"):
        database.check_schema()


def test_a_database_that_is_away_is_said_to_be(tmp_path: Path) -> None:
    database = Database(f"sqlite:///{tmp_path}")  # a directory
    with pytest.raises(DatabaseUnavailableError):
        SqlJobRepository(database).on_cluster()
    with pytest.raises(InvalidInputError, match="postgresql"):
        Database("nonsense")
