"""What is worth drafting: from the text, and by what drafts cost and how they fared."""

from __future__ import annotations

import random

import pytest

from swiftkv_platform.engine.drafting import (
    DraftCosts,
    DraftHistory,
    PromptLookup,
    another_pass_pays,
    exit_head_pays,
    lookup_size,
)

COSTS = DraftCosts(lower=0.5, exit_head=0.03, row=0.06, max_step_tokens=16)


@pytest.mark.parametrize(
    ("text", "proposed"),
    [
        ([1, 2, 3], ()),
        ([1, 2, 3, 9, 2, 3], (9, 2, 3)),
        ([1, 2, 8, 7, 1, 2, 9, 7, 1, 2], (9, 7, 1)),  # the last time
        ([5, 1, 2, 8, 6, 1, 2, 9, 5, 1, 2], (8, 6, 1)),  # a longer match before a later one
        ([4, 5, 4, 5, 4, 5], (4, 5, 4)),  # the text ends within the draft, and is taken to repeat itself
        ([7, 7, 7], (7, 7, 7)),
        ([7, 1], ()),
    ],
)
def test_lookup_goes_on_as_the_text_did(text: list[int], proposed: tuple[int, ...]) -> None:
    assert PromptLookup().propose(text, 3) == proposed


def test_lookup_of_a_growing_text_is_that_of_the_whole() -> None:
    draw = random.Random(0)
    text: list[int] = []
    growing = PromptLookup()
    for _ in range(60):
        text += [draw.randrange(4) for _ in range(draw.randrange(1, 4))]
        assert growing.propose(text, 5) == PromptLookup().propose(text, 5)


def test_fewer_tokens_are_looked_up_the_more_sequences_wait_for_them() -> None:
    sizes = [lookup_size(DraftHistory(), COSTS, num_sequences, limit=10) for num_sequences in (1, 2, 4, 8, 16)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 4
    assert sizes[-1] == 0


def test_lookup_stops_where_nothing_is_accepted_and_is_tried_again_later() -> None:
    history = DraftHistory()
    for _ in range(40):
        history.observe(from_text=True, num_drafts=2, num_accepted=0)
    assert lookup_size(history, COSTS, 2, limit=10) == 0
    num_tokens = 0
    while lookup_size(history, COSTS, 2, limit=10) == 0:
        history.lookup_accepted.drift()
        num_tokens += 1
    assert 10 < num_tokens < 200


def test_a_sequence_does_not_draft_at_the_expense_of_many() -> None:
    assert exit_head_pays(DraftHistory(), COSTS, num_sequences=1, num_drafting=1)
    assert not exit_head_pays(DraftHistory(), COSTS, num_sequences=4, num_drafting=1)
    assert exit_head_pays(DraftHistory(), COSTS, num_sequences=4, num_drafting=4)
    assert another_pass_pays([DraftHistory()] * 4, COSTS, num_sequences=4, num_drafted=0)
    assert not another_pass_pays([DraftHistory()] * 2, COSTS, num_sequences=4, num_drafted=0)


def test_an_exit_head_that_is_never_sure_is_not_evaluated() -> None:
    history = DraftHistory()
    for _ in range(60):
        history.exit_confident.observe(0, 1)
    assert not exit_head_pays(history, COSTS, 1, 1)


def test_the_less_is_accepted_the_shorter_the_drafts() -> None:
    good, bad = DraftHistory(), DraftHistory()
    for _ in range(20):
        good.observe(from_text=False, num_drafts=4, num_accepted=4)
        bad.observe(from_text=False, num_drafts=4, num_accepted=2)
    assert another_pass_pays([good], COSTS, 1, num_drafted=3)
    assert not another_pass_pays([bad], COSTS, 1, num_drafted=3)
