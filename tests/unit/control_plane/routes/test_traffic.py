"""Captured traffic of deployments: settings, routes, quota, audit trail and retention."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.contract.traffic import (
    CapturedRequest,
    TrafficDeletion,
    format_utc_day,
    make_part_key,
    make_traffic_prefix,
)
from swiftkv_platform.control_plane.access.audit import AuditFilter, AuditTrail
from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.base import PageQuery
from swiftkv_platform.control_plane.deployments.ray_serve import _make_application
from swiftkv_platform.control_plane.retention import RetentionRepository, RetentionStore, RetentionSweeper
from swiftkv_platform.errors import StorageError
from swiftkv_platform.security.keys import Scope, create_key
from swiftkv_platform.serve.args import ServedConfig
from swiftkv_platform.storage import traffic as traffic_module
from swiftkv_platform.storage.object_store import LocalObjectStore, join_object_key
from swiftkv_platform.storage.traffic import TrafficReader, TrafficStore, encode_row
from tests.unit.control_plane.routes.conftest import Server, Start, StillClock, refusal

KINDS = ["email", "phone", "credit_card", "ip_address", "secret"]
DAY_S = 86400.0


class PartClock:
    """Sets the creation time of new parts."""

    now = 0.0


@pytest.fixture
def part_clock(monkeypatch: pytest.MonkeyPatch) -> PartClock:
    clock = PartClock()
    monkeypatch.setattr("ulid.time.time_ns", lambda: int(clock.now * 1e9))
    return clock


@pytest.fixture
def clock() -> StillClock:
    clock = StillClock()
    clock.now = 20_000 * DAY_S
    return clock


@pytest.fixture
def server(start: Start, clock: StillClock) -> Server:
    return start(changed={"clock": clock})


@pytest.fixture
def model(server: Server) -> str:
    return str(server.succeed()["distilled_model"])


def deploy(server: Server, model: str, **options: Any) -> str:
    response = server.client.post("/deployments", json={"model": model, **options})
    assert response.status_code == 201, response.text
    deployment_id: str = response.json()["id"]
    return deployment_id


def open_traffic(server: Server, deployment_id: str, tenant: str = "default") -> TrafficStore:
    return TrafficStore(server.parts.objects, make_traffic_prefix(tenant, deployment_id))


def make_row(number: int, time: float, **fields: Any) -> CapturedRequest:
    usual = {"path": "/generate", "model": "mdl_1", "prompt": "a", "completion": "b", "finish_reason": "stop"}
    tokens = {"prompt_tokens": 1, "completion_tokens": 1}
    return CapturedRequest(**{"id": f"r{number}", "time": time, **usual, **tokens, **fields})


def capture(server: Server, deployment_id: str, rows: Sequence[CapturedRequest], part_clock: PartClock) -> None:
    """Store rows, a part each, as replicas do."""
    for row in rows:
        part_clock.now = row.time + 5.0
        open_traffic(server, deployment_id).write_part([encode_row(row)], name=make_part_key(format_utc_day(row.time)))


def sweep(server: Server, *, dry_run: bool = False) -> None:
    rows, objects = RetentionRepository(server.parts.database), RetentionStore(server.parts.objects)
    for _ in RetentionSweeper(rows, objects, server.settings, server.parts.clock).run_round(dry_run=dry_run):
        pass


def list_ids(page: dict[str, Any]) -> list[str]:
    return [row["id"] for row in page["data"]]


def test_settings_have_defaults_and_reach_the_replicas(server: Server, model: str) -> None:
    deployment_id = deploy(server, model, capture={"share": 0.25})
    uri = join_object_key(server.parts.objects.uri, make_traffic_prefix("default", deployment_id))
    expected = {"share": 0.25, "retention_days": 30, "max_bytes": 1 << 30, "redact": KINDS, "uri": uri}
    assert server.get(f"/deployments/{deployment_id}")["capture"] == expected
    server.tick()
    [spec] = server.serving.applied[-1]
    [served] = _make_application(spec, {})["deployments"]
    config = ServedConfig.model_validate(served["user_config"])
    assert config.capture is not None
    assert config.capture.model_dump(mode="json") == expected


def test_a_patch_changes_only_the_given_settings(server: Server, model: str) -> None:
    path = f"/deployments/{deploy(server, model, capture={'share': 0.25, 'retention_days': 7})}"
    before = server.get(path)["capture"]
    changed = server.client.patch(path, json={"capture": {"share": 0, "redact": ["email"]}}).json()
    assert changed["capture"] == {**before, "share": 0.0, "redact": ["email"]}
    assert server.client.patch(path, json={"capture": {"redact": []}}).json()["capture"]["redact"] == []
    assert server.client.patch(path, json={"capture": None}).json()["capture"] is None
    assert server.client.patch(path, json={"capture": {"share": 1}}).json()["capture"]["retention_days"] == 30


@pytest.mark.parametrize(
    ("capture_settings", "field", "accepted"),
    [
        ({}, "capture.share", "required"),
        ({"share": 1.5}, "capture.share", "0 to 1"),
        ({"share": 0.5, "retention_days": 0}, "capture.retention_days", "1 to 3,650"),
        ({"share": 0.5, "max_bytes": 1000}, "capture.max_bytes", "1,048,576 to"),
        ({"share": 0.5, "redact": ["names"]}, "capture.redact[0]", "'email', 'phone'"),
        ({"share": 0.5, "redact": "email"}, "capture.redact", "tuple"),
        ({"share": 0.5, "uri": "s3://stolen"}, "capture.uri", "unknown key"),
        ({"share": 0.5, "shares": 1}, "capture.shares", "did you mean share"),
    ],
)
def test_invalid_settings_are_refused_by_their_field(
    server: Server, model: str, capture_settings: dict[str, Any], field: str, accepted: str
) -> None:
    path = f"/deployments/{deploy(server, model, route_prefix='/other')}"
    for refused in (
        server.client.post("/deployments", json={"model": model, "capture": capture_settings}),
        server.client.patch(path, json={"capture": capture_settings}),
    ):
        error = refusal(refused)
        assert error["field"] == field, error
        assert accepted.lower() in error["message"].lower(), error
    assert server.get(path)["capture"] is None


def test_traffic_is_summed_up_by_day(server: Server, model: str, clock: StillClock, part_clock: PartClock) -> None:
    deployment_id = deploy(server, model, capture={"share": 1})
    path = f"/deployments/{deployment_id}/traffic"
    empty = server.get(path)
    assert (empty["bytes"], empty["days"], empty["pending_deletions"]) == (0, [], [])
    capture(server, deployment_id, [make_row(n, clock.now - DAY_S * (n // 2)) for n in range(4)], part_clock)
    found = server.get(path)
    assert found["capture"] == server.get(f"/deployments/{deployment_id}")["capture"]
    assert [(day["day"], day["parts"]) for day in found["days"]] == [
        (format_utc_day(clock.now - DAY_S), 2),
        (format_utc_day(clock.now), 2),
    ]
    assert found["bytes"] == sum(day["bytes"] for day in found["days"]) > 0


def test_rows_are_listed_newest_first_page_by_page(
    server: Server, model: str, clock: StillClock, part_clock: PartClock
) -> None:
    deployment_id = deploy(server, model, capture={"share": 1})
    path = f"/deployments/{deployment_id}/traffic/rows"
    rows = [make_row(n, clock.now - 100 + n, user=("ann", "bob")[n % 2]) for n in range(5)]
    capture(server, deployment_id, rows, part_clock)
    assert server.get(path)["data"][0] == rows[4].model_dump(mode="json")
    page, ids = server.get(path, limit=2), []
    while page["has_more"]:
        ids += list_ids(page)
        page = server.get(path, limit=2, after=page["last_id"])
    assert ids + list_ids(page) == ["r4", "r3", "r2", "r1", "r0"]
    assert list_ids(server.get(path, user="bob")) == ["r3", "r1"]
    assert list_ids(server.get(path, since=rows[1].time, until=rows[3].time)) == ["r2", "r1"]
    error = refusal(server.client.get(path, params={"after": "r1"}))
    assert (error["field"], "use the position that the previous page returned" in error["message"]) == ("after", True)


def test_a_page_is_bounded_in_bytes(server: Server, model: str, clock: StillClock, part_clock: PartClock) -> None:
    deployment_id = deploy(server, model, capture={"share": 1})
    rows = [make_row(n, clock.now - 10 + n, prompt="x" * 300_000) for n in range(4)]
    capture(server, deployment_id, rows, part_clock)
    path = f"/deployments/{deployment_id}/traffic/rows"
    first = server.get(path)
    assert (list_ids(first), first["has_more"]) == (["r3"], True)
    assert list_ids(server.get(path, after=first["last_id"])) == ["r2"]


@pytest.mark.parametrize(
    ("condition", "kept"),
    [
        ({"request_id": "r1"}, ["r3", "r2", "r0"]),
        ({"request_id": "chatcmpl-r1"}, ["r3", "r2", "r0"]),
        ({"request_id": "msg_r1"}, ["r3", "r2", "r0"]),
        ({"user": "ann"}, ["r3", "r1"]),
        ({"before": 20_000 * DAY_S - 98}, ["r3", "r2"]),
        ({"user": "ann", "request_id": "r1"}, ["r3", "r2", "r1", "r0"]),
        ({"request_id": "chatcmpl-"}, ["r3", "r2", "r1", "r0"]),
    ],
)
def test_deleted_rows_are_gone_at_once_and_later_from_storage(
    server: Server,
    model: str,
    clock: StillClock,
    part_clock: PartClock,
    condition: dict[str, Any],
    kept: list[str],
) -> None:
    deployment_id = deploy(server, model, capture={"share": 1})
    path = f"/deployments/{deployment_id}/traffic"
    rows = [make_row(n, clock.now - 100 + n, user=("ann", "bob")[n % 2]) for n in range(4)]
    capture(server, deployment_id, rows, part_clock)
    answer = server.client.delete(path, params=condition)
    assert answer.status_code == 202
    assert server.get(path)["pending_deletions"] == [answer.json()]
    assert answer.json()["requested_at"] == clock.now
    assert list_ids(server.get(f"{path}/rows")) == kept
    clock.now += 3600.0
    sweep(server, dry_run=True)
    assert len(server.get(path)["pending_deletions"]) == 1
    sweep(server)
    assert server.get(path)["pending_deletions"] == []
    assert len(server.get(path)["days"][0:]) == 1
    assert list_ids(server.get(f"{path}/rows")) == kept
    assert [
        row.id
        for row in TrafficReader(server.parts.objects, make_traffic_prefix("default", deployment_id)).iterate_rows()
    ] == kept[::-1]


def test_a_deletion_needs_a_condition(server: Server, model: str) -> None:
    path = f"/deployments/{deploy(server, model, capture={'share': 1})}/traffic"
    error = refusal(server.client.delete(path))
    assert (error["field"], "request_id, user or before" in error["message"]) == ("request_id", True)
    assert server.get(path)["pending_deletions"] == []
    assert server.client.delete(path, params={"user": ""}).status_code == 422
    assert server.client.delete(path, params={"before": "inf"}).status_code == 422


def test_too_many_pending_deletions_are_refused(server: Server, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traffic_module, "MAX_PENDING_DELETIONS", 1)
    path = f"/deployments/{deploy(server, model, capture={'share': 1})}/traffic"
    assert server.client.delete(path, params={"user": "ann"}).status_code == 202
    refused = server.client.delete(path, params={"user": "bob"})
    assert (refused.status_code, "Retry-After" in refused.headers) == (429, True)


def test_reading_rows_and_deleting_them_is_in_the_audit_trail(server: Server, model: str) -> None:
    deployment_id = deploy(server, model, capture={"share": 1})
    path = f"/deployments/{deployment_id}/traffic"
    server.get(path)
    server.get(f"{path}/rows")
    server.client.delete(path, params={"user": "ann"})
    entries = AuditTrail(server.parts.database).list_entries(PageQuery(None, 100, "asc"), AuditFilter()).items
    told = [(entry.method, entry.route, entry.object, entry.status) for entry in entries if "traffic" in entry.route]
    route = "/deployments/{deployment_id}/traffic"
    assert told == [("GET", f"{route}/rows", deployment_id, 200), ("DELETE", route, deployment_id, 202)]


def test_keys_need_the_scopes_of_reading_and_deploying(start: Start, clock: StillClock, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    tokens = {
        scope: create_key(keys, name=scope.name.lower(), tenant="acme", scopes=frozenset({scope}))
        for scope in (Scope.JOBS_READ, Scope.JOBS_WRITE, Scope.DEPLOY, Scope.GENERATE)
    }
    admin = create_key(keys, name="admin", tenant="acme", scopes=frozenset({Scope.ADMIN}))
    server = start("http://swiftkv.example", {"clock": clock}, api_keys_file=keys)
    server.client.headers["authorization"] = f"Bearer {admin}"
    deployment_id = deploy(server, str(server.succeed()["distilled_model"]), capture={"share": 1})
    path = f"/deployments/{deployment_id}/traffic"
    assert server.get(f"/deployments/{deployment_id}")["capture"]["uri"].endswith(f"/traffic/acme/{deployment_id}")
    for scope, token in tokens.items():
        headers = {"authorization": f"Bearer {token}"}
        statuses = [
            server.client.get(path, headers=headers).status_code,
            server.client.get(f"{path}/rows", headers=headers).status_code,
            server.client.delete(path, params={"user": "ann"}, headers=headers).status_code,
        ]
        reads = 200 if scope is Scope.JOBS_READ else 403
        assert statuses == [reads, reads, 202 if scope is Scope.DEPLOY else 403], scope


def test_captured_bytes_count_as_storage_of_the_tenant(start: Start, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    tenants.write_text(json.dumps({"default": {"max_stored_bytes": 6 << 30}}))
    server = start(changed={"policies": TenantPolicies(tenants)}, tenants_file=tenants)
    model = str(server.succeed()["distilled_model"])
    stored = server.get("/quota")["stored_bytes"]
    path = f"/deployments/{deploy(server, model, capture={'share': 1, 'max_bytes': 5 << 30})}"
    assert server.get("/quota")["stored_bytes"] == stored + (5 << 30)
    options = {"model": model, "route_prefix": "/b", "capture": {"share": 1, "max_bytes": 1 << 30}}
    error = refusal(server.client.post("/deployments", json=options), 429)
    assert (error["field"], "captured traffic" in error["message"]) == ("max_stored_bytes", True)
    assert server.client.patch(path, json={"capture": {"max_bytes": 7 << 30}}).status_code == 429
    assert server.client.patch(path, json={"capture": {"share": 0.5}}).status_code == 200
    assert server.client.patch(path, json={"capture": None}).status_code == 200
    assert server.get("/quota")["stored_bytes"] == stored
    assert server.client.post("/deployments", json=options).status_code == 201


def test_turning_capture_off_deletes_what_was_captured(
    server: Server, model: str, clock: StillClock, part_clock: PartClock
) -> None:
    deployment_id = deploy(server, model, capture={"share": 1})
    path = f"/deployments/{deployment_id}"
    capture(server, deployment_id, [make_row(1, clock.now - 10)], part_clock)
    server.client.patch(path, json={"capture": {"share": 0}}).raise_for_status()
    sweep(server)
    assert list_ids(server.get(f"{path}/traffic/rows")) == ["r1"], "a share of 0 keeps it"
    server.client.patch(path, json={"capture": None}).raise_for_status()
    assert list_ids(server.get(f"{path}/traffic/rows")) == []
    # captured again, before retention has removed anything
    server.client.patch(path, json={"capture": {"share": 1}}).raise_for_status()
    capture(server, deployment_id, [make_row(2, clock.now + 1)], part_clock)
    clock.now += 3600.0
    assert list_ids(server.get(f"{path}/traffic/rows")) == ["r2"]
    sweep(server)
    assert list_ids(server.get(f"{path}/traffic/rows")) == ["r2"]
    server.client.patch(path, json={"capture": None}).raise_for_status()
    sweep(server)
    assert [*server.parts.objects.list("traffic")] == []


def test_traffic_goes_with_its_deployment(server: Server, model: str, clock: StillClock, part_clock: PartClock) -> None:
    deployment_id = deploy(server, model, capture={"share": 1})
    kept = deploy(server, model, route_prefix="/kept", capture={"share": 1})
    for each in (deployment_id, kept):
        capture(server, each, [make_row(1, clock.now - 10)], part_clock)
    server.client.delete(f"/deployments/{deployment_id}").raise_for_status()
    server.tick()
    server.serving.forget()
    server.tick()
    assert server.client.get(f"/deployments/{deployment_id}/traffic").status_code == 404
    sweep(server, dry_run=True)
    assert len([*server.parts.objects.list("traffic")]) == 2
    sweep(server)
    [info] = server.parts.objects.list("traffic")
    assert kept in info.key


def test_retention_removes_old_days_and_the_oldest_parts_beyond_the_limit(
    server: Server, model: str, clock: StillClock, part_clock: PartClock
) -> None:
    deployment_id = deploy(server, model, capture={"share": 1, "retention_days": 3, "max_bytes": 1 << 20})
    noise = random.Random(1)
    rows = [
        make_row(n, clock.now - 6 * DAY_S + n * DAY_S / 2 + 100, prompt=noise.randbytes(200_000).hex())
        for n in range(12)
    ]
    capture(server, deployment_id, rows, part_clock)
    sweep(server)
    remaining = open_traffic(server, deployment_id)
    days = remaining.list_days()
    assert days[0].day >= format_utc_day(clock.now - 3 * DAY_S)
    assert sum(day.bytes for day in days) <= 1 << 20
    assert [row.id for row in remaining.iterate_rows()] == [
        f"r{n}" for n in range(12 - len([*remaining.list_parts()]), 12)
    ]
    assert len([*remaining.list_parts()]) >= 3


def test_one_unreadable_deployment_does_not_stop_retention_of_others(
    server: Server, model: str, clock: StillClock, part_clock: PartClock
) -> None:
    first, second = (
        deploy(server, model, capture={"share": 1}),
        deploy(server, model, route_prefix="/b", capture={"share": 1}),
    )
    for each in (first, second):
        capture(server, each, [make_row(1, clock.now - 10, user="ann")], part_clock)
        open_traffic(server, each).delete(TrafficDeletion(requested_at=clock.now, user="ann"))
    [part] = open_traffic(server, first).list_parts()
    server.parts.objects.put_bytes(part.key, b"broken")
    clock.now += 3600.0
    sweep(server)
    assert [*open_traffic(server, second).list_parts()] == []
    assert open_traffic(server, second).list_deletions() == {}
    assert len(open_traffic(server, first).list_deletions()) == 1
    response = server.client.get(f"/deployments/{first}/traffic/rows")
    assert (response.status_code, part.key in response.json()["detail"]) == (503, True)


def test_a_store_that_is_away_is_a_problem_and_changes_nothing_else(
    server: Server, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = f"/deployments/{deploy(server, model, capture={'share': 1})}"

    def fail(*_: object, **__: object) -> None:
        raise StorageError("the store is away")

    monkeypatch.setattr(LocalObjectStore, "put_bytes", fail)
    assert server.client.delete(f"{path}/traffic", params={"user": "ann"}).status_code == 503
    assert server.client.patch(path, json={"capture": None}).status_code == 503
    assert server.get(path)["capture"] is None, "retention deletes the rest"
