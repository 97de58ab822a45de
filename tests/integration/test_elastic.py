"""A job over several nodes of one Ray cluster, which loses a node and gains one."""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from swiftkv_platform.local.ray_head import RayHead
from swiftkv_platform.storage.object_store import open_store
from tests.integration.conftest import environment, wait_for
from tests.support.distill_jobs import events, job_spec, start
from tests.support.ledger import Ledger
from tests.support.rays import NodeProcess, ray_head, ray_node
from tests.support.s3_servers import S3Server
from tests.support.tiny_models import save_teacher

pytestmark = [pytest.mark.integration, pytest.mark.soak("loses and gains nodes, minutes"), pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
BOTH, ALONE = 7, 14
"""Steps at which the cluster changes: from two workers to one, and back to two."""


@pytest.fixture(scope="module")
def head(s3_server: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    """A head without CPUs. Drivers and nodes inherit the environment of this process."""
    own = {
        **s3_server.environment,
        "SWIFTKV_HOME": str(tmp_path_factory.mktemp("swiftkv")),
        "PYTHONPATH": str(ROOT),
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "5",  # when a node is gone; the start is retried
        "RAY_health_check_period_ms": "1000",  # how soon Ray notices a lost node
        "SWIFTKV_RESIZE_INTERVAL_S": "1",
    }
    with environment(own), ray_head(num_cpus=0) as head:
        yield head


@pytest.fixture(scope="module")
def nodes(head: RayHead) -> Iterator[list[NodeProcess]]:
    """Two nodes with one CPU each; the module's last test removes one."""
    with ExitStack() as stack:
        yield [stack.enter_context(ray_node(head, num_cpus=1)) for _ in range(2)]


@pytest.mark.usefixtures("nodes")
def test_a_store_that_only_one_machine_has_is_refused(
    head: RayHead, tiny_teacher: Path, corpus: Path, tmp_path: Path
) -> None:
    store = open_store(str(tmp_path / "store"))

    assert start(store, job_spec(tiny_teacher, corpus, max_steps=1), head.address).wait() == 1

    status, error = events(store)
    assert (status.type, error.type) == ("status", "error")
    assert (error.data["code"], error.data["field"], error.data["retryable"]) == ("invalid_input", "storage_uri", False)
    assert "the cluster has 3 nodes" in error.message


def test_every_sample_is_trained_once_while_nodes_leave_and_come(
    head: RayHead, nodes: list[NodeProcess], s3_server: S3Server, corpus: Path, tmp_path: Path
) -> None:
    """2 -> 1 -> 2 workers over one epoch. The node that leaves is the one that prepared the data."""
    teacher = save_teacher(tmp_path / "teacher", hidden_size=128)  # large enough that Ray does not inline the start
    ledger = Ledger(tmp_path / "ledger")
    ledger.directory.mkdir()
    store = open_store(s3_server.uri("elastic"))
    spec = job_spec(
        teacher,
        corpus,
        max_steps=None,
        training={"num_epochs": 1, "batch_size": 4},
        resources={"num_workers": {"min": 1, "max": 2}},
        metadata={"ledger": str(ledger.directory), "hold": f"2:{BOTH} 1:{ALONE}"},
    )
    job = start(store, spec, head.address, module="tests.support.ledger")

    def done(step: int, world_size: int) -> bool:
        assert job.poll() is None, f"the job ended before step {step}"
        return ledger.reached(step, world_size)

    try:
        wait_for(lambda: done(BOTH, 2))
        leaving = next(node for node in nodes if node.id == ledger.prepared_on)
        leaving.kill()
        wait_for(lambda: done(ALONE, 1))
        with ray_node(head, num_cpus=1):
            assert job.wait() == 0
    finally:
        job.kill()

    plan = next(event.data for event in events(store) if "total_steps" in event.data)
    timeline, last = ledger.timeline(), plan["total_steps"]
    assert sorted(timeline) == list(range(1, last + 1))
    for shares in timeline.values():
        assert sorted(share.rank for share in shares) == list(range(shares[0].world_size))
    world_sizes = {step: timeline[step][0].world_size for step in sorted(timeline)}
    assert [size for size, _ in groupby(world_sizes.values())] == [2, 1, 2]
    points = [point for event in events(store) if event.type == "metrics" for point in event.data["points"]]
    assert {point["step"]: point["world_size"] for point in points} == world_sizes
    trained = {step: [sample for share in shares for sample in share.samples] for step, shares in timeline.items()}
    _assert_each_sample_once(trained, last, plan["data"]["train"]["samples"], teacher)


def _assert_each_sample_once(
    trained: dict[int, list[list[int]]], last: int, num_samples: int, tokenizer_path: Path
) -> None:
    """Assert that each sample was trained once; the last step is filled up from the next epoch."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_path)
    samples = {
        step: [name for each in several for name in re.findall(r"def (add_\d+)\(", tokenizer.decode(each))]
        for step, several in trained.items()
    }
    before = Counter(name for step, names in samples.items() if step < last for name in names)
    assert max(before.values()) == 1
    assert len(before.keys() | set(samples[last])) == num_samples
