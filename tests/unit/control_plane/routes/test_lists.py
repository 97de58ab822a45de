"""Every list pages by bytes: no answer is much longer than the limit, and its pages together have everything once."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import event, inspect

from swiftkv_platform.contract.attempts import AttemptId, ManifestFile, new_file_id
from swiftkv_platform.control_plane import responses
from swiftkv_platform.control_plane.access.audit import AuditEntry, AuditTrail
from swiftkv_platform.control_plane.base import PageQuery, new_id
from swiftkv_platform.control_plane.database.tables import (
    Base,
    DeploymentRow,
    FileRow,
    JobRow,
    ModelRow,
    PromotionRow,
)
from swiftkv_platform.control_plane.deployments.rollout import RolloutStatus, add_rollout
from swiftkv_platform.control_plane.jobs.job import Event, JobStatus, MetricPoint
from swiftkv_platform.control_plane.jobs.repository import make_job_columns
from swiftkv_platform.control_plane.jobs.routes import load_recipes
from swiftkv_platform.limits import (
    EVENT_BYTES,
    MANIFEST_BYTES,
    MANIFEST_VALUES,
    MODEL_METADATA_BYTES,
    PAGE_BYTES,
    Limit,
    Scope,
)
from swiftkv_platform.specs.job import RolloutSpec
from swiftkv_platform.storage.artifacts import write_manifest
from tests.support.records import make_job, make_model, store
from tests.unit.control_plane.routes.conftest import Server, Start

pytestmark = pytest.mark.slow("starts an application for each test")

TENANT = "default"
SMALL_PAGE = 1 << 14
LARGE = "x" * 3000
"""Part of each large object; its page has some others."""
NUMBER = 24
LONGEST_PAGE = 1000


def add(server: Server, *rows: Base) -> None:
    with server.parts.database.begin_write() as session:
        session.add_all(rows)


def add_jobs(server: Server) -> list[str]:
    found = []
    for number in range(NUMBER):
        job = store(server.parts.jobs, make_job(tenant=TENANT))
        result = {"samples": [LARGE * (1 + number % 3)]}
        server.parts.jobs.update(replace(job, status=JobStatus.SUCCEEDED, result=result, finished_at=100))
        found.append(job.id)
    return found


def add_job(server: Server) -> str:
    return store(server.parts.jobs, make_job(tenant=TENANT)).id


def add_events(server: Server) -> tuple[str, list[str]]:
    """Messages, and metric events, whose points are stored apart from them."""
    jobs = server.parts.jobs
    job = jobs.get(add_job(server), tenant=TENANT)
    [first] = jobs.list_events(job.id, PageQuery(order="asc")).items
    messages = [Event(new_id("evt"), job.id, 100, "message", "said", data={"text": LARGE}) for _ in range(NUMBER)]
    measured, points = [], []
    for number in range(NUMBER):
        steps = range(number * 10, number * 10 + 10)
        told = [{"step": step, "loss": 1.0, "note": LARGE[:400]} for step in steps]
        measured.append(Event(new_id("evt"), job.id, 100, "metrics", "steps", data={"points": told}))
        points += [MetricPoint(step, 1, 1.0, {"loss": 1.0, "note": LARGE[:400]}) for step in steps]
    jobs.update(job, events=[*messages, *measured], points=points)
    return job.id, [first.id, *(each.id for each in (*messages, *measured))]


def add_points(server: Server) -> tuple[str, list[str]]:
    job = server.parts.jobs.get(add_job(server), tenant=TENANT)
    server.parts.jobs.update(job, points=[MetricPoint(step, 1, 1.0, {"a": LARGE}) for step in range(NUMBER)])
    return job.id, [str(step) for step in range(NUMBER)]


def add_checkpoints(server: Server) -> tuple[str, list[str]]:
    job_id, names = add_job(server), []
    for step in range(80):
        key = f"{AttemptId(job_id, 1).checkpoints_prefix}/step-{step:08d}-{LARGE[:240]}"
        write_manifest(server.parts.objects, key, {}, kind="checkpoint", lineage={"step": step}, metrics={})
        names.append(f"ckpt_{step:08d}_0001")
    return job_id, names


def add_artifact(server: Server) -> tuple[str, list[str]]:
    job = server.parts.jobs.get(add_job(server), tenant=TENANT)
    prefix = AttemptId(job.id, 1).artifact_prefix
    names = [f"{LARGE[:200]}/{LARGE[:200]}/{number:04d}" for number in range(100)]
    files = {name: ManifestFile(size=1, sha256="0" * 64) for name in names}
    write_manifest(server.parts.objects, prefix, files, kind="artifact", lineage={}, metrics={})
    attempt = replace(job.attempt, number=1)
    server.parts.jobs.update(replace(job, attempt=attempt, status=JobStatus.SUCCEEDED, artifact_uri="x", finished_at=1))
    return job.id, ["manifest.json", *names]


def add_tracking(server: Server) -> tuple[str, list[str]]:
    job_id, names = add_job(server), []
    for number in range(60):
        name = f"{LARGE[:200]}/{number:04d}"
        server.parts.objects.put_bytes(f"{AttemptId(job_id, 1).tracking_prefix}/{name}", b"x")
        names.append(f"attempts/1/tracking/{name}")
    return job_id, names


def add_models(server: Server) -> list[str]:
    job = make_job(tenant=TENANT)
    models = [replace(make_model(job), job_id=None, metrics={"note": LARGE}) for _ in range(NUMBER)]
    add(server, *(ModelRow(**vars(model)) for model in models))
    return [model.id for model in models]


def add_aliases(server: Server) -> list[str]:
    [model, *_] = add_models(server)
    names = [f"alias{number:02d}" for number in range(NUMBER)]
    for alias in names:
        for version in range(1, 5):
            changed = {"action": "promote", "model": model, "previous": None, "by": "ann", "created_at": 1}
            add(
                server,
                PromotionRow(
                    id=new_id("prm"), tenant=TENANT, alias=alias, reason=LARGE[:1000], version=version, **changed
                ),
            )
    return names


def add_deployments(server: Server) -> list[str]:
    [model, *_] = add_models(server)
    made = server.client.post("/deployments", json={"model": model})
    assert made.status_code == 201, made.text
    with server.parts.database.begin_read() as session:
        first = session.get_one(DeploymentRow, made.json()["id"])
        columns = {column.key: getattr(first, column.key) for column in inspect(DeploymentRow).columns}
    found = [first.id]
    for number in range(NUMBER):
        found.append(new_id("dep"))
        route = f"/{LARGE[:100]}{number}"
        spec = {**columns["spec"], "id": found[-1], "route_prefix": route}
        state = {**columns["state"], "message": LARGE}
        add(server, DeploymentRow(**{**columns, "id": found[-1], "held_route": route, "spec": spec, "state": state}))
    return found


def add_rollouts(server: Server) -> tuple[str, list[str]]:
    [deployment, *_] = add_deployments(server)
    jobs = [make_job(tenant=TENANT) for _ in range(NUMBER)]
    spec = RolloutSpec(deployment=deployment)
    with server.parts.database.begin_write() as session:
        for job in jobs:
            session.add(JobRow(**make_job_columns(job)))
            session.flush()
            add_rollout(session, spec, job.id, TENANT, "mdl_x", 1.0)
    for job in jobs:
        rollout = server.parts.rollouts.get_rollout(job.id, tenant=TENANT)
        server.parts.rollouts.update(rollout.add_step(RolloutStatus.REFUSED, 2.0, LARGE))
    return deployment, [job.id for job in jobs]


def add_files(server: Server) -> list[str]:
    ids = [new_file_id() for _ in range(100)]
    known = {"tenant": TENANT, "created_by": "ann", "created_at": 1, "purpose": "fine-tune", "size": 9, "rows": 1}
    add(
        server,
        *(
            FileRow(id=each, filename=LARGE[:255], sha256="0" * 64, format="text", columns=["text"], **known)
            for each in ids
        ),
    )
    return ids


def add_audit(server: Server) -> list[str]:
    trail = AuditTrail(server.parts.database)
    ids = [f"{number:04d}" for number in range(100)]
    known = {"request_id": "x", "actor": "ann", "credential": None, "tenant": TENANT, "address": "::1", "method": "GET"}
    for each in ids:
        trail.store_entry(
            AuditEntry(id=each, created_at=1.0, route=LARGE[:200], object=LARGE[:200], status=200, **known)
        )  # type: ignore[arg-type]
    return ids


def of_recipes(_server: Server) -> list[str]:
    return [recipe.id for recipe in load_recipes()]


SEEDS: dict[str, Callable[[Server], list[str] | tuple[str, list[str]]]] = {
    "/jobs": add_jobs,
    "/jobs/{job_id}/events": add_events,
    "/jobs/{job_id}/metrics": add_points,
    "/jobs/{job_id}/checkpoints": add_checkpoints,
    "/jobs/{job_id}/artifacts": add_artifact,
    "/jobs/{job_id}/tracking": add_tracking,
    "/models": add_models,
    "/aliases": add_aliases,
    "/deployments": add_deployments,
    "/deployments/{deployment_id}/rollouts": add_rollouts,
    "/v1/files": add_files,
    "/v1/fine_tuning/jobs": add_jobs,
    "/v1/fine_tuning/jobs/{job_id}/events": add_events,
    "/v1/fine_tuning/jobs/{job_id}/checkpoints": add_checkpoints,
    "/audit": add_audit,
    "/recipes": of_recipes,
}
"""For each list, a function that stores large objects, and returns their ids, after the id of the job or deployment
that they belong to, if there is one."""
CURSORS = {"/jobs/{job_id}/metrics": "step", "/deployments/{deployment_id}/rollouts": "job_id"}
NO_LISTS = {
    "/jobs/{job_id}/logs": "`limit` is a number of bytes of text",
    "/deployments/{deployment_id}/traffic/rows": "pages of objects, newest first only: `test_traffic.py`",
    "/models/{model_id}/compare/{other_id}/rows/{task}": "pages of rows of two jobs: `test_row_comparisons.py`",
}


def test_every_list_is_tested(server: Server) -> None:
    """A route that pages, or answers with a list, without large objects in `SEEDS`, fails here."""
    document = server.client.get("/openapi.json").json()
    lists = set()
    for path, methods in document["paths"].items():
        route = methods.get("get", {})
        names = {each["name"] for each in route.get("parameters", ())}
        content = route.get("responses", {}).get("200", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema", {}).get("$ref", "")
        if "limit" in names or "ListResponse" in schema:
            lists.add(path)
            assert path in NO_LISTS or names >= {"limit", "after", "order"}, f"{path} cannot be paged"
    assert lists == {*SEEDS, *NO_LISTS}


@contextmanager
def loaded_bytes() -> Iterator[list[int]]:
    """Count the bytes of the rows that the database loads within the context."""
    sizes: list[int] = []

    def count(row: Base, _context: Any) -> None:
        sizes.append(len(json.dumps({key: value for key, value in vars(row).items() if key[0] != "_"})))

    event.listen(Base, "load", count, propagate=True)
    try:
        yield sizes
    finally:
        event.remove(Base, "load", count)


@pytest.mark.parametrize("order", ["asc", "desc"])
@pytest.mark.parametrize("route", SEEDS)
def test_pages_are_short_and_together_whole(
    start: Start, monkeypatch: pytest.MonkeyPatch, route: str, order: str
) -> None:
    monkeypatch.setattr("swiftkv_platform.control_plane.database.session.PAGE_BYTES", SMALL_PAGE)
    monkeypatch.setattr(responses, "PAGE_BYTES", Limit(Scope.REQUEST, "bytes of a page", SMALL_PAGE))
    server = start()
    made = SEEDS[route](server)
    owner, ids = made if isinstance(made, tuple) else ("", made)
    path = route.format(job_id=owner, deployment_id=owner)
    found: list[str] = []
    after: dict[str, str] = {}
    pages = 0
    while True:
        with loaded_bytes() as loaded:
            response = server.client.get(path, params={"limit": LONGEST_PAGE, "order": order, **after})
        assert response.status_code == 200, response.text[:500]
        page = response.json()
        cursor = CURSORS.get(route, "path" if "path" in page["data"][0] else "id")
        largest = max(len(json.dumps(item).encode()) for item in page["data"])
        assert len(response.content) <= SMALL_PAGE + largest, f"{len(page['data'])} objects"
        assert sum(loaded) <= 2 * SMALL_PAGE + 2 * max(loaded, default=0), "rows are loaded that are not shown"
        found += [str(item[cursor]) for item in page["data"]]
        assert (str(page["data"][0][cursor]), found[-1]) == (page["first_id"], page["last_id"])
        pages += 1
        if not page["has_more"]:
            break
        after = {"after": page["last_id"]}
    assert sorted(found) == sorted(ids)
    assert len(found) == len(set(found))
    assert pages > 1


def test_an_event_shows_a_bounded_number_of_points(server: Server) -> None:
    """An event that names its first and last step could stand for the whole series."""
    jobs = server.parts.jobs
    job = jobs.get(add_job(server), tenant=TENANT)
    ends = [{"step": 0, "loss": 1.0}, {"step": 20_000, "loss": 1.0}]
    told = [Event(new_id("evt"), job.id, 100, "metrics", "steps", data={"points": ends}) for _ in range(20)]
    points = [MetricPoint(step, 1, 1.0, {"loss": 1.0, "lr": 0.001}) for step in range(20_001)]
    jobs.update(job, events=told, points=points)
    answer = server.client.get(f"/jobs/{job.id}/events", params={"limit": 1000, "order": "desc"})
    assert len(answer.content) < 2 * PAGE_BYTES.default
    assert answer.json()["has_more"]


def test_an_alias_with_a_long_history_shows_its_newest_part(server: Server) -> None:
    [model, *_] = add_models(server)
    known = {
        "tenant": TENANT,
        "alias": "production",
        "action": "promote",
        "model": model,
        "previous": None,
        "by": "ann",
    }
    rows = [
        PromotionRow(id=new_id("prm"), reason="ß" * 1000, created_at=1, version=version, **known)
        for version in range(1, 501)
    ]
    add(server, *rows)
    response = server.client.get("/aliases/production")
    history = response.json()["history"]
    assert len(response.content) < PAGE_BYTES.default + 4000
    assert [change["version"] for change in history] == [*range(501 - len(history), 501)]
    assert response.json()["version"] == 500


LONG_REPORT = {"samples": ["x" * MODEL_METADATA_BYTES.default]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, f"more than {MODEL_METADATA_BYTES.default} bytes"),
        (b"[" * (MANIFEST_BYTES.default + 1), "longer than"),
        (b"[[]," * MANIFEST_VALUES.default, "values"),
    ],
    ids=["report", "bytes", "values"],
)
def test_a_job_whose_report_or_manifest_is_too_large_makes_no_model(
    server: Server, content: bytes | None, said: str
) -> None:
    """Its model's row would be read by every list."""
    job_id = server.submit(fault_tolerance={"max_retries": 0})["id"]
    server.run(job_id).artifact(**LONG_REPORT)
    if content is not None:
        server.parts.objects.put_bytes(f"{AttemptId(job_id, 1).artifact_prefix}/manifest.json", content)
    server.end(job_id)
    job = server.get(f"/jobs/{job_id}")
    assert (job["status"], job["error"]["code"]) == ("failed", "artifact_corrupt")
    assert said in job["error"]["message"]
    assert len(job["error"]["message"]) < 1000
    assert server.get("/models")["data"] == []


def test_an_event_that_is_too_long_becomes_a_warning(server: Server) -> None:
    job_id = server.submit()["id"]
    worker = server.run(job_id)
    worker.say("message", "x" * EVENT_BYTES.default)
    worker.say("message", "goes on")
    server.tick()
    messages = [each["message"] for each in server.get(f"/jobs/{job_id}/events")["data"]]
    assert messages[-1] == "goes on"
    assert f"is longer than {EVENT_BYTES.default} bytes" in messages[-2]
