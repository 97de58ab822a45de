"""The model runner: runs a step's tokens through the model and chooses the next tokens.

embed -> layers < l -> K, V of all later layers        all scheduled tokens
         token selection -> layers >= l -> lm_head     tokens whose logits are needed: the last known token of each
                                                       sequence, and prompt tokens with log-probabilities
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from itertools import pairwise
from math import isfinite
from typing import Any

import torch

from swiftkv_platform.engine import kernels
from swiftkv_platform.engine.attention import PAGED_ATTENTION
from swiftkv_platform.engine.batch import (
    Batch,
    BypassRows,
    DeepRowsWriter,
    ModelInputs,
    SequenceSpan,
    make_batch,
    make_inputs,
    make_pass_context,
    read_shared_key_values,
    select_along_dim,
    write_and_read_shared_key_values,
    write_shared_key_values,
)
from swiftkv_platform.engine.kv_cache import KVCache
from swiftkv_platform.engine.native_layers import NativeLayer
from swiftkv_platform.engine.outputs import NOT_FINITE_MESSAGE, StepResult
from swiftkv_platform.engine.ranks import BroadcastingDecoder
from swiftkv_platform.engine.sampler import SamplingRow, choose_tokens, compute_logprobs
from swiftkv_platform.engine.scheduler import ScheduledSequence
from swiftkv_platform.engine.speculative import (
    DraftPlanner,
    ExitDrafts,
    RowLogits,
    accept_drafts,
    compute_exit_logits,
    draft_from_exit_head,
    drop_non_finite_tokens,
    drop_tokens_of_failed_grammar,
    make_sampling_row,
)
from swiftkv_platform.model.context import DecoderContext


class ModelRunner:
    """Runs steps of a model with its KV cache."""

    def __init__(
        self, model: Any, kv_cache: KVCache, drafting: DraftPlanner, decoder: Any = None, *, num_token_ids: int
    ) -> None:
        """Switch the model to paged attention.

        Args:
            decoder: runs the layers; None: the model's own decoder.
            num_token_ids: see `ModelDescription`.
        """
        model.set_attn_implementation(PAGED_ATTENTION)
        self._model = model
        self._decoder = decoder or model.model
        self._kv_cache = kv_cache
        self._drafting = drafting
        self._num_token_ids = num_token_ids
        self._has_own_deep_kv = bool(model.config.layer_map.deep_leaders)
        self._uses_native_layers = all(isinstance(layer, NativeLayer) for layer in model.model.layers)
        self._has_upper_layers = model.config.num_hidden_layers > model.config.num_key_value_layers

    @property
    def device(self) -> torch.device:
        return torch.device(self._model.device)

    @property
    def kv_cache(self) -> KVCache:
        return self._kv_cache

    def replace_kv_cache(self, make: Callable[[], KVCache]) -> None:
        """Free the cache with its contents, then make a new one."""
        del self._kv_cache
        self._kv_cache = make()

    @torch.inference_mode()
    def run(self, scheduled: Sequence[ScheduledSequence]) -> list[StepResult]:
        """Compute the scheduled tokens' KV and the next tokens. Returns one result per sequence."""
        with kernels.reserve_threads_for_kernels() if self._uses_native_layers else nullcontext():
            return self._run_step(scheduled)

    def _run_step(self, scheduled: Sequence[ScheduledSequence]) -> list[StepResult]:
        # 1. run layers < l over all tokens
        batch = make_batch(scheduled, self._kv_cache)
        context = self._make_context(batch.inputs)
        bypass = BypassRows.make_for_rows(self._decoder, batch.deep_rows, context.num_tokens)
        x = self._decoder.run_lower_layers(context, bypass)  # [1, num_tokens, hidden_size]
        # 2. find sequences that exit early, and the rows that run through layers >= l
        exits = compute_exit_logits(self._model, x, scheduled, batch)
        rows = batch.find_upper_rows(exits.index_by_row)
        logits_rows = batch.find_logits_rows(exits.index_by_row)
        deep = batch.find_deep_rows(exits.index_by_row) if self._has_own_deep_kv else set()
        # 3. write K and V of layers >= l from x, draft, and run layers >= l
        shared = self._write_shared_kv(x, context, deep)
        drafts = self._draft_tokens(x, scheduled, batch)
        if drafts.tokens:
            logits = self._verify_drafts(x, scheduled, batch, drafts, rows, logits_rows, deep)
        else:
            logits = self._run_upper_layers(x, context, shared, batch.inputs, rows, logits_rows, deep)
        # 4. choose tokens
        results = [StepResult() for _ in scheduled]
        self._choose_tokens(scheduled, batch, logits, exits, drafts, results)
        self._add_prompt_logprobs(scheduled, batch, logits, results)
        self._count_skipped_tokens(batch, rows, results)
        return results

    def _make_context(self, inputs: ModelInputs, hidden: torch.Tensor | None = None) -> DecoderContext:
        """Make the decoder's context of a pass. `hidden`: hidden states of its tokens; None: embed them."""
        hidden = self._decoder.embed_tokens(inputs.input_ids) if hidden is None else hidden
        return make_pass_context(self._decoder, inputs, self._kv_cache, hidden)

    def _draft_tokens(self, x: torch.Tensor, scheduled: Sequence[ScheduledSequence], batch: Batch) -> ExitDrafts:
        """Draft with the exit head, for the sequences with a draft from the scheduler."""

        def run_lower(inputs: ModelInputs) -> torch.Tensor:
            context = self._make_context(inputs)
            drafted: torch.Tensor = self._decoder.run_lower_layers(context)  # all drafts are deep tokens
            if not self._has_own_deep_kv:
                write_and_read_shared_key_values(self._decoder, drafted, context)
            return drafted

        return draft_from_exit_head(self._model, x, scheduled, batch, self._drafting.costs, run_lower, self._kv_cache)

    def _write_shared_kv(self, x: torch.Tensor, context: DecoderContext, deep: set[int]) -> Sequence[Any]:
        """Write K and V of all layers >= l from x to the cache, except for `deep` rows with their own K and V. Returns
        the cache's contents by group; empty if deep tokens have their own."""
        if not self._has_own_deep_kv:
            return write_and_read_shared_key_values(self._decoder, x, context)
        others = [row for row in range(x.shape[1]) if row not in deep]
        if others and isinstance(self._decoder, BroadcastingDecoder):
            self._decoder.write_shared_key_values(x, context, others)
        elif others:
            write_shared_key_values(self._decoder, x, context, others)
        return ()

    def _run_upper_layers(
        self,
        x: torch.Tensor,
        context: DecoderContext,
        shared: Sequence[Any],
        inputs: ModelInputs,
        rows: list[int],
        logits_rows: set[int],
        deep: set[int],
    ) -> RowLogits:
        """Run layers >= l for `rows`, and return the logits of `logits_rows` in float32. Without rows nothing runs."""
        if not rows:
            return RowLogits({}, x.new_empty(0, self._model.config.vocab_size, dtype=torch.float32))
        kept = inputs.select_rows(rows)
        writer = DeepRowsWriter.make_for_pass(self._decoder, context, rows, deep) if self._has_own_deep_kv else None
        hidden = self._decoder.run_student_upper(x, context, selection=kept, shared=shared, deep=writer)
        return self._compute_logits(hidden, rows, logits_rows)

    def _compute_logits(self, hidden: torch.Tensor, rows: Sequence[int], logits_rows: Container[int]) -> RowLogits:
        """Apply the head to those of the hidden states [1, len(rows), hidden_size] that are in `logits_rows`."""
        chosen = [at for at, row in enumerate(rows) if row in logits_rows]
        logits = self._model.lm_head(select_along_dim(hidden, chosen, dim=1))[0].float()
        return RowLogits({rows[at]: index for index, at in enumerate(chosen)}, logits)

    def _verify_drafts(
        self,
        x: torch.Tensor,
        scheduled: Sequence[ScheduledSequence],
        batch: Batch,
        drafts: ExitDrafts,
        upper_rows: list[int],
        logits_rows: set[int],
        deep: set[int],
    ) -> RowLogits:
        """Run layers >= l for `upper_rows` and the exit head's drafts. Returns the logits of `logits_rows` and the
        drafts, whose rows follow the batch's rows."""
        # 1. collect the rows of each sequence, followed by its drafts
        spans: list[SequenceSpan] = []
        rows: list[int] = []
        num_rows = batch.first_rows[-1]
        for index, (first, end) in enumerate(pairwise(batch.first_rows)):
            own = [row for row in upper_rows if first <= row < end]
            if own:
                sequence, drafted = scheduled[index].sequence, drafts.rows_by_index.get(index, [])
                positions = [sequence.num_computed_tokens + row - first for row in own]
                positions += range(sequence.num_tokens, sequence.num_tokens + len(drafted))
                spans.append(SequenceSpan(positions, sequence.block_table))
                rows += [*own, *(num_rows + row for row in drafted)]
        # 2. run layers >= l over them
        hidden = select_along_dim(torch.cat([x, *drafts.hidden], dim=1), rows, dim=1)
        context = self._make_context(make_inputs(spans, self._kv_cache), hidden)
        if self._has_own_deep_kv:
            writing = {at for at, row in enumerate(rows) if row >= num_rows or row in deep}
            writer = DeepRowsWriter.make_for_pass(self._decoder, context, range(len(rows)), writing)
            hidden = self._decoder.run_student_upper(hidden, context, deep=writer)
        else:
            hidden = self._decoder.run_student_upper(
                hidden, context, shared=read_shared_key_values(self._decoder, context)
            )
        return self._compute_logits(hidden, rows, {row for row in rows if row >= num_rows} | logits_rows)

    def _choose_tokens(
        self,
        scheduled: Sequence[ScheduledSequence],
        batch: Batch,
        logits: RowLogits,
        exits: RowLogits,
        drafts: ExitDrafts,
        results: list[StepResult],
    ) -> None:
        """Choose the next tokens from the model's logits or, for sequences that exited, the exit head's logits."""
        # 1. collect the logits of all sequences and drafts
        at: list[int] = []
        rows: list[SamplingRow] = []
        owners: dict[int, tuple[range, Sequence[int]]] = {}  # by index: range in `at`, drafts
        for index, own in batch.next_token_rows.items():
            drafted: Sequence[int] = drafts.tokens.get(index) or scheduled[index].draft.token_ids
            if index in exits.index_by_row:
                at.append(len(logits.values) + exits.index_by_row[index])
            else:
                at += [logits.index_by_row[row] for row in own]
                at += [logits.index_by_row[batch.first_rows[-1] + row] for row in drafts.rows_by_index.get(index, ())]
            rows += [make_sampling_row(scheduled[index].sequence, drafted[:count]) for count in range(len(drafted) + 1)]
            owners[index] = range(len(at) - len(drafted) - 1, len(at)), drafted
        if not at:
            return
        # 2. sample all tokens at once, with one copy to the host
        values = torch.cat([logits.values, exits.values]) if exits.index_by_row else logits.values
        values = select_along_dim(values, at)  # [num_sequences and drafts, vocab_size]
        sums = values.sum(dim=-1).double()
        if values.shape[1] > self._num_token_ids:
            values[:, self._num_token_ids :] = float("-inf")  # no other rows have these logits
        tokens, sums = torch.stack([choose_tokens(values, rows).double(), sums]).tolist()
        # 3. accept drafts
        for index, (indices, drafted) in owners.items():
            item = scheduled[index]
            results[index] = result = accept_drafts(
                item.sequence, drafted, [int(tokens[i]) for i in indices], from_text=bool(item.draft.token_ids)
            )
            result.is_exited = index in exits.index_by_row
            drop_non_finite_tokens(result, [isfinite(sums[i]) for i in indices])
            drop_tokens_of_failed_grammar(item.sequence, result)
        self._add_logprobs(scheduled, values, {index: indices for index, (indices, _) in owners.items()}, results)

    def _add_logprobs(
        self,
        scheduled: Sequence[ScheduledSequence],
        values: torch.Tensor,
        indices: dict[int, range],
        results: list[StepResult],
    ) -> None:
        """Add the log-probabilities of the chosen tokens to the results, if requested."""
        wanted = [index for index in indices if scheduled[index].sequence.params.logprobs is not None]
        at = [i for index in wanted for i, _ in zip(indices[index], results[index].token_ids, strict=False)]
        if not at:
            return
        tokens = [token for index in wanted for token in results[index].token_ids]
        counts = [scheduled[index].sequence.params.logprobs or 0 for index in wanted for _ in results[index].token_ids]
        found = iter(compute_logprobs(select_along_dim(values, at), tokens, counts))
        for index in wanted:
            results[index].logprobs = [next(found) for _ in results[index].token_ids]

    def _add_prompt_logprobs(
        self, scheduled: Sequence[ScheduledSequence], batch: Batch, logits: RowLogits, results: list[StepResult]
    ) -> None:
        """Add the log-probabilities of prompt tokens to the results. A token's comes from the position before it."""
        for index, rows in batch.prompt_rows.items():
            if not rows:
                continue
            sequence = scheduled[index].sequence
            values = select_along_dim(logits.values, [logits.index_by_row[row] for row in rows])
            known = len(sequence.prompt_logprobs)
            tokens = sequence.prompt_token_ids[known : known + len(rows)]
            counts = [sequence.params.prompt_logprobs or 0] * len(rows)
            results[index].prompt_logprobs = compute_logprobs(values, tokens, counts)
            if not bool(values.sum().isfinite()):
                results[index].error = NOT_FINITE_MESSAGE

    def _count_skipped_tokens(self, batch: Batch, upper_rows: list[int], results: list[StepResult]) -> None:
        if self._has_upper_layers:
            for result, (first, end) in zip(results, pairwise(batch.first_rows), strict=True):
                num_run = bisect_left(upper_rows, end) - bisect_left(upper_rows, first)
                result.num_skipped_tokens = end - first - num_run
