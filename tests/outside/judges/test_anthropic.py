"""Anthropic's client for Python: messages, streams, structured answers, tools over turns, counts of tokens, models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel, ConfigDict

from tests.outside.judges.conftest import MAX_TOKENS, MESSAGES, MODEL, City, Deployment, Weather

TOOL: Any = {"name": "get_weather", "input_schema": Weather.model_json_schema()}


class Place(BaseModel):
    """An answer without bounds of numbers, which Anthropic's client does not send."""

    model_config = ConfigDict(extra="forbid")
    city: City
    celsius: bool


Ask = Callable[..., anthropic.types.Message]


@pytest.fixture
def client(native: Deployment) -> anthropic.Anthropic:
    return anthropic.Anthropic(api_key="none", base_url=native.url, max_retries=0)


@pytest.fixture(params=["whole", "streamed"])
def ask(client: anthropic.Anthropic, request: pytest.FixtureRequest) -> Ask:
    def ask(**fields: Any) -> anthropic.types.Message:
        usual = {"model": MODEL, "max_tokens": MAX_TOKENS, "messages": MESSAGES, "extra_body": {"seed": 1}}
        if request.param == "whole":
            return client.messages.create(**usual | fields)
        with client.messages.stream(**usual | fields) as stream:
            return stream.get_final_message()

    return ask


def test_text_ends_where_it_is_to(ask: Ask, client: anthropic.Anthropic) -> None:
    message = ask(max_tokens=8, system="Be brief.")
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 8)
    count = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system="Be brief.")
    usage = message.usage
    assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_a_conversation_with_a_tool_goes_on(ask: Ask) -> None:
    told, choice = [*MESSAGES], {"type": "any", "disable_parallel_tool_use": True}
    for _ in range(2):
        message = ask(messages=told, tools=[TOOL], tool_choice=choice)
        [call] = message.content
        assert (message.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
        Weather.model_validate(call.input)
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "22"}
        told += [{"role": "assistant", "content": message.content}, {"role": "user", "content": [result]}]


def test_a_structured_answer(client: anthropic.Anthropic) -> None:
    parsed = client.messages.parse(model=MODEL, max_tokens=MAX_TOKENS, messages=MESSAGES, output_format=Place)
    assert isinstance(parsed.parsed_output, Place)


def test_models_are_listed(client: anthropic.Anthropic) -> None:
    [model] = client.models.list(limit=1000)
    assert (model.id, model.type, model.display_name) == (MODEL, "model", MODEL)
    assert client.models.retrieve(MODEL) == model
    assert model.created_at.tzinfo is not None


def test_errors_are_the_clients_own(ask: Ask, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="container is 'c'"):
        ask(container="c")
    with pytest.raises(anthropic.NotFoundError, match="the served model is"):
        client.messages.create(model="other", max_tokens=1, messages=MESSAGES)
