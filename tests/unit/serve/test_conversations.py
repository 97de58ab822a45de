"""Conversations in other forms than chat completions, on the native engine."""

from typing import Any

import pytest

from swiftkv_platform.serve.anthropic import MessagesRequest
from swiftkv_platform.serve.openai.chat import BlockSplitter
from swiftkv_platform.serve.openai.fields import Route
from swiftkv_platform.serve.openai.responses import ResponsesRequest
from swiftkv_platform.serve.openai.schemas import ChatRequest
from tests.contract.serving.conversations import *  # noqa: F403
from tests.contract.serving.conversations import BRIEF, RESULT, USE, said

pytestmark = pytest.mark.slow("loads models")


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "x"}}
PICTURE_URL = {"type": "image_url", "image_url": {"url": "data:,"}}
INPUT_PICTURE = {"type": "input_image", "image_url": "data:,"}
SEEN = [said([PICTURE_URL], "user"), said("A cat."), said("Sure?", "user")]
"""A picture that was answered."""


def laid_out(chat: ChatRequest) -> list[Any]:
    return [message.to_template_format() for message in chat.messages]


def call_of(name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": name, "type": "function", "function": {"name": name, "arguments": arguments}}


def item_of(name: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}"}


SAID_BLOCK = {"type": "text", "text": "x"}
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
        (said([USE] * 200), [said(None, tool_calls=[call_of("a")] * 200)]),
    ],
)
def test_blocks_become_the_turns_of_a_chat(turn: Any, messages: Any) -> None:
    chat = MessagesRequest(model="m", max_tokens=1, messages=[turn], system="Be brief.").to_chat_request()
    assert laid_out(chat) == laid_out(ChatRequest(model="m", messages=[BRIEF, *messages]))


def result_of(*blocks: Any) -> list[Any]:
    return [said([{**RESULT, "content": [*blocks]}], "user")]


def placeholder(kind: str) -> str:
    return f"\n[{kind} omitted]\n"


SHOT = {"type": "computer_call_output", "call_id": "a", "output": {"type": "computer_screenshot", "image_url": "x"}}
PATCH = {"type": "custom_tool_call", "id": "x", "call_id": "a", "status": "completed", "name": "patch", "input": "+"}
EXEC = {"type": "local_shell_call", "id": "x", "call_id": "a", "action": {"command": ["ls"]}}
PATCHED = {"id": "a", "type": "function", "function": {"name": "patch", "arguments": {"input": "+"}}}
EXECUTED = {"id": "a", "type": "function", "function": {"name": "local_shell", "arguments": {"action": EXEC["action"]}}}


@pytest.mark.parametrize(
    ("route", "told", "named", "messages"),
    [
        # Results of tools
        ("messages", result_of(PICTURE), "content.content.image", [placeholder("image")]),
        (
            "messages",
            result_of({"type": "text", "text": "a"}, {"type": "tool_reference", "tool_name": "f"}),
            "content.content.tool_reference",
            ["a" + placeholder("tool_reference f")],
        ),
        (
            "messages",
            result_of(
                {"type": "search_result", "source": "u", "title": "t", "content": [{"type": "text", "text": "a"}]}
            ),
            "content.content.search_result",
            ["\na\n"],
        ),
        (
            "messages",
            result_of({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "a"}}),
            "content.content.document",
            ["\na\n"],
        ),
        ("messages", [said([RESULT, PICTURE], "user")], "content.image", ["22", placeholder("image")]),
        ("messages", [said([RESULT], "user"), said([PICTURE], "user")], "content.image", ["22", placeholder("image")]),
        ("chat", [{**TOOL_A, "content": [PICTURE_URL]}], "content.image_url", [placeholder("image_url")]),
        ("chat", [TOOL_A, said([PICTURE_URL], "user")], "content.image_url", ["22", placeholder("image_url")]),
        (
            "responses",
            [{"type": "function_call_output", "call_id": "a", "output": [INPUT_PICTURE]}],
            "output.input_image",
            [placeholder("input_image")],
        ),
        (
            "responses",
            [{"type": "function_call_output", "call_id": "a", "output": "22"}, said([INPUT_PICTURE], "user")],
            "content.input_image",
            ["22", placeholder("input_image")],
        ),
        (
            "responses",
            [{"type": "custom_tool_call_output", "call_id": "a", "output": "22"}],
            "custom_tool_call_output",
            ["22"],
        ),
        ("responses", [SHOT], "computer_call_output", ["[computer_screenshot omitted]"]),
        (
            "responses",
            [{"type": "shell_call_output", "call_id": "a", "output": [{"stdout": "a", "stderr": "b"}]}],
            "shell_call_output",
            ["a\nb"],
        ),
        # What was answered
        ("messages", [said([PICTURE], "user"), *SEEN[1:]], "content.image", [placeholder("image"), "A cat.", "Sure?"]),
        ("chat", SEEN, "content.image_url", [placeholder("image_url"), "A cat.", "Sure?"]),
        (
            "chat",
            [said(["a", {"type": "file", "file": {"file_id": "f"}}], "user"), *SEEN[1:]],
            "content.file",
            ["a" + placeholder("file"), "A cat.", "Sure?"],
        ),
        (
            "responses",
            [said([{"type": "input_file", "filename": "a.pdf"}], "user"), *SEEN[1:]],
            "content.input_file",
            [placeholder("input_file a.pdf"), "A cat.", "Sure?"],
        ),
        (
            "responses",
            [said([INPUT_PICTURE], "user"), said("Sure?", "user")],
            "content.input_image",
            [placeholder("input_image"), "Sure?"],
        ),
        # What the assistant wrote elsewhere
        (
            "messages",
            [
                said([{"type": "server_tool_use", "id": "a", "name": "web_search", "input": {}}, SAID_BLOCK]),
                said("Sure?", "user"),
            ],
            "content.server_tool_use",
            [placeholder("server_tool_use web_search") + "x", "Sure?"],
        ),
        (
            "chat",
            [said(None, audio={"id": "a", "transcript": "A cat."}), said("Sure?", "user")],
            "content.audio",
            ["\nA cat.\n", "Sure?"],
        ),
        (
            "chat",
            [said(None, tool_calls=[{"id": "a", "type": "custom", "custom": {"name": "patch", "input": "+"}}]), TOOL_A],
            "tool_calls.custom",
            [[PATCHED], "22"],
        ),
        ("responses", [PATCH], "custom_tool_call", [[PATCHED]]),
        ("responses", [EXEC], "local_shell_call", [[EXECUTED]]),
        (
            "responses",
            [{"type": "item_reference", "id": "x"}, said("x"), said("Sure?", "user")],
            "item_reference",
            [placeholder("item_reference") + "x", "Sure?"],
        ),
        (
            "responses",
            [
                {"type": "reasoning", "summary": []},
                {"type": "web_search_call", "id": "x", "action": {"type": "search"}},
                {"type": "reasoning", "summary": []},
                said("x"),
                {"type": "compaction", "encrypted_content": "x"},
                said("Sure?", "user"),
            ],
            "web_search_call input.compaction input.summary",
            [placeholder("web_search_call") + "x" + placeholder("compaction"), "Sure?"],
        ),
        # What a new message has as text
        (
            "messages",
            [said([{"type": "document", "source": {"type": "content", "content": [SAID_BLOCK]}}, SAID_BLOCK], "user")],
            "content.document",
            ["\nx\nx"],
        ),
    ],
)
def test_what_is_not_served_in_a_conversation_becomes_text(
    route: str, told: list[Any], named: str, messages: list[Any]
) -> None:
    field, names = "input" if route == "responses" else "messages", named.split()
    if route == "chat":
        chat = body = ChatRequest(model="m", messages=told)
    elif route == "messages":
        body = MessagesRequest(model="m", max_tokens=1, messages=told)
        chat = body.to_chat_request()
    else:
        body = ResponsesRequest(model="m", input=told)
        chat = body.to_chat_request()
    path: Route = "chat/completions" if route == "chat" else route
    assert {*body.find_ignored_fields(path, ())} == {f"{field}.{names[0]}", *names[1:]}
    assert [each.get("tool_calls") or each["content"] for each in laid_out(chat)] == messages


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


@pytest.mark.parametrize("given", [{}, None, "", "{}", '{"by": 1}', {"by": 1}, ...], ids=str)
def test_arguments_of_a_call_are_an_object_or_text_or_nothing_on_every_route(given: Any) -> None:
    def give(key: str) -> dict[str, Any]:
        return {} if given is ... else {key: given}

    call = {"id": "a", "type": "function", "function": {"name": "f", **give("arguments")}}
    item = {"type": "function_call", "call_id": "a", "name": "f", **give("arguments")}
    block = {"type": "tool_use", "id": "a", "name": "f", **give("input")}
    for chat in (
        ChatRequest(model="m", messages=[said(None, tool_calls=[call])]),
        ResponsesRequest(model="m", input=[item]).to_chat_request(),
        MessagesRequest(model="m", max_tokens=1, messages=[said([block])]).to_chat_request(),
    ):
        [called] = laid_out(chat)[0]["tool_calls"]
        assert called["function"] == {"name": "f", "arguments": {"by": 1} if "by" in str(given) else {}}


@pytest.mark.parametrize("result", [{}, {"content": None}, {"content": ""}, {"content": []}], ids=str)
def test_a_tool_may_return_nothing_on_every_route(result: dict[str, Any]) -> None:
    asked = {"role": "user", "content": "a"}
    output = {"output": result["content"]} if result else {}
    called = {"role": "assistant", "tool_calls": [call_of("a")]}
    used = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "a", "input": {}}]}
    returned = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", **result}]}
    answered = {"type": "function_call_output", "call_id": "a", **output}
    for chat in (
        ChatRequest.model_validate(
            {"model": "m", "messages": [asked, called, {"role": "tool", "tool_call_id": "a", **result}]}
        ),
        ResponsesRequest.model_validate({"model": "m", "input": [asked, item_of("a"), answered]}).to_chat_request(),
        MessagesRequest.model_validate(
            {"model": "m", "max_tokens": 1, "messages": [asked, used, returned]}
        ).to_chat_request(),
    ):
        assert laid_out(chat)[-1] == {"role": "tool", "tool_call_id": "a", "content": ""}
    legacy = {"model": "m", "messages": [asked, {"role": "function", "name": "a", **result}]}
    assert laid_out(ChatRequest.model_validate(legacy))[-1] == {"role": "function", "name": "a", "content": ""}
