"""The door that both applications share: what it finds in JSON, what a good body costs, how a replica answers it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import nullcontext

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


@pytest.mark.parametrize("padding", ["", "x" * (2 << 20)], ids=["small", "large"])
def test_it_finds_what_is_hostile_wherever_it_is(padding: str) -> None:
    hostile = [r'"\ud800"', r'"\uDFFF"', r'"\u0000"', "9" * 19, str(-(1 << 63) - 1), "NaN", "-Infinity", "1e999"]
    for value in hostile:
        with pytest.raises(InvalidInputError) as caught:
            check_json(f'{{"prompt": "{padding}", "nested": [{{"a b": [0, {value}]}}]}}'.encode())
        assert str(caught.value.field).startswith("nested[0].a b")
    for depth in (hostile_json.MAX_DEPTH - 2, hostile_json.MAX_DEPTH + 1, 100_000):
        body = f'{{"prompt": "{padding}", "a": {"[" * depth}{"]" * depth}}}'.encode()
        with nullcontext() if depth < hostile_json.MAX_DEPTH else pytest.raises(InvalidInputError, match="deep"):
            check_json(body)


def test_another_encoding_hides_nothing() -> None:
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        with pytest.raises(InvalidInputError):
            check_json(r'{"a": "\ud800"}'.encode(encoding))


def test_it_lets_everything_else_pass() -> None:
    limits = [str(2**63 - 1), str(-(2**63)), "1.7976931348623157e308", "1e-999", "0." + "1" * 40]
    for good in (r'"\ud83d\ude00"', '"\\\\ud800 NaN 1e999 99999999999999999999"', *limits, "[]", "{"):
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


async def test_a_replica_refuses_in_its_own_words_and_openais_clients_in_theirs(replica: httpx.AsyncClient) -> None:
    for body, field in HOSTILE:
        response = await replica.post("/generate", content=body, headers=JSON)
        assert (response.status_code, response.headers["content-type"]) == (422, "application/problem+json")
        [error] = response.json()["errors"]
        assert (error["field"], error["message"] != "") == (field, True)
        for path in ("/v1/completions", "/v1/chat/completions"):
            response = await replica.post(path, content=body, headers=JSON)
            assert response.status_code == 400
            error = response.json()["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", field)

    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(18):
            yield b"x" * (1 << 20)

    grown = await replica.post("/generate", content=pieces(), headers=JSON)
    assert grown.status_code == 413, "a body that grows too large"
