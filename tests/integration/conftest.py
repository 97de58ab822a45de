"""The Ray cluster that the integration tests share, and waiting for it."""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.errors import ClusterUnavailableError
from swiftkv_platform.local.ray_head import RayHead, make_auth_environment
from tests.integration.planes import RayCluster
from tests.support.rays import free_port, ray_head
from tests.support.s3_servers import S3Server, run_moto

DEADLINE_S = 240.0

_SERVE = {
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    "RAY_SERVE_HANDLE_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
}
"""Serve reports load to its autoscaler often enough for a test to wait for it."""


def wait_for(what: Callable[[], Any]) -> Any:
    """Return the first true value of `what()`; a cluster that cannot be reached yet counts as false."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            value = what()
        except ClusterUnavailableError:
            value = None
        if value:
            return value
        assert time.monotonic() < deadline, "gave up waiting"
        time.sleep(0.2)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    with run_moto() as server:
        yield server


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 short, distinct texts."""
    path = tmp_path_factory.mktemp("corpus") / "functions.jsonl"
    rows = ({"text": f"def add_{i}(x):\n    return x + {i}\n"} for i in range(300))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def variables(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables of the shared Ray and its drivers: separate homes, and credentials for the S3 server."""
    return {
        **s3_server.environment,
        "HOME": str(tmp_path_factory.mktemp("home")),
        "SWIFTKV_HOME": str(tmp_path_factory.mktemp("swiftkv")),
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    }


@pytest.fixture(scope="session")
def head(variables: dict[str, str]) -> Iterator[RayHead]:
    """The shared Ray head, with room for two workers and two replicas; this process has its token."""
    with ray_head({**_SERVE, **variables}, num_cpus=4) as head, environment(make_auth_environment(head.token_file)):
        yield head


@pytest.fixture(scope="session")
def dashboard_url(head: RayHead) -> str:
    return head.dashboard_url


@pytest.fixture(scope="session")
def ray_cluster(head: RayHead) -> RayCluster:
    """The shared Ray, as control planes are told of it."""
    return RayCluster.of(head)


@pytest.fixture(scope="module")
def cluster(head: RayHead, variables: dict[str, str]) -> Iterator[str]:
    """Address of the shared Ray; this process is one of its drivers."""
    import ray

    with environment(variables):
        ray.init(head.address)
        yield head.address
        ray.shutdown()


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process for the duration of the block."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def serve_port() -> int:
    """Port of the shared Ray Serve."""
    return free_port()
