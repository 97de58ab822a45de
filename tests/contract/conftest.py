"""S3 servers that live for a whole test session, and an empty database of each kind for a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from swiftkv_platform.database.catalog import SqlCatalog
from swiftkv_platform.database.repository import SqlJobRepository
from swiftkv_platform.database.session import Database
from tests.s3_servers import RcloneServer, S3Server, run_moto, run_rclone, run_seaweedfs


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


@pytest.fixture
def jobs(database: Database) -> SqlJobRepository:
    return SqlJobRepository(database)


@pytest.fixture
def catalog(database: Database) -> SqlCatalog:
    return SqlCatalog(database)
