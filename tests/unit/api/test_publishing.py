"""Models copied to where the operator allows it, by jobs that neither train nor measure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from swiftkv_platform.contract.attempt_id import AttemptId
from swiftkv_platform.orchestration.ports import SubmissionStatus
from tests.unit.api.conftest import SPEC, Server, control_plane

PLACE = "s3://models/default/one"


@pytest.fixture
def opened(server: Server) -> Iterator[httpx.Client]:
    """The same control plane, whose operator opens places of each tenant."""
    targets = ("s3://models/{tenant}/", "hf://acme")
    settings = server.settings.model_copy(update={"publish_targets": targets})
    with control_plane(server.parts, settings) as client:
        yield client


def test_a_model_is_published_by_a_job_that_makes_none(server: Server, opened: httpx.Client) -> None:
    parent = server.succeed()
    model = parent["distilled_model"]
    traced = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    response = opened.post(f"/models/{model}/publish", json={"to": f"{PLACE}/"}, headers=traced)
    assert response.status_code == 201, response.text
    job = response.json()
    assert response.headers["Location"] == f"/jobs/{job['id']}"
    assert (job["name"], job["spec"]["publish"]) == ("publish-test", {"adapter": False, "to": PLACE, "private": True})
    assert opened.delete(f"/models/{model}").status_code == 409, "what is being copied is deleted"
    server.tick()
    request = server.parts.attempts.read_request(AttemptId(job["id"], 1))
    assert (request.spec.only_publishes, request.traceparent) == (True, traced["traceparent"])
    assert request.parent is not None
    assert request.parent.key == AttemptId(parent["id"], 1).artifact_prefix
    server.cluster.finish(f"{job['id']}-1", SubmissionStatus.SUCCEEDED)
    server.tick()
    done = server.get(f"/jobs/{job['id']}")
    assert (done["status"], done["distilled_model"]) == ("succeeded", None)
    assert done["result"] == {"published": {"model": model, "to": PLACE}}
    assert [each["id"] for each in server.get("/models")["data"]] == [model]


def test_a_publication_that_fails_is_no_success(server: Server, opened: httpx.Client) -> None:
    model = server.succeed()["distilled_model"]
    job = opened.post(f"/models/{model}/publish", json={"to": "hf://acme/one"}).json()
    server.tick()
    server.worker(job["id"]).say("error", "refused", code="conflict", retryable=False)
    server.cluster.finish(f"{job['id']}-1", SubmissionStatus.FAILED)
    server.tick()
    assert server.get(f"/jobs/{job['id']}")["status"] == "failed"


@pytest.mark.parametrize("place", ["s3://models/other/one", "s3://models/default-2/one", "hf://acme2/one", "/tmp/one"])
def test_places_that_the_operator_has_not_opened_are_closed(server: Server, opened: httpx.Client, place: str) -> None:
    model = server.succeed()["distilled_model"]
    publish = {"to": place}
    for refused in (
        opened.post(f"/models/{model}/publish", json=publish),
        opened.post("/jobs", json={**SPEC, "publish": publish}),
        opened.post("/jobs/validate", json={**SPEC, "publish": publish}),
    ):
        assert refused.status_code == 422, refused.text
        error = refused.json()["errors"][0]
        assert error["field"] == "publish.to"
        assert "s3://models/default" in error["message"]


def test_without_settings_every_place_is_closed(server: Server) -> None:
    refused = server.client.post("/jobs", json={**SPEC, "publish": {"to": PLACE}})
    assert "SWIFTKV_PUBLISH_TARGETS" in refused.json()["errors"][0]["message"]


@pytest.mark.parametrize(
    "to", ["acme/one", "hf://one", "s3://bucket", "hf://acme/../one", "/models/../etc", "relative/path", "hf://a/b/c"]
)
def test_what_is_no_place_is_refused(opened: httpx.Client, to: str) -> None:
    spec: dict[str, Any] = {**SPEC, "publish": {"to": to}}
    refused = opened.post("/jobs", json=spec)
    assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, "publish.to")
