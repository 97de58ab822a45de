"""What the report says is what a naive computation over whole logits says; gate and costs follow from it."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swiftkv_platform.distillation import evaluation
from swiftkv_platform.distillation.evaluation import (
    Quality,
    Report,
    TeacherQuality,
    TimeToFirstToken,
    Totals,
    check_gate,
    evaluate,
    evaluation_rows,
    measure,
)
from swiftkv_platform.distillation.packing import PackedRows, Samples, pack
from swiftkv_platform.distillation.prefill_cost import ModeCost, PrefillCost, measure_prefill
from swiftkv_platform.errors import DataError, InvalidInputError, QualityGateError
from swiftkv_platform.model import convert
from swiftkv_platform.specs import EvaluationSpec

VOCAB, MAX_LENGTH, NUM_LAYERS = 97, 32, 4


def make_student(num_key_value_layers: int, key_value_group_size: int = 1) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.4,  # far from uniform, so that the modes really differ
    )
    return convert(
        LlamaForCausalLM(config).eval(),
        num_key_value_layers=num_key_value_layers,
        key_value_group_size=key_value_group_size,
    )


def make_rows(lengths: list[int], *, packing: bool = True) -> PackedRows:
    """Random samples in which about half of the positions count."""
    rng = np.random.default_rng(0)
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    counts = rng.random(starts[-1]) < 0.5
    counts[starts[:-1]], counts[starts[1:] - 1] = True, False
    samples = Samples(rng.integers(VOCAB, size=starts[-1]).astype(np.int32), counts, starts)
    return pack(samples, np.arange(len(lengths)), max_length=MAX_LENGTH, pad_token_id=0, packing=packing)


LENGTHS = [7, 32, 20, 11, 5, 3, 2, 30, 17]


@pytest.fixture(scope="module")
def student() -> Any:
    return make_student(2, 2)


@torch.no_grad()
def naive(model: Any, rows: PackedRows) -> tuple[TeacherQuality, Quality]:
    """Each sample alone through the whole model, in either mode, with whole logits in float64."""
    logits: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    targets = []
    for begin, end in zip(rows.samples.starts, rows.samples.starts[1:], strict=False):
        ids = torch.from_numpy(rows.samples.tokens[begin:end].astype(np.int64))
        counted = torch.from_numpy(rows.samples.counts[begin:end])
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


@pytest.mark.parametrize("logits_per_chunk", [VOCAB * 5, 1 << 22])
@pytest.mark.parametrize("packing", [True, False])
def test_figures_equal_a_naive_computation(
    student: Any, packing: bool, logits_per_chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed rows, forked layers and chunks against whole logits of each sample by itself."""
    monkeypatch.setattr(evaluation, "_LOGITS_PER_CHUNK", logits_per_chunk)
    rows = make_rows(LENGTHS, packing=packing)
    totals = evaluate(student, rows, max_tokens=1 << 20, batch_size=2)
    teacher, expected = naive(student, rows)
    assert totals.num_positions == rows.num_counted_tokens
    assert totals.teacher.perplexity == pytest.approx(teacher.perplexity, rel=1e-5)
    assert totals.student.model_dump() == pytest.approx(expected.model_dump(), rel=1e-5)
    assert expected.kl > 0.05
    assert expected.top1_agreement < 0.95


def test_a_student_that_computes_what_its_teacher_does_has_no_kl() -> None:
    """With l = L - 1 and copied projections the only rewired layer reads the very hidden state the teacher's reads."""
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


@pytest.mark.parametrize("mode", [False, True])
@torch.no_grad()
def test_a_packed_sample_gets_the_logits_it_gets_alone(student: Any, mode: bool) -> None:
    rows = make_rows([7, 11, 5, 3])
    student.swiftkv(mode)
    batch = rows.batch([0])
    packed = student(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits[0]
    begin = 0
    for member in rows.members:
        ids = rows.samples.tokens[rows.samples.starts[member] : rows.samples.starts[member + 1]]
        alone = student(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        torch.testing.assert_close(packed[begin : begin + len(ids)], alone, rtol=1e-4, atol=1e-4)
        begin += len(ids)
    joined = student(batch["input_ids"], use_cache=False).logits[0]
    assert (joined[8:] - packed[8:]).abs().max() > 0.1  # without the restarts samples do see each other


def test_shares_of_workers_add_up(student: Any) -> None:
    rows = make_rows(LENGTHS)
    indices = list(range(len(rows)))
    whole = measure(student, rows, indices, batch_size=3)
    parts = measure(student, rows, indices[::2], batch_size=3) + measure(student, rows, indices[1::2], batch_size=3)
    assert (parts.num_positions, parts.agreements) == (whole.num_positions, whole.agreements)
    assert (parts.kl, parts.teacher_nll) == pytest.approx((whole.kl, whole.teacher_nll), rel=1e-6)


def test_evaluation_leaves_the_model_as_it_was(student: Any) -> None:
    student.swiftkv(False).train()
    evaluate(student, make_rows(LENGTHS), max_tokens=64, batch_size=2)
    measure_prefill(student, prompt_length=8, rounds=1)
    assert student.training
    assert not student.model.swiftkv_enabled
    student.swiftkv(True).eval()


def test_evaluated_rows_are_spread_over_all_and_keep_the_limit() -> None:
    rows = make_rows([16] * 200)
    assert evaluation_rows(rows, max_tokens=1 << 20) == list(range(100))
    few = evaluation_rows(rows, max_tokens=330)
    assert (len(few), len(set(few)), few[0], few[-1]) == (10, 10, 0, 99)
    assert evaluation_rows(rows, max_tokens=1) == [0]


def test_evaluation_without_held_out_rows_names_the_fraction(student: Any) -> None:
    empty = pack(make_rows([4]).samples, np.empty(0, dtype=np.int64), max_length=8, pad_token_id=0)
    with pytest.raises(DataError, match="no held-out text") as caught:
        evaluate(student, empty, max_tokens=64, batch_size=1)
    assert caught.value.field == "data.validation_fraction"


def totals(kl: float) -> Totals:
    return Totals(num_positions=10, teacher_nll=10.0, student_nll=20.0, kl=kl * 10, agreements=8)


COST = PrefillCost(128, ModeCost(100.0, 64.0, 4.0), ModeCost(60.0, 48.0, 3.0))


def test_the_report_has_exactly_the_published_keys() -> None:
    report = Report.build(
        rewired=totals(1.0), calibrated=totals(0.5), distilled=totals(0.25), cost=COST, tokens_trained=99
    )

    def student(kl: float) -> Any:
        return {"perplexity": pytest.approx(math.e**2), "kl": pytest.approx(kl), "top1_agreement": 0.8}

    assert json.loads(report.model_dump_json()) == {
        "teacher": {"perplexity": pytest.approx(math.e)},
        "rewired": student(1.0),
        "calibrated": student(0.5),
        "distilled": student(0.25),
        "kl_recovered": pytest.approx(0.75),
        "prefill_flops_ratio": 0.6,
        "kv_bytes_ratio": 0.75,
        "ttft_ms": {"dense": 4.0, "swiftkv": 3.0},
        "tokens_trained": 99,
    }
    assert Report.model_validate_json(report.model_dump_json()) == report


def test_nothing_lost_is_nothing_to_recover() -> None:
    report = Report.build(rewired=totals(0.0), calibrated=None, distilled=totals(0.0), cost=COST, tokens_trained=0)
    assert report.kl_recovered == 0.0
    assert report.calibrated is None


@pytest.mark.parametrize(("kl", "max_kl"), [(0.3, 0.2), (math.nan, 0.2)])
def test_the_gate_refuses_with_the_figures(kl: float, max_kl: float) -> None:
    quality = Quality(perplexity=7.389, kl=kl, top1_agreement=0.8)
    report = Report(
        teacher=TeacherQuality(perplexity=2.718),
        rewired=quality,
        calibrated=quality,
        distilled=quality,
        kl_recovered=0.0,
        prefill_flops_ratio=0.5,
        kv_bytes_ratio=0.5,
        ttft_ms=TimeToFirstToken(dense=1.0, swiftkv=1.0),
        tokens_trained=1,
    )
    check_gate(report, EvaluationSpec(max_kl=None))
    with pytest.raises(
        QualityGateError, match=rf"KL is {kl:.4f} nats; evaluation.max_kl allows 0.2 .*7.389.*80.0%"
    ) as caught:
        check_gate(report, EvaluationSpec(max_kl=max_kl))
    assert caught.value.field == "evaluation.max_kl"
    if not math.isnan(kl):
        check_gate(report, EvaluationSpec(max_kl=kl))


def matrix_flops(num_tokens: int, num_kept: int, num_key_value_layers: int, num_groups: int) -> float:
    """Prefill FLOPs of the model above by hand: 2 x (weights + attention's two products over the whole context)."""
    hidden, key_value, intermediate = 32, 16, 48
    query_and_rest = 2 * hidden * hidden + 3 * hidden * intermediate
    shared = 2 * hidden * key_value
    attention = 2 * hidden * num_tokens
    lower = num_key_value_layers * num_tokens * (query_and_rest + shared + attention)
    upper = (NUM_LAYERS - num_key_value_layers) * num_kept * (query_and_rest + attention)
    return 2.0 * (lower + upper + num_groups * num_tokens * shared + hidden * VOCAB) / num_tokens


@pytest.mark.parametrize("group_size", [1, 2])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_prefill_cost_is_counted_right(implementation: str, group_size: int) -> None:
    model, num_tokens = make_student(2, group_size), 40
    model.set_attn_implementation(implementation)
    cost = measure_prefill(model, prompt_length=num_tokens, rounds=1)
    assert cost.dense.flops_per_token == matrix_flops(num_tokens, num_tokens, NUM_LAYERS, 0)
    assert cost.swiftkv.flops_per_token == matrix_flops(num_tokens, 1, 2, 2 // group_size)
    assert cost.dense.kv_bytes_per_token == NUM_LAYERS * 2 * 16 * 4
    assert cost.kv_bytes_ratio == (2 + 2 // group_size) / NUM_LAYERS
    assert cost.dense.ttft_ms > 0 < cost.swiftkv.ttft_ms
    assert model.config._attn_implementation == implementation


@pytest.mark.parametrize("prompt_length", [0, 257])
def test_a_prompt_beyond_the_context_is_refused(student: Any, prompt_length: int) -> None:
    with pytest.raises(InvalidInputError, match=r"takes 1\.\.256 tokens") as caught:
        measure_prefill(student, prompt_length=prompt_length, rounds=1)
    assert caught.value.value == prompt_length
