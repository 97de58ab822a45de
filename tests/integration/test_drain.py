"""SIGTERM drains a node for the time set in the Kubernetes manifests rather than Ray's 30 s, and an attempt that trains
on the node checkpoints meanwhile."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from swiftkv_platform.local.ray_head import RayHead, make_auth_environment
from swiftkv_platform.storage.attempt_store import AttemptStore
from swiftkv_platform.storage.object_store import open_store
from tests.integration.conftest import environment, wait_for
from tests.integration.planes import ROOT
from tests.support.distill_jobs import JOB, job_spec, start, starts, wait_for_starts, wait_for_step
from tests.support.rays import ray_head, ray_node

pytestmark = [pytest.mark.integration, pytest.mark.soak("drains nodes, minutes"), pytest.mark.timeout(900)]

DRAIN = "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    """A head with one CPU. Drivers and nodes inherit this process's environment."""
    own = {
        "SWIFTKV_HOME": str(tmp_path_factory.mktemp("swiftkv")),
        "SWIFTKV_SHARED_DIRECTORY": "1",
        "PYTHONPATH": str(ROOT),
    }
    with environment(own), ray_head(num_cpus=1) as head, environment(make_auth_environment(head.token_file)):
        ray.init(address=head.address, log_to_driver=False)
        try:
            yield head
        finally:
            ray.shutdown()


def test_an_attempt_checkpoints_before_its_node_is_cut_off(
    head: RayHead, tiny_teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    """Periodic checkpoints are too rare to happen, so the only one after the start is the drain's; another node
    resumes."""
    store = open_store(str(tmp_path / "store"))
    spec = job_spec(
        tiny_teacher,
        corpus,
        max_steps=100_000,
        resources={"num_workers": 1, "cpus_per_worker": 2},  # more than the head has
        checkpoint={"every_steps": 100_000},
    )
    job = start(store, spec, head.address)
    try:
        with ray_node(head, num_cpus=2, environment={DRAIN: "30"}, drains=True) as node:
            wait_for_step(store, job, 3)
            assert [each.step for each in AttemptStore(store).list_checkpoints(JOB)] == [0]
            node.terminate()
            wait_for(lambda: not node.is_running)
        first, drained = sorted(each.step for each in AttemptStore(store).list_checkpoints(JOB))  # the complete ones
        assert first == 0
        assert drained >= 3
        with ray_node(head, num_cpus=2):
            wait_for_starts(store, job, 2)
        assert starts(store) == [0, drained]
    finally:
        job.kill()
