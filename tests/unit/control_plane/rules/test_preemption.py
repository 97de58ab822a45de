"""Attempts that end to make room: they find no place, had their turn, or hold what is open to deployments."""

from types import SimpleNamespace
from typing import Any

import pytest

from swiftkv_platform.contract.attempts import AttemptId
from swiftkv_platform.control_plane.base import Page
from swiftkv_platform.control_plane.deployments.repository import Deployment, DeploymentState, DeploymentStatus
from swiftkv_platform.control_plane.jobs.job import JobStatus
from swiftkv_platform.control_plane.ray import Node, SubmissionStatus
from swiftkv_platform.specs.deployment import ResolvedDeployment
from tests.support.fakes.attempt_store import FakeWorker
from tests.unit.control_plane.rules.conftest import Plane
from tests.unit.control_plane.rules.test_orphans import DEADLINE_S, NEEDS, later


@pytest.mark.parametrize(
    ("phase", "slots", "cpus"),
    [("prepare", 1, 2), ("train", 1, 2), ("evaluate", 1, 2), ("publish", 1, 2), ("train", 2, 1), ("evaluate", 2, 1)],
)
def test_a_job_that_finds_no_place_lets_another_tenants_job_pass(
    plane: Plane, phase: str, slots: int, cpus: int
) -> None:
    """The other job lacks either the slot or the places that are reserved for the first."""
    plane.cluster.nodes = [Node({"CPU": 4.0}, {"CPU": 4.0})]
    reconciler = plane.reconciler(max_running_jobs=slots)
    job = plane.submit(resources={"num_workers": 4 // cpus, "cpus_per_worker": cpus})
    reconciler.tick()
    plane.cluster.nodes = [Node({"CPU": 4.0}, {"CPU": 1.0})]
    worker = plane.worker(job)
    worker.say("status", status="running")
    if phase in ("evaluate", "publish"):
        worker.say("placement", phase="train of test", state="placed")
        worker.say("status", status="evaluating")
    worker.say("placement", phase=f"{phase} of test", state="waiting", needs=NEEDS)
    if slots == 1:
        plane.submit(resources={"num_workers": 1})
    larger = plane.submit(tenant="others", resources={"num_workers": 2})
    for _ in range(4):
        later(plane, reconciler, 20)
    assert plane.cluster.started == [f"{job.id}-1"], "its own tenant's job waits, and the larger one finds no place"
    assert plane.get(job).status.is_on_cluster
    other = plane.submit(tenant="third", resources={"num_workers": 1})
    for _ in range(4):
        later(plane, reconciler, 20)
    waits = plane.get(job)
    assert (waits.status, waits.attempt.number, waits.retries) == (JobStatus.QUEUED, 2, 0)
    told = [event.message for event in plane.events(job) if "not_placed" in str(event.data)]
    assert NEEDS in told[0]
    assert plane.reason(job).code == ("not_placed" if slots == 1 else "waiting_for_resources")
    assert plane.cluster.started[1:] == [f"{other.id}-1"]
    assert plane.get(larger).status is JobStatus.QUEUED


@pytest.mark.parametrize("free", [[4.0], None])
def test_a_job_whose_places_come_keeps_its_slot(plane: Plane, free: list[float] | None) -> None:
    """Nodes that an autoscaler may add count as free; if it does not report them, the job waits its time for them."""
    plane.cluster.nodes = free and [Node({"CPU": cpus}, {"CPU": cpus}) for cpus in free]
    reconciler = plane.reconciler()
    job = plane.submit(resources={"num_workers": 2, "cpus_per_worker": 2})
    reconciler.tick()
    worker = plane.worker(job)
    worker.say("placement", phase="train of test", state="placed")
    worker.say("placement", phase="evaluate of test", state="waiting", needs=NEEDS)
    other = plane.submit(tenant="others", resources={"num_workers": 1})
    for seconds in (5, DEADLINE_S - 10):
        later(plane, reconciler, seconds)
    assert plane.get(job).status is not JobStatus.QUEUED
    for seconds in (100, 10, 10):
        later(plane, reconciler, seconds)
    assert (plane.get(job).status is JobStatus.QUEUED) is (free is None)
    assert plane.get(other).status.is_on_cluster is (free is None)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("nodes", [[Node({"CPU": 4.0}, {"CPU": 1.0})], None])
@pytest.mark.parametrize("obeys", [True, False])
def test_a_job_that_has_had_its_turn_lets_another_tenants_job_pass(
    plane: Plane, nodes: list[Node] | None, slots: int, obeys: bool
) -> None:
    """After its turn a job is preempted for another tenant's job, but not for one of its own tenant."""
    plane.cluster.nodes = nodes and [Node({"CPU": 4.0}, {"CPU": 4.0})]
    reconciler = plane.reconciler(max_running_jobs=slots, turn_s=3600)
    job = plane.submit(resources={"num_workers": 3})
    reconciler.tick()
    plane.cluster.nodes = nodes
    worker = plane.worker(job)
    worker.say("placement", phase="train of test", state="placed")
    worker.say("status", status="running")
    if slots == 1:
        plane.submit(resources={"num_workers": 3})
    later(plane, reconciler, 4000)
    assert not plane.store.is_preemption_announced(job.attempt_id), "no other tenant waits"
    other = plane.submit(tenant="others", resources={"num_workers": 2})
    later(plane, reconciler, 1)
    if slots == 2 and nodes is None:
        assert plane.get(other).status.is_on_cluster
        assert not plane.store.is_preemption_announced(job.attempt_id), "a slot was free"
        return
    assert plane.store.is_preemption_announced(job.attempt_id)
    assert plane.get(job).status is JobStatus.RUNNING, "it runs until its checkpoint is complete"
    if obeys:
        worker.checkpoint(1)
        worker.say("error", "told to stop", level="error", code="preempted", retryable=True)
        plane.cluster.finish(f"{job.id}-1", SubmissionStatus.FAILED)
    else:
        later(plane, reconciler, DEADLINE_S + 1)
    plane.cluster.nodes = nodes and [Node({"CPU": 4.0}, {"CPU": 4.0})]
    later(plane, reconciler, 1)
    waits = plane.get(job)
    assert (waits.status, waits.attempt.number, waits.retries) == (JobStatus.QUEUED, 2, 0)
    assert "used its time slice (4001 s), and a job of another tenant is waiting" in plane.reason(job).message
    assert plane.cluster.started[1:] == [f"{other.id}-1"]


@pytest.mark.parametrize(
    ("workers", "share", "free", "tenant", "fewest", "status", "gives_way"),
    [
        (3, 0.5, 0.0, "ann", 1, DeploymentStatus.DEPLOYING, True),
        (3, 0.5, 0.0, "ann", 1, DeploymentStatus.UNHEALTHY, True),
        ({"min": 1, "max": 64}, 0.5, 0.0, "ann", 1, DeploymentStatus.DEPLOYING, True),
        (3, 0.2, 0.0, "ann", 1, DeploymentStatus.DEPLOYING, True),
        (3, 1.0, 0.0, "ann", 1, DeploymentStatus.DEPLOYING, False),  # everything is open: no tenants
        (3, 0.5, 1.0, "ann", 1, DeploymentStatus.DEPLOYING, False),  # a place is free: it is loading
        (3, 0.5, 0.0, "acme", 1, DeploymentStatus.DEPLOYING, False),  # of the jobs' own tenant
        (3, 0.5, 0.0, "ann", 0, DeploymentStatus.DEPLOYING, False),
        (3, 0.5, 0.0, "ann", 1, DeploymentStatus.PENDING, False),  # beyond its tenant's share
        (3, 0.5, 0.0, "ann", 1, DeploymentStatus.RUNNING, False),
    ],
)
def test_a_job_gives_another_tenants_deployment_its_place(
    plane: Plane,
    workers: Any,
    share: float,
    free: float,
    tenant: str,
    fewest: int,
    status: DeploymentStatus,
    gives_way: bool,
) -> None:
    """Jobs may take all that is free before there are deployments, whatever their size and length."""
    spec = ResolvedDeployment(id="dep_1", model="mdl_1", artifact_uri="s3://b/a", min_replicas=fewest)
    deployment = Deployment(spec, tenant, 1, DeploymentState(status))
    plane.cluster.nodes = [Node({"CPU": 4.0}, {"CPU": 4.0})]
    deployments = SimpleNamespace(list_all_deployments=lambda: Page([deployment], has_more=False))
    reconciler = plane.reconciler(max_running_jobs=2, deployments_share=share, parts={"deployments": deployments})
    small, large = (plane.submit(tenant="acme", resources={"num_workers": number}) for number in (1, workers))
    reconciler.tick()
    plane.cluster.nodes = [Node({"CPU": 4.0}, {"CPU": free})]
    for job in (small, large):
        plane.worker(job).say("placement", phase="train of test", state="placed")
        plane.worker(job, writer="worker").say("status", status="running")
    later(plane, reconciler, 50)
    assert not plane.store.is_preemption_announced(large.attempt_id)
    for _ in range(3):
        later(plane, reconciler, 40)
    assert plane.store.is_preemption_announced(large.attempt_id) is gives_way
    assert not plane.store.is_preemption_announced(small.attempt_id), "preempting one job is enough"
    if gives_way:
        plane.cluster.finish(f"{large.id}-1", SubmissionStatus.FAILED)
        later(plane, reconciler, 1)
        assert (plane.get(large).status, plane.get(large).retries) == (JobStatus.QUEUED, 0)
        assert "reserved for deployments, and a deployment of another tenant needs them" in plane.reason(large).message


@pytest.mark.parametrize(
    ("attempt", "seconds", "is_over"), [(1, 3599, False), (1, 3601, True), (2, 3601, False), (2, 7201, True)]
)
def test_a_turn_that_ends_before_training_is_longer_the_next_time(
    plane: Plane, attempt: int, seconds: int, is_over: bool
) -> None:
    """Preparation starts over in each attempt: with turns of one length it might never finish."""
    reconciler = plane.reconciler(turn_s=3600)
    job = plane.submit(resources={"num_workers": 2})
    if attempt == 2:
        reconciler.tick()
        plane.cluster.finish(f"{job.id}-1", SubmissionStatus.STOPPED)
        later(plane, reconciler, 0)
        plane.clock.now += 60
    reconciler.tick()
    worker = FakeWorker(plane.objects, job.id, attempt)
    worker.say("status", status="running")
    worker.say("placement", phase="prepare of test", state="placed")
    plane.submit(tenant="others")
    later(plane, reconciler, seconds)
    assert plane.store.is_preemption_announced(AttemptId(job.id, attempt)) is is_over
