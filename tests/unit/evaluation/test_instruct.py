"""Measures and limits that instruction-tuned models have by default, and the prompts they are asked: no model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from swiftkv_platform import sources
from swiftkv_platform.evaluation.harness import ifeval, tool_calls
from swiftkv_platform.evaluation.harness.needle import found, needle_prompt
from swiftkv_platform.evaluation.harness.run import TaskResults, TaskScore
from swiftkv_platform.evaluation.instruct import is_instruction_tuned, needle_lengths
from swiftkv_platform.evaluation.paired import share_interval
from swiftkv_platform.evaluation.prefill_cost import ModeCost, PrefillCost
from swiftkv_platform.evaluation.quality import Totals
from swiftkv_platform.evaluation.report import Report
from swiftkv_platform.specs import EvaluationSpec
from tests.fakes.tokenizers import byte_tokenizer
from tests.requirements import required_module

TURNS = "{% for m in messages %}<turn>{{ m.content }}{% endfor %}"


def test_models_with_markers_of_their_own_are_instruction_tuned() -> None:
    tuned = byte_tokenizer(chat_template=TURNS)
    tuned.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    assert is_instruction_tuned(tuned)
    assert not is_instruction_tuned(byte_tokenizer(chat_template=TURNS)), "markers in plain text"
    assert not is_instruction_tuned(byte_tokenizer())


def test_the_built_in_base_model_is_not() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(Path(sources.__file__).parent / "teacher")
    assert tokenizer.chat_template
    assert not is_instruction_tuned(tokenizer)


def test_needles_are_looked_for_where_the_context_holds_them() -> None:
    spec = EvaluationSpec()
    assert needle_lengths(spec, instruct=True, context_length=8192) == (1024, 4096)
    assert needle_lengths(spec, instruct=True, context_length=2048) == (1024,)
    assert needle_lengths(spec, instruct=False, context_length=8192) == ()
    assert needle_lengths(EvaluationSpec(needle_lengths=(512,)), instruct=False, context_length=8192) == (512,)


def test_a_needle_prompt_has_its_length_its_needle_and_a_place_of_its_own() -> None:
    tokenizer, places = byte_tokenizer(), []
    for number in range(4):
        prompt, answer = needle_prompt(tokenizer, 1000, number, 4)
        assert 850 < len(prompt.encode()) <= 1000
        assert prompt.count(answer) == 1
        assert found({"answer": answer}, [f"It is {answer}."]) == {"found": 1.0}
        assert found({"answer": answer}, ["It is 12."]) == {"found": 0.0}
        places.append(prompt.index(answer) / len(prompt))
        assert needle_prompt(tokenizer, 1000, number, 4) == (prompt, answer)
    assert places == sorted(places)
    assert places[0] < 0.35
    assert places[-1] > 0.65


@pytest.mark.parametrize(
    ("text", "scores"),
    [
        ('<tool_call>[{"name": "get_time", "arguments": {"city": "Oslo"}}]', (1, 1, 1)),
        ('Sure: {"name": "get_time", "arguments": {"city": "Rome"}} there', (1, 1, 0)),
        ('[{"name": "get_time", "arguments": {"town": "Oslo"}}]', (1, 0, 0)),
        ('[{"name": "fly", "arguments": {}}]', (1, 0, 0)),
        ('[{"name": ["x"], "arguments": 3}]', (1, 0, 0)),
        ("[1]", (0, 0, 0)),
        ('[{"name": "get_time", "arguments": {"city": "Oslo"}', (0, 0, 0)),
        ("Oslo is in Norway.", (0, 0, 0)),
    ],
)
def test_a_call_is_json_then_valid_then_right(text: str, scores: tuple[int, int, int]) -> None:
    document = {"call": json.dumps({"name": "get_time", "arguments": {"city": "Oslo"}})}
    assert tuple(tool_calls.score(document, [text]).values()) == scores


def test_prompts_of_tool_calls_offer_what_is_asked_for() -> None:
    prompts = tool_calls.prompts()
    assert len({text for text, _ in prompts}) == 30
    for text, call in prompts:
        assert f'"name": "{call["name"]}"' in text
        assert next(iter(call["arguments"].values())) in text
    assert tool_calls.prompts() == prompts


def test_sentences_end_where_white_space_follows() -> None:
    assert ifeval.sentences('One (1.5). "Two!" Three? four') == ["One (1.5).", '"Two!', "Three?", "four"]


def test_ifeval_says_what_is_missing_or_scores_instructions(tmp_path: Path) -> None:
    required_module("langdetect")
    ifeval.configuration(tmp_path)
    document = {
        "key": 1,
        "prompt": "Say it in three sentences, no commas.",
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_sentences"],
        "kwargs": [{"num_sentences": None}, {"num_sentences": 3, "relation": "at least"}],
    }
    both = ifeval.score(document, ["One. Two! Three?"])
    assert (both["prompt_level_strict_acc"], both["inst_level_strict_acc"]) == (1.0, [True, True])
    one = ifeval.score(document, ["One, two. Three! Four?"])
    assert (one["prompt_level_strict_acc"], one["inst_level_strict_acc"]) == (0.0, [False, True])
    assert ifeval.share_of_instructions([[True, True], [False]]) == pytest.approx(2 / 3)


def needle(teacher: float, student: float, num_samples: int = 400) -> TaskScore:
    losses = [1.0] * round((teacher - student) * num_samples)
    low, high = share_interval(losses + [0.0] * (num_samples - len(losses)))
    return TaskScore(
        task="needle_1024",
        metric="found",
        num_fewshot=0,
        chat_template=True,
        num_samples=num_samples,
        teacher=teacher,
        student=student,
        teacher_stderr=None,
        student_stderr=None,
        drop_interval=(100 * low, 100 * high),
    )


def outcomes(kl: float, *tasks: TaskScore, instruct: bool = True, spec: EvaluationSpec | None = None) -> dict[str, str]:
    totals = Totals(num_positions=10, teacher_nll=10.0, student_nll=10.0, kl=10 * kl, agreements=9)
    cost = PrefillCost(128, ModeCost(1.0, 1.0, 1.0), ModeCost(1.0, 1.0, 1.0))
    built = Report.build(
        spec or EvaluationSpec(), distilled=totals, cost=cost, tasks=TaskResults(tasks), instruct=instruct
    )
    return {gate.field.removeprefix("evaluation."): gate.outcome for gate in built.gates}


def test_instruction_tuned_models_have_limits_that_others_have_not() -> None:
    assert outcomes(0.3) == {"max_kl": "failed", "min_top1_agreement": "passed"}
    assert outcomes(0.3, instruct=False) == {}
    assert outcomes(math.nan)["max_kl"] == "failed"
    assert outcomes(0.3, spec=EvaluationSpec(max_kl=None, min_top1_agreement=None)) == {}
    assert outcomes(0.3, spec=EvaluationSpec(max_kl=0.4))["max_kl"] == "passed"


def test_a_length_judges_only_where_the_teacher_finds_its_needles() -> None:
    assert outcomes(0.1, needle(0.9, 0.9))["max_needle_drop"] == "passed"
    assert outcomes(0.1, needle(0.9, 0.8))["max_needle_drop"] == "failed"
    assert outcomes(0.1, needle(1.0, 0.95, num_samples=20))["max_needle_drop"] == "undecided"
    assert "max_needle_drop" not in outcomes(0.1, needle(0.79, 0.1))
    assert "max_drop" not in outcomes(0.1, needle(0.9, 0.9))
