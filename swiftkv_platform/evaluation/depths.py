"""Cost of each depth l, and of layers that prompts bypass, before any training: the teacher rewired there, measured on
held-out text and on needles. It knows neither training nor where text comes from.
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
"""Needles' prompts of a batch; they are about equally long."""


@dataclass(frozen=True)
class Depth:
    """A student of one depth, its projections started in closed form."""

    num_key_value_layers: int
    teacher: TeacherQuality
    calibrated: Quality
    needles_found: float | None = None
    """Share, by the calibrated start; None: it was not asked for any."""
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
    """Rewire `teacher` in each of `shapes` and compare it with itself on held-out rows. Raises `DataError`: nothing is
    held out; `ModelError`: an unknown family.

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
    """A student at l = `depth` of `num_layers` layers; where fewer than g are left, they form one group."""
    return {
        "num_key_value_layers": depth,
        "key_value_group_size": min(key_value_group_size, num_layers - depth),
    }


def shape_listed(layers: Sequence[int], num_layers: int, key_value_group_size: int) -> dict[str, Any]:
    """A student whose prompts run through a list of layers, and whose deep tokens keep K and V of their own."""
    upper = shape_at(layers[-1] + 1, num_layers, key_value_group_size)["key_value_group_size"]
    return {"prefill_layers": layers, "key_value_group_size": upper, "decode_key_value": "own"}


def measure_bypasses(
    teacher: Any, num_layers: int, *, held_out: PackedRows, max_tokens: int
) -> Iterator[tuple[int, float]]:
    """Have prompts bypass one of the first `num_layers` layers at a time, and give the layer and the KL in nats of the
    positions of `held_out` that count, which lie behind prompts. All else is the teacher: prompts leave out its last
    layer too, whose K and V they have anyway. Raises `DataError`: nothing is held out; `ModelError`: a family whose
    prompts cannot bypass layers.

    Args:
        num_layers: at most L - 2.
    """
    every = range(teacher.config.num_hidden_layers - 1)
    for bypassed in range(num_layers):
        student = convert(teacher, prefill_layers=[i for i in every if i != bypassed], decode_key_value="own")
        yield bypassed, evaluate(student, held_out, max_tokens=max_tokens, batch_size=1).student.kl


def cheapest_lists(costs: Sequence[float], num_prefill_layers: int, depths: Sequence[int]) -> list[tuple[int, ...]]:
    """For each l of `depths` the `num_prefill_layers` layers below it that are left when those that cost least are
    bypassed; layer l - 1 stays.

    Args:
        costs: of bypassing each layer alone, from layer 0 on.
    """
    lists = []
    for depth in depths:
        cheapest = sorted(range(depth - 1), key=costs.__getitem__)[: depth - num_prefill_layers]
        lists.append(tuple(sorted({*range(depth)} - {*cheapest})))
    return lists


def shallowest(depths: Sequence[Depth], *, max_kl: float, min_found: float = 0.0) -> int | None:
    """The smallest l from which on every depth measured starts within `max_kl` nats of its teacher, and finds at least
    the share `min_found` of the needles that it was asked for."""
    chosen = None
    for depth in sorted(depths, key=lambda each: each.num_key_value_layers, reverse=True):
        if depth.calibrated.kl > max_kl or (depth.needles_found is not None and depth.needles_found < min_found):
            break
        chosen = depth.num_key_value_layers
    return chosen


@dataclass(frozen=True)
class Needles:
    """Prompts of about one length, each with a number in it that it asks for."""

    length: int
    """Tokens of a prompt, the chat template's own aside."""
    prompts: Sequence[Sequence[int]]
    answers: Sequence[str]
    tokenizer: Any

    @classmethod
    def create(cls, tokenizer: Any, length: int, num_samples: int) -> Self:
        """The evaluation's prompts, through the chat template where the tokenizer has one."""
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
