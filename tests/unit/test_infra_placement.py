"""The shipped RayClusters have room for every recipe and for large deployments, according to Ray's own autoscaler.

The requests for resources come from the code that sends them to Ray. Nothing is started.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from ray._common.utils import resources_from_ray_options
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingReply, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import GangResourceRequest

from swiftkv_platform.control_plane.jobs.queue import ResourceRequest
from swiftkv_platform.control_plane.ray import can_place
from swiftkv_platform.jobs.driver import build_task_options
from swiftkv_platform.jobs.ray_train import make_scaling_config
from swiftkv_platform.serve.app import build_app
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.specs.job import load_spec
from tests.support.infra_files import environments, kustomizations, named
from tests.support.recipes import RECIPES

Resources = dict[str, float]

Schedule = Callable[[Sequence[Resources], Sequence[Resources]], SchedulingReply]


def autoscaling(name: str) -> AutoscalingConfig:
    """Groups of a shipped cluster, as Ray's autoscaler reads them."""
    cluster = named("RayCluster", name)
    cluster["metadata"]["namespace"] = kustomizations()["base"]["namespace"]
    return AutoscalingConfig(_derive_autoscaling_config_from_ray_cr(cluster), skip_content_hash=True)


def scheduler(name: str) -> Schedule:
    """Return a function that asks Ray's autoscaler which nodes of a shipped cluster to launch, starting from none.

    Its arguments are the bundles of a placement group, and the resources of single tasks and actors.
    """
    config = autoscaling(name)

    def schedule(bundles: Sequence[Resources], singles: Sequence[Resources]) -> SchedulingReply:
        gang = [GangResourceRequest(requests=[ResourceRequestUtil.make(bundle) for bundle in bundles])]
        request = SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=config.get_node_type_configs(),
            max_num_nodes=config.get_max_num_nodes(),
            resource_requests=ResourceRequestUtil.group_by_count([ResourceRequestUtil.make(one) for one in singles]),
            gang_resource_requests=gang if bundles else [],
        )
        return ResourceDemandScheduler().schedule(request)

    return schedule


def workers(spec: JobSpec) -> list[Resources]:
    """The bundles of the placement group that Ray Train makes for a job, at its largest."""
    bundle = make_scaling_config(spec.resources)._resources_per_worker_not_none
    return [bundle] * spec.resources.max_workers


def driver() -> Resources:
    """Resources of a job's driver, as the control plane of the cluster requests them."""
    settings = environments()["ConfigMap-swiftkv-control-plane"]
    cpus, memory = (settings[f"SWIFTKV_ENTRYPOINT_{name}"] for name in ("NUM_CPUS", "MEMORY"))
    return resources_from_ray_options({"num_cpus": float(cpus), "memory": int(memory)})


def replica(tensor_parallel_size: int) -> Resources:
    """A replica's resources, as Ray Serve asks for them."""
    application: Any = build_app(
        {
            "id": "dep_large",
            "model": "mdl_large",
            "artifact_uri": "s3://swiftkv/jobs/job_large/attempts/1/artifact",
            "engine": {"device": "cuda", "dtype": "bfloat16", "tensor_parallel_size": tensor_parallel_size},
        }
    )
    return resources_from_ray_options(application._bound_deployment.ray_actor_options)


def infeasible(reply: SchedulingReply) -> list[str]:
    return [str(each) for each in (*reply.infeasible_gang_resource_requests, *reply.infeasible_resource_requests)]


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    """The scheduler of the cluster that runs jobs."""
    return scheduler("swiftkv-ray")


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_gets_its_nodes_and_reserves_its_memory(schedule: Schedule, recipe: Path) -> None:
    spec = load_spec(recipe)
    task = resources_from_ray_options(build_task_options(spec.resources))
    # Data is written and calibration collected by as many tasks as training has workers; one prepares and evaluates.
    assert infeasible(schedule([], [driver()] + [task] * spec.resources.max_workers)) == []
    assert infeasible(schedule(workers(spec), [driver()])) == []
    if not recipe.stem.startswith("builtin-") and spec.resources.num_workers > 1:  # one GPU: a machine to itself
        assert task["memory"] == workers(spec)[0]["memory"] == spec.resources.memory_per_worker


def test_jobs_write_to_a_volume_that_their_nodes_have_room_for() -> None:
    for group in named("RayCluster", "swiftkv-ray")["spec"]["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        [container] = pod["containers"]
        assert container["volumeMounts"] == [{"name": "scratch", "mountPath": "/tmp"}]
        assert {entry["name"]: entry.get("value") for entry in container["env"]}["HF_HOME"].startswith("/tmp/")
        [volume] = pod["volumes"]
        room = gibibytes(volume["emptyDir"]["sizeLimit"])
        assert room < gibibytes(container["resources"]["requests"]["ephemeral-storage"])


def gibibytes(quantity: str) -> int:
    """Bytes of a quantity in GiB."""
    return int(quantity.removesuffix("Gi")) << 30


def test_the_control_plane_knows_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """The groups are listed in two files; if the lists differed, a recipe could wait for ever."""
    monkeypatch.setenv("SWIFTKV_NODE_GROUPS", environments()["ConfigMap-swiftkv-control-plane"]["SWIFTKV_NODE_GROUPS"])
    groups = Settings(_env_file=None).node_groups
    configs = autoscaling("swiftkv-ray").get_node_type_configs()
    assert {*groups} == {group["groupName"] for group in named("RayCluster", "swiftkv-ray")["spec"]["workerGroupSpecs"]}
    for name, group in groups.items():
        assert group.max_nodes == configs[name].max_worker_nodes
        assert group.resources == {key: value for key, value in configs[name].resources.items() if "object" not in key}
    nodes = [dict(group.resources) for group in groups.values() for _ in range(group.max_nodes)]
    for recipe in RECIPES:
        assert can_place(nodes, ResourceRequest.for_job(load_spec(recipe), driver()).bundles), recipe


def test_drivers_and_replicas_get_their_nodes(schedule: Schedule) -> None:
    """Drivers do not run on the head, a CPU replica gets a CPU node, and resources that no group has are infeasible."""
    assert [launch.instance_type for launch in schedule([], [driver()]).to_launch] == ["cpu"]
    serving = scheduler("swiftkv-serve")
    for size in (1, 2, 8):
        assert replica(size)["GPU"] == size
        assert infeasible(serving([], [replica(size)])) == []
    assert [launch.instance_type for launch in serving([], [{"CPU": 1.0}]).to_launch] == ["cpu"]
    unknown = {"CPU": 1.0, "GPU": 1.0, "accelerator_type:UNKNOWN": 0.001}
    assert len(infeasible(schedule([unknown], []))) == 1
    assert len(infeasible(serving([], [replica(16)]))) == 1
