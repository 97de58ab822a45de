"""Turns of a conversation as clients send them back, on the real engine of the fixture `engine`."""

from __future__ import annotations

from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from swiftkv_platform.serve.current import Version
from tests.surface import openai_tools
from tests.surface.openai_tools import ALPHABET, CALL, MESSAGES, SPACES, TOOLS, asked, chat, said

client = openai_tools.client
engine_config = openai_tools.engine_config
model_dir = openai_tools.model_dir
version = openai_tools.version

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
    client: Any, version: Version, monkeypatch: pytest.MonkeyPatch, turn: Any, as_if: Any
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
