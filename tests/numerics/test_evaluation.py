"""The report agrees with a naive computation over whole logits and plain decoding, costs included."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from swiftkv_platform.data.packing import PackedRows, pack
from swiftkv_platform.errors import DataError, InvalidInputError
from swiftkv_platform.evaluation import quality as evaluation
from swiftkv_platform.evaluation.continuations import compare_continuations
from swiftkv_platform.evaluation.prefill_cost import measure_prefill
from swiftkv_platform.evaluation.quality import (
    BIN_BOUNDS,
    NUM_EXIT_BINS,
    ExitCounts,
    Quality,
    TeacherQuality,
    evaluate,
    measure_rows,
    select_evaluation_rows,
)
from swiftkv_platform.model import convert
from swiftkv_platform.model.packed_attention import to_tensors
from swiftkv_platform.planning import read_architecture
from swiftkv_platform.planning.prefill import count_prefill_flops, sum_linear_flops
from swiftkv_platform.student_shape import LayerMap
from tests.numerics.packed_steps import pack_random_samples

VOCAB, MAX_LENGTH, NUM_LAYERS = 97, 32, 4
TEACHER = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": NUM_LAYERS}
TEACHER |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
LENGTHS = [7, 32, 20, 11, 5, 3, 2, 30, 17]


def make_student(
    num_key_value_layers: int, key_value_group_size: int = 1, *, early_exit: bool = False, std: float = 0.4
) -> Any:
    """Return a student with weights far from uniform, so that the two modes give different results."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TEACHER, initializer_range=std)).eval()
    shape = {"num_key_value_layers": num_key_value_layers, "key_value_group_size": key_value_group_size}
    return convert(model, **shape, early_exit=early_exit)


def make_rows(lengths: list[int], *, packing: bool = True) -> PackedRows:
    """Return random samples in which about half of the positions count."""
    rng = np.random.default_rng(0)
    counts = rng.random(sum(lengths)) < 0.5
    counts[np.cumsum([0, *lengths[:-1]])] = True
    return pack_random_samples(rng, lengths, counts, max_length=MAX_LENGTH, vocab_size=VOCAB, packing=packing)


@pytest.fixture(scope="module")
def student() -> Any:
    return make_student(2, 2)


@torch.no_grad()
def naive(model: Any, rows: PackedRows) -> tuple[TeacherQuality, Quality]:
    """Measure each sample alone through the whole model in both modes, from full logits in float64."""
    logits: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    targets = []
    for begin, end in zip(rows.samples.starts, rows.samples.starts[1:], strict=False):
        ids = torch.from_numpy(rows.samples.tokens[begin:end].astype(np.int64))
        counted = torch.from_numpy(rows.samples.loss_mask[begin:end])
        targets.append(ids[1:][counted[:-1]])
        for mode in (False, True):
            logits[mode].append(model.swiftkv(mode)(ids[None]).logits[0, counted].double())
    log_p, log_q = (torch.cat(logits[mode]).log_softmax(-1) for mode in (False, True))
    index = torch.cat(targets)
    nll = [torch.nn.functional.nll_loss(log, index).item() for log in (log_p, log_q)]
    kl = torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="batchmean").item()
    agreement = (log_p.argmax(-1) == log_q.argmax(-1)).double().mean().item()
    student = Quality(perplexity=math.exp(nll[1]), kl=kl, top1_agreement=agreement)
    return TeacherQuality(perplexity=math.exp(nll[0])), student


@pytest.mark.parametrize(("packing", "logits_per_chunk"), [(True, VOCAB * 5), (False, 1 << 22)])
def test_figures_equal_naive_ones(
    student: Any, packing: bool, logits_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare packed rows, forked layers and chunked logits to the full logits of each sample by itself."""
    monkeypatch.setattr(evaluation, "_LOGITS_PER_CHUNK", logits_per_chunk)
    rows = make_rows(LENGTHS, packing=packing)
    totals = evaluate(student, rows, max_tokens=1 << 20, batch_size=2)
    teacher, expected = naive(student, rows)
    assert totals.num_positions == rows.num_counted_tokens
    counted = np.add.reduceat(rows.samples.loss_mask, rows.samples.starts[:-1], dtype=int)
    assert sorted((one.sample, one.positions) for one in totals.samples) == list(enumerate(counted))
    for name in ("teacher_nll", "student_nll", "kl", "agreements"):
        assert sum(getattr(one, name) for one in totals.samples) == pytest.approx(getattr(totals, name))
    assert totals.teacher.perplexity == pytest.approx(teacher.perplexity, rel=1e-5)
    assert totals.student.model_dump() == pytest.approx(expected.model_dump(), rel=1e-5)
    assert expected.kl > 0.05
    assert expected.top1_agreement < 0.95


@torch.no_grad()
@pytest.mark.parametrize("packing", [True, False])
def test_bins_hold_each_position_by_its_place_and_its_prompt(student: Any, packing: bool) -> None:
    """Compare samples with prompts, whose positions do not count, to each sample by itself."""
    rng, prompts, lengths = np.random.default_rng(3), [0, 3, 17, 5, 20], [18, 28, 30, 9, 31]
    counts = np.concatenate([np.arange(length) >= prompt for prompt, length in zip(prompts, lengths, strict=True)])
    rows = pack_random_samples(rng, lengths, counts, max_length=MAX_LENGTH, vocab_size=VOCAB, packing=packing)
    samples, starts = rows.samples, rows.samples.starts
    totals = evaluate(student, rows, max_tokens=1 << 20, batch_size=2)
    places = [place for prompt, length in zip(prompts, lengths, strict=True) for place in range(length - prompt - 1)]
    before = [prompt for prompt, length in zip(prompts, lengths, strict=True) for _ in range(length - prompt - 1)]
    kl = []
    for begin, end, prompt in zip(starts, starts[1:], prompts, strict=False):
        ids = torch.from_numpy(samples.tokens[begin:end].astype(np.int64))[None]
        log_p, log_q = (student.swiftkv(on)(ids).logits[0, prompt:-1].double().log_softmax(-1) for on in (False, True))
        kl += (log_p.exp() * (log_p - log_q)).sum(-1).tolist()
    for sums, values in ((totals.by_position, places), (totals.by_prompt_length, before)):
        bins = np.searchsorted(BIN_BOUNDS, values, side="right") - 1
        assert list(sums.positions) == np.bincount(bins, minlength=len(BIN_BOUNDS)).tolist()
        assert list(sums.kl) == pytest.approx(np.bincount(bins, weights=kl, minlength=len(BIN_BOUNDS)), rel=1e-4)
        assert sum(sums.agreements) == totals.agreements
        assert sum(sums.teacher_nll) == pytest.approx(totals.teacher_nll)
        assert sum(sums.student_nll) == pytest.approx(totals.student_nll)
        assert np.count_nonzero(sums.positions) >= 2


def test_a_student_that_computes_what_its_teacher_does_has_no_kl() -> None:
    """With l = L - 1 and copied projections, the only rewired layer reads the same hidden state as the teacher's."""
    model, rows = make_student(NUM_LAYERS - 1), make_rows(LENGTHS)
    same = evaluate(model, rows, max_tokens=1 << 20, batch_size=4)
    assert same.student.kl == pytest.approx(0.0, abs=1e-6)
    assert same.student.top1_agreement == 1.0
    assert same.student.perplexity == pytest.approx(same.teacher.perplexity, rel=1e-6)
    with torch.no_grad():
        model.model.layers[-1].self_attn.q_proj_swiftkv.weight.mul_(-1.0)
    changed = evaluate(model, rows, max_tokens=1 << 20, batch_size=4)
    assert changed.student.kl > 1e-3
    assert changed.teacher == same.teacher


def test_shares_of_workers_add_up_and_the_model_is_as_it_was(student: Any) -> None:
    rows = make_rows(LENGTHS)
    student.swiftkv(False).train()
    indices = list(range(len(rows)))
    whole = measure_rows(student, rows, indices, batch_size=3)
    halves = [measure_rows(student, rows, half, batch_size=3) for half in (indices[::2], indices[1::2])]
    parts = halves[0] + halves[1]
    assert (parts.num_positions, parts.agreements) == (whole.num_positions, whole.agreements)
    assert parts.by_position.positions == whole.by_position.positions
    assert parts.by_prompt_length.kl == pytest.approx(whole.by_prompt_length.kl, rel=1e-6)
    assert (parts.kl, parts.teacher_nll) == pytest.approx((whole.kl, whole.teacher_nll), rel=1e-6)
    measure_prefill(student, prompt_length=8, rounds=1)
    assert student.training
    assert not student.model.swiftkv_enabled
    student.swiftkv(True).eval()


def test_evaluated_rows_are_spread_over_all_and_keep_the_limit(student: Any) -> None:
    rows = make_rows([16] * 200)
    assert select_evaluation_rows(rows, max_tokens=1 << 20) == list(range(100))
    few = select_evaluation_rows(rows, max_tokens=330)
    assert (len(few), len(set(few)), few[0], few[-1]) == (10, 10, 0, 99)
    assert select_evaluation_rows(rows, max_tokens=1) == [0]
    empty = pack(make_rows([4]).samples, np.empty(0, dtype=np.int64), max_length=8, pad_token_id=0)
    with pytest.raises(DataError, match="no held-out text") as caught:
        evaluate(student, empty, max_tokens=64, batch_size=1)
    assert caught.value.field == "data.sources"


@torch.no_grad()
def test_the_exit_head_is_binned_by_its_confidence() -> None:
    """Compare the bins of figure D.1 to each sample by itself, in float64."""
    model, rows = make_student(2, early_exit=True), make_rows(LENGTHS)
    model.exit_head.weight.normal_(std=0.6)
    positions, agreements = [0] * NUM_EXIT_BINS, [0] * NUM_EXIT_BINS
    for begin, end in zip(rows.samples.starts, rows.samples.starts[1:], strict=False):
        ids = torch.from_numpy(rows.samples.tokens[begin:end].astype(np.int64))[None]
        context = model.model.make_context(ids)
        p, tokens = model.exit_logits(model.model.run_lower_layers(context))[0].double().softmax(-1).max(-1)
        agrees = tokens == model.swiftkv(True)(ids).logits[0].argmax(-1)
        for i in np.flatnonzero(rows.samples.loss_mask[begin:end]):
            positions[int(p[i] / 0.05)] += 1
            agreements[int(p[i] / 0.05)] += bool(agrees[i])
    counts = evaluate(model, rows, max_tokens=1 << 20, batch_size=2).exit_head
    assert counts == ExitCounts(tuple(positions), tuple(agreements))
    assert sum(counts.positions) == rows.num_counted_tokens
    assert sum(count > 0 for count in positions) > 5
    assert 0 < sum(agreements) < sum(positions)


@torch.no_grad()
def plain_greedy(model: Any, prompt: torch.Tensor, num_tokens: int) -> list[int]:
    """Decode greedily with one full forward pass per token, without a cache, up to the model's end of text."""
    ids = prompt
    for _ in range(num_tokens):
        ids = torch.cat([ids, model(ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
        if int(ids[0, -1]) == model.generation_config.eos_token_id:
            break
    return ids[0, prompt.shape[1] :].tolist()


@pytest.mark.parametrize("end", [None, 5])
def test_continuations_are_compared_up_to_the_first_difference(end: int | None) -> None:
    model, rows = make_student(2, 2, std=0.25), make_rows([24] * 6 + [3], packing=False)
    teacher_tokens = plain_greedy(model.swiftkv(False), to_tensors(rows.make_padded_batch([0]))["input_ids"][:, :12], 6)
    model.generation_config.eos_token_id = None if end is None else teacher_tokens[2]
    model.swiftkv(False)
    quality = compare_continuations(model, rows, num_prompts=7, num_tokens=6, batch_size=4, decode=repr)
    assert not model.model.swiftkv_enabled
    assert (quality.num_prompts, quality.prompt_length, quality.num_tokens) == (6, 12, 6)
    matched, written, identical, texts = 0, 0, 0, []
    for row in range(len(rows)):
        batch = to_tensors(rows.make_padded_batch([row]))
        if not batch["loss_mask"][0, 12:].any() and rows.samples.lengths[rows.members[row]] < 12:
            continue
        pair = [plain_greedy(model.swiftkv(on), batch["input_ids"][:, :12], 6) for on in (False, True)]
        texts.append(tuple(map(repr, (batch["input_ids"][0, :12].tolist(), *pair))))
        same = 0
        while same < min(map(len, pair)) and pair[0][same] == pair[1][same]:
            same += 1
        matched, written, identical = matched + same, written + len(pair[0]), identical + (same == len(pair[0]))
    assert quality.matched == pytest.approx(matched / written)
    assert quality.identical == pytest.approx(identical / 6)
    assert [(each.prompt, each.teacher, each.student) for each in quality.examples] == texts[:4]
    assert 0 < quality.matched < 1, "the modes agree on some tokens"


def test_continuations_are_plain_greedy_whatever_the_model_ships(student: Any) -> None:
    def compare() -> Any:
        return compare_continuations(student, make_rows(LENGTHS), num_prompts=4, num_tokens=8, batch_size=2)

    plain, shipped = compare(), student.generation_config
    student.generation_config = GenerationConfig(
        repetition_penalty=1.5, num_beams=4, no_repeat_ngram_size=1, eos_token_id=shipped.eos_token_id
    )
    try:
        assert compare() == plain
        assert student.generation_config.num_beams == 4, "the model's own settings are unchanged"
    finally:
        student.generation_config = shipped
    for num_prompts, rows in ((0, make_rows(LENGTHS)), (4, make_rows([1, 1]))):
        assert compare_continuations(student, rows, num_prompts=num_prompts, num_tokens=4, batch_size=4) is None


def test_prefill_cost_leaves_out_what_serving_bypasses() -> None:
    shapes: list[dict[str, Any]] = [{"num_key_value_layers": 3}, {"prefill_layers": [0, 2]}]
    through, around = (
        measure_prefill(
            convert(LlamaForCausalLM(LlamaConfig(**TEACHER)).eval(), **shape, decode_key_value="own"),
            prompt_length=40,
            rounds=1,
        )
        for shape in shapes
    )
    hidden, inner, num_tokens = TEACHER["hidden_size"], TEACHER["intermediate_size"], 40
    spared = 2 * (2 * hidden * hidden + 3 * hidden * inner + 2 * num_tokens * hidden)  # Q and O, MLP, attention
    found = through.swiftkv.flops_per_token - around.swiftkv.flops_per_token
    assert found == pytest.approx(spared * (num_tokens - 1) / num_tokens)
    assert around.dense.flops_per_token == through.dense.flops_per_token


@pytest.mark.parametrize("deep_tail", [6, 64])
def test_prefill_cost_counts_the_deep_tail(deep_tail: int) -> None:
    """A prompt within its tail costs what the teacher's does."""
    shape: dict[str, Any] = {"num_key_value_layers": 3, "decode_key_value": "own", "deep_tail": deep_tail}
    model = convert(LlamaForCausalLM(LlamaConfig(**TEACHER)).eval(), **shape)
    cost, num_tokens = measure_prefill(model, prompt_length=40, rounds=1), 40
    planned = read_architecture(model.config.to_dict())
    flops = count_prefill_flops(planned, model.config.layer_map, num_tokens, "executed", square=True)
    # generate() also projects K and V from x for the tail
    own = len(model.config.layer_map.leaders) * deep_tail * sum_linear_flops(planned.shared_attention.key_value)
    assert cost.swiftkv.flops_per_token * num_tokens == flops.total + own * (deep_tail < num_tokens)
    assert (flops.total == cost.dense.flops_per_token * num_tokens) == (deep_tail > num_tokens)


@pytest.mark.parametrize(("implementation", "group_size"), [("sdpa", 1), ("eager", 2)])
def test_prefill_cost_is_counted_right(implementation: str, group_size: int) -> None:
    model, num_tokens = make_student(2, group_size), 40
    model.set_attn_implementation(implementation)
    cost = measure_prefill(model, prompt_length=num_tokens, rounds=1)
    planned = read_architecture(model.config.to_dict())
    for layers, counted in ((LayerMap.dense(len(planned.layers)), cost.dense), (model.config.layer_map, cost.swiftkv)):
        flops = count_prefill_flops(planned, layers, num_tokens, "executed", square=True)
        assert counted.flops_per_token == flops.total / num_tokens
    assert cost.dense.kv_bytes_per_token == NUM_LAYERS * 2 * 16 * 4
    assert cost.kv_bytes_ratio == (2 + 2 // group_size) / NUM_LAYERS
    assert cost.dense.ttft_ms > 0 < cost.swiftkv.ttft_ms
    assert model.config._attn_implementation == implementation
    for prompt_length in (0, 257):
        with pytest.raises(InvalidInputError, match=r"use 1\.\.256 tokens") as caught:
            measure_prefill(model, prompt_length=prompt_length, rounds=1)
        assert caught.value.value == prompt_length
