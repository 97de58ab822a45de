"""The job routes: submitting, reading, cancelling, pausing, and what a job says and leaves."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.ray import Node, SubmissionStatus
from swiftkv_platform.security.keys import Scope, create_key
from tests.support.fakes.attempt_store import FakeWorker
from tests.unit.control_plane.routes.conftest import SPEC, URL, Server, Start, refusal

JOB_KEYS = {
    *("id", "object", "name", "status", "status_reason", "created_at", "started_at", "finished_at"),
    *(
        "estimated_finish",
        "progress",
        "attempt",
        "spec",
        "distilled_model",
        "result",
        "verdict",
        "tracking",
        "artifact_uri",
    ),
    *("submission_id", "error", "metadata", "tenant", "created_by", "cost", "estimated_cost"),
    *("phase", "phase_progress", "queue_place", "waiting_since"),
}


def test_submitting_answers_with_the_job_and_its_place(server: Server) -> None:
    response = server.client.post("/jobs", json={**SPEC, "metadata": {"team": "blue"}})
    assert response.status_code == 201
    job = response.json()
    assert response.headers["location"] == f"/jobs/{job['id']}"
    assert set(job) == JOB_KEYS
    assert (job["object"], job["status"], job["name"]) == ("distillation.job", "queued", "test")
    assert (job["attempt"], job["submission_id"], job["metadata"]) == (1, None, {"team": "blue"})
    assert job["spec"]["training"]["num_epochs"] == 2
    assert server.get(f"/jobs/{job['id']}") == job


def test_validation_says_what_the_job_would_make_and_stores_nothing(server: Server, teacher: dict[str, str]) -> None:
    body = {"name": "test", "model": teacher, "swiftkv": {"key_value_group_size": 3}}
    estimate = server.client.post("/jobs/validate", json=body).json()
    layers = [estimate[f"num_{kind}_layers"] for kind in ("hidden", "key_value", "kv_cache")]
    assert (layers, estimate["kv_bytes_ratio"]) == ([12, 6, 8], pytest.approx(2 / 3))
    assert estimate["memory_per_worker"] > estimate["parameters"] > estimate["trained_parameters"] > 0
    assert estimate["max_tokens"] is None, "it depends on epochs"
    assert estimate["sources"] == [
        {
            "name_or_path": "builtin:python-stdlib",
            "num_files": None,
            "num_bytes": None,
            "formats": ["text"],
            "unread_columns": [],
            "not_checked": None,
        }
    ]
    assert server.get("/jobs")["data"] == []


def test_lists_are_paged_and_filtered(server: Server) -> None:
    ids = [server.submit(metadata={"n": str(number)})["id"] for number in range(3)]
    page = server.get("/jobs", limit=2)
    assert [job["id"] for job in page["data"]] == [ids[2], ids[1]]
    assert (page["object"], page["has_more"], page["first_id"], page["last_id"]) == ("list", True, ids[2], ids[1])
    rest = server.get("/jobs", limit=2, after=page["last_id"])
    assert ([job["id"] for job in rest["data"]], rest["has_more"]) == ([ids[0]], False)
    assert [job["id"] for job in server.get("/jobs", order="asc")["data"]] == ids
    assert [job["id"] for job in server.get("/jobs", **{"metadata.n": "1"})["data"]] == [ids[1]]
    assert server.get("/jobs", model="org/other")["data"] == []
    server.client.post(f"/jobs/{ids[0]}/cancel")
    assert [job["id"] for job in server.get("/jobs", status="cancelled")["data"]] == [ids[0]]
    empty = server.get("/jobs", status="failed")
    assert (empty["data"], empty["first_id"], empty["last_id"]) == ([], None, None)


def test_changes_of_status_are_idempotent_and_refused_after_the_end(server: Server) -> None:
    job = server.submit()
    for verb, status in (("pause", "paused"), ("resume", "queued"), ("cancel", "cancelled")):
        for _ in range(2):
            response = server.client.post(f"/jobs/{job['id']}/{verb}")
            assert (response.status_code, response.json()["status"]) == (200, status)
    done = server.succeed()
    for verb in ("pause", "resume", "cancel"):
        refused = server.client.post(f"/jobs/{done['id']}/{verb}")
        assert (refused.status_code, refused.json()["code"]) == (409, "illegal_transition")


def test_a_failed_job_says_why(server: Server) -> None:
    job, field = server.submit()["id"], "data.sources[0].name_or_path"
    server.tick()
    server.worker(job).say("error", "no text", code="data_error", field=field, retryable=False)
    server.end(job, SubmissionStatus.FAILED)
    failed = server.get(f"/jobs/{job}")
    cure = failed["error"].pop("cure")
    assert failed["error"] == {"code": "data_error", "message": "no text", "param": field}
    assert cure.startswith(f'{field} is "builtin:python-stdlib": use a valid value. Correct the spec')
    assert list(failed)[:5] == ["id", "object", "name", "status", "error"]
    assert failed["status_reason"] == {"code": "data_error", "message": "no text", "field": field, "value": None}


def stream(server: Server, job_id: str, **headers: str) -> list[tuple[str, dict[str, Any]]]:
    response = server.client.get(f"/jobs/{job_id}/events", headers={"Accept": "text/event-stream", **headers})
    assert response.headers["content-type"].startswith("text/event-stream")
    found = []
    for block in response.text.replace("\r\n", "\n").strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = json.loads(fields["data"])
        assert (fields["id"], fields["event"]) == (data["id"], data["type"])
        found.append((fields["id"], data))
    return found


def test_the_event_stream_of_an_ended_job_ends_and_goes_on_where_it_broke_off(server: Server) -> None:
    job = server.succeed()
    events = server.get(f"/jobs/{job['id']}/events")["data"]
    assert [data for _, data in stream(server, job["id"])] == events
    resumed = stream(server, job["id"], **{"Last-Event-ID": events[1]["id"]})
    assert [data for _, data in resumed] == events[2:]
    headers = {"Accept": "text/event-stream", "Last-Event-ID": "evt_unknown"}
    assert refusal(server.client.get(f"/jobs/{job['id']}/events", headers=headers))["field"] == "after"


def test_metrics_are_a_series_by_step(server: Server) -> None:
    job = server.succeed()
    page = server.get(f"/jobs/{job['id']}/metrics", limit=2)
    assert [(point["step"], point["tokens"], point["loss"]) for point in page["data"]] == [(1, 100, 1.0), (2, 200, 0.5)]
    assert (page["has_more"], page["last_id"]) == (True, "2")
    assert [point["step"] for point in server.get(f"/jobs/{job['id']}/metrics", after="2")["data"]] == [3]


def test_logs_come_from_ray_while_it_runs_and_from_the_store_afterwards(server: Server) -> None:
    job_id = server.submit()["id"]
    assert server.client.get(f"/jobs/{job_id}/logs").text == ""
    server.tick()
    submission = server.cluster.submissions[f"{job_id}-1"]
    submission.log = "one\n"
    assert server.client.get(f"/jobs/{job_id}/logs").text == "one\n"
    server.worker(job_id).say("error", "lost", code="worker_lost", retryable=True)
    server.cluster.finish(f"{job_id}-1", SubmissionStatus.FAILED)
    server.tick()
    server.wait(5.0)  # the delay before a retry
    server.tick()
    server.cluster.submissions[f"{job_id}-2"].log = "two\n"
    server.cluster.submissions.pop(f"{job_id}-1")
    expected = "one\n==== attempt 2 ====\ntwo\n"
    assert server.client.get(f"/jobs/{job_id}/logs").text == expected
    server.client.post(f"/jobs/{job_id}/cancel")
    for _ in range(2):
        server.tick()
    response = server.client.get(f"/jobs/{job_id}/logs", params={"follow": "true"})
    assert response.text == expected
    assert response.headers["content-type"] == "text/plain; charset=utf-8"


def test_checkpoints_tell_their_held_out_kl_and_which_one_is_the_model(server: Server) -> None:
    job = server.submit()["id"]
    server.run(job)
    worker, told = server.worker(job), f"/jobs/{job}/checkpoints"
    worker.checkpoint(0, held_out_kl=0.9, best_step=0, best_kl=0.9)
    worker.checkpoint(2, best_step=2, best_kl=0.25)  # as earlier versions wrote it
    worker.checkpoint(3, best_step=2, best_kl=0.25)
    worker.checkpoint(4, held_out_kl=0.25, best_step=2, best_kl=0.25)  # after a rollback
    found = [(each["step"], each["held_out_kl"]) for each in server.get(told)["data"]]
    assert found == [(0, 0.9), (2, 0.25), (3, None), (4, 0.25)]
    first = server.get(told)["data"][0]
    assert (first["id"], first["size"], len(first["sha256"])) == ("ckpt_00000000_0001", 7, 64)
    assert {each["distilled_model"] for each in server.get(told)["data"]} == {None}
    worker.artifact(training={"step": 2, "reason": "lowest_held_out_kl"})
    server.end(job)
    model = server.get(f"/jobs/{job}")["distilled_model"]
    assert [each["step"] for each in server.get(told)["data"] if each["distilled_model"] == model] == [2]


def test_artifacts_are_listed_and_downloaded(server: Server) -> None:
    assert server.get(f"/jobs/{server.submit()['id']}/artifacts")["data"] == []
    server.client.post(f"/jobs/{server.get('/jobs')['data'][0]['id']}/cancel")
    job = server.succeed()
    files = {file["path"]: file for file in server.get(f"/jobs/{job['id']}/artifacts")["data"]}
    assert set(files) == {"data.bin", "manifest.json"}
    for path, file in files.items():
        assert file["url"] == f"{URL}/jobs/{job['id']}/artifacts/{path}"
        download = server.client.get(file["url"])
        assert len(download.content) == file["size"] == int(download.headers["content-length"])
    manifest = server.client.get(files["manifest.json"]["url"]).content
    assert hashlib.sha256(manifest).hexdigest() == files["manifest.json"]["sha256"]
    page = server.get(f"/jobs/{job['id']}/artifacts", limit=1)
    assert (page["last_id"], page["has_more"]) == ("data.bin", True)
    for path in ("missing", "../attempt.json", "%2e%2e/attempt.json"):
        assert server.client.get(f"/jobs/{job['id']}/artifacts/{path}").status_code == 404


def test_every_recipe_is_listed_with_its_comments_and_a_spec_that_is_accepted_as_such(server: Server) -> None:
    listed = {row["id"]: row for row in server.get("/recipes")["data"]}
    assert sorted(listed) == sorted(path.stem for path in Path("jobs/recipes").glob("*.yaml"))
    demo = listed["builtin-python-5m"]
    assert demo["description"].startswith("The demo's job: the teacher that ships with the package")
    assert "# minutes on two cores" in demo["text"], "comments stay"
    assert "yaml-language-server" not in demo["text"]
    assert yaml.safe_load(demo["text"])["training"]["max_steps"] == demo["spec"]["training"]["max_steps"] == 100


def test_a_retry_is_answered_whatever_has_changed(start: Start, teacher: dict[str, str], tmp_path: Path) -> None:
    """A retry finds its job after source, rules or quota have changed. Each post goes to a restarted control plane."""
    granted = tmp_path / "tenants.yaml"

    def post(spec: dict[str, Any], roots: tuple[str, ...], grants: str = "max_queued_jobs: 1") -> httpx.Response:
        granted.write_text(f"default: {{{grants}}}\n")
        server = start(changed={"policies": TenantPolicies(granted)}, source_roots=roots)
        return server.client.post("/jobs", json=spec, headers={"Idempotency-Key": "once"})

    spec, opened = {**SPEC, "model": teacher}, (str(tmp_path),)
    refusal(post(spec, ()))  # a refusal does not use up the key
    first = post(spec, opened)
    assert first.status_code == 201, first.text
    shutil.rmtree(teacher["name_or_path"])  # the job's source vanishes
    written_out = post({**spec, "training": {"seed": 0}}, opened)
    for again in (written_out, post(spec, ()), post(spec, (), "max_queued_jobs: 0, max_cpus: 0")):  # rules, then quota
        started = {name: again.json()[name] for name in ("status", "status_reason", "queue_place", "submission_id")}
        assert (again.status_code, again.json()) == (201, {**first.json(), **started})
        assert again.headers["Location"] == f"/jobs/{first.json()['id']}"
    other = post({**spec, "model": {"name_or_path": str(tmp_path / "missing")}}, opened)
    assert (refusal(other)["field"], other.json()["code"]) == ("Idempotency-Key", "idempotency_key_reused")


def test_a_key_is_its_tenants_alone(start: Start, tmp_path: Path) -> None:
    """The lookup comes before every other check, so it must not cross tenants."""
    path, ids = tmp_path / "keys.json", set()
    for tenant in ("acme", "other"):
        token = create_key(path, name=tenant, tenant=tenant, scopes=frozenset({Scope.ADMIN}))
        headers = {"Idempotency-Key": "once", "authorization": f"Bearer {token}"}
        server = start("http://swiftkv.example", api_keys_file=path)
        answer = server.client.post("/jobs", json=SPEC, headers=headers)
        assert (answer.status_code, answer.json()["tenant"]) == (201, tenant)
        ids.add(answer.json()["id"])
    assert len(ids) == 2


def test_a_job_that_waits_for_the_cluster_says_for_what_since_when_and_its_place(server: Server) -> None:
    server.cluster.nodes = [Node({"CPU": 2}, {"CPU": 1})]
    second = server.submit(resources={"num_workers": 1})
    first = server.submit(limits={"priority": "high"})
    assert [second["queue_place"], first["queue_place"]] == [1, 1], "the places at submission"
    server.tick()
    rows = {row["id"]: row for row in server.get("/jobs")["data"]}
    assert [rows[job["id"]]["queue_place"] for job in (first, second)] == [1, 2]
    waiting = rows[first["id"]]
    assert waiting == server.get(f"/jobs/{first['id']}")
    assert waiting["status_reason"]["code"] == "waiting_for_resources"
    assert "2 workers with 1 CPU each" in waiting["status_reason"]["message"]
    assert waiting["waiting_since"] >= waiting["created_at"]
    server.cluster.nodes = [Node({"CPU": 2}, {"CPU": 2})]
    server.tick()
    started = server.get(f"/jobs/{first['id']}")
    assert (started["status"], started["queue_place"], started["waiting_since"]) == ("starting", None, None)
    assert server.get(f"/jobs/{second['id']}")["queue_place"] == 1


def test_a_job_that_no_group_of_nodes_can_ever_hold_is_refused(start: Start) -> None:
    groups = {"a100": {"max_nodes": 2, "resources": {"CPU": 16, "GPU": 8, "accelerator_type:A100": 1}}}
    server = start(node_groups=groups)
    server.cluster.nodes = [Node({"CPU": 2}, {"CPU": 2})]
    asked = {"num_workers": 16, "gpus_per_worker": 1}
    server.submit(resources=asked)
    for change in ({"num_workers": 17}, {"accelerator_type": "H100"}, {"gpus_per_worker": 9}, {"cpus_per_worker": 3}):
        spec = {**SPEC, "resources": asked | change}
        for path, body in (("/jobs", spec), ("/jobs/validate", spec)):
            refused = server.client.post(path, json=body)
            assert refusal(refused)["field"] == "resources", change
            assert "(a100: 2 nodes with 16 CPU, 8 GPU" in refused.json()["detail"]
    assert len(server.get("/jobs")["data"]) == 1


def waits(server: Server, job: Any) -> str:
    reason = server.get(f"/jobs/{job['id']}")["status_reason"]
    assert reason["code"] == "waiting_for_turn"
    return str(reason["message"])


def test_a_queued_job_always_says_why_it_waits(server: Server) -> None:
    first, second, third = (server.submit() for _ in range(3))
    assert first["status_reason"]["message"] == "next in the queue; starts within seconds"
    assert waits(server, third) == "position 3 in the queue of its tenant"
    server.tick()
    assert server.get(f"/jobs/{first['id']}")["status_reason"] is None
    assert waits(server, second) == "all job slots are in use (1 of 1)"
    assert waits(server, third) == f"position 2 in the queue of its tenant; {waits(server, second)}"


def test_a_job_on_the_cluster_says_its_phase_and_how_far_that_is(server: Server) -> None:
    job = server.submit()["id"]
    driver, worker = server.run(job), FakeWorker(server.parts.objects, job, writer="worker")

    def told() -> Any:
        server.tick()
        answer = server.get(f"/jobs/{job}")
        progress = answer["phase_progress"]
        return answer["phase"], progress and (*progress.values(),)

    def place(phase: str) -> None:
        worker.say("placement", phase=f"{phase} of test", state="placed")

    assert told() == (None, None)
    place("write")
    assert told() == ("write", None)
    for part, done, eta in (("one", 0, None), ("two", 3, 5.5), ("one", 10, 0.0)):
        worker.say("progress", phase="write", part=part, done=done, total=10, eta_s=eta)
    assert told() == ("write", ("2 parts", 13, 20, 6)), "the parts of workers are added up"
    place("prepare")
    assert told() == ("prepare", None)
    place("train")
    for done in (0, 3):
        worker.say("progress", phase="calibrate", part="layers", done=done, total=32, eta_s=20.2 if done else None)
    assert told() == ("calibrate", ("layers", 3, 32, 21))
    worker.step(1, time=1.0)
    assert told() == ("train", None)
    place("evaluate")
    worker.say("progress", phase="evaluate", part="rewired", done=1, total=1)
    worker.say("progress", phase="evaluate", part="tasks", done=2, total=8)
    driver.step(2, time=2.0)
    assert told() == ("evaluate", ("tasks", 2, 8, None)), "the last part counts; late metrics change nothing"
    worker.say("progress", phase="publish", part="bytes", done=0, total=9)
    assert told() == ("publish", ("bytes", 0, 9, None))
    server.end(job, SubmissionStatus.FAILED)
    assert told() == (None, None), "the attempt is over"


def test_a_job_says_that_no_node_holds_it_or_that_ray_is_away_wherever_it_stands(server: Server) -> None:
    """The queue has not reached the job: the slot is taken, and other jobs go first."""
    server.cluster.nodes = [Node({"CPU": 4}, {"CPU": 4})]
    server.submit()
    server.tick()
    server.submit()
    large = server.submit(resources={"num_workers": 1, "gpus_per_worker": 1})

    def reason() -> Any:
        (row,) = (each for each in server.get("/jobs")["data"] if each["id"] == large["id"])
        assert row["status_reason"] == server.get(f"/jobs/{large['id']}")["status_reason"]
        return row["status_reason"]

    rest = "position 2 in the queue of its tenant; all job slots are in use (1 of 1)"
    nowhere = (
        "waiting for 1 worker with 1 CPU and 1 GPU: the nodes of this cluster cannot hold them, even when idle; "
        "add a node, or request fewer or smaller workers"
    )
    assert reason() == {
        "code": "waiting_for_resources",
        "message": f"{nowhere}; {rest}",
        "field": "resources",
        "value": None,
    }
    server.cluster.away = True
    server.wait(5)
    away = {"code": "cluster_unavailable", "message": f"Ray does not answer; {rest}", "field": None, "value": None}
    assert reason() == away, "the nodes are not known"
    server.cluster.away = False
    server.cluster.nodes = [Node({"CPU": 4, "GPU": 1}, {"CPU": 4, "GPU": 1})]
    server.wait(5)
    assert reason() == {"code": "waiting_for_turn", "message": rest, "field": None, "value": None}


def test_a_job_beyond_its_tenants_quota_says_so(start: Start, tmp_path: Path) -> None:
    (tmp_path / "tenants.yaml").write_text("default: {max_cpus: 3}")
    server = start(changed={"policies": TenantPolicies(tmp_path / "tenants.yaml")}, max_running_jobs=9)
    server.submit()
    server.tick()
    told = waits(server, server.submit())
    assert told == "quota max_cpus reached: with this job the tenant would use 4 of 3"
