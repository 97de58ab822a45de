"""Tools with OpenAI's own client, and turns of a conversation as clients send them back, on the real engine of the
fixture `engine`, with random weights."""

import json
from collections.abc import Container
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pytest
from pydantic import BaseModel
from tokenizers.pre_tokenizers import ByteLevel

import swiftkv_platform.sources
from swiftkv_platform.engine import EngineConfig
from swiftkv_platform.engine.frontend import EngineFrontend
from swiftkv_platform.serve.replica_state import ModelVersion
from swiftkv_platform.serve.tools.families import FAMILIES
from tests.contract.serving.replicas import application, openai_client, save_chat_model, version_of
from tests.support.fakes.tokenizers import EOS

CONTEXT = 2048
TEMPLATE = Path(swiftkv_platform.sources.__file__).parent / "teacher" / "chat_template.jinja"
MESSAGES: list[Any] = [{"role": "user", "content": "Is it warm in Rome?"}]
ALPHABET = sorted(ByteLevel.alphabet())  # by token id, of the tiny model's tokenizer
SPACES = {str(ALPHABET.index(character)): -50 for character in "ĠĊĉč"}
"""Biases against whitespace, which random weights would write a lot between the tokens of JSON."""


def closed(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these fields and no others."""
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


WEATHER = closed(
    city={"enum": ["Rome", "Oslo", "Łódź"]},
    days={"type": "integer", "minimum": 1, "maximum": 14},
    unit={"$ref": "#/$defs/unit"},
) | {"$defs": {"unit": {"enum": ["C", "F"]}}}
MOVE = closed(by={"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3})
SCHEMAS: dict[str, Any] = {"get_weather": WEATHER, "move": MOVE, "ping": closed()}


def tool(name: str, **fields: Any) -> Any:
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", **fields}}


TOOLS = [tool("get_weather", parameters=WEATHER), tool("move", parameters=MOVE), tool("ping")]


def asked(**fields: Any) -> dict[str, Any]:
    usual = {"seed": 1, "max_tokens": 400, "temperature": 0.7, "logit_bias": SPACES, "tools": TOOLS}
    return {"model": "tiny", "messages": MESSAGES, **usual, **fields}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("swiftkv"), CONTEXT, TEMPLATE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def engine_config() -> EngineConfig:
    return EngineConfig(max_num_seqs=8, stream_interval_s=0.0, kv_cache_bytes=64 << 20, grammar_timeout_s=60.0)


@pytest.fixture
def version(engine: EngineFrontend) -> ModelVersion:
    return version_of(engine, "tiny", CONTEXT)


@pytest.fixture
def client(version: ModelVersion) -> Any:
    return openai_client(application(version))


async def chat(client: Any, **fields: Any) -> Any:
    """Return the only choice of an answer."""
    [choice] = (await client.chat.completions.create(**asked(**fields))).choices
    return choice


async def streamed(client: Any, **fields: Any) -> Any:
    """Return a stream's choice, as OpenAI's client joins it, and its chunks."""
    async with client.chat.completions.stream(**asked(**fields)) as stream:
        chunks = [event.chunk async for event in stream if event.type == "chunk"]
        return (await stream.get_final_completion()).choices[0], chunks


def check_calls(calls: Any, among: Container[str] = SCHEMAS) -> None:
    """Assert that each call is of one of the tools and validates against its schema."""
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


def allowed(mode: str, *names: str) -> Any:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


ARRAYS = pytest.mark.soak("arrays of calls, which the parsers of hermes and mistral_v11 read as well")
CHOICES = [
    *(
        pytest.param(family, "required", marks=ARRAYS if family in ("smollm2", "mistral") else ())
        for family in FAMILIES
    ),
    ("hermes", named("get_weather")),
]


@pytest.mark.parametrize(("family", "choice"), CHOICES, ids=str)
async def test_a_required_call_validates_whole_and_streamed(
    client: Any, version: ModelVersion, family: str, choice: Any
) -> None:
    version.tool_call_parser = family
    fields = {"tool_choice": choice, "parallel_tool_calls": False}
    whole = await chat(client, **fields)
    joined, chunks = await streamed(client, **fields)
    among = SCHEMAS if choice == "required" else {"get_weather"}
    assert whole.finish_reason == joined.finish_reason == "tool_calls"
    assert whole.message.content is None
    assert not joined.message.content
    check_calls(whole.message.tool_calls, among)
    assert said(whole) == said(joined)
    assert len(said(whole)) == 1
    first, *others = [call for chunk in chunks for each in chunk.choices for call in each.delta.tool_calls or ()]
    assert (first.index, first.type) == (0, "function")
    assert first.function.name in among
    assert all((delta.index, delta.id, delta.function.name) == (0, None, None) for delta in others)
    assert others, "arguments come in pieces"


async def test_a_function_without_parameters_is_called_without_arguments(client: Any) -> None:
    assert said(await chat(client, tool_choice=named("ping"))) == [("ping", "{}")]


@pytest.mark.parametrize(("family", "length"), [("hermes", 29), ("mistral_v11", 9)])
async def test_several_calls_may_be_made_at_once(client: Any, version: ModelVersion, family: str, length: int) -> None:
    version.tool_call_parser = family
    # These biases make the model choose "]" only where nothing but "]" and whitespace may follow.
    going_on = {**SPACES, str(EOS): -100, str(ALPHABET.index("]")): -25}
    choice = await chat(client, tool_choice="required", max_tokens=200, logit_bias=going_on)
    calls = choice.message.tool_calls
    assert choice.finish_reason == "length"
    check_calls(calls[:-1])  # the last is cut off
    ids = {call.id for call in calls}
    assert len(ids) == len(calls) > 1
    assert {len(one) for one in ids} == {length}


async def test_calls_that_are_cut_off_say_so(client: Any) -> None:
    fields = {"tool_choice": named("get_weather"), "max_tokens": 70}
    whole = await chat(client, **fields)
    # OpenAI's own helper raises for a truncated answer.
    stream = await client.chat.completions.create(**asked(**fields, stream=True))
    choices = [chunk.choices[0] async for chunk in stream]
    calls = [call.function for choice in choices for call in choice.delta.tool_calls or ()]
    assert whole.finish_reason == choices[-1].finish_reason == "length"
    [(name, arguments)] = said(whole)
    assert name == "get_weather"
    assert arguments.startswith("{")
    assert "".join(call.arguments or "" for call in calls) == arguments


@pytest.mark.parametrize("cut", ["city", '"days"', "stop_token_ids"])
async def test_a_stop_within_a_calls_arguments_is_no_call(client: Any, cut: str) -> None:
    fields: dict[str, Any] = {"tool_choice": named("get_weather"), "stop": [cut], "n": 4, "temperature": 1.0}
    if cut == "stop_token_ids":
        fields |= {"stop": [], "extra_body": {cut: [ALPHABET.index(":")]}}
    whole = await client.chat.completions.create(**asked(**fields))
    reasons: dict[int, str] = {}
    async for chunk in await client.chat.completions.create(**asked(**fields, stream=True)):
        reasons |= {choice.index: choice.finish_reason for choice in chunk.choices if choice.finish_reason}
    assert [choice.finish_reason for choice in whole.choices] == [reasons[number] for number in range(4)]
    assert "stop" in reasons.values()
    for choice in whole.choices:
        if choice.finish_reason == "tool_calls":
            check_calls(choice.message.tool_calls)


async def test_a_strict_function_that_the_model_chose_validates_too(client: Any, version: ModelVersion) -> None:
    version.tool_call_parser = "llama3"
    favoured = {**SPACES, str(ALPHABET.index("{")): 100, str(ALPHABET.index("g")): 50}  # the first tokens of a call
    tools = [tool("get_weather", parameters=WEATHER, strict=True), TOOLS[1]]
    choice = await chat(client, tools=tools, logit_bias=favoured)
    assert choice.finish_reason == "tool_calls"
    assert "get_weather" in dict(said(choice))
    for name, arguments in said(choice):
        jsonschema.validate(json.loads(arguments), WEATHER if name == "get_weather" else {"type": "object"})


async def test_an_answer_that_calls_nothing_follows_the_response_format(client: Any) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "move", "schema": MOVE}}
    against = {**SPACES, str(ALPHABET.index("<")): -100}
    choice = await chat(client, response_format=schema, logit_bias=against)
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    jsonschema.validate(json.loads(choice.message.content), MOVE)
    check_calls((await chat(client, response_format=schema, tool_choice="required")).message.tool_calls)


@pytest.mark.parametrize("mode", ["required", "auto"])
async def test_some_of_the_tools_are_seen_with_the_others_and_called_alone(
    client: Any, version: ModelVersion, mode: str
) -> None:
    version.tool_call_parser = "llama3"
    begun = {**SPACES, str(ALPHABET.index("{")): 100}  # the first token of a call
    fields = {"tool_choice": allowed(mode, "move", "ping"), "logit_bias": begun if mode == "auto" else SPACES}
    whole = await client.chat.completions.create(**asked(n=4, max_tokens=120, **fields))
    auto = await client.chat.completions.create(**asked(max_tokens=1))
    assert whole.usage.prompt_tokens == auto.usage.prompt_tokens
    calls = [call for choice in whole.choices for call in choice.message.tool_calls or ()]
    assert calls
    assert {call.function.name for call in calls} <= {"move", "ping"}


async def test_schemas_of_tools_that_are_called_freely_are_not_compiled(client: Any) -> None:
    free = tool("f", parameters={"not": {}, "properties": {"a": {"type": "string", "format": "x", "pattern": "(?=a)"}}})
    assert await chat(client, tools=[free], max_tokens=1)
    described = tool("f", parameters=closed(a={"enum": ["b"], "format": "x", "x-y": 1}), strict=True)
    assert said(await chat(client, tools=[described], tool_choice="required", parallel_tool_calls=False))[0][0] == "f"


async def test_tools_that_may_not_be_called_change_nothing(client: Any) -> None:
    fields = {"tool_choice": "none"}, {"tools": [], "parallel_tool_calls": True}, {"tools": openai.NOT_GIVEN}
    answers = [await client.chat.completions.create(**asked(max_tokens=8, **each)) for each in fields]
    [without, empty, plain] = [(answer.choices[0].message, answer.usage.prompt_tokens) for answer in answers]
    assert plain == without == empty


async def test_text_of_an_answer_that_may_call_is_the_engines(client: Any) -> None:
    fields = asked(max_tokens=40, n=2)
    whole = await client.chat.completions.create(**fields)
    texts, roles = [""] * 2, [""] * 2
    async for chunk in await client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] += choice.delta.role or ""
    assert roles == ["assistant"] * 2
    assert [choice.message.content for choice in whole.choices] == texts
    assert all(choice.message.tool_calls is None for choice in whole.choices)


async def test_a_conversation_with_calls_goes_on(client: Any) -> None:
    first = (await chat(client, tool_choice="required")).message
    content = [{"type": "text", "text": "22"}]
    results = [{"role": "tool", "tool_call_id": call.id, "content": content} for call in first.tool_calls]
    told = [{"role": "developer", "content": "Be brief."}, *MESSAGES, first, *results]
    check_calls((await chat(client, tool_choice="required", messages=told)).message.tool_calls)


CALL = {"id": "a", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}


SKIPPED: Any = {"type": "custom", "custom": {"name": "patch"}}


def bare(**function: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function}]}


def message(**fields: Any) -> dict[str, Any]:
    return {"tools": openai.NOT_GIVEN, "messages": [{"role": "user", "content": "a", **fields}]}


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({"tools": openai.NOT_GIVEN, "tool_choice": "required"}, "tool_choice", "the functions in tools are none"),
        ({"tool_choice": named("fly")}, "tool_choice", "'fly'; the functions in tools are get_weather, move, ping"),
        (
            {"tool_choice": "any"},
            "tool_choice",
            "tool_choice: must be 'none', 'auto', 'required'",
        ),
        ({"tool_choice": {"type": "auto"}}, "tool_choice", "an object of type 'function' or"),
        ({"tools": [{"type": "function"}]}, "tools.0", "function is missing"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools.0", "accepted here: function"),
        ({"tools": [SKIPPED], "tool_choice": "required"}, "tool_choice", "the functions in tools are none"),
        ({"tools": [SKIPPED], "tool_choice": SKIPPED}, "tool_choice", "an object of type 'function' or"),
        ({"tools": [SKIPPED, TOOLS[2], tool("f", parameters={"type": "array"})]}, "tools.2.function", "an 'object'"),
        (
            {"tools": [SKIPPED, tool("f", parameters=closed(a={"not": {}}))], "tool_choice": "required"},
            "tools.1.function.parameters",
            "cannot be compiled",
        ),
        ({"tools": [tool("ping"), tool("ping")]}, "tools.1.function.name", "names must differ"),
        (bare(name="a b"), "tools.0.function.name", "pattern"),
        ({"tools": [tool("ping")] * 129}, "tools", "129 entries; send at most 128"),
        (bare(name="f" * 65), "tools.0.function.name", "has 65 characters; use at most 64"),
        (bare(name="f", parameters={"type": "array"}), "tools.0.function.parameters.type", "arguments are an 'object'"),
        (
            {"tools": [TOOLS[2], tool("f", parameters=closed(a={"not": {}}))], "tool_choice": "required"},
            "tools.1.function.parameters",
            "tools.1.function.parameters.properties.a has 'not', which cannot be compiled",
        ),
        (
            {"tools": [TOOLS[2], tool("f", parameters=closed(a={"type": "string", "pattern": "(?=a)"}), strict=True)]},
            "tools.1.function.parameters",
            r"tools.1.function.parameters.properties.a.pattern cannot be compiled.*look-around",
        ),
        (
            {"tools": [tool("f", parameters={"$ref": "#/nowhere"})], "tool_choice": named("f")},
            "tools.0.function.parameters",
            r"tools.0.function.parameters.\$ref cannot be compiled",
        ),
        (
            {"tool_choice": allowed("auto", "ping", "fly")},
            "tool_choice",
            "'fly'; the functions in tools are get_weather, move, ping",
        ),
        (
            {"tool_choice": allowed("any", "ping")},
            "tool_choice.allowed_tools.allowed_tools.mode",
            "'auto' or 'required'",
        ),
        (bare(name="f", parameters={"description": "x" * 70000}), "tools.0.function.parameters", "longer than"),
        ({"extra_body": {"structured_outputs": {"regex": "a"}}}, "structured_outputs.regex", "tool_choice: none"),
        (message(role="tool"), "messages.0", "needs tool_call_id"),
        (message(tool_calls=[CALL]), "messages.0", "role 'assistant'"),
        (message(tool_call_id="a"), "messages.0", "role 'tool'"),
        (message(content=None), "messages.0", "content is missing"),
        (
            message(content=["a", PICTURE]),
            "messages.0.content.1.type",
            "'image_url'; the model accepts only text: send text",
        ),
        (message(role="system", content=[PICTURE]), "messages.0.content.0.type", "'image_url'"),
        (message(content=[{"type": "text"}]), "messages.0.content.0", "text is missing; type 'text' needs text"),
        (message(content={"type": "text"}), "messages.0.content", "a list of parts"),
        (message(content=None, audio={"id": "a"}), "messages.0.content.0.type", "'audio'"),
    ],
)
async def test_what_cannot_be_called_is_named(client: Any, body: dict[str, Any], param: str, reason: str) -> None:
    with pytest.raises(openai.BadRequestError, match=f"(?s){reason}") as caught:
        await chat(client, **body)
    assert (caught.value.param or "").startswith(param)


async def test_a_template_without_a_place_for_tools_is_named(
    client: Any, version: ModelVersion, monkeypatch: pytest.MonkeyPatch
) -> None:
    for template, reason in [
        ("{{ messages }}", "does not support tools"),
        ("{{ tools }}", "set the deployment's tool_call_parser"),
    ]:
        monkeypatch.setattr(version.tokenizer, "chat_template", template)
        with pytest.raises(openai.BadRequestError, match=reason) as caught:
            await chat(client)
        assert caught.value.param == "tools"


CACHED = {"cache_control": {"type": "ephemeral"}}
SAID = {"role": "assistant", "content": "22"}


class Weather(BaseModel):
    """A tool's arguments, from which OpenAI's client makes the tool."""

    city: Literal["Rome", "Oslo"]
    days: Literal[1, 2]


@pytest.mark.parametrize("streams", [False, True])
async def test_what_the_clients_helpers_returned_goes_back_over_several_turns(client: Any, streams: bool) -> None:
    """With the parsed arguments and contents that the client adds to its messages."""
    told, tools = [*MESSAGES], [openai.pydantic_function_tool(Weather)]
    fields = {"tools": tools, "response_format": Weather, "tool_choice": "required", "parallel_tool_calls": False}
    against = {**SPACES, str(ALPHABET.index("<")): -100}  # the first token of a call
    for turn in ({}, {}, {"tool_choice": "auto", "logit_bias": against}, {}, {}):
        body = asked(messages=told, **fields | turn)
        if streams:
            async with client.chat.completions.stream(**body) as stream:
                message = (await stream.get_final_completion()).choices[0].message
        else:
            message = (await client.chat.completions.parse(**body)).choices[0].message
        told.append(message)
        for call in message.tool_calls or ():
            assert isinstance(call.function.parsed_arguments, Weather)
            told.append({"role": "tool", "tool_call_id": call.id, "content": [{"type": "text", "text": "22"}]})
        assert isinstance(message.parsed, Weather) == (turn != {})
    raw = await client.chat.completions.with_raw_response.create(**asked(messages=told, tools=tools, max_tokens=1))
    named = raw.headers["x-swiftkv-ignored-fields"].split(", ")
    assert {"messages.parsed", "messages.tool_calls.function.parsed_arguments"} <= {*named}


@pytest.mark.parametrize(
    ("turn", "as_if"),
    [
        ({**SAID, "id": "x", "thinking_blocks": [{}], "provider_specific_fields": {"a": {}}, "annotations": []}, SAID),
        ({**SAID, "content": [{"type": "text", "text": "22", **CACHED}]}, SAID),
        ({**SAID, "content": [{"type": "output_text", "text": "2"}, "2"], "audio": None, "tool_calls": []}, SAID),
        ({**SAID, "content": [{"type": "refusal", "refusal": "22"}]}, SAID),
        ({"role": "assistant", "content": None, "refusal": "22"}, SAID),
        ({**SAID, "reasoning": "hm"}, {**SAID, "reasoning_content": "hm"}),
        ({**SAID, "content": []}, {**SAID, "content": ""}),
    ],
    ids=str,
)
async def test_a_turn_from_elsewhere_is_laid_out_by_what_it_says(
    client: Any, version: ModelVersion, monkeypatch: pytest.MonkeyPatch, turn: Any, as_if: Any
) -> None:
    shows = "{% for m in messages %}{{ m | tojson }}{% endfor %}{{ tools | tojson }}"
    monkeypatch.setattr(version.tokenizer, "chat_template", shows + "<tool_call>")
    tools = [{**TOOLS[2], **CACHED}, {**TOOLS[1], "function": {**TOOLS[1]["function"], **CACHED}}]
    both = [
        await client.chat.completions.create(**asked(messages=[*MESSAGES, said, *MESSAGES], max_tokens=1, tools=given))
        for said, given in ((turn, tools), (as_if, [TOOLS[2], TOOLS[1]]))
    ]
    assert both[0].usage.prompt_tokens == both[1].usage.prompt_tokens


@pytest.mark.parametrize("content", [None, [], ""])
@pytest.mark.parametrize("arguments", ['{"by": 1}', {"by": 1}], ids=type)
async def test_calls_in_the_form_before_tool_calls_are_calls(client: Any, content: Any, arguments: Any) -> None:
    function = {"name": "move", "arguments": arguments, "parsed_arguments": {}}
    old: Any = {"role": "assistant", "content": content, "function_call": function}
    new = {"role": "assistant", "content": content, "tool_calls": [{**CALL, "id": "call_0", "function": function}]}
    fields = {"tool_choice": "required", "temperature": 0.0}
    told = [said(await chat(client, messages=[*MESSAGES, turn, *MESSAGES], **fields)) for turn in (old, new)]
    assert told[0] == told[1]
