"""Captured traffic of every route, on the real engine of the fixture `engine`, with random weights."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from swiftkv_platform.contract.traffic import MAX_USER_CHARS, CapturedRequest
from swiftkv_platform.engine.frontend import EngineFrontend
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.replica_state import ModelVersion, ReplicaState
from swiftkv_platform.specs.deployment import ResolvedCapture
from swiftkv_platform.storage.object_store import open_store
from swiftkv_platform.storage.traffic import TrafficReader
from tests.contract.serving import openai_tools
from tests.contract.serving.openai_tools import CONTEXT, TOOLS, asked
from tests.contract.serving.replicas import asgi_client, version_of

engine_config = openai_tools.engine_config
model_dir = openai_tools.model_dir

QUESTION = {"role": "user", "content": "Is it warm in Rome?"}
BRIEF = {"role": "system", "content": "Be brief."}
FEW = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}
OPENAI = {"model": "tiny", **FEW}
RESPONSES = {"model": "tiny", "max_output_tokens": 5, "temperature": 0.0, "ignore_eos": True}
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {**OPENAI, "messages": [BRIEF, QUESTION], "user": "ann"}),
    "responses": (
        "/v1/responses",
        {**RESPONSES, "instructions": BRIEF["content"], "input": QUESTION["content"], "safety_identifier": "ann"},
    ),
    "messages": (
        "/v1/messages",
        {**OPENAI, "system": BRIEF["content"], "messages": [QUESTION], "metadata": {"user_id": "ann"}},
    ),
    "completions": ("/v1/completions", {**OPENAI, "prompt": "Rome is", "user": "ann"}),
    "token ids": ("/v1/completions", {**OPENAI, "prompt": [72, 73, 74], "user": "ann"}),
    "generate": ("/generate", {**FEW, "prompt": "Rome is", "user": "ann"}),
    "generate messages": ("/generate", {**FEW, "messages": [BRIEF, QUESTION], "user": "ann"}),
}


@pytest.fixture
def version(engine: EngineFrontend, tmp_path: Path) -> ModelVersion:
    version = version_of(engine, "tiny", CONTEXT)
    version.capture = ResolvedCapture(share=1.0, redact=(), uri=str(tmp_path / "traffic"))
    return version


@pytest.fixture
def state(version: ModelVersion) -> ReplicaState:
    return ReplicaState(version)


@pytest.fixture
def app(state: ReplicaState) -> FastAPI:
    return create_http_app(state)


@pytest.fixture
def client(app: FastAPI) -> httpx.AsyncClient:
    return asgi_client(app)


async def end(state: ReplicaState) -> list[CapturedRequest]:
    """End the recorder; return the rows that are stored then."""
    await asyncio.to_thread(state.recorder.close)
    assert state.version.capture is not None
    return [*TrafficReader(open_store(state.version.capture.uri)).iterate_rows()]


def counted(state: ReplicaState) -> dict[str, float]:
    """Return the number of captured requests by outcome."""
    found = {}
    for line in state.metrics.render_page().decode().splitlines():
        if line.startswith("swiftkv:captured_requests_total{"):
            labels, _, value = line.partition("} ")
            found[labels.split('"')[1]] = float(value)
    return found


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def read_stream(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> list[Any]:
    response = await client.post(path, json={**body, "stream": True})
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def get_text(answer: dict[str, Any]) -> str:
    """Return the text of an answer of any route."""
    if "output" in answer:
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    if "content" in answer:
        return "".join(part["text"] for part in answer["content"])
    [choice] = answer["choices"]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def get_usage(answer: dict[str, Any]) -> tuple[int, int]:
    usage = answer["usage"]
    if "output_tokens" in usage:
        return usage["input_tokens"] + usage.get("cache_read_input_tokens", 0), usage["output_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


@pytest.mark.parametrize("name", ROUTES)
async def test_a_row_has_what_was_asked_and_answered(client: httpx.AsyncClient, state: ReplicaState, name: str) -> None:
    path, body = ROUTES[name]
    answer = await ask(client, path, body)
    [row] = await end(state)
    assert row.id == answer["id"].removeprefix("chatcmpl-").removeprefix("cmpl-").removeprefix("resp_").removeprefix(
        "msg_"
    ).removeprefix("gen_")
    assert (row.path, row.model, row.user) == (path, "tiny", "ann")
    assert (row.prompt_tokens, row.completion_tokens) == get_usage(answer) == (row.prompt_tokens, 5)
    assert (row.finish_reason, row.tools, row.redacted) == ("length", None, 0)
    if "prompt" in body:
        prompt = body["prompt"] if isinstance(body["prompt"], str) else state.version.tokenizer.decode(body["prompt"])
        assert (row.prompt, row.completion, row.messages) == (prompt, get_text(answer), None)
    else:
        assert row.messages == [BRIEF, QUESTION, {"role": "assistant", "content": get_text(answer)}]
        assert (row.prompt, row.completion) == (None, None)
    assert counted(state) == {"stored": 1.0}


@pytest.mark.parametrize("name", ROUTES)
async def test_a_stream_is_captured_as_its_answer(client: httpx.AsyncClient, state: ReplicaState, name: str) -> None:
    path, body = ROUTES[name]
    await read_stream(client, path, body)
    await ask(client, path, body)
    streamed, whole = await end(state)
    assert streamed.id != whole.id
    assert streamed.model_copy(update={"id": whole.id, "time": whole.time}) == whole


@pytest.mark.parametrize("name", ROUTES)
async def test_a_request_whose_caller_refuses_is_not_captured(
    client: httpx.AsyncClient, state: ReplicaState, name: str
) -> None:
    path, body = ROUTES[name]
    await ask(client, path, {**body, "store": False})
    await ask(client, path, {**body, "store": True})
    assert len(await end(state)) == 1


@pytest.mark.parametrize("store", ["false", "no", 0, [], {}])
@pytest.mark.parametrize("name", ["chat", "responses", "messages", "completions"])
async def test_any_other_value_of_store_than_true_refuses(
    client: httpx.AsyncClient, state: ReplicaState, name: str, store: Any
) -> None:
    path, body = ROUTES[name]
    await ask(client, path, {**body, "store": store})
    assert await end(state) == []


@pytest.mark.parametrize("name", ["chat", "responses", "messages", "completions", "token ids"])
async def test_only_rows_that_can_be_deleted_by_their_user_are_captured(
    client: httpx.AsyncClient, state: ReplicaState, name: str
) -> None:
    path, body = ROUTES[name]
    [field] = {"user", "safety_identifier", "metadata"} & body.keys()
    users: list[Any] = ["a" * MAX_USER_CHARS, "a" * (MAX_USER_CHARS + 1), "a\0", "a/b é\n", 17, ""]
    for user in users:
        await ask(client, path, {**body, field: {"user_id": user} if field == "metadata" else user})
    assert [row.user for row in await end(state)] == [users[0], users[3], "17", None]


@pytest.mark.parametrize("capture", [None, {"share": 0.0}])
async def test_nothing_is_captured_without_a_share(
    client: httpx.AsyncClient, state: ReplicaState, capture: dict[str, Any] | None, tmp_path: Path
) -> None:
    settings = state.version.capture
    assert settings is not None
    state.version.capture = None if capture is None else settings.model_copy(update=capture)
    for path, body in ROUTES.values():
        await ask(client, path, body)
    await asyncio.to_thread(state.recorder.close)
    assert not (tmp_path / "traffic").exists()
    assert counted(state) == {}


async def test_a_share_of_the_requests_is_captured(client: httpx.AsyncClient, state: ReplicaState) -> None:
    assert state.version.capture is not None
    state.version.capture = state.version.capture.model_copy(update={"share": 0.5})
    path, body = ROUTES["generate"]
    for _ in range(40):
        await ask(client, path, {**body, "max_tokens": 1})
    assert 5 <= len(await end(state)) <= 35  # fails once in 10 million runs


async def test_tool_calls_are_in_the_answer_of_every_route(client: httpx.AsyncClient, state: ReplicaState) -> None:
    body = asked(tool_choice="required", parallel_tool_calls=False)
    flat = [{"type": "function", **tool["function"]} for tool in TOOLS]
    schemas = [{**tool["function"]} for tool in TOOLS]
    anthropic = [{"name": each["name"], "input_schema": each.get("parameters", {"type": "object"})} for each in schemas]
    whole = await ask(client, "/v1/chat/completions", body)
    await read_stream(client, "/v1/chat/completions", body)
    others = {name: value for name, value in body.items() if name not in ("messages", "max_tokens", "tools")}
    responses = {**others, "input": body["messages"], "max_output_tokens": 400, "tools": flat}
    await ask(client, "/v1/responses", responses)
    choice = {"type": "any", "disable_parallel_tool_use": True}
    others = {name: value for name, value in body.items() if name not in ("tool_choice", "parallel_tool_calls")}
    await ask(client, "/v1/messages", {**others, "tools": anthropic, "tool_choice": choice})
    rows = await end(state)
    assert len(rows) == 4
    for row in rows:
        assert row.messages is not None
        assert row.tools is not None
        assert [tool["function"]["name"] for tool in row.tools] == ["get_weather", "move", "ping"]
        assert row.finish_reason == "tool_calls"
        assert row.messages[-1]["content"] is None
    [call] = rows[0].messages[-1]["tool_calls"]
    [given] = whole["choices"][0]["message"]["tool_calls"]
    assert call["function"] == given["function"]
    assert rows[1].messages[-1]["tool_calls"][0]["function"] == given["function"]


async def test_earlier_calls_are_in_openais_format(client: httpx.AsyncClient, state: ReplicaState) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "ping", "arguments": '{"x": [1, "é"]}'}}
    told = [
        QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "22"},
    ]
    await ask(client, "/v1/chat/completions", {**OPENAI, "messages": told})
    use = {"type": "tool_use", "id": "a", "name": "ping", "input": {"x": [1, "é"]}}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "22"}
    messages = [QUESTION, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    await ask(client, "/v1/messages", {**OPENAI, "messages": messages})
    for row in await end(state):
        assert row.messages is not None
        assert row.messages[:-1] == told


async def test_a_continued_message_is_one_message(client: httpx.AsyncClient, state: ReplicaState) -> None:
    messages = [QUESTION, {"role": "assistant", "content": "It is"}]
    answer = await ask(client, "/v1/messages", {**OPENAI, "messages": messages})
    [row] = await end(state)
    assert row.messages == [QUESTION, {"role": "assistant", "content": "It is" + get_text(answer)}]


async def test_each_prompt_has_a_row_with_its_first_sample(client: httpx.AsyncClient, state: ReplicaState) -> None:
    body = {**OPENAI, "prompt": ["one", "two"], "n": 2, "temperature": 1.0, "seed": 3}
    answer = await ask(client, "/v1/completions", body)
    rows = await end(state)
    request_id = answer["id"].removeprefix("cmpl-")
    assert [row.id for row in rows] == [f"{request_id}/0", f"{request_id}/1"]
    assert [row.prompt for row in rows] == ["one", "two"]
    assert [row.completion for row in rows] == [answer["choices"][number]["text"] for number in (0, 2)]


async def test_a_prompt_that_is_only_scored_is_not_captured(client: httpx.AsyncClient, state: ReplicaState) -> None:
    await ask(client, "/v1/completions", {**OPENAI, "prompt": "one", "max_tokens": 0, "echo": True})
    assert await end(state) == []


async def test_only_finished_requests_are_captured(
    client: httpx.AsyncClient, app: FastAPI, state: ReplicaState
) -> None:
    # 1. refused
    assert (await client.post("/generate", json={"prompt": "x", "max_tokens": -1})).status_code == 422
    # 2. too late
    late = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "timeout_s": 1e-3}
    assert (await client.post("/generate", json=late)).status_code == 504
    # 3. left while streaming
    await leave_stream(app, {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True})
    assert await end(state) == []
    assert counted(state) == {}


async def leave_stream(app: FastAPI, body: dict[str, Any]) -> None:
    """Send a request, and disconnect after the first part of its answer."""
    content = json.dumps(body).encode()
    messages = asyncio.Queue[dict[str, Any]]()
    messages.put_nowait({"type": "http.request", "body": content})
    num_parts = 0

    async def send(message: Any) -> None:
        nonlocal num_parts
        if message["type"] == "http.response.body" and message.get("body"):
            num_parts += 1
            if num_parts == 1:
                messages.put_nowait({"type": "http.disconnect"})

    headers = [(b"host", b"serve"), (b"content-type", b"application/json")]
    headers.append((b"content-length", str(len(content)).encode()))
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/generate",
        "raw_path": b"/generate",
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("serve", 80),
        "scheme": "http",
        "http_version": "1.1",
        "root_path": "",
        "state": {},
    }
    await app(scope, messages.get, send)
    assert num_parts < 2000


async def test_texts_are_redacted(client: httpx.AsyncClient, state: ReplicaState) -> None:
    assert state.version.capture is not None
    state.version.capture = state.version.capture.model_copy(update={"redact": ("email",)})
    told = {"role": "user", "content": "Write to ann@example.org or +49 30 1234567."}
    await ask(client, "/v1/chat/completions", {**OPENAI, "messages": [told]})
    await ask(client, "/generate", {**FEW, "prompt": told["content"]})
    chat, text = await end(state)
    assert chat.messages is not None
    assert chat.messages[0]["content"] == text.prompt == "Write to [email] or +49 30 1234567."
    assert (chat.redacted, text.redacted) == (1, 1)


async def test_a_candidate_is_captured_under_its_own_name(
    client: httpx.AsyncClient, state: ReplicaState, engine: EngineFrontend
) -> None:
    version = state.version
    version.candidate = version_of(engine, "other", CONTEXT)
    version.candidate.capture, version.candidate_share = version.capture, 1.0
    await ask(client, "/generate", {**FEW, "prompt": "x"})
    assert [row.model for row in await end(state)] == ["other"]


async def test_the_rest_is_stored_when_the_application_ends(app: FastAPI, state: ReplicaState) -> None:
    async with app.router.lifespan_context(app):
        await ask(asgi_client(app), *ROUTES["chat"])
    assert len(await end(state)) == 1
