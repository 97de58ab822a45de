"""Tools by OpenAI's own client, on whichever real engine the fixture `engine` gives, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoTokenizer

import swiftkv_platform.sources
from swiftkv_platform.engine import EngineConfig
from swiftkv_platform.engine.frontend import EngineFrontend
from swiftkv_platform.serve.current import Current, ModelCard, Version
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.tools.families import FAMILIES
from tests.fakes.tokenizers import EOS
from tests.unit.engine.tiny_models import save_swiftkv

CONTEXT = 2048
TEMPLATE = Path(swiftkv_platform.sources.__file__).parent / "teacher" / "chat_template.jinja"
MESSAGES: list[Any] = [{"role": "user", "content": "Is it warm in Rome?"}]
ALPHABET = sorted(ByteLevel.alphabet())  # by token id, of the tiny model's tokenizer
SPACES = {str(ALPHABET.index(character)): -50 for character in "ĠĊĉč"}
"""Biases against whitespace, of which random weights would write much between the tokens of JSON."""
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": MESSAGES,
    "seed": 1,
    "max_tokens": 400,
    "temperature": 0.7,
    "logit_bias": SPACES,
}

WEATHER_SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Rome", "Oslo", "Łódź"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
        "unit": {"$ref": "#/$defs/unit"},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
    "$defs": {"unit": {"enum": ["C", "F"]}},
}
MOVE_SCHEMA = {
    "type": "object",
    "properties": {"by": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3}},
    "required": ["by"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, Any] = {
    "get_weather": WEATHER_SCHEMA,
    "move": MOVE_SCHEMA,
    "ping": {"type": "object", "additionalProperties": False},
}


def tool(name: str, *, strict: bool | None = None) -> Any:
    function: dict[str, Any] = {"name": name, "description": f"Does {name}."}
    if name != "ping":  # whose parameters are left out
        function["parameters"] = SCHEMAS[name]
    return {"type": "function", "function": function | ({} if strict is None else {"strict": strict})}


TOOLS = [tool(name) for name in SCHEMAS]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_swiftkv(tmp_path_factory.mktemp("swiftkv"), CONTEXT)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def engine_config() -> EngineConfig:
    return EngineConfig(max_num_seqs=8, stream_interval_s=0.0, kv_cache_bytes=64 << 20, grammar_timeout_s=60.0)


@pytest.fixture
def version(engine: EngineFrontend) -> Version:
    card = ModelCard(deployment="dep_1", model="tiny", manifest_digest=None, swiftkv=None, max_model_len=CONTEXT)
    return Version(engine, card, created=1)


@pytest.fixture
def client(version: Version) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(transport=httpx.ASGITransport(create_http_app(Current(version))))
    return openai.AsyncOpenAI(api_key="none", base_url="http://serve/v1", http_client=http, max_retries=0)


def check_calls(calls: Any, *, among: set[str]) -> None:
    """Each is of one of the tools and validates by its schema."""
    assert calls
    for call in calls:
        assert call.type == "function"
        assert call.id
        assert call.function.name in among
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


def said(choice: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]


def named(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


async def streamed(client: openai.AsyncOpenAI, **asked: Any) -> Any:
    """The choices of a stream, as OpenAI's client joins them, and its chunks."""
    async with client.chat.completions.stream(**asked) as stream:
        chunks = [event.chunk async for event in stream if event.type == "chunk"]
        return (await stream.get_final_completion()).choices, chunks


@pytest.mark.parametrize(
    ("family", "choice"), [*((family, "required") for family in FAMILIES), ("hermes", named("get_weather"))], ids=str
)
async def test_a_required_call_validates_whole_and_streamed(
    client: openai.AsyncOpenAI, version: Version, family: str, choice: Any
) -> None:
    version.tool_call_parser = family
    asked = {**ASKED, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    [whole] = (await client.chat.completions.create(**asked)).choices
    [joined], chunks = await streamed(client, **asked)
    among = set(SCHEMAS) if choice == "required" else {"get_weather"}
    assert whole.finish_reason == joined.finish_reason == "tool_calls"
    assert whole.message.content is None
    assert not joined.message.content
    check_calls(whole.message.tool_calls, among=among)
    assert len(whole.message.tool_calls or ()) == 1
    assert said(whole) == said(joined)
    first, *others = [call for chunk in chunks for each in chunk.choices for call in each.delta.tool_calls or ()]
    assert (first.index, first.type) == (0, "function")
    assert first.function.name in among
    assert all((delta.index, delta.id, delta.function.name) == (0, None, None) for delta in others)
    assert others, "arguments come in pieces"


async def test_a_function_without_parameters_is_called_without_arguments(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**ASKED, tools=TOOLS, tool_choice=named("ping"))
    check_calls(answer.choices[0].message.tool_calls, among={"ping"})
    assert said(answer.choices[0]) == [("ping", "{}")]


@pytest.mark.parametrize("family", FAMILIES)
async def test_several_calls_may_be_made_at_once(client: openai.AsyncOpenAI, version: Version, family: str) -> None:
    version.tool_call_parser = family
    going_on = {
        **SPACES,
        str(EOS): -100,
        str(ALPHABET.index("]")): -25,
    }  # where only "]" and spaces may follow, "]" does
    asked = {**ASKED, "tools": TOOLS, "tool_choice": "required", "max_tokens": 300, "logit_bias": going_on}
    [choice] = (await client.chat.completions.create(**asked)).choices
    calls = choice.message.tool_calls or []
    assert choice.finish_reason == "length"
    check_calls(calls[:-1], among=set(SCHEMAS))  # the last is cut off
    ids = {call.id for call in calls}
    assert len(ids) == len(calls) > 1
    assert {len(one) for one in ids} == ({9} if family.startswith("mistral") else {29})


async def test_calls_that_are_cut_off_say_so(client: openai.AsyncOpenAI) -> None:
    asked = {**ASKED, "tools": TOOLS, "tool_choice": named("get_weather"), "max_tokens": 70}
    [choice] = (await client.chat.completions.create(**asked)).choices
    joined = await streamed_cut(client, **asked)
    assert choice.finish_reason == joined["finish_reason"] == "length"
    [(name, arguments)] = said(choice)
    assert name == "get_weather"
    assert arguments.startswith("{")
    assert joined["arguments"] == arguments


async def streamed_cut(client: openai.AsyncOpenAI, **asked: Any) -> dict[str, Any]:
    """The arguments and end; OpenAI's own helper takes no answer that was cut off."""
    stream = await client.chat.completions.create(**asked, stream=True)
    choices = [chunk.choices[0] async for chunk in stream]
    deltas = [call.function for choice in choices for call in choice.delta.tool_calls or ()]
    arguments = "".join(delta.arguments or "" for delta in deltas if delta is not None)
    return {"arguments": arguments, "finish_reason": choices[-1].finish_reason}


async def test_a_strict_function_that_the_model_chose_validates_too(
    client: openai.AsyncOpenAI, version: Version
) -> None:
    version.tool_call_parser = "llama3"
    favoured = {**SPACES, str(ALPHABET.index("{")): 100, str(ALPHABET.index("g")): 50}  # as its calls begin
    asked = {**ASKED, "tools": [tool("get_weather", strict=True), tool("move")], "logit_bias": favoured}
    answer = await client.chat.completions.create(**asked)
    called = [call for choice in answer.choices for call in said(choice) if choice.finish_reason == "tool_calls"]
    assert "get_weather" in {name for name, _ in called}
    for name, arguments in called:
        jsonschema.validate(json.loads(arguments), WEATHER_SCHEMA if name == "get_weather" else {"type": "object"})


async def test_an_answer_that_calls_nothing_follows_the_response_format(client: openai.AsyncOpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "move", "schema": MOVE_SCHEMA}}
    against = {**SPACES, str(ALPHABET.index("<")): -100}
    asked = {**ASKED, "tools": TOOLS, "response_format": schema, "logit_bias": against}
    [choice] = (await client.chat.completions.create(**asked)).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    jsonschema.validate(json.loads(choice.message.content or ""), MOVE_SCHEMA)
    required = await client.chat.completions.create(**asked | {"tool_choice": "required", "logit_bias": SPACES})
    check_calls(required.choices[0].message.tool_calls, among=set(SCHEMAS))


async def test_tools_that_may_not_be_called_change_nothing(client: openai.AsyncOpenAI) -> None:
    plain = await client.chat.completions.create(**ASKED | {"max_tokens": 8})
    without = await client.chat.completions.create(**ASKED | {"max_tokens": 8}, tools=TOOLS, tool_choice="none")
    empty = await client.chat.completions.create(**ASKED | {"max_tokens": 8}, tools=[], parallel_tool_calls=True)
    assert plain.choices[0].message == without.choices[0].message == empty.choices[0].message
    assert plain.usage is not None
    assert without.usage is not None
    assert plain.usage.prompt_tokens == without.usage.prompt_tokens


async def test_text_of_an_answer_that_may_call_is_the_engines(client: openai.AsyncOpenAI) -> None:
    asked = {**ASKED, "tools": TOOLS, "max_tokens": 40, "n": 2}
    whole = await client.chat.completions.create(**asked)
    joined = await streamed_text(client, **asked)
    assert [choice.message.content for choice in whole.choices] == joined
    assert all(choice.message.tool_calls is None for choice in whole.choices)


async def streamed_text(client: openai.AsyncOpenAI, **asked: Any) -> list[str]:
    texts, roles = [""] * asked["n"], [""] * asked["n"]
    async for chunk in await client.chat.completions.create(**asked, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role or ""
    assert roles == ["assistant"] * asked["n"]
    return texts


async def test_a_conversation_with_calls_goes_on(client: openai.AsyncOpenAI) -> None:
    asked = {**ASKED, "tools": TOOLS, "tool_choice": "required"}
    first = (await client.chat.completions.create(**asked)).choices[0].message
    results: list[Any] = [
        {"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "22"}]}
        for call in first.tool_calls or ()
    ]
    told: list[Any] = [{"role": "developer", "content": "Be brief."}, *MESSAGES, first, *results]
    answer = await client.chat.completions.create(**asked | {"messages": told})
    check_calls(answer.choices[0].message.tool_calls, among=set(SCHEMAS))


CALL = {"id": "a", "type": "function", "function": {"name": "ping", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tool_choice": "required"}, "tool_choice", "tools has none"),
        ({"tools": TOOLS, "tool_choice": named("fly")}, "tool_choice", "'fly', and tools has get_weather, move, ping"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
        ({"tools": [{"type": "function"}]}, "tools.0.function", "required"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "'function'"),
        ({"tools": [tool("ping"), tool("ping")]}, "tools.1.function.name", "names must differ"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "pattern"),
        ({"tools": [tool("ping")] * 129}, "tools", "128"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools.0.function.parameters.type",
            "arguments are an 'object'",
        ),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
                "tool_choice": "required",
            },
            "tools",
            "cannot be compiled",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"description": "x" * 70000}}}]},
            "tools.0.function.parameters",
            "longer than",
        ),
        (
            {"tools": TOOLS, "extra_body": {"structured_outputs": {"regex": "a"}}, "parallel_tool_calls": False},
            "structured_outputs.regex",
            "tool_choice: none",
        ),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0", "needs tool_call_id"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": [CALL]}]}, "messages.0", "role 'assistant'"),
        ({"messages": [{"role": "user", "content": "a", "tool_call_id": "a"}]}, "messages.0", "role 'tool'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0", "content is missing"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]},
            "messages.0.content",
            "part 0 is of type 'image_url'",
        ),
    ],
)
async def test_what_cannot_be_called_is_named(
    client: openai.AsyncOpenAI, body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        await client.chat.completions.create(**{**ASKED, **body})
    assert caught.value.param is not None
    assert caught.value.param.startswith(param)


async def test_a_template_without_a_place_for_tools_is_named(
    client: openai.AsyncOpenAI, version: Version, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {**ASKED, "tools": TOOLS}
    for template, message in [("{{ messages }}", "no place for them"), ("{{ tools }}", "tool_call_parser names it")]:
        monkeypatch.setattr(version.tokenizer, "chat_template", template)
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            await client.chat.completions.create(**asked)
        assert caught.value.param == "tools"
