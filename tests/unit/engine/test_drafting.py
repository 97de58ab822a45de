"""Choice of drafts: from the text, and by their cost and how many were accepted."""

import random

import pytest

from swiftkv_platform.engine.drafting import (
    AcceptanceHistory,
    ConfidenceCalibration,
    DraftCosts,
    PromptLookup,
    choose_num_lookup_tokens,
    choose_worthwhile_drafts,
    should_evaluate_exit_head,
)

COSTS = DraftCosts(lower_layers=0.5, exit_head=0.03, token=0.06, max_step_tokens=16)


def test_lookup_goes_on_as_the_text_did() -> None:
    """Lookup in a growing text proposes the same as lookup in the whole text."""
    for known, proposed in (
        ([1, 2, 3], ()),
        ([1, 2, 3, 9, 2, 3], (9, 2, 3)),
        ([1, 2, 8, 7, 1, 2, 9, 7, 1, 2], (9, 7, 1)),  # the last match counts
        ([5, 1, 2, 8, 6, 1, 2, 9, 5, 1, 2], (8, 6, 1)),  # a longer match goes before a later one
        ([4, 5, 4, 5, 4, 5], (4, 5, 4)),  # the draft reaches the end of the text and goes on as if it repeated itself
        ([7, 7, 7], (7, 7, 7)),
        ([7, 1], ()),
    ):
        assert PromptLookup().propose_tokens(known, 3) == proposed
    draw, text = random.Random(0), list[int]()
    growing = PromptLookup()
    for _ in range(60):
        text += [draw.randrange(4) for _ in range(draw.randrange(1, 4))]
        assert growing.propose_tokens(text, 5) == PromptLookup().propose_tokens(text, 5)


def test_fewer_tokens_are_looked_up_the_more_sequences_wait_for_them() -> None:
    sizes = [choose_num_lookup_tokens(AcceptanceHistory(), COSTS, num, limit=10) for num in (1, 2, 4, 8, 16)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > 4
    assert sizes[-1] == 0


def test_lookup_stops_where_nothing_is_accepted_and_is_tried_again_later() -> None:
    history = AcceptanceHistory()
    for _ in range(40):
        history.record_draft_results(from_text=True, num_drafts=2, num_accepted=0)
    assert choose_num_lookup_tokens(history, COSTS, 2, limit=10) == 0
    num_tokens = 0
    while choose_num_lookup_tokens(history, COSTS, 2, limit=10) == 0:
        history.lookup_acceptance.decay()
        num_tokens += 1
    assert 10 < num_tokens < 200


def test_a_draft_pays_where_it_is_accepted_more_often_than_it_costs() -> None:
    """A draft is chosen only if it gains more than it costs, also for the other sequences of the step."""
    assert choose_worthwhile_drafts([0.57], COSTS, num_sequences=1) == {0: pytest.approx(0.01)}
    assert not choose_worthwhile_drafts([0.55], COSTS, num_sequences=1)
    # Beside a sure draft, another one costs only its row: a chance of 0.2 is worth it, 0.1 is not.
    assert set(choose_worthwhile_drafts([1.0, 0.2, 0.9], COSTS, num_sequences=2)) == {0, 1, 2}
    assert set(choose_worthwhile_drafts([1.0, 0.1, 0.9], COSTS, num_sequences=2)) == {0, 2}
    assert should_evaluate_exit_head(AcceptanceHistory(), COSTS, num_sequences=1, num_drafting=1)
    assert not should_evaluate_exit_head(AcceptanceHistory(), COSTS, num_sequences=4, num_drafting=1)
    assert should_evaluate_exit_head(AcceptanceHistory(), COSTS, num_sequences=4, num_drafting=4)
    assert set(choose_worthwhile_drafts([0.9] * 4, COSTS, num_sequences=4)) == {0, 1, 2, 3}
    assert not choose_worthwhile_drafts([0.9] * 2, COSTS, num_sequences=4)
    draw = random.Random(0)
    for num_sequences in [*range(1, 17)] * 100:
        expected = [draw.random() for _ in range(num_sequences)]
        chosen = choose_worthwhile_drafts(expected, COSTS, num_sequences)
        if chosen:
            cost = (COSTS.lower_layers + COSTS.token * len(chosen)) * num_sequences
            assert sum(expected[at] for at in chosen) > cost


def drafted(history: AcceptanceHistory, confidence: float, *, accepted: bool) -> None:
    history.exit_confidences[:] = [confidence]
    history.record_draft_results(from_text=False, num_drafts=1, num_accepted=int(accepted))


@pytest.mark.parametrize(("confidence", "share"), [(0.9, 0.6), (0.5, 0.9), (0.3, 0.3)])
def test_a_confidence_is_believed_as_far_as_it_proved_right(confidence: float, share: float) -> None:
    reliability, draw = ConfidenceCalibration(0.1, 0.999), random.Random(0)
    assert reliability.estimate_acceptance(confidence) == pytest.approx(confidence)
    found = []
    for _ in range(600):
        reliability.learn_from_draft(confidence, accepted=draw.random() < share)
        found.append(reliability.estimate_acceptance(confidence))
    assert sum(found[300:]) / 300 == pytest.approx(share, abs=0.07)


def test_a_new_sequence_begins_with_what_the_engine_has_learned() -> None:
    parent, first, second = ConfidenceCalibration(0.1, 0.999), AcceptanceHistory(), AcceptanceHistory()
    first.use_parent_calibration(parent)
    for _ in range(50):
        drafted(first, 0.5, accepted=True)
    second.use_parent_calibration(parent)
    assert first.exit_calibration.estimate_acceptance(0.5) > second.exit_calibration.estimate_acceptance(0.5) > 0.7
    second.use_parent_calibration(parent)
    drafted(second, 0.5, accepted=False)
    second.use_parent_calibration(parent)
    assert second.exit_calibration.log_odds_shift < parent.log_odds_shift, "its own history is kept"


def test_drafts_after_the_first_that_was_rejected_say_nothing() -> None:
    one, two = AcceptanceHistory(), AcceptanceHistory()
    one.exit_confidences[:], two.exit_confidences[:] = [0.9, 0.8], [0.9, 0.8, 0.99]
    one.record_draft_results(from_text=False, num_drafts=2, num_accepted=1)
    two.record_draft_results(from_text=False, num_drafts=3, num_accepted=1)
    assert one.exit_calibration.log_odds_shift == two.exit_calibration.log_odds_shift < 0.0


def test_an_exit_head_that_is_never_sure_or_always_wrong_costs_little() -> None:
    """1,000 tokens whose drafts are all rejected cost at most 3% more than `off`."""
    unsure = AcceptanceHistory()
    for _ in range(60):
        unsure.record_exit_head_gain(0.0)
    assert not should_evaluate_exit_head(unsure, COSTS, 1, 1)
    history, spent = AcceptanceHistory(), 0.0
    history.use_parent_calibration(ConfidenceCalibration(0.1, 0.999))
    for _ in range(1000):
        if not should_evaluate_exit_head(history, COSTS, 1, 1):
            history.decay_exit_statistics()
            continue
        gains = choose_worthwhile_drafts([history.exit_calibration.estimate_acceptance(0.95)], COSTS, 1)
        history.record_exit_head_gain(gains.get(0, 0.0))
        spent += COSTS.exit_head
        if gains:
            spent += COSTS.lower_layers + COSTS.token
            drafted(history, 0.95, accepted=False)
    assert 0 < spent < 30
