"""Calls read from families' own formats, cut at every character, and text that only looks like them."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftkv_platform.serve.tools.formats import HermesParser, Llama3Parser, MistralParser
from swiftkv_platform.serve.tools.parser import ToolCallParser
from swiftkv_platform.serve.tools.pieces import Arguments, Assembled, Call, CallBegin, Text

NAMES = frozenset({"get_weather", "get_time", "search"})
PARIS, ROME = '{"city": "Paris", "unit": "C"}', '{"city": "Rome"}'
TRICKY = '{"text": "a \\"<tool_call>{\\" }] \\\\", "deep": [{"x": [1, -2.5e3, null, true]}]}'
Parser = type[ToolCallParser]


def parse(parser: Parser, pieces: Sequence[str]) -> Assembled:
    reading, answer, fed = parser(NAMES), Assembled(), ""
    for piece in pieces:
        fed += piece
        answer.add(reading.feed(piece))
        begun = max(n for n in range(len(parser.marker)) if fed.endswith(parser.marker[:n]))
        assert answer.calls or len(answer.text) <= len(fed) - begun, "half a marker was handed on"
    answer.add(reading.finish())
    return answer


HERMES = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
HERMES_TIME = '<tool_call>\n{"arguments": {"zone": "CET"}, "name": "get_time"}\n</tool_call>'
SMOLLM2 = (
    f'<tool_call>[\n{{"name": "get_weather", "arguments": {PARIS}}},\n{{"name": "search", "arguments": {TRICKY}}}\n]'
    "</tool_call>"
)
MISTRAL = f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {PARIS}, "id": "VvvODy9mT"}}]'
MISTRAL_TWO = (
    f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "search", "arguments": {TRICKY}}}]'
)
MISTRAL_V11 = f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]search[ARGS]{TRICKY}"
MISTRAL_V11_IDS = f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{PARIS}"
LLAMA = f'{{"name": "get_weather", "parameters": {PARIS}}}'
WEATHER, SEARCH = Call("get_weather", PARIS), Call("search", TRICKY)

Case = tuple[Parser, str, str, list[Call | tuple[str, str]]]
REAL: list[Case] = [
    (HermesParser, HERMES, "", [WEATHER]),
    (HermesParser, f"I will look.\n\n{HERMES}\n{HERMES_TIME}\n", "I will look.", [WEATHER, ("get_time", "CET")]),
    (HermesParser, f"<think>\nwhich?\n</think>\n\n{HERMES}", "<think>\nwhich?\n</think>", [WEATHER]),
    (HermesParser, f"{HERMES} Done.", " Done.", [WEATHER]),
    (HermesParser, SMOLLM2, "", [WEATHER, SEARCH]),
    (HermesParser, "<tool_call>[]</tool_call>", "", []),
    (MistralParser, MISTRAL, "", [WEATHER]),
    (MistralParser, f"Let me see. {MISTRAL_TWO}", "Let me see.", [WEATHER, SEARCH]),
    (MistralParser, MISTRAL_V11, "", [WEATHER, SEARCH]),
    (MistralParser, MISTRAL_V11_IDS, "", [WEATHER]),
    (MistralParser, f"[TOOL_CALLS]get_weather{PARIS}", "", [WEATHER]),
    (Llama3Parser, LLAMA, "", [WEATHER]),
    (Llama3Parser, f"\n<|python_tag|>{LLAMA}", "", [WEATHER]),
    (Llama3Parser, f'{LLAMA}; {{"type": "function", "name": "search", "parameters": {TRICKY}}}', "", [WEATHER, SEARCH]),
    (Llama3Parser, f"{LLAMA}\n{LLAMA}", "", [WEATHER, WEATHER]),
]
ODD: list[Case] = [
    (HermesParser, '<tool_call>{"name": "get_time"}</tool_call>', "", [Call("get_time", "{}")]),
    (HermesParser, '<tool_call>{"name": "get_time", "arguments": null}</tool_call>', "", [Call("get_time", "{}")]),
    (
        HermesParser,
        f'<tool_call>{{"name": "search", "arguments": {json.dumps(TRICKY)}}}</tool_call>',
        "",
        [SEARCH],
    ),
    (HermesParser, HERMES[:61], "", [Call("get_weather", HERMES[49:61])]),
    (
        HermesParser,
        '<tool_call>{"name": "get_time", "arguments": {"a": 1</tool_call>',
        "",
        [Call("get_time", '{"a": 1')],
    ),
    (HermesParser, f"{HERMES[:-4]}", "", [WEATHER]),
    (
        HermesParser,
        f'<tool_call>{{"name": "get_weather", "arguments": {PARIS}, "why": <b>}}</tool_call>',
        ', "why": <b>}</tool_call>',
        [WEATHER],
    ),
    (
        HermesParser,
        f'<tool_call>[{{"name": "get_weather", "arguments": {PARIS}}}, {{"name": "no_tool"}}]',
        ', {"name": "no_tool"}]',
        [WEATHER],
    ),
]
TEXTS: list[tuple[Parser, str]] = [
    (HermesParser, "a <tool_ call, 1 <2 and <tool_call> without one <tool_call>{} <"),
    (HermesParser, "  spaces \n at both ends \n"),
    (HermesParser, f"<tool_call>\n{LLAMA}".replace("get_weather", "no_tool")),
    (HermesParser, '<tool_call>{"name": "get_time", "arguments": 7}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "get_time", "arguments": "\\ud800"}</tool_call>'),
    (HermesParser, '<tool_call>{"name": "get_time"'),
    (MistralParser, "[TOOL_CALLS] none [TOOL_CALLS][{}][TOOL_CALLS]search[ARGS] no"),
    (Llama3Parser, '{"name": "Alice", "parameters": {}}'),
    (Llama3Parser, ' {"answer": 42} '),
    (Llama3Parser, '<|python_tag|>brave_search.call(query="x")'),
    (Llama3Parser, ""),
]


def as_call(call: Call | tuple[str, str]) -> Call:
    return call if isinstance(call, Call) else Call(call[0], json.dumps({"zone": call[1]}))


@pytest.mark.parametrize(("parser", "answer", "text", "calls"), REAL + ODD)
def test_calls_are_read_whole_by_character_and_in_two_at_every_place(
    parser: Parser, answer: str, text: str, calls: list[Call | tuple[str, str]]
) -> None:
    expected = Assembled(text, [as_call(call) for call in calls])
    assert parse(parser, [answer]) == expected
    assert parse(parser, list(answer)) == expected
    for at in range(len(answer)):
        assert parse(parser, [answer[:at], answer[at:]]) == expected


@pytest.mark.parametrize(("parser", "answer"), TEXTS)
def test_what_is_no_call_stays_text_to_the_last_character(parser: Parser, answer: str) -> None:
    for cut in ([answer], list(answer)):
        assert parse(parser, cut) == Assembled(answer)


@pytest.mark.parametrize(("parser", "answer", "text", "calls"), REAL)
def test_a_beginning_reads_as_the_beginning_of_the_whole(
    parser: Parser, answer: str, text: str, calls: list[Call | tuple[str, str]]
) -> None:
    for at in range(len(answer)):
        reading, so_far = parser(NAMES), Assembled()
        so_far.add(reading.feed(answer[:at]))
        assert text.startswith(so_far.text)
        assert len(so_far.calls) <= len(calls)
        for call, whole in zip(so_far.calls, map(as_call, calls), strict=False):
            assert call.name == whole.name
            assert whole.arguments.startswith(call.arguments)


def test_the_name_comes_first_and_arguments_as_they_are_written() -> None:
    reading = HermesParser(NAMES)
    assert reading.feed("Hm. <tool_call>") == [Text("Hm.")]
    assert reading.feed('{"name": "search", "arg') == []
    assert reading.feed('uments": {"q"') == [CallBegin(0, "search"), Arguments(0, '{"q"')]
    assert reading.feed(': "x') == [Arguments(0, ': "x')]
    assert reading.feed('"}}</tool_call> ok') == [Arguments(0, '"}'), Text(" ok")]
    assert reading.finish() == []


FRAGMENTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        "<|python_tag|>",
        "get_time",
        "search",
        "no_tool",
    ),
    *('{"name": ', '"get_time"', '"no_tool"', ', "arguments": ', ', "parameters": ', '{"a": "b}"}', "{", "}", "[", "]"),
    *(", ", "; ", ": ", '"', "\\", "\n", " ", "word", "null", "1", "é", HERMES, LLAMA, MISTRAL, MISTRAL_V11),
]


@pytest.mark.parametrize("parser", [HermesParser, MistralParser, Llama3Parser])
@settings(deadline=None, max_examples=300)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14), st.data())
def test_however_an_answer_is_cut_it_reads_the_same(parser: Parser, parts: list[str], data: st.DataObject) -> None:
    answer = "".join(parts)
    whole = parse(parser, [answer])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    assert parse(parser, [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]) == whole
    assert parse(parser, list(answer)) == whole
    assert all(call.name in NAMES for call in whole.calls)
    if not whole.calls and "<tool_call>" not in answer:  # of which an empty list is no text
        assert whole.text == answer


@pytest.mark.parametrize("parser", [HermesParser, MistralParser, Llama3Parser])
@settings(deadline=None, max_examples=300)
@given(st.text())
def test_plain_text_is_never_lost(parser: Parser, answer: str) -> None:
    assert parse(parser, list(answer)) == Assembled(answer)
