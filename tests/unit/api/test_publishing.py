"""Models copied to where the operator allows it, by jobs that neither train nor measure."""

from __future__ import annotations

import pytest

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.orchestration.ports import SubmissionStatus
from tests.unit.api.conftest import SPEC, Server, Start, refusal

PLACE = "s3://models/default/one"


@pytest.fixture
def opened(start: Start) -> Server:
    """A control plane whose operator opens places of each tenant."""
    return start(publish_targets=("s3://models/{tenant}/", "hf://acme"))


def test_a_model_is_published_by_a_job_that_makes_none(opened: Server) -> None:
    parent = opened.succeed()
    model = parent["distilled_model"]
    traced = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    response = opened.client.post(f"/models/{model}/publish", json={"to": f"{PLACE}/"}, headers=traced)
    assert response.status_code == 201, response.text
    job = response.json()
    assert response.headers["Location"] == f"/jobs/{job['id']}"
    assert (job["name"], job["spec"]["publish"]) == ("publish-test", {"adapter": False, "to": PLACE, "private": True})
    assert opened.client.delete(f"/models/{model}").status_code == 409, "what is being copied is deleted"
    opened.tick()
    request = opened.parts.attempts.read_request(AttemptId(job["id"], 1))
    assert (request.spec.only_publishes, request.traceparent) == (True, traced["traceparent"])
    assert request.parent is not None
    assert request.parent.key == AttemptId(parent["id"], 1).artifact_prefix
    opened.end(job["id"])
    done = opened.get(f"/jobs/{job['id']}")
    assert (done["status"], done["distilled_model"]) == ("succeeded", None)
    assert done["result"] == {"published": {"model": model, "to": PLACE}}
    assert [each["id"] for each in opened.get("/models")["data"]] == [model]


def test_a_publication_that_fails_is_no_success(opened: Server) -> None:
    model = opened.succeed()["distilled_model"]
    job = opened.client.post(f"/models/{model}/publish", json={"to": "hf://acme/one"}).json()["id"]
    opened.tick()
    opened.worker(job).say("error", "refused", code="conflict", retryable=False)
    opened.end(job, SubmissionStatus.FAILED)
    assert opened.get(f"/jobs/{job}")["status"] == "failed"


def test_places_that_the_operator_has_not_opened_are_closed(opened: Server, server: Server) -> None:
    model = opened.succeed()["distilled_model"]
    for place in ("s3://models/other/one", "s3://models/default-2/one", "hf://acme2/one", "/tmp/one"):
        publish = {"to": place}
        for path, body in (
            (f"/models/{model}/publish", publish),
            ("/jobs", {**SPEC, "publish": publish}),
            ("/jobs/validate", {**SPEC, "publish": publish}),
        ):
            error = refusal(opened.client.post(path, json=body))
            assert (error["field"], "s3://models/default" in error["message"]) == ("publish.to", True)
    for place in ("acme/one", "hf://one", "s3://bucket", "hf://acme/../one", "/models/../etc", "hf://a/b/c"):
        refused = opened.client.post("/jobs", json={**SPEC, "publish": {"to": place}})
        assert refusal(refused)["field"] == "publish.to", "it is no place"
    closed = refusal(server.client.post("/jobs", json={**SPEC, "publish": {"to": PLACE}}))
    assert "SWIFTKV_PUBLISH_TARGETS" in closed["message"]
