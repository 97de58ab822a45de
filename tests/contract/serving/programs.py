"""Recorded requests of chat pages, editors and agents (`recorded.yaml`), on the real engine of the fixture `engine`:
answered in the form that each program reads."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from swiftkv_platform.security.keys import KeyRing, Scope, create_key
from swiftkv_platform.serve.replica_state import ModelVersion
from tests.contract.serving import openai_tools
from tests.contract.serving.conversations import count_input, joined, said
from tests.contract.serving.openai_tools import SPACES
from tests.contract.serving.replicas import application, asgi_client

engine_config = openai_tools.engine_config
model_dir = openai_tools.model_dir
version = openai_tools.version


@dataclass(frozen=True)
class Recorded:
    """A request that a program sends."""

    program: str
    route: str
    body: dict[str, Any]
    named: list[str] = field(default_factory=list)
    """Exactly the fields that the answer's header must name."""
    headers: dict[str, str] = field(default_factory=dict)
    query: str = ""

    def __str__(self) -> str:
        return self.program


@dataclass(frozen=True)
class Session(Recorded):
    """Requests of a session."""

    turns: list[list[Any]] = field(default_factory=list)
    """What each request adds to the conversation."""
    second: dict[str, Any] = field(default_factory=dict)
    """The second request, as one of chat completions."""

    def request(self, turn: int) -> Recorded:
        """Return request number `turn`, from 1."""
        body = json.loads(json.dumps(self.body).replace("{turn}", str(turn))) | GREEDY
        told = [message for added in self.turns[:turn] for message in added]
        body["input" if self.route == "responses" else "messages"] = told
        return Recorded(self.program, self.route, body, self.named, self.headers, self.query)


RECORDED = yaml.safe_load(Path(__file__).with_name("recorded.yaml").read_text())
GREEDY = {"temperature": 0.0, "logit_bias": SPACES}
REQUESTS = [Recorded(**fields) for fields in RECORDED["requests"]]
SESSIONS = [Session(**fields) for fields in RECORDED["sessions"]]
[CODEX] = [asked for asked in REQUESTS if asked.program.startswith("Codex")]


@pytest.fixture
def http(version: ModelVersion) -> httpx.AsyncClient:
    return asgi_client(application(version))


@pytest.fixture
def block_size() -> int:
    """Size of the blocks of the engine's prefix cache, in tokens: the native engine's on a CPU."""
    return 16


async def ask(http: httpx.AsyncClient, asked: Recorded) -> httpx.Response:
    body = {"model": "tiny", **asked.body}
    return await http.post(f"/v1/{asked.route}{asked.query}", json=body, headers=asked.headers)


def events(answer: httpx.Response) -> list[Any]:
    """Return the documents of a stream, including `[DONE]`."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def read_answer(asked: Recorded, answer: httpx.Response) -> tuple[str, dict[str, Any]]:
    """Return text and usage of an answer from where the program reads them; without usage if a stream reports none."""
    is_stream = asked.body.get("stream")
    if asked.route == "messages":
        message = joined(answer.text) if is_stream else answer.json()
        assert {block["type"] for block in message["content"]} <= {"text", "tool_use"}
        return join_texts(message["content"]), message["usage"]
    if asked.route == "responses":
        *deltas, last = events(answer)
        assert last["type"] in ("response.completed", "response.incomplete")
        text = "".join(event["delta"] for event in deltas if event["type"] == "response.output_text.delta")
        assert text == "".join(join_texts(item.get("content", [])) for item in last["response"]["output"])
        return text, last["response"]["usage"]
    if not is_stream:
        document = answer.json()
        [choice] = document["choices"]
        text = choice["text"] if asked.route == "completions" else choice["message"]["content"]
        assert isinstance(text, str)
        return text, document["usage"]
    *chunks, done = events(answer)
    assert done == "[DONE]"
    told = [choice for chunk in chunks for choice in chunk["choices"]]
    assert told[-1]["finish_reason"] in ("stop", "length", "tool_calls")
    if "stream_options" not in asked.body:
        return "".join(choice["text"] for choice in told), {}
    assert chunks[-1]["choices"] == []
    return "".join(choice["delta"].get("content") or "" for choice in told), chunks[-1]["usage"]


def join_texts(blocks: list[dict[str, Any]]) -> str:
    return "".join(block.get("text", "") for block in blocks)


def count_prompt(usage: dict[str, Any]) -> int:
    """Return the number of prompt tokens; 0 without usage."""
    if "cache_read_input_tokens" in usage:
        return count_input(usage)
    return usage.get("prompt_tokens", usage.get("input_tokens", 0))


@pytest.mark.parametrize("asked", REQUESTS, ids=str)
async def test_what_programs_send_is_answered_in_the_form_that_they_read(
    http: httpx.AsyncClient, asked: Recorded
) -> None:
    answer = await ask(http, asked)
    assert answer.status_code == 200, answer.text
    named = answer.headers.get("x-swiftkv-ignored-fields", "")
    assert {*filter(None, named.split(", "))} == {*asked.named}
    num_tokens = count_prompt(read_answer(asked, answer)[1])
    if asked.route == "messages":
        count = await http.post("/v1/messages/count_tokens?beta=true", json={"model": "tiny", **asked.body})
        assert count.json() == {"input_tokens": num_tokens}
    without = {name: value for name, value in asked.body.items() if name not in asked.named}
    same = Recorded(asked.program, asked.route, without)
    _, usage = read_answer(same, await ask(http, same))
    assert count_prompt(usage) == num_tokens, "ignored fields change nothing"


def count_cached(usage: dict[str, Any]) -> int:
    """Return the number of prompt tokens that came from the prefix cache."""
    if "cache_read_input_tokens" in usage:
        return usage["cache_read_input_tokens"]
    return (usage.get("prompt_tokens_details") or usage["input_tokens_details"])["cached_tokens"]


@pytest.mark.parametrize("session", SESSIONS, ids=str)
async def test_each_request_of_a_session_computes_what_it_adds(
    http: httpx.AsyncClient, session: Session, block_size: int
) -> None:
    num_before = 0
    for turn in range(1, 6):
        asked = session.request(turn)
        answer = await ask(http, asked)
        assert answer.status_code == 200, answer.text
        text, usage = read_answer(asked, answer)
        num_tokens = count_prompt(usage)
        assert num_tokens > num_before
        assert count_cached(usage) >= num_before - block_size
        if turn == 2:
            same = Recorded("", "chat/completions", {**session.second, "max_tokens": 9, **GREEDY})
            expected, chat_usage = read_answer(same, await ask(http, same))
            assert (text, num_tokens) == (expected, count_prompt(chat_usage))
        num_before = num_tokens
    named = answer.headers["x-swiftkv-ignored-fields"]
    assert {*named.split(", ")} == {*session.named}


IDENTIFIED = "x-anthropic-billing-header: cc_version=2.1.119.af{0}; cc_entrypoint=cli; cch=97bd{0};"
"""Claude Code's line, with values that change per request."""


@pytest.mark.parametrize(
    ("route", "instructions"),
    [
        ("messages", {"system": [{"type": "text", "text": IDENTIFIED}, {"type": "text", "text": "1."}]}),
        ("messages", {"system": f"{IDENTIFIED}\n2."}),
        ("messages", {"system": f"x-client-session: id={{0}}\r\n{IDENTIFIED.title()}\n\n3."}),
        ("messages", {"system": [{"type": "text", "text": f"4.{'.' * 40}"}, {"type": "text", "text": IDENTIFIED}]}),
        ("chat/completions", {"messages": [{"role": "system", "content": f"{IDENTIFIED}\n\n5."}]}),
        (
            "chat/completions",
            {"messages": [{"role": "developer", "content": [{"type": "text", "text": f" {IDENTIFIED}"}, "6."]}]},
        ),
        ("responses", {"instructions": f"{IDENTIFIED}\n7."}),
        ("responses", {"input": [{"role": "developer", "content": f"{IDENTIFIED}\n8."}]}),
    ],
)
async def test_lines_that_identify_a_client_leave_the_next_turn_its_prefix(
    http: httpx.AsyncClient, route: str, instructions: dict[str, Any], block_size: int
) -> None:
    """Behind proxies Claude Code's line arrives on every route."""
    name, limit = ("input", "max_output_tokens") if route == "responses" else ("messages", "max_tokens")
    told, num_before = [said("Is it warm in Rome? " * 20, "user")], 0
    for turn in range(2):
        begun = json.loads(json.dumps(instructions).replace("{0}", str(turn)))
        body = {"model": "tiny", limit: 4, **begun, name: [*begun.get(name, ()), *told]}
        answer = await http.post(f"/v1/{route}", json=body)
        assert answer.status_code == 200, answer.text
        assert "x-anthropic-billing-header" in answer.headers["x-swiftkv-ignored-fields"].lower().split(", ")
        told += [said("Yes."), said("And in Oslo?", "user")]
        usage = answer.json()["usage"]
        assert count_cached(usage) >= num_before - block_size
        num_before = count_prompt(usage)


async def test_a_response_that_codex_reads_goes_back_into_its_next_turn(http: httpx.AsyncClient) -> None:
    """Codex drops ids and statuses (openai/codex#12669)."""
    output = events(await ask(http, CODEX))[-1]["response"]["output"]
    kept = [{key: value for key, value in item.items() if key not in ("id", "status")} for item in output]
    told = [*CODEX.body["input"], *kept, CODEX.body["input"][1]]
    answer = await ask(http, Recorded(CODEX.program, CODEX.route, {**CODEX.body, "input": told}))
    assert answer.status_code == 200, answer.text


async def test_models_are_listed_in_the_forms_of_openai_and_anthropic(version: ModelVersion, tmp_path: Path) -> None:
    """Open WebUI and editors read `data` and `id`; Claude Code reads Anthropic's names, with Anthropic's key."""
    key = create_key(tmp_path / "keys.json", name="ann", tenant="a", scopes=frozenset({Scope.GENERATE}))
    http = asgi_client(application(version, key_ring=KeyRing(tmp_path / "keys.json")))
    for headers in ({"Authorization": f"Bearer {key}"}, {"x-api-key": key}):
        told = (await http.get("/v1/models?limit=1000", headers=headers)).raise_for_status().json()
        [model] = told["data"]
        assert (told["object"], model["object"], model["owned_by"]) == ("list", "model", "swiftkv")
        assert (told["first_id"], told["last_id"], told["has_more"]) == ("tiny", "tiny", False)
        assert (model["id"], model["type"], model["display_name"]) == ("tiny", "model", "tiny")
        assert model["created_at"] == "1970-01-01T00:00:01Z"
        assert (await http.get("/v1/models/tiny", headers=headers)).raise_for_status().json() == model
    assert (await http.get("/v1/models", headers={"x-api-key": "skv_no"})).status_code == 401
