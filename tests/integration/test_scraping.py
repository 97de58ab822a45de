"""Metrics of every replica reach a real Prometheus, which discovers Ray's nodes rather than replicas."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import httpx
import pytest

from swiftkv_platform.control_plane.deployments.ray_serve import RayServe
from swiftkv_platform.local.ray_head import RayHead, make_auth_environment
from swiftkv_platform.specs.deployment import ResolvedDeployment
from tests.integration.conftest import environment, wait_for
from tests.integration.load import publish, wait_until_running
from tests.support.prometheus import Prometheus, program, prometheus
from tests.support.rays import free_port, ray_head
from tests.unit.engine.tiny_models import save_swiftkv

pytestmark = [pytest.mark.integration, pytest.mark.soak("starts Prometheus beside a Ray of its own")]

NUM_TOKENS = 5


@pytest.fixture(scope="module")
def serve_port() -> int:
    """Port of this module's Serve."""
    return free_port()


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    program("prometheus")  # skip before anything starts
    with ray_head(num_cpus=4) as head, environment(make_auth_environment(head.token_file)):
        yield head


@pytest.fixture(scope="module")
def url(head: RayHead, serve_port: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a deployment with two replicas."""
    directory = tmp_path_factory.mktemp("artifact")
    artifact = publish(save_swiftkv(directory / "model"), directory / "store")
    spec = ResolvedDeployment(
        id="dep_two",
        model="mdl_two",
        artifact_uri=str(artifact),
        route_prefix="/two",
        min_replicas=2,
        max_replicas=2,
    )
    with closing(RayServe(head.dashboard_url, f"http://127.0.0.1:{serve_port}")) as cluster:
        wait_for(lambda: cluster.list_states() == {})
        cluster.apply([spec])
        wait_until_running(cluster, spec)
        yield f"http://127.0.0.1:{serve_port}/two"


@pytest.fixture(scope="module")
def server(head: RayHead, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """A Prometheus that scrapes the nodes from Ray's service discovery."""
    files = [str(head.temp_dir / "prom_metrics_service_discovery.json")]
    discovery = {"files": files, "refresh_interval": "1s"}
    with prometheus(
        tmp_path_factory.mktemp("prometheus"), [{"job_name": "ray", "file_sd_configs": [discovery]}]
    ) as server:
        yield server


def test_all_replicas_are_scraped_and_told_apart(url: str, server: Prometheus) -> None:
    answered: Counter[str] = Counter()
    for number in range(200):
        body = {"prompt": [1 + number % 50, 2, 3], "max_tokens": NUM_TOKENS, "ignore_eos": True}
        answer = httpx.post(f"{url}/generate", json=body, timeout=60.0, trust_env=False)
        assert answer.status_code == 200, answer.text
        answered[answer.headers["x-replica"]] += 1
        if len(answered) == 2 and number > 20:
            break
    assert len(answered) == 2, "both replicas have answered"

    def of_replicas(name: str) -> dict[str, float]:
        return {labels["replica"]: value for labels, value in server.query(name)}

    tokens = {replica: NUM_TOKENS * count for replica, count in answered.items()}
    wait_for(lambda: of_replicas("ray_swiftkv_generation_tokens_total") == tokens)
    for labels, _ in server.query("ray_swiftkv_generation_tokens_total"):
        assert (labels["deployment"], labels["model"]) == ("dep_two", "mdl_two")
    wait_for(lambda: of_replicas("ray_swiftkv_time_to_first_token_seconds_count") == dict(answered))
    wait_for(lambda: of_replicas("ray_swiftkv_kv_cache_usage_perc").keys() == answered.keys())
    assert sum(of_replicas("ray_swiftkv_requests_total").values()) == sum(answered.values())
