"""The audit trail: what was changed by whom, and who was refused; with the change or not at all, and bounded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from sqlalchemy import event, text

from swiftkv_platform.api.dependencies import Components
from swiftkv_platform.database.access import SqlAudit
from swiftkv_platform.database.retention import SqlRetention
from swiftkv_platform.database.rows import tables
from swiftkv_platform.database.session import Database
from swiftkv_platform.orchestration.audit import AuditEntry, AuditFilter
from swiftkv_platform.orchestration.ports import Page
from swiftkv_platform.security.keys import KeyRing, Scope, create_key
from swiftkv_platform.settings import Settings
from tests.unit.api.conftest import SPEC, control_plane, make_parts
from tests.unit.orchestration.conftest import Clock

ADMIN = frozenset({Scope.ADMIN})


@dataclass
class House:
    """A control plane with keys of two tenants, and of an operator."""

    parts: Components
    settings: Settings
    tokens: dict[str, str]
    clock: Clock

    @contextmanager
    def plane(self) -> Iterator[TestClient]:
        with control_plane(self.parts, self.settings, "https://swiftkv.example") as client:
            yield client

    def as_(self, name: str, **headers: str) -> dict[str, str]:
        return {"authorization": f"Bearer {self.tokens[name]}", **headers}

    def entries(self) -> list[AuditEntry]:
        """All entries, oldest first."""
        return list(SqlAudit(self.parts.database).list(Page(None, 1000, "asc"), AuditFilter()).items)


@pytest.fixture
def house(tmp_path: Path, empty_database: Path) -> House:
    keys, clock = tmp_path / "keys.json", Clock()
    tokens = {
        "ann": create_key(keys, name="ann", tenant="acme", scopes=ADMIN),
        "bob": create_key(keys, name="bob", tenant="other", scopes=ADMIN),
        "reader": create_key(keys, name="reader", tenant="acme", scopes=frozenset({Scope.JOBS_READ})),
        "root": create_key(keys, name="root", tenant="operators", scopes=ADMIN, operator=True),
    }
    settings = Settings(home=tmp_path, api_keys_file=keys, trusted_proxies=("testclient",), _env_file=None)
    return House(replace(make_parts(tmp_path, empty_database), clock=clock), settings, tokens, clock)


def test_a_change_is_told_with_who_what_and_where(house: House) -> None:
    with house.plane() as client:
        made = client.post("/jobs", json=SPEC, headers=house.as_("ann"))
        job = made.json()["id"]
        cancelled = client.post(f"/jobs/{job}/cancel", headers=house.as_("ann"))
        client.get(f"/jobs/{job}", headers=house.as_("ann"))
        client.post("/jobs/validate", json=SPEC, headers=house.as_("ann"))
    assert house.settings.api_keys_file is not None
    key = KeyRing(house.settings.api_keys_file).read()[0]
    told = [(each.method, each.route, each.object, each.status) for each in house.entries()]
    assert told == [("POST", "/jobs", job, 201), ("POST", "/jobs/{job_id}/cancel", job, cancelled.status_code)]
    for each, answer in zip(house.entries(), (made, cancelled), strict=True):
        assert (each.actor, each.credential, each.tenant) == ("ann", key.id, "acme")
        assert (each.created_at, each.request_id) == (house.clock.now, answer.headers["X-Request-ID"])


def test_what_was_asked_for_and_refused_is_told(house: House) -> None:
    with house.plane() as client:
        wrong = client.post("/jobs", json={**SPEC, "swiftkv": {"zzz": 1}}, headers=house.as_("ann"))
        nobodys = client.post("/jobs/job_x/cancel", headers=house.as_("bob"))
        forbidden = client.post("/jobs", json=SPEC, headers=house.as_("reader"))
        unknown = client.get("/jobs/job_x", headers={"authorization": "Bearer skv_wrong"})
    assert [answer.status_code for answer in (wrong, nobodys, forbidden, unknown)] == [422, 404, 403, 401]
    told = [(each.actor, each.tenant, each.method, each.route, each.object, each.status) for each in house.entries()]
    assert told == [
        ("ann", "acme", "POST", "/jobs", None, 422),
        ("bob", "other", "POST", "/jobs/{job_id}/cancel", "job_x", 404),
        ("reader", "acme", "POST", "/jobs", None, 403),
        (None, None, "GET", "/jobs/{job_id}", "job_x", 401),
    ]


def test_the_entry_is_a_part_of_the_change(house: House) -> None:
    """Where the entry cannot be written, nothing is changed; and no transaction of its own is needed."""
    with house.plane() as client:
        with house.parts.database.writing() as session:
            session.execute(text("CREATE TRIGGER disk BEFORE INSERT ON audit BEGIN SELECT RAISE(ABORT, 'full'); END"))
        refused = TestClient(client.app, base_url="https://swiftkv.example", raise_server_exceptions=False).post(
            "/jobs", json=SPEC, headers=house.as_("ann")
        )
        assert refused.status_code >= 500
        assert client.get("/jobs", headers=house.as_("ann")).json()["data"] == []
        with house.parts.database.writing() as session:
            session.execute(text("DROP TRIGGER disk"))
        updates: list[str] = []

        def look(*args: Any) -> None:
            if str(args[2]).startswith("UPDATE audit"):
                updates.append(str(args[2]))

        event.listen(house.parts.database._engine, "before_cursor_execute", look)
        assert client.post("/jobs", json=SPEC, headers=house.as_("ann")).status_code == 201
        assert updates == []
    assert [each.status for each in house.entries()][-1] == 201


def test_signing_in_and_out_is_told(house: House) -> None:
    with house.plane() as client:
        assert client.post("/session", json={"api_key": "skv_wrong"}).status_code == 401
        assert client.post("/session", json={"api_key": house.tokens["ann"]}).status_code == 204
        assert client.delete("/session").status_code == 204
        assert client.delete("/session").status_code == 204
    told = [(each.actor, each.method, each.route, each.status) for each in house.entries()]
    assert told == [
        (None, "POST", "/session", 401),
        ("ann", "POST", "/session", 204),
        ("ann", "DELETE", "/session", 204),
    ]


@pytest.mark.parametrize(
    ("trusted", "forwarded", "address"),
    [
        (("testclient",), "192.0.2.7", "192.0.2.7"),
        (("10.0.0.1",), "192.0.2.7", "testclient"),  # anyone's word
        (("testclient",), "a\tb'; DROP TABLE audit --" + "x" * 100, None),
    ],
)
def test_the_address_is_a_trusted_proxys_word(
    house: House, trusted: tuple[str, ...], forwarded: str, address: str | None
) -> None:
    house.settings = house.settings.model_copy(update={"trusted_proxies": trusted})
    with house.plane() as client:
        client.post("/jobs", json=SPEC, headers=house.as_("ann", **{"x-forwarded-for": forwarded}))
    [entry] = house.entries()
    assert len(entry.address) <= 64
    assert entry.address.isprintable()
    if address is not None:
        assert entry.address == address


def test_a_flood_of_refusals_writes_a_few_entries(house: House) -> None:
    with house.plane() as client:
        wrong = {"authorization": "Bearer skv_wrong"}
        statuses = {client.get("/jobs", headers=wrong).status_code for _ in range(300)}
        assert statuses == {401}
        assert len(house.entries()) == 20
        house.clock.now += 60.0
        client.get("/jobs", headers=wrong)
        assert [each.left_out for each in house.entries()] == [0] * 20 + [280]
        client.get("/jobs", headers={**wrong, "x-forwarded-for": "192.0.2.7"})
        assert house.entries()[-1].address == "192.0.2.7", "another address has room of its own"


def test_a_key_that_is_throttled_writes_no_more_than_it_changes(house: House) -> None:
    house.settings = house.settings.model_copy(update={"requests_per_minute": 30})
    with house.plane() as client:
        for _ in range(100):
            client.post("/jobs/job_x/cancel", headers=house.as_("ann"))
    assert [each.status for each in house.entries()] == [404] * 3 + [429] * 20


def test_an_operator_sees_all_tenants_and_others_their_own(house: House) -> None:
    with house.plane() as client:
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


def test_entries_are_selected_and_paged(house: House) -> None:
    with house.plane() as client:
        jobs = []
        for _ in range(5):
            jobs.append(client.post("/jobs", json=SPEC, headers=house.as_("ann")).json()["id"])
            house.clock.now += 10.0
        root = house.as_("root")
        began = 1000.0

        def read(**params: Any) -> list[str]:
            return [each["about"] for each in client.get("/audit", params=params, headers=root).json()["data"]]

        assert read() == jobs[::-1]
        assert read(about=jobs[2]) == [jobs[2]]
        assert read(actor="bob") == read(status=404) == read(route="/models") == []
        assert read(since=began + 20, until=began + 40, order="asc") == jobs[2:4]
        found, after = [], None
        while True:
            page = client.get("/audit", params={"limit": 2, **({"after": after} if after else {})}, headers=root).json()
            found += [each["about"] for each in page["data"]]
            after = page["last_id"]
            if not page["has_more"]:
                break
        assert found == jobs[::-1]
        for wrong in ({"status": 7}, {"since": "nan"}, {"after": "x"}, {"limit": 0}):
            assert client.get("/audit", params=wrong, headers=root).status_code == 422, wrong


def test_without_keys_the_local_caller_is_told_and_sees_all(tmp_path: Path, empty_database: Path) -> None:
    settings = Settings(home=tmp_path, _env_file=None)
    with control_plane(make_parts(tmp_path, empty_database), settings) as client:
        job = client.post("/jobs", json=SPEC).json()["id"]
        assert client.post("/jobs", json=SPEC, headers={"origin": "https://evil.example"}).status_code == 403
        refused, made = client.get("/audit").json()["data"]
    assert (made["actor"], made["credential"], made["about"], made["status"]) == ("local", None, job, 201)
    assert (refused["actor"], refused["status"]) == (None, 403)


def test_old_entries_are_swept_and_all_are_in_backups(database: Database) -> None:
    trail = SqlAudit(database)
    for number in range(5):
        caller = ("ann", "key", "acme", "::1")
        trail.store(AuditEntry(f"aud_{number}", float(number), "req", *caller, "POST", "/x", None, 200))
    rows = SqlRetention(database)
    assert rows.remove_audit(before=2.0, limit=9, dry_run=True) == 3
    assert rows.remove_audit(before=2.0, limit=2, dry_run=False) == 2
    assert rows.remove_audit(before=2.0, limit=2, dry_run=False) == 1
    assert [each.id for each in trail.list(Page(None, 9, "asc"), AuditFilter()).items] == ["aud_3", "aud_4"]
    assert {"audit", "key_uses"} <= set(tables())
