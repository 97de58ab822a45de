"""Choose the depth to cut a model at, from SimScore of its layers over real text and, on request, from measurements of
each depth, and of layers that prompts bypass, before any training: the rewired teacher is measured on held-out text and
on needles. Prints and draws nothing.
"""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
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
from swiftkv_platform.evaluation.harness.builtin import ANSWER_TOKENS, TEACHER_FINDS, needle_prompt
from swiftkv_platform.evaluation.quality import Quality, TeacherQuality, evaluate, evaluation_rows
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.model.configuration import read_config
from swiftkv_platform.model.conversion import load_teacher, make_student
from swiftkv_platform.model.packed_attention import to_tensors
from swiftkv_platform.model.similarity import THRESHOLD, Similarity, collect_similarity, recommend_depth
from swiftkv_platform.model.tokenizers import load_tokenizer
from swiftkv_platform.planning import plan
from swiftkv_platform.specs import DataSourceSpec, DataSpec
from swiftkv_platform.student_shape import ShapeRequest, format_layers

_PROMPTS_AT_ONCE = 20
"""Needle prompts per batch; they are about equally long."""


@dataclass(frozen=True)
class Depth:
    """Measurement of a student of one depth, with the calibrated start."""

    num_key_value_layers: int
    teacher: TeacherQuality
    calibrated: Quality
    needles_found: float | None = None
    """Share of the needles that the calibrated start finds; None if not asked."""
    prefill_layers: tuple[int, ...] = ()
    """Layers that prompts run through."""


def measure_starts(
    teacher: Any,
    shapes: Iterable[ShapeRequest],
    *,
    calibration: Sequence[Mapping[str, Tensor]],
    held_out: PackedRows,
    max_tokens: int,
    needles: Needles | None = None,
) -> Iterator[Depth]:
    """Rewire `teacher` in each of `shapes` and compare the result with the teacher on held-out rows. Raises `DataError`
    if nothing is held out, `ModelError` if the family is unknown.

    Args:
        teacher: a causal language model of a known family; its weights are shared with the students, never changed.
        shapes: such as `shape_at` and `shape_listed` make.
        calibration: batches with `input_ids` and `position_ids` for the calibrated start.
        max_tokens: held-out tokens to measure.
    """
    for shape in shapes:
        student = make_student(teacher, shape, calibration=calibration)
        totals = evaluate(student, held_out, max_tokens=max_tokens, batch_size=1)
        found = None if needles is None else needles.share_found(student)
        layers = student.config.layer_map.prefill_layers
        yield Depth(layers[-1] + 1, totals.teacher, totals.student, found, layers)


def shape_at(depth: int, num_layers: int, key_value_group_size: int) -> ShapeRequest:
    """Return the shape for l = `depth` out of `num_layers` layers; if fewer than g layers are left, they form one
    group."""
    group_size = min(key_value_group_size, num_layers - depth)
    return ShapeRequest(num_key_value_layers=depth, key_value_group_size=group_size)


def shape_listed(layers: Sequence[int], num_layers: int, key_value_group_size: int) -> ShapeRequest:
    """Return the shape for prompts that run through `layers` and deep tokens that keep their own K and V."""
    group_size = min(key_value_group_size, num_layers - layers[-1] - 1)
    return ShapeRequest(prefill_layers=layers, key_value_group_size=group_size, decode_key_value="own")


def measure_bypasses(
    teacher: Any, num_layers: int, *, held_out: PackedRows, max_tokens: int
) -> Iterator[tuple[int, float]]:
    """Measure the teacher with prompts that bypass one of the first `num_layers` layers. Yield each layer and the KL in
    nats at the positions of `held_out` that count, which follow prompts. Nothing else differs from the teacher: prompts
    leave out its last layer too, but only after its K and V are computed. Raises `DataError` if nothing is held out,
    `ModelError` if prompts of the family cannot bypass layers.

    Args:
        num_layers: at most L - 2.
    """
    depth = teacher.config.num_hidden_layers
    for bypassed in range(num_layers):
        listed = [i for i in range(depth - 1) if i != bypassed]
        student = make_student(teacher, shape_listed(listed, depth, 1))
        yield bypassed, evaluate(student, held_out, max_tokens=max_tokens, batch_size=1).student.kl


def cheapest_lists(costs: Sequence[float], num_prefill_layers: int, depths: Sequence[int]) -> list[tuple[int, ...]]:
    """Return one list for each l of `depths`: the `num_prefill_layers` layers below l that are left after bypassing the
    cheapest. Layer l - 1 always stays.

    Args:
        costs: cost of bypassing each layer alone, from layer 0 on.
    """
    lists = []
    for depth in depths:
        cheapest = sorted(range(depth - 1), key=costs.__getitem__)[: depth - num_prefill_layers]
        lists.append(tuple(sorted({*range(depth)} - {*cheapest})))
    return lists


def shallowest(depths: Sequence[Depth], *, max_kl: float, min_found: float = 0.0) -> int | None:
    """Return the smallest l from which on every measured depth starts within `max_kl` nats of the teacher and finds at
    least the share `min_found` of its needles, if any. None if there is none."""
    chosen = None
    for depth in sorted(depths, key=lambda each: each.num_key_value_layers, reverse=True):
        if depth.calibrated.kl > max_kl or (depth.needles_found is not None and depth.needles_found < min_found):
            break
        chosen = depth.num_key_value_layers
    return chosen


@dataclass(frozen=True)
class Needles:
    """Prompts of about one length, each with a hidden number and a question for it."""

    length: int
    """Tokens of a prompt without the chat template's."""
    prompts: Sequence[Sequence[int]]
    answers: Sequence[str]
    tokenizer: Any

    @classmethod
    def create(cls, tokenizer: Any, length: int, num_samples: int) -> Self:
        """Make the evaluation's needle prompts, with the chat template if the tokenizer has one."""
        texts, answers = zip(
            *(needle_prompt(tokenizer, length, i, num_samples) for i in range(num_samples)), strict=True
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
    def longest(self) -> int:
        return max(map(len, self.prompts)) + ANSWER_TOKENS

    @torch.no_grad()
    def share_found(self, model: Any) -> float:
        found, padding = 0, self.tokenizer.pad_token_id or 0
        for begin in range(0, len(self.prompts), _PROMPTS_AT_ONCE):
            prompts = self.prompts[begin : begin + _PROMPTS_AT_ONCE]
            longest = max(map(len, prompts))
            ids, mask = (
                torch.tensor(
                    [[fill] * (longest - len(prompt)) + list(of(prompt)) for prompt in prompts], device=model.device
                )
                for fill, of in ((padding, lambda prompt: prompt), (0, lambda prompt: [1] * len(prompt)))
            )
            written = model.generate(
                ids, attention_mask=mask, max_new_tokens=ANSWER_TOKENS, do_sample=False, pad_token_id=padding
            )
            texts = self.tokenizer.batch_decode(written[:, longest:])
            found += sum(map(operator.contains, texts, self.answers[begin : begin + _PROMPTS_AT_ONCE]))
        return found / len(self.prompts)


_HELD_OUT = 0.2
_DEPTHS_TRIED = 4
_MAY_LOSE = 0.05
"""Share of the needles by which a recommended depth may fall short of its teacher."""


class DepthReport(FrozenModel):
    """One candidate l."""

    num_key_value_layers: int
    sim_score: float | None
    """SimScore of the input of layer l (0-based); None for L - 1, which has no layer after it."""
    prefill_flops_ratio: float
    """Prefill FLOPs over the teacher's, as executed, at the model's whole context."""
    kl: float | None = None
    """KL of the calibrated start from the teacher on held-out text, in nats; None if not measured."""
    perplexity: float | None = None
    top1_agreement: float | None = None
    needles_found: float | None = None
    """Share of the needles that the calibrated start finds; None if not asked."""


class ListReport(FrozenModel):
    """One list of layers that prompts run through, and its calibrated start."""

    prefill_layers: tuple[int, ...]
    kl: float
    """KL from the teacher on held-out text that follows prompts, in nats."""
    perplexity: float
    top1_agreement: float
    needles_found: float | None = None
    """Share of the needles found; None if not asked."""


class Analysis(FrozenModel):
    """Report of `swiftkv analyze`."""

    model: str
    num_hidden_layers: int
    num_tokens: int
    """Tokens averaged over for the similarity."""
    sim_scores: tuple[float, ...]
    """SimScore of the inputs of layers 0 .. L - 2 (paper, equation 1)."""
    depths: tuple[DepthReport, ...]
    teacher_perplexity: float | None = None
    """Perplexity on held-out text; None if nothing was measured."""
    needle_length: int | None = None
    """Tokens of a prompt with a needle; None if there were none."""
    teacher_needles_found: float | None = None
    key_value_group_size: int
    """g of the measured students."""
    recommended_num_key_value_layers: int | None
    """Recommended l; None: no measured depth starts within `max_kl`."""
    rule: str
    """Rule behind the recommendation."""
    bypass_kl: tuple[float, ...] = ()
    """KL of the teacher if prompts bypass one layer, by layer from 0; empty if not measured."""
    lists: tuple[ListReport, ...] = ()
    """First layers, and for each l tried those left after bypassing the cheapest; all lists are equally long."""
    recommended_prefill_layers: tuple[int, ...] | None = None
    """The list whose start finds most needles, if the teacher finds them, or else is nearest to the teacher."""


@dataclass(frozen=True)
class AnalysisOptions:
    """Options of an analysis."""

    max_tokens: int = 16384
    """Tokens compared; as many again for the calibrated start, and for its measurement."""
    max_length: int = 1024
    """Tokens a sequence, at most the model's context."""
    measure: bool = False
    """Rewire at each depth and measure."""
    num_prefill_layers: int | None = None
    """Number of layers in each list to measure; None: no lists."""
    depths: Sequence[int] = ()
    """Depths to measure; empty: all. With lists their l; empty: the next four above `num_prefill_layers`."""
    key_value_group_size: int = 1
    max_kl: float = 0.2
    """Largest KL in nats at which a depth is recommended."""
    needle_length: int | None = None
    """Tokens of prompts in which the measured depths must find a number; None: no such prompts."""
    needle_samples: int = 20

    @property
    def measures(self) -> bool:
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
        InvalidInputError: a depth or number of layers is out of range; needles are asked for but nothing is measured,
            or they exceed the context.
        DataError: text is missing, empty, or too short to measure on.
        ModelError: an unknown family, or a model that cannot be loaded.
    """
    num_layers = plan(config).num_hidden_layers
    _check_depths(options.depths, num_layers)
    tried = _tried(options, num_layers)
    progress("Reading")
    model, tokenizer = _load(path, dtype)
    context = getattr(model.config, "max_position_embeddings", None)
    needles = _needles(tokenizer, options, context)
    seen, held_out = _read_text(text, tokenizer, min(options.max_length, context or options.max_length), options)
    batches = [to_tensors(seen.batch([i])) for i in evaluation_rows(seen, max_tokens=options.max_tokens)]
    progress("Comparing the layers' inputs")
    similarity = collect_similarity(model, batches)
    group_size = options.key_value_group_size
    measured_starts = partial(
        measure_starts,
        model,
        calibration=batches,
        held_out=held_out,
        max_tokens=options.max_tokens,
        needles=needles,
    )
    measured: list[Depth] = []
    teacher_found = needles.share_found(model) if needles else None
    if options.measure:
        depths = options.depths or range(1, num_layers)
        for depth in measured_starts(shape_at(depth, num_layers, group_size) for depth in depths):
            measured.append(depth)
            progress(f"Rewired at l = {depth.num_key_value_layers}: KL {depth.calibrated.kl:.3f} nats")
    report = _report(name, config, similarity, measured, teacher_found, options)
    if options.num_prefill_layers is None:
        return report
    costs: list[float] = []
    for layer, kl in measure_bypasses(model, tried[-1] - 1, held_out=held_out, max_tokens=options.max_tokens):
        costs.append(kl)
        progress(f"Prompts bypass layer {layer}: KL {kl:.3f} nats")
    lists: list[Depth] = []
    listed = [tuple(range(options.num_prefill_layers)), *cheapest_lists(costs, options.num_prefill_layers, tried)]
    for depth in measured_starts(shape_listed(layers, num_layers, group_size) for layers in listed):
        lists.append(depth)
        progress(f"Prompts run layers {format_layers(depth.prefill_layers)}: KL {depth.calibrated.kl:.3f} nats")
    return report.model_copy(update=_of_lists(costs, lists, teacher_found))


def _tried(options: AnalysisOptions, num_layers: int) -> list[int]:
    """Return the depths at which layers are bypassed until `num_prefill_layers` are left. Raises
    `InvalidInputError`."""
    wanted = options.num_prefill_layers
    if wanted is None:
        return []
    if options.measure:
        raise InvalidInputError.of(
            "num_prefill_layers", wanted, ", and measure tries depths without a list of layers; leave either out"
        )
    if not 1 <= wanted <= num_layers - 2:
        raise InvalidInputError.of(
            "num_prefill_layers", wanted, f"; a model of {num_layers} layers accepts 1..{num_layers - 2}"
        )
    for depth in options.depths:
        if depth <= wanted:
            raise InvalidInputError.of(
                "depth", depth, f"; to keep {wanted} layers, {wanted + 1}..{num_layers - 1} are accepted"
            )
    return sorted({*options.depths}) or list(range(wanted + 1, min(wanted + _DEPTHS_TRIED, num_layers - 1) + 1))


def _of_lists(costs: Sequence[float], lists: Sequence[Depth], teacher_found: float | None) -> dict[str, Any]:
    """Fields of the analysis that are of lists."""
    judges = teacher_found is not None and teacher_found >= TEACHER_FINDS
    best = min(lists, key=lambda each: (-(each.needles_found or 0.0) if judges else 0.0, each.calibrated.kl))
    reports = [
        ListReport(prefill_layers=each.prefill_layers, needles_found=each.needles_found, **each.calibrated.model_dump())
        for each in lists
    ]
    return {
        "bypass_kl": tuple(costs),
        "lists": tuple(reports),
        "recommended_prefill_layers": best.prefill_layers,
        "teacher_perplexity": lists[0].teacher.perplexity,
    }


def _needles(tokenizer: Any, options: AnalysisOptions, context: int | None) -> Needles | None:
    length = options.needle_length
    if length is None:
        return None
    if not options.measures:
        raise InvalidInputError.of(
            "needle_length",
            length,
            ", but no depth is measured; set measure, so that calibrated starts are tested with needles",
        )
    needles = Needles.create(tokenizer, length, options.needle_samples)
    longest = needles.longest
    if context is not None and longest > context:
        raise InvalidInputError(
            f"needle_length is {length}, which is {longest} tokens with template and answer, and the context has "
            f"{context}; use {context - longest + length}",
            field="needle_length",
            value=length,
        )
    return needles


def _check_depths(depths: Sequence[int], num_layers: int) -> None:
    for depth in depths:
        if not 1 <= depth < num_layers:
            raise InvalidInputError.of("depth", depth, f"; a model of {num_layers} layers accepts 1..{num_layers - 1}")


def _load(path: str, dtype: str) -> tuple[Any, Any]:
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
    """Return text to compare on and held-out text: other documents or, if there is only one, other parts of it."""
    spec = DataSpec(
        sources=tuple(DataSourceSpec(name_or_path=each) for each in text),
        max_length=max_length,
        validation_fraction=_HELD_OUT if options.measures else 0.0,
    )
    with tempfile.TemporaryDirectory(prefix="rows-") as directory:  # its mapped files stay open after it is deleted
        data = prepare_data(spec, tokenizer, Path(directory), seed=0, splits=options.num_prefill_layers is not None)
    if len(data.held_out) or not options.measures:
        return data.train, data.held_out
    samples = data.train.samples
    if len(samples) < 2:
        raise DataError(
            f"text is a single sequence of {data.train.num_tokens} tokens, but some must be held out for measuring; "
            "use more text or a smaller max_length",
            field="text",
        )
    halves = [
        pack(samples, np.arange(first, len(samples), 2), max_length=max_length, pad_token_id=0) for first in (0, 1)
    ]
    return halves[0], halves[1]


def _report(
    name: str,
    config: dict[str, Any],
    similarity: Similarity,
    measured: Sequence[Depth],
    teacher_found: float | None,
    options: AnalysisOptions,
) -> Analysis:
    scores = similarity.scores
    by_depth = {depth.num_key_value_layers: depth for depth in measured}
    depths = []
    for layers in range(1, len(scores) + 1):
        quality: dict[str, Any] = {}
        if layers in by_depth:
            depth = by_depth[layers]
            quality = depth.calibrated.model_dump() | {"needles_found": depth.needles_found}
        group_size = min(options.key_value_group_size if measured else 1, len(scores) + 1 - layers)
        costs = plan(config, num_key_value_layers=layers, key_value_group_size=group_size)
        score = scores[layers] if layers < len(scores) else None
        depths.append(
            DepthReport(
                num_key_value_layers=layers,
                sim_score=score,
                prefill_flops_ratio=costs.executed_prefill_flops_ratio,
                **quality,
            )
        )
    if measured:
        judges = teacher_found is not None and teacher_found >= TEACHER_FINDS
        least = teacher_found - _MAY_LOSE if judges and teacher_found is not None else 0.0
        recommended = shallowest(measured, max_kl=options.max_kl, min_found=least)
        rule = f"smallest l from which the calibrated start is within {options.max_kl} nats of the teacher"
        if judges:
            rule += f" and finds at least {least:.0%} of the needles"
    else:
        recommended = recommend_depth(scores)
        rule = f"smallest l from half of the layers on where SimScore is at least {THRESHOLD}"
    return Analysis(
        model=name,
        num_hidden_layers=len(scores) + 1,
        num_tokens=similarity.num_tokens,
        sim_scores=tuple(scores),
        depths=tuple(depths),
        teacher_perplexity=measured[0].teacher.perplexity if measured else None,
        needle_length=options.needle_length,
        teacher_needles_found=teacher_found,
        key_value_group_size=options.key_value_group_size,
        recommended_num_key_value_layers=recommended,
        rule=rule,
    )
