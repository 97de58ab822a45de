"""Constraints: which are refused, what they may cost, and that a grammar affects no other request."""

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.engine import AsyncLLMEngine, EngineConfig, LLMEngine, SamplingParams, StructuredOutputs, frontend
from swiftkv_platform.engine import grammars as grammars_module
from swiftkv_platform.engine.grammars import MAX_CONCURRENT_COMPILATIONS, Constraint
from swiftkv_platform.errors import InvalidInputError, RateLimitedError
from swiftkv_platform.specs.base import MAX_GRAMMAR_BYTES
from swiftkv_platform.web.limiters import Sender
from tests.support.fakes.tokenizers import EOS, byte_tokenizer

pytestmark = pytest.mark.slow("compiles grammars until they are ended")

COSTLY = "b(a{1000}){1000}"
"""A regex that llguidance gives up on after its first letter."""


def ids(text: str) -> list[int]:
    found: list[int] = byte_tokenizer()(text)["input_ids"]
    return found


def allowed(constraint: Constraint, text: str) -> set[int]:
    bits = constraint.compute_allowed_mask(ids(text))
    return {token for token in range(258) if bits[token // 8] >> token % 8 & 1}


@pytest.fixture(scope="module")
def engine(dense_dir: Path) -> LLMEngine:
    return LLMEngine.from_pretrained(dense_dir, EngineConfig(grammar_timeout_s=60.0))


def compiled(engine: LLMEngine, **fields: Any) -> Constraint:
    return engine.grammar_compiler.compile(StructuredOutputs(**fields))


def test_a_constraint_follows_any_answer_it_is_asked_about(engine: LLMEngine) -> None:
    one, other = compiled(engine, regex="ab*c?"), compiled(engine, regex="ab*c?")
    expected = {"": ids("a"), "a": [*ids("bc"), EOS], "abb": [*ids("bc"), EOS], "abc": [EOS]}
    for answer in ("", "a", "abb", "a", "abc", "", "abc", "abb"):
        assert allowed(one, answer) == set(expected[answer])
        assert one.is_complete(ids(answer)) == (answer == "abc")
    assert one.count_allowed_tokens(ids("a"), ids("bbxb")) == 2
    assert one.count_allowed_tokens([], ids("x")) == 0
    assert allowed(one, "") == set(ids("a")), "counting allowed drafts changes nothing"
    assert allowed(one, "ab") == set(expected["a"])
    assert allowed(other, "") == set(ids("a")), "answers of one constraint have separate states"
    assert one.failure is None


def test_equal_schemas_are_compiled_once(engine: LLMEngine) -> None:
    first = StructuredOutputs(json={"type": "object", "maxProperties": 3})
    assert engine.grammar_compiler.find_cached(first) is None
    engine.grammar_compiler.compile(first)
    assert (
        engine.grammar_compiler.find_cached(StructuredOutputs(json='{ "type":"object", "maxProperties":  3}'))
        is not None
    )
    tight = StructuredOutputs(json={"type": "object", "maxProperties": 3}, disable_any_whitespace=True)
    assert engine.grammar_compiler.find_cached(tight) is None


@pytest.mark.parametrize("kind", ["json", "grammar"])
def test_the_longest_chain_of_references_fits_the_stack(engine: LLMEngine, kind: str) -> None:
    """The Rust parser recurses; on a thread's usual stack this would end the process."""
    if kind == "json":
        links: Any = {str(at): {"items": {"$ref": f"#/$defs/{at + 1}"}} for at in range(1500)}
        text = json.dumps({"$defs": {**links, "1500": {"type": "null"}}, "$ref": "#/$defs/0"}, separators=(",", ":"))
    else:
        rules = "\n".join(f"a{at}:a{at + 1}" for at in range(5300))
        text = f'start:a0\n{rules}\na5300:"x"'
    assert 0.8 * MAX_GRAMMAR_BYTES < len(text) <= MAX_GRAMMAR_BYTES
    assert compiled(engine, **{kind: text}).failure is None


TOGETHER = [f".*a.{{{at}}}b.*" for at in range(1, 200)]
EXPLOSIVE: dict[str, dict[str, Any]] = {
    "terminals": {"grammar": "start: A\nA: " + " & ".join(f"/{one}/" for one in TOGETHER)},
    "patterns": {"json": {"type": "string", "allOf": [{"pattern": f"^{one}$"} for one in TOGETHER]}},
}


@pytest.mark.parametrize("explosive", EXPLOSIVE.values(), ids=EXPLOSIVE)
def test_compiling_that_would_go_on_is_ended(dense_dir: Path, explosive: dict[str, Any]) -> None:
    """Compilation that times out gives its place back: other grammars compile after it."""
    compiler = LLMEngine.from_pretrained(dense_dir, EngineConfig(grammar_timeout_s=0.5)).grammar_compiler
    for _ in range(MAX_CONCURRENT_COMPILATIONS + 1):
        with pytest.raises(InvalidInputError, match="took longer to compile"):
            compiler.compile(StructuredOutputs(**explosive))
    assert [thread for thread in threading.enumerate() if thread.name == "grammar"] == []
    assert compiler.compile(StructuredOutputs(regex="[a-c]")).failure is None


def test_what_cannot_be_compiled_is_refused(dense_dir: Path, bare_dir: Path) -> None:
    engine = LLMEngine.from_pretrained(dense_dir, EngineConfig(grammar_timeout_s=1e-6))
    words = "|".join(f"word{at}xyz{at * 7}" for at in range(3000))
    bare = LLMEngine.from_pretrained(bare_dir)
    for each, regex, message in ((engine, words, "took longer to compile"), (bare, "a", "needs a tokenizer")):
        with pytest.raises(InvalidInputError, match=message) as caught:
            compiled(each, regex=regex)
        assert caught.value.field == "structured_outputs.regex"


@pytest.mark.parametrize("source", [None, "response_format"])
def test_a_grammar_that_grows_too_complex_ends_its_request_alone(engine: LLMEngine, source: str | None) -> None:
    costly = SamplingParams(max_tokens=5, structured_outputs=StructuredOutputs(regex=COSTLY, source=source))
    plain = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    failed, answered = engine.generate([[1, 2], [3, 4]], [costly, plain])
    assert failed.finish_reason == "error"
    assert failed.error.startswith(f"{source or 'structured_outputs.regex'} is too complex")
    assert failed.error_field == (source or "structured_outputs.regex")
    assert answered.token_ids == engine.generate([[3, 4]], plain)[0].token_ids
    engine.assert_consistent()
    assert engine.num_free_blocks == engine.num_blocks


AMBIGUOUS = {
    "few words": ("start: s\ns: s s s | s s | /[a-z ]/", "a few words "),
    "nothing between": ('start: s\ns: "(" s ")" s | "" | s s | /[a-z]/', "ab(c)"),
}


@pytest.mark.parametrize(("grammar", "part"), AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_the_parsers_work_is_bounded(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, grammar: str, part: str
) -> None:
    """In an ambiguous grammar, each byte multiplies the derivations to follow."""
    monkeypatch.setattr(grammars_module, "BASE_S_PER_REQUEST", 0.2)
    monkeypatch.setattr(grammars_module, "MAX_S_PER_TOKEN", 0.0)
    text = ids(part * 200)
    constraint, followed = compiled(engine, grammar=grammar), 0
    while constraint.failure is None and followed < len(text):
        followed += 1
        constraint.compute_allowed_mask(text[:followed])
    assert constraint.failure is not None
    assert constraint.failure.startswith("structured_outputs.grammar is too complex to be enforced further: ")
    assert not constraint.is_complete(text[:followed])


@pytest.mark.parametrize("n", [1, 3])
def test_the_work_of_all_steps_is_bounded_for_a_request_with_all_its_answers(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    monkeypatch.setattr(grammars_module, "BASE_S_PER_REQUEST", 0.0)
    monkeypatch.setattr(grammars_module, "MAX_S_PER_TOKEN", 0.0)
    wanted = StructuredOutputs(regex="[a-f]+")
    limited = SamplingParams(max_tokens=5, n=n, structured_outputs=wanted)
    plain = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    failed, answered = engine.generate([[1, 2], [3, 4]], [limited, plain])
    for sample in failed.samples or (failed,):
        assert (sample.finish_reason, sample.error_field) == ("error", "structured_outputs.regex")
        assert "without ambiguity" in sample.error
        assert len(sample.token_ids) <= 1, "the first mask comes from the compiler, at no cost"
    assert len(answered.token_ids) == 5
    monkeypatch.undo()
    again = engine.generate([[1, 2]], limited)[0]
    assert not any(sample.error for sample in again.samples or (again,)), "the next request starts with no cost"


def test_many_properties_many_choices_and_operators_are_followed(engine: LLMEngine) -> None:
    properties = {f"property_{at}": {"type": ["string", "null"]} for at in range(200)}
    constraint = compiled(engine, json={"type": "object", "properties": properties})
    answer = ids('{"property_3": "text", "property_77": null, "property_199": "a\\n"}')
    assert constraint.count_allowed_tokens([], answer) == len(answer)
    sums = compiled(engine, grammar='start: e\ne: e "+" e | e "*" e | "(" e ")" | /[0-9]/')
    answer = ids("(1+2)*3+4*(5+6)+7")
    assert sums.count_allowed_tokens([], answer) == len(answer)
    special = compiled(engine, choice=(*(f"choice {at}" for at in range(4095)), r"/\n^$.*+?()[]{}|#&~-"))
    for choice in ("choice 4094", r"/\n^$.*+?()[]{}|#&~-"):
        assert special.count_allowed_tokens([], ids(choice)) == len(choice)
    assert (constraint.failure, sums.failure, special.failure) == (None, None, None)


def test_an_answer_ends_where_its_grammar_does(engine: LLMEngine) -> None:
    params = SamplingParams(max_tokens=30, n=4, seed=1, structured_outputs=StructuredOutputs(choice=("ab", "é\n\"'😀")))
    samples = engine.generate([[1]], params)[0].samples
    assert {sample.text for sample in samples} <= {"ab", "é\n\"'😀"}
    assert all(sample.finish_reason == "stop" for sample in samples)
    assert compiled(engine, choice=("é\n\"'😀",)).count_allowed_tokens([], ids("é\n\"'😀")) == 9
    cut = SamplingParams(max_tokens=3, structured_outputs=StructuredOutputs(regex="a{9}"))
    assert [engine.generate([[1]], cut)[0].finish_reason, engine.generate([[1]], cut)[0].text] == ["length", "aaa"]


def test_what_a_grammar_leaves_no_choice_about_is_drafted(engine: LLMEngine) -> None:
    schema = {"properties": {"temperature": {"type": "boolean"}}, "required": ["temperature"], "type": "object"}
    wanted = StructuredOutputs(json={**schema, "additionalProperties": False}, disable_any_whitespace=True)
    params = {"max_tokens": 40, "temperature": 0.0, "structured_outputs": wanted}
    plain = engine.generate([[1, 2]], SamplingParams(**params))[0]
    drafted = engine.generate([[1, 2]], SamplingParams(**params, num_lookup_tokens=8))[0]
    assert drafted.text == plain.text
    assert plain.num_accepted_tokens == 0
    assert drafted.num_accepted_tokens >= len('{"temperature":') - 1, "one a byte, except the first of a step"


def test_a_bias_does_not_open_what_the_grammar_forbids_and_logprobs_are_the_models(engine: LLMEngine) -> None:
    x = ids("x")[0]
    params = SamplingParams(
        max_tokens=4,
        temperature=0.0,
        logit_bias={x: 100},
        logprobs=1,
        structured_outputs=StructuredOutputs(regex="[a-f]+"),
    )
    output = engine.generate([[5, 6, 7]], params)[0]
    assert re.fullmatch("[a-f]+", output.text)
    free = engine.generate([[5, 6, 7]], SamplingParams(max_tokens=1, temperature=0.0, logprobs=1, ignore_eos=True))[0]
    [(best, value)] = free.logprobs[0].items()
    assert output.logprobs[0][best] == pytest.approx(value, abs=1e-5)


async def test_compiling_keeps_no_other_request_waiting(dense_dir: Path) -> None:
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(dense_dir))
    params = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputs(regex="[a-d]{4}"))
    outputs = [output async for output in await engine.submit([1, 2], params)]
    assert re.fullmatch("[a-d]{4}", outputs[-1].text)
    assert engine.num_requests == 0
    with pytest.raises(InvalidInputError, match="unclosed"):
        await engine.submit([1], SamplingParams(structured_outputs=StructuredOutputs(regex="(")))
    assert engine.num_requests == 0
    await engine.aclose()


@pytest.mark.parametrize("n", [1, 3])
async def test_the_work_of_a_callers_grammars_is_bounded_over_all_its_requests(
    dense_dir: Path, monkeypatch: pytest.MonkeyPatch, n: int
) -> None:
    monkeypatch.setattr(grammars_module, "FREE_S_PER_TOKEN", 0.0)
    monkeypatch.setattr(grammars_module, "CALLER_BURST_S", 1e-9)
    monkeypatch.setattr(grammars_module, "GRACE_S_PER_REQUEST", 0.0)
    monkeypatch.setattr(grammars_module, "CALLER_S_PER_MINUTE", 1e-9)
    engine = AsyncLLMEngine(LLMEngine.from_pretrained(dense_dir))
    limited = SamplingParams(max_tokens=5, n=n, structured_outputs=StructuredOutputs(regex="[a-f]+"))
    plain = SamplingParams(max_tokens=5, ignore_eos=True)

    async def ask(params: SamplingParams, tenant: str) -> list[str | None]:
        last = [output async for output in await engine.submit([1, 2], params, sender=Sender(tenant))][-1]
        return [each.error for each in last.samples or (last,)]

    async with asyncio.TaskGroup() as group:  # at once, or one after another
        first = [group.create_task(ask(limited, "acme/eve")) for _ in range(3)]
        beside = group.create_task(ask(plain, "acme/ann"))
    assert all(error is not None and "too complex" in error for task in first for error in task.result())
    assert beside.result() == [None]
    monkeypatch.setattr(frontend, "REFUSAL_DELAY_S", 0.05)
    waiting = asyncio.create_task(ask(limited, "acme/eve"))
    await asyncio.sleep(0)
    assert (waiting.done(), engine.num_requests) == (False, 0), "it waits without a place"
    with pytest.raises(RateLimitedError, match="this caller's grammars have used up") as refused:
        await waiting
    assert (refused.value.field, refused.value.retry_after_s > 0) == ("structured_outputs.regex", True)
    assert await ask(plain, "acme/eve") == [None]
    monkeypatch.undo()
    assert not any(await ask(limited, "acme/bob"))
    await engine.aclose()
