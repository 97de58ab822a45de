"""The head of a serving cluster is killed under load, with Redis behind it: its workers continue to answer, and a new
head knows everything that the old one did."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

import httpx
import pytest

from swiftkv_platform.control_plane.deployments.ray_serve import RayServe
from swiftkv_platform.errors import ClusterUnavailableError
from swiftkv_platform.local.ray_head import make_auth_environment
from swiftkv_platform.specs.deployment import ResolvedDeployment
from tests.integration.conftest import environment, wait_for
from tests.integration.load import (
    PROMPTS,
    Expected,
    Load,
    ask,
    greedy_answers,
    publish,
    replica_pids,
    wait_until_running,
)
from tests.support.rays import HeadProcess, NodeProcess, free_port, ray_node
from tests.support.redis_server import redis_server
from tests.unit.engine.tiny_models import save_swiftkv

pytestmark = [pytest.mark.integration, pytest.mark.soak("kills and restarts a head under load")]

RECONNECT = {"RAY_gcs_rpc_server_reconnect_timeout_s": "600"}
"""Time that workers wait for a new head, as KubeRay sets it with `gcsFaultToleranceOptions`."""

CONTEXT = 256
ENGINE = {"max_num_seqs": 16, "max_num_waiting": 64, "num_threads": 1, "kv_cache_bytes": 4 << 20}


@pytest.fixture(scope="module")
def serve_port() -> int:
    """Port of this module's Serve."""
    return free_port()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeadProcess]:
    """A head without CPUs, as in the manifests: replicas run on workers only."""
    with redis_server(tmp_path_factory.mktemp("redis")) as redis:
        process = HeadProcess({"RAY_REDIS_ADDRESS": redis}, num_cpus=0)
        try:
            process.start()
            with environment(make_auth_environment(process.head.token_file)):
                yield process
        finally:
            process.remove()


@pytest.fixture(scope="module")
def workers(head: HeadProcess) -> Iterator[list[NodeProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(ray_node(head.head, num_cpus=2, environment=RECONNECT)) for _ in range(2)]


@pytest.fixture(scope="module")
def cluster(head: HeadProcess, workers: list[NodeProcess], serve_port: int) -> Iterator[RayServe]:
    with closing(RayServe(head.head.dashboard_url, f"http://127.0.0.1:{serve_port}")) as cluster:
        wait_for(lambda: cluster.list_states() == {})
        yield cluster


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("artifact")
    return publish(save_swiftkv(directory / "model", CONTEXT), directory / "store")


@pytest.fixture(scope="module")
def expected(artifact: Path) -> Expected:
    return {"one": greedy_answers(artifact)}


def deployment(name: str, artifact: Path, replicas: int) -> ResolvedDeployment:
    return ResolvedDeployment(
        id=f"dep_{name}",
        model="one",
        artifact_uri=str(artifact),
        route_prefix=f"/{name}",
        min_replicas=replicas,
        max_replicas=replicas,
        engine=ENGINE,
    )


def connected_to(nodes: Sequence[NodeProcess], url: str) -> httpx.Client:
    """Return a client whose only connection goes to a proxy on these nodes; on one machine all proxies share a port."""

    def connect() -> httpx.Client | None:
        limits = httpx.Limits(max_connections=1, keepalive_expiry=None)
        client = httpx.Client(base_url=url, timeout=60.0, trust_env=False, limits=limits)
        answer = client.get("/health")
        address = answer.extensions["network_stream"].get_extra_info("client_addr")
        if answer.is_success and any(node.has_accepted(address) for node in nodes):
            return client
        client.close()
        return None

    client: httpx.Client = wait_for(connect)
    return client


def test_workers_answer_on_without_a_head_and_a_new_one_knows_all_deployments(
    head: HeadProcess,
    workers: list[NodeProcess],
    cluster: RayServe,
    serve_port: int,
    artifact: Path,
    expected: Expected,
) -> None:
    url, dashboard_url = f"http://127.0.0.1:{serve_port}", head.head.dashboard_url
    before, after = deployment("before", artifact, 2), deployment("after", artifact, 1)
    cluster.apply([before])
    wait_until_running(cluster, before)
    replicas = replica_pids(dashboard_url, before.id)
    # Few clients, with pauses: Ray gives the head's own processes 15 s to start, on the cores that the clients use too.
    connect = partial(connected_to, workers)
    with Load(f"{url}/before", expected, num_clients=2, connect=connect, pause_s=0.1) as load:

        def wait_for_answers() -> None:
            have = len(load.answers)
            wait_for(lambda: len(load.answers) > have + 10 * load.num_clients)

        wait_for_answers()
        head.kill()
        with pytest.raises(ClusterUnavailableError):
            cluster.list_states()
        wait_for_answers()
        head.start()
        wait_until_running(cluster, before)
        wait_for_answers()
    assert (load.failed, load.wrong) == ([], [])
    assert replica_pids(dashboard_url, before.id) == replicas, "the replicas were restarted"

    cluster.apply([before, after])  # the new head tells the existing proxies about it
    wait_until_running(cluster, after)
    with closing(connected_to(workers, f"{url}/after")) as client:
        assert ask(client, PROMPTS[0], stream=False) == ({"one"}, expected["one"][0])
