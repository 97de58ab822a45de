"""The audit trail: changes and refusals with their callers, stored in the same transaction, and bounded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event, text

from swiftkv_platform.control_plane.access.audit import AuditEntry, AuditFilter, AuditTrail
from swiftkv_platform.control_plane.base import PageQuery
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.retention import RetentionRepository
from swiftkv_platform.local.backup import list_tables
from swiftkv_platform.security.keys import KeyRing, Scope, create_key
from tests.unit.control_plane.routes.conftest import SPEC, Start, StillClock

ADMIN = frozenset({Scope.ADMIN})


@dataclass
class House:
    """A control plane with keys of two tenants and of an operator."""

    start: Start
    keys: Path
    tokens: dict[str, str]
    clock: StillClock

    def plane(self, **settings: Any) -> TestClient:
        chosen = {"api_keys_file": self.keys, "trusted_proxies": ("testclient",), **settings}
        self.server = self.start("https://swiftkv.example", {"clock": self.clock}, **chosen)
        assert isinstance(self.server.client, TestClient)
        return self.server.client

    def as_(self, name: str, **headers: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.tokens[name]}", **headers}

    def entries(self) -> list[AuditEntry]:
        """All entries, oldest first."""
        return list(
            AuditTrail(self.server.parts.database).list_entries(PageQuery(None, 1000, "asc"), AuditFilter()).items
        )

    def told(self, *names: str) -> list[tuple[Any, ...]]:
        """The values of these fields of all entries, oldest first."""
        return [tuple(getattr(each, name) for name in names) for each in self.entries()]


@pytest.fixture
def house(start: Start, tmp_path: Path) -> House:
    keys = tmp_path / "keys.json"
    tokens = {
        "ann": create_key(keys, name="ann", tenant="acme", scopes=ADMIN),
        "bob": create_key(keys, name="bob", tenant="other", scopes=ADMIN),
        "reader": create_key(keys, name="reader", tenant="acme", scopes=frozenset({Scope.JOBS_READ})),
        "root": create_key(keys, name="root", tenant="operators", scopes=ADMIN, operator=True),
    }
    return House(start, keys, tokens, StillClock())


def test_a_change_is_told_with_who_what_and_where(house: House) -> None:
    client, ann = house.plane(), house.as_("ann")
    made = client.post("/jobs", json=SPEC, headers=ann)
    job = made.json()["id"]
    cancelled = client.post(f"/jobs/{job}/cancel", headers=ann)
    client.get(f"/jobs/{job}", headers=ann)
    client.post("/jobs/validate", json=SPEC, headers=ann)
    told = house.told("method", "route", "object", "status")
    assert told == [("POST", "/jobs", job, 201), ("POST", "/jobs/{job_id}/cancel", job, cancelled.status_code)]
    who = ("ann", KeyRing(house.keys).list_keys()[0].id, "acme", house.clock.now)
    assert house.told("actor", "credential", "tenant", "created_at") == [who, who]
    requests = [(answer.headers["X-Request-ID"],) for answer in (made, cancelled)]
    assert house.told("request_id") == requests


def test_asking_is_no_change_with_any_credential(house: House) -> None:
    client = house.plane()
    client.post("/session", json={"api_key": house.tokens["ann"]})
    for headers in (house.as_("ann"), {}):
        for path in ("/jobs/validate", "/deployments/dep_1/generate", "/deployments/dep_1/chat/completions"):
            assert client.post(path, json=SPEC, headers=headers).status_code in (200, 404)
    assert house.told("route") == [("/session",)]


def test_what_was_refused_and_who_signed_in_is_told(house: House) -> None:
    client = house.plane()
    wrong = client.post("/jobs", json={**SPEC, "swiftkv": {"zzz": 1}}, headers=house.as_("ann"))
    nobodys = client.post("/jobs/job_x/cancel", headers=house.as_("bob"))
    forbidden = client.post("/jobs", json=SPEC, headers=house.as_("reader"))
    unknown = client.get("/jobs/job_x", headers={"authorization": "Bearer skv_wrong"})
    assert [answer.status_code for answer in (wrong, nobodys, forbidden, unknown)] == [422, 404, 403, 401]
    assert client.post("/session", json={"api_key": "skv_wrong"}).status_code == 401
    assert client.post("/session", json={"api_key": house.tokens["ann"]}).status_code == 204
    assert client.delete("/session").status_code == client.delete("/session").status_code == 204
    assert house.told("actor", "tenant", "method", "route", "object", "status") == [
        ("ann", "acme", "POST", "/jobs", None, 422),
        ("bob", "other", "POST", "/jobs/{job_id}/cancel", "job_x", 404),
        ("reader", "acme", "POST", "/jobs", None, 403),
        (None, None, "GET", "/jobs/{job_id}", "job_x", 401),
        (None, None, "POST", "/session", None, 401),
        ("ann", "acme", "POST", "/session", None, 204),
        ("ann", "acme", "DELETE", "/session", None, 204),
    ]


def test_the_entry_is_a_part_of_the_change(house: House) -> None:
    """If the entry cannot be written nothing is changed, and the entry takes no transaction of its own."""
    client, ann = house.plane(), house.as_("ann")
    database = house.server.parts.database
    with database.begin_write() as session:
        session.execute(text("CREATE TRIGGER disk BEFORE INSERT ON audit BEGIN SELECT RAISE(ABORT, 'full'); END"))
    outside = TestClient(client.app, base_url="https://swiftkv.example", raise_server_exceptions=False)
    assert outside.post("/jobs", json=SPEC, headers=ann).status_code >= 500
    assert client.get("/jobs", headers=ann).json()["data"] == []
    with database.begin_write() as session:
        session.execute(text("DROP TRIGGER disk"))
    updates: list[str] = []

    def look(*args: Any) -> None:
        if str(args[2]).startswith("UPDATE audit"):
            updates.append(str(args[2]))

    event.listen(database._engine, "before_cursor_execute", look)
    assert client.post("/jobs", json=SPEC, headers=ann).status_code == 201
    assert updates == []
    assert house.told("status")[-1] == (201,)


def test_the_address_is_a_trusted_proxys_word(house: House) -> None:
    for trusted, forwarded, address in (
        ("testclient", "192.0.2.7", "192.0.2.7"),
        ("10.0.0.1", "192.0.2.7", "testclient"),  # the peer is not trusted
        ("testclient", "a\tb'; DROP TABLE audit --" + "x" * 100, None),
    ):
        client = house.plane(trusted_proxies=(trusted,))
        client.post("/jobs", json=SPEC, headers=house.as_("ann", **{"x-forwarded-for": forwarded}))
        found = house.entries()[-1].address
        assert (len(found) <= 64, found.isprintable()) == (True, True)
        assert address in (None, found)


@pytest.mark.soak("160 requests")
def test_a_flood_of_refusals_writes_a_few_entries(house: House) -> None:
    client, wrong = house.plane(), {"authorization": "Bearer skv_wrong"}
    assert {client.get("/jobs", headers=wrong).status_code for _ in range(100)} == {401}
    assert len(house.entries()) == 20
    house.clock.now += 60.0
    client.get("/jobs", headers=wrong)
    assert house.told("left_out") == [(0,)] * 20 + [(80,)]
    client.get("/jobs", headers={**wrong, "x-forwarded-for": "192.0.2.7"})
    assert house.entries()[-1].address == "192.0.2.7", "another address has its own limit"
    throttled = house.plane(requests_per_minute=30)
    for _ in range(60):
        throttled.post("/jobs/job_x/cancel", headers=house.as_("ann"))
    assert house.told("status")[22:] == [(404,)] * 3 + [(429,)] * 20


def test_an_operator_sees_all_tenants_and_others_their_own(house: House, start: Start) -> None:
    client = house.plane()
    for name in ("ann", "bob", "ann"):
        client.post("/jobs", json=SPEC, headers=house.as_(name))
    client.get("/jobs")

    def read(name: str, **params: Any) -> list[tuple[str | None, int]]:
        answer = client.get("/audit", params=params, headers=house.as_(name))
        assert answer.status_code == 200, answer.text
        return [(each["actor"], each["status"]) for each in answer.json()["data"]]

    assert read("root") == [(None, 401), ("ann", 201), ("bob", 201), ("ann", 201)]
    assert read("ann") == [("ann", 201), ("ann", 201)]
    assert read("root", tenant="other") == [("bob", 201)]
    assert client.get("/audit", params={"tenant": "other"}, headers=house.as_("ann")).status_code == 403
    assert client.get("/audit", headers=house.as_("reader")).status_code == 403
    theirs = client.get("/audit", params={"tenant": "other"}, headers=house.as_("root")).json()["last_id"]
    assert client.get("/audit", params={"after": theirs}, headers=house.as_("ann")).status_code == 422
    local = start().client  # without keys the caller is `local`, and sees all
    job = local.post("/jobs", json=SPEC).json()["id"]
    assert local.post("/jobs", json=SPEC, headers={"origin": "https://evil.example"}).status_code == 403
    refused, made = local.get("/audit", params={"limit": 2}).json()["data"]
    assert (made["actor"], made["credential"], made["about"], made["status"]) == ("local", None, job, 201)
    assert (refused["actor"], refused["status"]) == (None, 403)


def test_entries_are_selected_and_paged(house: House) -> None:
    client, jobs, root = house.plane(), [], house.as_("root")
    for _ in range(5):
        jobs.append(client.post("/jobs", json=SPEC, headers=house.as_("ann")).json()["id"])
        house.clock.now += 10.0

    def read(**params: Any) -> list[str]:
        return [each["about"] for each in client.get("/audit", params=params, headers=root).json()["data"]]

    assert read() == jobs[::-1]
    assert read(about=jobs[2]) == [jobs[2]]
    assert read(actor="bob") == read(status=404) == read(route="/models") == []
    assert read(since=1020.0, until=1040.0, order="asc") == jobs[2:4]
    page = client.get("/audit", params={"limit": 3}, headers=root).json()
    assert [each["about"] for each in page["data"]] + read(limit=3, after=page["last_id"]) == jobs[::-1]
    assert page["has_more"]
    for wrong in ({"status": 7}, {"since": "nan"}, {"after": "x"}, {"limit": 0}):
        assert client.get("/audit", params=wrong, headers=root).status_code == 422, wrong


def test_old_entries_are_swept_and_all_are_in_backups(sqlite_database: Database) -> None:
    trail = AuditTrail(sqlite_database)
    for number in range(5):
        caller = ("ann", "key", "acme", "::1")
        trail.store_entry(AuditEntry(f"aud_{number}", float(number), "req", *caller, "POST", "/x", None, 200))
    rows = RetentionRepository(sqlite_database)
    assert rows.remove_old_rows("audit", before=2.0, limit=9, dry_run=True) == 3
    assert rows.remove_old_rows("audit", before=2.0, limit=2, dry_run=False) == 2
    assert rows.remove_old_rows("audit", before=2.0, limit=2, dry_run=False) == 1
    assert [each.id for each in trail.list_entries(PageQuery(None, 9, "asc"), AuditFilter()).items] == [
        "aud_3",
        "aud_4",
    ]
    assert {"audit", "key_uses"} <= {table.name for table in list_tables()}
