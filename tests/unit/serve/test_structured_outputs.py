"""Constrained answers over HTTP: OpenAI's `response_format`, vLLM's `structured_outputs`, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
import pytest_asyncio
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict
from transformers import AutoTokenizer

from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from swiftkv_platform.serve.current import Current, ModelCard, Version
from swiftkv_platform.serve.http import create_http_app
from tests.unit.engine.tiny_models import save_swiftkv

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
MESSAGES: Any = [{"role": "user", "content": "a"}]


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]
    legs: Literal[2, 4]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_swiftkv(tmp_path_factory.mktemp("swiftkv"), 512)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    return directory


@pytest_asyncio.fixture
async def engine(model_dir: Path) -> AsyncIterator[AsyncLLMEngine]:
    config = EngineConfig(max_num_seqs=8, max_grammar_bytes=2000, grammar_timeout_s=60.0)
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(model_dir, config))
    yield engine
    await engine.aclose()


@pytest.fixture
def app(engine: AsyncLLMEngine) -> FastAPI:
    card = ModelCard(deployment="dep_1", model="tiny", manifest_digest=None, swiftkv=None, max_model_len=512)
    return create_http_app(Current(Version(engine, card, created=1)))


@pytest_asyncio.fixture
async def http(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://serve") as client:
        yield client


@pytest.fixture
def client(http: httpx.AsyncClient) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(api_key="none", base_url="http://serve/v1", http_client=http, max_retries=0)


async def test_openais_client_parses_a_model(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Pet, n=3, seed=1, max_tokens=400
    )
    assert len(answer.choices) == 3
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        assert isinstance(choice.message.parsed, Pet)


async def test_a_streamed_answer_follows_the_schema_as_well(client: openai.AsyncOpenAI) -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "pet", "schema": Pet.model_json_schema()}}
    asked: Any = {"model": "tiny", "messages": MESSAGES, "response_format": schema, "seed": 2, "max_tokens": 400}
    whole = await client.chat.completions.create(**asked)
    stream = await client.chat.completions.create(**asked, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content
    Pet.model_validate_json(text)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_every_route_takes_every_constraint(http: httpx.AsyncClient, path: str) -> None:
    async def text(**fields: Any) -> str:
        body = {"model": "tiny"} if path.startswith("/v1") else {}
        response = await http.post(path, json={"prompt": "a", "seed": 3, "max_tokens": 300, **body, **fields})
        assert response.status_code == 200, response.text
        choice = response.json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        said: str = choice["text"]
        return said

    schema = Pet.model_json_schema()
    assert re.fullmatch("[a-c]{3}", await text(structured_outputs={"regex": "[a-c]{3}"}))
    assert await text(structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert await text(structured_outputs={"grammar": 'start: "x" | "(" start ")"'}, temperature=0.0)
    compact = await text(structured_outputs={"json": schema, "disable_any_whitespace": True})
    assert not re.search(r"\s", compact)
    Pet.model_validate_json(compact)
    Pet.model_validate_json(
        await text(response_format={"type": "json_schema", "json_schema": {"name": "pet", "schema": schema}})
    )
    assert await text(response_format={"type": "text"}, stop_token_ids=list(range(256))) is not None


async def test_a_json_object_is_one(http: httpx.AsyncClient) -> None:
    biased = {"1": -100, "92": 8, "90": 100}  # few strings, an early brace: random weights write no short JSON
    body = {"prompt": "a", "max_tokens": 400, "seed": 1, "temperature": 0.7, "logit_bias": biased}
    response = await http.post("/generate", json={**body, "response_format": {"type": "json_object"}})
    choice = response.json()["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["text"]), dict)


async def test_drafts_from_the_text_leave_the_answer_as_it_is(http: httpx.AsyncClient) -> None:
    body = {"prompt": "abcabcabc", "max_tokens": 60, "temperature": 0, "structured_outputs": {"regex": "(abc)+d"}}
    [plain] = (await http.post("/generate", json=body)).json()["choices"]
    [drafted] = (await http.post("/generate", json={**body, "num_lookup_tokens": 8})).json()["choices"]
    assert drafted.pop("num_accepted_tokens") > 0
    assert plain.pop("num_accepted_tokens") == 0
    assert drafted == plain


@pytest.mark.parametrize("stream", [False, True])
async def test_a_constraint_that_turns_out_too_complex_is_the_callers_fault(
    http: httpx.AsyncClient, stream: bool
) -> None:
    costly = {"prompt": "a", "stream": stream, "structured_outputs": {"regex": "b(a{1000}){1000}"}}
    response = await http.post("/generate", json=costly)
    assert "structured_outputs.regex is too complex" in response.text
    if not stream:
        assert response.status_code == 422
        assert response.json()["errors"][0]["field"] == "structured_outputs.regex"


def wanted(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}}


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        (wanted(), "structured_outputs", "exactly one of"),
        (wanted(regex="a", choice=["b"]), "structured_outputs", "exactly one of"),
        (wanted(regexp="a"), "structured_outputs", "some of json"),
        (wanted(regex="("), "structured_outputs.regex", "unclosed group"),
        (wanted(regex=7), "structured_outputs.regex", "text"),
        (wanted(regex="\ud800"), "structured_outputs.regex", "surrogate"),
        (wanted(regex="a" * 2001), "structured_outputs.regex", "max_grammar_bytes is 2000"),
        (wanted(regex="(?=a)b"), "structured_outputs.regex", "look-around"),
        (wanted(regex=""), "structured_outputs.regex", "must be text"),
        (wanted(choice=[]), "structured_outputs.choice", "non-empty"),
        (wanted(choice=["a", ""]), "structured_outputs.choice", "non-empty"),
        (wanted(json="{"), "structured_outputs.json", "a JSON schema"),
        (wanted(json="[]"), "structured_outputs.json", "a JSON schema"),
        (wanted(json={"type": "strin"}), "structured_outputs.json", "Invalid type"),
        (wanted(json={"not": {}}), "structured_outputs.json", "Unimplemented"),
        (wanted(json_object="yes"), "structured_outputs.json_object", "true or false"),
        (wanted(grammar="start: a b"), "structured_outputs.grammar", "cannot be compiled"),
        (schema({"$ref": "#/nowhere"}), "response_format.json_schema.schema", "nowhere"),
        (schema({"enum": []}), "response_format.json_schema.schema", "Unsatisfiable"),
        (schema("{}"), "response_format.json_schema.schema", "dictionary"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is given"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({**wanted(regex="a"), "response_format": {"type": "json_object"}}, "structured_outputs", "one of them"),
        ({**wanted(regex="a"), "ignore_eos": True}, "ignore_eos", "structured_outputs"),
        ({"num_lookup_tokens": 65}, "num_lookup_tokens", "from 0 to 64"),
    ],
)
async def test_what_cannot_constrain_is_named_and_reaches_no_engine(
    http: httpx.AsyncClient, engine: AsyncLLMEngine, path: str, body: dict[str, Any], field: str, message: str
) -> None:
    model = {"model": "tiny"} if path.startswith("/v1") else {}
    content = json.dumps({"prompt": "a", **model, **body})
    response = await http.post(path, content=content, headers={"content-type": "application/json"})
    if path.startswith("/v1"):
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == field
        assert message in error["message"]
    else:
        assert response.status_code == 422
        problem = response.json()
        assert problem["errors"][0]["field"] == field
        assert message in problem["detail"]
    assert engine.num_requests == 0
    assert not engine.engine.has_unfinished_requests
