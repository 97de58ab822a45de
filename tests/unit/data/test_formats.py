"""Rows of every supported layout become the same texts and conversations."""

import json
import re
from datetime import UTC, datetime
from typing import Any

import pytest

from swiftkv_platform.data.formats import Content, Conversation, Message, RowError, content_digest, find_format
from swiftkv_platform.errors import DataError

QUESTION = {"role": "user", "content": "2 + 2?"}
ANSWER = {"role": "assistant", "content": "4"}
BRIEF = "Be brief."
SYSTEM = {"role": "system", "content": BRIEF}
TWO_PARTS = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number"}}}}
CALL: Message = {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": {"a": 2}}]}


def said(*messages: Message, tools: list[dict[str, Any]] | None = None) -> Conversation:
    return Conversation(list(messages), tools)


def read(row: dict[str, Any], name: str = "auto") -> tuple[str, Content]:
    reader = find_format(name, tuple(row), origin="rows.jsonl", path="data.sources[0]")
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
        (
            {"conversations": [{"from": "function_call", "value": "add"}, {"from": "observation", "value": "4"}]},
            ("sharegpt", said({"role": "assistant", "content": "add"}, {"role": "tool", "content": "4"})),
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
        ({"messages": [{"content": "?"}]}, "a message has the role None; a string is accepted"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "only text parts are accepted"),
        ({"messages": [QUESTION], "tools": "add"}, "tools is 'add', which is no JSON"),
        ({"messages": [QUESTION], "tools": [3]}, "tools is [3]; a list of functions is accepted"),
        (
            {"instruction": "?", "output": "!", "history": ["?"]},
            "a list of pairs of instruction and output is accepted",
        ),
        ({"conversations": [{"from": "narrator", "value": ""}]}, "the role 'narrator'; human, user, gpt"),
    ],
)
def test_values_of_another_type_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=re.escape(message)):
        read(row)


def test_unknown_columns_are_named_beside_those_that_are_known() -> None:
    columns = r"rows.jsonl has the columns body, title.*alpaca: instruction \+ output; text: text"
    with pytest.raises(DataError, match=columns) as caught:
        read({"body": "?", "title": "?"})
    assert (caught.value.field, caught.value.value) == ("data.sources[0].format", ["body", "title"])
    own = "prompt_completion: prompt + completion or prompt + response or question + answer"
    with pytest.raises(DataError, match=re.escape(own)) as caught:
        read({"text": "?"}, "prompt_completion")
    assert "alpaca" not in caught.value.message


def test_the_digest_is_of_what_is_said_not_of_how_it_is_stored() -> None:
    alpaca = read({"instruction": "2 + 2?", "output": "4"})[1]
    assert content_digest(alpaca) == content_digest(read({"messages": [QUESTION, ANSWER]})[1])
    assert content_digest(alpaca) != content_digest(said(ANSWER, QUESTION))
    assert content_digest("a") != content_digest("b")
    assert content_digest(said(QUESTION)) != content_digest(said(QUESTION, tools=[TOOL]))
    assert content_digest(said({**QUESTION, "time": datetime(2026, 1, 1, tzinfo=UTC)}))  # as Parquet has it
