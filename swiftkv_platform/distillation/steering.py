"""Decisions that steer a training run: its learning rate and, from the held-out KL, the best state, rollbacks and early
stopping. Pure functions of the step and the measurements, so a resumed run needs no other state. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from swiftkv_platform.contract.events import SteeringData, SteeringReason, TriedRate
from swiftkv_platform.planning.training import MAX_TRIALS
from swiftkv_platform.specs import OptimizerSpec, TrainingSpec

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDING_TOLERANCE = 1e-6
"""Relative tolerance of the check that KL has risen above its initial value."""
TIE_TOLERANCE = 0.02
"""Relative difference from the lowest KL that counts as a tie: a few validation rows resolve no smaller one. The latest
state wins a tie, since its rate was lower."""
MIN_WARMUP_STEPS = 20
"""Adam's second moments average over far more than 5% of a short run, and with fewer steps a handful of gradients
sizes the first full ones."""
DEFAULT_WARMUP_RATIO = 0.05
LEARNING_RATE_SEARCH_FACTOR = 3.0
"""Ratio of neighboring rates in the search."""
MIN_SHARE_OF_BEST_GAIN = 0.9
"""The search selects the highest rate that reaches this share of the largest fall of KL, because short trials favor
lower rates than a whole run does."""
MAX_RELATIVE_UPDATE = 0.05
"""Maximum ratio of the root mean square of an update to that of the weights: AdamW's first updates have the size of the
rate, and Muon's are scaled to AdamW's."""
ALL_LAYERS_RATE_FACTOR = 0.2
"""Factor on the spec's rate for the first trial if all layers are trained: the effects of their updates add up."""


@dataclass(frozen=True)
class SteeringState:
    """State of the decisions, part of every checkpoint, where each field is stored as a tensor under its name."""

    peak_rate: float = math.nan
    """Peak learning rate, after warm-up and before decay; NaN: the spec's."""
    rate_scale: float = 1.0
    """Factor on the peak rate; every rollback lowers it."""
    warmup_steps: int = -1
    """-1: `optimizer.warmup_ratio` of the whole run, or 5% if that is not set."""
    restarted_at: int = 0
    """Step of the last rollback, where the rate warms up again; 0: no rollback."""
    start_kl: float = math.nan
    """First measured held-out KL."""
    best_kl: float = math.nan
    """Held-out KL of the best state: the last one within `TIE_TOLERANCE` of the lowest."""
    best_step: int = -1
    """Step of the best state; -1: no measurement yet."""
    lowest_kl: float = math.nan
    """Lowest KL of all checkpoint candidates; NaN in checkpoints of older versions."""
    reference_kl: float = math.nan
    """KL when it last fell by more than `early_stopping.min_delta`."""
    num_stale: int = 0
    """Consecutive measurements since `reference_kl` changed."""
    num_rollbacks: int = 0
    ended: int = 0
    """1 if the run ended before its last step."""

    @property
    def is_measured(self) -> bool:
        return self.best_step >= 0

    def to_floats(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items()}

    @classmethod
    def from_floats(cls, values: dict[str, float]) -> SteeringState:
        """Restore a state from the field values in a checkpoint; missing fields get their defaults."""
        integers = {item.name for item in fields(cls) if item.type == "int"}
        typed: dict[str, Any] = {name: int(value) if name in integers else value for name, value in values.items()}
        return cls(**typed)

    def without_best(self) -> SteeringState:
        """Return a copy without a best state, for when its checkpoint is lost."""
        return replace(self, best_kl=math.nan, best_step=-1, lowest_kl=math.nan, reference_kl=math.nan, num_stale=0)

    def with_best(self, kl: float, step: int) -> SteeringState:
        """Return a copy whose best state is that of `step`, with held-out KL `kl`."""
        return replace(self, best_kl=kl, best_step=step, lowest_kl=min(kl, self.lowest_known_kl))

    def ties_or_beats_best(self, kl: float) -> bool:
        """Whether a state with held-out KL `kl` becomes the best state; never if `kl` is above the initial KL."""
        return kl <= min(self.lowest_known_kl * (1.0 + TIE_TOLERANCE), self.start_kl)

    @property
    def lowest_known_kl(self) -> float:
        """Infinite before the first measurement."""
        known = self.best_kl if math.isnan(self.lowest_kl) else self.lowest_kl
        return math.inf if math.isnan(known) else known


@dataclass(frozen=True)
class TrainingProgress:
    """Progress of a run."""

    step: int = 0
    """Completed optimizer steps."""
    tokens: int = 0
    """Positions counted by the loss."""
    steering: SteeringState = field(default_factory=SteeringState)
    held_out_kl: float | None = None
    """Held-out KL of the current state in nats, if measured. Not stored in a checkpoint's tensors."""


@dataclass(frozen=True)
class SteeringDecision:
    """Decision after a measurement."""

    state: SteeringState
    """New state."""
    rollback: SteeringReason | None = None
    """Reason to roll back to the best state; None: no rollback."""
    end: SteeringReason | None = None
    """Reason to end the run; None: continue."""
    is_best: bool = False


def decide_after_measurement(
    state: SteeringState,
    kl: float,
    step: int,
    spec: TrainingSpec,
    *,
    is_last: bool = False,
    has_checkpoint: bool = True,
) -> SteeringDecision:
    """Decide after the held-out KL `kl` was measured at `step`: continue, roll back, or end.

    A rollback does not reset the step count, so the run's budget and the order of its rows stay the same.

    Args:
        has_checkpoint: whether the state is saved, so that it can become the model or the target of a rollback.
    """
    # 1. the first measurement is the initial KL
    if not state.is_measured:
        start = kl if math.isnan(state.start_kl) else state.start_kl
        first = replace(state, start_kl=start, reference_kl=kl).with_best(kl, step)
        return SteeringDecision(first, is_best=True, end=SteeringReason.LAST_STEP if is_last else None)
    # 2. roll back if the KL has risen too far
    reason = _find_rollback_reason(state, kl, spec)
    if reason is not None:
        return decide_rollback(state, reason, step, spec, is_last=is_last)
    # 3. update the best state
    is_best = has_checkpoint and state.ties_or_beats_best(kl)
    if is_best:
        state = state.with_best(kl, step)
    # 4. end early if the KL no longer falls
    stopping = spec.early_stopping
    if stopping is not None:
        improved = kl < state.reference_kl - stopping.min_delta
        state = replace(
            state,
            reference_kl=kl if improved else state.reference_kl,
            num_stale=0 if improved else state.num_stale + 1,
        )
        if state.num_stale >= stopping.patience and not is_last:
            return SteeringDecision(replace(state, ended=1), end=SteeringReason.EARLY_STOPPING, is_best=is_best)
    return SteeringDecision(state, end=SteeringReason.LAST_STEP if is_last else None, is_best=is_best)


def decide_rollback(
    state: SteeringState, reason: SteeringReason, step: int, spec: TrainingSpec, *, is_last: bool = False
) -> SteeringDecision:
    """Decide to return to the best state after `step`. Training continues at a lower rate, or ends if `step` is the
    last one or `guard.max_rollbacks` is reached."""
    guard = spec.guard
    assert guard is not None, "rollbacks need a guard"
    if is_last:
        return SteeringDecision(state, rollback=reason, end=SteeringReason.LAST_STEP)
    if state.num_rollbacks >= guard.max_rollbacks:
        return SteeringDecision(replace(state, ended=1), rollback=reason, end=SteeringReason.ROLLBACKS_EXHAUSTED)
    restarted = replace(
        state,
        rate_scale=state.rate_scale * guard.rate_factor,
        restarted_at=step,
        num_stale=0,
        num_rollbacks=state.num_rollbacks + 1,
    )
    return SteeringDecision(restarted, rollback=reason)


def _find_rollback_reason(state: SteeringState, kl: float, spec: TrainingSpec) -> SteeringReason | None:
    if spec.guard is None:
        return None
    if not kl <= state.start_kl * (1.0 + _ROUNDING_TOLERANCE):  # also true for NaN
        return SteeringReason.HELD_OUT_KL_ABOVE_START
    if kl > state.best_kl * spec.guard.divergence_factor:
        return SteeringReason.HELD_OUT_KL_DIVERGED
    return None


def choose_model_step(state: SteeringState, spec: TrainingSpec) -> int | None:
    """Return the step whose state becomes the model; None for the last."""
    return state.best_step if spec.keep_best and state.is_measured else None


@dataclass(frozen=True)
class SteeringNote:
    """Message and data of an event of kind `course`."""

    message: str
    data: SteeringData


def describe_learning_rate(state: SteeringState, trials: list[TriedRate]) -> SteeringNote:
    """Describe how the peak rate was found. `trials`: trials of the search; empty if the rate was only lowered to
    `compute_max_stable_rate`."""
    message = f"learning rate lowered to {state.peak_rate:.3g} for stability"
    if trials:
        found = ", ".join(f"{_format_kl(trial['held_out_kl'])} at {trial['learning_rate']:.3g}" for trial in trials)
        message = (
            f"learning rate search selected {state.peak_rate:.3g}; held-out KL after short trials: {found} "
            f"({state.start_kl:.4g} before training)"
        )
    return SteeringNote(
        message,
        {
            "action": "rate",
            "code": SteeringReason.RATE_SEARCHED if trials else SteeringReason.RATE_BOUNDED,
            "step": 0,
            "start_kl": state.start_kl,
            "learning_rate": state.peak_rate,
            "tried": trials,
        },
    )


_REASONS = {
    SteeringReason.HELD_OUT_KL_ABOVE_START: "held-out KL {kl} exceeds its initial value {start}",
    SteeringReason.HELD_OUT_KL_DIVERGED: "held-out KL {kl} is far above the best, {best}",
    SteeringReason.LOSS_NOT_FINITE: "the loss is not finite",
    SteeringReason.EARLY_STOPPING: "held-out KL {kl} no longer improves",
    SteeringReason.ROLLBACKS_EXHAUSTED: "rollback limit ({rollbacks}) reached",
    SteeringReason.LAST_STEP: "training is complete",
}


def describe_decision(
    decision: SteeringDecision, kl: float, step: int, rate: float, chosen: int | None
) -> list[SteeringNote]:
    """Describe a decision by up to two notes: its rollback and the end of the run.

    Args:
        rate: the new peak learning rate.
        chosen: if the run ends, the step whose state becomes the model; None for the last.
    """
    state, notes = decision.state, list[SteeringNote]()
    measured_kl = kl if math.isfinite(kl) else None
    initial, best = _format_kl(state.start_kl), _format_kl(state.best_kl)
    figures = {"kl": _format_kl(measured_kl), "start": initial, "best": best, "rollbacks": state.num_rollbacks}

    def make_data(action: Literal["rollback", "end"], code: SteeringReason) -> SteeringData:
        return {
            "action": action,
            "code": code,
            "step": step,
            "held_out_kl": measured_kl,
            "start_kl": state.start_kl,
            "best_kl": state.best_kl,
            "best_step": state.best_step,
            "learning_rate": rate,
        }

    if decision.rollback is not None:
        message = f"step {step}: {_REASONS[decision.rollback].format(**figures)}; rolled back to step {state.best_step}"
        if decision.end is None:
            message += f", continuing with learning rate {rate:.3g}"
        notes.append(SteeringNote(message, make_data("rollback", decision.rollback)))
    if decision.end is not None:
        model_step = step if chosen is None else chosen
        message = (
            f"step {step}: {_REASONS[decision.end].format(**figures)}; the model is the state of step {model_step}"
        )
        if model_step == state.best_step:
            tie = f"within {TIE_TOLERANCE:.0%} of the lowest ({_format_kl(state.lowest_known_kl)})"
            rank = "the lowest" if state.best_kl <= state.lowest_known_kl else tie
            message += f". Its held-out KL, {best}, is {rank}; it was {initial} before training"
        notes.append(SteeringNote(message, {**make_data("end", decision.end), "chosen_step": model_step}))
    return notes


def _format_kl(kl: float | None) -> str:
    return "(not finite)" if kl is None else f"{kl:.4g}"


_INITIAL_STATE = SteeringState()


def get_learning_rate(spec: OptimizerSpec, step: int, total_steps: int, state: SteeringState = _INITIAL_STATE) -> float:
    """Return the rate of optimizer step `step` (0-based): a linear rise over the warm-up, then the schedule down to
    zero.

    The last step of the warm-up has the full rate. The rate would reach 0 one step after the last, so the last step
    still learns. Peak rate and warm-up of `state`, if set, override the spec's. After a rollback, the rate is lower and
    warms up again.
    """
    peak = spec.learning_rate if math.isnan(state.peak_rate) else state.peak_rate
    assert peak is not None, "set before training by specs.job.resolve_model_defaults"
    warmup_steps = state.warmup_steps
    if warmup_steps < 0:
        ratio = DEFAULT_WARMUP_RATIO if spec.warmup_ratio is None else spec.warmup_ratio
        warmup_steps = math.ceil(ratio * total_steps)
    rate = _compute_scheduled_rate(spec, peak, step, total_steps, warmup_steps) * state.rate_scale
    since = step - state.restarted_at
    return rate * (since + 1) / warmup_steps if state.restarted_at and since < warmup_steps else rate


def get_default_warmup_steps(spec: OptimizerSpec, total_steps: int) -> int:
    """Return the number of warm-up steps: the spec's share of the run; by default 5%, but at least 20 steps or, in
    short runs, a fifth of the steps."""
    if spec.warmup_ratio is not None:
        return math.ceil(spec.warmup_ratio * total_steps)
    return max(math.ceil(DEFAULT_WARMUP_RATIO * total_steps), min(MIN_WARMUP_STEPS, math.ceil(total_steps / 5)))


def _compute_scheduled_rate(spec: OptimizerSpec, peak: float, step: int, total_steps: int, warmup_steps: int) -> float:
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    progress = (step - warmup_steps) / max(total_steps - warmup_steps, 1)
    match spec.schedule:
        case "constant":
            return peak
        case "linear":
            return peak * (1.0 - progress)
        case "cosine":
            return peak * 0.5 * (1.0 + math.cos(math.pi * progress))


def compute_max_stable_rate(matrices: Iterable[Tensor]) -> float:
    """Return the rate at which an update of the median trained matrix has the relative size `MAX_RELATIVE_UPDATE`."""
    sizes = sorted(float(matrix.detach().float().square().mean().sqrt()) for matrix in matrices)
    sizes = [size for size in sizes if size > 0.0]  # a head that starts at zero has no size to compare with
    return MAX_RELATIVE_UPDATE * sizes[len(sizes) // 2] if sizes else math.inf


def choose_first_trial_rate(rate: float, max_rate: float, trainable: str) -> float:
    """Return the first rate of the search, or the rate to train with if there is no search."""
    return min(rate * ALL_LAYERS_RATE_FACTOR if trainable == "all" else rate, max_rate)


def search_learning_rate(
    first: float, start_kl: float, run_trial: Callable[[float], float], *, max_rate: float = math.inf
) -> tuple[float, list[TriedRate]]:
    """Return the rate to train with, and the trials.

    Tries `first`, then lower or higher rates by factors of `LEARNING_RATE_SEARCH_FACTOR`, until the KL no longer
    falls, the next rate exceeds `max_rate`, or `MAX_TRIALS` is reached. If no trial lowers the KL, the lowest rate is
    returned.

    Args:
        start_kl: held-out KL before training.
        run_trial: trains at a rate, from the same start each time; returns the held-out KL, not finite if it diverged.
    """
    kls: dict[float, float] = {}

    def measure_kl(rate: float) -> float:
        if rate not in kls:
            kl = run_trial(rate)
            kls[rate] = kl if math.isfinite(kl) else math.inf
        return kls[rate]

    # 1. choose the direction
    rate, factor = first, LEARNING_RATE_SEARCH_FACTOR
    if measure_kl(first) >= start_kl or measure_kl(first / LEARNING_RATE_SEARCH_FACTOR) < measure_kl(first):
        rate, factor = first / LEARNING_RATE_SEARCH_FACTOR, 1.0 / LEARNING_RATE_SEARCH_FACTOR
    # 2. follow it while the KL falls
    while (
        len(kls) < MAX_TRIALS
        and rate * factor <= max_rate
        and (measure_kl(rate) >= start_kl or measure_kl(rate * factor) < measure_kl(rate))
    ):
        rate *= factor
    trials: list[TriedRate] = [
        {"learning_rate": rate, "held_out_kl": kls[rate] if math.isfinite(kls[rate]) else None} for rate in sorted(kls)
    ]
    # 3. select the highest rate that is nearly as good as the best
    best_gain = start_kl - min(kls.values())
    if best_gain <= 0.0:
        return min(kls), trials
    return max(rate for rate, kl in kls.items() if start_kl - kl >= MIN_SHARE_OF_BEST_GAIN * best_gain), trials
