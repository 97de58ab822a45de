"""`DELETE /jobs/{id}` and `DELETE /models/{id}`: gone at once for callers, held while something needs it."""

from __future__ import annotations

import time

from swiftkv_platform.api.dependencies import retention
from swiftkv_platform.database.retention import SqlRetention
from swiftkv_platform.orchestration.sweeper import Sweeper
from swiftkv_platform.storage.sweeping import StoredObjects
from tests.unit.api.conftest import Server, Start, refusal


def sweep(server: Server) -> dict[str, int]:
    """Objects that a round removes, by kind."""
    rows, objects = SqlRetention(server.parts.database), StoredObjects(server.parts.objects)
    sweeper = Sweeper(rows, objects, retention(server.settings), server.parts.clock)
    removed: dict[str, int] = {}
    for swept in sweeper.round():
        removed[swept.kind] = removed.get(swept.kind, 0) + swept.objects
    return removed


def test_a_deleted_job_is_unknown_and_its_objects_go_with_the_sweeper(server: Server) -> None:
    job, kept = server.succeed(), server.succeed(name="kept")
    assert server.client.delete(f"/jobs/{job['id']}").status_code == 204
    for path in (f"/jobs/{job['id']}", f"/jobs/{job['id']}/events", f"/models/{job['distilled_model']}"):
        assert server.client.get(path).status_code == 404, path
    assert server.client.delete(f"/jobs/{job['id']}").status_code == 404
    assert list(server.parts.objects.list(f"jobs/{job['id']}"))
    assert sweep(server)["deleted"] > 0
    assert list(server.parts.objects.list(f"jobs/{job['id']}")) == []
    assert server.get(f"/models/{kept['distilled_model']}")["job_id"] == kept["id"]
    assert server.get(f"/jobs/{kept['id']}/artifacts")["data"]


def test_a_deleted_model_leaves_a_job_without_artifacts(server: Server) -> None:
    job = server.succeed()
    assert server.client.delete(f"/models/{job['distilled_model']}").status_code == 204
    left = server.get(f"/jobs/{job['id']}")
    assert (left["status"], left["distilled_model"], left["artifact_uri"]) == ("succeeded", None, None)
    sweep(server)
    assert server.get(f"/jobs/{job['id']}/artifacts")["data"] == []
    assert b"trained" in server.client.get(f"/jobs/{job['id']}/logs").content


def test_a_hold_is_a_conflict_that_names_its_holder(server: Server) -> None:
    job = server.succeed()
    model = job["distilled_model"]
    deployment = server.client.post("/deployments", json={"model": model, "route_prefix": "/"}).json()
    for path in (f"/models/{model}", f"/jobs/{job['id']}"):
        assert deployment["id"] in refusal(server.client.delete(path), 409)["message"]
    assert "cancel it" in refusal(server.client.delete(f"/jobs/{server.submit()['id']}"), 409)["message"]


def test_metrics_show_what_the_sweeper_counted(server: Server, start: Start) -> None:
    server.succeed()
    client, deadline = start().client, time.monotonic() + 30
    while 'swiftkv_database_rows{table="jobs"} 1.0' not in (text := client.get("/metrics").text):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert 'swiftkv_store_objects{kind="artifacts"} 2.0' in text
    assert 'swiftkv_store_bytes{kind="logs"}' in text
    assert "swiftkv_orphans_stopped_total 0.0" in text
