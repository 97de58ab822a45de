"""Backup and restore, from each kind of database into the other: everything is restored, or nothing is."""

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.base import PageQuery
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.database.tables import SessionRow
from swiftkv_platform.control_plane.deployments.repository import Deployment
from swiftkv_platform.control_plane.jobs.job import JobStatus, MetricPoint
from swiftkv_platform.control_plane.jobs.repository import IdempotencyKey, JobRepository
from swiftkv_platform.control_plane.models.registry import RegistryService
from swiftkv_platform.control_plane.models.repository import ModelRepository
from swiftkv_platform.control_plane.retention import RetentionRepository
from swiftkv_platform.errors import ArtifactCorruptError, ConflictError, InvalidInputError, ObjectNotFoundError
from swiftkv_platform.local.backup import back_up, restore
from swiftkv_platform.specs.deployment import ResolvedDeployment
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import LocalObjectStore
from tests.support.fakes.attempt_store import FakeWorker
from tests.support.fakes.object_store import InMemoryObjectStore
from tests.support.postgres import emptied
from tests.support.records import TENANT, make_job, make_model, message, store


@pytest.fixture
def objects(tmp_path: Path) -> LocalObjectStore:
    return LocalObjectStore(tmp_path / "store")


@pytest.fixture
def fresh(tmp_path: Path, empty_database: Path) -> Database:
    """An empty database to restore into."""
    return Database(f"sqlite:///{shutil.copy(empty_database, tmp_path / 'fresh.db')}")


def fill(database: Database, objects: LocalObjectStore) -> tuple[str, str]:
    """Store a job whose model is deployed and promoted; return the ids of job and deployment."""
    jobs, registry = JobRepository(database, TenantPolicies()), ModelRepository(database)
    job = store(jobs, make_job(metadata={"team": "blau-grün"}), key="once")
    worker = FakeWorker(objects, job.id)
    worker.artifact()
    worker.checkpoint(3)
    worker.say("message", "hello")
    uri = AttemptStore(objects).get_artifact_uri(job.attempt_id)
    model = replace(make_model(job), artifact_uri=uri)
    ended = replace(job, status=JobStatus.SUCCEEDED, finished_at=200, distilled_model=model.id, artifact_uri=uri)
    points = [MetricPoint(step, 1, 1.5, {"loss": 0.1, "count": 3}) for step in range(700)]
    jobs.update(ended, events=[message(job, f"line\n{number}") for number in range(3)], points=points, model=model)
    RegistryService(registry, lambda: 300.0, TenantPolicies()).promote(
        model.id, "production", tenant=TENANT, by="ann", reason="good"
    )
    spec = ResolvedDeployment(id="dep_1", model=model.id, artifact_uri=uri)
    registry.create_deployment(Deployment(spec, TENANT, 300))
    row = {"id_sha256": "a" * 64, "key_name": "ann", "sealed_key": "sealed"}
    with database.begin_write() as session:
        session.add(SessionRow(**row, created_at=1.0, expires_at=50.0))
    return job.id, spec.id


def test_everything_comes_back_in_a_database_of_the_other_kind(
    database: Database, fresh: Database, objects: LocalObjectStore, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    job_id, deployment_id = fill(database, objects)
    made = back_up(database, objects, tmp_path / "backup")
    assert made.has_objects
    if database.is_sqlite:
        fresh = Database(emptied(request.getfixturevalue("postgres_url")))
    elsewhere = LocalObjectStore(tmp_path / "elsewhere")
    with closing(fresh):
        restore(fresh, elsewhere, tmp_path / "backup")
        before, after = JobRepository(database, TenantPolicies()), JobRepository(fresh, TenantPolicies())
        page = PageQuery(limit=1000, order="asc")
        assert after.list_events(job_id, page) == before.list_events(job_id, page)
        assert after.list_points(job_id, page) == before.list_points(job_id, page)
        restored, job = after.get(job_id, tenant=TENANT), before.get(job_id, tenant=TENANT)
        assert replace(restored, artifact_uri=None) == replace(job, artifact_uri=None)
        deployment = ModelRepository(fresh).get_deployment(deployment_id, tenant=TENANT)
        uri = f"{elsewhere.uri}/{job.attempt_id.artifact_prefix}"
        assert restored.artifact_uri == deployment.spec.artifact_uri == uri
        assert ModelRepository(fresh).list_promotions(tenant=TENANT) == ModelRepository(database).list_promotions(
            tenant=TENANT
        )
        counts = {**RetentionRepository(database).count_rows(), "sessions": 0}
        assert RetentionRepository(fresh).count_rows() == counts
        assert after.find_by_idempotency_key(TENANT, IdempotencyKey("once", "a")) == restored
        assert list(elsewhere.list("")) == list(objects.list(""))
        again = after.update(restored, events=[message(job, "numbers go on after the greatest")])
        assert after.list_events(job_id, page).items[-1].message == "numbers go on after the greatest"
        assert again.version == restored.version + 1


def test_nothing_is_restored_over_what_is_there_or_into_another_schema(
    sqlite_database: Database, objects: LocalObjectStore, tmp_path: Path
) -> None:
    fill(sqlite_database, objects)
    back_up(sqlite_database, objects, tmp_path / "backup")
    with pytest.raises(ConflictError, match="not empty"):
        back_up(sqlite_database, objects, tmp_path / "backup")
    elsewhere = LocalObjectStore(tmp_path / "elsewhere")
    with pytest.raises(ConflictError, match="1 rows in jobs"):
        restore(sqlite_database, elsewhere, tmp_path / "backup")
    assert list(elsewhere.list("")) == []
    with (
        closing(Database(f"sqlite:///{tmp_path / 'none.db'}")) as none,
        pytest.raises(InvalidInputError, match="the database has none"),
    ):
        restore(none, objects, tmp_path / "backup")


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("tables/jobs.jsonl", "changed"),
        ("objects.jsonl", "missing"),
        ("backup.json", "changed"),
        ("objects", "changed"),
        ("objects", "missing"),
    ],
)
def test_a_damaged_backup_writes_no_row(
    sqlite_database: Database, fresh: Database, objects: LocalObjectStore, tmp_path: Path, file: str, damage: str
) -> None:
    fill(sqlite_database, objects)
    directory = tmp_path / "backup"
    back_up(sqlite_database, objects, directory)
    path = directory / file
    if path.is_dir():
        path = next(path.rglob("data.bin"))
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-4])
    with closing(fresh):
        with pytest.raises((ArtifactCorruptError, InvalidInputError)):
            restore(fresh, LocalObjectStore(tmp_path / "elsewhere"), directory)
        assert set(RetentionRepository(fresh).count_rows().values()) == {0}


def test_objects_that_are_only_listed_must_be_there(
    sqlite_database: Database, fresh: Database, objects: LocalObjectStore, tmp_path: Path
) -> None:
    fill(sqlite_database, objects)
    made = back_up(sqlite_database, objects, tmp_path / "backup", objects=False)
    assert not made.has_objects
    assert not (tmp_path / "backup" / "objects").exists()
    with closing(fresh):
        with pytest.raises(ArtifactCorruptError, match="--allow-missing"):
            restore(fresh, LocalObjectStore(tmp_path / "elsewhere"), tmp_path / "backup")
        restore(fresh, objects, tmp_path / "backup")
        assert RetentionRepository(fresh).count_rows()["jobs"] == 1


def test_an_interrupted_restore_is_repeated(
    sqlite_database: Database, fresh: Database, objects: LocalObjectStore, tmp_path: Path
) -> None:
    fill(sqlite_database, objects)
    back_up(sqlite_database, objects, tmp_path / "backup")
    elsewhere = LocalObjectStore(tmp_path / "elsewhere")
    done = next(objects.list(""))
    elsewhere.put_bytes(done.key, b"x" * done.size)  # a partial restore, with an object that differs from the backup's
    with closing(fresh):
        restore(fresh, elsewhere, tmp_path / "backup")
    assert elsewhere.get_bytes(done.key) == objects.get_bytes(done.key)


class Vanishing(InMemoryObjectStore):
    """A store in which the object `b` is deleted between the listing and the copy."""

    def download_file(self, key: str, path: Path) -> None:
        if key == "b":
            raise ObjectNotFoundError("gone")
        super().download_file(key, path)


def test_an_object_that_goes_meanwhile_is_in_no_list(sqlite_database: Database, tmp_path: Path) -> None:
    vanishing = Vanishing()
    for key in ("a", "b", "c"):
        vanishing.put_bytes(key, b"x")
    made = back_up(sqlite_database, vanishing, tmp_path / "backup")
    assert (made.objects.lines, made.object_bytes) == (2, 2)
