"""Jobs wait in the queue until the cluster has places for them, and say for what; what Ray reports of its nodes."""

import json
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from swiftkv_platform.contract.events import Pace
from swiftkv_platform.control_plane.base import CachedCall
from swiftkv_platform.control_plane.jobs.job import Attempt, Job, JobStatus, start_attempt, transition
from swiftkv_platform.control_plane.jobs.queue import check_fits_node_groups, list_unclaimed_bundles
from swiftkv_platform.control_plane.jobs.reconciler import PollSchedule, Reconciler
from swiftkv_platform.control_plane.ray import Bundle, EmptyNodePlacement, Node, RayJobs, can_place
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.settings import NodeGroup, Settings
from tests.support.fakes.scripted_server import Script, json_answer, serve
from tests.support.records import make_job
from tests.unit.control_plane.rules.conftest import Clock, Plane

RECORDED = Path(__file__).parents[3] / "support" / "fixtures" / "ray"
"""Answers of Ray 2.60's dashboard: one node of 2 CPUs with a task on one and a placement group on the other."""


GIB = 1 << 30


def workers(count: Any, **each: Any) -> dict[str, Any]:
    return {"num_workers": count, **each}


def node(cpus: float, gpus: float = 0, *, free: float | None = None, **others: float) -> Node:
    total = {"CPU": cpus, "GPU": gpus, "memory": 8 * GIB, **others}
    return Node(total, total if free is None else {**total, "CPU": free})


@pytest.fixture
def reconciler(plane: Plane) -> Reconciler:
    plane.cluster.nodes = [node(2)]
    return plane.reconciler(max_running_jobs=9)


def test_two_jobs_that_together_do_not_fit_run_one_after_the_other(plane: Plane, reconciler: Reconciler) -> None:
    first, second, third = (plane.submit(resources=workers(2)) for _ in range(3))
    for _ in range(3):
        reconciler.tick()
    assert plane.cluster.started == [f"{first.id}-1"], "it prepares on one CPU and trains on two"
    waiting = plane.get(second)
    assert (waiting.status, waiting.retries, waiting.attempt) == (JobStatus.QUEUED, 0, Attempt())
    reason = plane.reason(second)
    assert (reason.code, reason.field) == ("waiting_for_resources", "resources")
    assert "2 workers with 1 CPU each" in reason.message
    assert waiting.waiting_since == plane.clock.now
    assert plane.get(third).status_reason is None, "it waits behind the second one"
    assert len(plane.events(second)) == 2, "the reason is told once"
    plane.clock.now += 10
    plane.worker(first).artifact()
    plane.cluster.finish(f"{first.id}-1", plane.cluster.submissions[f"{first.id}-1"].state.status.SUCCEEDED)
    reconciler.tick()
    assert plane.cluster.started[1:] == [f"{second.id}-1"]
    assert (plane.get(second).status_reason, plane.get(second).waiting_since) == (None, None)


@pytest.mark.parametrize(
    ("nodes", "asked", "starts"),
    [
        ([node(2)], workers(2), True),
        ([node(2, free=1)], workers(2), False),
        ([node(2, free=1)], workers({"min": 1, "max": 8}), True),
        ([node(2, free=1), node(2, free=1)], workers(2), True),
        ([node(3), node(3)], workers(2, cpus_per_worker=2), True),
        ([node(3), node(3)], workers(3, cpus_per_worker=2), False),
        ([node(8)], workers(1, gpus_per_worker=1), False),
        ([node(8, 1)], workers(1, gpus_per_worker=1), True),
        ([node(8, 1)], workers(1, gpus_per_worker=1, accelerator_type="H100"), False),
        ([node(8, 1, **{"accelerator_type:H100": 1})], workers(1, gpus_per_worker=1, accelerator_type="H100"), True),
        ([node(8)], workers(1, memory_per_worker=9 * GIB), False),
        ([node(0.3)], workers(3, cpus_per_worker=0.1), True),
        ([], workers(1), False),
        (None, workers(900), True),
    ],
)
def test_a_job_starts_where_its_workers_find_places(plane: Plane, nodes: Any, asked: Any, starts: bool) -> None:
    plane.cluster.nodes = nodes
    job = plane.submit(resources=asked)
    plane.reconciler().tick()
    assert (plane.get(job).status is JobStatus.STARTING) is starts
    assert starts or plane.reason(job).code == "waiting_for_resources"


def test_what_no_node_holds_waits_until_one_joins_and_stops_nobody(plane: Plane) -> None:
    """A job that overtakes it takes no place that it could have used."""
    plane.cluster.nodes = [node(2)]
    reconciler = plane.reconciler()
    large, small = plane.submit(resources=workers(1, gpus_per_worker=8)), plane.submit(resources=workers(1))
    reconciler.tick()
    reconciler.tick()
    assert plane.cluster.started == [f"{small.id}-1"]
    assert "1 worker with 1 CPU and 8 GPU: the nodes of this cluster cannot hold them" in plane.reason(large).message
    plane.cluster.nodes = [node(2), node(8, 8)]
    plane.cluster.finish(f"{small.id}-1", plane.cluster.submissions[f"{small.id}-1"].state.status.SUCCEEDED)
    for _ in range(3):
        reconciler.tick()
    assert plane.cluster.started[1] == f"{large.id}-1"


def test_a_driver_that_reserves_has_its_place_too(plane: Plane) -> None:
    plane.cluster.nodes = [node(2)]
    job = plane.submit(resources=workers(2))
    plane.reconciler(entrypoint_num_cpus=0.5).tick()
    assert plane.get(job).status is JobStatus.QUEUED


@pytest.mark.parametrize(
    ("groups", "nodes", "refused"),
    [
        ({"gpu": NodeGroup(max_nodes=2, resources={"CPU": 8, "GPU": 8})}, [], False),  # scaled to zero
        ({"gpu": NodeGroup(max_nodes=1, resources={"CPU": 8, "GPU": 8})}, [], True),
        ({"gpu": NodeGroup(max_nodes=1, resources={"CPU": 8, "GPU": 8})}, [node(8, 8)] * 2, False),  # of no group
        ({"gpu": NodeGroup(max_nodes=1, resources={"CPU": 8, "GPU": 8})}, None, False),  # Ray is away
        ({"gpu": NodeGroup(max_nodes=9, resources={"CPU": 8, "GPU": 4})}, [], True),
        ({"cpu": NodeGroup(max_nodes=9, resources={"CPU": 64})}, [node(8, 8)], True),
        ({}, [], False),  # no groups: nodes may come and go
    ],
)
def test_what_no_group_can_ever_hold_is_known(groups: Any, nodes: Any, refused: bool) -> None:
    spec = make_job(resources=workers(2, gpus_per_worker=8)).spec
    settings = Settings(node_groups=groups, _env_file=None)
    present = CachedCall[Any](lambda: nodes, time.time, ttl_s=1.0)
    if not refused:
        check_fits_node_groups(spec, settings, present)
        return
    with pytest.raises(InvalidInputError, match="2 workers with 1 CPU and 8 GPU each") as caught:
        check_fits_node_groups(spec, settings, present)
    assert caught.value.field == "resources"


def test_another_control_plane_knows_what_runs(plane: Plane, reconciler: Reconciler) -> None:
    plane.submit(resources=workers(2))
    reconciler.tick()
    second = plane.submit(resources=workers(2))
    plane.reconciler(max_running_jobs=9, polls=PollSchedule(max_polls=0)).tick()
    assert plane.get(second).status is JobStatus.QUEUED


def placed(*phases: str, status: JobStatus = JobStatus.RUNNING, **attempt: Any) -> Job:
    job, _ = start_attempt(make_job(resources=workers(2)), now=100)
    names = tuple(f"{phase} of test" for phase in phases)
    known = replace(job.attempt, cursor={"driver-1": 1}, placed=names, placed_at=100.0, **attempt)
    return replace(job, status=status, attempt=known)


@pytest.mark.parametrize(
    ("job", "now", "left"),
    [
        (start_attempt(make_job(resources=workers(2)), now=100)[0], 200.0, 3),
        (placed("prepare"), 105.0, 2),
        (placed("prepare"), 200.0, 1),
        (placed("prepare", waiting={"train of test": ""}), 200.0, 2),
        (placed("prepare", "train"), 105.0, 2),
        (placed("prepare", "train"), 200.0, 0),
        (placed("prepare", "train", status=JobStatus.EVALUATING, waiting={"evaluate of test": ""}), 200.0, 2),
        (placed("prepare", "train", "evaluate", waiting={"publish of test": ""}), 200.0, 1),
        (placed("prepare", "train", "evaluate", "publish"), 200.0, 0),
        (placed("prepare", status=JobStatus.PAUSING), 200.0, 0),
        (replace(placed(), attempt=replace(placed().attempt, pace=Pace(1, 1.0), placed_at=None)), 200.0, 0),
        (transition(make_job(), JobStatus.PAUSED, now=100)[0], 200.0, 0),
    ],
)
def test_what_a_job_has_still_to_take_is_kept_for_it(job: Job, now: float, left: int) -> None:
    """Ray reports a place as taken only some seconds later."""
    assert len(list_unclaimed_bundles(job, driver={"CPU": 1.0}, now=now)) == left


def answered(status: Any, usage: Any = None, state: Any = None, groups: Any = None) -> Any:
    script = Script()
    for path, answer in (("/api/cluster_status", status), ("/nodes", usage), ("/api/v0/nodes", state)):
        if answer is not None:
            script.on("GET", path, json_answer(answer))
    with serve(script) as url:
        return RayJobs(url, node_groups=groups or {}).list_nodes()


def recorded(name: str) -> Any:
    return json.loads((RECORDED / f"{name}.json").read_text())


def test_ray_tells_its_nodes() -> None:
    [told] = answered(recorded("cluster_status"))
    assert (told.total["CPU"], told.free["CPU"]) == (2.0, 0.0), "a placement group's place is taken"
    assert {*told.total} == {*told.free} == {"CPU", "memory"}, "placement groups add names that come and go"
    assert told.free["memory"] == told.total["memory"] - (100 << 20)


def test_a_report_that_nothing_renews_is_forgotten() -> None:
    clock, script = Clock(), Script()
    script.on("GET", "/api/cluster_status", json_answer(recorded("cluster_status")))
    with serve(script) as url:
        ray = RayJobs(url, clock=clock)
        for seconds, is_told in ((0, True), (59, True), (2, False), (600, False)):
            clock.now += seconds
            assert (ray.list_nodes() is not None) is is_told


def test_names_of_accelerators_survive_rays_spelling(plane: Plane) -> None:
    status = recorded("cluster_status")
    [usage] = status["data"]["clusterStatus"]["loadMetricsReport"]["usageByNode"].values()
    usage |= {"GPU": [0.0, 1.0], "CPU": [0.0, 2.0], "acceleratorType:Amd-Instinct-Mi300X-Oam": [0.0, 1.0]}
    plane.cluster.nodes = answered(status)
    kind = "AMD-Instinct-MI300X-OAM"
    job = plane.submit(resources=workers(1, gpus_per_worker=1, accelerator_type=kind))
    plane.reconciler().tick()
    assert plane.get(job).status is JobStatus.STARTING


GROUPS = {
    "cpu": NodeGroup(max_nodes=3, resources={"CPU": 2, "memory": 16 * GIB}),
    "h100": NodeGroup(max_nodes=1, resources={"CPU": 8, "GPU": 8, "accelerator_type:H100": 1}),
}


def test_groups_that_an_autoscaler_fills_count_with_the_nodes_that_may_come() -> None:
    """Ray's autoscaler v2 describes nodes in words and does not report its groups. The recorded node was started with
    no group, so one is added here."""
    state = recorded("v2_state")
    state["data"]["result"]["result"][0]["labels"]["ray.io/node-group"] = "cpu"
    arguments = (recorded("v2_cluster_status"), recorded("v2_nodes"), state)
    present, *coming = answered(*arguments, GROUPS)
    assert (present.total["CPU"], present.free["CPU"]) == (2.0, 0.0), "a placement group's place is taken"
    assert present.free["memory"] == pytest.approx(present.total["memory"] - (100 << 20), rel=1e-2)
    assert sorted(node.free["CPU"] for node in coming) == [2, 2, 8]
    state["data"]["result"]["result"][0]["state"] = "DEAD"
    assert len(answered(*arguments, GROUPS)) == 4
    assert answered(*arguments) is None, "no groups are known"
    for missing in range(3):
        assert answered(*(None if at == missing else each for at, each in enumerate(arguments)), GROUPS) is None


@pytest.mark.parametrize("name", ["starting", "grows", "v2", "old", "other", "words"])
def test_where_ray_does_not_tell_nothing_is_known(name: str) -> None:
    """An autoscaler enlarges the cluster when an attempt asks for places, so jobs must not wait in the queue for it."""
    grows = recorded("cluster_status")
    grows["data"]["clusterStatus"]["autoscalerReport"]["nodeTypeMapping"] = {"10.0.0.7": "gpu-group"}
    no_report = {"data": {"clusterStatus": None}}
    answers = {
        "starting": recorded("cluster_status_at_start"),
        "grows": grows,
        "v2": no_report,
        "old": None,
        "other": ["what?"],
        "words": {"data": {"clusterStatus": {"loadMetricsReport": {"usageByNode": {"a": {"CPU": ["x", 1]}}}}}},
    }
    assert answered(answers[name]) is None


def possible(nodes: list[Bundle], driver: Bundle, worker: Bundle, number: int) -> bool:
    """The definition: on some node the driver leaves as many places as there are workers."""
    for at, node in enumerate(nodes):
        left = [*nodes[:at], {name: amount - driver.get(name, 0) for name, amount in node.items()}, *nodes[at + 1 :]]
        slots = [min(int(each.get(name, 0) // amount) for name, amount in worker.items() if amount) for each in left]
        if all(node.get(name, 0) >= amount for name, amount in driver.items()) and sum(slots) >= number:
            return True
    return False


def test_nodes_that_are_looked_at_once_for_many_jobs_hold_what_each_would_find() -> None:
    random, found = Random(0), []
    for _ in range(300):
        shapes = [
            {"CPU": random.randint(1, 8), "GPU": random.randint(0, 4), random.choice(("memory", "a100")): 4}
            for _ in range(random.randint(1, 3))
        ]
        nodes = [{**random.choice(shapes), f"node{i}": 1} for i in range(random.randint(1, 8))]
        empty = EmptyNodePlacement(nodes)
        for _ in range(5):
            worker = {"CPU": random.randint(0, 4), "GPU": random.randint(0, 2), random.choice(("memory", "a100")): 1}
            driver, number = {"CPU": random.randint(1, 3)}, random.randint(1, 8)
            bundles = [driver, *[worker] * number]
            found.append(empty.can_place(bundles))
            assert found[-1] == can_place(nodes, bundles) == possible(nodes, driver, worker, number), (nodes, bundles)
    assert 0.2 < sum(found) / len(found) < 0.8
