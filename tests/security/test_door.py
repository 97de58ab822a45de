"""The door that both applications share: what it finds in JSON, what a good body costs, how a replica answers it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx
import pytest
import pytest_asyncio

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.serve.current import Current
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.web import hostile_json
from swiftkv_platform.web.hostile_json import check_json

LONG = "def f(x):\n    return {'a': [x]}  # NaN\n" * 400_000
"""16 MB of a prompt, with brackets."""
JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    "hostile",
    [r'"\ud800"', r'"\uDFFF"', r'"\u0000"', "9" * 19, "-9223372036854775809", "NaN", "-Infinity", "1e999", "1E+999"],
)
@pytest.mark.parametrize("padding", ["", "x" * (2 << 20)], ids=["small", "large"])
def test_it_finds_what_is_hostile_wherever_it_is(hostile: str, padding: str) -> None:
    body = f'{{"prompt": "{padding}", "nested": [{{"a b": [0, {hostile}]}}]}}'
    with pytest.raises(InvalidInputError) as caught:
        check_json(body.encode())
    assert str(caught.value.field).startswith("nested[0].a b")


@pytest.mark.parametrize("padding", ["", "x" * (2 << 20)], ids=["small", "large"])
def test_it_finds_depth(padding: str) -> None:
    for depth, refused in ((hostile_json.MAX_DEPTH - 2, False), (hostile_json.MAX_DEPTH + 1, True), (100_000, True)):
        body = f'{{"prompt": "{padding}", "a": {"[" * depth}{"]" * depth}}}'.encode()
        if refused:
            with pytest.raises(InvalidInputError, match="deep"):
                check_json(body)
        else:
            check_json(body)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_another_encoding_hides_nothing(encoding: str) -> None:
    with pytest.raises(InvalidInputError):
        check_json(r'{"a": "\ud800"}'.encode(encoding))


@pytest.mark.parametrize(
    "good",
    [
        r'"\ud83d\ude00"',
        '"\\\\ud800 NaN 1e999 99999999999999999999"',
        str(2**63 - 1),
        str(-(2**63)),
        "1.7976931348623157e308",
        "1e-999",
        "0." + "1" * 40,
        "[]",
        "{",
    ],
)
def test_it_lets_everything_else_pass(good: str) -> None:
    check_json(good.encode())
    check_json(f'{{"prompt": "{"x" * (2 << 20)}", "a": {good}}}'.encode())


def test_nul_passes_where_no_database_is() -> None:
    good = r'{"prompt": "a\u0000b"}'
    check_json(good.encode(), allow_nul=True)
    with pytest.raises(InvalidInputError, match="NUL"):
        check_json(good.encode())
    with pytest.raises(InvalidInputError, match="NUL"):
        check_json(rb'{"a\u0000b": 1}', allow_nul=True)


def test_a_large_good_body_is_neither_parsed_nor_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    def walked(*_: object, **__: object) -> None:
        raise AssertionError("a second pass over a good body")

    monkeypatch.setattr(hostile_json, "_parse", walked)
    check_json(json.dumps({"prompt": "word " * 3_000_000, "max_tokens": 16}).encode())
    check_json(json.dumps({"prompt": list(range(100_000)) * 20}).encode())


def test_a_large_body_that_needs_a_look_is_walked_by_values_not_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = hostile_json.check_text
    monkeypatch.setattr(
        hostile_json, "check_text", lambda text, *rest, **named: (seen.append(len(text)), real(text, *rest, **named))
    )
    check_json(json.dumps({"prompt": LONG, "ids": list(range(1_000_000))}).encode())
    assert len(seen) == 3, "two keys and a string; a million integers are compared at once"


@pytest_asyncio.fixture
async def replica() -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_http_app(Current()))
    async with httpx.AsyncClient(transport=transport, base_url="http://serve") as client:
        yield client


HOSTILE = [
    (r'{"prompt": "a", "request_id": "\ud800"}', "request_id"),
    ('{"prompt": "a", "temperature": NaN}', "temperature"),
    ('{"prompt": "a", "temperature": 1e999}', "temperature"),
    (f'{{"prompt": "a", "max_tokens": {10**400}}}', "max_tokens"),
    (f'{{"prompt": [1, 2, {2**64}]}}', "prompt"),
]


@pytest.mark.parametrize(("body", "field"), HOSTILE)
async def test_a_replica_refuses_in_its_own_words(replica: httpx.AsyncClient, body: str, field: str) -> None:
    response = await replica.post("/generate", content=body, headers=JSON)
    assert (response.status_code, response.headers["content-type"]) == (422, "application/problem+json")
    [error] = response.json()["errors"]
    assert error["field"] == field
    assert error["message"]


@pytest.mark.parametrize(("body", "field"), HOSTILE)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_openais_clients_are_refused_in_theirs(
    replica: httpx.AsyncClient, path: str, body: str, field: str
) -> None:
    response = await replica.post(path, content=body, headers=JSON)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", field)


async def test_a_body_that_grows_too_large_is_still_a_413(replica: httpx.AsyncClient) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(18):
            yield b"x" * (1 << 20)

    response = await replica.post("/generate", content=pieces(), headers=JSON)
    assert response.status_code == 413
