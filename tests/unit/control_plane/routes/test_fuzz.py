"""Requests that the control plane's OpenAPI document allows, and others, are never answered with a 5xx."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings

from swiftkv_platform.settings import Settings
from tests.unit.control_plane.routes.conftest import Server, control_plane, make_parts, served_control_plane

EXAMPLES = 200 if "SWIFTKV_SOAK" in os.environ else 3
"""Examples of each route."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[str]:
    """A control plane with an object of every kind, whose clusters do nothing by themselves."""
    directory = tmp_path_factory.mktemp("fuzz")
    parts = make_parts(directory, empty_database)
    closed = Settings(home=directory, source_roots=(), _env_file=None)
    with control_plane(parts, closed) as client:
        server = Server(client, parts, closed)
        model = server.succeed()["distilled_model"]
        server.client.post(f"/models/{model}/promote", json={"alias": "production", "reason": "good"})
        server.client.post("/deployments", json={"model": "production"})
        with served_control_plane(parts, closed) as url:
            yield url


@pytest.mark.slow("its library takes seconds to import")
def test_nothing_is_answered_with_a_5xx(url: str) -> None:
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    asked: set[str] = set()
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
            derandomize="SWIFTKV_SOAK" not in os.environ,
        )
        @given(case=operation.as_strategy())
        def ask(case: schemathesis.Case) -> None:
            response = case.call(base_url=url)
            assert response.status_code < 500, (case.method, case.path, response.text)
            asked.add(case.operation.label)

        ask()
    assert {"POST /jobs", "GET /jobs/{job_id}/events", "POST /deployments", "GET /aliases"} <= asked
