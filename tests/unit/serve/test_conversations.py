"""Conversations in other forms than chat completions, on the native engine."""

from typing import Any

import pytest

from swiftkv_platform.serve.anthropic import MessagesRequest
from swiftkv_platform.serve.openai.chat import BlockSplitter
from swiftkv_platform.serve.openai.responses import ResponsesRequest
from swiftkv_platform.serve.openai.schemas import ChatRequest
from tests.contract.serving.conversations import *  # noqa: F403
from tests.contract.serving.conversations import BRIEF, RESULT, USE, said

pytestmark = pytest.mark.slow("loads models")


def laid_out(chat: ChatRequest) -> list[Any]:
    return [message.for_template() for message in chat.messages]


def call_of(name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


def item_of(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}


TOOL_A, TOOL_B = ({"role": "tool", "tool_call_id": name, "content": "22"} for name in "ab")


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ("hi", [said("hi", "user")]),
        (
            [said([{"type": "input_text", "text": "h"}, {"type": "input_text", "text": "i"}], "developer")],
            [said("hi", "developer")],
        ),
        ([said("x"), said("y")], [said("x"), said("y")]),
        (
            [said("x"), item_of("a"), item_of("b")],
            [said("x", tool_calls=[call_of("a"), call_of("b")])],
        ),
        ([item_of("a"), said("x", type="message")], [said("x", tool_calls=[call_of("a")])]),
        (
            [
                {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
                said([{"type": "output_text", "text": "x", "annotations": []}], id="m", status="completed"),
            ],
            [said("x", reasoning_content="t")],
        ),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "?"}, said("x")], [said("x")]),
        (
            [
                item_of("a"),
                {"type": "function_call_output", "call_id": "a", "output": "22"},
                item_of("b"),
                {"type": "function_call_output", "call_id": "b", "output": [{"type": "input_text", "text": "22"}]},
            ],
            [said(None, tool_calls=[call_of("a")]), TOOL_A, said(None, tool_calls=[call_of("b")]), TOOL_B],
        ),
    ],
)
def test_items_become_the_turns_of_a_chat(items: Any, messages: Any) -> None:
    chat = ResponsesRequest(model="m", input=items, instructions="Be brief.").to_chat_request()
    assert laid_out(chat) == laid_out(ChatRequest(model="m", messages=[BRIEF, *messages]))


@pytest.mark.parametrize(
    ("turn", "messages"),
    [
        (said("hi", "user"), [said("hi", "user")]),
        (said([{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]), [said("hi")]),
        (said([{"type": "text", "text": "x"}, USE]), [said("x", tool_calls=[call_of("a")])]),
        (
            said([{"type": "thinking", "thinking": "t", "signature": ""}, USE]),
            [said(None, reasoning_content="t", tool_calls=[call_of("a")])],
        ),
        (said([RESULT], "user"), [TOOL_A]),
        (said([{"type": "text", "text": "x"}, RESULT], "user"), [TOOL_A, said("x", "user")]),
        (said([{**RESULT, "content": None, "is_error": True}], "user"), [{**TOOL_A, "content": ""}]),
        (said([]), [said("")]),
    ],
)
def test_blocks_become_the_turns_of_a_chat(turn: Any, messages: Any) -> None:
    chat = MessagesRequest(model="m", max_tokens=1, messages=[turn], system="Be brief.").to_chat_request()
    assert laid_out(chat) == laid_out(ChatRequest(model="m", messages=[BRIEF, *messages]))


@pytest.mark.parametrize(
    ("content", "names", "text"),
    [
        ("x-a-b: v=1.2; c=3;\n\nHi", ["x-a-b"], "\nHi"),
        (["x-a: v=1", "\r\nX-B: v=c==; d=; \r\nHi", "."], ["x-a", "X-B"], "Hi."),
        ("x-ray: describe v=1\n", [], None),
        ("x-ray: v=1; is shown", [], None),
        ("Hi\nx-a: v=1;", [], None),
        ("a: v=1;\nHi", [], None),
        ("x-a: v", [], None),
    ],
)
def test_lines_that_identify_a_client_are_told_from_instructions(
    content: str | list[str], names: list[str], text: str | None
) -> None:
    turns = [said(content, role) for role in ("system", "user", "assistant")]
    [system, *others] = ChatRequest(model="m", messages=turns).messages
    assert (system.client_lines, system.text_content) == (names, "".join(content) if text is None else text)
    assert [(each.client_lines, each.text_content) for each in others] == [([], "".join(content))] * 2


def test_each_block_ends_before_the_next_begins() -> None:
    """One delta may end a call and begin another, or follow text with a call."""
    named = {"id": "a", "function": {"name": "f", "arguments": ""}}
    more = {"function": {"arguments": "{}"}}
    deltas: list[Any] = [{"content": "x"}, {"content": "y", "tool_calls": [named]}, {"tool_calls": [more, named]}]
    splitter = BlockSplitter()
    told = [event for delta in [*deltas, {"content": "z"}] for event in splitter.add_delta(delta)] + [
        *splitter.finish()
    ]
    assert [(kind, block.index) for kind, block, _ in told if kind != "append"] == [
        (kind, index) for index in range(4) for kind in ("begin", "end")
    ]
    assert [block.text for block in splitter.blocks] == ["xy", "{}", "", "z"]
