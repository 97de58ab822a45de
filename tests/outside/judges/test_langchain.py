"""langchain: text, structured answers and tools, whole and streamed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI

from tests.outside.judges.conftest import MAX_TOKENS, MODEL, Deployment, Weather

QUESTION = HumanMessage("Is it warm in Rome?")


@tool(args_schema=Weather)
def get_weather(city: str, days: int, celsius: bool) -> str:
    """Weather of a city."""
    return f"{city} {days} {celsius}"


@pytest.fixture
def connect(native: Deployment) -> Callable[..., ChatOpenAI]:
    def connect(**options: Any) -> ChatOpenAI:
        options = {"max_tokens": MAX_TOKENS, "temperature": 0.7, "seed": 1, **options}
        return ChatOpenAI(model=MODEL, base_url=native.openai_url, api_key="none", max_retries=0, **options)

    return connect


def test_text_streams(connect: Callable[..., ChatOpenAI]) -> None:
    chat = connect(max_tokens=8, temperature=0.0)
    whole = chat.invoke([QUESTION])
    assert whole.usage_metadata
    assert "".join(str(chunk.content) for chunk in chat.stream([QUESTION])) == whole.content


def test_completions_stream(native: Deployment) -> None:
    llm = OpenAI(model=MODEL, base_url=native.openai_url, api_key="none", max_tokens=8, temperature=0, max_retries=0)
    assert "".join(llm.stream("hello")) == llm.invoke("hello")


def test_a_structured_answer(connect: Callable[..., ChatOpenAI]) -> None:
    structured = connect().with_structured_output(Weather, method="json_schema")
    assert isinstance(structured.invoke([QUESTION]), Weather)


def test_a_tool_is_called_whole_and_streamed(connect: Callable[..., ChatOpenAI]) -> None:
    # strict: langchain's own tool schema does not forbid extra fields
    chat = connect().bind_tools([get_weather], tool_choice="any", parallel_tool_calls=False, strict=True)
    whole = chat.invoke([QUESTION])
    chunks = list(chat.stream([QUESTION]))
    streamed = sum(chunks[1:], chunks[0])
    for message in (whole, streamed):
        [call] = message.tool_calls
        assert call["name"] == "get_weather"
        Weather.model_validate(call["args"])
    [call] = whole.tool_calls
    told = get_weather.invoke(call)
    assert isinstance(told, ToolMessage)
    assert connect(max_tokens=8).invoke([QUESTION, whole, told]).content


def test_a_structured_answer_by_a_tool(connect: Callable[..., ChatOpenAI]) -> None:
    structured = connect().with_structured_output(Weather, method="function_calling")
    assert isinstance(structured.invoke([QUESTION]), Weather)
