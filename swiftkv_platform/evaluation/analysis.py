"""Recommend the depth l for a model, from SimScore of its layers over real text. On request, students of several
depths, and of layers that prompts bypass, are evaluated before any training, on held-out text and on needles.
"""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from swiftkv_platform.configs import SwiftKVConfigMixin
from swiftkv_platform.data.chat import ChatRenderer
from swiftkv_platform.data.formats import Conversation
from swiftkv_platform.data.packing import PackedRows, pack
from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.errors import DataError, InvalidInputError
from swiftkv_platform.evaluation.harness.builtin import MAX_ANSWER_TOKENS, MIN_TEACHER_SHARE_FOUND, make_needle_prompt
from swiftkv_platform.evaluation.quality import Quality, evaluate, select_evaluation_rows
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.model.calibration import TokenBatch
from swiftkv_platform.model.configuration import read_config
from swiftkv_platform.model.conversion import load_teacher, make_student
from swiftkv_platform.model.packed_attention import to_tensors
from swiftkv_platform.model.tokenizers import load_tokenizer
from swiftkv_platform.planning import plan
from swiftkv_platform.specs import DataSourceSpec, DataSpec
from swiftkv_platform.student_shape import RequestedStudentShape, format_layers

MIN_SIMSCORE = 0.5
"""SimScore that all of the paper's models exceed at around half of their depth (section 3.2)."""
_MASK_NAMES = ("loss_mask", "attention_mask")


@dataclass(frozen=True)
class Similarity:
    """Sums over tokens. `+` adds the sums of two workers."""

    cosines: torch.Tensor
    """Sum over tokens of the cosine between two layers' inputs, by pair of layers, [L, L] float64."""
    num_tokens: int

    def __add__(self, other: Similarity) -> Similarity:
        return Similarity(self.cosines + other.cosines, self.num_tokens + other.num_tokens)

    @property
    def sim_scores(self) -> list[float]:
        """SimScores of the inputs of layers 0 .. L - 2.

        SimScore(l) is the mean over layers j > l of the mean cosine between the inputs of l and j: the similarity of x
        to the inputs that the later layers' projections were trained for.
        """
        mean = self.cosines / self.num_tokens
        return [float(mean[i, i + 1 :].mean()) for i in range(mean.shape[0] - 1)]


@torch.no_grad()
def collect_similarity(model: Any, batches: Iterable[TokenBatch]) -> Similarity:
    """Run a teacher over `batches` and compare the inputs of its layers, token by token.

    Args:
        model: a causal language model of transformers, or a SwiftKV model in teacher mode.
        batches: token ids [batch, num_tokens], or mappings with `input_ids` and `position_ids`. Tokens that a mapping's
            `loss_mask` or `attention_mask` excludes do not count.

    Raises:
        InvalidInputError: there are no tokens.
    """
    total: Similarity | None = None
    for batch in batches:
        inputs = dict(batch) if isinstance(batch, Mapping) else {"input_ids": batch}
        inputs = {name: tensor.to(model.device) for name, tensor in inputs.items()}
        counted = next((inputs[name] for name in _MASK_NAMES if name in inputs), torch.ones_like(inputs["input_ids"]))
        inputs.pop("loss_mask", None)
        outputs = model.base_model(**inputs, use_cache=False, output_hidden_states=True)
        # The last entry is the output of the last layer, which is no layer's input.
        states = torch.stack([state[counted.bool()] for state in outputs.hidden_states[:-1]])  # [L, tokens, hidden]
        part = _sum_cosines(states)
        total = part if total is None else total + part
    if total is None or not total.num_tokens:
        raise InvalidInputError("similarity got no tokens; give at least one batch of token ids", field="text")
    return total


def recommend_depth(scores: list[float]) -> int:
    """Return the smallest l >= L / 2 such that every SimScore from l on is at least `MIN_SIMSCORE`, else L - 1.

    It is never below half the depth: shallower layers may have scores as high, but quality falls there (table 2).
    """
    num_layers = len(scores) + 1
    depth = num_layers - 1
    while depth > -(-num_layers // 2) and scores[depth - 1] >= MIN_SIMSCORE:
        depth -= 1
    return max(depth, 1)


def _sum_cosines(states: torch.Tensor) -> Similarity:
    """Compute the sums for `states` [L, tokens, hidden]."""
    directions = torch.nn.functional.normalize(states.double(), dim=-1).flatten(1)
    return Similarity((directions @ directions.T).cpu(), states.shape[1])


_NEEDLE_BATCH_SIZE = 20


class UntrainedReport(FrozenBaseModel):
    """Quality of an untrained student with the calibrated start, against its teacher on held-out text."""

    prefill_layers: tuple[int, ...]
    """Layers that prompts run."""
    kl: float
    """KL from the teacher, in nats."""
    perplexity: float
    top1_agreement: float
    needles_found: float | None = None
    """Share of the needles that the student finds; None without needles."""


@dataclass
class _StudentMeasurement:
    """Measures untrained students of one teacher on held-out rows and needles. They share the teacher's weights."""

    teacher: Any
    calibration: Sequence[Mapping[str, Tensor]]
    """Batches with `input_ids` and `position_ids` for the calibrated start."""
    held_out: PackedRows
    max_tokens: int
    """Held-out tokens to measure."""
    needles: Needles | None
    teacher_perplexity: float | None = None
    """Set by the first measurement."""

    def measure_student(self, shape: RequestedStudentShape) -> UntrainedReport:
        """Measure a student of `shape` with the calibrated start. Raises `DataError` if nothing is held out,
        `ModelError` if the family is unknown or its prompts cannot bypass layers."""
        student = make_student(self.teacher, shape, calibration=self.calibration)
        found = None if self.needles is None else self.needles.measure_share_found(student)
        layers = student.config.layer_map.prefill_layers
        return UntrainedReport(prefill_layers=layers, needles_found=found, **self._compare(student).model_dump())

    def measure_bypass(self, bypassed: int) -> float:
        """Return the KL in nats of the teacher if its prompts bypass one layer. Prompts also skip the last layer, after
        its K and V are computed, which changes no output."""
        depth = self.teacher.config.num_hidden_layers
        shape = make_prefill_layers_shape([i for i in range(depth - 1) if i != bypassed], depth, 1)
        return self._compare(make_student(self.teacher, shape)).kl

    def _compare(self, student: Any) -> Quality:
        totals = evaluate(student, self.held_out, max_tokens=self.max_tokens, batch_size=1)
        self.teacher_perplexity = totals.teacher.perplexity
        return totals.student


def make_prefill_layers_shape(
    layers: Sequence[int], num_layers: int, key_value_group_size: int
) -> RequestedStudentShape:
    """Return the shape in which prompts run `layers` and deep tokens keep their own K and V. If fewer than g layers are
    left, they form one group."""
    group_size = min(key_value_group_size, num_layers - layers[-1] - 1)
    return RequestedStudentShape(prefill_layers=layers, key_value_group_size=group_size, decode_key_value="own")


def select_prefill_layers(
    costs: Sequence[float], num_prefill_layers: int, depths: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return one list of `num_prefill_layers` layers for each l of `depths`: the layers < l without the cheapest ones
    to bypass. Layer l - 1 always stays.

    Args:
        costs: cost of bypassing each layer alone, from layer 0 on.
    """
    lists = []
    for depth in depths:
        cheapest = sorted(range(depth - 1), key=costs.__getitem__)[: depth - num_prefill_layers]
        lists.append(tuple(sorted({*range(depth)} - {*cheapest})))
    return lists


def find_smallest_depth(starts: Mapping[int, UntrainedReport], *, max_kl: float, min_found: float = 0.0) -> int | None:
    """Return the smallest l such that it and all larger measured depths have at most `max_kl` and find at least the
    share `min_found` of the needles, if any. None if there is none."""
    smallest = None
    for depth, start in sorted(starts.items(), reverse=True):
        if start.kl > max_kl or (start.needles_found is not None and start.needles_found < min_found):
            break
        smallest = depth
    return smallest


@dataclass(frozen=True)
class Needles:
    """Prompts of similar length, each with a hidden number and a question for it."""

    length: int
    """Tokens of a prompt, without the chat template."""
    prompts: Sequence[Sequence[int]]
    answers: Sequence[str]
    tokenizer: Any

    @classmethod
    def create(cls, tokenizer: Any, length: int, num_samples: int) -> Self:
        """Make the evaluation's needle prompts, with the chat template if the tokenizer has one."""
        texts, answers = zip(
            *(make_needle_prompt(tokenizer, length, i, num_samples) for i in range(num_samples)), strict=True
        )
        if tokenizer.chat_template:
            renderer = ChatRenderer(tokenizer)
            chats = [Conversation([{"role": "user", "content": text}]) for text in texts]
            written = [renderer.render_prompt(chat) for chat in chats]
            prompts = tokenizer(written, add_special_tokens=False)["input_ids"]
        else:
            prompts = tokenizer(list(texts))["input_ids"]
        return cls(length, prompts, answers, tokenizer)

    @property
    def max_total_length(self) -> int:
        return max(map(len, self.prompts)) + MAX_ANSWER_TOKENS

    @torch.no_grad()
    def measure_share_found(self, model: Any) -> float:
        found, padding = 0, self.tokenizer.pad_token_id or 0
        for begin in range(0, len(self.prompts), _NEEDLE_BATCH_SIZE):
            prompts = self.prompts[begin : begin + _NEEDLE_BATCH_SIZE]
            longest = max(map(len, prompts))
            ids = torch.full((len(prompts), longest), padding, device=model.device)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(prompts):
                ids[row, longest - len(prompt) :] = torch.tensor(prompt)
                mask[row, longest - len(prompt) :] = 1
            written = model.generate(
                ids, attention_mask=mask, max_new_tokens=MAX_ANSWER_TOKENS, do_sample=False, pad_token_id=padding
            )
            texts = self.tokenizer.batch_decode(written[:, longest:])
            found += sum(map(operator.contains, texts, self.answers[begin : begin + _NEEDLE_BATCH_SIZE]))
        return found / len(self.prompts)


_HELD_OUT_FRACTION = 0.2
_NUM_DEPTHS = 4
_MAX_NEEDLE_LOSS = 0.05
"""Maximum difference of the shares of needles that the teacher and a recommended depth find."""


class DepthReport(FrozenBaseModel):
    """Costs and quality of one depth l."""

    num_key_value_layers: int
    sim_score: float | None
    """SimScore of the input of layer l (0-based); None for L - 1, which has no layer after it."""
    prefill_flops_ratio: float
    """Executed prefill FLOPs relative to the teacher's, at the model's full context."""
    kl: float | None = None
    """KL of the untrained student on held-out text, in nats; None if not measured."""
    perplexity: float | None = None
    top1_agreement: float | None = None
    needles_found: float | None = None
    """Share of the needles that the untrained student finds; None without needles."""


class Analysis(FrozenBaseModel):
    """Report of `swiftkv analyze`."""

    model: str
    num_hidden_layers: int
    num_tokens: int
    """Number of tokens that the similarity was measured on."""
    sim_scores: tuple[float, ...]
    """SimScore of the inputs of layers 0 .. L - 2 (paper, equation 1)."""
    depths: tuple[DepthReport, ...]
    teacher_perplexity: float | None = None
    """Perplexity on held-out text; None if nothing was measured."""
    needle_length: int | None = None
    """Tokens of a needle prompt; None without needles."""
    teacher_needles_found: float | None = None
    key_value_group_size: int
    """g of the measured students."""
    recommended_num_key_value_layers: int | None
    """Recommended l; None: no measured depth has at most `max_kl`."""
    rule: str
    """Text of the rule that chose the recommended l."""
    bypass_kl: tuple[float, ...] = ()
    """KL of the teacher if prompts bypass one layer, by layer from 0; empty if not measured."""
    lists: tuple[UntrainedReport, ...] = ()
    """Students whose prompts run the first layers, or for each depth those left after bypassing the cheapest."""
    recommended_prefill_layers: tuple[int, ...] | None = None
    """List whose student finds most needles, if the teacher finds them, or else has the lowest KL."""


@dataclass(frozen=True)
class AnalysisOptions:
    """Options of an analysis."""

    max_tokens: int = 16384
    """Tokens for the similarity, for the calibrated start, and for the measurement."""
    max_length: int = 1024
    """Max tokens per sequence; never more than the model's context."""
    measure: bool = False
    """Measure untrained students of the depths."""
    num_prefill_layers: int | None = None
    """Number of layers that prompts run in each measured list of layers; None: no lists."""
    depths: Sequence[int] = ()
    """Depths to measure; empty: all, or with lists the next four above `num_prefill_layers`."""
    key_value_group_size: int = 1
    max_kl: float = 0.2
    """Maximum KL in nats of a recommended depth."""
    needle_length: int | None = None
    """Tokens of needle prompts; None: no needles."""
    needle_samples: int = 20

    @property
    def measures_students(self) -> bool:
        return self.measure or self.num_prefill_layers is not None


def analyze(
    name: str,
    config: dict[str, Any],
    path: str,
    text: Sequence[str],
    options: AnalysisOptions,
    *,
    dtype: str = "auto",
    progress: Callable[[str], object] = str,
) -> Analysis:
    """Compare the inputs of a teacher's layers over `text`.

    Args:
        name: the model, for the report.
        config: its `config.json`.
        path: a directory or hub id that transformers can load.
        text: data sources as in a job's `data.sources`.
        progress: called with a description of each stage.

    Raises:
        InvalidInputError: a depth or number of layers is out of range; needles without measurements, or longer than
            the context.
        DataError: text is missing, empty, or too short to measure on.
        ModelError: an unknown family, or a model that cannot be loaded.
    """
    # 1. read model and text
    num_layers = plan(config).num_hidden_layers
    _check_depths(options.depths, num_layers)
    depths = _choose_depths(options, num_layers)
    progress("Reading")
    model, tokenizer = _load_model(path, dtype)
    context = getattr(model.config, "max_position_embeddings", None)
    needles = _make_needles(tokenizer, options, context)
    seen, held_out = _read_text(text, tokenizer, min(options.max_length, context or options.max_length), options)
    batches = [
        to_tensors(seen.make_padded_batch([i])) for i in select_evaluation_rows(seen, max_tokens=options.max_tokens)
    ]
    # 2. similarity of the layers' inputs
    progress("Comparing the layers' inputs")
    similarity = collect_similarity(model, batches)
    measurement = _StudentMeasurement(model, batches, held_out, options.max_tokens, needles)
    teacher_found = needles.measure_share_found(model) if needles else None
    # 3. untrained students of each depth
    group_size, starts = options.key_value_group_size, dict[int, UntrainedReport]()
    for depth in (options.depths or range(1, num_layers)) if options.measure else ():
        starts[depth] = measurement.measure_student(
            RequestedStudentShape(num_key_value_layers=depth, key_value_group_size=min(group_size, num_layers - depth))
        )
        progress(f"Depth l = {depth}: KL {starts[depth].kl:.3f} nats")
    # 4. untrained students whose prompts bypass layers
    costs, lists = list[float](), list[UntrainedReport]()
    if options.num_prefill_layers is not None:
        for layer in range(depths[-1] - 1):
            costs.append(measurement.measure_bypass(layer))
            progress(f"Prompts bypass layer {layer}: KL {costs[-1]:.3f} nats")
        first = tuple(range(options.num_prefill_layers))
        for layers in (first, *select_prefill_layers(costs, options.num_prefill_layers, depths)):
            lists.append(measurement.measure_student(make_prefill_layers_shape(layers, num_layers, group_size)))
            progress(f"Prompts run layers {format_layers(layers)}: KL {lists[-1].kl:.3f} nats")
    is_tested = teacher_found is not None and teacher_found >= MIN_TEACHER_SHARE_FOUND
    best = min(
        lists, key=lambda report: (-(report.needles_found or 0.0) if is_tested else 0.0, report.kl), default=None
    )
    recommended, rule = _recommend(similarity.sim_scores, starts, teacher_found if is_tested else None, options.max_kl)
    return Analysis(
        model=name,
        num_hidden_layers=num_layers,
        num_tokens=similarity.num_tokens,
        sim_scores=tuple(similarity.sim_scores),
        depths=_build_depth_reports(config, similarity.sim_scores, starts, group_size),
        teacher_perplexity=measurement.teacher_perplexity,
        needle_length=options.needle_length,
        teacher_needles_found=teacher_found,
        key_value_group_size=group_size,
        recommended_num_key_value_layers=recommended,
        rule=rule,
        bypass_kl=tuple(costs),
        lists=tuple(lists),
        recommended_prefill_layers=None if best is None else best.prefill_layers,
    )


def _recommend(
    scores: list[float], starts: Mapping[int, UntrainedReport], teacher_share: float | None, max_kl: float
) -> tuple[int | None, str]:
    """Return the recommended l (None: no depth qualifies), and the text of the rule that chose it. `teacher_share`:
    share of the needles that the teacher finds; None: it finds too few, so the rule ignores needles."""
    if not starts:
        return recommend_depth(
            scores
        ), f"smallest l in the upper half of the layers with a SimScore of at least {MIN_SIMSCORE}"
    rule = f"smallest l for which this and all larger l have a KL of at most {max_kl} nats before training"
    if teacher_share is None:
        return find_smallest_depth(starts, max_kl=max_kl), rule
    min_found = teacher_share - _MAX_NEEDLE_LOSS
    depth = find_smallest_depth(starts, max_kl=max_kl, min_found=min_found)
    return depth, f"{rule} and find at least {min_found:.0%} of the needles"


def _build_depth_reports(
    config: dict[str, Any], scores: Sequence[float], starts: Mapping[int, UntrainedReport], group_size: int
) -> tuple[DepthReport, ...]:
    depths = []
    for layers in range(1, len(scores) + 1):
        measured = starts[layers].model_dump(exclude={"prefill_layers"}) if layers in starts else {}
        size = min(group_size if starts else 1, len(scores) + 1 - layers)
        costs = plan(config, num_key_value_layers=layers, key_value_group_size=size)
        depths.append(
            DepthReport(
                num_key_value_layers=layers,
                sim_score=scores[layers] if layers < len(scores) else None,
                prefill_flops_ratio=costs.executed_prefill_flops_ratio,
                **measured,
            )
        )
    return tuple(depths)


def _choose_depths(options: AnalysisOptions, num_layers: int) -> list[int]:
    """Return the depths for lists of `num_prefill_layers` layers. Raises `InvalidInputError`."""
    wanted = options.num_prefill_layers
    if wanted is None:
        return []
    if options.measure:
        raise InvalidInputError.for_field(
            "num_prefill_layers", wanted, "; it cannot be combined with measure, so omit one of them"
        )
    if not 1 <= wanted <= num_layers - 2:
        raise InvalidInputError.for_field(
            "num_prefill_layers", wanted, f"; use 1..{num_layers - 2} for a model of {num_layers} layers"
        )
    for depth in options.depths:
        if depth <= wanted:
            raise InvalidInputError.for_field(
                "depth", depth, f"; use {wanted + 1}..{num_layers - 1} to keep {wanted} layers"
            )
    return sorted({*options.depths}) or list(range(wanted + 1, min(wanted + _NUM_DEPTHS, num_layers - 1) + 1))


def _make_needles(tokenizer: Any, options: AnalysisOptions, context_length: int | None) -> Needles | None:
    length = options.needle_length
    if length is None:
        return None
    if not options.measures_students:
        raise InvalidInputError.for_field(
            "needle_length",
            length,
            ", but no depth is measured; set measure to test depths with needles",
        )
    needles = Needles.create(tokenizer, length, options.needle_samples)
    longest = needles.max_total_length
    if context_length is not None and longest > context_length:
        raise InvalidInputError(
            f"needle_length {length} needs {longest} tokens with template and answer, but the context has "
            f"{context_length}; use {context_length - longest + length}",
            field="needle_length",
            value=length,
        )
    return needles


def _check_depths(depths: Sequence[int], num_layers: int) -> None:
    for depth in depths:
        if not 1 <= depth < num_layers:
            raise InvalidInputError.for_field(
                "depth", depth, f"; use 1..{num_layers - 1} for a model of {num_layers} layers"
            )


def _load_model(path: str, dtype: str) -> tuple[Any, Any]:
    """Load a teacher, or a student in teacher mode, and the tokenizer."""
    transformers_logging.disable_progress_bar()
    config = read_config(path, field="model")
    tokenizer = load_tokenizer(path, config.vocab_size, field="model")
    model: Any
    if isinstance(config, SwiftKVConfigMixin):
        model = AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype, swiftkv=False)
    else:
        model = load_teacher(path, config, dtype=dtype)
    return model.eval().to("cuda" if torch.cuda.is_available() else "cpu"), tokenizer


def _read_text(
    text: Sequence[str], tokenizer: Any, max_length: int, options: AnalysisOptions
) -> tuple[PackedRows, PackedRows]:
    """Return the rows for measuring similarity, and the held-out rows, which are other documents or other parts of a
    single document."""
    spec = DataSpec(
        sources=tuple(DataSourceSpec(name_or_path=each) for each in text),
        max_length=max_length,
        validation_fraction=_HELD_OUT_FRACTION if options.measures_students else 0.0,
    )
    with tempfile.TemporaryDirectory(
        prefix="rows-"
    ) as directory:  # mapped files stay open after the directory is deleted
        data = prepare_data(
            spec, tokenizer, Path(directory), seed=0, mask_prompts=options.num_prefill_layers is not None
        )
    if len(data.held_out) or not options.measures_students:
        return data.train, data.held_out
    samples = data.train.samples
    if len(samples) < 2:
        raise DataError(
            f"text is a single sequence of {data.train.num_tokens} tokens, so none can be held out for measurements; "
            "use more text or a smaller max_length",
            field="text",
        )
    halves = [
        pack(samples, np.arange(first, len(samples), 2), max_length=max_length, pad_token_id=0) for first in (0, 1)
    ]
    return halves[0], halves[1]
