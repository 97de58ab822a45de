"""Drafts from the exit head and from the text give the tokens of `off`, whether they are accepted or not."""

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from swiftkv_platform.engine import EarlyExit, EngineConfig, LLMEngine, RequestOutput, SamplingParams
from swiftkv_platform.engine.loading import LoadedModel, load_model
from swiftkv_platform.model import convert
from tests.support.engine_schedules import align_exit_head, make_drafts_free
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.support.tiny_models import family_teacher, random_teacher

GREEDY = {"temperature": 0.0}
SAMPLED = {"temperature": 0.5, "top_k": 2, "top_p": 0.95, "min_p": 0.01}
PROCESSED = {
    "temperature": 0.8,
    "top_k": 40,
    "repetition_penalty": 1.3,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.3,
    "logit_bias": {3: 4.0, 5: -2.0},
}


def saved(model: Any, directory: Path) -> LoadedModel:
    """Save and load a student whose exit head agrees with the whole model often, but not always."""
    student: Any = align_exit_head(convert(model, num_key_value_layers=2, key_value_group_size=2, early_exit=True))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        student.exit_head.weight.add_(torch.randn(student.exit_head.weight.shape, generator=generator) * 0.02)
    student.save_pretrained(directory)
    return load_model(directory, EngineConfig())


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return saved(random_teacher(seed=1), tmp_path_factory.mktemp("student"))


def make_engine(loaded: LoadedModel, **config: Any) -> LLMEngine:
    return LLMEngine(loaded, EngineConfig(**{"kv_cache_bytes": 1 << 22, "block_size": 4, **config}))


def drafting_engine(loaded: LoadedModel, **config: Any) -> LLMEngine:
    """Return an engine that considers drafts free."""
    with make_drafts_free():
        return make_engine(loaded, **config)


def prompts(count: int, vocab_size: int) -> list[list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(vocab_size) for _ in range(draw.randrange(2, 12))] * 2 for _ in range(count)]


def answers(engine: LLMEngine, asked: list[list[int]], params: dict[str, Any], **drafts: Any) -> list[RequestOutput]:
    each = [
        SamplingParams(**{"max_tokens": 20, "ignore_eos": True, "seed": number, **params, **drafts})
        for number in range(len(asked))
    ]
    outputs = engine.generate(asked, each)
    engine.assert_consistent()
    assert engine.num_free_blocks == engine.num_blocks
    return outputs


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [sample.token_ids for output in outputs for sample in (output.samples or (output,))]


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, PROCESSED], ids=["greedy", "sampled", "processed"])
def test_drafts_leave_the_answer_of_off(student: LoadedModel, params: dict[str, Any]) -> None:
    accepted, rejected = Counter[str](), Counter[str]()
    for batch, sizes in ((1, (4,)), (5, (1, 8))):
        asked = prompts(batch, student.model.config.vocab_size)
        expected = answers(make_engine(student), asked, params)
        for k in sizes:
            engine = drafting_engine(student, max_num_batched_tokens=64)
            exits = answers(engine, asked, params, early_exit=EarlyExit("lossless", 0.0, k))
            text = answers(engine, asked, params, num_lookup_tokens=k)
            both = answers(engine, asked, params, early_exit=EarlyExit("lossless", 0.3, k), num_lookup_tokens=k)
            assert tokens(exits) == tokens(text) == tokens(both) == tokens(expected)
            for source, outputs in (("exit", exits), ("text", text)):
                accepted[source] += sum(output.num_accepted_tokens for output in outputs)
                rejected[source] += sum(output.num_draft_tokens - output.num_accepted_tokens for output in outputs)
    sources = ["exit"] if params is PROCESSED else ["exit", "text"]  # with penalties, look-ups find no drafts
    assert all(accepted[source] and rejected[source] for source in sources), (accepted, rejected)


def test_a_request_drafts_beside_others_in_small_caches_with_samples_and_chunks(student: LoadedModel) -> None:
    asked = prompts(6, student.model.config.vocab_size)
    modes: list[dict[str, Any]] = [{}, {"early_exit": EarlyExit("lossless", 0.0, 4)}, {"num_lookup_tokens": 4}]
    plain = [SamplingParams(max_tokens=20, ignore_eos=True, seed=7, n=1 + number % 2) for number in range(6)]
    drafting = [replace(params, **modes[number % 3]) for number, params in enumerate(plain)]
    expected = make_engine(student).generate(asked, plain)
    # The cache holds two or three of the nine sequences.
    engine = drafting_engine(student, max_num_batched_tokens=13, kv_cache_bytes=48 << 10)
    outputs = engine.generate(asked, drafting)
    engine.assert_consistent()
    assert tokens(outputs) == tokens(expected)
    assert engine.state.num_preemptions > 0
    assert engine.num_free_blocks == engine.num_blocks


def test_logprobs_are_those_of_off(student: LoadedModel) -> None:
    asked = prompts(3, student.model.config.vocab_size)
    params = {**SAMPLED, "logprobs": 3, "prompt_logprobs": 1}
    expected = answers(make_engine(student), asked, params)
    engine = drafting_engine(student)
    drafts = {"early_exit": EarlyExit("lossless", 0.0, 4), "num_lookup_tokens": 3}
    for output, wanted in zip(answers(engine, asked, params, **drafts), expected, strict=True):
        assert output.num_accepted_tokens
        assert len(output.logprobs) == len(output.token_ids)
        for found, right in zip(output.logprobs, wanted.logprobs, strict=True):
            assert found == pytest.approx(right, abs=1e-4)


@pytest.mark.parametrize("params", [GREEDY, PROCESSED], ids=["greedy", "processed"])
def test_the_fewest_tokens_are_those_of_off(student: LoadedModel, params: dict[str, Any]) -> None:
    """Neither drafts nor a threshold exit end an answer before `min_tokens`."""
    asked = prompts(4, student.model.config.vocab_size)
    whole = answers(make_engine(student), asked, params)
    wanted = {**params, "stop_token_ids": tuple(output.token_ids[2] for output in whole), "min_tokens": 9}
    expected = answers(make_engine(student), asked, wanted)
    assert all(len(output.token_ids) > 9 for output in expected)
    engine = drafting_engine(student)
    found = answers(engine, asked, wanted, early_exit=EarlyExit("lossless", 0.0, 8), num_lookup_tokens=4)
    assert tokens(found) == tokens(expected)
    assert sum(output.num_accepted_tokens for output in found)
    exits = answers(engine, asked, wanted, early_exit=EarlyExit("threshold", 0.0))
    assert all(len(output.token_ids) > 9 and output.num_exited_tokens for output in exits)


def test_a_stop_within_accepted_drafts_ends_the_answer_there(student: LoadedModel) -> None:
    """Stop at a token, or at a text over two tokens of which one or both are drafts; accepted drafts after the stop are
    not returned."""
    loaded = replace(student, tokenizer=byte_tokenizer())
    asked = prompts(4, student.model.config.vocab_size)
    whole = answers(make_engine(loaded), asked, GREEDY)
    engine, plain = drafting_engine(loaded), make_engine(loaded)
    modes: list[dict[str, Any]] = [{"early_exit": EarlyExit("lossless", 0.0, 8)}, {"num_lookup_tokens": 8}]
    accepted = 0
    for at in (3, 5, 6):
        texts = tuple(output.text[at : at + 2] for output in whole if len(output.text) > at + 1)
        for stops in ({"stop": texts}, {"stop_token_ids": tuple(output.token_ids[at] for output in whole)}):
            expected = answers(plain, asked, GREEDY, **stops)
            for drafts in modes:
                found = answers(engine, asked, GREEDY, **drafts, **stops)
                assert [(one.text, one.token_ids, one.finish_reason) for one in found] == [
                    (one.text, one.token_ids, one.finish_reason) for one in expected
                ]
                assert all(one.num_accepted_tokens <= len(one.token_ids) for one in found)
                accepted += sum(one.num_accepted_tokens for one in found)
            assert any(one.finish_reason == "stop" for one in expected)
    assert accepted


class _Head(torch.nn.Module):
    """An output head that records its inputs, and returns NaN logits for one hidden state in any row."""

    def __init__(self, head: torch.nn.Module, broken: torch.Tensor | None = None) -> None:
        super().__init__()
        self.head, self.broken = head, broken
        self.seen: list[torch.Tensor] = []
        self.rows: list[int] = []
        """Rows in which the hidden state occurred."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [1, num_rows, vocab_size] for `hidden`, [1, num_rows, hidden_size]."""
        self.seen.append(hidden.clone())
        logits: torch.Tensor = self.head(hidden).clone()
        if self.broken is not None:
            rows = ((hidden[0] - self.broken).abs().amax(-1) < 1e-4).nonzero()[:, 0].tolist()
            logits[0, rows] = float("nan")
            self.rows += rows
        return logits


@pytest.mark.slow("seven engines")
@pytest.mark.parametrize(
    ("params", "drafts"),
    [(GREEDY, {"early_exit": EarlyExit("lossless", 0.0, 8)}), (SAMPLED, {"num_lookup_tokens": 8})],
    ids=["greedy-exit", "sampled-text"],
)
def test_nan_logits_amid_drafts_end_that_answer_alone(
    student: LoadedModel, params: dict[str, Any], drafts: dict[str, Any]
) -> None:
    asked, params = prompts(3, student.model.config.vocab_size), {**params, "max_tokens": 40}
    with patch.object(student.model, "lm_head", _Head(student.model.lm_head)) as recorder:
        whole = answers(make_engine(student), asked, params)
    first_rows = [hidden[0, 0] for hidden in recorder.seen if hidden.shape[1] == len(asked)]  # the first request's
    amid = 0
    for at in range(1, 40, 6):
        head = _Head(student.model.lm_head, first_rows[at])
        with patch.object(student.model, "lm_head", head):
            broken, *others = answers(drafting_engine(student, max_num_batched_tokens=64), asked, params, **drafts)
        assert (broken.finish_reason, broken.token_ids) == ("error", whole[0].token_ids[:at])
        assert [(one.finish_reason, one.token_ids) for one in others] == [
            (one.finish_reason, one.token_ids) for one in whole[1:]
        ]
        amid += head.rows[-1] > 0  # after another row of the same sequence, the batch's first
    assert amid


def test_the_exit_head_is_only_asked_by_requests_that_draft_from_it(student: LoadedModel) -> None:
    asked = prompts(2, student.model.config.vocab_size)
    with patch.object(student.model, "exit_logits", wraps=student.model.exit_logits) as exit_logits:
        engine = drafting_engine(student)
        answers(engine, asked, GREEDY)
        answers(engine, asked, GREEDY, num_lookup_tokens=4)
        assert exit_logits.call_count == 0
        answers(engine, asked, GREEDY, early_exit=EarlyExit("lossless", 0.0, 2))
        assert exit_logits.call_count > 0


def test_an_exit_head_that_is_never_right_is_soon_left_alone(student: LoadedModel) -> None:
    """The exit head is sure of token 3, while a bias keeps the whole model from choosing it."""
    wrong = torch.zeros(1, student.model.config.vocab_size)
    wrong[0, 3] = 1e11
    params = {**GREEDY, "max_tokens": 100, "logit_bias": {3: -100}}
    with patch.object(student.model, "exit_logits", side_effect=lambda x: wrong.expand(len(x), -1)) as asked:
        output = answers(make_engine(student), [[1, 2]], params, early_exit=EarlyExit("lossless", 0.9, 4))[0]
    assert output.num_draft_tokens < 20
    assert asked.call_count < 30
    assert output.token_ids == answers(make_engine(student), [[1, 2]], params)[0].token_ids


@pytest.mark.parametrize("family", ["mistral", "deepseek_v2"])
def test_every_kind_of_attention_verifies(tmp_path: Path, family: str) -> None:
    loaded = saved(family_teacher(family), tmp_path)
    asked = prompts(3, loaded.model.config.vocab_size)
    expected = answers(make_engine(loaded), asked, GREEDY)
    engine = drafting_engine(loaded)
    found = answers(engine, asked, GREEDY, early_exit=EarlyExit("lossless", 0.0, 3), num_lookup_tokens=5)
    assert tokens(found) == tokens(expected)
    assert sum(output.num_draft_tokens for output in found)


def test_in_bfloat16_answers_part_at_near_ties_only(tmp_path: Path) -> None:
    """A verification pass has more rows than a pass of `off`, so bfloat16 rounds differently, as in another batch."""
    saved(random_teacher(seed=1), tmp_path)
    loaded = load_model(tmp_path, EngineConfig(dtype="bfloat16"))
    asked = prompts(8, loaded.model.config.vocab_size)
    expected = answers(make_engine(loaded), asked, GREEDY, logprobs=5)
    engine = drafting_engine(loaded)
    for drafts in ({"early_exit": EarlyExit("lossless", 0.0, 4)}, {"num_lookup_tokens": 8}):
        found = answers(engine, asked, GREEDY, **drafts)
        assert sum(output.num_accepted_tokens for output in found)
        for right, other in zip(expected, found, strict=True):
            pairs = zip(right.token_ids, other.token_ids, strict=True)
            parting = next((at for at, (one, another) in enumerate(pairs) if one != another), None)
            if parting is not None:
                best = right.logprobs[parting]
                assert best[right.token_ids[parting]] - best[other.token_ids[parting]] < 0.1
