"""Choose the depth to cut a model at, from SimScore of its layers over real text and, on request, from measurements of
each depth, and of layers that prompts bypass, before any training: the rewired teacher is measured on held-out text and
on needles. Prints and draws nothing.
"""

from __future__ import annotations

import operator
import tempfile
from collections.abc import Callable, Mapping, Sequence
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
from swiftkv_platform.evaluation.harness.builtin import ANSWER_TOKENS, TEACHER_FINDS, needle_prompt
from swiftkv_platform.evaluation.quality import Quality, evaluate, evaluation_rows
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.model.configuration import read_config
from swiftkv_platform.model.conversion import load_teacher, make_student
from swiftkv_platform.model.packed_attention import to_tensors
from swiftkv_platform.model.similarity import MIN_SIMSCORE, collect_similarity, recommend_depth
from swiftkv_platform.model.tokenizers import load_tokenizer
from swiftkv_platform.planning import plan
from swiftkv_platform.specs import DataSourceSpec, DataSpec
from swiftkv_platform.student_shape import ShapeRequest, format_layers

_PROMPTS_AT_ONCE = 20
"""Needle prompts per batch; they are about equally long."""


class StartReport(FrozenModel):
    """A student with the calibrated start, before any training, against its teacher on held-out text."""

    prefill_layers: tuple[int, ...]
    """Layers that prompts run through."""
    kl: float
    """KL from the teacher, in nats."""
    perplexity: float
    top1_agreement: float
    needles_found: float | None = None
    """Share of the needles found; None if not asked."""


@dataclass
class _Measurement:
    """Measures students of one teacher, whose weights they share, on held-out rows and needles."""

    teacher: Any
    calibration: Sequence[Mapping[str, Tensor]]
    """Batches with `input_ids` and `position_ids` for the calibrated start."""
    held_out: PackedRows
    max_tokens: int
    """Held-out tokens to measure."""
    needles: Needles | None
    teacher_perplexity: float | None = None
    """Set by the first measurement."""

    def measure(self, shape: ShapeRequest) -> StartReport:
        """Rewire the teacher in `shape`, with the calibrated start. Raises `DataError` if nothing is held out,
        `ModelError` if the family is unknown or its prompts cannot bypass layers."""
        student = make_student(self.teacher, shape, calibration=self.calibration)
        found = None if self.needles is None else self.needles.share_found(student)
        layers = student.config.layer_map.prefill_layers
        return StartReport(prefill_layers=layers, needles_found=found, **self._compare(student).model_dump())

    def measure_bypass(self, bypassed: int) -> float:
        """Return the KL in nats of the teacher whose prompts bypass one layer. Nothing else differs: prompts leave out
        its last layer too, but only after its K and V are computed."""
        depth = self.teacher.config.num_hidden_layers
        shape = shape_listed([i for i in range(depth - 1) if i != bypassed], depth, 1)
        return self._compare(make_student(self.teacher, shape)).kl

    def _compare(self, student: Any) -> Quality:
        totals = evaluate(student, self.held_out, max_tokens=self.max_tokens, batch_size=1)
        self.teacher_perplexity = totals.teacher.perplexity
        return totals.student


def shape_listed(layers: Sequence[int], num_layers: int, key_value_group_size: int) -> ShapeRequest:
    """Return the shape for prompts that run through `layers` and deep tokens that keep their own K and V; if fewer than
    g layers are left, they form one group."""
    group_size = min(key_value_group_size, num_layers - layers[-1] - 1)
    return ShapeRequest(prefill_layers=layers, key_value_group_size=group_size, decode_key_value="own")


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


def shallowest(starts: Mapping[int, StartReport], *, max_kl: float, min_found: float = 0.0) -> int | None:
    """Return the smallest l from which on every measured depth, by l, starts within `max_kl` nats of the teacher and
    finds at least the share `min_found` of its needles, if any. None if there is none."""
    chosen = None
    for depth, start in sorted(starts.items(), reverse=True):
        if start.kl > max_kl or (start.needles_found is not None and start.needles_found < min_found):
            break
        chosen = depth
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
            ids = torch.full((len(prompts), longest), padding, device=model.device)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(prompts):
                ids[row, longest - len(prompt) :] = torch.tensor(prompt)
                mask[row, longest - len(prompt) :] = 1
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
    lists: tuple[StartReport, ...] = ()
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
    batches = [to_tensors(seen.make_padded_batch([i])) for i in evaluation_rows(seen, max_tokens=options.max_tokens)]
    progress("Comparing the layers' inputs")
    similarity = collect_similarity(model, batches)
    measurement = _Measurement(model, batches, held_out, options.max_tokens, needles)
    teacher_found = needles.share_found(model) if needles else None
    group_size, starts = options.key_value_group_size, dict[int, StartReport]()
    for depth in (options.depths or range(1, num_layers)) if options.measure else ():
        starts[depth] = measurement.measure(
            ShapeRequest(num_key_value_layers=depth, key_value_group_size=min(group_size, num_layers - depth))
        )
        progress(f"Rewired at l = {depth}: KL {starts[depth].kl:.3f} nats")
    costs, lists = list[float](), list[StartReport]()
    if options.num_prefill_layers is not None:
        for layer in range(tried[-1] - 1):
            costs.append(measurement.measure_bypass(layer))
            progress(f"Prompts bypass layer {layer}: KL {costs[-1]:.3f} nats")
        first = tuple(range(options.num_prefill_layers))
        for layers in (first, *cheapest_lists(costs, options.num_prefill_layers, tried)):
            lists.append(measurement.measure(shape_listed(layers, num_layers, group_size)))
            progress(f"Prompts run layers {format_layers(layers)}: KL {lists[-1].kl:.3f} nats")
    judging = teacher_found if teacher_found is not None and teacher_found >= TEACHER_FINDS else None
    best = min(lists, key=lambda each: (-(each.needles_found or 0.0) if judging else 0.0, each.kl), default=None)
    recommended, rule = _recommend(similarity.scores, starts, judging, options.max_kl)
    return Analysis(
        model=name,
        num_hidden_layers=num_layers,
        num_tokens=similarity.num_tokens,
        sim_scores=tuple(similarity.scores),
        depths=_depths(config, similarity.scores, starts, group_size),
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
    scores: list[float], starts: Mapping[int, StartReport], judging: float | None, max_kl: float
) -> tuple[int | None, str]:
    """Return the recommended l, and the rule behind it. `judging`: the share of needles that a teacher finds which
    finds enough."""
    if not starts:
        return recommend_depth(
            scores
        ), f"smallest l from half of the layers on where SimScore is at least {MIN_SIMSCORE}"
    rule = f"smallest l from which the calibrated start is within {max_kl} nats of the teacher"
    if judging is None:
        return shallowest(starts, max_kl=max_kl), rule
    least = judging - _MAY_LOSE
    return shallowest(starts, max_kl=max_kl, min_found=least), f"{rule} and finds at least {least:.0%} of the needles"


def _depths(
    config: dict[str, Any], scores: Sequence[float], starts: Mapping[int, StartReport], group_size: int
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


def _tried(options: AnalysisOptions, num_layers: int) -> list[int]:
    """Return the depths at which layers are bypassed until `num_prefill_layers` are left. Raises
    `InvalidInputError`."""
    wanted = options.num_prefill_layers
    if wanted is None:
        return []
    if options.measure:
        raise InvalidInputError.for_field(
            "num_prefill_layers", wanted, ", and measure tries depths without a list of layers; leave either out"
        )
    if not 1 <= wanted <= num_layers - 2:
        raise InvalidInputError.for_field(
            "num_prefill_layers", wanted, f"; a model of {num_layers} layers accepts 1..{num_layers - 2}"
        )
    for depth in options.depths:
        if depth <= wanted:
            raise InvalidInputError.for_field(
                "depth", depth, f"; to keep {wanted} layers, {wanted + 1}..{num_layers - 1} are accepted"
            )
    return sorted({*options.depths}) or list(range(wanted + 1, min(wanted + _DEPTHS_TRIED, num_layers - 1) + 1))


def _needles(tokenizer: Any, options: AnalysisOptions, context: int | None) -> Needles | None:
    length = options.needle_length
    if length is None:
        return None
    if not options.measures:
        raise InvalidInputError.for_field(
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
            raise InvalidInputError.for_field(
                "depth", depth, f"; a model of {num_layers} layers accepts 1..{num_layers - 1}"
            )


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
        data = prepare_data(
            spec, tokenizer, Path(directory), seed=0, mask_prompts=options.num_prefill_layers is not None
        )
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
