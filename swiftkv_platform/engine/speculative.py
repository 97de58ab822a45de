"""Early exit. `threshold`: the exit head's token is used if its confidence reaches the threshold. `lossless`: the exit
head drafts tokens one after another, then layers >= l verify all of them in one pass.

    last known token -> layers < l -> exit head -> draft -> layers < l -> exit head -> draft ...
                                 x                     x                     x  -> layers >= l -> the step's tokens

The draft (from q) and the model's token (from p) at a position are sampled with the same noise (see `sampler`) after
the same logits processors. A draft is accepted if both are equal, so the text is the same as with `off`. Rejected
drafts have no effect: their KV slots are overwritten before they are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from swiftkv_platform.engine.batch import Batch, ModelInputs, SequenceSpan, make_inputs, select_along_dim
from swiftkv_platform.engine.drafting import (
    ConfidenceCalibration,
    Draft,
    DraftCosts,
    choose_num_lookup_tokens,
    choose_worthwhile_drafts,
    should_evaluate_exit_head,
)
from swiftkv_platform.engine.kv_cache import KVCache
from swiftkv_platform.engine.outputs import NOT_FINITE_MESSAGE, StepResult
from swiftkv_platform.engine.sampler import SamplingRow, choose_tokens
from swiftkv_platform.engine.scheduler import ScheduledSequence
from swiftkv_platform.engine.sequence import Sequence as EngineSequence
from swiftkv_platform.model.generation import compute_exit_confidence
from swiftkv_platform.student_shape import StudentShape

MAX_DRAFTING_STEP_TOKENS = {"cpu": 16, "cuda": 128}
"""Approximate number of tokens at which a step's arithmetic takes as long as reading the weights, by device type."""


class DraftPlanner:
    """Decides which sequences draft, and how many tokens, from the cost of drafts and past acceptance."""

    def __init__(self, costs: DraftCosts) -> None:
        self.costs = costs
        self._calibrations = {greedy: ConfidenceCalibration(0.1, 0.999) for greedy in (False, True)}
        """Calibration of the exit head by greedy or sampled: its most probable token is right more often than a sampled
        one. It changes slowly."""

    def plan_drafts(
        self, decoding: list[EngineSequence], *, num_sequences: int, num_tokens: int
    ) -> dict[EngineSequence, Draft]:
        """Plan drafts for the `decoding` sequences of a step.

        Args:
            num_sequences: number of sequences that get a token in the step.
            num_tokens: number of the step's tokens without drafts.
        """
        num_free = self.costs.max_step_tokens - num_tokens
        # 1. draft tokens that the grammar forces, or that prompt lookup finds
        drafts: dict[EngineSequence, Draft] = {}
        others: list[EngineSequence] = []
        for sequence in decoding:
            limit = min(sequence.num_draftable_tokens, num_free)
            found = self._find_lookup_draft(sequence, num_sequences, limit)
            if found:
                drafts[sequence] = Draft(token_ids=found)
                num_free -= len(found)
            elif sequence.params.num_exit_drafts and limit > 0:
                others.append(sequence)
        # 2. let the exit head draft for the others, if that is worthwhile
        for sequence in others:
            sequence.drafts.use_parent_calibration(self._calibrations[sequence.params.temperature == 0.0])
            limit = min(sequence.num_draftable_tokens, sequence.params.num_exit_drafts, num_free)
            if limit > 0 and should_evaluate_exit_head(sequence.drafts, self.costs, num_sequences, len(others)):
                drafts[sequence] = Draft(num_exit_tokens=limit)
                num_free -= limit
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
            return forced  # other tokens are unlikely
        size = choose_num_lookup_tokens(sequence.drafts, self.costs, num_sequences, limit)
        if size == 0:
            sequence.drafts.lookup_acceptance.decay()
            return ()
        found = sequence.drafts.lookup.propose_tokens(sequence.token_ids, size)
        if found and constraint is not None:
            return found[: constraint.count_allowed_tokens(sequence.output_token_ids, found)]
        return found


class AdapterDraftPlanner:
    """Plans the drafts of an engine's sequences by the `DraftPlanner` of each sequence's model. `planners`: by adapter;
    None: the engine's own model."""

    def __init__(self, planners: Mapping[str | None, DraftPlanner]) -> None:
        self._planners = planners

    def plan_drafts(
        self, decoding: list[EngineSequence], *, num_sequences: int, num_tokens: int
    ) -> dict[EngineSequence, Draft]:
        """Plan as `DraftPlanner.plan_drafts`."""
        drafts: dict[EngineSequence, Draft] = {}
        for adapter in dict.fromkeys(sequence.adapter for sequence in decoding):
            own = [sequence for sequence in decoding if sequence.adapter == adapter]
            planned = self._planners[adapter].plan_drafts(own, num_sequences=num_sequences, num_tokens=num_tokens)
            num_tokens += sum(draft.size for draft in planned.values())
            drafts |= planned
        return drafts


@dataclass
class ExitDrafts:
    """Drafts of the exit head in a step."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    hidden: list[torch.Tensor] = field(default_factory=list)
    """x (hidden states after layer l - 1) of each draft pass, [1, num_drafts, hidden_size]."""
    rows_by_index: dict[int, list[int]] = field(default_factory=dict)
    """Rows of a sequence's drafts in the concatenation of `hidden`, by index into the schedule."""


def draft_from_exit_head(
    model: Any,
    x: torch.Tensor,
    scheduled: Sequence[ScheduledSequence],
    batch: Batch,
    costs: DraftCosts,
    lower: Callable[[ModelInputs], torch.Tensor],
    cache: KVCache,
) -> ExitDrafts:
    """Draft token by token while the exit head is confident enough for another pass of layers < l.

    Args:
        x: hidden states of the step's tokens after layer l - 1, [1, num_tokens, hidden_size].
        lower: runs layers < l over tokens, and returns their x.
    """
    drafts = ExitDrafts()
    active = [index for index, item in enumerate(scheduled) if item.draft.num_exit_tokens]
    if not active:
        return drafts
    for index in active:
        scheduled[index].sequence.drafts.exit_confidences.clear()
    acceptance = dict.fromkeys(active, 1.0)  # probability that all drafts so far are accepted
    x, count = select_along_dim(x, [batch.next_token_rows[index][0] for index in active], dim=1), 0
    while active:
        # 1. choose the sequences for which another draft is worthwhile
        logits = model.exit_logits(x[0]).float()  # [num_active, vocab_size]
        sequences = [scheduled[index].sequence for index in active]
        confidences = _compute_confidences(logits, sequences)
        for index, sequence, confidence in zip(active, sequences, confidences, strict=True):
            acceptance[index] *= sequence.drafts.exit_calibration.estimate_acceptance(confidence)
        gains = choose_worthwhile_drafts([acceptance[index] for index in active], costs, len(batch.next_token_rows))
        for at, sequence in enumerate(sequences):
            sequence.drafts.record_exit_head_gain(gains.get(at, 0.0))
        chosen = list(gains)
        if not chosen:
            break
        # 2. sample their drafts
        active = [active[at] for at in chosen]
        rows = [make_sampling_row(scheduled[index].sequence, drafts.tokens.get(index, [])) for index in active]
        tokens: list[int] = choose_tokens(select_along_dim(logits, chosen), rows).tolist()
        # 3. run layers < l over the drafts
        spans = []
        for row, (index, at, token) in enumerate(zip(active, chosen, tokens, strict=True)):
            sequence, own = scheduled[index].sequence, drafts.tokens.setdefault(index, [])
            spans.append(SequenceSpan([sequence.num_tokens + len(own)], sequence.block_table, [token]))
            own.append(token)
            sequence.drafts.exit_confidences.append(confidences[at])
            drafts.rows_by_index.setdefault(index, []).append(count + row)
        x = lower(make_inputs(spans, cache))
        drafts.hidden.append(x)
        count += len(active)
        # 4. drop sequences that have reached their limit
        limits = [scheduled[index].draft.num_exit_tokens for index in active]
        remaining = [row for row, index in enumerate(active) if len(drafts.tokens[index]) < limits[row]]
        active, x = [active[row] for row in remaining], select_along_dim(x, remaining, dim=1)
    return drafts


def _compute_confidences(logits: torch.Tensor, sequences: Sequence[EngineSequence]) -> list[float]:
    """Return the exit head's confidence per row; 0 if it is below the request's threshold."""
    thresholds = [sequence.params.exit_threshold for sequence in sequences]
    found: list[float] = compute_exit_confidence(logits).tolist()
    return [one if one >= threshold else 0.0 for one, threshold in zip(found, thresholds, strict=True)]


def make_sampling_row(sequence: EngineSequence, drafted: Sequence[int]) -> SamplingRow:
    """Make the sampling input for the token after the sequence's known tokens and `drafted`."""
    token_ids = [*sequence.token_ids, *drafted] if drafted else sequence.token_ids
    num_prompt_tokens = sequence.num_prompt_tokens
    excluded = sequence.get_excluded_token_ids(len(token_ids) - num_prompt_tokens)
    return SamplingRow(sequence.params, sequence.seed, token_ids, num_prompt_tokens, sequence.constraint, excluded)


def accept_drafts(
    sequence: EngineSequence, drafted: Sequence[int], tokens: Sequence[int], *, from_text: bool
) -> StepResult:
    """Return the step's tokens: the accepted drafts and one more token. `tokens`: the model's choices after the last
    known token and after each draft, so one more than `drafted`."""
    pairs = zip(drafted, tokens, strict=False)
    num_accepted = next((at for at, (draft, token) in enumerate(pairs) if draft != token), len(drafted))
    if drafted:
        sequence.drafts.record_draft_results(from_text=from_text, num_drafts=len(drafted), num_accepted=num_accepted)
    return StepResult(
        token_ids=list(tokens[: num_accepted + 1]), num_draft_tokens=len(drafted), num_accepted_tokens=num_accepted
    )


def drop_non_finite_tokens(result: StepResult, has_finite_logits: Sequence[bool]) -> None:
    """Drop the result's tokens from the first one whose logits are not finite, and set the error.
    `has_finite_logits`: by token."""
    for at in range(len(result.token_ids)):
        if not has_finite_logits[at]:
            del result.token_ids[at:]
            result.num_accepted_tokens = at
            result.error = NOT_FINITE_MESSAGE
            return


def drop_tokens_of_failed_grammar(sequence: EngineSequence, result: StepResult) -> None:
    """If the sequence's grammar has failed, drop the step's tokens and set the error."""
    if sequence.constraint is not None and (failure := sequence.constraint.failure) is not None:
        result.token_ids, result.num_accepted_tokens, result.error = [], 0, failure
        result.error_field = sequence.constraint.name


def estimate_draft_costs(model: Any) -> DraftCosts:
    """Estimate costs from the number of weights that are read, which dominates small decode steps."""
    layers = model.model.layers
    lower = sum(map(_count_weights, layers[: model.config.num_key_value_layers]))
    head = _count_weights(model.lm_head)
    whole = sum(map(_count_weights, layers)) + head
    max_step_tokens = MAX_DRAFTING_STEP_TOKENS[model.device.type]
    exit_head = head if StudentShape.from_config(model.config).has_exit_head else 0
    return DraftCosts(lower / whole, exit_head / whole, 1 / max_step_tokens, max_step_tokens)


def _count_weights(module: nn.Module) -> int:
    """Count the weights of linear modules, including fused and packed ones, but without experts."""
    children: list[Any] = list(module.modules())
    return sum(
        child.in_features * child.out_features
        for child in children
        if hasattr(child, "in_features") and hasattr(child, "out_features")
    )


@dataclass(frozen=True)
class RowLogits:
    """Logits of some rows of a batch, or of some sequences of the schedule."""

    index_by_row: dict[int, int]
    """Index into `values` of each row or sequence."""
    values: torch.Tensor
    """[num_rows, vocab_size], float32."""


def compute_exit_logits(model: Any, x: torch.Tensor, scheduled: Sequence[ScheduledSequence], batch: Batch) -> RowLogits:
    """Return the exit head's logits of the sequences in mode `threshold` whose confidence reaches the threshold. At
    layer l, a token's K and V of all later layers are known, so later tokens need nothing more. Source: paper, appendix
    E.

    Args:
        x: hidden states after layer l - 1, [1, num_tokens, hidden_size].
    """
    candidates = [
        i
        for i in batch.next_token_rows
        if scheduled[i].sequence.params.uses_exit_threshold and scheduled[i].sequence.can_exit
    ]
    if not candidates:
        return RowLogits({}, x.new_empty(0))
    logits = model.exit_logits(
        select_along_dim(x[0], [batch.next_token_rows[index][0] for index in candidates])
    ).float()
    confidences = _compute_confidences(logits, [scheduled[index].sequence for index in candidates])
    exits = [row for row, confidence in enumerate(confidences) if confidence]
    return RowLogits({candidates[row]: at for at, row in enumerate(exits)}, select_along_dim(logits, exits))
