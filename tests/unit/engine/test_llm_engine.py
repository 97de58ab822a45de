"""The engine's answers equal those of transformers' own `generate()`; and the requests that it refuses."""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from swiftkv_platform.engine import EngineConfig, LLMEngine, RequestOutput, SamplingParams
from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.model import convert, export
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.unit.engine.conftest import Reference
from tests.unit.engine.tiny_models import make_model

GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPTS = [[1, 2, 3], [72, 101, 108, 108, 111], [9]]


def stream(engine: LLMEngine, request_id: str) -> list[RequestOutput]:
    """The outputs of a request, step by step."""
    outputs = []
    while engine.has_unfinished_requests:
        outputs += [output for output in engine.step() if output.request_id == request_id]
    return outputs


def test_greedy_tokens_are_those_of_transformers(model_dir: Path, engine: LLMEngine, reference: Reference) -> None:
    """A student skips its upper layers for all prompt tokens but the last."""
    outputs = engine.generate(PROMPTS, GREEDY)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert list(output.token_ids) == reference(model_dir, prompt, 24)
        assert output.finish_reason == "length"
        skipped = len(prompt) - 1 if model_dir.name.startswith("swiftkv") else 0
        assert output.num_skipped_tokens == skipped


def test_text_is_answered_as_its_tokens_are_and_streams(engine: LLMEngine, tokenizer: PreTrainedTokenizerFast) -> None:
    text = "def größe(self):"
    by_text, by_tokens = engine.generate([text, tokenizer.encode(text)], GREEDY)
    assert by_text.prompt_token_ids == by_tokens.prompt_token_ids
    assert by_text.text == by_tokens.text == tokenizer.decode(by_text.token_ids)
    outputs = stream(engine, engine.add_request(text, GREEDY))
    assert [len(output.token_ids) for output in outputs] == list(range(1, 25))
    assert all(b.text.startswith(a.text) for a, b in itertools.pairwise(outputs))
    assert (outputs[-1].text, outputs[-1].token_ids) == (by_text.text, by_text.token_ids)


def test_the_same_seed_gives_the_same_text_whoever_else_is_served(model_dir: Path) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, seed=7, ignore_eos=True)
    alone = LLMEngine.from_pretrained(model_dir, EngineConfig(seed=1)).generate([[5, 6]], params)[0]
    other = SamplingParams(max_tokens=20, ignore_eos=True)
    among = LLMEngine.from_pretrained(model_dir, EngineConfig(seed=2)).generate(
        [[5], [5, 6], [6]], [other, params, other]
    )
    assert among[1].token_ids == alone.token_ids


@pytest.mark.parametrize("is_student", [False, True])
def test_rows_of_a_padded_embedding_are_never_generated(tmp_path: Path, is_student: bool) -> None:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(**{**make_model().config.to_dict(), "vocab_size": 320})).eval()
    if is_student:
        model = convert(model, num_key_value_layers=2, early_exit=True)
    with torch.no_grad():
        model.lm_head.weight[300] = 50 * model.lm_head.weight[5]
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    engine = LLMEngine.from_pretrained(tmp_path)
    for params in (
        GREEDY,
        SamplingParams(max_tokens=40, temperature=2.0, seed=1, ignore_eos=True, logprobs=20),
        SamplingParams(max_tokens=40, temperature=2.0, seed=1, ignore_eos=True, top_k=300, num_lookup_tokens=2),
        replace(GREEDY, logit_bias={310: 100.0}),
    ):
        for output in engine.generate([[1, 2, 3], [7], [319, 300]], params):
            assert max(output.token_ids) < 258
            assert all(max(each) < 258 for each in output.logprobs or ())
    for refused, message in (
        ({"allowed_token_ids": [5, 300]}, "allowed_token_ids has the token id 300; .* accepts 0..257"),
        ({"stop_token_ids": list(range(258)), "min_tokens": 2}, "stop_token_ids leave no allowed token"),
    ):
        with pytest.raises(InvalidInputError, match=message):
            engine.generate([[1]], replace(GREEDY, **refused))
    [scored] = engine.generate([[1, 300, 301, 2]], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert torch.tensor([value for each in scored.prompt_logprobs[1:] for value in each.values()]).isfinite().all()


def test_requests_without_a_seed_differ_and_an_engine_seed_repeats_them(dense_dir: Path) -> None:
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    first, again = (
        [o.token_ids for o in LLMEngine.from_pretrained(dense_dir, EngineConfig(seed=3)).generate([[5], [5]], params)]
        for _ in range(2)
    )
    assert first[0] != first[1]
    assert first == again


def test_stop_tokens_and_ends_of_sequence_end_an_answer(
    dense_dir: Path, dense_engine: LLMEngine, tmp_path: Path
) -> None:
    tokens = dense_engine.generate([[1]], GREEDY)[0].token_ids
    stop = tokens[3]
    [stopped] = dense_engine.generate([[1]], replace(GREEDY, stop_token_ids=(stop,)))
    assert (stopped.token_ids, stopped.finish_reason) == (tokens[: tokens.index(stop) + 1], "stop")
    shutil.copytree(dense_dir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, tokens[2]]}))
    engine = LLMEngine.from_pretrained(tmp_path)
    ended, ignored = engine.generate([[1]] * 2, [replace(GREEDY, ignore_eos=False), GREEDY])
    assert (ended.token_ids, ended.finish_reason) == (tokens[: tokens.index(tokens[2]) + 1], "stop")
    assert (ignored.token_ids, ignored.finish_reason) == (tokens, "length")


def test_a_stop_string_across_tokens_is_cut_and_never_shown(dense_engine: LLMEngine) -> None:
    whole = dense_engine.generate([[1, 2, 3]], GREEDY)[0].text
    stop = whole[8:11]
    params = replace(GREEDY, stop=(stop,))
    outputs = stream(dense_engine, dense_engine.add_request([1, 2, 3], params))
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].text == whole[: whole.index(stop)]
    assert all(outputs[-1].text.startswith(output.text) for output in outputs)
    whole = dense_engine.generate([[1, 2, 3]], GREEDY)[0].text
    [output] = dense_engine.generate([[1, 2, 3]], replace(GREEDY, stop=(whole[3],), min_tokens=8))
    seen = dense_engine.generate([[1, 2, 3]], replace(GREEDY, max_tokens=8))[0].text
    assert output.text.startswith(seen[:8].rstrip("\N{REPLACEMENT CHARACTER}"))
    assert len(output.token_ids) > 8


@pytest.mark.parametrize("stop_token", [True, False])
def test_a_stop_is_left_in_the_text_where_that_is_wanted(dense_engine: LLMEngine, *, stop_token: bool) -> None:
    whole = dense_engine.generate([[1, 2, 3]], GREEDY)[0]
    last = whole.token_ids[5]
    stop: dict[str, Any] = {"stop_token_ids": (last,)} if stop_token else {"stop": (whole.text[8:11],)}
    params = replace(GREEDY, **stop)
    without, wanted = dense_engine.generate([[1, 2, 3]] * 2, [params, replace(params, include_stop_str_in_output=True)])
    assert wanted.token_ids == without.token_ids
    assert wanted.finish_reason == without.finish_reason == "stop"
    assert wanted.text.startswith(without.text)
    assert wanted.text[len(without.text) :] == (whole.text[8:11] if not stop_token else wanted.text[-1])
    assert len(wanted.text) > len(without.text)


@pytest.mark.parametrize("drafts", [{}, {"num_lookup_tokens": 8}])
def test_an_answer_has_its_fewest_tokens_before_a_token_may_end_it(engine: LLMEngine, drafts: dict[str, Any]) -> None:
    stop, least = engine.generate([[1]], GREEDY)[0].token_ids[1], 7
    without = {"logit_bias": {stop: -100, 0: -100}}  # 0 is the end of sequence
    params: dict[str, Any] = {"temperature": 0.0, "stop_token_ids": (stop,), **drafts}
    [first] = engine.generate([[1]], SamplingParams(max_tokens=least, temperature=0.0, **without))
    [then] = engine.generate([[1, *first.token_ids]], SamplingParams(max_tokens=24 - least, **params))
    [short, found] = engine.generate(
        [[1]] * 2, [SamplingParams(max_tokens=24, **params), SamplingParams(max_tokens=24, min_tokens=least, **params)]
    )
    assert len(short.token_ids) < least
    assert list(found.token_ids) == [*first.token_ids, *then.token_ids]
    assert found.finish_reason == then.finish_reason


@pytest.mark.parametrize(("config", "n"), [({}, 2), ({"max_num_batched_tokens": 3}, 1)])
def test_a_prompt_is_scored_without_an_answer(model_dir: Path, config: dict[str, Any], n: int) -> None:
    engine, prompt = LLMEngine.from_pretrained(model_dir, EngineConfig(**config)), [5, 6, 7, 8, 9, 10]
    [scored] = engine.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=2, n=n))
    [answered] = engine.generate([prompt], SamplingParams(max_tokens=1, prompt_logprobs=2))
    for output in scored.samples or (scored,):
        assert (output.token_ids, output.text, output.finish_reason) == ([], "", "length")
        # Whether the last position is answered changes the rows of a product, and so its rounding.
        for found, expected in zip(output.prompt_logprobs, answered.prompt_logprobs, strict=True):
            assert found == (None if expected is None else pytest.approx(expected, abs=1e-5))
    engine.assert_consistent()
    assert engine.num_free_blocks == engine.num_blocks


def test_the_context_cuts_prompts_where_that_is_wanted_and_ends_answers(engine: LLMEngine) -> None:
    prompt, params = list(range(61)), replace(GREEDY, max_tokens=8)
    for kept, num_left in ((3, 3), (-1, 56), (1000, 61)):
        truncated = replace(params, truncate_prompt_tokens=kept)
        cut, plain = engine.generate([prompt, prompt[-num_left:]], [truncated, params])
        assert cut.prompt_token_ids == prompt[-num_left:]
        assert cut.token_ids == plain.token_ids
    beyond: list[Any] = ["x" * 200, [1] * 200]
    for output in engine.generate(beyond, replace(params, truncate_prompt_tokens=-1)):
        assert (len(output.prompt_token_ids), len(output.token_ids)) == (56, 8)
    [output] = engine.generate([[1] * 60], SamplingParams(max_tokens=100, ignore_eos=True))
    assert (len(output.token_ids), output.finish_reason) == (4, "length")
    [output] = engine.generate([[1]], SamplingParams(max_tokens=0, num_lookup_tokens=4))
    assert (output.token_ids, output.finish_reason) == ([], "length")


def test_a_request_may_have_several_answers(swiftkv_dir: Path) -> None:
    params = SamplingParams(max_tokens=8, n=3, seed=5, ignore_eos=True)
    engine = LLMEngine.from_pretrained(swiftkv_dir)
    prompt = list(range(33))
    output = engine.generate([prompt], params)[0]
    assert [sample.index for sample in output.samples] == [0, 1, 2]
    assert len({tuple(sample.token_ids) for sample in output.samples}) == 3
    assert [sample.num_cached_tokens for sample in output.samples] == [0, 32, 32]
    single = engine.generate([prompt], SamplingParams(max_tokens=8, seed=5, ignore_eos=True))[0]
    assert single.token_ids == output.token_ids
    assert single.samples == ()
    request_id = engine.add_request(prompt, params)
    engine.step()
    assert engine.abort(request_id) is not None
    assert not engine.has_unfinished_requests
    engine.assert_consistent()


def test_logits_that_are_no_numbers_end_their_request_alone(swiftkv_dir: Path) -> None:
    engine = LLMEngine.from_pretrained(swiftkv_dir)
    poisoned = 100  # not among the tokens of the good answer
    with torch.no_grad():
        engine._runner._model.model.embed_tokens.weight[poisoned] = float("nan")
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True)
    good, bad, again = engine.generate([[1, 2, 3], [4, poisoned, 5], [4, poisoned, 5, 6]], params)
    assert (good.finish_reason, good.error) == ("length", None)
    for output in (bad, again):
        assert output.finish_reason == "error"
        assert "not finite" in output.error
        assert output.token_ids == []
    engine.assert_consistent()
    assert engine.num_free_blocks == engine.num_blocks


def test_what_a_model_cannot_serve_is_refused(dense_engine: LLMEngine) -> None:
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"early_exit": "threshold"}, "early_exit", "has no exit head"),
        ({"early_exit": "lossless"}, "early_exit", "'lossless', but this model has no exit head"),
        ({"logit_bias": {258: 1.0}}, "logit_bias", r"token id 258; .* 0\.\.257"),
        (
            {"min_tokens": 1, "stop_token_ids": tuple(range(258))},
            "min_tokens",
            "leave no allowed token of the vocabulary",
        ),
    ]
    for params, field, message in cases:
        with pytest.raises(InvalidInputError, match=message) as caught:
            dense_engine.add_request([1], SamplingParams(**params))
        assert caught.value.field == field


@pytest.mark.parametrize(("when", "num_steps"), [("waiting", 1), ("reading", 1), ("decoding", 3)])
def test_abort_frees_what_a_request_holds(model_dir: Path, when: str, num_steps: int) -> None:
    engine = LLMEngine.from_pretrained(model_dir, EngineConfig(max_num_seqs=1, max_num_batched_tokens=4))
    first = engine.add_request([1] * 6, GREEDY)
    second = engine.add_request([2] * 6, GREEDY)
    for _ in range(num_steps):
        engine.step()
    aborted = engine.abort(second if when == "waiting" else first)
    assert aborted.finish_reason == "abort"
    assert engine.abort(aborted.request_id) is None
    remaining = stream(engine, first if when == "waiting" else second)
    assert remaining[-1].finish_reason == "length"
    assert (engine.state.num_running, engine.state.num_waiting) == (0, 0)
    assert engine.num_free_blocks == engine.num_blocks
    engine.assert_consistent()


def test_metrics_are_durations_in_order(dense_engine: LLMEngine) -> None:
    first, second = dense_engine.generate([[1], [2]], [GREEDY, SamplingParams(max_tokens=1)])
    assert 0 <= first.metrics.queue_time <= first.metrics.ttft <= first.metrics.total
    assert first.metrics.ttft + 23 * first.metrics.tpot <= first.metrics.total
    assert second.metrics.tpot is None
    assert second.metrics.total <= first.metrics.total


def test_a_prompt_that_cannot_be_answered_is_refused(dense_engine: LLMEngine) -> None:
    cases: list[tuple[Any, str]] = [
        ("", "prompt is empty"),
        ([], "prompt is empty"),
        ([1] * 64, "prompt has 64 tokens; the context of 64 tokens holds prompts of 1..63"),
        ([1, 258], r"token id 258; this model's vocabulary accepts 0\.\.257"),
        ([-1], "token id -1"),
        (["a"], "token id 'a'"),
    ]
    for prompt, message in cases:
        with pytest.raises(InvalidInputError, match=message) as caught:
            dense_engine.add_request(prompt)
        assert caught.value.field == "prompt"
    with pytest.raises(InvalidInputError):
        dense_engine.generate([[1], []], GREEDY)
    for prompts in ("text", [1, 2, 3]):
        with pytest.raises(InvalidInputError, match="give a list of prompts"):
            dense_engine.generate(prompts, GREEDY)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="2 entries for 1 prompts"):
        dense_engine.generate([[1]], [GREEDY, GREEDY])
    assert not dense_engine.has_unfinished_requests, "one bad prompt leaves nothing behind"
    dense_engine.add_request([1], GREEDY, request_id="mine")
    with pytest.raises(InvalidInputError, match="request_id 'mine' is in use"):
        dense_engine.add_request([2], GREEDY, request_id="mine")


def test_a_directory_without_tokenizer_serves_token_ids_only(bare_dir: Path, dense_engine: LLMEngine) -> None:
    bare = LLMEngine.from_pretrained(bare_dir)
    output = bare.generate([[1, 2, 3]], GREEDY)[0]
    assert output.token_ids == dense_engine.generate([[1, 2, 3]], GREEDY)[0].token_ids
    assert output.text == ""
    with pytest.raises(InvalidInputError, match="no tokenizer; give a list of token ids"):
        bare.add_request("text")
    with pytest.raises(InvalidInputError, match="stop needs a tokenizer"):
        bare.add_request([1], SamplingParams(stop=("x",)))


def test_dtype_and_context_are_configured(dense_dir: Path) -> None:
    engine = LLMEngine.from_pretrained(dense_dir, EngineConfig(dtype="bfloat16", max_model_len=8))
    assert next(engine._runner._model.parameters()).dtype is torch.bfloat16
    assert len(engine.generate([[1]], GREEDY)[0].token_ids) == 7
    with pytest.raises(ModelError, match=r"max_model_len is 65; .* accepts 2\.\.64"):
        LLMEngine.from_pretrained(dense_dir, EngineConfig(max_model_len=65))


def test_an_unreadable_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot read a model configuration") as caught:
        LLMEngine.from_pretrained(tmp_path)
    assert caught.value.value == str(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(ModelError, match="cannot read a model configuration"):
        LLMEngine.from_pretrained(tmp_path)


def test_the_teacher_of_a_student_is_served(tmp_path: Path) -> None:
    student = convert(make_model(), num_key_value_layers=2, key_value_group_size=2, early_exit=True)
    student.save_pretrained(tmp_path)
    teacher = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).swiftkv(False)
    engine = LLMEngine.from_pretrained(tmp_path, EngineConfig(dtype="float32", swiftkv=False))
    assert engine.model_config.num_key_value_layers == engine.model_config.num_hidden_layers
    answers = engine.generate(PROMPTS, replace(GREEDY, max_tokens=12), progress=False)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = teacher.generate(torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False)
        assert list(answer.token_ids) == expected[0, len(prompt) :].tolist()
    students = LLMEngine.from_pretrained(tmp_path, EngineConfig(dtype="float32")).generate(PROMPTS, GREEDY)
    assert [answer.token_ids[:12] for answer in students] != [answer.token_ids for answer in answers]
    export(tmp_path, tmp_path / "alone", teacher=False)
    with pytest.raises(ModelError, match=r"layers\.\d+\.self_attn\.q_proj"):
        LLMEngine.from_pretrained(tmp_path / "alone", EngineConfig(swiftkv=False))
