"""Rows of every supported layout become the same texts and conversations."""

import json
import math
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.data.formats import (
    FORMATS,
    PROMPT_FORMATS,
    Content,
    Conversation,
    find_row_reader,
    hash_content,
)
from swiftkv_platform.data.messages import ROLES, Message, RowError
from swiftkv_platform.errors import DataError

QUESTION = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
BRIEF = "Be brief."
SYSTEM = {"role": "system", "content": BRIEF}
TWO_PARTS = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number"}}}}
ADD = {"name": "add", "arguments": {"a": 2}}
CALL: Message = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "call00000", "type": "function", "function": ADD}],
}
RESULT = {"role": "tool", "content": "4", "tool_call_id": "call00000"}


def said(*messages: Message, tools: list[dict[str, Any]] | None = None) -> Conversation:
    return Conversation(list(messages), tools)


def read(row: dict[str, Any], name: str = "auto") -> tuple[str, Content]:
    reader = find_row_reader(name, tuple(row), origin="rows.jsonl", source_field="data.sources[0]", formats=FORMATS)
    return reader.format.name, reader({column: row[column] for column in reader.columns})


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "def f(): ..."}, ("text", "def f(): ...")),
        ({"text": None}, ("text", "")),
        ({"messages": [QUESTION, ANSWER], "prompt": "2 + 2?"}, ("messages", said(QUESTION, ANSWER))),
        ({"messages": None}, ("messages", said())),
        ({"messages": [{**QUESTION, "content": TWO_PARTS}]}, ("messages", said(QUESTION))),
        (
            {"messages": [{**ANSWER, "tool_calls": [{"name": "add", "arguments": {"a": 2, "b": None}}], "name": None}]},
            ("messages", said({**CALL, **ANSWER})),
        ),
        ({"prompt": "2 + 2?", "completion": "4"}, ("prompt_completion", said(QUESTION, ANSWER))),
        ({"prompt": [SYSTEM, QUESTION], "completion": [ANSWER]}, ("prompt_completion", said(SYSTEM, QUESTION, ANSWER))),
        ({"question": "2 + 2?", "answer": "4"}, ("prompt_completion", said(QUESTION, ANSWER))),
        ({"prompt": "2 + 2?", "completion": None}, ("prompt_completion", said())),
        ({"instruction": "2 + 2?", "input": "", "output": "4"}, ("alpaca", said(QUESTION, ANSWER))),
        (
            {"instruction": "Add.", "input": "2, 2", "output": "4", "system": BRIEF},
            ("alpaca", said(SYSTEM, {"role": "user", "content": "Add.\n\n2, 2"}, ANSWER)),
        ),
        (
            {"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}], "system": BRIEF},
            ("sharegpt", said(SYSTEM, QUESTION, ANSWER)),
        ),
        (
            {"messages": [QUESTION, {**CALL, "name": None}], "tools": [{**TOOL, "x": None}]},
            ("messages", said(QUESTION, CALL, tools=[TOOL])),
        ),
        *(
            ({"messages": [called, {"role": result, "content": "4"}]}, ("messages", said(CALL, RESULT)))
            for called, result in (
                ({"role": "assistant", "tool_calls": [ADD]}, "tool"),
                ({"role": "assistant", "content": "", "tool_calls": json.dumps([ADD])}, "function_response"),
                ({"role": "assistant", "content": None, "function_call": {**ADD, "arguments": '{"a": 2}'}}, "function"),
                ({"role": "assistant", "content": [], "tool_calls": [{"function": ADD}]}, "ipython"),
                ({"from": "function_call", "value": json.dumps(ADD)}, "observation"),
                ({"from": "tool_call", "value": json.dumps([ADD])}, "tool_response"),
            )
        ),
        *(
            ({"messages": [{**ANSWER, **mark}]}, ("messages", said({**ANSWER, **kept})))
            for mark, kept in (
                ({"weight": 0}, {"weight": 0}),
                ({"weight": 1.0}, {}),
                ({"weight": None}, {}),
                ({"train": False}, {"train": False, "weight": 0}),
            )
        ),
        ({"messages": json.dumps([QUESTION, ANSWER])}, ("messages", said(QUESTION, ANSWER))),
        (
            {"messages": [{"role": "User", "text": "2 + 2?"}, {"from": "model", "content": "4"}]},
            ("messages", said(QUESTION, ANSWER)),
        ),
        ({"prompt": [QUESTION], "completion": "4"}, ("prompt_completion", said(QUESTION, ANSWER))),
        ({"messages": [QUESTION], "functions": [TOOL["function"]]}, ("messages", said(QUESTION, tools=[TOOL]))),
        ({"messages": [QUESTION], "tools": json.dumps([TOOL])}, ("messages", said(QUESTION, tools=[TOOL]))),
        ({"messages": [QUESTION], "tools": "", "system": BRIEF}, ("messages", said(SYSTEM, QUESTION))),
        ({"messages": [SYSTEM, QUESTION], "system": "Go on."}, ("messages", said(SYSTEM, QUESTION))),
        (
            {"prompt": "2 + 2?", "completion": "4", "system": BRIEF},
            ("prompt_completion", said(SYSTEM, QUESTION, ANSWER)),
        ),
        (
            {"instruction": "2 + 2?", "output": "4", "history": [["2 + 2?", "4"]]},
            ("alpaca", said(QUESTION, ANSWER, QUESTION, ANSWER)),
        ),
        ({"conversations": [{**QUESTION, "from": None}, ANSWER]}, ("sharegpt", said(QUESTION, ANSWER))),
        ({"conversation": [QUESTION, ANSWER]}, ("sharegpt", said(QUESTION, ANSWER))),
        ({"query": "2 + 2?", "response": "4"}, ("prompt_completion", said(QUESTION, ANSWER))),
        (
            {"prompt": "2 + 2?", "completion": "4", "system_prompt": BRIEF},
            ("prompt_completion", said(SYSTEM, QUESTION, ANSWER)),
        ),
        *(
            ({"prompt": "2 + 2?", "completion": "4", **harmless}, ("prompt_completion", said(QUESTION, ANSWER)))
            for harmless in (
                *({"label": label} for label in (True, "True", 0, 1, "spam", None)),
                *({"documents": nothing} for nothing in ([], "[]", None, math.nan, "")),
                {"chat_template_kwargs": "{}", "images": []},
                {"rejected": "5", "score": 0.5},
            )
        ),
        *(
            ({"messages": [empty, QUESTION, ANSWER]}, ("messages", said({**SYSTEM, "content": ""}, QUESTION, ANSWER)))
            for empty in (
                *({"role": "system", "content": content} for content in ("", None, [])),
                *({"role": "system"}, {"from": "system", "value": None}),
            )
        ),
        ({"text": "A cat.", "image": "cat.png", "label": False}, ("text", "A cat.")),
        ({"text": "<|im_start|>user\n2 + 2?"}, ("text", "<|im_start|>user\n2 + 2?")),
        (
            {"prompt": "What is <|im_start|>?", "completion": "4"},
            ("prompt_completion", said({**QUESTION, "content": "What is <|im_start|>?"}, ANSWER)),
        ),
        (
            {"instruction": "Add.", "context": "2, 2", "response": "4", "category": "sums"},
            ("alpaca", said({"role": "user", "content": "Add.\n\n2, 2"}, ANSWER)),
        ),
    ],
)
def test_rows_are_read(row: dict[str, Any], expected: tuple[str, Content]) -> None:
    assert read(row) == expected


def test_a_named_format_overrides_detection() -> None:
    row = {"messages": [QUESTION, ANSWER], "text": "plain"}
    assert read(row) == ("messages", said(QUESTION, ANSWER))
    assert read(row, "text") == ("text", "plain")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"text": 3}, "text is 3, a int; a string is accepted"),
        ({"messages": "hello"}, "messages is 'hello'; a list of messages is accepted"),
        ({"messages": [{"content": "?"}]}, "a message has the role None; system, developer, user"),
        ({"messages": [QUESTION, {"role": "assistant"}]}, "message 2 (role assistant) has no text"),
        ({"messages": [{"role": "assistant", "content": " "}]}, "message 1 (role assistant) has no text"),
        ({"messages": [{"role": "assistant", "content": "", "tool_calls": []}]}, "has no text"),
        ({"conversations": [{"from": "gpt", "value": None}]}, "message 1 (role gpt) has no text"),
        ({"messages": [{"role": "user", "words": "?"}]}, "(role user) has no text; add content (or value)"),
        ({"messages": [{"role": "user", "content": "?", "value": "!"}]}, "a message has content and value"),
        ({"messages": [{**ANSWER, "weight": 0.5}]}, "a message has the weight 0.5; 0 and 1 are accepted"),
        ({"messages": [{**CALL, "function_call": ADD}]}, "a message has tool_calls and function_call"),
        ({"messages": [{**QUESTION, "tool_calls": [ADD]}]}, "has tool_calls; they are accepted only from"),
        ({"messages": [{**ANSWER, "tool_calls": [{"name": ""}]}]}, "an object with name and arguments is accepted"),
        (
            {"messages": [{**ANSWER, "function_call": {"name": "add", "arguments": "2"}}]},
            "calls add with the arguments '2'; an object, or JSON of one, is accepted",
        ),
        ({"conversations": [{"from": "function_call", "value": "add"}]}, "the content of function_call is 'add', "),
        ({"messages": [{**ANSWER, "function_call": {"name": "add", "arguments": {"a": math.nan}}}]}, "a value is NaN"),
        ({"messages": [QUESTION], "tools": '[{"name": "f", "parameters": {"default": -Infinity}}]'}, "has -Infinity"),
        ({"text": math.nan}, "text is NaN, a float; a string is accepted"),
        ({"prompt": math.inf, "completion": ""}, "the prompt is Infinity, a float"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only text parts are accepted"),
        ({"messages": [QUESTION], "tools": "add"}, "tools is 'add', which is not JSON"),
        ({"messages": [QUESTION], "tools": [3]}, "tools is [3]; a list of functions is accepted"),
        ({"instruction": "?", "output": "!", "history": ["?"]}, "a list of pairs of instruction and output"),
        ({"conversations": [{"from": "narrator", "value": ""}]}, "the role 'narrator'; system, developer, user"),
        *(
            ({**row, "label": label}, f"label is {label!r}, which marks a bad answer; remove rows with this label")
            for row in ({"prompt": "?", "completion": "!"}, {"messages": [QUESTION, ANSWER]})
            for label in (False, "False")
        ),
        *(
            ({**row, column: value}, f"{column} is {value!r:.80}; {cure}")
            for row in (
                {"prompt": "?", "completion": "!"},
                {"instruction": "?", "output": "!"},
                {"conversations": [QUESTION, ANSWER]},
            )
            for column, value, cure in (
                ("documents", [{"title": "Sums"}], "write the documents into a message"),
                ("documents", '[{"title": "Sums"}]', "write the documents into a message"),
                ("chat_template_kwargs", {"enable_thinking": False}, "chat templates are rendered with their defaults"),
                ("images", ["a.png"], "only text is accepted"),
                ("image", {"bytes": b"", "path": "a.png"}, "only text is accepted"),
                ("audio", "a.wav", "only text is accepted"),
            )
        ),
        ({"messages": [{**QUESTION, "images": ["a.png"]}, ANSWER]}, "message 1 (role user) has images ['a.png']"),
        *(
            (
                {"prompt": f"{before}{marker}user", "completion": "!"},
                f"message 1 (role user) contains {marker!r}, a marker",
            )
            for before, marker in (
                ("", "<|im_start|>"),
                ("<|begin_of_text|>", "<|start_header_id|>"),
                ("<s> ", "[INST]"),
                ("\n", "<start_of_turn>"),
                ("<bos>", "<start_of_turn>"),
                ("", "<|user|>"),
                ("<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cUser\uff5c>"),
            )
        ),
        ({"instruction": "[INST] ? [/INST]", "output": "!"}, "'[INST]', a marker of a chat template"),
        ({"messages": [QUESTION, {**ANSWER, "content": "<|assistant|>4"}]}, "message 2 (role assistant) contains '<|"),
    ],
)
def test_values_of_another_type_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=re.escape(message)):
        read(row)


def test_prompts_are_read_whatever_their_answers_are_worth() -> None:
    row = {"prompt": "2 + 2?", "completion": "5", "label": False}
    reader = find_row_reader("auto", tuple(row), origin="rows.jsonl", source_field="data", formats=PROMPT_FORMATS)
    assert (reader(row), reader.unread_columns) == (said(QUESTION), ("completion",))


def test_unknown_columns_are_named_beside_those_that_are_known() -> None:
    columns = r"rows.jsonl has the columns body, title.*alpaca: instruction \+ output or instruction \+ response; text"
    with pytest.raises(DataError, match=columns) as caught:
        read({"body": "?", "title": "?"})
    assert (caught.value.field, caught.value.value) == ("data.sources[0].format", ["body", "title"])
    own = "prompt_completion: prompt + completion or prompt + response or question + answer"
    with pytest.raises(DataError, match=re.escape(own)) as caught:
        read({"text": "?"}, "prompt_completion")
    assert "alpaca" not in caught.value.message


def test_the_digest_is_of_what_is_said_not_of_how_it_is_stored() -> None:
    alpaca = read({"instruction": "2 + 2?", "output": "4"})[1]
    assert hash_content(alpaca) == hash_content(read({"messages": [QUESTION, ANSWER]})[1])
    assert hash_content(alpaca) != hash_content(said(ANSWER, QUESTION))
    assert hash_content("a") != hash_content("b")
    assert hash_content(said(QUESTION, {**ANSWER, "weight": 0})) == hash_content(alpaca), "it is counted otherwise"
    assert hash_content(said(QUESTION)) != hash_content(said(QUESTION, tools=[TOOL]))
    assert hash_content(said({**QUESTION, "time": datetime(2026, 1, 1, tzinfo=UTC)}))  # as Parquet has it


@pytest.mark.parametrize("column", ["messages", "conversations", "prompt"])
def test_answers_that_the_teacher_writes_itself_are_left_out_unread(column: str) -> None:
    row = {column: [QUESTION, {"role": "assistant", "content": None}]}
    reader = find_row_reader("auto", tuple(row), origin="rows.jsonl", source_field="data", formats=PROMPT_FORMATS)
    assert reader(row) == said(QUESTION)


def test_deep_rows_are_refused_and_not_followed() -> None:
    deep: Any = "?"
    for _ in range(100_000):
        deep = [deep]
    reader = find_row_reader("auto", ("messages",), origin="rows.jsonl", source_field="data", formats=FORMATS)
    with pytest.raises(RowError, match="more than 100 deep"):
        reader({"messages": [{"role": "user", "content": "?", "name": deep}]})


def test_every_role_is_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "data.md").read_text(encoding="utf-8")
    assert dict(pair for line in page.splitlines() for pair in _roles(line)) == ROLES


def _roles(line: str) -> list[tuple[str, str]]:
    """Names of a role, and the role, from a line of the table."""
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    role = cells[0].strip("`")
    return [(name, role) for name in re.findall("`([a-z_]+)`", cells[1])] if len(cells) == 2 and role in ROLES else []
