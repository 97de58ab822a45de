"""Tool calls: parsed from each family's format however it is cut, rendered by templates, constrained by grammars."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from transformers import AutoTokenizer

from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from swiftkv_platform.model import convert
from swiftkv_platform.model.weights.writing import copy_companion_files
from swiftkv_platform.serve.openai.schemas import ChatMessage
from swiftkv_platform.serve.tools.families import (
    FAMILIES,
    CallGrammar,
    HermesParser,
    Llama3Parser,
    MistralParser,
    detect_family,
)
from swiftkv_platform.serve.tools.parser import CallDelta, NewCall, ParsedAnswer, ParsedCall, TextDelta, ToolCallParser
from swiftkv_platform.sources.teacher_config import find_builtin_teacher
from swiftkv_platform.specs.deployment import ToolCallParser as FamilyName
from swiftkv_platform.specs.job import BUILTIN_TEACHER
from tests.contract.serving.replicas import application, asgi_client, version_of
from tests.support.fakes.tokenizers import EOS, byte_tokenizer
from tests.unit.engine.tiny_models import make_model

NUM_EXAMPLES = 1000 if "SWIFTKV_SOAK" in os.environ else 60
NAMES = frozenset({"get_weather", "get_time", "search"})
PARIS = '{"city": "Paris", "unit": "C"}'
TRICKY = '{"text": "a \\"<tool_call>{\\" }] \\\\", "deep": [{"x": [1, -2.5e3, null, true]}]}'
Parser = type[ToolCallParser]


def parse(parser: Parser, pieces: Sequence[str]) -> ParsedAnswer:
    reading, answer, fed = parser(NAMES), ParsedAnswer(), ""
    for piece in pieces:
        fed += piece
        answer.add_deltas(reading.feed(piece))
        begun = max(n for n in range(len(parser.marker)) if fed.endswith(parser.marker[:n]))
        assert answer.calls or len(answer.text) <= len(fed) - begun, "the beginning of a marker was handed on as text"
    answer.add_deltas(reading.finish())
    return answer


def called(name: str, arguments: str, key: str = "arguments", more: str = "") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}{more}}}'


PARIS_CALL, TRICKY_CALL = called("get_weather", PARIS), called("search", TRICKY)
HERMES = f"<tool_call>\n{PARIS_CALL}\n</tool_call>"
HERMES_TIME = '<tool_call>\n{"arguments": {"zone": "CET"}, "name": "get_time"}\n</tool_call>'
SMOLLM2 = f"<tool_call>[\n{PARIS_CALL},\n{TRICKY_CALL}\n]</tool_call>"
MISTRAL = "[TOOL_CALLS] [" + called("get_weather", PARIS, more=', "id": "VvvODy9mT"') + "]"
MISTRAL_V11 = f"[TOOL_CALLS]get_weather[ARGS]{PARIS}[TOOL_CALLS]search[ARGS]{TRICKY}"
LLAMA = called("get_weather", PARIS, "parameters")
LLAMA_TRICKY = f'{{"type": "function", "name": "search", "parameters": {TRICKY}}}'
WEATHER, SEARCH, TIME = (
    ParsedCall("get_weather", PARIS),
    ParsedCall("search", TRICKY),
    ParsedCall("get_time", '{"zone": "CET"}'),
)
NOW = ParsedCall("get_time", "{}")

Case = tuple[Parser, str, str, list[ParsedCall]]
REAL: list[Case] = [
    (HermesParser, HERMES, "", [WEATHER]),
    (HermesParser, f"I will look.\n\n{HERMES}\n{HERMES_TIME}\n", "I will look.", [WEATHER, TIME]),
    (HermesParser, f"<think>\nwhich?\n</think>\n\n{HERMES}", "<think>\nwhich?\n</think>", [WEATHER]),
    (HermesParser, f"{HERMES} Done.", " Done.", [WEATHER]),
    (HermesParser, SMOLLM2, "", [WEATHER, SEARCH]),
    (HermesParser, "<tool_call>[]</tool_call>", "", []),
    (MistralParser, MISTRAL, "", [WEATHER]),
    (MistralParser, f"Let me see. [TOOL_CALLS][{PARIS_CALL}, {TRICKY_CALL}]", "Let me see.", [WEATHER, SEARCH]),
    (MistralParser, MISTRAL_V11, "", [WEATHER, SEARCH]),
    (MistralParser, f"[TOOL_CALLS]get_weather[CALL_ID]a1B2c3D4e[ARGS]{PARIS}", "", [WEATHER]),
    (MistralParser, f"[TOOL_CALLS]get_weather{PARIS}", "", [WEATHER]),
    (Llama3Parser, LLAMA, "", [WEATHER]),
    (Llama3Parser, f"\n<|python_tag|>{LLAMA}", "", [WEATHER]),
    (Llama3Parser, f"{LLAMA}; {LLAMA_TRICKY}", "", [WEATHER, SEARCH]),
    (Llama3Parser, f"{LLAMA}\n{LLAMA}", "", [WEATHER, WEATHER]),
]
BROKEN = '<tool_call>{"name": "get_time", "arguments": {"a": 1</tool_call>'
WHY = "<tool_call>" + called("get_weather", PARIS, more=', "why": <b>') + "</tool_call>"
ODD: list[Case] = [
    (HermesParser, '<tool_call>{"name": "get_time"}</tool_call>', "", [NOW]),
    (HermesParser, f"<tool_call>{called('get_time', 'null')}</tool_call>", "", [NOW]),
    (HermesParser, f"<tool_call>{called('search', json.dumps(TRICKY))}</tool_call>", "", [SEARCH]),
    (HermesParser, HERMES[:61], "", [ParsedCall("get_weather", HERMES[49:61])]),
    (HermesParser, BROKEN, "", [ParsedCall("get_time", '{"a": 1')]),
    (HermesParser, HERMES[:-4], "", [WEATHER]),
    (HermesParser, WHY, ', "why": <b>}</tool_call>', [WEATHER]),
    (HermesParser, f'<tool_call>[{PARIS_CALL}, {{"name": "no_tool"}}]', ', {"name": "no_tool"}]', [WEATHER]),
]
TEXTS: list[tuple[Parser, str]] = [
    (HermesParser, "a <tool_ call, 1 <2 and <tool_call> without one <tool_call>{} <"),
    (HermesParser, "  spaces \n at both ends \n"),
    (HermesParser, f"<tool_call>\n{called('no_tool', PARIS)}"),
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


@pytest.mark.parametrize(
    ("parser", "answer", "text", "calls"), [*REAL, *ODD, *((parser, answer, answer, []) for parser, answer in TEXTS)]
)
def test_an_answer_reads_the_same_whole_by_character_and_in_two_at_every_place(
    parser: Parser, answer: str, text: str, calls: list[ParsedCall]
) -> None:
    """Cuts change neither calls nor text, and text outside of calls stays as it is."""
    expected = ParsedAnswer(text, calls)
    assert parse(parser, [answer]) == expected
    assert parse(parser, list(answer)) == expected
    for at in range(len(answer)):
        assert parse(parser, [answer[:at], answer[at:]]) == expected
        so_far = ParsedAnswer()
        so_far.add_deltas(parser(NAMES).feed(answer[:at]))
        assert text.startswith(so_far.text), "later pieces take back no text"
        assert [call.name for call in so_far.calls] == [call.name for call in calls[: len(so_far.calls)]]
        for call, whole in zip(so_far.calls, calls, strict=False):
            assert whole.arguments.startswith(call.arguments)


def test_a_calls_name_comes_first_and_its_arguments_as_they_are_written() -> None:
    reading = HermesParser(NAMES)
    for piece, told in (
        ('Hm. <tool_call>{"name": "search", "arg', [TextDelta("Hm.")]),
        ('uments": {"q"', [NewCall(0, "search"), CallDelta(0, '{"q"')]),
        (': "x', [CallDelta(0, ': "x')]),
        ('"}}</tool_call> ok', [CallDelta(0, '"}'), TextDelta(" ok")]),
    ):
        assert reading.feed(piece) == told
    assert reading.finish() == []


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "get_time", "no_tool"),
    *('{"name": ', '"get_time"', '"no_tool"', ', "arguments": ', ', "parameters": ', '{"a": "b}"}', "{", "}", "[", "]"),
    *(", ", "; ", ": ", '"', "\\", "\n", " ", "word", "null", "1", "é", HERMES, LLAMA, MISTRAL, MISTRAL_V11),
]


@pytest.mark.parametrize("parser", [HermesParser, MistralParser, Llama3Parser])
@settings(deadline=None, max_examples=NUM_EXAMPLES)
@given(st.lists(st.sampled_from(FRAGMENTS), max_size=14), st.text(), st.data())
def test_however_an_answer_is_cut_it_reads_the_same(
    parser: Parser, parts: list[str], plain: str, data: st.DataObject
) -> None:
    answer = "".join(parts)
    whole = parse(parser, [answer])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=8)))
    assert parse(parser, [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]) == whole
    assert parse(parser, list(answer)) == whole
    assert all(call.name in NAMES for call in whole.calls)
    if not whole.calls and "<tool_call>" not in answer:  # an empty list of calls is no text
        assert whole.text == answer
    assert parse(parser, list(plain)) == ParsedAnswer(plain), "plain text is never lost"


SPECIAL = ("[TOOL_CALLS]", "[ARGS]")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "smollm2": '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>',
    "llama3": '{"name": "f", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]',
    "mistral_v11": '[TOOL_CALLS]f[ARGS]{"a": 1}',
}


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ tools }} within <tool_call></tool_call> XML tags:\n<tool_call>\n{...}\n</tool_call>", "hermes"),
        ("format <tool_call>[\n{...}]</tool_call>", "smollm2"),
        ("{{- '[AVAILABLE_TOOLS] [' }} {{- '[TOOL_CALLS] [' }}", "mistral"),
        ("{{- '[TOOL_CALLS]' + call.name + '[ARGS]' }}", "mistral_v11"),
        ("<|start_header_id|>ipython {{- '<|python_tag|>' }}", "llama3"),
        ('<|start_header_id|> Respond in the format {"name": name, "parameters": dictionary}', "llama3"),
        ("<tool_call>\n<function=example>\n</function>\n</tool_call>", None),
        ("{{ messages }}", None),
    ],
)
def test_a_family_is_told_by_its_template_and_may_be_named_by_a_deployment(template: str, family: str | None) -> None:
    assert detect_family(template) == family
    assert set(get_args(FamilyName)) == set(FAMILIES) == set(CALLS)


@pytest.fixture(scope="module")
def tokenizers() -> dict[bool, Any]:
    """Tokenizers by whether Mistral's markers are special tokens."""
    special = byte_tokenizer()
    special.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return {False: byte_tokenizer(), True: special}


CASES = [(family, False) for family in FAMILIES] + [("mistral", True), ("mistral_v11", True)]


@pytest.mark.parametrize(("family", "is_special"), CASES)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_grammar_takes_what_its_family_writes_and_its_parser_reads_it(
    family: str, is_special: bool, parallel: bool, tokenizers: dict[bool, Any]
) -> None:
    layout, call, tokenizer = FAMILIES[family].layout, CALLS[family], tokenizers[is_special]
    vocabulary = from_tokenizer(tokenizer, n_vocab=len(tokenizer), eos_token=[EOS])
    special = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL} if is_special else {}
    grammar = CallGrammar(layout, {"g": {"type": "object"}, "f": SCHEMA}, special, parallel)

    def takes(lark: str, answer: str) -> bool:
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(lark), log_level=0)
        tokens = tokenizer.encode(answer, add_special_tokens=False)
        return not matcher.is_error() and matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    bad = call.replace("1", '"x"')
    one = call.removeprefix(layout.begin).removesuffix(layout.end)
    two = layout.begin + one + layout.between + one + layout.end
    required, text = grammar.make_calls_only(), grammar.make_text_with_calls()
    answer = grammar.make_calls_or_json(SCHEMA)
    assert takes(required, call)
    assert takes(required, two) is takes(text, two) is parallel
    assert not any(takes(required, each) for each in (bad, "text", "", f"text {call}"))
    assert all(takes(text, each) for each in (call, f"text {call}", "text, <tool and [TOOL", ""))
    assert not any(takes(text, each) for each in (bad, call[:-4]))
    assert all(takes(answer, each) for each in (layout.tag + call, '{"a": 2}'))
    assert not any(takes(answer, each) for each in (bad, "text", '{"a": "x"}'))
    parser = FAMILIES[family].parser(frozenset("f"))
    parser.feed(two)
    parser.finish()
    assert parser.num_calls == 2


async def test_markers_that_are_special_tokens_are_constrained_and_read(
    tokenizers: dict[bool, Any], tmp_path: Path
) -> None:
    model, tokenizer = make_model(1024), tokenizers[True]
    model.resize_token_embeddings(len(tokenizer))
    convert(model, num_key_value_layers=2, key_value_group_size=2).save_pretrained(tmp_path)
    tokenizer.chat_template = "{{ tools }}{{ messages }}[TOOL_CALLS][ARGS]"
    tokenizer.save_pretrained(tmp_path)
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(tmp_path, EngineConfig(max_num_seqs=2, grammar_timeout_s=60.0)))
    http = asgi_client(application(version_of(engine, "tiny", 1024)))
    eager = {str(token): -50 for token in tokenizer.convert_tokens_to_ids(list("ĠĊĉč"))}
    eager |= {str(tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")): 100}
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
    body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 60, "seed": 1}
    body |= {"tools": [tool], "parallel_tool_calls": False, "logit_bias": eager}
    for choice_of_tool in ("required", "auto"):
        answer = await http.post("/v1/chat/completions", json={**body, "tool_choice": choice_of_tool})
        [choice] = answer.json()["choices"]
        assert choice["finish_reason"] == "tool_calls", choice
        [call] = choice["message"]["tool_calls"]
        assert len(call["id"]) == 9
        jsonschema.validate(json.loads(call["function"]["arguments"]), SCHEMA)
    await engine.aclose()


def test_a_message_keeps_arguments_that_are_no_object() -> None:
    def told(arguments: str) -> Any:
        function = {"name": "f", "arguments": arguments}
        message = {"role": "assistant", "content": None, "tool_calls": [{"id": "a", "function": function}]}
        return ChatMessage.model_validate(message).to_template_format()["tool_calls"][0]["function"]["arguments"]

    assert told('{"a": [1]}') == {"a": [1]}
    assert told("") == {}
    deep = '{"a": ' * 100 + "1" + "}" * 100
    for arguments in ('{"a', "[1]", "7", deep, "[" * 100_000):
        assert told(arguments) == arguments


def test_a_students_directory_gets_the_built_in_template_and_it_marks_what_the_assistant_says(tmp_path: Path) -> None:
    copy_companion_files(find_builtin_teacher(BUILTIN_TEACHER), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert detect_family(tokenizer.chat_template) == "hermes"
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "Is it warm in Rome?"}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    turns = [
        *(system, user, {"role": "assistant", "content": "", "tool_calls": [call]}),
        *({"role": "tool", "tool_call_id": "a", "content": "22"}, {"role": "assistant", "content": "Yes."}),
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
    marked = tokenizer.apply_chat_template(turns, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    said = zip(marked["input_ids"], marked["assistant_masks"], strict=True)
    assert tokenizer.decode([token for token, is_said in said if is_said]) == f"{CALLS['hermes']}</s>Yes.</s>"
    whole = tokenizer.decode(marked["input_ids"])
    assert whole.startswith("<s><|im_start|>system\nBe brief.\n\nThese functions may be called:\n<tools>\n{")
    assert "<|im_start|>tool\n<tool_response>\n22\n</tool_response></s>\n" in whole
    asked = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
    assert asked == "<s><|im_start|>user\nIs it warm in Rome?</s>\n<|im_start|>assistant\n"
