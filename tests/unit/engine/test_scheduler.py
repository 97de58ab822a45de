"""Scheduling: decodes before prompts, in order, within the token budget; no starvation and no deadlock."""

import copy
import itertools
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swiftkv_platform.engine import SamplingParams
from swiftkv_platform.engine.drafting import Draft
from swiftkv_platform.engine.grammars import CALLER_BURST_S, SLOW_CALLER_S, GrammarBudget, GrammarCpuTime
from swiftkv_platform.engine.kv_cache import BlockManager
from swiftkv_platform.engine.scheduler import (
    MAX_SLOW_GRAMMAR_SHARE,
    MAX_SLOW_GRAMMAR_STEP_S,
    ScheduledSequence,
    Scheduler,
    SlowGrammarThrottle,
)
from swiftkv_platform.engine.sequence import Sequence, SequenceStatus
from swiftkv_platform.web.limiters import Sender

BLOCK = 4


class Six:
    """A draft planner that wants six drafts for every decode."""

    def plan_drafts(self, decoding: list[Sequence], *, num_sequences: int, num_tokens: int) -> dict[Sequence, Draft]:
        assert len(decoding) <= num_sequences <= num_tokens
        return {sequence: Draft(num_exit_tokens=min(6, sequence.num_draftable_tokens)) for sequence in decoding}


class Line:
    """A scheduler without a model: each scheduled sequence whose next token is due gets the token 0."""

    def __init__(
        self, num_blocks: int = 64, max_num_seqs: int = 8, max_num_batched_tokens: int = 16, *, drafts: bool = False
    ) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK, enable_prefix_caching=True)
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            drafting=Six() if drafts else None,
        )
        self.budget = max_num_batched_tokens
        self.arrivals = itertools.count()

    def add(
        self,
        name: str,
        num_tokens: int,
        max_tokens: int = 4,
        *,
        priority: int = 0,
        after: Any = (),
        sender: Sender = Sender(),  # noqa: B008  # immutable
        **params: Any,
    ) -> Sequence:
        """Add a sequence, with the tokens `after` or, if there are none, `num_tokens` new ones."""
        arrival = next(self.arrivals)
        sequence = Sequence(
            name,
            after or tuple(range(1000 * arrival, 1000 * arrival + num_tokens)),
            SamplingParams(max_tokens=max_tokens, **params),
            seed=0,
            stop_token_ids=frozenset(),
            max_model_len=10_000,
            arrival=arrival,
            priority=priority,
            sender=sender,
        )
        self.scheduler.add_sequence(sequence)
        return sequence

    def step_until(self, name: str, limit: int) -> int:
        """Run steps until a request runs; return their number."""
        for number in range(1, limit + 1):
            if name in self.step():
                return number
        raise AssertionError(f"{name} did not run in {limit} steps")

    def step(self) -> dict[str, int]:
        """Run one step; return the number of scheduled tokens by request."""
        scheduled = self.scheduler.schedule()
        assert sum(item.num_scheduled_tokens for item in scheduled) <= self.budget
        for item in scheduled:
            assert item.num_scheduled_tokens > 0
            self._compute(item)
        self.scheduler.assert_consistent()
        return {item.sequence.request_id: item.num_scheduled_tokens for item in scheduled}

    def _compute(self, item: ScheduledSequence) -> None:
        sequence, reaches_last_token = item.sequence, item.reaches_last_token
        self.scheduler.commit_tokens(sequence, item.num_scheduled_tokens)
        if reaches_last_token:
            sequence.append_token(0)
        if sequence.status is SequenceStatus.FINISHED:
            self.scheduler.remove_sequence(sequence)

    def run(self, limit: int = 10_000) -> list[dict[str, int]]:
        """Step until no sequence is left."""
        steps = []
        while self.scheduler.num_running + self.scheduler.num_waiting:
            steps.append(self.step())
            assert len(steps) < limit, "sequences never finish"
        return steps


def test_a_long_prompt_is_read_in_chunks_beside_decodes() -> None:
    line = Line(max_num_batched_tokens=10)
    line.add("short", 3, max_tokens=6)
    assert line.step() == {"short": 3}
    line.add("long", 30)
    assert [line.step() for _ in range(4)] == [{"short": 1, "long": size} for size in (9, 9, 9, 3)]


def test_prompts_are_read_first_come_first_served_and_by_priority() -> None:
    line = Line(max_num_batched_tokens=8)
    for name, priority in (("a", 0), ("b", 0), ("urgent", -1)):
        line.add(name, 8, max_tokens=1, priority=priority)
    assert [list(step) for step in line.run()] == [["urgent"], ["a"], ["b"]]


def test_decodes_take_turns_where_the_budget_is_smaller_than_their_number() -> None:
    line = Line(max_num_batched_tokens=2)
    for name in "abc":
        line.add(name, 1, max_tokens=20)
    steps = line.run()
    waits = [
        later - earlier
        for name in "abc"
        for earlier, later in itertools.pairwise(at for at, step in enumerate(steps) if name in step)
    ]
    assert max(waits) <= 3
    line = Line(max_num_seqs=2)
    for name in "abc":
        line.add(name, 2, max_tokens=3)
    line.step()
    assert (line.scheduler.num_running, line.scheduler.num_waiting) == (2, 1), "places are limited"


def test_the_last_in_line_is_preempted_and_comes_back_with_its_tokens() -> None:
    line = Line(num_blocks=7, max_num_batched_tokens=32)
    first = line.add("first", 8, max_tokens=12)
    second = line.add("second", 8, max_tokens=12)
    line.step()
    while line.scheduler.num_preemptions == 0:
        line.step()
    assert second.status is SequenceStatus.WAITING
    assert (second.num_computed_tokens, second.block_table.blocks) == (0, [])
    kept = second.num_output_tokens
    assert kept > 0
    line.run()
    assert (first.num_output_tokens, second.num_output_tokens) == (12, 12)
    assert line.blocks.num_free_blocks == 7


def test_a_new_sequence_waits_rather_than_push_out_running_ones() -> None:
    line = Line(num_blocks=5, max_num_batched_tokens=32)
    line.add("running", 12, max_tokens=5)
    line.step()
    line.add("waits", 8)
    assert line.step() == {"running": 1}
    line.run()
    assert line.scheduler.num_preemptions == 0


def test_a_known_prefix_is_not_computed_again_unless_prompt_logprobs_need_it() -> None:
    line = Line()
    known = line.add("first", 13, max_tokens=1).prompt_token_ids
    line.run()
    again = line.add("again", 13, max_tokens=1, after=known)
    assert line.step() == {"again": 1}
    assert again.make_output().num_cached_tokens == 12
    line.add("scored", 13, max_tokens=1, after=known, prompt_logprobs=0)
    assert line.step() == {"scored": 13}


EVE, AL, ANN = Sender("t", "eve"), Sender("t", "al"), Sender("other", "ann")


def test_a_quiet_callers_prompt_is_next_after_one_step() -> None:
    line = Line(num_blocks=1000, max_num_batched_tokens=16)
    for at in range(6):
        line.add(f"eve {at}", 200, max_tokens=1, sender=EVE)
    line.step()
    line.add("ann", 8, sender=ANN)
    line.add("al", 8, sender=AL)
    assert line.step_until("ann", 2) == 1
    assert line.step_until("al", 2) == 1, "keys of one tenant are served fairly too"


def test_callers_with_one_place_take_turns() -> None:
    line = Line(max_num_seqs=1)
    for at in range(3):
        line.add(f"eve {at}", 4, max_tokens=2, sender=EVE)
    line.step()
    for at in range(2):
        line.add(f"ann {at}", 4, max_tokens=2, sender=ANN)
    order = list(dict.fromkeys(name for step in line.run() for name in step))
    assert order == ["eve 0", "ann 0", "eve 1", "ann 1", "eve 2"]


@pytest.mark.parametrize("newcomer", [ANN, AL])
@pytest.mark.parametrize("limits", [{"max_num_seqs": 3}, {"num_blocks": 12}], ids=["places", "blocks"])
def test_who_runs_several_yields_to_who_runs_none(newcomer: Sender, limits: dict[str, int]) -> None:
    line = Line(**limits)
    eves = [line.add(f"eve {at}", 8, max_tokens=8, sender=EVE) for at in range(3)]
    for _ in range(4):
        line.step()
    first = line.add("new", 8, max_tokens=4, sender=newcomer)
    line.add("second", 8, max_tokens=4, sender=newcomer)
    assert line.step_until("new", 3) <= 3
    assert line.scheduler.num_preemptions == 1, "one is enough, and a caller that runs one waits for its next"
    assert eves[0].num_output_tokens > 0
    line.run()
    assert [each.num_output_tokens for each in (*eves, first)] == [8, 8, 8, 4]


def test_more_urgent_sequences_do_not_yield() -> None:
    line = Line(max_num_seqs=2)
    for at in range(2):
        line.add(f"eve {at}", 4, max_tokens=9, priority=-1, sender=EVE)
    line.step()
    line.add("ann", 4, sender=ANN)
    line.run()
    assert line.scheduler.num_preemptions == 0


def test_a_prompt_for_which_no_room_can_be_made_preempts_nobody() -> None:
    line = Line(num_blocks=12, max_num_batched_tokens=64)
    for at in range(3):
        line.add(f"eve {at}", 12, max_tokens=4, sender=EVE)
    line.step()
    line.add("ann", 44, sender=ANN)
    line.step()
    assert (line.scheduler.num_preemptions, line.scheduler.num_running) == (0, 3)
    line.run()


def test_who_holds_most_blocks_loses_them_first() -> None:
    line = Line(num_blocks=8, max_num_batched_tokens=64)
    line.add("first", 4, max_tokens=16, sender=AL)
    line.add("large", 16, max_tokens=8, sender=EVE)
    last = line.add("last", 4, max_tokens=16, sender=ANN)
    while line.scheduler.num_preemptions == 0:
        line.step()
    assert last.status is SequenceStatus.RUNNING
    line.run()


request = st.tuples(st.integers(1, 24), st.integers(1, 24), st.integers(0, 2), st.sampled_from([EVE, AL, ANN]))


@settings(max_examples=150)
@given(
    requests=st.lists(request, min_size=1, max_size=8),
    spare_blocks=st.integers(0, 6),
    max_num_seqs=st.integers(1, 5),
    budget=st.integers(1, 40),
)
def test_everyone_is_served(
    requests: list[tuple[int, int, int, Sender]], spare_blocks: int, max_num_seqs: int, budget: int
) -> None:
    largest = max(prompt + answer - 1 for prompt, answer, _, _ in requests)
    line = Line(-(-largest // BLOCK) + spare_blocks, max_num_seqs, budget)
    sequences = [
        line.add(str(at), prompt, answer, priority=priority, sender=sender)
        for at, (prompt, answer, priority, sender) in enumerate(requests)
    ]
    line.run()
    assert all(sequence.num_output_tokens == sequence.max_output_tokens for sequence in sequences)
    assert line.blocks.num_free_blocks == line.blocks.num_blocks


def test_drafts_take_the_tokens_and_blocks_that_are_left() -> None:
    """Blocks of rejected drafts are free again."""
    line = Line(num_blocks=5, max_num_batched_tokens=9, drafts=True)
    first, second = (line.add(name, 7, max_tokens=9) for name in ("first", "second"))
    line.step()
    line.step()
    scheduled = line.scheduler.schedule()
    assert [item.sequence for item in scheduled] == [first, second]
    sizes = [item.draft.size for item in scheduled]
    assert sum(sizes) + 2 <= 9
    assert sizes[0] > 0
    assert line.scheduler.num_preemptions == 0
    for item in scheduled:
        assert len(item.sequence.block_table.blocks) * BLOCK >= item.sequence.num_tokens + item.draft.size
    line = Line(num_blocks=8, drafts=True)
    sequence = line.add("one", 7, max_tokens=12)
    line.step()
    free = line.blocks.num_free_blocks
    (item,) = line.scheduler.schedule()
    assert item.draft.size == 6
    assert line.blocks.num_free_blocks < free
    line.scheduler.commit_tokens(sequence, item.num_scheduled_tokens)
    line.scheduler.assert_consistent()
    assert line.blocks.num_free_blocks == free


@given(st.integers(0, 2**32))
@settings(max_examples=30)
def test_drafts_never_push_anyone_out_nor_lose_a_block(seed: int) -> None:
    """Every step runs the same tokens and preempts as many as it would without drafts."""
    draw = random.Random(seed)
    line = Line(num_blocks=12, max_num_batched_tokens=draw.randrange(4, 30), drafts=True)
    for name in "abcde":
        line.add(name, draw.randrange(1, 16), max_tokens=draw.randrange(1, 20))
    while line.scheduler.num_running or line.scheduler.num_waiting:
        without = copy.deepcopy(line)
        without.scheduler._drafting = None
        assert line.step() == without.step()
        assert line.scheduler.num_preemptions == without.scheduler.num_preemptions
    assert line.blocks.num_free_blocks == 12


class Followed:
    """A constraint with no grammar: only its work is counted."""

    has_rejected_token = False

    def __init__(self) -> None:
        self.cpu_time = GrammarCpuTime()

    def is_complete(self, _answer: list[int]) -> bool:
        return False

    def take(self, seconds: float) -> None:
        """Keep the engine's thread busy with this constraint for a time."""
        with self.cpu_time.measure_time():
            end = time.thread_time() + seconds
            while time.thread_time() < end:
                pass


def test_slow_grammars_take_turns_and_keep_no_place_from_others() -> None:
    line = Line(max_num_seqs=3)
    grammars = {name: Followed() for name in "abc"}
    for name, grammar in grammars.items():
        line.add(name, 1, max_tokens=90).constraint = grammar  # type: ignore[assignment]
    line.step()
    for grammar in grammars.values():
        grammar.take(2 * SLOW_CALLER_S)
    line.add("free", 1, max_tokens=90)
    followed = []
    for _ in range(3):
        (turn,) = line.step().keys() - {"free"}
        followed.append(turn)
        line.scheduler._throttle = SlowGrammarThrottle(lambda: 0.0)  # no turn is owed, and time stands still
        grammars[turn].take(2 * MAX_SLOW_GRAMMAR_STEP_S)
    assert followed == ["a", "b", "c"]
    grammars["a"].take(2 * MAX_SLOW_GRAMMAR_STEP_S)  # during its turn
    assert line.step().keys() == {"a", "free"}
    grammars["a"].take(0.1)
    assert [line.step().keys() for _ in range(3)] == [{"free"}] * 3, "time that a turn took is owed to other sequences"


def test_where_nothing_else_can_run_slow_grammars_go_on() -> None:
    line, grammar = Line(), Followed()
    line.add("a", 1, max_tokens=4).constraint = grammar  # type: ignore[assignment]
    while line.scheduler.num_waiting + line.scheduler.num_running:
        assert line.step() == {"a": 1}
        grammar.take(2 * SLOW_CALLER_S)


def test_turns_take_their_share_of_the_time() -> None:
    now, num_turns, slow = 0.0, 0, GrammarCpuTime()
    turns = SlowGrammarThrottle(lambda: now)
    for _ in range(1000):
        if turns.try_grammar(slow):
            num_turns += 1
            slow.spent_s += 0.03
            now += 0.03
        now += 0.01
        turns.begin_step()
    assert abs(num_turns * 0.03 / now - MAX_SLOW_GRAMMAR_SHARE) < 0.01


def test_a_callers_grammars_are_slow_together() -> None:
    one, other, quick = GrammarCpuTime(), GrammarCpuTime(), GrammarCpuTime()
    one.budget = other.budget = quick.budget = GrammarBudget()
    one._charge_seconds(CALLER_BURST_S / 2)
    other._charge_seconds(1e-6)
    assert (one.is_slow, other.is_slow, quick.is_slow) == (True, True, False)
