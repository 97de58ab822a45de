"""OpenAI's client for Python: chats, streams, structured answers and tools."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.outside.judges.conftest import MAX_TOKENS, MESSAGES, MODEL, Deployment, Weather

ASKED: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "seed": 1, "max_tokens": MAX_TOKENS}
SHORT: dict[str, Any] = {**ASKED, "max_tokens": 8, "temperature": 0.0, "extra_body": {"ignore_eos": True}}
TOOL = openai.pydantic_function_tool(Weather, name="get_weather")
TOOL_CHOICES: list[Any] = ["required", {"type": "function", "function": {"name": "get_weather"}}]


@pytest.fixture
def client(native: Deployment) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key="none", base_url=native.openai_url, max_retries=0) as client:
        yield client


def test_a_streamed_chat_joins_to_the_whole(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**SHORT)
    text, usages = "", []
    for chunk in client.chat.completions.create(**SHORT, stream=True, stream_options={"include_usage": True}):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usages += [chunk.usage.total_tokens] if chunk.usage else []
    assert whole.choices[0].finish_reason == "length"
    assert text == whole.choices[0].message.content
    assert usages == [whole.usage.total_tokens]


def test_fields_that_change_no_answer_are_taken(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(**SHORT)
    fields: dict[str, Any] = dict.fromkeys(("user", "safety_identifier", "prompt_cache_key"), "judge")
    fields |= {"store": True, "metadata": {"purpose": "judging"}, "service_tier": "auto"}
    assert client.chat.completions.create(**SHORT, **fields).choices[0].message == plain.choices[0].message


def test_no_token_is_asked_for_but_the_echo(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="hello", max_tokens=0, echo=True, logprobs=1)
    assert answer.choices[0].text == "hello"
    assert len(answer.choices[0].logprobs.tokens) == 5


def test_a_structured_answer_whole_and_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.parse(**ASKED, response_format=Weather)
    assert isinstance(whole.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(**ASKED, response_format=Weather) as stream:
        assert [event for event in stream if event.type == "content.delta"]
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Weather)


@pytest.mark.parametrize("choice", TOOL_CHOICES, ids=["required", "named"])
def test_a_call_of_a_tool_validates_whole_and_streamed(client: openai.OpenAI, choice: Any) -> None:
    asked = {**ASKED, "tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    whole = client.chat.completions.parse(**asked).choices[0]
    with client.chat.completions.stream(**asked) as stream:
        deltas = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        streamed = stream.get_final_completion().choices[0]
    assert len(deltas) > 1
    for made in (whole, streamed):
        [call] = made.message.tool_calls or []
        assert call.function.name == "get_weather"
        assert isinstance(call.function.parsed_arguments, Weather)
    # OpenAI ends the answer to a named choice with `stop`.
    assert {whole.finish_reason, streamed.finish_reason} <= {"tool_calls", "stop"}


def test_a_conversation_goes_on_after_a_tool(client: openai.OpenAI) -> None:
    asked = {**ASKED, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    message = client.chat.completions.create(**asked).choices[0].message
    [call] = message.tool_calls or []
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"celsius": 31}'}
    messages = [*MESSAGES, message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(**{**SHORT, "messages": messages}, tools=[TOOL], tool_choice="none")
    assert answer.choices[0].message.content
    assert not answer.choices[0].message.tool_calls
