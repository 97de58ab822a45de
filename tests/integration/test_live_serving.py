"""A deployment under load on Ray Serve is swapped, killed, drained and scaled; every answer comes from one version."""

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from swiftkv_platform.control_plane.deployments.ray_serve import RayServe
from swiftkv_platform.control_plane.deployments.repository import DeploymentState, DeploymentStatus
from swiftkv_platform.model import convert
from swiftkv_platform.specs.deployment import ResolvedDeployment
from tests.integration.conftest import wait_for
from tests.integration.load import (
    PROMPTS,
    Expected,
    Load,
    ask,
    greedy_answers,
    health,
    metrics,
    publish,
    replica_pids,
)
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.unit.engine.tiny_models import make_model, save_swiftkv

pytestmark = pytest.mark.integration("swaps under load")

NUM_SWAPS = 20 if "SWIFTKV_SOAK" in os.environ else 2
CONTEXT = 2048
ENGINE = {"max_num_seqs": 16, "max_num_waiting": 64, "num_threads": 1, "kv_cache_bytes": 4 << 20}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two students of one teacher with different answers, and one with a flipped byte."""
    directory = tmp_path_factory.mktemp("artifacts")
    save_swiftkv(directory / "one", CONTEXT)
    other = convert(make_model(CONTEXT), num_key_value_layers=3, key_value_group_size=1)
    other.save_pretrained(directory / "two")
    byte_tokenizer().save_pretrained(directory / "two")
    for name in ("one", "two"):
        publish(directory / name, directory / "store", name)
    publish(directory / "two", directory / "store", "corrupt", damaged=True)
    return directory / "store"


@pytest.fixture(scope="module")
def expected(artifacts: Path) -> Expected:
    answers = {name: greedy_answers(artifacts / name) for name in ("one", "two")}
    assert all(one != two for one, two in zip(*answers.values(), strict=True)), "the two versions answer alike"
    return answers


@pytest.fixture(scope="module")
def spec(artifacts: Path) -> ResolvedDeployment:
    return ResolvedDeployment(
        id="dep_live", model="one", artifact_uri=str(artifacts / "one"), route_prefix="/live", engine=ENGINE
    )


@pytest.fixture(scope="module")
def cluster(dashboard_url: str, serve_port: int) -> Iterator[RayServe]:
    with closing(RayServe(dashboard_url, f"http://127.0.0.1:{serve_port}")) as cluster:
        wait_for(lambda: cluster.list_states() == {})
        yield cluster
        cluster.apply([])


@pytest.fixture(scope="module")
def url(serve_port: int) -> str:
    return f"http://127.0.0.1:{serve_port}/live"


def changed(spec: ResolvedDeployment, **fields: Any) -> ResolvedDeployment:
    return ResolvedDeployment.model_validate({**spec.model_dump(), **fields})


def serve(cluster: RayServe, spec: ResolvedDeployment, *, replicas: int = 1) -> DeploymentState:
    """Apply the deployment, and wait until `replicas` replicas serve it or it is refused."""
    cluster.apply([spec])

    def settled() -> DeploymentState | None:
        state = cluster.list_states().get(spec.id)
        there = state is not None and state.replicas == replicas
        assert state is None or state.status is not DeploymentStatus.FAILED, state.message
        return state if there and state.status in (DeploymentStatus.RUNNING, DeploymentStatus.REFUSED) else None

    state: DeploymentState = wait_for(settled)
    return state


def as_version(spec: ResolvedDeployment, name: str, artifacts: Path) -> ResolvedDeployment:
    return changed(spec, model=name, artifact_uri=str(artifacts / name))


def test_swaps_under_load_fail_no_request_and_mix_no_versions(
    cluster: RayServe, spec: ResolvedDeployment, artifacts: Path, url: str, expected: Expected
) -> None:
    serve(cluster, spec)
    replica = health(url)["replica"]
    with Load(url, expected) as load:
        wait_for(lambda: len(load.answers) > 50 * load.num_clients)
        for number in range(NUM_SWAPS):
            name = ("two", "one")[number % 2]
            assert serve(cluster, as_version(spec, name, artifacts)).status is DeploymentStatus.RUNNING
            assert health(url)["model"] == name
            before = len(load.answers)
            wait_for(lambda before=before: len(load.answers) > before + 2 * load.num_clients)
    assert (load.failed, load.wrong) == ([], [])
    assert set(load.answers) == {"one", "two"}
    assert health(url)["replica"] == replica, "the replica process was replaced"
    assert metrics(url)['swiftkv:swaps_total{outcome="succeeded"}'] == NUM_SWAPS


def test_a_corrupt_version_is_refused_and_the_old_one_serves_on(
    cluster: RayServe, spec: ResolvedDeployment, artifacts: Path, url: str, expected: Expected
) -> None:
    serve(cluster, spec)
    with Load(url, expected) as load:
        state = serve(cluster, as_version(spec, "corrupt", artifacts))
        assert state.status is DeploymentStatus.REFUSED
        assert "ArtifactCorruptError: 'model.safetensors'" in state.message
        assert (health(url)["model"], health(url)["swap"]["status"]) == ("one", "refused")
    assert (load.failed, load.wrong, set(load.answers)) == ([], [], {"one"})
    assert metrics(url)['swiftkv:swaps_total{outcome="refused"}'] == 1
    assert serve(cluster, as_version(spec, "two", artifacts)).status is DeploymentStatus.RUNNING


@pytest.mark.soak("Serve scales, or a crowd asks: a minute")
def test_a_prompt_goes_to_the_replica_that_has_its_prefix_unless_it_is_too_busy(
    cluster: RayServe, spec: ResolvedDeployment, dashboard_url: str, url: str
) -> None:
    serve(cluster, changed(spec, min_replicas=2, max_replicas=2), replicas=2)
    wait_for(lambda: len(replica_pids(dashboard_url, spec.id)) == 2)
    with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client:

        def answerer(prompt: list[int], max_tokens: int = 1) -> tuple[str, int]:
            """Return the replica that answers, and the number of prompt tokens found in its prefix cache."""
            answer = client.post("/generate", json={"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True})
            answer.raise_for_status()
            return answer.headers["x-replica"], answer.json()["usage"]["cached_tokens"]

        wait_for(lambda: len({answerer([1])[0] for _ in range(8)}) == 2)
        prefixes = [[family] * 600 for family in range(2, 10)]
        first = [answerer([*prefix, 1]) for prefix in prefixes]
        again = [answerer([*prefix, other]) for other in (20, 21, 22) for prefix in prefixes]
        assert {cached for _, cached in first} == {0}
        assert [replica for replica, _ in again] == [replica for replica, _ in first] * 3
        assert min(cached for _, cached in again) >= 592, "all full blocks of the 600-token prefix are cached"
        with ThreadPoolExecutor(16) as pool:
            skewed = list(pool.map(lambda other: answerer([*prefixes[0], other], 200)[0], range(30, 62)))
    assert len(set(skewed)) == 2
    assert min(map(skewed.count, set(skewed))) >= len(skewed) // 8, "the other replica takes some of the load"


@pytest.mark.soak("Serve scales, or a crowd asks: a minute")
def test_a_killed_replica_fails_only_what_it_had_and_comes_back_and_a_drained_one_fails_nothing(
    cluster: RayServe, spec: ResolvedDeployment, dashboard_url: str, url: str, expected: Expected
) -> None:
    two = changed(spec, min_replicas=2, max_replicas=2)
    serve(cluster, two, replicas=2)
    with Load(url, expected) as load:
        victim = replica_pids(dashboard_url, spec.id)[0]
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: len(alive := replica_pids(dashboard_url, spec.id)) == 2 and victim not in alive)
    assert load.wrong == []
    assert len(load.failed) <= load.num_clients, load.failed
    with Load(url, expected) as load:
        serve(cluster, spec)
        wait_for(lambda: len(replica_pids(dashboard_url, spec.id)) == 1)
    assert (load.failed, load.wrong) == ([], [])


@pytest.mark.soak("Serve scales, or a crowd asks: a minute")
def test_a_load_step_brings_a_second_replica_and_its_end_takes_it_away(
    cluster: RayServe, spec: ResolvedDeployment, url: str
) -> None:
    """By the engine's own load: the prompts are long, and the requests fewer than the fallback needs to add a
    replica."""
    engine = {**spec.engine, "max_num_batched_tokens": 8, "enable_prefix_caching": False}
    scaled = changed(spec, max_replicas=2, upscale_delay_s=1.0, downscale_delay_s=2.0, engine=engine)
    serve(cluster, scaled)
    over = threading.Event()

    def run() -> None:
        with httpx.Client(base_url=url, timeout=60.0, trust_env=False) as client:
            while not over.is_set():
                client.post("/generate", json={"prompt": [1] * (CONTEXT - 8), "max_tokens": 2}).raise_for_status()

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        wait_for(lambda: cluster.list_states()["dep_live"].replicas == 2)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    wait_for(lambda: cluster.list_states()["dep_live"].replicas == 1)


@pytest.mark.soak("Serve scales, or a crowd asks: a minute")
def test_a_candidate_answers_its_share(
    cluster: RayServe, spec: ResolvedDeployment, artifacts: Path, url: str, expected: Expected
) -> None:
    """It starts and stops while the replica lives; each answer comes from one model and carries its name."""
    candidate = {"model": "two", "artifact_uri": str(artifacts / "two"), "share": 0.5}
    serve(cluster, spec)
    replica = health(url)["replica"]
    with Load(url, expected) as load:
        serve(cluster, changed(spec, candidate=candidate))
        wait_for(lambda: load.answers.count("two") > 20)
        serve(cluster, spec)
        before = len(load.answers)
        wait_for(lambda: len(load.answers) > before + 4 * load.num_clients)
    assert (load.failed, load.wrong) == ([], [])
    assert set(load.answers[-load.num_clients :]) == {"one"}, "the candidate still answers"
    assert health(url)["replica"] == replica


@pytest.mark.soak("Serve scales, or a crowd asks: a minute")
def test_without_requests_no_replica_is_left_and_the_first_one_brings_it_back(
    cluster: RayServe, spec: ResolvedDeployment, dashboard_url: str, url: str, expected: Expected
) -> None:
    serve(cluster, spec)
    cluster.apply([changed(spec, min_replicas=0, upscale_delay_s=0.0, downscale_delay_s=1.0)])
    wait_for(lambda: replica_pids(dashboard_url, spec.id) == [])
    with httpx.Client(base_url=url, timeout=120.0, trust_env=False) as client:
        assert ask(client, PROMPTS[0], stream=False) == ({"one"}, expected["one"][0])
