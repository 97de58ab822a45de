"""A deployment without Ray: its application, the engine that it runs on, and the verified artifact that it loads."""

import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from swiftkv_platform.contract.autoscaling import POLICY, REVISION_HEADER
from swiftkv_platform.control_plane.deployments import ray_serve
from swiftkv_platform.control_plane.deployments.ray_serve import RayServe, _make_application, parse_http_address
from swiftkv_platform.control_plane.deployments.repository import DeploymentState, DeploymentStatus
from swiftkv_platform.control_plane.deployments.service import check_engine_options
from swiftkv_platform.engine import LLMEngine, SamplingParams
from swiftkv_platform.errors import (
    ClusterUnavailableError,
    InvalidInputError,
    ModelError,
    UnreadableRowError,
)
from swiftkv_platform.limits import KEEP_ALIVE_SECONDS
from swiftkv_platform.model import export_adapter
from swiftkv_platform.serve.app import build_app
from swiftkv_platform.serve.args import ReplicaArgs, ServeArgs, ServedConfig
from swiftkv_platform.serve.metrics import Metrics
from swiftkv_platform.serve.versions import (
    LoadedModel,
    choose_backend,
    load_model,
    load_version,
    make_served_model_info,
)
from swiftkv_platform.sources import UNRESTRICTED, SourceRules
from swiftkv_platform.specs.deployment import ResolvedDeployment
from swiftkv_platform.specs.engine import EngineConfig
from tests.contract.serving.replicas import artifact, digest, publish
from tests.support.checkpoints import rewrite
from tests.support.fakes.scripted_server import Script, json_answer, serve
from tests.unit.engine.tiny_models import make_model, save_dense

__all__ = ["artifact"]

ARGS: dict[str, Any] = {"id": "dep_1", "model": "mdl_1", "artifact_uri": "/nowhere"}
REPLICA = ReplicaArgs(id="dep_1")
APPLICATIONS = "/api/serve/applications/"


def deployment(**changes: Any) -> Any:
    return build_app(ARGS | changes)._bound_deployment


def test_scaling_and_resources_come_from_the_arguments() -> None:
    engine = {"num_threads": 2, "max_num_seqs": 3, "max_num_waiting": 5}
    built = deployment(min_replicas=2, max_replicas=4, target_ongoing_requests=3, engine=engine)
    scaling = built._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 4, 3.0)
    assert built.ray_actor_options["num_cpus"] == 2
    assert built.max_ongoing_requests > 3 + 5, "the replica itself refuses more"
    policies = [each._deployment_config.autoscaling_config.policy.policy_function for each in (deployment(), built)]
    assert (policies[0], policies[1] == POLICY) == (POLICY, False), "without a target, the policy by load"


def test_each_rank_of_a_replica_has_its_own_device_and_named_resources_go_first() -> None:
    def resources(engine: dict[str, Any], **named: float) -> tuple[float, float]:
        options = deployment(engine={"num_threads": 2, "device": "cuda", **engine}, **named).ray_actor_options
        return options["num_cpus"], options["num_gpus"]

    assert resources({"tensor_parallel_size": 4}) == (8, 4)
    assert resources({}, num_cpus=0.5) == (0.5, 1)
    assert resources({}, num_gpus=0) == (2, 0)
    args = _make_application(ResolvedDeployment(**ARGS, engine={"tensor_parallel_size": 2, "device": "cuda"}), {})[
        "args"
    ]
    assert (args["num_cpus"], args["num_gpus"]) == (2, 2)
    assert "api_keys_file" not in args


def test_what_is_served_is_no_argument_of_a_replica() -> None:
    one, other = deployment(), deployment(model="mdl_2", engine={"max_num_seqs": 3}, max_replicas=4)
    assert one.init_args == other.init_args
    assert (one.user_config["model"], other.user_config["model"]) == ("mdl_1", "mdl_2")
    assert build_app({"id": "dep_1"})._bound_deployment.user_config is None


def test_building_the_application_imports_no_torch() -> None:
    build = f"from swiftkv_platform.serve.app import build_app; build_app({ARGS})"
    check = f"import sys; {build}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"colour": "red"}, "colour"),
        ({"engine": {"colour": "red"}}, "engine.colour"),
        ({"min_replicas": -1}, "min_replicas"),
        ({"artifact_uri": None}, "artifact_uri together"),
        ({"min_replicas": 3, "max_replicas": 2}, "max_replicas 2 is below min_replicas 3"),
        ({"route_prefix": "v1"}, "route_prefix"),
        ({"target_ongoing_requests": 0}, "target_ongoing_requests"),
        ({"artifact_uri": "hf:org/name"}, "needs verify: false"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], message: str) -> None:
    for accept in (ServeArgs.model_validate, build_app):
        with pytest.raises(ValidationError, match=message):
            accept(ARGS | change)


def test_the_address_to_listen_on_is_the_one_clients_use() -> None:
    assert parse_http_address("http://127.0.0.1:8001") == ("127.0.0.1", 8001)
    assert parse_http_address("http://serve.example:80") == ("0.0.0.0", 80)
    for url in ("127.0.0.1:8001", "http://127.0.0.1", "https://127.0.0.1:8001"):
        with pytest.raises(InvalidInputError, match=r"give http://host:port"):
            parse_http_address(url)


def test_a_ray_that_is_away_is_a_cluster_that_is_away() -> None:
    with pytest.raises(ClusterUnavailableError, match=r"127\.0\.0\.1:9 does not answer"):
        RayServe("http://127.0.0.1:9").list_states()


def test_a_ray_that_hangs_is_a_cluster_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_serve, "_STATUS_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as hung:
        url = f"http://127.0.0.1:{hung.getsockname()[1]}"
        with closing(RayServe(url)) as cluster, pytest.raises(ClusterUnavailableError, match="timed out"):
            cluster.list_states()


def test_the_state_of_a_deployment_has_the_longest_cold_start_of_its_replicas() -> None:
    """Replicas of an older image tell no time, and the time of one with another revision does not count."""
    spec = ResolvedDeployment(id="dep_1", model="mdl_1", artifact_uri="s3://bucket/a", route_prefix="/one")
    served = _make_application(spec, {})["deployments"][0]["user_config"]["revision"]
    replicas = [{"replica_id": name, "state": "RUNNING"} for name in "abcd"]
    state = {"status": "RUNNING", "message": "", "route_prefix": "/one"}
    details = {
        "proxies": {"node": {"status": "HEALTHY"}},
        "applications": {"dep_1": {**state, "deployments": {"Replica": {"message": "", "replicas": replicas}}}},
    }

    def health(name: str, revision: str = served, **more: Any) -> Any:
        return json_answer({"replica": name, "swap": {"revision": revision, "status": "done", "message": ""}, **more})

    slow, fast = {"fetch": 9.0, "load": 2.0, "check": 0.5}, {"fetch": 0.5, "load": 3.0, "check": 0.5}
    script = Script()
    script.on("PUT", APPLICATIONS, json_answer({}))
    script.on("GET", APPLICATIONS, json_answer(details))
    with serve(script) as url, closing(RayServe(url, url)) as cluster:
        cluster.apply([spec])
        unaware = json_answer({"status": "ok"})  # a replica with keys that does not know the revision yet
        script.on("GET", "/one/health", health("a", load_seconds=fast), unaware, health("b"))
        swapping = DeploymentState(DeploymentStatus.SWAPPING, "2 of 4 replicas serve the new version", 4, fast)
        assert cluster.list_states() == {"dep_1": swapping}
        assert {each.headers[REVISION_HEADER] for each in script.sent("GET", "/one/health")} == {served}
        before = health("d", "before", load_seconds=dict.fromkeys(slow, 60.0))
        script.on("GET", "/one/health", before, health("c", load_seconds=slow), health("d", load_seconds=fast))
        assert cluster.list_states() == {"dep_1": DeploymentState(DeploymentStatus.RUNNING, "", 4, slow)}
        script.on("GET", APPLICATIONS, json_answer({**details, "proxies": {"node": {"status": "UNHEALTHY"}}}))
        unheard = DeploymentState(DeploymentStatus.DEPLOYING, "no healthy HTTP proxy of Ray Serve yet", 4)
        assert cluster.list_states() == {"dep_1": unheard}, "replicas that no proxy reaches do not count"


@pytest.mark.parametrize(
    ("serve_url", "keys", "hosts"),
    [
        ("http://127.0.0.1:8001", False, None),
        ("http://swiftkv-serve-serve-svc:8001", False, None),
        ("http://models.example.org:8001", False, ["a.example", "models.example.org"]),
        ("http://models.example.org:8001", True, None),
    ],
)
def test_replicas_without_keys_know_their_hosts(serve_url: str, keys: bool, hosts: list[str] | None) -> None:
    spec, script = ResolvedDeployment(id="dep_1", model="mdl_1", artifact_uri="s3://bucket/a"), Script()
    script.on("PUT", APPLICATIONS, json_answer({}))
    more = ("localhost", "127.0.0.1", *(["a.example"] if "example" in serve_url else []))
    files = {"api_keys_file": Path("/keys.json")} if keys else {}
    with serve(script) as url, closing(RayServe(url, serve_url, allowed_hosts=more, **files)) as cluster:
        cluster.apply([spec])
    sent = script.requests[-1].body
    options = ServeDeploySchema.model_validate(sent).http_options
    assert options.keep_alive_timeout_s == KEEP_ALIVE_SECONDS.default, "as long as our own servers keep connections"
    [application] = sent["applications"]
    assert application["args"].get("allowed_hosts") == hosts
    assert ServeArgs.model_validate(application["args"]).allowed_hosts == tuple(hosts or ())


def test_an_application_to_keep_is_put_as_it_was_deployed() -> None:
    """Serve ends every application that a PUT leaves out, so kept ones are sent as Serve reports them."""
    spec = ResolvedDeployment(id="dep_1", model="mdl_1", artifact_uri="s3://bucket/a", route_prefix="/one")
    deployed = {"name": "dep_2", "route_prefix": "/two", "import_path": "m:app", "args": {"of": "another version"}}
    running = {"status": "RUNNING", "message": "", "route_prefix": "/two", "deployments": {}}
    told = {"dep_2": {**running, "deployed_app_config": deployed}, "dep_3": {**running, "status": "DELETING"}}
    script = Script()
    script.on("PUT", APPLICATIONS, json_answer({}))
    script.on(
        "GET", APPLICATIONS, json_answer({"applications": told}), json_answer({"applications": {"dep_2": running}})
    )
    with serve(script) as url, closing(RayServe(url, url)) as cluster:
        cluster.apply([spec], keep=["dep_2", "dep_3", "dep_4"])
        put = [request.body for request in script.requests if request.method == "PUT"]
        assert [one["name"] for one in put[0]["applications"]] == ["dep_1", "dep_2"]
        assert put[0]["applications"][1] == deployed
        with pytest.raises(UnreadableRowError, match="dep_2"):
            cluster.apply([spec], keep=["dep_2"])
        assert len([request for request in script.requests if request.method == "PUT"]) == 1


def test_replicas_hold_base_models_to_their_tenants_rules() -> None:
    spec = ResolvedDeployment(id="dep_1", model="mdl_1", artifact_uri="s3://bucket/a", tenant="acme")
    rules, script = SourceRules(roots=("/data/{tenant}",)), Script()
    script.on("PUT", APPLICATIONS, json_answer({}))
    configs = []
    for access in (lambda tenant: rules.build_access(str(tenant), ("acme",)), lambda _: UNRESTRICTED):
        with serve(script) as url, closing(RayServe(url, access=access)) as cluster:
            cluster.apply([spec])
        (application,) = script.requests[-1].body["applications"]
        configs.append(application["deployments"][0]["user_config"])
    closed, opened = configs
    access = ServedConfig.model_validate(closed).base_access
    assert (access.roots, access.hub_organizations) == (("/data/acme",), ("acme",))
    assert "base_access" not in opened
    assert closed["revision"] == opened["revision"]  # a change of rules loads nothing


STUDENT = {
    "model_type": "llama_swiftkv",
    "num_key_value_heads": 2,
    "num_key_value_layers": 4,
    "key_value_group_size": 1,
}


@pytest.mark.parametrize(
    ("options", "around", "backend"),
    [
        ({}, {}, "vllm"),
        ({}, {"model_type": "llama"}, "vllm"),
        ({}, {"model_type": "qwen3_moe_swiftkv"}, "vllm"),
        ({"max_num_seqs": 8, "kv_cache_dtype": "fp8"}, {}, "vllm"),
        ({}, {"device": "cpu"}, "native"),
        ({}, {"has_vllm": False}, "native"),
        ({}, {"model_type": "deepseek_v2_swiftkv"}, "native"),
        ({}, {"model_type": "gpt2"}, "native"),
        ({}, {"early_exit": True}, "native"),
        ({}, {"num_key_value_heads_swiftkv": 1}, "native"),
        ({}, {"num_key_value_heads_swiftkv": 2}, "vllm"),
        ({}, {"swiftkv_prefill_layers": [0, 3], "swiftkv_decode_key_value": "own", "swiftkv_deep_tail": 16}, "vllm"),
        ({"kv_cache_dtype": "int8"}, {}, "native"),
        ({"native_kernels": False}, {}, "native"),
        ({"backend": "native"}, {}, "native"),
        ({"backend": "vllm"}, {"device": "cpu", "early_exit": True}, "vllm"),
        ({"backend": "vllm"}, {"has_vllm": False, "model_type": "gpt2"}, "vllm"),
    ],
)
def test_the_choice_of_an_engine(options: dict[str, Any], around: dict[str, Any], backend: str) -> None:
    """`around`: what differs from a student on a GPU with vLLM."""
    facts = {"device": "cuda", "has_vllm": True, **STUDENT, **around}
    device, has_vllm = facts.pop("device"), facts.pop("has_vllm")
    config = SimpleNamespace(**facts)
    assert choose_backend(EngineConfig(**options), config, device=device, has_vllm=has_vllm) == backend


@pytest.mark.parametrize(
    ("option", "value"),
    [("kv_cache_dtype", "int8"), ("kv_cache_dtype", "float32"), ("fuse_weights", False), ("native_kernels", False)],
)
def test_an_option_of_the_native_engine_alone_is_refused_beside_vllm(option: str, value: Any) -> None:
    assert EngineConfig(**{option: value}).native_only_options == (option,)
    with pytest.raises(ValidationError, match="backend native"):
        EngineConfig(**{"backend": "vllm", option: value})
    with pytest.raises(InvalidInputError, match="needs backend native") as caught:
        check_engine_options({option: value, "backend": "vllm"})
    assert (caught.value.field, caught.value.value) == (f"engine.{option}", value)
    check_engine_options({option: value, "backend": "native"})


def test_an_engine_is_not_asked_for_what_another_has(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="this is the native engine") as caught:
        LLMEngine.from_pretrained(tmp_path, EngineConfig(backend="vllm"))
    assert caught.value.field == "backend"


def served(artifact_uri: Path, **options: Any) -> ServedConfig:
    return ServedConfig(model="mdl_1", artifact_uri=str(artifact_uri), **options)


@pytest.fixture
def adapter(artifact: Path, tmp_path: Path) -> Path:
    """The artifact exported as an adapter of a base in `own`, and published."""
    make_model().save_pretrained(tmp_path / "own" / "base")
    export_adapter(tmp_path / "model", tmp_path / "adapter", base=tmp_path / "own" / "base")
    return publish(tmp_path, "adapter")


def answered(loaded: LoadedModel) -> Any:
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=5, prompt_logprobs=5)
    (output,) = loaded.engine.engine.generate([[1, 2, 3, 4, 5]], params)
    return output.token_ids, output.logprobs, output.prompt_logprobs


async def test_replicas_of_a_machine_fetch_a_model_once_and_tell_how_long_each_phase_took(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWIFTKV_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SWIFTKV_MODEL_CACHE_BYTES", str(1 << 30))
    metrics = Metrics()
    for _ in range(2):
        version = await load_version(REPLICA, served(artifact), on_loaded=metrics.count_load)
        await version.engine.aclose()
        (artifact / "model.safetensors").unlink(missing_ok=True)  # the second replica reads nothing but the manifest
    [copy] = [path for path in (tmp_path / "home" / "models").iterdir() if path.is_dir()]
    assert copy.name == version.model_info.manifest_digest == digest(artifact)
    assert version.model_info.swiftkv == {"num_hidden_layers": 4, "num_key_value_layers": 2, "key_value_group_size": 2}
    assert list(version.model_info.load_seconds) == ["fetch", "load", "check"]
    counts = dict(line.rsplit(" ", 1) for line in metrics.render_page().decode().splitlines())
    assert counts["swiftkv:model_loads_total"] == "2.0"
    for phase in ("fetch", "load", "check"):
        assert float(counts[f'swiftkv:model_load_seconds_total{{phase="{phase}"}}']) > 0


def test_a_plain_directory_is_served_only_unverified(tmp_path: Path) -> None:
    save_dense(tmp_path)
    with pytest.raises(ModelError, match=r"no manifest.json.*verify: false") as caught:
        load_model(served(tmp_path))
    assert caught.value.field == "artifact_uri"
    unverified = served(tmp_path, verify=False)
    model_info = make_served_model_info(REPLICA, unverified, load_model(unverified), {})
    assert (model_info.manifest_digest, model_info.swiftkv) == (None, None)


def test_an_adapter_is_served_with_its_base_as_the_whole_artifact_is(
    adapter: Path, artifact: Path, tmp_path: Path
) -> None:
    rules = {"roots": [str(tmp_path / "own")], "hub_organizations": []}
    loaded = load_model(served(adapter, base_access=rules))
    assert loaded.manifest_digest == digest(adapter)
    assert answered(loaded) == answered(load_model(served(artifact)))
    teachers = [load_model(served(each, engine={"swiftkv": False})) for each in (adapter, artifact)]
    assert answered(teachers[0]) == answered(teachers[1])
    closed = served(adapter, base_access={"roots": ["/elsewhere"], "hub_organizations": ["acme"]})
    assert closed.loads_same_models(served(adapter)), "a change of access rules loads nothing"


def test_a_base_outside_the_tenants_roots_is_refused(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"base\.name_or_path is '.*base', which this tenant may not read"):
        load_model(served(adapter, base_access={"roots": [str(tmp_path / "others")]}))
    link = tmp_path / "own" / "base" / "generation_config.json"
    link.unlink()
    (tmp_path / "secret.json").write_text("{}")
    link.symlink_to(tmp_path / "secret.json")
    with pytest.raises(ModelError, match="links to a path"):
        load_model(served(adapter, base_access={"roots": [str(tmp_path / "own")]}))


def test_a_base_that_has_changed_is_refused(adapter: Path, tmp_path: Path) -> None:
    rewrite(tmp_path / "own" / "base", lambda tensors: tensors["model.norm.weight"].mul_(2))
    with pytest.raises(ModelError, match=r"model\.norm\.weight of .* has the SHA-256") as caught:
        load_model(served(adapter))
    assert caught.value.field == "base.name_or_path"
