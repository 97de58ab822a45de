"""Cost of each depth l, and of layers that prompts bypass, before any training: the rewired teacher is measured on
held-out text and on needles.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from swiftkv_platform.data.chat import ChatRenderer
from swiftkv_platform.data.formats import Conversation
from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.evaluation.harness.needle import ANSWER_TOKENS, needle_prompt
from swiftkv_platform.evaluation.quality import Quality, TeacherQuality, evaluate
from swiftkv_platform.model import convert

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
    shapes: Iterable[Mapping[str, Any]],
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
        shapes: arguments of `convert`, such as `shape_at` and `shape_listed` make.
        calibration: batches with `input_ids` and `position_ids` for the calibrated start.
        max_tokens: held-out tokens to measure.
    """
    for shape in shapes:
        student = convert(teacher, **shape, calibration=calibration)
        totals = evaluate(student, held_out, max_tokens=max_tokens, batch_size=1)
        found = None if needles is None else needles.share_found(student)
        layers = student.config.layer_map.prefill_layers
        yield Depth(layers[-1] + 1, totals.teacher, totals.student, found, layers)


def shape_at(depth: int, num_layers: int, key_value_group_size: int) -> dict[str, Any]:
    """Return the arguments of `convert` for l = `depth` out of `num_layers` layers; if fewer than g layers are left,
    they form one group."""
    return {
        "num_key_value_layers": depth,
        "key_value_group_size": min(key_value_group_size, num_layers - depth),
    }


def shape_listed(layers: Sequence[int], num_layers: int, key_value_group_size: int) -> dict[str, Any]:
    """Return the arguments of `convert` for prompts that run through `layers` and deep tokens that keep their own K and
    V."""
    upper = shape_at(layers[-1] + 1, num_layers, key_value_group_size)["key_value_group_size"]
    return {"prefill_layers": layers, "key_value_group_size": upper, "decode_key_value": "own"}


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
    every = range(teacher.config.num_hidden_layers - 1)
    for bypassed in range(num_layers):
        student = convert(teacher, prefill_layers=[i for i in every if i != bypassed], decode_key_value="own")
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
            renderer = ChatRenderer.for_tokenizer(tokenizer)
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
