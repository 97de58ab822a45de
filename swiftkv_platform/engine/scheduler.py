"""The scheduler: chooses the sequences of the next step and how many of their tokens run. Knows no tensors.

Each running sequence has tokens whose KV is not computed yet: one while it decodes, many while its prompt is prefilled.
A step runs up to `max_num_batched_tokens` of them: first decodes, so that long prompts never delay them, then prompts
in chunks. Drafts get the remaining tokens and blocks.

A sequence starts when there are blocks for all its known tokens. A decode may need one more block. If none is free, the
last sequence of the sender with the most blocks is preempted: it frees its blocks and is recomputed later. The first
running sequence is never preempted and fits into the cache alone, so there is always progress.

Prompts start and run in fair order of the tokens computed for their senders. A sender without a running sequence may
preempt a sequence of a sender with several. Sequences with slow grammars share a limited part of the engine's time.
"""

from __future__ import annotations

import bisect
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from swiftkv_platform.engine.drafting import NO_DRAFT, Draft
from swiftkv_platform.engine.fairness import FairOrder
from swiftkv_platform.engine.grammars import GrammarCpuTime
from swiftkv_platform.engine.kv_cache import BlockManager
from swiftkv_platform.engine.sequence import Sequence, SequenceStatus
from swiftkv_platform.web.limiters import Sender

if TYPE_CHECKING:
    from swiftkv_platform.engine.speculative import AdapterDraftPlanner

MAX_SLOW_GRAMMAR_STEP_S = 0.005
"""Max expected CPU seconds per step for slow grammars, if there are several."""
MAX_SLOW_GRAMMAR_SHARE = 0.1
"""Max share of the engine's time for slow grammars while other sequences run."""
MAX_SLOW_GRAMMAR_DEBT_S = 2.0
"""Max seconds that slow grammars wait for their next step, after any time without other sequences."""


@dataclass(frozen=True)
class ScheduledSequence:
    """A sequence and the number of tokens that the step runs, from `num_computed_tokens` on."""

    sequence: Sequence
    num_scheduled_tokens: int
    draft: Draft = NO_DRAFT
    """Draft to verify after the last known token."""

    @property
    def reaches_last_token(self) -> bool:
        """Whether the step runs the last known token, so that the next token is chosen."""
        sequence = self.sequence
        at_end = sequence.num_computed_tokens + self.num_scheduled_tokens == sequence.num_tokens
        return at_end and sequence.can_generate


class Scheduler:
    """The queue of waiting sequences and the set of running ones."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        drafting: AdapterDraftPlanner | None = None,
    ) -> None:
        self._blocks = blocks
        self._drafting = drafting
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: list[Sequence] = []  # sorted by rank
        self._running: list[Sequence] = []  # sorted by rank
        self._last_step: dict[Sequence, int] = {}
        self._throttle = SlowGrammarThrottle()
        self._order = FairOrder()
        self._num_steps = 0
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def waiting_tokens(self) -> Counter[Sender]:
        """Number of prompt tokens that are not prefilled yet, by sender. Thread-safe; at most one step old."""
        prefilling = [sequence for sequence in list(self._running) if not sequence.is_decoding]
        tokens: Counter[Sender] = Counter()
        for sequence in [*self._waiting, *prefilling]:
            tokens[sequence.sender] += sequence.num_tokens - sequence.num_computed_tokens
        return tokens

    def add_sequence(self, sequence: Sequence) -> None:
        assert sequence.status is SequenceStatus.WAITING
        bisect.insort(self._waiting, sequence, key=_get_queue_rank)

    def remove_sequence(self, sequence: Sequence) -> None:
        """Remove a finished sequence and free its blocks."""
        assert sequence.status is SequenceStatus.FINISHED
        self._blocks.free(sequence.block_table, discard=sequence.finish_reason == "error")
        (self._running if sequence in self._running else self._waiting).remove(sequence)
        self._last_step.pop(sequence, None)

    def schedule(self) -> list[ScheduledSequence]:
        """Choose the sequences of the next step and allocate their blocks. Empty if no sequence waits or runs."""
        # 1. choose sequences; throttled grammars run only if nothing else does
        self._num_steps += 1
        self._throttle.begin_step()
        scheduled = self._choose_sequences(lambda grammar: not grammar.is_slow or self._throttle.try_grammar(grammar))
        if not scheduled:
            scheduled = self._choose_sequences(lambda grammar: self._throttle.try_grammar(grammar, alone=True))
        # 2. charge the senders
        for sequence, num_tokens in scheduled.items():
            self._last_step[sequence] = self._num_steps
            self._order.record_service(sequence.sender, num_tokens)
        assert scheduled or not (self._waiting or self._running), "sequences wait, but none can run"
        # 3. add drafts
        drafts = self._allocate_drafts(scheduled)
        return [
            ScheduledSequence(sequence, count, drafts.get(sequence, NO_DRAFT)) for sequence, count in scheduled.items()
        ]

    def _choose_sequences(self, may_step_grammar: Callable[[GrammarCpuTime], bool]) -> dict[Sequence, int]:
        """Choose the sequences to run, and how many of their tokens. A grammar runs only if `may_step_grammar` allows
        it."""
        scheduled: dict[Sequence, int] = {}
        num_preemptions = self.num_preemptions
        for sequence in self._list_running():
            if not sequence.is_decoding and num_preemptions == self.num_preemptions:
                self._start_waiting(scheduled, running=sequence)
                num_preemptions = self.num_preemptions
            budget = self._max_num_batched_tokens - sum(scheduled.values())
            if budget == 0 or len(scheduled) == self._max_num_seqs:
                break
            if sequence.constraint is not None and not may_step_grammar(sequence.constraint.cpu_time):
                continue
            if sequence.status is SequenceStatus.RUNNING and self._extend_table_or_preempt(sequence, scheduled):
                scheduled[sequence] = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
        if num_preemptions == self.num_preemptions:
            self._start_waiting(scheduled)
        return scheduled

    def commit_tokens(self, sequence: Sequence, num_tokens: int) -> None:
        """Record that the KV of `num_tokens` more tokens is final, and free the blocks of rejected drafts."""
        sequence.num_computed_tokens += num_tokens
        assert sequence.num_computed_tokens <= sequence.num_tokens
        num_shared = min(sequence.num_computed_tokens, sequence.num_shareable_tokens)
        self._blocks.cache_blocks(sequence.block_table, sequence.token_ids, num_shared, sequence.sender.tenant)
        self._blocks.truncate_table(sequence.block_table, sequence.num_tokens)

    def assert_consistent(self) -> None:
        """Assert that each block is free or belongs to a running sequence."""
        self._blocks.assert_consistent(sequence.block_table for sequence in self._running)
        assert not any(sequence.block_table.blocks for sequence in self._waiting)
        assert self._last_step.keys() <= set(self._running)

    def _list_running(self) -> Iterator[Sequence]:
        """Yield the running sequences in scheduling order: decodes by priority and time since their last step, then
        prompts by priority and fair order of senders."""
        decoding = [sequence for sequence in self._running if sequence.is_decoding]
        decoding.sort(key=lambda sequence: (sequence.priority, self._last_step[sequence]))
        prompts = [sequence for sequence in self._running if not sequence.is_decoding]
        prompts.sort(key=self._get_prompt_rank)
        yield from decoding
        yield from prompts

    def _get_prompt_rank(self, sequence: Sequence) -> tuple[float, ...]:
        """Sort key of prompts that start or run: priority, fair order of senders, arrival; the lowest is first."""
        return sequence.priority, *self._order.get_rank(sequence.sender), sequence.arrival

    def _extend_table_or_preempt(self, sequence: Sequence, scheduled: dict[Sequence, int]) -> bool:
        """Allocate the block that the sequence's last token may need. If none is free, preempt other sequences. Returns
        False if the sequence itself was preempted."""
        table = sequence.block_table
        while not self._blocks.can_extend_table(table, sequence.num_tokens):
            victim = self._choose_victim()
            scheduled.pop(victim, None)
            self._preempt(victim)
            if victim is sequence:
                return False
        self._blocks.extend_table(table, sequence.num_tokens)
        return True

    def _choose_victim(self) -> Sequence:
        """Return the sequence to preempt for blocks: among the least urgent running sequences, except for the first
        running one, the last sequence of the sender with the most blocks."""
        if len(self._running) == 1:
            return self._running[0]
        held: Counter[Sender] = Counter()
        for sequence in self._running:
            held[sequence.sender] += len(sequence.block_table.blocks)
        last = {sequence.sender: sequence for sequence in self._running[1:]}
        lowest = max(sequence.priority for sequence in last.values())
        return max(
            (sequence for sequence in last.values() if sequence.priority == lowest),
            key=lambda sequence: (held[sequence.sender], _get_queue_rank(sequence)),
        )

    def _allocate_drafts(self, scheduled: dict[Sequence, int]) -> dict[Sequence, Draft]:
        """Plan drafts and allocate their blocks, as far as tokens and blocks are free. No sequence is preempted."""
        if self._drafting is None:
            return {}
        num_tokens = sum(scheduled.values())
        decoding = [sequence for sequence in scheduled if sequence.is_decoding]
        num_sequences = sum(s.num_computed_tokens + count == s.num_tokens for s, count in scheduled.items())
        wanted = self._drafting.plan_drafts(decoding, num_sequences=num_sequences, num_tokens=num_tokens)
        granted: dict[Sequence, Draft] = {}
        for sequence, draft in wanted.items():
            size = min(draft.size, self._max_num_batched_tokens - num_tokens)
            while size > 0 and not self._blocks.can_extend_table(sequence.block_table, sequence.num_tokens + size):
                size -= 1
            if size > 0:
                self._blocks.extend_table(sequence.block_table, sequence.num_tokens + size)
                granted[sequence] = draft.truncate(size)
                num_tokens += size
        return granted

    def _preempt(self, sequence: Sequence) -> None:
        self._blocks.free(sequence.block_table)
        self._running.remove(sequence)
        self._last_step.pop(sequence, None)
        sequence.preempt()
        self.add_sequence(sequence)
        self.num_preemptions += 1

    def _start_waiting(self, scheduled: dict[Sequence, int], *, running: Sequence | None = None) -> None:
        """Start waiting sequences in fair order, while the step has tokens and the cache has blocks for them.
        `running`: start only sequences whose senders are served before the sender of this running sequence."""
        while self._waiting:
            sequence = self._get_next_waiting()
            if running is not None and not self._is_served_before(sequence, running):
                return
            while not self._try_to_start(sequence, scheduled):
                victim = self._choose_victim_for_start(sequence)
                if victim is None:
                    return
                scheduled.pop(victim, None)
                self._preempt(victim)

    def _get_next_waiting(self) -> Sequence:
        first_of: dict[Sender, Sequence] = {}
        for sequence in self._waiting:
            first_of.setdefault(sequence.sender, sequence)
        return min(first_of.values(), key=self._get_prompt_rank)

    def _is_served_before(self, sequence: Sequence, other: Sequence) -> bool:
        """Whether the sequence's sender is served before the other sequence's sender."""
        ranks = self._order.get_rank(sequence.sender), self._order.get_rank(other.sender)
        return sequence.priority <= other.priority and ranks[0] < ranks[1]

    def _try_to_start(self, sequence: Sequence, scheduled: dict[Sequence, int]) -> bool:
        """Start a waiting sequence if the step has a token for it, and the cache has blocks for all its known
        tokens."""
        # 1. check the step's limits; a sequence with a throttled grammar holds blocks, but does not count
        budget = self._max_num_batched_tokens - sum(scheduled.values())
        slow = sum(1 for each in self._running if each.constraint is not None and each.constraint.cpu_time.is_slow)
        if not budget or len(self._running) >= self._max_num_seqs + slow or len(scheduled) >= self._max_num_seqs:
            return False
        # 2. find cached blocks of its prefix
        table, token_ids = sequence.block_table, sequence.token_ids
        matched = []
        if not sequence.is_missing_prompt_logprobs:  # these need hidden states, which are not cached
            known = token_ids[: sequence.num_shareable_tokens + 1]  # plus one: match_prefix leaves a token to run
            matched = self._blocks.match_prefix(table, known, sequence.sender.tenant)
        # Each running sequence may soon need another block, and would then preempt the new one: wasted cpu_time.
        if not self._blocks.can_allocate(matched, len(token_ids), num_spare=len(self._running)):
            return False
        self._blocks.allocate(table, matched, len(token_ids))
        sequence.start(num_cached_tokens=len(matched) * self._blocks.block_size)
        self._waiting.remove(sequence)
        bisect.insort(self._running, sequence, key=_get_queue_rank)
        self._order.record_choice(sequence.sender)
        scheduled[sequence] = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
        return True

    def _choose_victim_for_start(self, sequence: Sequence) -> Sequence | None:
        """Return a sequence to preempt, so that `sequence` can start although its sender runs none; None if there is
        none.

        The victim is the last sequence of the sender with the most sequences. Its tenant is the one with the most
        sequences if that one runs at least two more than the sender's own tenant; else the sender's own tenant.
        """
        senders = Counter(each.sender for each in self._running)
        if sequence.sender in senders or len(self._running) < 2:
            return None
        num_freeable = self._blocks.num_free_blocks + sum(len(each.block_table.blocks) for each in self._running[1:])
        if num_freeable * self._blocks.block_size < sequence.num_tokens:
            return None
        # 1. choose the tenant  2. choose its sender with the most sequences  3. choose that sender's last sequence; not
        # the first running sequence, nor one that starts in this step
        tenants = Counter(each.sender.tenant for each in self._running)
        own = sequence.sender.tenant
        [(largest, count)] = tenants.most_common(1)
        tenant = largest if count > tenants[own] + 1 else own
        found = Counter({sender: count for sender, count in senders.items() if sender.tenant == tenant}).most_common(1)
        if not found or (tenant == own and found[0][1] < 2):
            return None
        victims = [
            each
            for each in self._running[1:]
            if each.sender == found[0][0] and each.priority >= sequence.priority and each in self._last_step
        ]
        return victims[-1] if victims else None


class SlowGrammarThrottle:
    """Limits the time of slow grammars to `MAX_SLOW_GRAMMAR_SHARE` while other sequences run."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._debt_s = 0.0
        self._spent_before: dict[GrammarCpuTime, float] = {}

    def begin_step(self) -> None:
        """Update the time debt: debt += slow grammars' time / share - time since the last step."""
        now, slow_s = self._clock(), 0.0
        for cpu_time, before in self._spent_before.items():
            cpu_time.last_step_s = cpu_time.spent_s - before
            slow_s += cpu_time.last_step_s
        debt_s = self._debt_s + slow_s / MAX_SLOW_GRAMMAR_SHARE - (now - self._began)
        self._debt_s = min(max(debt_s, 0.0), MAX_SLOW_GRAMMAR_DEBT_S)
        self._began, self._spent_before = now, {}

    def try_grammar(self, cpu_time: GrammarCpuTime, *, alone: bool = False) -> bool:
        """Return whether a slow grammar may run in this step, and count it. `alone`: nothing else runs, so the debt
        does not matter."""
        if self._debt_s > 0.0 and not alone:
            return False
        expected_s = sum(each.last_step_s for each in self._spent_before) + cpu_time.last_step_s
        if self._spent_before and expected_s > MAX_SLOW_GRAMMAR_STEP_S:
            return False
        self._spent_before.setdefault(cpu_time, cpu_time.spent_s)
        return True


def _get_queue_rank(sequence: Sequence) -> tuple[int, int]:
    """Sort key of waiting sequences: priority, then arrival; the lowest is first."""
    return sequence.priority, sequence.arrival
