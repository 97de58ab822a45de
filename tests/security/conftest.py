"""Control plane that many threads may change at once, on each kind of database."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftkv_platform.database.session import Database
from tests.security.deployment_planes import DeploymentPlane, deployment_plane


@pytest.fixture
def plane(tmp_path: Path, database: Database) -> Iterator[DeploymentPlane]:
    with deployment_plane(tmp_path, database) as plane:
        yield plane
