"""Real Ray Serve: deployments by `RayServe`, `/generate` over HTTP, a corrupt artifact refused, lost clients."""

from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from swiftkv_platform.control_plane.deployments.ray_serve import RayServe
from swiftkv_platform.control_plane.deployments.repository import DeploymentState, DeploymentStatus
from swiftkv_platform.errors import ClusterUnavailableError
from swiftkv_platform.model import convert, export_adapter
from swiftkv_platform.security.keys import Scope, create_key
from swiftkv_platform.sources import Access
from swiftkv_platform.specs.deployment import ResolvedDeployment
from swiftkv_platform.storage.artifacts import hash_manifest, read_manifest
from swiftkv_platform.storage.object_store import open_store
from swiftkv_platform.storage.traffic import TrafficReader
from tests.integration.conftest import wait_for
from tests.integration.load import GREEDY, publish
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.unit.engine.tiny_models import make_model, save_swiftkv

pytestmark = pytest.mark.integration("deployments of a Serve that starts")

CONTEXT = 1 << 17
"""Context so long that an answer of this length outlasts every wait of these tests."""

ENDLESS = {"prompt": [1], "max_tokens": CONTEXT, "ignore_eos": True}


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with the same artifact three times: whole, with a flipped byte, and as an adapter of its base; and with
    another adapter of that base."""
    directory = tmp_path_factory.mktemp("artifacts")
    model = save_swiftkv(directory / "model", CONTEXT)
    publish(model, directory / "store", "good")
    publish(model, directory / "store", "corrupt", damaged=True)
    make_model(CONTEXT).save_pretrained(directory / "base")
    export_adapter(model, directory / "as-adapter", base=directory / "base")
    publish(directory / "as-adapter", directory / "store", "adapter")
    student = convert(make_model(CONTEXT), num_key_value_layers=2, key_value_group_size=2)
    with torch.no_grad():
        student.model.norm_swiftkv.weight.mul_(3)
    student.save_pretrained(directory / "second-model")
    byte_tokenizer().save_pretrained(directory / "second-model")
    export_adapter(directory / "second-model", directory / "second", base=directory / "base")
    publish(directory / "second", directory / "store", "second")
    return directory / "store"


@pytest.fixture(scope="module")
def specs(artifacts: Path) -> list[ResolvedDeployment]:
    def spec(name: str, **options: Any) -> ResolvedDeployment:
        return ResolvedDeployment(
            id=f"dep_{name}",
            model=f"mdl_{name}",
            artifact_uri=str(artifacts / name),
            route_prefix=f"/{name}",
            **options,
        )

    capture = {"share": 1.0, "uri": str(artifacts.parent / "traffic")}
    good = spec("good", tenant="acme", engine={"max_num_seqs": 1, "max_num_waiting": 0}, capture=capture)
    return [good, spec("corrupt"), spec("adapter", tenant="acme", adapters=[])]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def key(keys: Path) -> str:
    return create_key(keys, name="ann", tenant="acme", scopes=frozenset({Scope.GENERATE}))


@pytest.fixture(scope="module")
def cluster(
    dashboard_url: str, serve_port: int, specs: list[ResolvedDeployment], keys: Path, key: str, artifacts: Path
) -> Iterator[RayServe]:
    """All deployments applied and settled; they may read base models below the artifacts' directory."""
    serve_url = f"http://127.0.0.1:{serve_port}"
    access = Access(roots=(str(artifacts.parent),))
    with closing(RayServe(dashboard_url, serve_url, api_keys_file=keys, access=lambda _: access)) as cluster:
        assert wait_for(lambda: cluster.list_states() == {})
        cluster.apply(specs)
        wait_for(
            lambda: all(state.status is not DeploymentStatus.DEPLOYING for state in cluster.list_states().values())
        )
        yield cluster


@pytest.fixture(scope="module")
def states(cluster: RayServe) -> Mapping[str, DeploymentState]:
    return cluster.list_states()


@pytest.fixture
def client(cluster: RayServe, serve_port: int, key: str) -> Iterator[httpx.Client]:
    url, headers = f"http://127.0.0.1:{serve_port}/good", {"Authorization": f"Bearer {key}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60.0, trust_env=False) as client:
        yield client


def generate(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/generate", json=body)


def wait_until_free(client: httpx.Client) -> None:
    """Wait until a request is taken: the deployment has no queue, so one is refused while another runs."""
    wait_for(lambda: generate(client, prompt=[1], **GREEDY).status_code == httpx.codes.OK)


def test_a_deployment_is_running_when_it_answers(
    states: Mapping[str, DeploymentState], client: httpx.Client, artifacts: Path
) -> None:
    health = client.get("/health").json()
    seconds = health["load_seconds"]
    assert states["dep_good"] == DeploymentState(DeploymentStatus.RUNNING, "", replicas=1, load_seconds=seconds)
    assert list(seconds) == ["fetch", "load", "check"]
    assert min(seconds.values()) > 0
    assert health["deployment"] == "dep_good"
    assert health["manifest_digest"] == hash_manifest(read_manifest(open_store(str(artifacts)), "good"))
    assert health["swiftkv"] == {"num_hidden_layers": 4, "num_key_value_layers": 2, "key_value_group_size": 2}


def test_a_deployment_answers_the_keys_of_its_tenant_alone(client: httpx.Client, keys: Path) -> None:
    others = create_key(keys, name="bob", tenant="other", scopes=frozenset({Scope.ADMIN}))
    for header, status in (("Bearer skv_nobody", 401), (f"Bearer {others}", 403)):
        for path in ("/generate", "/v1/completions", "/v1/chat/completions", "/tokenize"):
            refused = client.post(path, json={"prompt": [1], **GREEDY}, headers={"Authorization": header})
            assert refused.status_code == status, (path, refused.text)
    wait_until_free(client)


def test_a_corrupt_artifact_is_refused_and_the_status_says_why(
    states: Mapping[str, DeploymentState], serve_port: int
) -> None:
    state = states["dep_corrupt"]
    assert (state.status, state.replicas) == (DeploymentStatus.FAILED, 0)
    assert state.message.startswith("swiftkv_platform.errors.ArtifactCorruptError: 'model.safetensors'")
    assert "differs from its manifest" in state.message
    response = httpx.post(f"http://127.0.0.1:{serve_port}/corrupt/generate", json={"prompt": [1]}, trust_env=False)
    assert not response.is_success


def test_an_adapter_answers_as_the_whole_artifact_does(client: httpx.Client, serve_port: int) -> None:
    body = {"prompt": "hello", "logprobs": 5, **GREEDY}
    urls = (f"http://127.0.0.1:{serve_port}/{name}/generate" for name in ("good", "adapter"))
    whole, adapted = (client.post(url, json=body) for url in urls)
    assert adapted.json()["model"] == "mdl_adapter"
    assert adapted.json()["choices"] == whole.json()["choices"]


def test_an_adapter_is_added_to_a_running_replica_and_removed(
    cluster: RayServe, client: httpx.Client, serve_port: int, specs: list[ResolvedDeployment], artifacts: Path
) -> None:
    url = f"http://127.0.0.1:{serve_port}/adapter"
    good, corrupt, deployment = specs

    def serve(*names: str) -> str:
        """Serve these adapters too; return what the deployment's model answers meanwhile, and its replica."""
        adapters = [{"model": f"mdl_{name}", "artifact_uri": str(artifacts / name)} for name in names]
        changed = ResolvedDeployment.model_validate({**deployment.model_dump(), "adapters": adapters})
        cluster.apply([good, corrupt, changed])
        wait_for(lambda: cluster.list_states()["dep_adapter"].status is DeploymentStatus.RUNNING)
        replica: str = client.get(f"{url}/health").json()["replica"]
        return replica

    body = {"prompt": "hello", **GREEDY}
    replica, own = serve(), client.post(f"{url}/generate", json=body).json()
    assert client.post(f"{url}/generate", json={**body, "model": "mdl_second"}).status_code == 404
    assert serve("second") == replica
    second = client.post(f"{url}/generate", json={**body, "model": "mdl_second"}).json()
    assert (own["model"], second["model"]) == ("mdl_adapter", "mdl_second")
    assert own["choices"] != second["choices"]
    assert client.post(f"{url}/generate", json=body).json()["choices"] == own["choices"]
    assert serve() == replica
    assert client.post(f"{url}/generate", json={**body, "model": "mdl_second"}).status_code == 404


def test_a_full_queue_is_refused_and_a_client_that_leaves_a_stream_frees_it(client: httpx.Client) -> None:
    with client.stream("POST", "/generate", json={**ENDLESS, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        refused = generate(client, prompt=[1], **GREEDY)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["code"] == "queue_full"
    wait_until_free(client)


def test_a_client_that_gives_up_waiting_frees_the_engine(client: httpx.Client) -> None:
    with pytest.raises(httpx.ReadTimeout):
        client.post("/generate", json=ENDLESS, timeout=1.0)
    wait_until_free(client)


def test_a_wrong_token_is_a_cluster_that_cannot_be_used(cluster: RayServe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "wrong")
    with pytest.raises(ClusterUnavailableError, match=r"40[13]"):
        cluster.list_states()


def test_what_is_no_longer_applied_is_gone_and_the_rest_serves_on(
    cluster: RayServe, client: httpx.Client, specs: list[ResolvedDeployment]
) -> None:
    """Must run last: it takes the deployments down. What a replica has captured is stored before it ends."""
    cluster.apply(specs[:1])
    wait_for(lambda: set(cluster.list_states()) == {"dep_good"})
    answer = generate(client, prompt="hello", user="ann", **GREEDY)
    assert answer.is_success
    cluster.apply([])
    wait_for(lambda: not cluster.list_states())
    assert not generate(client, prompt=[1], **GREEDY).is_success
    assert specs[0].capture is not None
    *_, row = TrafficReader(open_store(specs[0].capture.uri)).iterate_rows()
    assert (row.id, row.user, row.prompt) == (answer.json()["id"].removeprefix("gen_"), "ann", "hello")
    assert (row.model, row.completion) == ("mdl_good", answer.json()["choices"][0]["text"])
