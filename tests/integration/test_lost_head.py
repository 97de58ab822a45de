"""Ray's head is killed under a running job and restarted: the job continues, and the orphaned attempt is ignored."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.planes import ROOT, Plane, RayCluster
from tests.support.rays import HeadProcess
from tests.support.waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.soak("kills and restarts a head")]


@pytest.fixture
def head() -> Iterator[HeadProcess]:
    process = HeadProcess({"PYTHONPATH": str(ROOT)}, num_cpus=2)
    process.start()
    yield process
    process.remove()


def test_a_job_outlives_the_head_and_its_orphan_changes_nothing(head: HeadProcess, tmp_path: Path) -> None:
    plane = Plane(tmp_path / "plane", RayCluster.of(head.head))
    plane.start()
    try:
        job_id = plane.submit(wait="gate")
        plane.wait_for_step(job_id, 1)
        [[_, orphan, _]] = plane.ledger(job_id)
        head.kill()
        assert Path(f"/proc/{orphan}").exists(), "the entrypoint did not survive the head"
        assert plane.client.jobs.get(job_id).status == "running", "a job failed because Ray is away"
        head.start()

        eventually(lambda: len(plane.ledger(job_id)) == 2, "the second attempt has started", seconds=120)
        (plane.gates / "gate").touch()  # now both attempts continue
        job = plane.client.jobs.wait(job_id, timeout=120)
        assert (job.status, job.attempt, job.distilled_model is not None) == ("succeeded", 2, True)
        [_, second] = plane.ledger(job_id)
        assert second[2] == f"jobs/{job_id}/attempts/1/checkpoints/step-00000001"

        eventually(lambda: not Path(f"/proc/{orphan}").exists(), "the orphan has ended")
        attempts = plane.home / "store" / "jobs" / job_id / "attempts"
        assert (attempts / "1" / "artifact" / "manifest.json").exists(), "the orphan publishes below its own prefix"
        assert plane.client.jobs.get(job_id) == job
        model = plane.client.models.get(str(job.distilled_model))
        manifest = (attempts / "2" / "artifact" / "manifest.json").read_bytes()
        assert (model.attempt, model.manifest_digest) == (2, hashlib.sha256(manifest).hexdigest())  # type: ignore[attr-defined]
        assert set(json.loads(manifest)["files"]) == {"data.bin"}
        assert [model.job_id for model in plane.client.models.list()] == [job_id]
        told = [
            event.data["status"] for event in plane.client.jobs.events(job_id, follow=False) if event.type == "status"
        ]
        assert told[:5] == ["queued", "starting", "running", "queued", "starting"]
        assert told[-1] == "succeeded"
    finally:
        plane.stop()
