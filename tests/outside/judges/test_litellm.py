"""litellm: text and chats, whole and streamed, structured answers and tools, another model for long prompts."""

from __future__ import annotations

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch prices from the network

from typing import Any

import litellm
import pytest

from tests.outside.judges.conftest import MAX_TOKENS, MESSAGES, MODEL, Deployment, Weather

TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": Weather.model_json_schema()}}


@pytest.fixture
def chat(native: Deployment) -> dict[str, Any]:
    server = {"model": f"openai/{MODEL}", "api_base": native.openai_url, "api_key": "none", "num_retries": 0}
    return {**server, "messages": MESSAGES, "seed": 1, "max_tokens": MAX_TOKENS}


def test_a_streamed_chat_joins_to_the_whole(chat: dict[str, Any]) -> None:
    chat |= {"max_tokens": 8, "temperature": 0.0}
    whole = litellm.completion(**chat)
    chunks = list(litellm.completion(**chat, stream=True, stream_options={"include_usage": True}))
    joined = litellm.stream_chunk_builder(chunks, messages=MESSAGES)
    assert joined.choices[0].message.content == whole.choices[0].message.content
    assert joined.usage.completion_tokens == whole.usage.completion_tokens


def test_a_streamed_completion_joins_to_the_whole(chat: dict[str, Any]) -> None:
    del chat["messages"]
    chat |= {"model": f"text-completion-openai/{MODEL}", "prompt": "hello", "max_tokens": 8, "temperature": 0.0}
    whole = litellm.text_completion(**chat)
    chunks = litellm.text_completion(**chat, stream=True)
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == whole.choices[0].text


def test_a_structured_answer(chat: dict[str, Any]) -> None:
    answer = litellm.completion(**chat, response_format=Weather)
    Weather.model_validate_json(answer.choices[0].message.content)


def test_a_tool_is_called_whole_and_streamed(chat: dict[str, Any]) -> None:
    chat |= {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
    whole = litellm.completion(**chat)
    streamed = litellm.stream_chunk_builder(list(litellm.completion(**chat, stream=True)), messages=MESSAGES)
    for answer in (whole, streamed):
        [call] = answer.choices[0].message.tool_calls
        assert call.function.name == "get_weather"
        Weather.model_validate_json(call.function.arguments)


@pytest.mark.parametrize("speaks", ["openai", "anthropic"])
def test_a_prompt_that_is_too_long_goes_to_the_model_for_such(chat: dict[str, Any], speaks: str) -> None:
    """The two models give different answers, which show the one that was asked."""
    server = {name: chat[name] for name in ("api_base", "api_key")}
    if speaks == "anthropic":
        server["api_base"] = server["api_base"].removesuffix("/v1")
    router = litellm.Router(
        model_list=[
            {"model_name": "short", "litellm_params": {"model": f"{speaks}/{MODEL}", **server}},
            {"model_name": "long", "litellm_params": {"model": "openai/none", "mock_response": "by the other"}},
        ],
        context_window_fallbacks=[{"short": ["long"]}],
        num_retries=0,
    )
    for words, other in (("hi", False), ("x " * 200_000, True)):
        answer = router.completion(model="short", messages=[{"role": "user", "content": words}], max_tokens=4)
        assert (answer.choices[0].message.content == "by the other") == other
