"""Conversations over OpenAI's Responses API, with OpenAI's own client, and Anthropic's Messages API, compared to chat
completions, on the real engine of the fixture `engine`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, ConfigDict

from swiftkv_platform.security.keys import KeyRing, Scope, create_key
from swiftkv_platform.serve.replica_state import ModelVersion
from tests.contract.serving import openai_tools
from tests.contract.serving.openai_tools import SCHEMAS, SPACES
from tests.contract.serving.replicas import application, asgi_client

client = openai_tools.client
engine_config = openai_tools.engine_config
model_dir = openai_tools.model_dir
version = openai_tools.version

ASKED = {"role": "user", "content": "Is it warm?"}
BRIEF = {"role": "system", "content": "Be brief."}
COMMON: dict[str, Any] = {"model": "tiny", "temperature": 0.7, "seed": 1, "logit_bias": SPACES}
FEW = {name: SCHEMAS[name] for name in ("move", "ping")}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in FEW.items()]
CALLS: dict[str, dict[str, Any]] = {
    "chat": {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
    "responses": {
        "tools": [{"type": "function", **tool["function"]} for tool in TOOLS],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
    "messages": {
        "tools": [{"name": name, "input_schema": schema} for name, schema in FEW.items()],
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    },
}


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")
    city: Literal["Rome", "Oslo"]
    warm: bool


@pytest.fixture
def http(version: ModelVersion) -> httpx.AsyncClient:
    return asgi_client(application(version))


def to_respond(**fields: Any) -> dict[str, Any]:
    """Return arguments for OpenAI's client."""
    extra = {name: value for name, value in COMMON.items() if name != "model"}
    return {"model": "tiny", "input": [ASKED], "max_output_tokens": 400, "extra_body": extra, **fields}


async def chat(http: httpx.AsyncClient, **fields: Any) -> tuple[dict[str, Any], tuple[int, int]]:
    """Return a chat's only choice, and the token counts of prompt and answer."""
    answer = (await http.post("/v1/chat/completions", json={**COMMON, "max_tokens": 400, **fields})).json()
    usage = answer["usage"]
    return answer["choices"][0], (usage["prompt_tokens"], usage["completion_tokens"])


async def message(http: httpx.AsyncClient, **fields: Any) -> Any:
    response = await http.post("/v1/messages", json={**COMMON, "messages": [ASKED], "max_tokens": 400, **fields})
    assert response.status_code == 200, response.text
    return response.json() if not fields.get("stream") else joined(response.text)


def joined(stream: str) -> Any:
    """Join a message from its events as Anthropic's client does, and check their order."""
    lines = [line.partition(": ") for line in stream.split("\n")]
    start, *events, delta, stop = told = [json.loads(value) for name, _, value in lines if name == "data"]
    assert [value for name, _, value in lines if name == "event"] == [event["type"] for event in told]
    assert (start["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    content, texts, is_open = start["message"]["content"], list[str](), False
    for event in events:
        assert event["index"] == len(content) - is_open
        if event["type"] == "content_block_start":
            content.append(event["content_block"])
            texts.append("")
        elif event["type"] == "content_block_delta":
            kind = {"text": ("text_delta", "text"), "tool_use": ("input_json_delta", "partial_json")}
            assert event["delta"]["type"] == kind[content[-1]["type"]][0]
            texts[-1] += event["delta"][kind[content[-1]["type"]][1]]
        is_open = event["type"] != "content_block_stop"
    assert not is_open
    for block, text in zip(content, texts, strict=True):
        block.update({"text": text} if block["type"] == "text" else {"input": json.loads(text)})
    return {**start["message"], **delta["delta"], "usage": delta["usage"]}


def count_input(usage: dict[str, int]) -> int:
    """Return a prompt's tokens: Anthropic's clients add those that were computed to those of the cache."""
    return usage["input_tokens"] + usage["cache_creation_input_tokens"] + usage["cache_read_input_tokens"]


KEPT_APART = ("id", "call_id", "parsed", "parsed_arguments")
"""Ids, and fields that clients add."""


def without_ids(told: Any) -> Any:
    """Drop the ids from an answer, so that it can be compared to another one to the same question."""
    if isinstance(told, dict):
        return {name: without_ids(value) for name, value in told.items() if name not in KEPT_APART}
    return [without_ids(one) for one in told] if isinstance(told, list) else told


@pytest.mark.parametrize("calls", [False, True])
async def test_a_response_is_the_chats_whole_and_streamed(client: Any, http: httpx.AsyncClient, calls: bool) -> None:
    fields: dict[str, Any] = CALLS["responses"] if calls else {"max_output_tokens": 9}
    whole = await client.responses.create(**to_respond(**fields, instructions=BRIEF["content"], store=True))
    async with client.responses.stream(**to_respond(**fields, instructions=BRIEF["content"])) as stream:
        events = [event async for event in stream]
    last = events[-1].response
    assert without_ids(last.to_dict()["output"]) == without_ids(whole.to_dict()["output"])
    assert [event.sequence_number for event in events] == [*range(len(events))]
    of_chat, usage = await chat(http, messages=[BRIEF, ASKED], **(CALLS["chat"] if calls else {"max_tokens": 9}))
    for each in (whole, last):
        assert (each.usage.input_tokens, each.usage.output_tokens) == usage
        assert (each.store, each.id[:5], each.object) == (False, "resp_", "response")
        assert each.status == each.output[-1].status == ("completed" if calls else "incomplete")
    kinds = [event.type.removeprefix("response.") for event in events if "delta" not in event.type]
    item = (
        ["function_call_arguments.done"] if calls else ["content_part.added", "output_text.done", "content_part.done"]
    )
    assert kinds[:-1] == ["created", "in_progress", "output_item.added", *item, "output_item.done"]
    if calls:
        [call], [said] = whole.output, of_chat["message"]["tool_calls"]
        assert (call.name, call.arguments) == tuple(said["function"].values())
    else:
        assert whole.output_text == of_chat["message"]["content"]
        assert whole.incomplete_details.reason == "max_output_tokens"


async def test_a_response_parses_into_a_model(client: Any) -> None:
    answer = await client.responses.parse(**to_respond(text_format=Weather))
    async with client.responses.stream(**to_respond(text_format=Weather)) as stream:
        assert (await stream.get_final_response()).output_parsed == answer.output_parsed
    assert isinstance(answer.output_parsed, Weather)


@pytest.mark.parametrize("streams", [False, True])
async def test_items_go_back_as_they_came(client: Any, http: httpx.AsyncClient, streams: bool) -> None:
    told, turns = list[Any]([ASKED]), list[Any]([ASKED])
    for _ in range(2):
        if streams:
            async with client.responses.stream(**to_respond(input=told, **CALLS["responses"])) as stream:
                answer = await stream.get_final_response()
        else:
            answer = await client.responses.create(**to_respond(input=told, **CALLS["responses"]))
        [call] = answer.output
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        told += [*answer.output, {"type": "function_call_output", "call_id": call.call_id, "output": "22"}]
        function = {"name": call.name, "arguments": call.arguments}
        turns += [
            {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "22"},
        ]
    raw = await client.responses.with_raw_response.create(
        **to_respond(input=told, tools=CALLS["responses"]["tools"], max_output_tokens=1)
    )
    assert {"input.id", "input.status"} <= {*raw.headers["x-swiftkv-ignored-fields"].split(", ")}
    _, usage = await chat(http, messages=turns, tools=TOOLS, max_tokens=1)
    assert raw.parse().usage.input_tokens == usage[0]


@pytest.mark.parametrize("calls", [False, True])
async def test_a_message_is_the_chats_whole_and_streamed(http: httpx.AsyncClient, calls: bool) -> None:
    fields: dict[str, Any] = CALLS["messages"] if calls else {"max_tokens": 9}
    fields = {**fields, "system": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]}
    whole, stream = await message(http, **fields), await message(http, **fields, stream=True)
    of_chat, usage = await chat(http, messages=[BRIEF, ASKED], **(CALLS["chat"] if calls else {"max_tokens": 9}))
    count = await http.post("/v1/messages/count_tokens", json={"model": "tiny", "messages": [ASKED], **fields})
    assert count.json() == {"input_tokens": usage[0]}
    for told in (whole, stream):
        used = told.pop("usage")
        assert (count_input(used), used["output_tokens"]) == usage
    assert without_ids(whole) == without_ids(stream)
    [block] = whole["content"]
    if calls:
        [call] = of_chat["message"]["tool_calls"]
        name, arguments = call["function"].values()
        assert (block["type"], block["name"], block["input"]) == ("tool_use", name, json.loads(arguments))
        assert whole["stop_reason"] == "tool_use"
    else:
        assert (block, whole["stop_reason"]) == ({"type": "text", "text": of_chat["message"]["content"]}, "max_tokens")


async def test_blocks_go_back_as_they_came(http: httpx.AsyncClient) -> None:
    first = await message(http, **CALLS["messages"])
    [block] = first["content"]
    result = {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "22"}]}
    told = [ASKED, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": [result]}]
    [call] = (await message(http, **{**CALLS["messages"], "messages": told}))["content"]
    jsonschema.validate(call["input"], SCHEMAS[call["name"]])


@pytest.mark.parametrize("stream", [False, True])
async def test_the_stop_sequence_that_ended_a_message_is_named(http: httpx.AsyncClient, stream: bool) -> None:
    [block] = (await message(http, max_tokens=40))["content"]
    stop = block["text"][9:12]
    ended = await message(http, max_tokens=40, stop_sequences=["no such text", stop], stream=stream)
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("stop_sequence", stop)
    assert "".join(part["text"] for part in ended["content"]) == block["text"][: block["text"].index(stop)]
    schema = {"type": "object", "properties": {"warm": {"enum": [True]}}, "required": ["warm"]}
    form = {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}
    for named in ({"output_config": form}, {"output_format": form["format"]}):
        closed = await message(http, **named, stream=stream)
        assert json.loads(closed["content"][0]["text"]) == {"warm": True}
        assert (closed["stop_reason"], closed["stop_sequence"]) == ("end_turn", None)


async def test_the_input_of_a_call_that_is_cut_off_goes_as_far_as_it_was_written(http: httpx.AsyncClient) -> None:
    choice = {"type": "tool", "name": "get_weather"}
    tools = [{"name": "get_weather", "input_schema": SCHEMAS["get_weather"]}]
    cut = await message(http, tools=tools, tool_choice=choice, max_tokens=70)
    assert cut["stop_reason"] == "max_tokens"
    assert cut["content"][0]["input"].keys() <= SCHEMAS["get_weather"]["properties"].keys()
    assert cut["content"][0]["input"]


async def test_a_message_goes_on_with_the_last_of_the_assistants(http: httpx.AsyncClient) -> None:
    told = [ASKED, {"role": "assistant", "content": "It is"}]
    [block] = (await message(http, messages=told, max_tokens=9))["content"]
    going_on = {"add_generation_prompt": False, "continue_final_message": True}
    of_chat, _ = await chat(http, messages=told, max_tokens=9, **going_on)
    assert block["text"] == of_chat["message"]["content"]


def said(content: Any, role: str = "assistant", **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


USE = {"type": "tool_use", "id": "a", "name": "a", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "22"}


PING = {"type": "function", "name": "ping", "parameters": SCHEMAS["ping"]}
HOSTED: list[Any] = [
    {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/s"}},
    {"type": "web_search", "external_web_access": False},
    {"type": "namespace", "name": "mcp__a", "tools": [PING]},
    {"type": "local_shell"},
    {"type": "tool_search", "execution": "client", "parameters": {}},
]
SERVER_TOOLS: list[Any] = [
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
    {"type": "bash_20250124", "name": "bash"},
    {"type": "mcp_toolset", "mcp_server_name": "a"},
    {"type": "function", "function": {"name": "f"}},
]


@pytest.mark.parametrize(
    ("route", "tools", "kept"),
    [
        ("responses", HOSTED, PING),
        ("messages", SERVER_TOOLS, {"name": "ping", "input_schema": SCHEMAS["ping"]}),
        ("chat/completions", [openai_tools.SKIPPED], TOOLS[1]),
    ],
)
async def test_tools_that_cannot_be_called_are_skipped_and_the_others_called(
    http: httpx.AsyncClient, route: str, tools: list[Any], kept: Any
) -> None:
    asked: dict[str, Any] = {"input" if route == "responses" else "messages": [ASKED]}
    asked["max_output_tokens" if route == "responses" else "max_tokens"] = 60
    choice = {"tool_choice": {"type": "any"} if route == "messages" else "required"}
    with_others, alone, only_skipped = [
        await http.post(f"/v1/{route}", json={**COMMON, **asked, **fields})
        for fields in ({**choice, "tools": [*tools, kept]}, {**choice, "tools": [kept]}, {"tools": tools})
    ]
    assert (with_others.status_code, alone.status_code) == (200, 200), with_others.text
    assert '"ping"' in with_others.text
    for name in ("output", "content", "tools", "choices"):
        assert without_ids(with_others.json().get(name)) == without_ids(alone.json().get(name))
    named = with_others.headers["x-swiftkv-ignored-fields"].split(", ")
    assert named == [f"tools.{tool['type']}" for tool in tools]
    assert only_skipped.status_code == 200, only_skipped.text


async def test_anthropics_limits_of_tools_are_anthropics(http: httpx.AsyncClient) -> None:
    long = "f" * 128
    tools = [{"name": long, "input_schema": SCHEMAS["ping"]}]
    answer = await message(http, tools=tools, tool_choice={"type": "tool", "name": long})
    assert [block["name"] for block in answer["content"]] == [long]
    many = [{**tools[0], "name": f"mcp__{number}"} for number in range(1024)]
    assert await message(http, tools=many, tool_choice={"type": "none"}, max_tokens=1)


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"previous_response_id": "r"}, "previous_response_id", "'r'.*send the whole conversation as input"),
        ({"include": ["message.output_text.logprobs"]}, "include", "available from /v1/chat/completions only"),
        (
            {"input": [{"type": "item_reference", "id": "x"}]},
            "input.0.type",
            "'item_reference'; the model accepts only text",
        ),
        ({"input": [{"type": "input_image"}]}, "input.0.type", "'input_image'"),
        ({"input": [said([{"type": "input_image"}], "user")]}, "input.0.content.0.type", "'input_image'; the model"),
        ({"input": [{"type": "function_call", "call_id": "a"}]}, "input.0", "name is missing"),
        (
            {"input": [{"type": "function_call", "call_id": "a", "name": "a", "arguments": []}]},
            "input.0.arguments",
            "valid string",
        ),
        ({"tools": [{"name": "f"}]}, "tools.0", "accepted here: function"),
        ({"tools": HOSTED, "tool_choice": {"type": "web_search"}}, "tool_choice", "an object of type 'function' or"),
        ({"tools": HOSTED, "tool_choice": {"type": "custom", "name": "patch"}}, "tool_choice", "an object of type"),
        (
            {"tools": HOSTED, "tool_choice": {"type": "function", "name": "patch"}},
            "tool_choice",
            "'patch'; the functions",
        ),
        (
            {"tools": HOSTED, "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": HOSTED[:1]}},
            "tool_choice.allowed_tools.tools.0.type",
            "'function'",
        ),
        (
            {"tools": HOSTED[:2], "tool_choice": "required"},
            "tool_choice",
            "'required'; the functions in tools are none",
        ),
        ({"tools": [*HOSTED, {"type": "function", "name": "f", "strict": 1}]}, "tools.5.strict", "boolean"),
        ({"tools": [{**PING, "name": "f" * 65}]}, "tools.0.name", "has 65 characters; use at most 64"),
        (
            {"tools": [{**PING, "name": f"f{number}"} for number in range(129)]},
            "tools",
            "129 entries; send at most 128",
        ),
        (
            {"tools": [*HOSTED, {"type": "function", "name": "f", "parameters": {"type": "array"}}]},
            "tools.5.parameters",
            "object",
        ),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": {"type": "array"}}]},
            "tools.0.parameters",
            "object",
        ),
        ({"tool_choice": {"type": "function", "name": "fly"}}, "tool_choice", "'fly'; the functions in tools are none"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"input": "x" * 3000}, "input", "maximum context length"),
        ({"text": {"format": {"type": "json_schema", "name": "a", "schema": {"not": {}}}}}, "text.format", "compiled"),
        ({"extra_body": {"messages": []}}, "messages", "a field of /v1/chat/completions"),
        ({"extra_body": {"n": 2}}, "n", "n is not a field of /v1/responses"),
        ({"model": "other"}, "model", "the served model is"),
    ],
)
async def test_what_a_response_cannot_be_is_named(client: Any, fields: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(openai.APIStatusError, match=f"(?s){reason}") as caught:
        await client.responses.create(**to_respond(**fields))
    assert caught.value.status_code == (404 if param == "model" else 400)
    assert (caught.value.param or "").startswith(param)
    assert caught.value.code == {"model": "model_not_found", "input": "context_length_exceeded"}.get(
        param, "invalid_input"
    )


PICTURE = {"type": "image", "source": {"type": "url", "url": "x"}}
PDF = {"type": "document", "title": "a.pdf", "source": {"type": "base64", "media_type": "application/pdf", "data": "x"}}
MIXED = {"type": "content", "content": [{"type": "text", "text": "a"}, PICTURE]}


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"max_tokens": None}, "max_tokens", "required"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        (
            {"messages": [said([PICTURE], "user")]},
            "messages.0.content.0.type",
            "'image'; the model accepts only text: send",
        ),
        ({"messages": [said([PICTURE], "user"), said("It is")]}, "messages.0.content.0.type", "'image'"),
        ({"messages": [said([PDF], "user")]}, "messages.0.content.0.type", "'document'"),
        ({"messages": [said([{**PDF, "source": MIXED}], "user")]}, "messages.0.content.0.type", "'document'"),
        ({"messages": [said([{"type": "thought", "text": "a"}], "user")]}, "messages.0.content.0.type", "'thought'"),
        ({"messages": [said([{"text": "a"}], "user")]}, "messages.0.content.0", "accepted here: text, tool_use"),
        ({"system": [{"type": "text", "text": "a"}, PICTURE]}, "system.1.type", "'image'"),
        ({"messages": [said([USE], "user")]}, "messages.0", "role 'assistant'"),
        ({"messages": [said([{"type": "text"}], "user")]}, "messages.0.content.0", "text is missing"),
        ({"messages": [said("x" * 3000, "user")]}, "messages", "maximum context length"),
        (
            {"tools": SERVER_TOOLS, "tool_choice": {"type": "tool", "name": "web_search"}},
            "tool_choice",
            "'web_search'; the",
        ),
        ({"tools": SERVER_TOOLS, "tool_choice": {"type": "any"}}, "tool_choice", "the functions in tools are none"),
        ({"tools": [*SERVER_TOOLS, {"name": "f"}]}, "tools.4", "input_schema is missing"),
        ({"tools": [{"name": "f" * 129, "input_schema": {}}]}, "tools.0.name", "pattern"),
        ({"tools": [{"name": "f", "input_schema": {}}] * 1025}, "tools", "at most 1024"),
        (
            {"tools": [*SERVER_TOOLS, {"name": "f", "input_schema": {"type": "array"}}]},
            "tools.4.input_schema.type",
            "obj",
        ),
        ({"tools": [{"name": "f", "input_schema": {"type": "array"}}]}, "tools.0.input_schema.type", "object"),
        ({"tool_choice": {"type": "any"}}, "tool_choice.type", "'any', but there are no tools"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice", "name is required with type tool"),
        ({"stop_sequences": [""]}, "stop_sequences", "non-empty"),
        (
            {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}},
            "context_management",
            "not shortened",
        ),
        ({"stop": ["a"]}, "stop", "stop is not a field of /v1/messages"),
        ({"model": "other"}, "model", "the served model is"),
    ],
)
async def test_what_a_message_cannot_be_is_named(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str, reason: str
) -> None:
    body = {**COMMON, "messages": [ASKED], "max_tokens": 4, **fields}
    response = await http.post("/v1/messages", json=body)
    document, status = response.json(), 404 if param == "model" else 400
    error = document["error"]
    assert (response.status_code, document["type"]) == (status, "error")
    assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert (error["param"], reason in error["message"]) == (param, True), error
    assert (error["code"] == "context_length_exceeded") == (param == "messages")
    assert error["message"].startswith("prompt is too long: ") == (param == "messages")


@pytest.mark.parametrize("route", ["responses", "messages"])
async def test_an_answer_that_fails_says_so_in_its_stream(http: httpx.AsyncClient, route: str) -> None:
    asks = {"responses": {"input": "a"}, "messages": {"messages": [ASKED], "max_tokens": 400}}
    body = {**COMMON, **asks[route], **CALLS[route], "timeout_s": 1e-6, "stream": True}
    text = (await http.post(f"/v1/{route}", json=body)).text
    [name, data] = [line.partition(": ")[2] for line in text.split("\n")[:2]]
    error = json.loads(data)
    assert (name, error["type"]) == ("error", "error")
    told = error["error"] if route == "messages" else error
    assert (told["param"], told["code"]) == ("timeout_s", "deadline_exceeded")


async def test_unknown_fields_are_an_operators_to_ignore(http: httpx.AsyncClient, version: ModelVersion) -> None:
    asks = {"responses": {"input": "a", "max_output_tokens": 1}, "messages": {"messages": [ASKED], "max_tokens": 1}}
    version.ignored_fields = frozenset({"*"})
    for route, fields in asks.items():
        response = await http.post(f"/v1/{route}", json={**COMMON, **fields, "colour": "red", "metadata": {}, "n": 3})
        assert response.status_code == 200, response.text
        assert response.headers["x-swiftkv-ignored-fields"] == "colour, metadata, n"


async def test_anthropics_key_opens_anthropics_routes_alone(version: ModelVersion, tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys.json", name="ann", tenant="a", scopes=frozenset({Scope.GENERATE}))
    http = asgi_client(application(version, key_ring=KeyRing(tmp_path / "keys.json")))
    asks = {"messages": {"max_tokens": 1}, "messages/count_tokens": {}, "chat/completions": {}}
    headers: list[dict[str, str]] = [
        {"x-api-key": key},
        {"Authorization": f"Bearer {key}"},
        {"x-api-key": "skv_no"},
        {},
    ]
    headers.append({"Authorization": "Bearer skv_no", "x-api-key": key})
    statuses = {
        route: [
            (await http.post(f"/v1/{route}", json={**COMMON, "messages": [ASKED], **fields}, headers=each)).status_code
            for each in headers
        ]
        for route, fields in asks.items()
    }
    opened = [200, 200, 401, 401, 401]
    assert statuses == {"messages": opened, "messages/count_tokens": opened, "chat/completions": [401, *opened[1:]]}
    refused = (await http.post("/v1/messages", json={}, headers=headers[2])).json()
    assert (refused["type"], refused["error"]["type"]) == ("error", "authentication_error")
