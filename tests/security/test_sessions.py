"""The dashboard's sessions: an opaque id in the cookie, and no secret in the database."""

import json
import sqlite3
from dataclasses import dataclass
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.testclient import TestClient

from swiftkv_platform.control_plane.access.callers import SESSION_COOKIE
from swiftkv_platform.security.keys import Scope, create_key, revoke_key
from tests.unit.control_plane.routes.conftest import SPEC, Start, StillClock

pytestmark = pytest.mark.slow("starts an application for each test")

URL = "https://swiftkv.example"

LIFETIME_S = 3600


@dataclass
class House:
    """A database and a key file, on which control planes are built."""

    start: Start
    keys: Path
    clock: StillClock
    token: str

    def __post_init__(self) -> None:
        self.client = self.plane()

    def plane(self, url: str = URL, **settings: object) -> TestClient:
        chosen = {"api_keys_file": self.keys, "session_lifetime_s": LIFETIME_S, **settings}
        client = self.start(url, {"clock": self.clock}, **chosen).client
        assert isinstance(client, TestClient)
        return client

    def sign_in(self, client: TestClient | None = None, **headers: str) -> httpx.Response:
        answer = (client or self.client).post("/session", json={"api_key": self.token}, headers=headers)
        assert answer.status_code == 204, answer.text
        return answer

    def status(self, client: TestClient | None = None) -> int:
        """Status of a request that needs a session."""
        return (client or self.client).get("/jobs").status_code


@pytest.fixture
def house(start: Start, tmp_path: Path) -> House:
    keys = tmp_path / "keys.json"
    token = create_key(keys, name="ann", tenant="acme", scopes=frozenset({Scope.ADMIN}))
    return House(start, keys, StillClock(), token)


def cookie(answer: httpx.Response) -> SimpleCookie:
    return SimpleCookie(answer.headers["set-cookie"])


def test_the_cookie_says_nothing_and_ends(house: House) -> None:
    assert house.client.get("/session").json() == {"session": None, "reads_audit": False}
    first, second = (cookie(house.sign_in())[SESSION_COOKIE] for _ in range(2))
    assert first.value != second.value
    assert len(first.value) >= 43, "at least 256 bits"
    for part in (house.token, house.token.removeprefix("skv_")):
        assert part not in first.value
    assert (first["httponly"], first["secure"], first["samesite"].lower(), first["path"]) == (True, True, "strict", "/")
    assert first["max-age"] == str(LIFETIME_S)
    assert house.status() == 200
    told = {"name": "ann", "tenant": "acme", "expires_at": 1000 + LIFETIME_S}
    assert house.client.get("/session").json() == {"session": told, "reads_audit": True}


def test_the_database_opens_nothing_and_ended_sessions_are_swept_from_it(house: House, tmp_path: Path) -> None:
    """The database, and so a backup of it, holds neither session ids nor keys."""
    for _ in range(3):
        session = cookie(house.sign_in())[SESSION_COOKIE].value
        house.clock.now += LIFETIME_S
    with sqlite3.connect(tmp_path / "test.db") as database:
        dump = "\n".join(database.iterdump())
        [row] = database.execute("SELECT * FROM sessions").fetchall()
    assert session not in dump
    assert house.token not in dump
    house.clock.now -= LIFETIME_S
    assert house.status() == 200
    house.client.cookies.clear()
    for value in (*row, house.token):
        house.client.cookies.set(SESSION_COOKIE, str(value))
        assert house.status() == 401


def test_a_session_ends_with_its_lifetime_however_much_it_is_used(house: House) -> None:
    house.sign_in()
    for _ in range(3):
        house.clock.now += LIFETIME_S / 4
        assert house.status() == 200
    house.clock.now += LIFETIME_S / 4
    refused = house.client.get("/jobs")
    assert (refused.status_code, refused.json()["code"]) == (401, "unauthenticated")
    assert "sign in" in refused.json()["detail"]


def test_signing_out_ends_the_session_on_the_server(house: House) -> None:
    session = cookie(house.sign_in())[SESSION_COOKIE].value
    left = house.client.delete("/session")
    assert left.status_code == 204
    assert cookie(left)[SESSION_COOKIE]["max-age"] == "0"
    house.client.cookies.set(SESSION_COOKIE, session)  # a stolen copy
    assert house.status() == 401
    assert house.client.delete("/session").status_code == 204, "signing out twice is no error"


def test_the_end_of_a_key_ends_its_sessions_for_good(house: House) -> None:
    before = house.keys.read_bytes()
    house.sign_in()
    revoke_key(house.keys, "ann")
    assert house.status() == 401
    house.keys.write_bytes(before)
    assert house.status() == 401, "the session has ended for good"
    admin = frozenset({Scope.ADMIN})
    house.token = create_key(house.keys, name="bob", tenant="acme", scopes=admin, expires_at=1100)
    assert int(cookie(house.sign_in())[SESSION_COOKIE]["max-age"]) <= 100, "the cookie lasts no longer than the key"
    assert house.status() == 200
    house.clock.now = 1100.0
    assert house.status() == 401


def test_every_control_plane_knows_every_session(house: House) -> None:
    first, second = house.client, house.plane()
    second.cookies.set(SESSION_COOKIE, cookie(house.sign_in(first))[SESSION_COOKIE].value)
    assert house.status(second) == 200
    assert second.delete("/session").status_code == 204
    assert house.status(first) == 401


@pytest.mark.parametrize(
    ("url", "peer", "forwarded", "secure"),
    [
        ("https://swiftkv.example", "10.1.2.3", None, True),
        ("http://swiftkv.example", "10.1.2.3", None, False),
        ("http://swiftkv.example", "10.1.2.3", "https", True),  # told by a trusted proxy
        ("http://swiftkv.example", "192.0.2.7", "https", False),  # told by another peer
        ("https://swiftkv.example", "192.0.2.7", "http", True),
    ],
)
def test_the_cookie_is_secure_behind_a_proxy_that_is_trusted(
    house: House, url: str, peer: str, forwarded: str | None, secure: bool
) -> None:
    proxied = house.plane(url, trusted_proxies=("10.0.0.0/8",)).app
    client = TestClient(proxied, base_url=url, client=(peer, 4711))
    answer = house.sign_in(client, **({} if forwarded is None else {"X-Forwarded-Proto": forwarded}))
    assert bool(cookie(answer)[SESSION_COOKIE]["secure"]) is secure
    assert ("strict-transport-security" in answer.headers) is secure


def test_guessing_is_slowed_down(house: House) -> None:
    answers = [house.client.post("/session", json={"api_key": "skv_guess"}) for _ in range(30)]
    assert (answers[0].status_code, answers[-1].status_code) == (401, 429)
    assert int(answers[-1].headers["retry-after"]) >= 1
    refused = house.client.post("/session", json={"api_key": house.token})
    assert refused.status_code == 429, "a right guess gets the same answer as a wrong one"
    headers = {"authorization": f"Bearer {house.token}"}
    assert house.client.get("/jobs", headers=headers).status_code == 200
    house.clock.now += 60.0
    house.sign_in()


def test_no_key_of_any_shape_is_an_error_of_ours(house: House) -> None:
    for key in ("", " ", "\ud800", "é\r\nX-Header: x", "x" * 10_000, "\0"):
        assert house.client.post("/session", content=json.dumps({"api_key": key})).status_code in (401, 422)
    for value in ("x", "é", "x" * 4000):
        headers = {b"cookie": f"{SESSION_COOKIE}={value}".encode()}
        assert house.client.get("/jobs", headers=headers).status_code == 401
    without_keys = house.plane("http://127.0.0.1:8000", api_keys_file=None)
    answer = without_keys.post("/session", json={"api_key": "skv_anything"})
    assert (answer.status_code, "set-cookie" in answer.headers) == (204, False), "without keys there are no sessions"


FOREIGN = [
    {"Origin": "https://evil.example"},
    {"Origin": "https://sibling.swiftkv.example"},
    {"Origin": "https://swiftkv.example:8443"},
    {"Origin": "http://swiftkv.example"},
    {"Origin": "https://swiftkv.example.evil.example"},
    {"Origin": "null"},
    {"Origin": ""},
    {"Origin": "https://[", "Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Origin": URL, "Sec-Fetch-Site": "same-site"},
    {"Origin": "https://evil.example", "Sec-Fetch-Site": "same-origin"},
]
CHANGES: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/jobs", {"json": SPEC}),
    ("POST", "/jobs/job_1/pause", {}),
    ("DELETE", "/jobs/job_1", {}),
    ("POST", "/v1/files", {"files": {"file": b'{"text": "x"}\n'}, "data": {"purpose": "fine-tune"}}),
    ("DELETE", "/v1/files/file-1", {}),
    ("PATCH", "/deployments/dep_1", {"json": {}}),
    ("POST", "/v1/fine_tuning/jobs/job_1/cancel", {}),
    ("DELETE", "/session", {}),
]


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_another_origins_page_changes_nothing_with_the_cookie(house: House, headers: dict[str, str]) -> None:
    house.sign_in()
    for method, path, content in CHANGES:
        refused = house.client.request(method, path, headers=headers, **content)
        assert (refused.status_code, "origin_not_allowed" in refused.text) == (403, True), (path, refused.text)
    signed_in = house.client.post("/session", json={"api_key": house.token}, headers=headers)
    assert signed_in.status_code == 403, "a foreign page cannot sign a browser in"
    assert house.client.get("/jobs").json()["data"] == house.client.get("/v1/files").json()["data"] == []
    key = {"authorization": f"Bearer {house.token}", **headers}
    assert house.client.post("/jobs", json=SPEC, headers=key).status_code == 201, "browsers send no key by themselves"


@pytest.mark.parametrize(
    ("url", "headers"),
    [
        (URL, {}),
        (URL, {"Origin": URL, "Sec-Fetch-Site": "same-origin"}),
        (URL, {"Origin": "https://swiftkv.example:443"}),
        (URL, {"Sec-Fetch-Site": "none"}),
        ("http://swiftkv.example", {"Origin": "http://swiftkv.example"}),
        ("http://swiftkv.example", {"Origin": URL}),  # TLS ends at a proxy that is not trusted
    ],
)
def test_the_servers_own_pages_change_what_they_may(house: House, url: str, headers: dict[str, str]) -> None:
    client = house.plane(url)
    house.sign_in(client, **headers)
    upload = {"files": {"file": b'{"text": "x"}\n'}, "data": {"purpose": "fine-tune"}}
    assert client.post("/v1/files", headers=headers, **upload).status_code == 200
    assert client.post("/jobs", json=SPEC, headers=headers).status_code == 201
    assert client.delete("/session", headers=headers).status_code == 204


def test_no_address_that_a_caller_makes_up_wins_more_sign_ins(house: House) -> None:
    local = TestClient(house.client.app, base_url=URL, client=("127.0.0.1", 4711))
    statuses = [
        local.post("/session", json={"api_key": "skv_guess"}, headers={"X-Forwarded-For": f"192.0.2.{n}"}).status_code
        for n in range(30)
    ]
    assert (statuses[0], statuses[-1]) == (401, 429)
