"""Ray Serve with vLLM in the replicas: the load tests of the native engine, with compiled models."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import psutil
import pytest

import tests.integration.conftest
from swiftkv_platform.control_plane.deployments.ray_serve import RayServe
from swiftkv_platform.specs.deployment import ResolvedDeployment
from tests.integration.conftest import dashboard_url, head, serve_port, wait_for
from tests.integration.load import PROMPTS, Expected, ask
from tests.integration.test_live_serving import (
    ENGINE,
    artifacts,
    cluster,
    expected,
    replica_pids,
    serve,
    test_a_killed_replica_fails_only_what_it_had_and_comes_back_and_a_drained_one_fails_nothing,
    test_a_load_step_brings_a_second_replica_and_its_end_takes_it_away,
    url,
)

__all__ = [
    "artifacts",
    "cluster",
    "dashboard_url",
    "expected",
    "head",
    "serve_port",
    "test_a_killed_replica_fails_only_what_it_had_and_comes_back_and_a_drained_one_fails_nothing",
    "test_a_load_step_brings_a_second_replica_and_its_end_takes_it_away",
    "url",
]

tests.integration.conftest.DEADLINE_S = 900.0
"""vLLM compiles the model for each new replica, on cores that are busy with answers."""

pytestmark = [pytest.mark.integration, pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def spec(artifacts: Path) -> ResolvedDeployment:
    engine = {**ENGINE, "backend": "vllm", "kv_cache_bytes": 16 << 20}
    return ResolvedDeployment(
        id="dep_live", model="one", artifact_uri=str(artifacts / "one"), route_prefix="/live", engine=engine
    )


def test_no_process_of_vllms_outlives_its_replica(
    cluster: RayServe, spec: ResolvedDeployment, dashboard_url: str, url: str, expected: Expected
) -> None:
    serve(cluster, spec)
    [replica] = replica_pids(dashboard_url, spec.id)

    def of_vllm() -> list[psutil.Process]:
        """Return vLLM's processes; they set their names some time after they start."""
        return [each for each in psutil.Process(replica).children(recursive=True) if "VLLM" in "".join(each.cmdline())]

    wait_for(lambda: bool(of_vllm()))
    children = of_vllm()
    os.kill(replica, signal.SIGKILL)
    _, alive = psutil.wait_procs(children)
    assert not alive
    wait_for(lambda: replica_pids(dashboard_url, spec.id) not in ([], [replica]))
    with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client:
        assert ask(client, PROMPTS[0], stream=False) == ({"one"}, expected["one"][0])
