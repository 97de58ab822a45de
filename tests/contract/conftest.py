"""S3 servers for a whole test session; a store and an empty database of each kind for each test."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest

from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.deployments.repository import DeploymentRepository
from swiftkv_platform.control_plane.jobs.job import JobStatus
from swiftkv_platform.control_plane.jobs.repository import JobRepository
from swiftkv_platform.control_plane.models.repository import Model, ModelRepository
from swiftkv_platform.storage.object_store import ObjectStore, open_store
from tests.support.fakes.object_store import InMemoryObjectStore
from tests.support.records import make_job, make_model
from tests.support.records import store as store_job
from tests.support.s3_servers import OTHERS, S3, RcloneServer, S3Server, run_moto, run_rclone, run_seaweedfs, use


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RcloneServer]:
    with run_rclone(tmp_path_factory.mktemp("rclone")) as rclone:
        yield rclone


@pytest.fixture(scope="session")
def seaweedfs_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with run_seaweedfs(tmp_path_factory.mktemp("seaweedfs")) as server:
        yield server


@pytest.fixture(scope="session")
def moto_server() -> Iterator[S3Server]:
    with run_moto() as server:
        yield server


@pytest.fixture(params=["local", "memory", *S3, *OTHERS])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    if request.param == "local":
        return open_store(str(tmp_path / "store"))
    if request.param == "memory":
        return InMemoryObjectStore()
    if request.param in OTHERS:
        return open_store(f"{request.param}/{uuid4().hex}")
    return open_store(use(_server(request, request.param), monkeypatch))


@pytest.fixture(params=S3)
def s3_store(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    return open_store(use(_server(request, request.param), monkeypatch))


def _server(request: pytest.FixtureRequest, name: str) -> S3Server:
    if name == "rclone":
        rclone: RcloneServer = request.getfixturevalue("rclone_server")
        return rclone.server
    server: S3Server = request.getfixturevalue(f"{name}_server")
    return server


@pytest.fixture
def jobs(database: Database) -> JobRepository:
    return JobRepository(database, TenantPolicies())


@pytest.fixture
def catalog(database: Database) -> DeploymentRepository:
    return DeploymentRepository(database)


@pytest.fixture
def registry(database: Database) -> ModelRepository:
    return ModelRepository(database)


@pytest.fixture
def models(jobs: JobRepository) -> list[Model]:
    made = []
    for _ in range(3):
        job = store_job(jobs, make_job())
        made.append(replace(make_model(job), size=1 << 20))
        jobs.update(replace(job, status=JobStatus.SUCCEEDED), model=made[-1])
    return made
