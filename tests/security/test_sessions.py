"""The dashboard's sessions: an opaque id in the cookie, nothing that opens anything in the database."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from http.cookies import SimpleCookie
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient

from swiftkv_platform.api.app import create_app
from swiftkv_platform.api.dependencies import SESSION_COOKIE, Components
from swiftkv_platform.security.keys import Scope, create_key, revoke_key
from swiftkv_platform.settings import Settings
from tests.unit.api.conftest import control_plane, make_parts
from tests.unit.orchestration.conftest import Clock

URL = "https://swiftkv.example"
LIFETIME_S = 3600


@dataclass
class House:
    """One database and key file; control planes are built on them."""

    parts: Components
    settings: Settings
    clock: Clock
    token: str

    @contextmanager
    def plane(self, url: str = URL, **settings: object) -> Iterator[TestClient]:
        with control_plane(self.parts, self.settings.model_copy(update=settings), url) as client:
            yield client

    def sign_in(self, client: TestClient, **headers: str) -> httpx.Response:
        answer = client.post("/session", json={"api_key": self.token}, headers=headers)
        assert answer.status_code == 204, answer.text
        return answer


@pytest.fixture
def house(tmp_path: Path, empty_database: Path) -> House:
    keys, clock = tmp_path / "keys.json", Clock()
    token = create_key(keys, name="ann", tenant="acme", scopes=frozenset({Scope.ADMIN}))
    settings = Settings(home=tmp_path, api_keys_file=keys, _env_file=None)
    settings = settings.model_copy(update={"session_lifetime_s": LIFETIME_S})
    return House(replace(make_parts(tmp_path, empty_database), clock=clock), settings, clock, token)


@pytest.fixture
def client(house: House) -> Iterator[TestClient]:
    with house.plane() as client:
        yield client


def cookie(answer: httpx.Response) -> SimpleCookie:
    return SimpleCookie(answer.headers["set-cookie"])


def test_the_cookie_says_nothing_and_ends(house: House, client: TestClient) -> None:
    first, second = (cookie(house.sign_in(client))[SESSION_COOKIE] for _ in range(2))
    assert first.value != second.value
    assert len(first.value) >= 43, "256 bits"
    for part in (house.token, house.token.removeprefix("skv_")):
        assert part not in first.value
    assert (first["httponly"], first["secure"], first["samesite"].lower(), first["path"]) == (True, True, "strict", "/")
    assert first["max-age"] == str(LIFETIME_S)
    assert client.get("/jobs").status_code == 200


def test_the_raw_key_is_no_cookie(house: House, client: TestClient) -> None:
    client.cookies.set(SESSION_COOKIE, house.token)
    assert client.get("/jobs").status_code == 401


def test_the_database_opens_nothing(house: House, client: TestClient, tmp_path: Path) -> None:
    """A reader of the database (of a backup, say) holds neither session ids nor keys."""
    session = cookie(house.sign_in(client))[SESSION_COOKIE].value
    with sqlite3.connect(tmp_path / "test.db") as database:
        dump = "\n".join(database.iterdump())
        rows = database.execute("SELECT * FROM sessions").fetchall()
    assert len(rows) == 1
    assert session not in dump
    assert house.token not in dump
    client.cookies.clear()
    for value in rows[0]:
        client.cookies.set(SESSION_COOKIE, str(value))
        assert client.get("/jobs").status_code == 401


def test_a_session_ends_with_its_lifetime_however_much_it_is_used(house: House, client: TestClient) -> None:
    house.sign_in(client)
    for _ in range(3):
        house.clock.now += LIFETIME_S / 4
        assert client.get("/jobs").status_code == 200
    house.clock.now += LIFETIME_S / 4
    refused = client.get("/jobs")
    assert (refused.status_code, refused.json()["code"]) == (401, "unauthenticated")
    assert "sign in" in refused.json()["detail"]


def test_signing_out_ends_the_session_on_the_server(house: House, client: TestClient) -> None:
    session = cookie(house.sign_in(client))[SESSION_COOKIE].value
    left = client.delete("/session")
    assert left.status_code == 204
    assert cookie(left)[SESSION_COOKIE]["max-age"] == "0"
    client.cookies.set(SESSION_COOKIE, session)  # a thief's copy
    assert client.get("/jobs").status_code == 401
    assert client.delete("/session").status_code == 204, "signing out twice is no error"


def test_a_revoked_key_ends_its_sessions_for_good(house: House, client: TestClient) -> None:
    keys = house.settings.api_keys_file
    assert keys is not None
    before = keys.read_bytes()
    house.sign_in(client)
    revoke_key(keys, "ann")
    assert client.get("/jobs").status_code == 401
    keys.write_bytes(before)
    assert client.get("/jobs").status_code == 401, "the session was ended, not suspended"


def test_an_expired_key_ends_its_sessions(house: House, client: TestClient, tmp_path: Path) -> None:
    keys = house.settings.api_keys_file
    assert keys is not None
    house = replace(
        house, token=create_key(keys, name="bob", tenant="acme", scopes=frozenset({Scope.ADMIN}), expires_at=1100)
    )
    session = house.sign_in(client)
    assert int(cookie(session)[SESSION_COOKIE]["max-age"]) <= 100, "no longer than its key"
    assert client.get("/jobs").status_code == 200
    house.clock.now = 1100.0
    assert client.get("/jobs").status_code == 401


def test_every_control_plane_knows_every_session(house: House) -> None:
    with ExitStack() as stack:
        first, second = (stack.enter_context(house.plane()) for _ in range(2))
        second.cookies.set(SESSION_COOKIE, cookie(house.sign_in(first))[SESSION_COOKIE].value)
        assert second.get("/jobs").status_code == 200
        assert second.delete("/session").status_code == 204
        assert first.get("/jobs").status_code == 401


def test_the_session_is_told_to_the_page(house: House, client: TestClient) -> None:
    assert client.get("/session").json() == {"session": None, "reads_audit": False}
    house.sign_in(client)
    told = {"name": "ann", "tenant": "acme", "expires_at": 1000 + LIFETIME_S}
    assert client.get("/session").json() == {"session": told, "reads_audit": True}


def test_ended_sessions_are_swept_away(house: House, client: TestClient, tmp_path: Path) -> None:
    for _ in range(3):
        house.sign_in(client)
        house.clock.now += LIFETIME_S
    with sqlite3.connect(tmp_path / "test.db") as database:
        assert database.execute("SELECT count(*) FROM sessions").fetchone() == (1,)


@pytest.mark.parametrize(
    ("url", "peer", "forwarded", "secure"),
    [
        ("https://swiftkv.example", "10.1.2.3", None, True),
        ("http://swiftkv.example", "10.1.2.3", None, False),
        ("http://swiftkv.example", "10.1.2.3", "https", True),  # a trusted proxy's word
        ("http://swiftkv.example", "192.0.2.7", "https", False),  # anyone else's
        ("https://swiftkv.example", "192.0.2.7", "http", True),
    ],
)
def test_the_cookie_is_secure_behind_a_proxy_that_is_trusted(
    house: House, url: str, peer: str, forwarded: str | None, secure: bool
) -> None:
    settings = house.settings.model_copy(update={"trusted_proxies": ("10.0.0.0/8",), "reconcile_interval_s": 1e6})
    app = create_app(settings, components=house.parts)
    headers = {} if forwarded is None else {"X-Forwarded-Proto": forwarded}
    with TestClient(app, base_url=url, client=(peer, 4711)) as client:
        answer = house.sign_in(client, **headers)
        assert bool(cookie(answer)[SESSION_COOKIE]["secure"]) is secure
        assert ("strict-transport-security" in answer.headers) is secure


def test_guessing_is_slowed_down(house: House) -> None:
    with house.plane() as client:
        answers = [client.post("/session", json={"api_key": "skv_guess"}) for _ in range(30)]
        assert answers[0].status_code == 401
        assert answers[-1].status_code == 429
        assert int(answers[-1].headers["retry-after"]) >= 1
        refused = client.post("/session", json={"api_key": house.token})
        assert refused.status_code == 429, "a good guess is not told from a bad one"
        assert client.get("/jobs", headers={"authorization": f"Bearer {house.token}"}).status_code == 200
        house.clock.now += 60.0
        house.sign_in(client)


@pytest.mark.parametrize("key", ["", " ", "\ud800", "é\r\nX-Header: x", "x" * 10_000, "\0"])
def test_no_key_of_any_shape_is_an_error_of_ours(client: TestClient, key: str) -> None:
    assert client.post("/session", content=json.dumps({"api_key": key})).status_code in (401, 422)
    for cookie in ("x", "é", "x" * 4000):
        assert client.get("/jobs", headers={b"cookie": f"{SESSION_COOKIE}={cookie}".encode()}).status_code == 401


def test_without_keys_there_is_nothing_to_sign_in_to(house: House) -> None:
    with house.plane("http://127.0.0.1:8000", api_keys_file=None) as client:
        answer = client.post("/session", json={"api_key": "skv_anything"})
        assert answer.status_code == 204
        assert "set-cookie" not in answer.headers
