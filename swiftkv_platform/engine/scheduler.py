"""Choice of the sequences that run next, and of how many of their tokens. Knows no tensor and no model.

Every running sequence has tokens whose KV is not computed yet: one when it decodes, many while its prompt is read. A
step takes `max_num_batched_tokens` of them: decodes first, so that long prompts never hold them up, then prompts in
chunks, first come, first served. A sequence enters when all its known tokens have blocks; only decodes ask for more,
and when there are none, the last in line gives all of its blocks back and is recomputed later. The first in line is
never preempted and fits alone, so there is always progress. Drafts get what tokens and blocks are left in the end.
Sequences whose grammars are slow to follow take turns, so that they never take more time than the others have.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from swiftkv_platform.engine.block_manager import BlockManager
from swiftkv_platform.engine.constraint import Work
from swiftkv_platform.engine.drafting import NO_DRAFT, Draft
from swiftkv_platform.engine.sequence import Sequence, SequenceStatus

TURN_S = 0.005
"""CPU seconds of a step that several turns may be expected to take."""
TURNS_SHARE = 0.1
"""Most of an engine's time that turns take of others'."""
MOST_OWED_S = 2.0
"""Most seconds that slow grammars wait for their next turn, whatever they took while nothing else ran."""


@dataclass(frozen=True)
class ScheduledSequence:
    """A sequence and how many of its tokens, from `num_computed_tokens` on, the step runs."""

    sequence: Sequence
    num_scheduled_tokens: int
    draft: Draft = NO_DRAFT
    """Draft that may be tried beyond the last known token."""

    @property
    def needs_token(self) -> bool:
        """Whether the step reaches the sequence's last known token, so that the next one can be chosen."""
        sequence = self.sequence
        at_end = sequence.num_computed_tokens + self.num_scheduled_tokens == sequence.num_tokens
        return at_end and sequence.generates


class DraftPlanner(Protocol):
    """Says what is worth drafting."""

    def plan(self, decoding: list[Sequence], *, num_sequences: int, num_tokens: int) -> dict[Sequence, Draft]:
        """Drafts that the decoding sequences of a step want; it runs `num_tokens` tokens without them, and
        `num_sequences` sequences get a token."""
        ...


class Scheduler:
    """The line of waiting sequences and the set of running ones."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        draft_planner: DraftPlanner | None = None,
        keeps_own: bool = False,
    ) -> None:
        """`keeps_own`: tokens from a prompt's last one on keep K and V of their own, which another sequence that has
        them in its prompt cannot use; so their blocks are not shared."""
        self._keeps_own = keeps_own
        self._blocks = blocks
        self._draft_planner = draft_planner
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._waiting: list[Sequence] = []  # sorted by rank
        self._running: list[Sequence] = []  # sorted by rank
        self._last_step: dict[Sequence, int] = {}
        self._turns = GrammarTurns()
        self._num_steps = 0
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of waiting and running sequences whose KV is not computed yet.

        Another thread than the one that schedules may read it: it is then at most one step old.
        """
        being_read = [sequence for sequence in list(self._running) if not sequence.is_decoding]
        return sum(sequence.num_tokens - sequence.num_computed_tokens for sequence in [*self._waiting, *being_read])

    def add(self, sequence: Sequence) -> None:
        assert sequence.status is SequenceStatus.WAITING
        bisect.insort(self._waiting, sequence, key=_rank)

    def remove(self, sequence: Sequence) -> None:
        """Forget a finished sequence and free its blocks."""
        assert sequence.status is SequenceStatus.FINISHED
        self._blocks.free(sequence.block_table, discard=sequence.finish_reason == "error")
        (self._running if sequence in self._running else self._waiting).remove(sequence)
        self._last_step.pop(sequence, None)

    def schedule(self) -> list[ScheduledSequence]:
        """The sequences of the next step, blocks allocated; empty when there is nothing to do."""
        self._num_steps += 1
        self._turns.begin_step()
        scheduled = self._choose(lambda grammar: not grammar.is_slow or self._turns.take(grammar))
        if not scheduled:
            scheduled = self._choose(lambda grammar: self._turns.take(grammar, alone=True))
        for sequence in scheduled:
            self._last_step[sequence] = self._num_steps
        assert scheduled or not (self._waiting or self._running), "nothing can run, yet something waits"
        drafts = self._grant_drafts(scheduled)
        return [
            ScheduledSequence(sequence, count, drafts.get(sequence, NO_DRAFT)) for sequence, count in scheduled.items()
        ]

    def _choose(self, may_follow: Callable[[Work], bool]) -> dict[Sequence, int]:
        """Sequences to run, and how many of their tokens; of those with a grammar the ones that `may_follow` it."""
        scheduled: dict[Sequence, int] = {}
        num_preemptions = self.num_preemptions
        for sequence in self._in_turn():
            budget = self._max_num_batched_tokens - sum(scheduled.values())
            if budget == 0 or len(scheduled) == self._max_num_seqs:
                break
            if sequence.constraint is not None and not may_follow(sequence.constraint.work):
                continue
            if sequence.status is SequenceStatus.RUNNING and self._make_room(sequence, scheduled):
                scheduled[sequence] = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
        if num_preemptions == self.num_preemptions:
            self._admit(scheduled)
        return scheduled

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """The KV of `num_tokens` more tokens of the sequence is in the cache, for good; blocks that drafts got beyond
        its known tokens are free again."""
        sequence.num_computed_tokens += num_tokens
        assert sequence.num_computed_tokens <= sequence.num_tokens
        num_shared = min(sequence.num_computed_tokens, self._num_shareable(sequence))
        self._blocks.commit(sequence.block_table, sequence.token_ids, num_shared, sequence.tenant)
        self._blocks.shrink(sequence.block_table, sequence.num_tokens)

    def _num_shareable(self, sequence: Sequence) -> int:
        """Leading tokens whose K and V are the same in every sequence that begins with them."""
        return sequence.num_prompt_tokens - 1 if self._keeps_own else sequence.num_tokens

    def check(self) -> None:
        """Assert that no block is lost or held without an owner."""
        self._blocks.check(sequence.block_table for sequence in self._running)
        assert not any(sequence.block_table.blocks for sequence in self._waiting)
        assert self._last_step.keys() <= set(self._running)

    def _in_turn(self) -> Iterator[Sequence]:
        """Decodes before prompts; of decodes that do not all fit into a step, those that have waited longest."""
        decoding = [sequence for sequence in self._running if sequence.is_decoding]
        decoding.sort(key=lambda sequence: (sequence.priority, self._last_step[sequence]))
        yield from decoding
        yield from [sequence for sequence in self._running if not sequence.is_decoding]

    def _make_room(self, sequence: Sequence, scheduled: dict[Sequence, int]) -> bool:
        """Give the sequence the block its last token may need, at the cost of the last in line, if need be itself."""
        table = sequence.block_table
        while not self._blocks.can_grow(table, sequence.num_tokens):
            victim = self._running[-1]
            scheduled.pop(victim, None)
            self._preempt(victim)
            if victim is sequence:
                return False
        self._blocks.grow(table, sequence.num_tokens)
        return True

    def _grant_drafts(self, scheduled: dict[Sequence, int]) -> dict[Sequence, Draft]:
        """Drafts for which there are tokens in the step and free blocks; no sequence is preempted for them."""
        if self._draft_planner is None:
            return {}
        num_tokens = sum(scheduled.values())
        decoding = [sequence for sequence in scheduled if sequence.is_decoding]
        num_sequences = sum(s.num_computed_tokens + count == s.num_tokens for s, count in scheduled.items())
        wanted = self._draft_planner.plan(decoding, num_sequences=num_sequences, num_tokens=num_tokens)
        granted: dict[Sequence, Draft] = {}
        for sequence, draft in wanted.items():
            size = min(draft.size, self._max_num_batched_tokens - num_tokens)
            while size > 0 and not self._blocks.can_grow(sequence.block_table, sequence.num_tokens + size):
                size -= 1
            if size > 0:
                self._blocks.grow(sequence.block_table, sequence.num_tokens + size)
                granted[sequence] = draft.limited(size)
                num_tokens += size
        return granted

    def _preempt(self, sequence: Sequence) -> None:
        self._blocks.free(sequence.block_table)
        self._running.remove(sequence)
        del self._last_step[sequence]
        sequence.preempt()
        self.add(sequence)
        self.num_preemptions += 1

    def _admit(self, scheduled: dict[Sequence, int]) -> None:
        """Let waiting sequences in, in line, while there are tokens, places and blocks for all they have."""
        budget = self._max_num_batched_tokens - sum(scheduled.values())
        # Those that wait for their turn hold blocks, and no place.
        slow = sum(
            1 for sequence in self._running if sequence.constraint is not None and sequence.constraint.work.is_slow
        )
        while (
            self._waiting
            and budget
            and len(self._running) < self._max_num_seqs + slow
            and len(scheduled) < self._max_num_seqs
        ):
            sequence = self._waiting[0]
            table, token_ids = sequence.block_table, sequence.token_ids
            matched = []
            if not sequence.wants_prompt_logprobs:  # which are made of hidden states, and cached are K and V alone
                known = token_ids[: self._num_shareable(sequence) + 1]  # one more, as one token is left to run
                matched = self._blocks.match_prefix(table, known, sequence.tenant)
            # Each running sequence may soon need one block more: to admit what they then push out again is wasted work.
            if not self._blocks.can_allocate(matched, len(token_ids), spare=len(self._running)):
                return
            self._blocks.allocate(table, matched, len(token_ids))
            sequence.start(num_cached_tokens=len(matched) * self._blocks.block_size)
            self._waiting.pop(0)
            bisect.insort(self._running, sequence, key=_rank)
            scheduled[sequence] = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
            budget -= scheduled[sequence]


class GrammarTurns:
    """Turns of slow grammars in the engine's steps: while other sequences run, `TURNS_SHARE` of the time is theirs."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._owed_s = 0.0
        self._taken: dict[Work, float] = {}

    def begin_step(self) -> None:
        """Count what the last step's turns took, against the time that has passed beside them."""
        now, took = self._clock(), 0.0
        for work, before in self._taken.items():
            work.turn_s = work.spent_s - before
            took += work.turn_s
        owed_s = self._owed_s + took / TURNS_SHARE - (now - self._began)
        self._owed_s = min(max(owed_s, 0.0), MOST_OWED_S)
        self._began, self._taken = now, {}

    def take(self, work: Work, *, alone: bool = False) -> bool:
        """Whether it is followed in this step. `alone`: nothing else can run; it is owed all the same."""
        if self._owed_s > 0.0 and not alone:
            return False
        if self._taken and sum(each.turn_s for each in self._taken) + work.turn_s > TURN_S:
            return False
        self._taken.setdefault(work, work.spent_s)
        return True


def _rank(sequence: Sequence) -> tuple[int, int]:
    """Place in line: priority, then arrival."""
    return sequence.priority, sequence.arrival
