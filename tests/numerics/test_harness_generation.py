"""Generative requests of lm-evaluation-harness: the engine gives the tokens of `generate()` in both modes of a student
in memory, regardless of the other requests in the batch."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lm_eval.api.instance import Instance
from transformers import GenerationConfig

from swiftkv_platform.distillation.model import copy_teacher
from swiftkv_platform.errors import GenerationError
from swiftkv_platform.evaluation.harness import shared
from swiftkv_platform.evaluation.harness.shared import HarnessModel, Prompt, parse_generation_settings
from swiftkv_platform.evaluation.parts import NoResultStore
from swiftkv_platform.model import convert
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.specs import DistillationSpec
from swiftkv_platform.specs.sampling import SamplingParams
from tests.support.fakes.tokenizers import EOS, byte_tokenizer
from tests.support.parameters import WIDE
from tests.support.tiny_models import FAMILY_CONFIGS, disturb, family_teacher

SENTENCES = "The grass is green, fire is hot, and a day has 24 hours; two and two make four. "
CONTEXTS = ["Q: how many?\nA:", "x", SENTENCES, SENTENCES + "Then", 5 * SENTENCES, SENTENCES + "And so on"]
"""Prompts of different lengths, some with a common prefix, one longer than the models' context."""


FAMILIES = ("llama", "qwen2-mixed", "qwen3_moe", "deepseek_v2-lora")
"""One family for each kind of attention and of experts; the engine's own tests cover every family."""


class KeptParts(NoResultStore):
    """Keeps finished parts in memory, and records the progress that it is told."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.told: list[tuple[int, int]] = []

    def load_result(self, name: str, /) -> bytes | None:
        return self.kept.get(name)

    def store_result(self, name: str, data: bytes) -> None:
        self.kept[name] = data


def student_of(family: str) -> Any:
    teacher: Any = family_teacher(family, initializer_range=0.3)
    student = disturb(convert(teacher, num_key_value_layers=2, key_value_group_size=2))
    student.generation_config.eos_token_id = None
    return student.eval()


def harness(student: Any, parts: KeptParts | None = None, *, batch_size: int | None = None) -> HarnessModel:
    parts = KeptParts() if parts is None else parts
    return HarnessModel(
        student,
        byte_tokenizer(),
        Workers(),
        batch_size=batch_size,
        progress=lambda done, total: parts.told.append((done, total)),
        parts=parts,
    )


def ask(contexts: Sequence[str], **settings: Any) -> list[Instance]:
    return [Instance("generate_until", {}, arguments=(text, settings), idx=i) for i, text in enumerate(contexts)]


@contextmanager
def recorded(model: HarnessModel) -> Iterator[list[list[int]]]:
    """Record the tokens that the harness decodes as answers."""
    tokens: list[list[int]] = []
    decode = model.tok_decode

    def tok_decode(ids: Any, skip_special_tokens: bool = True) -> str:
        if skip_special_tokens:
            tokens.append(list(ids))
        text: str = decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    with patch.object(model, "tok_decode", tok_decode):
        yield tokens


def generated(model: HarnessModel, requests: Sequence[Instance]) -> tuple[list[str], list[list[int]]]:
    """Return the answers of `generate()`, one prompt at a time, and their tokens."""
    texts: list[str] = []
    with recorded(model) as tokens, torch.no_grad():
        for request in requests:
            texts += model._generate_with_transformers([request])
    return texts, tokens


def written(model: HarnessModel, requests: Sequence[Instance]) -> tuple[list[str], list[list[int]]]:
    with recorded(model) as tokens, patch.object(model, "_generate_with_transformers", side_effect=_refuse):
        return model.generate_until(list(requests)), tokens


def _refuse(requests: Sequence[Instance]) -> list[str]:
    assert not requests, "the engine answers every request"
    return []


@pytest.mark.parametrize(
    "family", [name if name in FAMILIES else pytest.param(name, marks=WIDE) for name in FAMILY_CONFIGS]
)
def test_greedy_answers_are_those_of_generate(family: str) -> None:
    """In both modes, whose logits differ."""
    student, requests = student_of(family), ask(CONTEXTS, until=["\n"], max_gen_toks=12)
    own, logits = student.config._attn_implementation, []
    for swiftkv in (False, True):
        model = harness(student.swiftkv(swiftkv))
        expected = generated(model, requests)
        assert written(model, requests) == expected
        assert student.config._attn_implementation == own
        assert student.model.swiftkv_enabled == swiftkv
        assert generated(model, requests[:1])[1] == expected[1][:1], "the model is unchanged"
        with torch.no_grad():
            logits.append(student(torch.tensor([model.tok_encode(SENTENCES)])).logits)
    assert not torch.allclose(*logits)


@pytest.mark.parametrize("trainable", [pytest.param("tail", marks=WIDE), "all"])
def test_a_teacher_that_is_kept_apart_answers(trainable: Any) -> None:
    """Once the student's layers were trained, the teacher runs on the copies that were kept."""
    student = student_of("qwen3")
    kept = copy_teacher(student.model, DistillationSpec(trainable=trainable))
    student.model.run_teacher_upper = kept.run_teacher_upper
    if trainable == "all":
        student.model.run_teacher_lower = kept.run_lower_layers
    with torch.no_grad():
        for parameter in student.model.layers.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    requests = ask(CONTEXTS[:3], until=["\n"], max_gen_toks=8)
    answers = []
    for swiftkv in (False, True):
        model = harness(student.swiftkv(swiftkv))
        answers.append(generated(model, requests))
        assert written(model, requests) == answers[-1]
    assert answers[0][1] != answers[1][1]


def test_answers_end_where_those_of_generate_do() -> None:
    """Answers end at stop strings (part of a token, several tokens, or a special token) and at the end of sequence."""
    student = student_of("llama")
    free = generated(harness(student), ask(CONTEXTS, until=[], max_gen_toks=24))[1]
    runs = [run for tokens in free for run in re.findall(r"[!-~]{1,3}", byte_tokenizer().decode(tokens)[2:])]
    stops = [max((run for run in runs if len(run) <= size), key=len) for size in (1, 3)]
    for until in ([text] for text in stops):
        requests = ask(CONTEXTS, until=until, max_gen_toks=24)
        assert written(harness(student), requests) == generated(harness(student), requests)
    student.generation_config.eos_token_id = [free[0][4], free[3][7]]
    requests = ask(CONTEXTS, until=[stops[1], "never" * 400, *(f"<{n}>" for n in range(40))], max_gen_toks=24)
    answers, tokens = written(harness(student), requests)
    assert (answers, tokens) == generated(harness(student), requests)
    assert len(tokens[0]) == 5
    assert {len(one) for one in tokens} != {24}


def test_the_tokenizers_end_of_text_ends_an_answer() -> None:
    """The model's config has no end of text. The token is dropped from the text, so no stop string can match it."""
    student = student_of("llama")
    with torch.no_grad():
        student.lm_head.weight[EOS] = 4 * student.lm_head.weight.abs().max()  # makes EOS likely after some contexts
    requests = ask(CONTEXTS, until=["\n"], max_gen_toks=16)
    answers, tokens = written(harness(student), requests)
    assert (answers, tokens) == generated(harness(student), requests)
    assert any(one[-1] == EOS and len(one) < 16 for one in tokens)


def test_what_the_model_ships_for_generation_counts() -> None:
    student = student_of("llama")
    requests = ask(CONTEXTS, until=["\n"], max_new_tokens=20)
    plain = generated(harness(student), requests)
    student.generation_config = GenerationConfig(repetition_penalty=1.8, top_p=0.9, num_beams=1)
    answers = written(harness(student), requests)
    assert answers == generated(harness(student), requests)
    assert answers != plain


@pytest.mark.parametrize(
    ("settings", "shipped"),
    [({"num_beams": 2}, {}), ({"max_length": 64}, {}), ({}, {"no_repeat_ngram_size": 2}), ({}, {"min_new_tokens": 4})],
)
def test_what_the_engine_does_not_do_is_left_to_generate(settings: dict[str, Any], shipped: dict[str, Any]) -> None:
    student = student_of("llama")
    student.generation_config = GenerationConfig(**shipped)
    requests = ask(CONTEXTS[:2], until=["\n"], max_gen_toks=8, **settings)
    requests.append(Instance("generate_until", {}, arguments=(CONTEXTS[2], {"max_gen_toks": 4}), idx=2))
    model = harness(student)
    with patch.object(model, "_generate_with_transformers", wraps=model._generate_with_transformers) as left:
        answers = model.generate_until(requests)
    (asked,) = left.call_args.args
    assert [request.args for request in asked] == [one.args for one in (requests if shipped else requests[:2])]
    found = dict(zip((request.idx for request in asked), model._generate_with_transformers(list(asked)), strict=True))
    assert {index: answers[index] for index in found} == found
    assert answers[-1] == generated(model, requests[-1:])[0][0]


def test_prompts_for_which_rope_changes_are_left_to_generate() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 32}
    config = student_of("llama").config
    config.rope_parameters = rope
    params = SamplingParams(max_tokens=8, temperature=0.0)
    assert [Prompt((1,) * size, params).is_served(config) for size in (0, 24, 25)] == [False, True, False]


def test_drawn_answers_depend_on_nothing_but_their_place() -> None:
    student = student_of("llama")
    requests = ask([CONTEXTS[0]] * 4, until=["\n"], max_gen_toks=12, do_sample=True, temperature=1.5)
    together = written(harness(student), requests)
    assert len({tuple(one) for one in together[1]}) == 4
    assert written(harness(student, batch_size=1), requests) == together
    params = parse_generation_settings({"do_sample": True}, GenerationConfig(), until=[], max_tokens=4, seed=7)
    assert (params.temperature, params.top_k, params.top_p, params.seed) == (1.0, 50, 1.0, 7)


def test_answers_are_kept_round_by_round() -> None:
    student, parts = student_of("llama"), KeptParts()
    requests = ask(CONTEXTS, until=["\n"], max_gen_toks=6)
    with patch.object(shared, "_PROMPTS_PER_ROUND", 4):
        answers = written(harness(student, parts), requests)
        assert len(parts.kept) == 2
        assert parts.told == [(done, 6) for done in range(1, 7)]
        parts.told.clear()
        del parts.kept[list(parts.kept)[1]]
        assert written(harness(student, parts), requests) == answers
        assert parts.told == [(1, 2), (2, 2)], "only the two missing prompts run again"
        parts.told.clear()
        assert written(harness(student, parts), requests) == answers
        assert not parts.told
        written(harness(student.swiftkv(False), parts), requests)
        assert len(parts.told) == 6, "the other mode's answers are stored apart"


def test_logits_that_are_no_numbers_and_prompts_without_room_are_errors() -> None:
    student = student_of("llama")
    with pytest.raises(ValueError, match="max_gen_toks is 256, but the model's context has 256 tokens"):
        harness(student).generate_until(ask(CONTEXTS))
    with torch.no_grad():
        student.lm_head.weight[7] = float("nan")
    with pytest.raises(GenerationError, match="logits are not finite"):
        harness(student).generate_until(ask(CONTEXTS, max_gen_toks=4))
