"""From traffic to a better student, with real Ray, Ray Serve and object store: requests are captured, a job trains on
them and compares its student with the served one, and the student becomes candidate and then the served model. The
control plane is killed in every step."""

import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from swiftkv_platform.client import Resource
from swiftkv_platform.contract.traffic import make_traffic_prefix
from swiftkv_platform.serve.traffic import WRITE_INTERVAL_S
from swiftkv_platform.storage.object_store import open_store
from swiftkv_platform.storage.traffic import TrafficReader
from tests.integration.planes import Plane, RayCluster
from tests.support.waiting import eventually

pytestmark = [pytest.mark.integration("trains two students and serves them"), pytest.mark.timeout(900)]

NUM_REQUESTS = 500
MODEL = {"name_or_path": "builtin:python-5m", "dtype": "float32"}
SHAPE = {"num_key_value_layers": 6, "key_value_group_size": 2, "calibration_tokens": 1024}
COMMON: dict[str, Any] = {
    "optimizer": {"learning_rate": 1e-3},
    "resources": {"num_workers": 1},
    "tracking": {"wandb": {"mode": "disabled"}},
}
FIRST = {
    **COMMON,
    "model": MODEL,
    "swiftkv": SHAPE,
    "name": "first",
    "data": {"max_length": 128, "sources": [{"name_or_path": "builtin:python-stdlib", "sample_count": 40}]},
    "training": {"max_steps": 4, "batch_size": 4, "micro_batch_size": 2},
    "evaluation": {"max_tokens": 1024},
}


@pytest.fixture
def plane(tmp_path: Path, ray_cluster: RayCluster, serve_port: int) -> Iterator[Plane]:
    settings = {"SWIFTKV_SERVE_URL": f"http://127.0.0.1:{serve_port}", "SWIFTKV_DEPLOYMENTS_SHARE": "0.5"}
    plane = Plane(tmp_path / "plane", ray_cluster, settings, entrypoint=("-m", "swiftkv_platform.jobs.distill"))
    plane.start()
    yield plane
    for deployment in plane.client.deployments.list():
        plane.client.deployments.delete(deployment.id)
    eventually(lambda: not plane.client.deployments.list(), "the deployments are gone", seconds=120.0)
    plane.stop()


def restart(plane: Plane) -> None:
    plane.kill()
    plane.start()


def succeed(plane: Plane, spec: dict[str, Any], *, killed: bool = False) -> str:
    """Run a job to its end, killing the control plane while it trains, and return its id."""
    job = plane.client.jobs.create(spec)
    if killed:
        # A job waits a minute for what replicas have not stored yet.
        eventually(lambda: has_begun(plane, job.id), "the job trains", seconds=240.0)
        restart(plane)
    job = plane.client.jobs.wait(job.id, timeout=400.0)
    assert job.status == "succeeded", job.error
    return job.id


def has_begun(plane: Plane, job_id: str) -> bool:
    job = plane.client.jobs.get(job_id)
    assert job.status != "failed", job.error
    return job.progress is not None and job.progress.step >= 1


def send_requests(url: str) -> set[str]:
    """Send distinct requests, a few at a time, and return the ids of their responses."""

    def send(number: int) -> str:
        prompt = f"def test_release_{number}(self):\n    self.assertEqual(parse_version('{number % 7}.{number}'),"
        # Answers end with the line, since cut-off ones are not trained on.
        body = {"prompt": prompt, "max_tokens": 48, "stop": ["\n"], "temperature": 0.0}
        response = client.post(f"{url}/generate", json=body)
        assert response.status_code == 200, response.text
        return str(response.json()["id"])

    with httpx.Client(timeout=60.0, trust_env=False) as client, ThreadPoolExecutor(8) as threads:
        return set(threads.map(send, range(NUM_REQUESTS)))


def sum_captured(plane: Plane, deployment: str) -> float:
    """Sum the requests that the replicas have stored; none may be lost otherwise."""
    [replica] = plane.client.deployments.metrics(deployment).replicas
    return float(replica["values"].get("captured_requests_total", 0.0))


def test_captured_traffic_becomes_a_better_model_and_can_be_rolled_back(plane: Plane) -> None:
    # 1. serve a student, and capture half of its requests
    first = plane.client.jobs.get(succeed(plane, FIRST)).distilled_model
    assert first is not None
    deployment = plane.client.deployments.create(first, capture={"share": 0.5}, max_replicas=1)
    restart(plane)
    plane.client.deployments.wait_ready(deployment.id)
    answered = send_requests(deployment.url)
    restart(plane)
    assert len(answered) == NUM_REQUESTS
    reader = TrafficReader(open_store(str(plane.home / "store")), make_traffic_prefix("default", deployment.id))

    all_written_at = time.monotonic() + 2 * WRITE_INTERVAL_S

    def is_all_stored() -> bool:
        if time.monotonic() < all_written_at:
            return False
        return sum(1 for _ in reader.iterate_rows()) == sum_captured(plane, deployment.id) > 0

    eventually(is_all_stored, "what was captured is stored", seconds=90.0)
    rows = Counter(row.id for row in reader.iterate_rows())
    assert set(rows.values()) == {1}, "no request is stored twice"
    assert set(rows) <= {each.removeprefix("gen_") for each in answered} | answered
    assert 0.4 * NUM_REQUESTS < len(rows) < 0.6 * NUM_REQUESTS

    # 2. distill the served student on them, and compare both on held-out ones
    section = {"deployment": deployment.id, "share": 0.5, "promote_after_s": 0}
    task = {
        "name": "releases",
        "metric": "likelihood",
        "source": {"name_or_path": f"traffic:{deployment.id}", "since": "1d", "sample_count": 20},
    }
    loop = {
        **COMMON,
        "name": "loop",
        "training": {"from": deployment.id, "max_steps": 30, "batch_size": 4, "micro_batch_size": 4},
        "data": {
            "max_length": 128,
            "validation_fraction": 0.2,
            "sources": [{"name_or_path": f"traffic:{deployment.id}", "since": "1d"}],
        },
        "evaluation": {"max_tokens": 4096, "min_kl_reduction": 0.0, "rows": [task], "max_drop": None},
        "rollout": section,
    }
    job_id = succeed(plane, loop, killed=True)
    job = plane.client.jobs.get(job_id)
    second = plane.client.models.get(str(job.distilled_model))
    assert job.spec["training"]["from"] == first
    assert second.metrics["distilled"]["kl"] < second.metrics["parent"]["kl"]

    [compared] = plane.client.models.compare(first, second.id).tasks
    assert compared["task"] == "releases"
    assert compared["num_rows"] == 20
    flips = plane.client.models.changed_rows(first, second.id, task="releases")
    assert len(flips) == compared["num_worse"] + compared["num_better"] > 0

    # 3. it becomes the candidate, and then the model
    def rollout() -> Resource:
        [found] = plane.client.deployments.rollouts(deployment.id)
        return found

    eventually(lambda: len(rollout().steps) > 1, "the rollout has begun", seconds=60.0)
    restart(plane)
    eventually(lambda: rollout().status in ("promoted", "refused"), "the rollout has ended", seconds=120.0)
    assert [step["status"] for step in rollout().steps] == ["waiting", "candidate", "promoted"]
    plane.client.deployments.wait_ready(deployment.id)
    assert answer(deployment.url)["model"] == second.id

    # 4. and is rolled back
    plane.client.deployments.roll_back(deployment.id, job_id, reason="a test")
    restart(plane)
    plane.client.deployments.wait_ready(deployment.id)
    assert answer(deployment.url)["model"] == first
    assert rollout().status == "rolled_back"


def answer(url: str) -> dict[str, Any]:
    response = httpx.post(f"{url}/generate", json={"prompt": "def release", "max_tokens": 2}, trust_env=False)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found
