"""Constrained answers over HTTP: OpenAI's `response_format`, vLLM's `structured_outputs`, and what is refused."""

import json
import re
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig
from tests.contract.serving.replicas import application, asgi_client, openai_client, save_chat_model, version_of

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 400}


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kind: Literal["cat", "dog"]
    legs: Literal[2, 4]


def wanted(**fields: Any) -> dict[str, Any]:
    return {"structured_outputs": fields}


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": value}}}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("swiftkv"), 512, TEMPLATE)


@pytest.fixture(scope="module")
def engine_config() -> EngineConfig:
    return EngineConfig(max_num_seqs=8, max_grammar_bytes=2000, grammar_timeout_s=60.0)


@pytest.fixture
def app(engine: AsyncLLMEngine) -> FastAPI:
    return application(version_of(engine, "tiny", 512))


@pytest.fixture
def http(app: FastAPI) -> httpx.AsyncClient:
    return asgi_client(app)


async def test_openais_client_parses_a_model(app: FastAPI) -> None:
    answer = await openai_client(app).chat.completions.parse(**CHAT, response_format=Pet, n=3, seed=1)
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    assert all(isinstance(choice.message.parsed, Pet) for choice in answer.choices)


async def test_a_streamed_answer_follows_the_schema_as_well(app: FastAPI) -> None:
    ask, asked = openai_client(app).chat.completions.create, {**CHAT, **schema(Pet.model_json_schema()), "seed": 2}
    whole, stream = await ask(**asked), await ask(**asked, stream=True)
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    assert text == whole.choices[0].message.content
    Pet.model_validate_json(text)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
async def test_every_route_takes_every_constraint(http: httpx.AsyncClient, path: str) -> None:
    async def text(**fields: Any) -> str:
        body = {"model": "tiny"} if path.startswith("/v1") else {}
        response = await http.post(path, json={"prompt": "a", "seed": 3, "max_tokens": 300, **body, **fields})
        choice = response.raise_for_status().json()["choices"][0]
        assert choice["finish_reason"] == "stop"
        return str(choice["text"])

    pet = Pet.model_json_schema()
    assert re.fullmatch("[a-c]{3}", await text(**wanted(regex="[a-c]{3}")))
    assert await text(**wanted(choice=["yes", "no"])) in ("yes", "no")
    assert await text(**wanted(grammar='start: "x" | "(" start ")"'), temperature=0.0)
    compact = await text(**wanted(json=pet, disable_any_whitespace=True))
    assert not re.search(r"\s", compact)
    for answer in (compact, await text(**schema(pet))):
        Pet.model_validate_json(answer)
    await text(response_format={"type": "text"}, stop_token_ids=list(range(256)))


LEGS: dict[str, Any] = {"properties": {"legs": {"enum": [2, 4]}}, "required": ["legs"], "additionalProperties": False}
BY_REFERENCE = {"$defs": {"pet": {"type": "object", **LEGS}}, "$ref": "#/$defs/pet"}


def format_on(path: str, response_format: dict[str, Any]) -> dict[str, Any]:
    """Return the body of a request with a response format."""
    if path == "/v1/responses":
        return {"model": "tiny", "input": "a", "text": {"format": response_format}, "max_output_tokens": 400}
    asked: dict[str, Any] = {"messages": CHAT["messages"]} if path.startswith("/v1/chat") else {"prompt": "a"}
    own = {} if path == "/generate" else {"model": "tiny"}
    return {**own, **asked, "response_format": response_format, "max_tokens": 400}


def read_text(path: str, answer: dict[str, Any]) -> str:
    if path == "/v1/responses":
        return str(answer["output"][-1]["content"][0]["text"])
    [choice] = answer["choices"]
    return str(choice["message"]["content"] if path.startswith("/v1/chat") else choice["text"])


FORMAT_ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions", "/v1/responses")


@pytest.mark.parametrize("path", FORMAT_ROUTES)
@pytest.mark.parametrize("schema", [LEGS, {"type": ["object", "null"], **LEGS}, {"anyOf": [LEGS]}, BY_REFERENCE])
@pytest.mark.parametrize("kind", ["json_object", "json_schema"])
async def test_a_schema_beside_the_type_is_followed(
    http: httpx.AsyncClient, kind: str, schema: dict[str, Any], path: str
) -> None:
    """As llama.cpp's server and others take it."""
    given = {**schema, "type": "object"} if kind == "json_schema" else schema
    response = await http.post(path, json=format_on(path, {"type": kind, "schema": given}))
    assert json.loads(read_text(path, response.raise_for_status().json()))["legs"] in (2, 4)


@pytest.mark.parametrize("path", FORMAT_ROUTES)
@pytest.mark.parametrize(
    "response_format",
    [
        {"type": "text", "schema": LEGS},
        {"type": "json_object", "schema": {"type": "array"}},
        {"type": "json_object", "schema": [LEGS]},
        {"type": "json_object", "json_schema": {"name": "a", "schema": LEGS}},
        {"type": "json_object", "grammar": "start: x"},
        {"type": "json_object", "Schema": LEGS},
        {"type": "text", "x": 1},
        {"type": "json_schema", "schema": LEGS, "regex": "a"},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": LEGS, "x": 1}},
        {"type": "json_schema", "json_schema": {"name": "a", "schema": LEGS}, "schema": LEGS},
    ],
)
async def test_what_a_format_cannot_say_is_refused(
    http: httpx.AsyncClient, path: str, response_format: dict[str, Any]
) -> None:
    response = await http.post(path, json=format_on(path, response_format))
    assert response.status_code in (400, 422)
    named = "text.format" if path == "/v1/responses" else "response_format"
    assert named in response.text


@pytest.mark.parametrize("field", ["output_config", "output_format"])
async def test_anthropics_formats_have_no_other_keys(http: httpx.AsyncClient, field: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", **LEGS}}
    for others, status in (({}, 200), ({"x": 1}, 400)):
        value = {**form, **others}
        asked = {"format": value} if field == "output_config" else value
        body = {"model": "tiny", "max_tokens": 400, "messages": CHAT["messages"], field: asked}
        assert (await http.post("/v1/messages", json=body)).status_code == status


DESCRIBED: dict[str, Any] = {
    "$id": "https://example.org/pet",
    "x-order": 1,
    "format": "pet",
    "unevaluatedProperties": True,
    "not": False,
    "then": {"maxLength": 1},
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"], "format": "animal", "deprecated": True, "example": "cat"},
        "legs": {"type": "integer", "enum": [2, 4], "format": "int32", "minContains": 3, "nullable": False},
        "format": {
            "type": "array",
            "uniqueItems": False,
            "maxItems": 0,
            "items": {"type": "string", "format": "uri-template"},
        },
    },
    "required": ["kind", "legs", "format"],
    "additionalProperties": False,
}


async def test_what_only_describes_a_schema_refuses_nothing(http: httpx.AsyncClient) -> None:
    fields = {"seed": 3, "logit_bias": {"1": -20}, **schema(DESCRIBED)}
    response = await http.post("/generate", json={"prompt": "a", "max_tokens": 400, **fields})
    answer = json.loads(response.raise_for_status().json()["choices"][0]["text"])
    assert answer.keys() == {"kind", "legs", "format"}, "a property may have the name of a keyword"
    Pet.model_validate({"kind": answer["kind"], "legs": answer["legs"]})
    assert answer["format"] == []


async def test_a_known_format_is_followed(http: httpx.AsyncClient) -> None:
    date = wanted(json={"type": "string", "format": "date", "x": 1})
    response = await http.post("/generate", json={"prompt": "a", "max_tokens": 40, "seed": 1, **date})
    assert re.fullmatch(r'"\d{4}-\d\d-\d\d"', response.json()["choices"][0]["text"])


async def test_a_json_object_is_one(http: httpx.AsyncClient) -> None:
    biased = {"1": -100, "92": 8, "90": 100}  # few strings and an early brace, since random weights write no short JSON
    body = {"prompt": "a", "max_tokens": 400, "seed": 1, "temperature": 0.7, "logit_bias": biased}
    response = await http.post("/generate", json={**body, "response_format": {"type": "json_object"}})
    [choice] = response.json()["choices"]
    assert choice["finish_reason"] == "stop"
    assert isinstance(json.loads(choice["text"]), dict)


async def test_drafts_from_the_text_leave_the_answer_as_it_is(http: httpx.AsyncClient) -> None:
    body = {"prompt": "abcabcabc", "max_tokens": 60, "temperature": 0, **wanted(regex="(abc)+d")}
    [plain] = (await http.post("/generate", json=body)).json()["choices"]
    [drafted] = (await http.post("/generate", json={**body, "num_lookup_tokens": 8})).json()["choices"]
    assert drafted.pop("num_accepted_tokens") > plain.pop("num_accepted_tokens") == 0
    assert drafted == plain


async def test_a_constraint_that_turns_out_too_complex_is_the_callers_fault(http: httpx.AsyncClient) -> None:
    costly = {"prompt": "a", **wanted(regex="b(a{1000}){1000}")}
    response = await http.post("/generate", json=costly)
    assert (response.status_code, response.json()["errors"][0]["field"]) == (422, "structured_outputs.regex")
    for answer in (response, await http.post("/generate", json={**costly, "stream": True})):
        assert "structured_outputs.regex is too complex" in answer.text


REFUSED = [
    (wanted(), "structured_outputs", "exactly one of"),
    (wanted(regex="a", choice=["b"]), "structured_outputs", "exactly one of"),
    (wanted(regexp="a"), "structured_outputs", "an object with json"),
    (wanted(regex="("), "structured_outputs.regex", "unclosed group"),
    (wanted(regex=7), "structured_outputs.regex", "text"),
    (wanted(regex="\ud800"), "structured_outputs.regex", "surrogate"),
    (wanted(regex="a" * 2001), "structured_outputs.regex", "max_grammar_bytes is 2000"),
    (wanted(regex="(?=a)b"), "structured_outputs.regex", "look-around"),
    (wanted(choice=[]), "structured_outputs.choice", "non-empty"),
    (wanted(json="{"), "structured_outputs.json", "a JSON schema"),
    (wanted(json={"type": "strin"}), "structured_outputs.json", "Invalid type"),
    (wanted(json={"not": {}}), "structured_outputs.json", "has 'not', which cannot be compiled"),
    (
        schema({"properties": {"a": {"items": {"uniqueItems": True}}}}),
        "response_format.json_schema.schema",
        "response_format.json_schema.schema.properties.a.items has 'uniqueItems'",
    ),
    (wanted(json={"if": {}, "then": {"minLength": 2}}), "structured_outputs.json", "has 'if'"),
    (
        wanted(json={"$defs": {"a": {"pattern": "(?=a)"}}, "$ref": "#/$defs/a"}),
        "structured_outputs.json",
        "$defs.a.pattern",
    ),
    (wanted(json_object="yes"), "structured_outputs.json_object", "true or false"),
    (wanted(grammar="start: a b"), "structured_outputs.grammar", "cannot be compiled"),
    (schema({"$ref": "#/nowhere"}), "response_format.json_schema.schema", "nowhere"),
    (schema({"enum": []}), "response_format.json_schema.schema", "Unsatisfiable"),
    (schema("{}"), "response_format.json_schema.schema", "dictionary"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is required"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
    ({**wanted(regex="a"), "response_format": {"type": "json_object"}}, "structured_outputs", "one of them"),
    ({**wanted(regex="a"), "ignore_eos": True}, "ignore_eos", "structured_outputs"),
    ({"num_lookup_tokens": 65}, "num_lookup_tokens", "from 0 to 64"),
]


@pytest.mark.parametrize(("body", "field", "message"), REFUSED)
async def test_what_cannot_constrain_is_named_and_reaches_no_engine(
    http: httpx.AsyncClient, engine: AsyncLLMEngine, body: dict[str, Any], field: str, message: str
) -> None:
    headers = {"content-type": "application/json"}
    response = await http.post("/generate", content=json.dumps({"prompt": "a", **body}), headers=headers)
    problem = response.json()
    assert (response.status_code, problem["errors"][0]["field"]) == (422, field)
    assert message in problem["detail"]
    in_openais_shape = json.dumps({"model": "tiny", "prompt": "a", **body})
    response = await http.post("/v1/completions", content=in_openais_shape, headers=headers)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field)
    assert message in error["message"]
    assert engine.num_requests == 0
    assert not engine.engine.has_unfinished_requests
