"""Jobs that continue from models and checkpoints, and models that are made from checkpoints."""

from typing import Any

import pytest

from swiftkv_platform.contract.attempts import AttemptId
from tests.unit.control_plane.routes.conftest import SPEC, Server, refusal

pytestmark = pytest.mark.slow("starts an application for each test")


def continuing(parent: str, **sections: Any) -> dict[str, Any]:
    training = {"from": parent, **sections.pop("training", {})}
    return {**SPEC, "name": "next", "training": training, **sections}


@pytest.fixture
def parent(server: Server) -> dict[str, Any]:
    """A job that has succeeded, with a checkpoint at step 2."""
    return server.succeed(swiftkv={"num_key_value_layers": 6})


SIX = {"num_key_value_layers": 6}
L6 = {"swiftkv": SIX}
STATE = {**L6, "training": {"load_optimizer_state": True}}


def test_a_job_is_pinned_to_the_checkpoint_that_it_continues_from(server: Server, parent: dict[str, Any]) -> None:
    name = f"{parent['id']}:ckpt_00000002_0001"
    openai = server.get(f"/v1/fine_tuning/jobs/{parent['id']}/checkpoints")["data"][0]
    assert openai["fine_tuned_model_checkpoint"] == name
    job = server.submit(**continuing(f"{parent['id']}:2", **L6))
    assert job["spec"]["training"]["from"] == name
    server.tick()
    request = server.parts.attempts.read_request(AttemptId(job["id"], 1))
    assert request.spec.training.from_ == name
    assert request.parent is not None
    [stored] = server.parts.attempts.list_checkpoints(parent["id"])
    assert (request.parent.kind, request.parent.key, request.parent.step) == ("checkpoint", stored.key, 2)
    assert (request.parent.job_id, request.parent.sha256) == (parent["id"], stored.sha256)


def test_a_job_continues_from_a_model(server: Server, parent: dict[str, Any]) -> None:
    job = server.submit(**continuing(parent["distilled_model"], **L6))
    server.tick()
    request = server.parts.attempts.read_request(AttemptId(job["id"], 1))
    assert request.parent is not None
    assert (request.parent.kind, request.parent.name) == ("model", parent["distilled_model"])
    assert request.parent.key == AttemptId(parent["id"], 1).artifact_prefix


def test_a_job_has_its_parents_form_unless_it_names_another(server: Server) -> None:
    parent = server.succeed(swiftkv={**SIX, "decode_key_value": "shared"})
    job = server.submit(**continuing(parent["distilled_model"], **L6))
    assert job["spec"]["swiftkv"]["decode_key_value"] == "shared"
    own = continuing(parent["distilled_model"], swiftkv={**SIX, "decode_key_value": "own"})
    error = refusal(server.client.post("/jobs", json={**SPEC, **own}))
    assert error["field"] == "swiftkv.decode_key_value"
    assert "use 'shared'" in error["message"]


def test_a_job_has_its_parents_deep_tail_or_another(server: Server) -> None:
    parent = server.succeed(swiftkv={**SIX, "deep_tail": 16})["distilled_model"]
    for given, deep_tail in (({}, 16), ({"deep_tail": 64}, 64)):
        job = server.submit(**continuing(parent, swiftkv={**SIX, **given}))
        assert job["spec"]["swiftkv"]["deep_tail"] == deep_tail


SHAPES = [
    {"prefill_reduction": 0.25, "key_value_group_size": 2, "own_output_projection": True},
    {"num_key_value_layers": 6, "sharing": "mqa", "early_exit": True, "decode_key_value": "shared"},
    {"prefill_layers": [0, 2, 5], "deep_tail": 16},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_a_job_without_teacher_and_shape_has_its_parents(server: Server, shape: dict[str, Any]) -> None:
    parent = server.succeed(swiftkv=shape, model={"name_or_path": "org/other"})["distilled_model"]
    given = {name: value for name, value in continuing(parent).items() if name != "model"}
    response = server.client.post("/jobs", json=given)
    assert response.status_code == 201, response.text
    spec = response.json()["spec"]
    assert spec["model"]["name_or_path"] == "org/other"
    assert {name: spec["swiftkv"][name] for name in shape} == shape


def test_a_job_bypasses_what_its_parent_bypasses(server: Server) -> None:
    parent = server.succeed(swiftkv={"prefill_layers": [0, 2, 5]})["distilled_model"]
    server.submit(**continuing(parent, swiftkv={"prefill_layers": [0, 2, 5]}))
    for swiftkv in (SIX, {"prefill_layers": [0, 3, 5]}):
        error = refusal(server.client.post("/jobs", json=continuing(parent, swiftkv=swiftkv)))
        assert error["field"] == "swiftkv.prefill_layers"
        assert "use [0, 2, 5]" in error["message"]


REFUSALS: list[tuple[str, dict[str, Any], str, str]] = [
    ("nonsense", {}, "training.from", "JOB:STEP"),
    ("mdl_nobodys", L6, "training.from", "there is no such model"),
    ("job_nobodys:2", L6, "training.from", "there is no job job_nobodys"),
    ("{job}:3", L6, "training.from", "it has steps 2"),
    ("{job}:ckpt_00000002_0002", L6, "training.from", "it has steps 2"),
    ("{job}:2", {"swiftkv": {"num_key_value_layers": 5}}, "swiftkv.num_key_value_layers", "use 6"),
    ("{job}:2", {"swiftkv": {**SIX, "key_value_group_size": 2}}, "swiftkv.key_value_group_size", "use 1"),
    ("{job}:2", {"swiftkv": {**SIX, "own_output_projection": True}}, "swiftkv.own_output_projection", "use False"),
    ("{job}:2", {"swiftkv": {"prefill_layers": [0, 2, 5]}}, "swiftkv.prefill_layers", "use None"),
    ("{job}:2", {**L6, "model": {"name_or_path": "org/other"}}, "model.name_or_path", "use 'org/teacher'"),
    (
        "{job}:2",
        {**STATE, "optimizer": {"name": "muon"}},
        "optimizer.name",
        "'adamw', or training.load_optimizer_state",
    ),
    ("{job}:2", {**STATE, "distillation": {"trainable": "tail"}}, "distillation.trainable", "'qkv', or"),
    ("{model}", STATE, "training.load_optimizer_state", "JOB:STEP"),
    ("{model}", {**L6, "training": {"max_steps": 0}}, "training.max_steps", "1 or more"),
    (
        "{model}",
        {**L6, "sweep": {"num_key_value_layers": [5, 6]}, "evaluation": {"max_kl": 1}},
        "training.from",
        "sweep",
    ),
]
"""Parents and sections that do not fit together, with the field and a part of the message of the refusal."""


def test_what_does_not_fit_is_refused(server: Server, parent: dict[str, Any]) -> None:
    for reference, sections, field, said in REFUSALS:
        name = reference.format(job=parent["id"], model=parent["distilled_model"])
        error = refusal(server.client.post("/jobs", json=continuing(name, **sections)))
        assert (error["field"], said in error["message"]) == (field, True), error
    for field, value in (("max_steps", 0), ("load_optimizer_state", True)):
        error = refusal(server.client.post("/jobs", json={**SPEC, "training": {field: value}}))
        assert (error["field"], "training.from" in error["message"]) == (f"training.{field}", True)
    error = refusal(server.client.post("/models", json={"from_checkpoint": parent["distilled_model"]}))
    assert error["field"] == "from_checkpoint"
    error = refusal(server.client.post("/models", json={"from_checkpoint": f"{parent['id']}:7"}))
    assert "it has steps 2" in error["message"]


def test_shares_of_layers_are_compared_where_the_teacher_is_known(server: Server, teacher: dict[str, str]) -> None:
    data = {"sources": [{"name_or_path": "org/data"}]}
    parent = server.succeed(model=teacher, data=data, swiftkv={"num_key_value_layers": 6})
    body = continuing(f"{parent['id']}:2", model=teacher, data=data, swiftkv={"prefill_reduction": 0.5})
    assert server.submit(**body)["spec"]["swiftkv"]["num_key_value_layers"] is None  # half of 12
    error = refusal(server.client.post("/jobs", json={**body, "swiftkv": {"prefill_reduction": 0.25}}))
    assert error["field"] == "swiftkv.num_key_value_layers"


def test_a_job_that_trains_tail_does_not_go_on_as_qkv(server: Server) -> None:
    parent = server.succeed(distillation={"trainable": "tail"})
    error = refusal(server.client.post("/jobs", json=continuing(f"{parent['id']}:2")))
    assert (error["field"], "use 'tail'" in error["message"]) == ("distillation.trainable", True)
    server.submit(**continuing(f"{parent['id']}:2", distillation={"trainable": "all"}))


def test_checkpoints_of_an_attempt_that_goes_on_are_not_relied_on(server: Server) -> None:
    job = server.submit()["id"]
    server.run(job).checkpoint(2)
    assert "checkpoint.keep" in refusal(server.client.post("/jobs", json=continuing(f"{job}:2")))["message"]


def test_what_a_job_reads_is_kept_until_its_end(server: Server, parent: dict[str, Any]) -> None:
    child = server.submit(**continuing(f"{parent['id']}:2", **L6))
    response = server.client.delete(f"/jobs/{parent['id']}")
    assert (response.status_code, f"job {child['id']} reads it" in response.json()["detail"]) == (409, True)
    server.client.post(f"/jobs/{child['id']}/cancel").raise_for_status()
    assert server.client.delete(f"/jobs/{parent['id']}").status_code == 204


def test_a_checkpoint_becomes_a_model_by_a_job_that_trains_nothing(server: Server, parent: dict[str, Any]) -> None:
    body = {"from_checkpoint": f"{parent['id']}:2", "evaluation": {"max_kl": 0.5}, "metadata": {"by": "hand"}}
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    headers = {"Idempotency-Key": "once", "traceparent": traceparent}
    response = server.client.post("/models", json=body, headers=headers)
    assert response.status_code == 201, response.text
    job = response.json()
    assert response.headers["Location"] == f"/jobs/{job['id']}"
    assert (job["name"], job["metadata"]) == ("test-step-2", {"by": "hand"})
    spec, theirs = job["spec"], parent["spec"]
    assert spec["training"] == {**theirs["training"], "from": f"{parent['id']}:ckpt_00000002_0001", "max_steps": 0}
    assert spec["evaluation"] == {**theirs["evaluation"], "max_kl": 0.5}
    assert spec["swiftkv"] == theirs["swiftkv"]
    assert server.parts.jobs.get(job["id"], tenant=job["tenant"]).traceparent == traceparent
    again = server.client.post("/models", json=body, headers=headers).json()
    assert again["id"] == job["id"]


def test_lineage_names_every_ancestor(server: Server, parent: dict[str, Any]) -> None:
    child = server.succeed(**continuing(f"{parent['id']}:2", **L6))
    grandchild = server.succeed(**continuing(child["distilled_model"], **L6))
    lineage = server.get(f"/models/{grandchild['distilled_model']}/lineage")
    assert lineage["ancestors"] == [
        {"name": child["distilled_model"], "job_id": child["id"]},
        {"name": f"{parent['id']}:ckpt_00000002_0001", "job_id": parent["id"]},
    ]
    server.client.delete(f"/jobs/{parent['id']}").raise_for_status()
    assert len(server.get(f"/models/{grandchild['distilled_model']}/lineage")["ancestors"]) == 2
