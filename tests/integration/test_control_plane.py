"""The control plane as a process on a real Ray: killed, restarted, and with cancelled jobs. Only the training is fake.

`planes.py` describes the fake training.
"""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.control_plane.ray import Node, RayJobs, SubmissionStatus
from swiftkv_platform.errors import ClusterUnavailableError
from tests.integration.planes import Plane, RayCluster
from tests.support.fakes.cluster import FakeCluster
from tests.support.rays import free_port
from tests.support.waiting import eventually

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory, ray_cluster: RayCluster) -> Iterator[Plane]:
    plane = Plane(tmp_path_factory.mktemp("plane"), ray_cluster)
    plane.start()
    yield plane
    plane.stop()


def test_a_killed_control_plane_follows_its_jobs_to_their_end(plane: Plane) -> None:
    job_id = plane.submit(wait="killed")
    followed: list[Any] = []
    follower = threading.Thread(target=lambda: followed.extend(plane.client.jobs.events(job_id)))
    follower.start()
    plane.wait_for_step(job_id, 1)

    plane.kill()
    (plane.gates / "killed").touch()  # the run continues, perhaps to its end, unobserved
    plane.start()
    job = plane.client.jobs.wait(job_id, timeout=60)
    follower.join(60)

    assert job.status == "succeeded"
    assert [attempt for attempt, *_ in plane.ledger(job_id)] == ["1"], "the job was submitted exactly once"
    events = list(plane.client.jobs.events(job_id, follow=False))
    assert [event.id for event in followed] == [event.id for event in events], "every event is followed once"
    statuses = [event.data["status"] for event in events if event.type == "status"]
    assert statuses == ["queued", "starting", "running", "evaluating", "succeeded"]
    assert [event.type for event in events].count("metrics") == 2
    assert [point.step for point in plane.client.jobs.metrics(job_id)] == [1, 2, 3]
    assert list(plane.client.jobs.logs(job_id))[-2:] == ["attempt 1", "done"]
    assert job.distilled_model is not None
    assert plane.client.models.get(job.distilled_model).job_id == job_id


def test_a_failed_attempt_is_followed_by_one_that_goes_on_from_its_checkpoint(plane: Plane, tmp_path: Path) -> None:
    job_id = plane.submit(fail="1")
    job = plane.client.jobs.wait(job_id, timeout=60)
    assert (job.status, job.attempt) == ("succeeded", 2)
    first, second = plane.ledger(job_id)
    assert (first[0], first[2]) == ("1", "None")
    assert (second[0], second[2]) == ("2", f"jobs/{job_id}/attempts/1/checkpoints/step-00000001")
    assert "==== attempt 2 ====" in list(plane.client.jobs.logs(job_id, follow=True))
    files = {file.path: file for file in plane.client.jobs.artifacts(job_id)}
    downloaded = plane.client.jobs.download(job_id, "data.bin", tmp_path / "data.bin")
    assert downloaded.stat().st_size == files["data.bin"].size


def test_cancelling_ends_the_process(plane: Plane) -> None:
    job_id = plane.submit(wait="never")
    plane.wait_for_step(job_id, 1)
    [[_, process, _]] = plane.ledger(job_id)
    assert Path(f"/proc/{process}").exists()
    plane.client.jobs.cancel(job_id)
    job = plane.client.jobs.wait(job_id, timeout=60)
    assert job.status == "cancelled"
    eventually(lambda: not Path(f"/proc/{process}").exists(), "the process is gone")
    assert job.error is None


def test_readiness_sees_every_part(plane: Plane) -> None:
    assert plane.client.ready()["checks"] == {"database": "ok", "ray": "ok", "object_store": "ok"}


class FakeWithProcesses(FakeCluster):
    """A fake cluster that ends every submission as its command `exit N` would."""

    def submit(self, submission_id: str, entrypoint: str, env: Any) -> None:
        known = submission_id in self.submissions
        super().submit(submission_id, entrypoint, env)
        if not known and "exit" in entrypoint:
            self.submissions[submission_id].log = "hello\n"
            ended = SubmissionStatus.SUCCEEDED if "exit 0" in entrypoint else SubmissionStatus.FAILED
            self.finish(submission_id, ended, "command failed with exit code 3")


@pytest.fixture(params=["fake", "ray"])
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> RayJobs:
    if request.param == "fake":
        return FakeWithProcesses()
    ray_cluster: RayCluster = request.getfixturevalue("ray_cluster")
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, ray_cluster.env[name])
    return RayJobs(ray_cluster.url)


def ended(cluster: RayJobs, submission_id: str) -> SubmissionStatus:
    def status() -> SubmissionStatus | None:
        found = cluster.get_submission(submission_id)
        assert found is not None
        return found.status if found.status.is_terminal else None

    outcome: SubmissionStatus = eventually(status, f"{submission_id} has ended")
    return outcome


async def followed(cluster: RayJobs, submission_id: str) -> bytes:
    return b"".join([piece async for piece in cluster.follow_logs(submission_id)])


def test_cluster_contract_an_id_starts_one_command(cluster: RayJobs, tmp_path: Path) -> None:
    cluster.check_alive()
    for _ in range(2):
        cluster.submit("once", 'echo hello; test "$WORD" = there && exit 0', {"WORD": "there"})
    assert ended(cluster, "once") is SubmissionStatus.SUCCEEDED
    assert b"hello" in b"".join(cluster.read_logs("once")).splitlines()
    log = b"".join(cluster.read_logs("once"))
    assert b"".join(cluster.read_logs("once", tail_lines=1)) == log.splitlines(keepends=True)[-1]
    assert asyncio.run(followed(cluster, "once")) == log
    cluster.stop("once")
    assert ended(cluster, "once") is SubmissionStatus.SUCCEEDED


def test_cluster_contract_a_failure_says_so(cluster: RayJobs) -> None:
    cluster.submit("failing", "echo hello; exit 3", {})
    assert ended(cluster, "failing") is SubmissionStatus.FAILED
    found = cluster.get_submission("failing")
    assert found is not None
    assert "exit code 3" in found.message


def test_cluster_contract_a_stopped_submission_ends(cluster: RayJobs) -> None:
    cluster.submit("stopped", "sleep 1000", {})
    assert ("stopped", "sleep 1000", None) in {astuple(each) for each in cluster.list_submissions()}
    with pytest.raises(ClusterUnavailableError, match="stopped"):
        cluster.remove("stopped")
    cluster.stop("stopped")
    assert ended(cluster, "stopped") is SubmissionStatus.STOPPED
    [listed] = [each for each in cluster.list_submissions() if each.submission_id == "stopped"]
    assert listed.ended_at is not None
    for _ in range(2):
        cluster.remove("stopped")
    assert cluster.get_submission("stopped") is None
    assert "stopped" not in {each.submission_id for each in cluster.list_submissions()}


def test_cluster_contract_nodes_are_told(cluster: RayJobs) -> None:
    """Ray reports its nodes, and the resources in use, some seconds after it starts."""
    if isinstance(cluster, FakeCluster):
        cluster.nodes = [Node({"CPU": 2.0, "memory": 1e9}, {"CPU": 2.0, "memory": 1e9})]
    [node] = eventually(cluster.list_nodes, "the cluster tells its nodes")
    for name in ("CPU", "memory"):
        assert 0 <= node.free[name] <= node.total[name] > 0


def test_cluster_contract_an_unknown_id_is_none_and_harmless(cluster: RayJobs) -> None:
    assert cluster.get_submission("unknown") is None
    assert b"".join(cluster.read_logs("unknown")) == b""
    assert asyncio.run(followed(cluster, "unknown")) == b""
    cluster.stop("unknown")


def test_a_cluster_that_is_away_is_said_to_be() -> None:
    cluster = RayJobs(f"http://127.0.0.1:{free_port()}")
    for call in (
        cluster.check_alive,
        cluster.list_nodes,
        lambda: cluster.get_submission("x"),
        lambda: cluster.submit("x", "true", {}),
    ):
        with pytest.raises(ClusterUnavailableError, match="SWIFTKV_RAY_DASHBOARD_URL"):
            call()
