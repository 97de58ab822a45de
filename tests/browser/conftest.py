"""Fixtures of the browser tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.scenes import busy_replica, control_plane
from tests.support.browsers import browser, page
from tests.unit.control_plane.routes.conftest import Server

__all__ = ["browser", "page", "server"]


@pytest.fixture
def server(tmp_path: Path, empty_database: Path) -> Iterator[Server]:
    with control_plane(tmp_path, empty_database, replicas=busy_replica()) as plane:
        yield plane
