"""Random schedules with constraints: every answer follows its own, whatever drafts, caches and other requests do.

SWIFTKV_SCHEDULES=1000 python -m pytest tests/numerics/test_structured_schedules.py
"""

import json
import os
import random
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from swiftkv_platform.engine import EarlyExit, LLMEngine, RequestOutput, SamplingParams, StructuredOutputs
from swiftkv_platform.model import convert
from tests.support.engine_schedules import (
    MAX_TIE_DIFFERENCE,
    Arrival,
    ServedModel,
    align_exit_head,
    make_drafts_free,
    make_random_arrivals,
    make_random_config,
    run_schedule,
)
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.support.tiny_models import random_teacher

NUM_SCHEDULES = max(int(os.environ.get("SWIFTKV_SCHEDULES", "50")) // 5, 1)
PET = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 12}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
CONSTRAINTS = (
    StructuredOutputs(json=PET, disable_any_whitespace=True),
    StructuredOutputs(json={"type": "array", "items": {"type": "boolean"}, "maxItems": 3}, disable_any_whitespace=True),
    StructuredOutputs(regex="(ab){1,3}[c-f]{4}(gh)*"),
    StructuredOutputs(choice=("yes", "no", "né", "yesterday")),
    StructuredOutputs(grammar='start: item+\nitem: "x" | "(" item ")"'),
)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ServedModel]:
    """A dense model, and a student whose exit head agrees with the whole model often, but not always."""
    student: Any = convert(random_teacher(seed=1), num_key_value_layers=2, key_value_group_size=2, early_exit=True)
    made = {}
    for name, model in (("student", align_exit_head(student)), ("dense", random_teacher(seed=1))):
        directory = tmp_path_factory.mktemp(name)
        model.save_pretrained(directory)
        byte_tokenizer().save_pretrained(directory)
        made[name] = ServedModel.load(directory)
    return made


def constrained(draw: random.Random, arrivals: list[Arrival]) -> list[Arrival]:
    """Constrain most arrivals, and give each a seed, so that its answer does not depend on other requests."""
    made = []
    for arrival in arrivals:
        wanted = draw.choice([None, *CONSTRAINTS * 2])
        params = replace(
            arrival.params,
            max_tokens=draw.choice([5, 40]),
            seed=draw.randrange(1000),
            ignore_eos=wanted is None,
            structured_outputs=wanted,
        )
        made.append(replace(arrival, params=params))
    return made


def drafting(arrivals: list[Arrival], **params: Any) -> list[Arrival]:
    return [replace(arrival, abort_after=None, params=replace(arrival.params, **params)) for arrival in arrivals]


def check_text(engine: LLMEngine, params: SamplingParams, output: RequestOutput) -> None:
    wanted = params.structured_outputs
    assert wanted is not None
    answer = list(output.token_ids)
    if output.finish_reason == "length":
        assert len(answer) == params.max_tokens
        assert engine.grammar_compiler.compile(wanted).count_allowed_tokens([], answer) == len(answer)
        return
    assert output.finish_reason == "stop"
    text = output.text
    if wanted.kind == "json":
        jsonschema.validate(json.loads(text), json.loads(wanted.text))
    elif wanted.kind == "regex":
        assert re.fullmatch(wanted.text, text)
    elif wanted.choice is not None:
        assert text in wanted.choice
    else:
        while "(x)" in text:
            text = text.replace("(x)", "x")
        assert set(text) == {"x"}


def check_greedy(engine: LLMEngine, subject: ServedModel, params: SamplingParams, output: RequestOutput) -> None:
    """Assert that each token is the reference's best among those that the grammar allows."""
    constraint = engine.grammar_compiler.compile(params.structured_outputs)
    prompt, answer = list(output.prompt_token_ids), list(output.token_ids)
    logits = subject.logits(prompt + answer[:-1])[len(prompt) - 1 :]
    for at, token in enumerate(answer):
        bits = constraint.compute_allowed_mask(answer[:at])
        among = [other for other in range(logits.shape[-1]) if bits[other // 8] >> other % 8 & 1]
        assert token in among
        assert float(logits[at, among].max() - logits[at, token]) < MAX_TIE_DIFFERENCE


@pytest.mark.timeout(NUM_SCHEDULES * 20 + 300)
def test_random_schedules_follow_their_constraints(subjects: dict[str, ServedModel]) -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_SCHEDULES):
        draw = random.Random(seed)
        name = draw.choice(["student", "student", "dense"])
        subject = subjects[name]
        arrivals = constrained(draw, make_random_arrivals(draw, subject.plain.config.vocab_size, exits=name != "dense"))
        config = make_random_config(draw, subject, arrivals)
        with make_drafts_free():
            engine = LLMEngine(subject.loaded, config)
        finished = run_schedule(engine, arrivals)
        seen["preemptions"] += engine.state.num_preemptions
        for number, arrival in enumerate(arrivals):
            outputs, params = finished[str(number)], arrival.params
            assert arrival.abort_after is not None or len(outputs) == params.n
            for output in outputs:
                seen["cached tokens"] += output.num_cached_tokens
                seen["exits"] += output.num_exited_tokens
                if params.structured_outputs is None:
                    continue
                seen[output.finish_reason or ""] += 1
                seen[params.structured_outputs.kind] += output.finish_reason == "stop"
                check_text(engine, params, output)
                if params.temperature == 0.0 and params.early_exit.mode != "threshold":
                    check_greedy(engine, subject, params, output)
    kinds = ("preemptions", "cached tokens", "exits", "stop", "length", "json", "regex", "choice", "grammar")
    assert all(seen[kind] > 0 for kind in kinds), f"a kind of event never happened: {seen}"


@pytest.mark.timeout(NUM_SCHEDULES * 20 + 300)
def test_drafts_leave_the_constrained_answer_of_off(subjects: dict[str, ServedModel]) -> None:
    seen: Counter[str] = Counter()
    subject = subjects["student"]
    for seed in range(max(NUM_SCHEDULES // 3, 1)):
        draw = random.Random(seed)
        arrivals = constrained(draw, make_random_arrivals(draw, subject.plain.config.vocab_size, exits=False))
        off = drafting(arrivals, early_exit=EarlyExit())
        expected = answers(LLMEngine(subject.loaded, make_random_config(draw, subject, arrivals)), off)
        for kind, params in (
            ("exit", {"early_exit": EarlyExit("lossless", 0.0, draw.choice([1, 3, 8]))}),
            ("text", {"num_lookup_tokens": draw.choice([1, 4, 8])}),
            ("both", {"early_exit": EarlyExit("lossless", 0.1, 4), "num_lookup_tokens": 3}),
        ):
            with make_drafts_free():
                engine = LLMEngine(subject.loaded, make_random_config(draw, subject, arrivals))
            found = answers(engine, drafting(arrivals, **params))
            answered, wanted = (
                {key: (output.token_ids, output.finish_reason) for key, output in one.items()}
                for one in (found, expected)
            )
            assert answered == wanted, f"schedule {seed}, drafts from {kind}"
            ours = [output for key, output in found.items() if arrivals[key[0]].params.structured_outputs]
            seen[f"{kind} accepted"] += sum(output.num_accepted_tokens for output in ours)
            seen[f"{kind} rejected"] += sum(output.num_draft_tokens - output.num_accepted_tokens for output in ours)
    assert all(seen[f"{kind} accepted"] and seen[f"{kind} rejected"] for kind in ("exit", "text", "both")), seen


def answers(engine: LLMEngine, arrivals: list[Arrival]) -> dict[tuple[int, int], RequestOutput]:
    """Return the outputs by index of the arrival and of the sample."""
    finished = run_schedule(engine, arrivals)
    found = {(int(number), output.index): output for number, outputs in finished.items() for output in outputs}
    return dict(sorted(found.items()))
