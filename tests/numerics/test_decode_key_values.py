"""Students whose deep tokens keep their own K and V: every way to run them matches the second implementation."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.distillation.model import DistillationModel
from swiftkv_platform.engine import EngineConfig, LLMEngine, SamplingParams, memory
from swiftkv_platform.engine.varlen import reference_varlen_attn
from swiftkv_platform.errors import InvalidInputError, ModelError
from swiftkv_platform.model import convert, convert_checkpoint, export, load_dense
from swiftkv_platform.model.configuration import read_config
from swiftkv_platform.model.packed_attention import to_tensors
from swiftkv_platform.specs import DistillationSpec
from tests.numerics.packed_steps import pack_random_samples, varlen_on_cpu
from tests.support import reference
from tests.support.parameters import KINDS, in_turn
from tests.support.tiny_models import FAMILY_CONFIGS, disturb, family_teacher, random_tokens

PROMPT = random_tokens(40)
LAYER_MAPS: tuple[dict[str, Any], ...] = (
    {"num_key_value_layers": 2, "key_value_group_size": 2},
    {"num_key_value_layers": 2},
    {"num_key_value_layers": 1, "key_value_group_size": 2},
    {"num_key_value_layers": 2, "deep_tail": 9},
    {"num_key_value_layers": 1, "key_value_group_size": 2, "deep_tail": 64},
)
"""Shapes of students of 5 layers. The last one's deep tail is longer than the prompts."""
BYPASSING: tuple[dict[str, Any], ...] = (
    {"prefill_layers": [0, 2, 3]},
    {"prefill_layers": [1, 2], "key_value_group_size": 2},
    {"prefill_layers": [0, 3]},
    {"prefill_layers": [0, 2, 3], "deep_tail": 9},
)
BY_HEAD = [name for name in FAMILY_CONFIGS if not name.startswith("deepseek")]
"""Families that let prompts bypass layers: those that cache K and V by head."""
NEW_TOKENS = 12
THRESHOLD = 0.5


def make_student(name: str, layer_map: dict[str, Any] = LAYER_MAPS[0], **shape: Any) -> Any:
    return disturb(convert(family_teacher(name), decode_key_value="own", **layer_map, **shape)).eval()


def expected_logits(student: Any, ids: torch.Tensor, turns: torch.Tensor | None) -> torch.Tensor:
    inv_freq = reference.frequencies(student.model.rotary_emb)
    return reference.logits(student.state_dict(), student.config, ids, inv_freq, swiftkv=True, turns=turns)


def one_turn(student: Any, prompt_length: int, num_tokens: int = len(PROMPT)) -> torch.Tensor:
    """Return `turns` of the reference for a prompt and its answer."""
    deep_tail = student.config.swiftkv_deep_tail
    return torch.where(torch.arange(num_tokens) >= prompt_length - deep_tail, 0, -1)


@pytest.mark.parametrize(("name", "layer_map"), [*in_turn(FAMILY_CONFIGS, LAYER_MAPS), *in_turn(BY_HEAD, BYPASSING)])
@torch.no_grad()
def test_the_forward_pass_equals_the_reference(name: str, layer_map: dict[str, Any]) -> None:
    student = make_student(name, layer_map)
    for implementation in ("sdpa", "eager"):
        student.set_attn_implementation(implementation)
        for length in (1, 17, 40):
            expected = expected_logits(student, PROMPT, one_turn(student, length))
            for use_cache in (False, True):
                actual = student(PROMPT[None], use_cache=use_cache, prompt_length=length).logits[0]
                torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
            lengths, both = torch.tensor([length, 3]), PROMPT.repeat(2, 1)
            actual = student(both, use_cache=False, prompt_length=lengths).logits[0]
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
        labels = PROMPT.where(torch.arange(40) >= 17, -100)[None]
        torch.testing.assert_close(
            student(PROMPT[None], labels=labels).logits[0], expected_logits(student, PROMPT, one_turn(student, 17))
        )
        for given, length in (({"prompt_length": 5}, 5), ({}, 38)):
            last = student(PROMPT[None], logits_to_keep=3, **given).logits[0]
            expected = expected_logits(student, PROMPT, one_turn(student, length))[-3:]
            torch.testing.assert_close(last, expected, atol=1e-4, rtol=1e-4)


GREEDY: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 256}
WAYS: dict[str, dict[str, Any]] = {
    "cache": {},
    "chunks": {"prefill_chunk_size": 7},
    "static cache": {"cache_implementation": "static"},
    "drafts": {"prompt_lookup_num_tokens": 3},
    "no cache": {"use_cache": False},
}


@pytest.mark.parametrize(
    ("name", "layer_map"), [*in_turn(FAMILY_CONFIGS, LAYER_MAPS, KINDS), *in_turn(BY_HEAD, BYPASSING, KINDS[:3])]
)
@torch.no_grad()
def test_generate_writes_the_text_of_the_reference(name: str, layer_map: dict[str, Any]) -> None:
    """Tokens may differ only where two logits are within 1e-4; the prompt is longer than the sliding windows."""
    student = make_student(name, layer_map)
    for way, settings in WAYS.items():
        written = student.generate(PROMPT[None], **settings, **GREEDY)[0]
        turns = one_turn(student, len(PROMPT), len(written))
        logits = expected_logits(student, written, turns)[len(PROMPT) - 1 : -1]
        tokens = written[len(PROMPT) :]
        assert len(tokens) == NEW_TOKENS
        assert (logits.amax(-1) - logits.gather(1, tokens[:, None])[:, 0]).max() < 1e-4, way


@pytest.mark.parametrize("deep_tail", [1, 9])
@torch.no_grad()
def test_rows_that_exit_keep_shared_keys_and_values(deep_tail: int, tmp_path: Path) -> None:
    """A token that exits at layer l has no K and V of its own; later tokens read its shared ones. The last token of a
    prompt with a longer deep tail does not exit. The engine writes the same text."""
    student = make_student("llama", early_exit=True, deep_tail=deep_tail)
    student.exit_head.weight.mul_(2.0)
    batch = torch.stack([PROMPT, PROMPT.flip(0), PROMPT.roll(5)])
    early_exit = {"mode": "threshold", "threshold": THRESHOLD}
    output = student.generate(batch, **GREEDY, early_exit=early_exit, return_dict_in_generate=True)
    assert 0 < int(output.num_exited_tokens.sum()) < output.num_exited_tokens.numel() * NEW_TOKENS
    for row in output.sequences:
        turns = one_turn(student, len(PROMPT), len(row))
        turns[len(PROMPT) :] = -1
        for at in range(len(PROMPT), len(row)):
            ids = row[:at]
            x = student.model.run_lower_layers(student.model.make_context(ids[None]))
            head = student.exit_logits(x[0, -1])
            exits = head.softmax(-1).max() >= THRESHOLD and (deep_tail == 1 or at > len(PROMPT))
            turns[at - 1] = -1 if exits else 0
            logits = head if exits else expected_logits(student, ids, turns[:at])[-1]
            assert logits.max() - logits[row[at]] < 1e-4
    student.save_pretrained(tmp_path)
    params = replace(PARAMS, early_exit=early_exit, num_lookup_tokens=0)
    outputs = LLMEngine.from_pretrained(tmp_path, CONFIG).generate(batch.tolist(), params)
    assert [one.token_ids for one in outputs] == output.sequences[:, len(PROMPT) :].tolist()
    assert [one.num_exited_tokens for one in outputs] == output.num_exited_tokens.tolist()
    always = {"mode": "threshold", "threshold": 0.0}
    num_exits = [NEW_TOKENS - (deep_tail > 1)] * len(batch)
    output = student.generate(batch, **GREEDY, early_exit=always, return_dict_in_generate=True)
    outputs = LLMEngine.from_pretrained(tmp_path, CONFIG).generate(batch.tolist(), replace(params, early_exit=always))
    assert output.num_exited_tokens.tolist() == [one.num_exited_tokens for one in outputs] == num_exits


COUNTED = ((10, 24), (30, 39)), ((5, 23),), (), ((0, 19),), ((7, 8),)
"""Runs of counted tokens of each sample: two turns, one, none, all but the last, and a single token."""
LENGTHS = (40, 24, 30, 20, 9)


def packed_rows() -> PackedRows:
    starts = np.cumsum([0, *LENGTHS])
    counts = np.zeros(starts[-1], dtype=bool)
    for start, runs in zip(starts, COUNTED, strict=False):
        for begin, end in runs:
            counts[start + begin : start + end] = True
    return pack_random_samples(np.random.default_rng(0), LENGTHS, counts, max_length=64)


def reference_losses(student: Any, rows: PackedRows, *, overlapping: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the summed KL at temperature 2, times 4, of the student and of its exit head."""
    state, inv_freq = student.state_dict(keep_vars=True), reference.frequencies(student.model.rotary_emb)
    student_loss, exit_loss = torch.zeros(()), torch.zeros(())
    for row in range(len(rows)):
        batch, begin = to_tensors(rows.make_padded_batch([row])), 0
        for length in rows.get_sample_lengths(row).tolist():
            ids, counted = (batch[name][0, begin : begin + length] for name in ("input_ids", "loss_mask"))
            begin += length
            begins = counted & ~torch.cat((torch.tensor([False]), counted[:-1]))
            answers = torch.where(counted, begins.cumsum(0) - 1, -1)
            with torch.no_grad():
                teacher = reference.logits(state, student.config, ids, inv_freq, swiftkv=False)[counted]
            log_p = torch.zeros(length, teacher.shape[-1])
            log_p[counted] = (teacher / 2.0).log_softmax(-1)

            def loss(logits: torch.Tensor, answer: torch.Tensor, log_p: torch.Tensor = log_p) -> torch.Tensor:
                chosen = log_p[answer]
                return 4.0 * (chosen.exp() * (chosen - (logits[answer] / 2.0).log_softmax(-1))).sum()

            for number in range(int(answers.max()) + 1):  # each answer is one that is generated after its own prompt
                answer, entering = answers == number, list[torch.Tensor]()
                tail = slice(
                    find_first_deep(student, answers, number, overlapping=overlapping), int(answer.nonzero()[0])
                )
                turns = torch.where(answer, 0, -1)
                turns[tail] = 0
                mine = reference.logits(
                    state, student.config, ids, inv_freq, swiftkv=True, turns=turns, entering=entering
                )
                student_loss = student_loss + loss(mine, answer)
                exit_loss = exit_loss + loss(student.exit_logits(entering[0].detach()), answer)
    return student_loss, exit_loss


def find_first_deep(student: Any, answers: torch.Tensor, number: int, *, overlapping: bool) -> int:
    """Return the first token of an answer's deep tail, which passes over all tokens begin after the previous answer."""
    first = int((answers == number).nonzero()[0]) - student.config.swiftkv_deep_tail + 1
    previous = (answers == number - 1).nonzero() if number and not overlapping else answers[:0]
    return max(first, int(previous.max()) + 1 if len(previous) else 0)


WAYS_OF_STEP = ("kept tokens", "all tokens", "operator")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        *in_turn(FAMILY_CONFIGS, tuple(product(LAYER_MAPS, WAYS_OF_STEP))),
        *in_turn(BY_HEAD, tuple(product(BYPASSING, WAYS_OF_STEP))),
    ],
)
def test_a_training_step_equals_the_reference(name: str, step: tuple[dict[str, Any], str]) -> None:
    """Losses and gradients match; each turn reads earlier tokens as a prompt, and its own tokens as deep."""
    layer_map, way = step
    student = make_student(name, layer_map, early_exit=True)
    rows = packed_rows()
    distillation_model = DistillationModel(student, DistillationSpec(vary_deep_tail=False), dtype=torch.float32)
    distillation_model.uses_static_shapes = way == "all tokens"
    parameters = student.swiftkv_parameters()
    expected = reference_losses(student, rows, overlapping=way != "all tokens")
    wanted = torch.autograd.grad(sum(expected), list(parameters.values()), allow_unused=True)
    batch, lengths = rows.make_padding_free_batch(range(len(rows)), multiple=64)
    chosen = varlen_on_cpu if way == "operator" else None
    with patch("swiftkv_platform.model.packed_attention.choose_operator", return_value=chosen):
        sums = distillation_model(**to_tensors(batch), sample_lengths=lengths)
    torch.testing.assert_close(sums["logits_loss"], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sums["exit_loss"], expected[1], rtol=1e-4, atol=1e-4)
    found = torch.autograd.grad(sum(sums.values()), list(parameters.values()), allow_unused=True)
    for parameter, mine, theirs in zip(parameters, found, wanted, strict=True):
        assert mine is not None, parameter
        assert theirs is not None, parameter
        assert (mine - theirs).abs().max() <= 1e-4 * max(float(theirs.abs().max()), 1e-2), parameter


PARAMS = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True, num_lookup_tokens=4)
CONFIG = EngineConfig(max_num_seqs=3, max_num_batched_tokens=17, block_size=4, kv_cache_bytes=1 << 20)


SERVED = (
    *in_turn(FAMILY_CONFIGS, tuple(product((LAYER_MAPS[0], LAYER_MAPS[3]), [False, True])), KINDS),
    *in_turn(BY_HEAD, tuple(product(BYPASSING, [False, True])), BY_HEAD),
)


@pytest.mark.parametrize(("name", "way"), SERVED)
@torch.no_grad()
def test_every_family_is_served(name: str, way: tuple[dict[str, Any], bool], tmp_path: Path) -> None:
    """In chunks, batches and with text drafts, over runs of slots or block tables; prompts are scored as prompts."""
    layer_map, by_tables = way
    student = make_student(name, layer_map)
    student.save_pretrained(tmp_path)
    prompts = [random_tokens(size, seed=size).tolist() for size in (40, 3, 25)]
    with patch.object(memory, "choose_operator", return_value=reference_varlen_attn if by_tables else None):
        engine = LLMEngine.from_pretrained(tmp_path, CONFIG)
    for params in (PARAMS, replace(PARAMS, prompt_logprobs=0)):
        for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
            text, size = torch.tensor(prompt + output.token_ids), len(prompt)
            logits = expected_logits(student, text, one_turn(student, size, len(text)))[:-1]
            behind = logits.amax(-1) - logits.gather(1, text[1:, None])[:, 0]
            assert len(output.token_ids) == NEW_TOKENS
            assert behind[size - 1 :].max() < 1e-4
            if output.prompt_logprobs is not None:
                expected = logits.log_softmax(-1).gather(1, text[1:, None])[: size - 1, 0].tolist()
                found = [next(iter(one.values())) for one in output.prompt_logprobs if one is not None]
                assert found == pytest.approx(expected, abs=1e-3)
    engine.assert_consistent()


@pytest.mark.parametrize(("deep_tail", "num_shared"), [(1, 36), (9, 28), (64, 0)])
def test_blocks_of_an_answer_are_not_shared(deep_tail: int, num_shared: int, tmp_path: Path) -> None:
    """An answer sent back is read as a prompt: of the cached blocks, only those of the original prompt before its deep
    tail are reused."""
    make_student("llama", deep_tail=deep_tail).save_pretrained(tmp_path)
    engine = LLMEngine.from_pretrained(tmp_path, CONFIG)
    prompt = PROMPT.tolist()
    (first,) = engine.generate([prompt], PARAMS)
    (again,) = engine.generate([prompt], PARAMS)
    (further,) = engine.generate([prompt + first.token_ids], PARAMS)
    assert again.token_ids == first.token_ids
    assert [one.num_cached_tokens for one in (first, again, further)] == [0, num_shared, num_shared]
    num_skipped = [max(len(PROMPT) - deep_tail, 0), max(len(PROMPT) - deep_tail - num_shared, 0)]
    assert [one.num_skipped_tokens for one in (first, again)] == num_skipped


ONE_LAYER = {"num_key_value_layers": 2}


@pytest.mark.parametrize(
    ("name", "layer_map"), [("llama-biased", ONE_LAYER), ("qwen3", ONE_LAYER), ("llama", BYPASSING[0])]
)
@torch.no_grad()
def test_a_calibrated_group_of_one_keeps_its_teachers_own_keys_and_values(name: str, layer_map: Any) -> None:
    """So the text after a prompt of one token is the teacher's."""
    teacher, ids = family_teacher(name), random_tokens(1, 48, seed=99)
    batches = [random_tokens(4, 32, seed=seed) for seed in range(6)]
    student = convert(teacher, decode_key_value="own", **layer_map, calibration=batches)
    torch.testing.assert_close(student(ids, prompt_length=1).logits, teacher(ids).logits, atol=2e-4, rtol=2e-4)


def test_a_checkpoint_says_what_prompts_run_through(tmp_path: Path) -> None:
    """`prefill_layers` survives saving, export and conversion on disk, and adds no tensors; invalid lists are
    refused."""
    student = make_student("llama", BYPASSING[0])
    student.save_pretrained(tmp_path / "student")
    export(tmp_path / "student", tmp_path / "served", teacher=False)
    for path in ("student", "served"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / path)
        assert loaded.config.layer_map.prefill_layers == (0, 2, 3)
        assert torch.equal(loaded(PROMPT[None]).logits, student(PROMPT[None]).logits)
    dense = load_dense(tmp_path / "student")
    torch.testing.assert_close(dense(PROMPT[None]).logits, student.swiftkv(False)(PROMPT[None]).logits)
    family_teacher("llama").save_pretrained(tmp_path / "teacher")
    convert_checkpoint(tmp_path / "teacher", tmp_path / "converted", prefill_layers=[0, 2, 3], decode_key_value="own")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    in_memory = convert(tmp_path / "teacher", prefill_layers=[0, 2, 3], decode_key_value="own")
    assert torch.equal(converted(PROMPT[None]).logits, in_memory(PROMPT[None]).logits)
    assert converted.state_dict().keys() == convert(
        tmp_path / "teacher", num_key_value_layers=4
    ).state_dict().keys() | {f"model.layers.4.self_attn.{x}_proj_decode_swiftkv.weight" for x in "kv"}
    own: dict[str, Any] = {"decode_key_value": "own"}
    for given, message in (
        ({"prefill_layers": [0, 2]}, "use swiftkv.decode_key_value: own"),
        ({"prefill_layers": [2, 0], **own}, "an ascending list of layers"),
        ({"prefill_layers": [], **own}, "an ascending list of layers"),
        ({"prefill_layers": [0, 4], **own}, "a model of 5 layers takes 0 to 3"),
        ({"prefill_layers": [0, 2], "num_key_value_layers": 2, **own}, "which sets l to 3"),
        ({"prefill_layers": [0, 2], "prefill_reduction": 0.5, **own}, "which sets l to 3"),
    ):
        with pytest.raises((ModelError, InvalidInputError), match=message) as refused:
            convert(tmp_path / "teacher", **given)
        assert refused.value.field == "swiftkv.prefill_layers"
    with pytest.raises(ModelError, match="MLA"):
        make_student("deepseek_v2", BYPASSING[0])


def test_a_checkpoint_says_its_deep_tail(tmp_path: Path) -> None:
    """It is saved, loaded and exported, can be changed in the file, and needs own K and V."""
    make_student("llama", deep_tail=9).save_pretrained(tmp_path / "student")
    export(tmp_path / "student", tmp_path / "served", teacher=False)
    config = json.loads((tmp_path / "served" / "config.json").read_text())
    assert config["swiftkv_deep_tail"] == 9
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "served").config.layer_map.deep_tail == 9
    export(tmp_path / "student", tmp_path / "prefill", prefill_only=True)
    assert read_config(tmp_path / "prefill").layer_map.deep_tail is None, "no token runs layers >= l"
    for changes, message in (
        ({"swiftkv_deep_tail": 0}, "1..1048576 tokens are accepted"),
        ({"swiftkv_deep_tail": "9"}, "an integer is accepted"),
        ({"swiftkv_decode_key_value": "shared"}, "requires swiftkv"),
    ):
        (tmp_path / "served" / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises((ModelError, InvalidInputError), match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path / "served")
    with pytest.raises(InvalidInputError, match="requires swiftkv") as refused:
        convert(family_teacher("llama"), num_key_value_layers=2, deep_tail=9)
    assert refused.value.field == "swiftkv.deep_tail"


def test_a_checkpoint_says_its_form(tmp_path: Path) -> None:
    """`decode_key_value` and its tensors are saved and loaded; missing tensors or an unknown value are refused."""
    student = make_student("llama")
    student.save_pretrained(tmp_path / "own")
    export(tmp_path / "own", tmp_path / "served", teacher=False)
    ids = PROMPT[None]
    for path in ("own", "served"):
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / path)
        assert loaded.config.swiftkv_decode_key_value == "own"
        assert torch.equal(loaded(ids).logits, student(ids).logits)
    convert(family_teacher("llama"), num_key_value_layers=2).save_pretrained(tmp_path / "shared")
    config = json.loads((tmp_path / "shared" / "config.json").read_text())
    del config["swiftkv_decode_key_value"]  # as in checkpoints of other projects
    (tmp_path / "shared" / "config.json").write_text(json.dumps(config))
    assert not AutoModelForCausalLM.from_pretrained(tmp_path / "shared").config.layer_map.deep_leaders
    for form, message in (("own", "k_proj_decode_swiftkv"), ("neither", "shared and own are accepted")):
        (tmp_path / "shared" / "config.json").write_text(json.dumps({**config, "swiftkv_decode_key_value": form}))
        with pytest.raises(ModelError, match=message):
            AutoModelForCausalLM.from_pretrained(tmp_path / "shared")
