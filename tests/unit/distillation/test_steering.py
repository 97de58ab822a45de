"""Rollbacks and the end of a run by its held-out KL, their notes, and the search for a learning rate."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from swiftkv_platform.contract.events import ATTEMPT_EVENT, SteeringEvent, SteeringReason
from swiftkv_platform.data.packing import Samples, pack
from swiftkv_platform.distillation.steering import (
    SteeringDecision,
    SteeringState,
    choose_first_trial_rate,
    choose_model_step,
    compute_max_stable_rate,
    decide_after_measurement,
    decide_rollback,
    describe_decision,
    search_learning_rate,
)
from swiftkv_platform.distillation.trainer import select_validation_rows
from swiftkv_platform.planning.training import MAX_TRIALS, compute_trial_steps
from swiftkv_platform.specs import TrainingSpec, ValidationSpec


def training(**fields: Any) -> TrainingSpec:
    return TrainingSpec.model_validate(fields)


def decide_all(*kls: float, spec: TrainingSpec | None = None) -> SteeringDecision:
    """The last decision of a run with these held-out KLs at steps 0, 10, 20, ..."""
    decision = SteeringDecision(SteeringState())
    for number, kl in enumerate(kls):
        decision = decide_after_measurement(decision.state, kl, 10 * number, spec or training())
    return decision


def test_the_first_measurement_is_the_start_and_the_lowest_the_best() -> None:
    decision = decide_all(0.5)
    assert (decision.state.start_kl, decision.state.best_kl, decision.state.best_step) == (0.5, 0.5, 0)
    assert decision.is_best
    assert (decision.rollback, decision.end) == (None, None)
    decision = decide_all(0.5, 0.3, 0.35)  # slightly worse: no rollback
    assert (decision.state.best_kl, decision.state.best_step) == (0.3, 10)
    assert (decision.is_best, decision.rollback) == (False, None)


def test_of_states_that_a_few_rows_cannot_tell_apart_the_later_one_is_the_best() -> None:
    """A tie is one with the lowest KL, so that ties do not drift upwards; a KL above the start's is never the best."""
    decision = decide_all(0.5, 0.300, 0.304)
    assert (decision.is_best, decision.state.best_step, decision.state.best_kl, decision.state.lowest_kl) == (
        True,
        20,
        0.304,
        0.3,
    )
    drifting = decide_all(0.5, 0.300, 0.305, 0.310)
    assert (drifting.is_best, drifting.state.best_step) == (False, 20)
    unguarded = decide_all(0.5, 0.505, spec=training(guard=None))
    assert (unguarded.is_best, unguarded.state.best_step) == (False, 0)
    before = {name: value for name, value in decide_all(0.5, 0.3).state.to_floats().items() if name != "lowest_kl"}
    assert decide_after_measurement(SteeringState.from_floats(before), 0.304, 20, training()).state.best_step == 20
    assert decide_after_measurement(SteeringState.from_floats(before), 0.31, 20, training()).state.best_step == 10


def test_a_state_that_is_not_kept_is_not_the_best() -> None:
    """A state without a checkpoint is never the best, but its KL still resets the count of early stopping."""
    spec = training(early_stopping={"patience": 2})
    start = decide_all(0.5, 0.4, 0.42, spec=spec)
    decision = decide_after_measurement(start.state, 0.3, 30, spec, has_checkpoint=False)
    assert (decision.is_best, decision.state.best_step, decision.state.best_kl) == (False, 10, 0.4)
    assert (decision.state.num_stale, decision.state.reference_kl, decision.end) == (0, 0.3, None)
    later = decide_after_measurement(decision.state, 0.35, 40, spec)
    assert (later.is_best, later.state.best_step) == (True, 40)


@pytest.mark.parametrize(
    ("kls", "reason"),
    [
        ((0.5, 0.51), SteeringReason.HELD_OUT_KL_ABOVE_START),
        ((0.5, math.nan), SteeringReason.HELD_OUT_KL_ABOVE_START),
        ((0.5, math.inf), SteeringReason.HELD_OUT_KL_ABOVE_START),
        ((0.5, 0.2, 0.31), SteeringReason.HELD_OUT_KL_DIVERGED),
    ],
)
def test_kl_above_start_or_far_above_best_goes_back_at_half_the_rate(
    kls: tuple[float, ...], reason: SteeringReason
) -> None:
    decision = decide_all(*kls)
    assert (decision.rollback, decision.end) == (reason, None)
    assert (decision.state.rate_scale, decision.state.num_rollbacks) == (0.5, 1)
    assert decision.state.restarted_at == 10 * (len(kls) - 1)
    assert decision.state.best_step == 10 * (len(kls) - 2)


def test_when_a_run_goes_back_for_good() -> None:
    """A run with no rollback left ends at its best step; a bad last step goes back in any case; without a guard no step
    does."""
    decision = decide_all(0.5, 0.4, 0.6, 0.6, 0.6, 0.6)
    assert (decision.rollback, decision.end) == (
        SteeringReason.HELD_OUT_KL_ABOVE_START,
        SteeringReason.ROLLBACKS_EXHAUSTED,
    )
    assert (decision.state.num_rollbacks, decision.state.ended, decision.state.best_step) == (3, 1, 10)
    decision = decide_after_measurement(decide_all(0.5, 0.4).state, 0.6, 20, training(keep_best=False), is_last=True)
    assert (decision.rollback, decision.end) == (SteeringReason.HELD_OUT_KL_ABOVE_START, SteeringReason.LAST_STEP)
    decision = decide_all(0.5, 0.1, 7.0, spec=training(guard=None))
    assert (decision.rollback, decision.state.best_step) == (None, 10)


def test_a_run_stops_once_its_kl_no_longer_falls() -> None:
    spec = training(early_stopping={"patience": 2, "min_delta": 0.01})
    assert decide_all(0.5, 0.4, 0.395, spec=spec).end is None
    decision = decide_all(0.5, 0.4, 0.395, 0.392, spec=spec)
    assert (decision.end, decision.state.ended) == (SteeringReason.EARLY_STOPPING, 1)
    assert decision.state.best_step == 30  # the lowest, though by too little to count as an improvement
    slowly = decide_all(0.5, 0.4, 0.395, 0.389, 0.385, spec=spec)  # small steps add up
    assert (slowly.end, slowly.state.num_stale) == (None, 1)


def test_the_model_is_of_the_best_step_unless_the_last_is_asked_for() -> None:
    state = decide_all(0.5, 0.4, 0.45).state
    assert choose_model_step(state, training()) == 10
    assert choose_model_step(state, training(keep_best=False)) is None
    assert choose_model_step(SteeringState(), training()) is None
    state = decide_rollback(decide_all(0.5, 0.4).state, SteeringReason.LOSS_NOT_FINITE, 17, training()).state
    assert SteeringState.from_floats(state.to_floats()) == state
    assert math.isnan(SteeringState.from_floats({}).start_kl)


@pytest.mark.parametrize(
    ("kl", "shown"),
    [(0.6, "held-out KL 0.6 exceeds its initial value 0.5"), (math.nan, "held-out KL (not finite) exceeds")],
)
def test_a_step_back_is_told_with_its_reason_and_travels_as_an_event(kl: float, shown: str) -> None:
    decision = decide_after_measurement(decide_all(0.5, 0.4).state, kl, 20, training())
    (note,) = describe_decision(decision, kl, 20, 5e-4, 10)
    event = SteeringEvent(time=0.0, message=note.message, data=note.data)
    assert shown in note.message
    assert note.message.endswith("rolled back to step 10, continuing with learning rate 0.0005")
    assert ATTEMPT_EVENT.validate_json(event.model_dump_json()) == event


def test_the_end_says_which_step_the_model_is_of_and_why() -> None:
    lowest = "10. Its held-out KL, 0.4, is the lowest"
    near = "20. Its held-out KL, 0.404, is within 2% of the lowest (0.4)"
    for kl, chosen, said in ((0.45, 10, lowest), (0.404, 20, near)):
        decision = decide_after_measurement(decide_all(0.5, 0.4).state, kl, 20, training(), is_last=True)
        (note,) = describe_decision(decision, kl, 20, 1e-3, chosen)
        assert note.data["chosen_step"] == chosen
        assert note.message == (
            f"step 20: training is complete; the model is the state of step {said}; it was 0.5 before training"
        )


def test_measured_rows_are_a_tenth_of_those_trained_on_between() -> None:
    tokens = np.zeros(1000, dtype=np.int32)
    samples = Samples(tokens=tokens, loss_mask=np.ones(1000, dtype=np.bool_), starts=np.arange(0, 1001, 10))
    rows = pack(samples, np.arange(100), max_length=10, pad_token_id=0)
    for rows_between, max_tokens, number in ((300, 10_000, 30), (300, 100, 10), (5, 10_000, 1)):
        chosen = select_validation_rows(rows, ValidationSpec(max_tokens=max_tokens), rows_between)
        assert len(set(chosen)) == len(chosen) == number
        assert chosen[0] == 0
        assert number == 1 or chosen[-1] == 99


def valley(best: float, *, ruinous: float = math.inf) -> Callable[[float], float]:
    """Held-out KL by learning rate: lowest at `best`, and NaN from `ruinous` on."""
    return lambda rate: math.nan if rate >= ruinous else 0.2 + 0.1 * abs(math.log(rate / best))


def test_the_search_finds_the_lowest_kl_up_or_down() -> None:
    for best in (1e-3, 1e-3 / 3, 1e-3 / 9, 3e-3, 9e-3):
        rate, tried = search_learning_rate(1e-3, 0.5, valley(best))
        assert rate == pytest.approx(best)
        assert len(tried) <= MAX_TRIALS
    rate, tried = search_learning_rate(1e-2, 0.5, valley(1e-2 / 9, ruinous=2e-3))
    assert rate == pytest.approx(1e-2 / 9)
    assert [one["held_out_kl"] is None for one in tried] == [False, False, True, True], "rates without KL are skipped"


def test_of_rates_that_gain_nearly_as_much_the_highest_is_taken() -> None:
    kls = {1.0: 0.205, 1.0 / 3: 0.2, 1.0 / 9: 0.3}
    rate, _ = search_learning_rate(1.0, 0.5, lambda rate: min(kls.items(), key=lambda item: abs(item[0] - rate))[1])
    assert rate == 1.0


def test_the_lowest_rate_is_taken_where_none_gains_anything_and_none_above_the_highest() -> None:
    rate, tried = search_learning_rate(1.0, 0.5, lambda rate: 0.6 + rate)
    assert rate == pytest.approx(3.0 ** -(MAX_TRIALS - 1))
    assert len(tried) == MAX_TRIALS
    rate, tried = search_learning_rate(1e-3, 0.5, valley(9e-3), max_rate=4e-3)
    assert rate == max(one["learning_rate"] for one in tried) == pytest.approx(3e-3)


def test_bounds_of_a_search() -> None:
    """The highest rate moves no matrix by more than a share of its size; trials are short, and a short run has none."""
    matrices = [torch.full((4, 4), size) for size in (0.0, 0.01, 0.02, 9.0)]
    assert compute_max_stable_rate(matrices) == pytest.approx(0.05 * 0.02)
    assert compute_max_stable_rate([]) == math.inf
    assert choose_first_trial_rate(1.0, 1e-3, "qkv") == 1e-3
    assert choose_first_trial_rate(1e-5, 1e-3, "qkv") == 1e-5
    assert choose_first_trial_rate(1e-3, 1e-3, "all") == pytest.approx(2e-4)
    assert compute_trial_steps(106) is None
    assert compute_trial_steps(400) == 15
    assert compute_trial_steps(100_000) == 40
