"""Families told by their templates, grammars of what they write, and markers that are special tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import httpx
import jsonschema
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer

import swiftkv_platform.sources
from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine
from swiftkv_platform.model import convert
from swiftkv_platform.serve.current import Current, ModelCard, Version
from swiftkv_platform.serve.http import create_http_app
from swiftkv_platform.serve.openai.messages import ChatMessage
from swiftkv_platform.serve.tools.families import FAMILIES, family_of
from swiftkv_platform.serve.tools.grammar import CallGrammar
from swiftkv_platform.specs.deployment import ToolCallParser
from tests.fakes.tokenizers import EOS, byte_tokenizer
from tests.unit.engine.tiny_models import make_model

BUILTIN = Path(swiftkv_platform.sources.__file__).parent / "teacher" / "chat_template.jinja"
SPECIAL = ("[TOOL_CALLS]", "[ARGS]")
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
CALLS = {
    "hermes": '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>',
    "smollm2": '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>',
    "llama3": '{"name": "f", "parameters": {"a": 1}}',
    "mistral": '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]',
    "mistral_v11": '[TOOL_CALLS]f[ARGS]{"a": 1}',
}


def test_a_deployment_may_name_every_family() -> None:
    assert set(get_args(ToolCallParser)) == set(FAMILIES) == set(CALLS)


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
def test_a_family_is_told_by_its_template(template: str, family: str | None) -> None:
    assert family_of(template) == family
    assert family_of(BUILTIN.read_text(encoding="utf-8")) == "hermes"


@pytest.fixture(scope="module")
def tokenizers() -> dict[bool, Any]:
    """By whether Mistral's markers are special tokens."""
    special = byte_tokenizer()
    special.add_special_tokens({"additional_special_tokens": list(SPECIAL)})
    return {False: byte_tokenizer(), True: special}


@pytest.fixture(scope="module")
def vocabularies(tokenizers: Mapping[bool, Any]) -> dict[bool, Any]:
    return {key: from_tokenizer(one, n_vocab=len(one), eos_token=[EOS]) for key, one in tokenizers.items()}


CASES = [(family, False) for family in FAMILIES] + [("mistral", True), ("mistral_v11", True)]


@pytest.mark.parametrize(("family", "is_special"), CASES)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_grammar_takes_what_its_family_writes_and_its_parser_reads_it(
    family: str, is_special: bool, parallel: bool, tokenizers: Mapping[bool, Any], vocabularies: Mapping[bool, Any]
) -> None:
    layout, call, tokenizer = FAMILIES[family].layout, CALLS[family], tokenizers[is_special]
    special = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL} if is_special else {}
    grammar = CallGrammar(layout, {"g": {"type": "object"}, "f": SCHEMA}, special, parallel)

    def takes(lark: str, answer: str) -> bool:
        matcher = LLMatcher(vocabularies[is_special], LLMatcher.grammar_from_lark(lark), log_level=0)
        tokens = tokenizer.encode(answer, add_special_tokens=False)
        return not matcher.is_error() and matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    bad = call.replace("1", '"x"')
    one = call.removeprefix(layout.begin).removesuffix(layout.end)
    two = layout.begin + one + layout.between + one + layout.end
    required, text = grammar.required(), grammar.or_text()
    assert takes(required, call)
    assert takes(required, two) is parallel
    assert not any(takes(required, answer) for answer in (bad, "text", "", f"text {call}"))
    assert all(takes(text, answer) for answer in (call, "text, <tool and [TOOL", ""))
    assert not any(takes(text, answer) for answer in (bad, call[:-4]))
    assert takes(text, f"text {call}")
    assert takes(text, two) is parallel
    answer = grammar.or_answer(SCHEMA)
    assert all(takes(answer, one) for one in (layout.tag + call, '{"a": 2}'))
    assert not any(takes(answer, one) for one in (bad, "text", '{"a": "x"}'))
    parser = FAMILIES[family].parser(frozenset("f"))
    parser.feed(two)
    parser.finish()
    assert parser.num_calls == 2


async def test_markers_that_are_special_tokens_are_constrained_and_read(
    tokenizers: Mapping[bool, Any], tmp_path: Path
) -> None:
    model, tokenizer = make_model(1024), tokenizers[True]
    model.resize_token_embeddings(len(tokenizer))
    convert(model, num_key_value_layers=2, key_value_group_size=2).save_pretrained(tmp_path)
    tokenizer.chat_template = "{{ tools }}{{ messages }}[TOOL_CALLS][ARGS]"
    tokenizer.save_pretrained(tmp_path)
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(tmp_path, EngineConfig(max_num_seqs=2, grammar_timeout_s=60.0)))
    card = ModelCard(deployment="dep_1", model="tiny", manifest_digest=None, swiftkv=None, max_model_len=1024)
    app = create_http_app(Current(Version(engine, card, created=1)))
    tool = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}
    spaces = {str(token): -50 for token in tokenizer.convert_tokens_to_ids(list("ĠĊĉč"))}
    eager = {**spaces, str(tokenizer.convert_tokens_to_ids("[TOOL_CALLS]")): 100}
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "max_tokens": 60,
        "seed": 1,
        "tools": [tool],
        "parallel_tool_calls": False,
    }
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://serve") as http:
        for fields in ({"tool_choice": "required"}, {"tool_choice": "auto"}):
            answer = await http.post("/v1/chat/completions", json={**body, **fields, "logit_bias": eager})
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
        return ChatMessage.model_validate(message).for_template()["tool_calls"][0]["function"]["arguments"]

    assert told('{"a": [1]}') == {"a": [1]}
    assert told("") == {}
    deep = '{"a": ' * 100 + "1" + "}" * 100
    for arguments in ('{"a', "[1]", "7", deep, "[" * 100_000):
        assert told(arguments) == arguments
