"""Early exit. Threshold: the exit head's token is used if it is confident enough. Lossless: the head drafts tokens one
after another, then layers >= l verify all of them at once.

    last known token -> layers < l -> exit head -> draft -> layers < l -> exit head -> draft ...
                                 x                     x                     x  -> layers >= l -> the step's tokens

The draft and the token at a position are drawn with the same noise (see `sampler`), from q and p after the same
processors on the same text. A draft is accepted if both are equal, so the text is the same as with `off`. Rejected
drafts have no effect: their slots are overwritten before anything reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from swiftkv_platform.engine.batch import Batch, ModelInputs, SequenceSpan, make_inputs, select_entries
from swiftkv_platform.engine.drafting import (
    ConfidenceCalibration,
    Draft,
    DraftCosts,
    choose_lookup_size,
    choose_worthwhile_drafts,
    should_evaluate_exit_head,
)
from swiftkv_platform.engine.kv_cache import KVCache
from swiftkv_platform.engine.outputs import NOT_FINITE_MESSAGE, StepResult
from swiftkv_platform.engine.sampler import SamplingRow, choose_tokens
from swiftkv_platform.engine.scheduler import ScheduledSequence
from swiftkv_platform.engine.sequence import Sequence as EngineSequence
from swiftkv_platform.model.generation import exit_confidence
from swiftkv_platform.student_shape import StudentShape

MAX_DRAFTING_STEP_TOKENS = {"cpu": 16, "cuda": 128}
"""Approximate number of tokens at which a step's arithmetic takes as long as reading the weights."""


class DraftPlanner:
    """Planner of drafts, which weighs their cost against how many were accepted."""

    def __init__(self, costs: DraftCosts) -> None:
        self.costs = costs
        self._calibrations = {greedy: ConfidenceCalibration(0.1, 0.999) for greedy in (False, True)}
        """Exit head's reliability, by greedy or not: its most probable token is right more often than a sampled one. It
        learns and forgets slowly."""

    def plan_drafts(
        self, decoding: list[EngineSequence], *, num_sequences: int, num_tokens: int
    ) -> dict[EngineSequence, Draft]:
        """Plan drafts for the decoding sequences of a step that runs `num_tokens` tokens without them and gives
        `num_sequences` sequences a token. Drafts come from the text if its end occurred before and such drafts pay, or
        if the grammar leaves no choice; else from the exit head, if it pays."""
        room = self.costs.max_step_tokens - num_tokens
        drafts: dict[EngineSequence, Draft] = {}
        others: list[EngineSequence] = []
        for sequence in decoding:
            limit = min(sequence.num_draftable_tokens, room)
            found = self._find_lookup_draft(sequence, num_sequences, limit)
            if found:
                drafts[sequence] = Draft(token_ids=found)
                room -= len(found)
            elif sequence.params.num_exit_drafts and limit > 0:
                others.append(sequence)
        for sequence in others:
            sequence.drafts.use_parent_calibration(self._calibrations[sequence.params.temperature == 0.0])
            limit = min(sequence.num_draftable_tokens, sequence.params.num_exit_drafts, room)
            if limit > 0 and should_evaluate_exit_head(sequence.drafts, self.costs, num_sequences, len(others)):
                drafts[sequence] = Draft(num_exit_tokens=limit)
                room -= limit
            else:
                sequence.drafts.decay_exit_statistics()
        return drafts

    def _find_lookup_draft(self, sequence: EngineSequence, num_sequences: int, limit: int) -> tuple[int, ...]:
        limit = min(limit, sequence.params.num_lookup_tokens)
        if limit <= 0:
            return ()
        constraint = sequence.constraint
        forced = () if constraint is None else constraint.get_forced_tokens(sequence.output_token_ids)[:limit]
        if forced:
            return forced  # the grammar hardly allows other tokens
        size = choose_lookup_size(sequence.drafts, self.costs, num_sequences, limit)
        if size == 0:
            sequence.drafts.lookup_acceptance.decay()
            return ()
        found = sequence.drafts.lookup.propose_tokens(sequence.token_ids, size)
        if found and constraint is not None:
            return found[: constraint.count_allowed(sequence.output_token_ids, found)]
        return found


@dataclass
class ExitDrafts:
    """Drafts of the exit head in a step."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    hidden: list[torch.Tensor] = field(default_factory=list)
    """x of each pass, [1, num_drafts, hidden_size]."""
    rows: dict[int, list[int]] = field(default_factory=dict)
    """Rows of the drafts' x in the concatenation of `hidden`, by index into the schedule."""


def draft_from_exit_head(
    model: Any,
    x: torch.Tensor,
    scheduled: Sequence[ScheduledSequence],
    batch: Batch,
    costs: DraftCosts,
    lower: Callable[[ModelInputs], torch.Tensor],
    cache: KVCache,
) -> ExitDrafts:
    """Draft while the exit head is confident enough for another pass of layers < l to pay. `x`: hidden states of the
    step's tokens after layer l - 1, [1, num_tokens, hidden_size]."""
    drafts = ExitDrafts()
    active = [index for index, item in enumerate(scheduled) if item.draft.num_exit_tokens]
    if not active:
        return drafts
    for index in active:
        scheduled[index].sequence.drafts.exit_confidences.clear()
    chances = dict.fromkeys(active, 1.0)  # probabilities that all drafts so far are accepted
    x, count = select_entries(x, [batch.next_token_rows[index][0] for index in active], dim=1), 0
    while active:
        logits = model.exit_logits(x[0]).float()  # [num_active, vocab_size]
        sequences = [scheduled[index].sequence for index in active]
        confidences = _compute_confidences(logits, sequences)
        for index, sequence, confidence in zip(active, sequences, confidences, strict=True):
            chances[index] *= sequence.drafts.exit_calibration.estimate_acceptance(confidence)
        gains = choose_worthwhile_drafts([chances[index] for index in active], costs, len(batch.next_token_rows))
        for at, sequence in enumerate(sequences):
            sequence.drafts.observe_exit_head(gains.get(at, 0.0))
        chosen = list(gains)
        if not chosen:
            break
        active = [active[at] for at in chosen]
        rows = [make_sampling_row(scheduled[index].sequence, drafts.tokens.get(index, [])) for index in active]
        tokens: list[int] = choose_tokens(select_entries(logits, chosen), rows).tolist()
        spans = []
        for row, (index, at, token) in enumerate(zip(active, chosen, tokens, strict=True)):
            sequence, own = scheduled[index].sequence, drafts.tokens.setdefault(index, [])
            spans.append(SequenceSpan([sequence.num_tokens + len(own)], sequence.block_table, [token]))
            own.append(token)
            sequence.drafts.exit_confidences.append(confidences[at])
            drafts.rows.setdefault(index, []).append(count + row)
        x = lower(make_inputs(spans, cache))
        drafts.hidden.append(x)
        count += len(active)
        limits = [scheduled[index].draft.num_exit_tokens for index in active]
        going_on = [row for row, index in enumerate(active) if len(drafts.tokens[index]) < limits[row]]
        active, x = [active[row] for row in going_on], select_entries(x, going_on, dim=1)
    return drafts


def _compute_confidences(logits: torch.Tensor, sequences: Sequence[EngineSequence]) -> list[float]:
    """Return the exit head's confidence by row; 0 if it does not reach the request's threshold."""
    thresholds = [sequence.params.exit_threshold for sequence in sequences]
    found: list[float] = exit_confidence(logits).tolist()
    return [one if one >= threshold else 0.0 for one, threshold in zip(found, thresholds, strict=True)]


def make_sampling_row(sequence: EngineSequence, drafted: Sequence[int]) -> SamplingRow:
    """Make the sampling row of the token that follows the sequence's known ones and `drafted`."""
    token_ids = [*sequence.token_ids, *drafted] if drafted else sequence.token_ids
    num_prompt_tokens = sequence.num_prompt_tokens
    excluded = sequence.get_excluded_token_ids(len(token_ids) - num_prompt_tokens)
    return SamplingRow(sequence.params, sequence.seed, token_ids, num_prompt_tokens, sequence.constraint, excluded)


def accept_drafts(
    sequence: EngineSequence, drafted: Sequence[int], tokens: Sequence[int], *, from_text: bool
) -> StepResult:
    """Return the step's tokens: the accepted drafts and the one after them. `tokens`: the whole model's choices after
    the last known token and after each draft; one more than `drafted`."""
    pairs = zip(drafted, tokens, strict=False)
    num_accepted = next((at for at, (draft, token) in enumerate(pairs) if draft != token), len(drafted))
    if drafted:
        sequence.drafts.observe(from_text=from_text, num_drafts=len(drafted), num_accepted=num_accepted)
    return StepResult(
        token_ids=list(tokens[: num_accepted + 1]), num_draft_tokens=len(drafted), num_accepted_tokens=num_accepted
    )


def truncate_at_error(result: StepResult, finite: Sequence[bool]) -> None:
    """Cut a result at the first token whose logits are not finite, as if the tokens had come one by one."""
    for at in range(len(result.token_ids)):
        if not finite[at]:
            del result.token_ids[at:]
            result.num_accepted_tokens = at
            result.error = NOT_FINITE_MESSAGE
            return


def drop_tokens_of_failed_grammar(sequence: EngineSequence, result: StepResult) -> None:
    """Drop the step's tokens and set the error if the sequence's grammar could not be followed."""
    if sequence.constraint is not None and (failure := sequence.constraint.failure) is not None:
        result.token_ids, result.num_accepted_tokens, result.error = [], 0, failure
        result.error_field = sequence.constraint.name


def estimate_draft_costs(model: Any) -> DraftCosts:
    """Estimate costs from the number of weights that are read, which dominates decode steps of a few tokens."""
    layers = model.model.layers
    lower = sum(map(_count_weights, layers[: model.config.num_key_value_layers]))
    head = _count_weights(model.lm_head)
    whole = sum(map(_count_weights, layers)) + head
    max_step_tokens = MAX_DRAFTING_STEP_TOKENS[model.device.type]
    exit_head = head if StudentShape.from_config(model.config).has_exit_head else 0
    return DraftCosts(lower / whole, exit_head / whole, 1 / max_step_tokens, max_step_tokens)


def _count_weights(module: nn.Module) -> int:
    """Count the weights of matrices by `in_features` and `out_features`, including fused and packed ones, but without
    experts."""
    children: list[Any] = list(module.modules())
    return sum(
        child.in_features * child.out_features
        for child in children
        if hasattr(child, "in_features") and hasattr(child, "out_features")
    )


@dataclass(frozen=True)
class RowLogits:
    """Logits of some rows of a batch, or of some sequences of the schedule."""

    at: dict[int, int]
    """Index in `values` by row or sequence."""
    values: torch.Tensor
    """[num_rows, vocab_size], float32."""


def compute_exit_logits(model: Any, x: torch.Tensor, scheduled: Sequence[ScheduledSequence], batch: Batch) -> RowLogits:
    """Return the exit head's logits of the sequences in mode `threshold` for which it is confident enough, given x [1,
    num_tokens, hidden_size], the hidden states after layer l - 1. A token at layer l has the KV of every later layer,
    so exiting there costs later tokens nothing. Source: paper, appendix E."""
    asking = [i for i in batch.next_token_rows if scheduled[i].sequence.params.uses_exit_threshold]
    if not asking:
        return RowLogits({}, x.new_empty(0))
    logits = model.exit_logits(select_entries(x[0], [batch.next_token_rows[index][0] for index in asking])).float()
    confidences = _compute_confidences(logits, [scheduled[index].sequence for index in asking])
    sure = [row for row, confidence in enumerate(confidences) if confidence]
    return RowLogits({asking[row]: at for at, row in enumerate(sure)}, select_entries(logits, sure))
