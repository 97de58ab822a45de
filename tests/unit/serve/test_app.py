"""The application as Serve sees it, without starting Serve; and its address."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from typing import Any

import pytest
from pydantic import ValidationError

from swiftkv_platform.cluster.ray_serve import RayServe, _application, http_address
from swiftkv_platform.contract.autoscaling import POLICY
from swiftkv_platform.errors import ClusterUnavailableError, InvalidInputError
from swiftkv_platform.orchestration.deployment import DeploymentState, DeploymentStatus
from swiftkv_platform.serve.app import build_app
from swiftkv_platform.serve.args import Served
from swiftkv_platform.sources import OPEN, SourceRules
from swiftkv_platform.specs.deployment import ResolvedDeployment
from tests.fakes.scripted_server import Script, json_answer, serve

ARGS: dict[str, Any] = {"id": "dep_1", "model": "mdl_1", "artifact_uri": "/nowhere"}


def deployment(**changes: Any) -> Any:
    return build_app(ARGS | changes)._bound_deployment


def test_scaling_and_resources_come_from_the_arguments() -> None:
    built = deployment(
        min_replicas=2,
        max_replicas=4,
        target_ongoing_requests=3,
        engine={"num_threads": 2, "max_num_seqs": 3, "max_num_waiting": 5},
    )
    scaling = built._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (2, 4, 3.0)
    assert built.ray_actor_options["num_cpus"] == 2
    assert built.max_ongoing_requests > 3 + 5, "the replica itself refuses what is too much"


def test_each_rank_of_a_replica_has_its_own_device() -> None:
    options = deployment(engine={"num_threads": 2, "tensor_parallel_size": 4, "device": "cuda"}).ray_actor_options
    assert (options["num_cpus"], options["num_gpus"]) == (8, 4)
    spec = ResolvedDeployment(
        id="dep_1", model="mdl_1", artifact_uri="/a", engine={"tensor_parallel_size": 2, "device": "cuda"}
    )
    args = _application(spec, {})["args"]
    assert (args["num_cpus"], args["num_gpus"]) == (2, 2)
    assert "api_keys_file" not in args


def test_resources_that_are_named_go_before_those_that_the_engine_needs() -> None:
    engine = {"num_threads": 2, "device": "cuda"}
    named = deployment(engine=engine, num_cpus=0.5).ray_actor_options
    assert (named["num_cpus"], named["num_gpus"]) == (0.5, 1)
    assert deployment(engine=engine, num_gpus=0).ray_actor_options["num_gpus"] == 0


def test_without_a_target_the_load_decides() -> None:
    policy = deployment()._deployment_config.autoscaling_config.policy
    assert policy.policy_function == POLICY
    assert deployment(target_ongoing_requests=1)._deployment_config.autoscaling_config.policy.policy_function != POLICY


def test_what_is_served_is_no_argument_of_a_replica() -> None:
    one, other = deployment(), deployment(model="mdl_2", engine={"max_num_seqs": 3}, max_replicas=4)
    assert one.init_args == other.init_args
    assert (one.user_config["model"], other.user_config["model"]) == ("mdl_1", "mdl_2")
    assert build_app({"id": "dep_1"})._bound_deployment.user_config is None


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(ValidationError, match="colour"):
        build_app(ARGS | {"colour": "red"})


def test_building_the_application_imports_no_torch() -> None:
    build = f"from swiftkv_platform.serve.app import build_app; build_app({ARGS})"
    check = f"import sys; {build}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


def test_the_address_to_listen_on_is_the_one_clients_use() -> None:
    assert http_address("http://127.0.0.1:8001") == ("127.0.0.1", 8001)
    assert http_address("http://serve.example:80") == ("0.0.0.0", 80)
    for url in ("127.0.0.1:8001", "http://127.0.0.1", "https://127.0.0.1:8001"):
        with pytest.raises(InvalidInputError, match=r"give http://host:port"):
            http_address(url)


def test_a_ray_that_is_away_is_a_cluster_that_is_away() -> None:
    with pytest.raises(ClusterUnavailableError, match=r"127\.0\.0\.1:9 does not answer"):
        RayServe("http://127.0.0.1:9").status()


def test_the_state_of_a_deployment_has_the_longest_cold_start_of_its_replicas() -> None:
    """A replica of an older image tells none, and one that serves something else has loaded that."""
    spec = ResolvedDeployment(id="dep_1", model="mdl_1", artifact_uri="s3://bucket/a", route_prefix="/one")
    served = _application(spec, {})["deployments"][0]["user_config"]["revision"]
    replicas = [{"replica_id": name, "state": "RUNNING"} for name in "abcd"]
    details = {
        "proxies": {"node": {"status": "HEALTHY"}},
        "applications": {
            "dep_1": {
                "status": "RUNNING",
                "message": "",
                "route_prefix": "/one",
                "deployments": {"Replica": {"message": "", "replicas": replicas}},
            }
        },
    }

    def health(name: str, revision: str = served, **more: Any) -> Any:
        return json_answer({"replica": name, "swap": {"revision": revision, "status": "done", "message": ""}, **more})

    slow, fast = {"fetch": 9.0, "load": 2.0, "check": 0.5}, {"fetch": 0.5, "load": 3.0, "check": 0.5}
    script = Script()
    script.on("PUT", "/api/serve/applications/", json_answer({}))
    script.on("GET", "/api/serve/applications/", json_answer(details))
    with serve(script) as url, closing(RayServe(url, url)) as cluster:
        cluster.apply([spec])
        script.on("GET", "/one/health", health("a", load_seconds=fast), health("b"))
        swapping = DeploymentState(DeploymentStatus.SWAPPING, "2 of 4 replicas serve what is wanted", 4, fast)
        assert cluster.status() == {"dep_1": swapping}
        others = dict.fromkeys(slow, 60.0)
        both = (health("c", load_seconds=slow), health("d", load_seconds=fast))
        script.on("GET", "/one/health", health("d", "before", load_seconds=others), *both)
        assert cluster.status() == {"dep_1": DeploymentState(DeploymentStatus.RUNNING, "", 4, slow)}


def test_replicas_hold_base_models_to_their_tenants_rules() -> None:
    spec = ResolvedDeployment(id="dep_1", model="mdl_1", artifact_uri="s3://bucket/a", tenant="acme")
    rules, script = SourceRules(roots=("/data/{tenant}",)), Script()
    script.on("PUT", "/api/serve/applications/", json_answer({}))
    configs = []
    for access in (lambda tenant: rules.access(str(tenant), ("acme",)), lambda _: OPEN):
        with serve(script) as url, closing(RayServe(url, access=access)) as cluster:
            cluster.apply([spec])
        (application,) = script.requests[-1].body["applications"]
        configs.append(application["deployments"][0]["user_config"])
    closed, opened = configs
    assert Served.model_validate(closed).base_access.model_dump() == {
        "roots": ("/data/acme",),
        "hub_organizations": ("acme",),
    }
    assert "base_access" not in opened
    assert closed["revision"] == opened["revision"]  # rules load nothing
