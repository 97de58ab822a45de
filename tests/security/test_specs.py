"""Impossible names, and hub organisations and sizes beyond the operator's limits, are refused by field."""

import json
import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from swiftkv_platform.contract.attempts import AttemptRequest
from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.jobs.attempt_events import find_exceeded_limit
from swiftkv_platform.control_plane.jobs.job import Attempt, Job, JobStatus
from swiftkv_platform.control_plane.jobs.service import check_job_limits
from swiftkv_platform.data.source_rows import open_source
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.jobs.worker.setup import get_access
from swiftkv_platform.security.keys import Scope, create_key
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources import HubSource, PathSource, SourceRules, parse_source
from swiftkv_platform.specs import DataSourceSpec, JobSpec
from tests.unit.control_plane.routes.conftest import SPEC, Server, Start, refusal

IMPOSSIBLE = [
    "~nosuchuser/rows",
    "x" * 5000,
    "org/" + "x" * 5000,
    "/" + "/".join(["x" * 200] * 20),
    "/data/" + "x" * 300,
    "s3://bucket/" + "x" * 5000,
    "builtin:" + "x" * 5000,
    "hf://datasets/org/rows",
    "http://127.0.0.1/rows.jsonl",
    "/data/a\0b",
    "org/a\0b",
    "s3://bucket/a\0b",
    "/data/a\nb",
]

FIELDS: dict[str, Any] = {
    "model.name_or_path": lambda name: {"model": {"name_or_path": name}},
    "data.sources[0].name_or_path": lambda name: {"data": {"sources": [{"name_or_path": name}]}},
    "evaluation.tasks[0]": lambda name: {"evaluation": {"tasks": [f"{name}.yaml"]}},
    "evaluation.tasks[0].data_dir": lambda name: {
        "evaluation": {"tasks": [{"name": "builtin:gsm8k", "data_dir": name}]}
    },
}


@pytest.fixture(params=["open", "restricted"])
def server(request: pytest.FixtureRequest, tmp_path: Path, start: Start) -> Server:
    server = start(source_roots=None if request.param == "open" else (str(tmp_path / "acme"),))
    server.client._transport.raise_server_exceptions = False  # type: ignore[attr-defined]
    return server


def test_impossible_names_are_answered_with_422(server: Server) -> None:
    headers = {"content-type": "application/json"}
    for field, sections in FIELDS.items():
        for name in IMPOSSIBLE:
            body = json.dumps({"name": "t", **sections(name)})
            for route in ("/jobs", "/jobs/validate"):
                answer = server.client.post(route, content=body, headers=headers)
                assert (answer.status_code, field.partition("[")[0] in answer.text) == (422, True), (field, name[:20])
    for revision in ("../../other", "a/../../b", "x" * 5000, "\0", "", "/etc/passwd"):
        model = {"name_or_path": "org/teacher", "revision": revision}
        error = refusal(server.client.post("/jobs", json={"name": "t", "model": model}))
        assert error["field"] == "model.revision", "a revision must not leave the cache"
    assert server.get("/jobs")["data"] == []
    with pytest.raises(InvalidInputError, match="cannot be encoded") as caught:
        parse_source("/data/\ud800", field="f")
    assert str(caught.value).isascii()
    assert str(caught.value.value).isascii()


def test_what_cannot_be_opened_is_the_callers_to_put_right(server: Server, tmp_path: Path) -> None:
    """A pipe, which would block the control plane for ever, and a loop of links are refused."""
    root = tmp_path / "acme"
    (root / "teacher").mkdir(parents=True)
    os.mkfifo(root / "rows.jsonl")
    os.mkfifo(root / "teacher" / "config.json")
    (root / "loop.jsonl").symlink_to("loop.jsonl")
    (root / "link.jsonl").symlink_to("/etc/hostname")
    for name in ("rows.jsonl", "loop.jsonl", *(("link.jsonl",) if server.settings.source_roots else ())):
        data = {"sources": [{"name_or_path": str(root / name)}]}
        refusal(server.client.post("/jobs/validate", json={"name": "t", "data": data}))
    model = {"name_or_path": str(root / "teacher")}
    refusal(server.client.post("/jobs/validate", json={"name": "t", "model": model}))


def test_a_name_means_one_thing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "rows").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for name, relative_paths, kind in (
        ("org/rows", True, PathSource),
        ("org/rows", False, HubSource),
        ("org/elsewhere", True, HubSource),
        ("./org/rows", False, PathSource),
        ("org:rows", False, PathSource),
        ("../rows", False, PathSource),
    ):
        assert isinstance(parse_source(name, field="f", relative_paths=relative_paths), kind), name


def test_what_shadows_a_hub_id_is_refused_by_the_worker_where_paths_have_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "rows").mkdir(parents=True)
    (tmp_path / "org" / "rows" / "rows.jsonl").write_text('{"text": "another tenant\'s"}\n')
    monkeypatch.chdir(tmp_path)
    source = DataSourceSpec(name_or_path="org/rows")
    with pytest.raises(InvalidInputError, match="hub id") as caught:
        open_source(source, source_field="data.sources[0]", remote=None, access=SourceRules(()).build_access("acme"))
    assert caught.value.field == "data.sources[0].name_or_path"
    [table] = open_source(source, source_field="data.sources[0]", remote=None)
    assert table.count_rows() == 1


def test_a_tenant_may_be_held_to_organisations_of_the_hub(tmp_path: Path) -> None:
    file = tmp_path / "tenants.yaml"
    file.write_text(
        "default: {hub_organizations: [meta-llama, gpt2]}\ntenants: {research: {hub_organizations: null}}\n"
    )
    policies = TenantPolicies(file)
    acme, research = (
        SourceRules(()).build_access(name, policies.get(name).hub_organizations) for name in ("acme", "research")
    )

    def job(model: str, data: str = "meta-llama/rows") -> JobSpec:
        document = {"name": "t", "model": {"name_or_path": model}, "data": {"sources": [{"name_or_path": data}]}}
        return JobSpec.model_validate(document)

    acme.check_spec(job("meta-llama/Llama-3.1-8B"))
    acme.check_spec(job("gpt2"))
    research.check_spec(job("secret/model", "secret/rows"))
    for closed, field in (
        (job("secret/model"), "model.name_or_path"),
        (job("meta-llama-/x"), "model.name_or_path"),
        (job("gpt2", "secret/rows"), "data.sources[0].name_or_path"),
    ):
        with pytest.raises(InvalidInputError, match="meta-llama, gpt2") as caught:
            acme.check_spec(closed)
        assert caught.value.field == field
    request = AttemptRequest(
        job_id="job_1", attempt=1, spec=job("gpt2"), run_id="r", allowed_roots=(), hub_organizations=("gpt2",)
    )
    with pytest.raises(InvalidInputError, match="may not read"):
        open_source(
            DataSourceSpec(name_or_path="secret/rows"), source_field="d", remote=None, access=get_access(request)
        )


def test_a_spec_that_is_too_long_to_be_listed_with_others_is_refused(server: Server) -> None:
    """It is refused although all its numbers and the body are within bounds."""
    fits, long = ({"tasks": [f"{at}_" + length * "x" for at in range(1000)]} for length in (200, 300))
    for path in ("/jobs/validate", "/jobs"):
        asked = [server.client.post(path, json={**SPEC, "evaluation": tasks}) for tasks in (fits, long)]
        assert asked[0].is_success, asked[0].text
        error = refusal(asked[1])
        assert (error["field"], "262,144 are accepted" in error["message"]) == ("evaluation", True)
    assert len(server.client.get("/jobs").json()["data"]) == 1


LIMITED = Settings(max_workers_per_job=8, max_batch_size=64, max_runtime_s=3600, _env_file=None)


def spec(**fields: Any) -> JobSpec:
    return JobSpec.model_validate({"name": "test", **fields})


def test_a_job_above_a_limit_is_refused() -> None:
    limits = {"max_runtime_s": 3600}
    largest = spec(resources={"num_workers": 8}, training={"batch_size": 64, "micro_batch_size": 8}, limits=limits)
    check_job_limits(largest, LIMITED)
    two = {"learning_rate": [1e-3, 1e-4], "max_concurrent": 2}
    sweep = {"sweep": two, "evaluation": {"max_kl": 1.0}, "resources": {"num_workers": 8}}
    refused: list[tuple[dict[str, Any], str, int]] = [
        ({"resources": {"num_workers": 9}}, "resources.num_workers", 9),
        ({"resources": {"num_workers": {"min": 1, "max": 9}}}, "resources.num_workers", 9),
        ({"training": {"batch_size": 66}}, "training.batch_size", 66),
        ({"training": {"micro_batch_size": 65}}, "training.micro_batch_size", 65),
        ({"limits": {"max_runtime_s": 3601}}, "limits.max_runtime_s", 3601),
        (sweep, "resources.num_workers", 16),
    ]
    for fields, field, value in refused:
        with pytest.raises(InvalidInputError, match="operator's limit") as caught:
            check_job_limits(spec(**fields), LIMITED)
        assert (caught.value.field, caught.value.value) == (field, value)


@pytest.mark.parametrize(("own", "operators", "most"), [(None, 100, 100), (50, 100, 50), (None, None, None)])
def test_the_lower_of_both_maximum_runtimes_counts(own: int | None, operators: int | None, most: int | None) -> None:
    settings = Settings(placement_timeout_s=1e9, max_runtime_s=operators, _env_file=None)
    attempt = Attempt(submission_id="x", submitted_at=1000.0)
    job = Job("job_1", "acme", "ann", spec(limits={"max_runtime_s": own}), 1000, JobStatus.RUNNING, attempt=attempt)
    assert find_exceeded_limit(job, 1000.0 + (most or 1e6), None, settings) is None
    if most is not None:
        reason = find_exceeded_limit(job, 1001.0 + most, None, settings)
        assert reason is not None
        assert reason.code == "max_runtime_exceeded"
        assert str(most) in reason.message


def test_the_operators_wandb_key_writes_only_to_entities_that_are_open(start: Start, tmp_path: Path) -> None:
    """With keys a tenant's jobs write to the key's default entity, unless the operator opens others."""
    keys, file = tmp_path / "keys.json", tmp_path / "tenants.yaml"
    file.write_text("default: {max_queued_jobs: 100}\ntenants: {research: {wandb_entities: [research-team]}}\n")
    tokens = {
        tenant: create_key(keys, name=tenant, tenant=tenant, scopes=frozenset({Scope.ADMIN}))
        for tenant in ("acme", "research")
    }
    server = start("http://swiftkv.example", {"policies": TenantPolicies(file)}, api_keys_file=keys)

    def submit(tenant: str, route: str = "/jobs", **wandb: str) -> httpx.Response:
        body = {**SPEC, "tracking": {"wandb": wandb}}
        return server.client.post(route, json=body, headers={"authorization": f"Bearer {tokens[tenant]}"})

    for route in ("/jobs", "/jobs/validate"):
        for tenant, entity in (("acme", "victim"), ("acme", "research-team"), ("research", "victim")):
            for mode in ("auto", "online"):
                refused = refusal(submit(tenant, route, entity=entity, mode=mode))
                assert (refused["field"], refused["value"]) == ("tracking.wandb.entity", entity)
    assert "one of research-team" in submit("research", entity="victim").json()["detail"]
    accepted = [
        submit("research", entity="research-team"),
        submit("acme"),
        submit("acme", entity=""),
        submit("acme", entity="victim", mode="offline"),
        submit("acme", entity="victim", mode="disabled"),
    ]
    assert [answer.status_code for answer in accepted] == [201] * 5, [answer.text for answer in accepted]
    open_plane = start()
    assert open_plane.client.post("/jobs", json={**SPEC, "tracking": {"wandb": {"entity": "mine"}}}).status_code == 201
