"""The course of a training run: its learning rate and, from the held-out KL, the peak rate that a search takes, the
best state, when to go back to it and when to end. All are functions of the step and the measurements, so a resumed run
needs no other state. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal

from swiftkv_platform.contract.events import CourseCode, CourseData, TriedRate
from swiftkv_platform.planning.steering import MAX_TRIALS
from swiftkv_platform.specs import OptimizerSpec, TrainingSpec

if TYPE_CHECKING:
    from torch import Tensor

_ROUNDING = 1e-6
"""Relative rounding error: only a KL above the start's by more counts as risen."""
TIE = 0.02
"""Share by which a KL may exceed the lowest and still count as equal: a few rows resolve no smaller difference. Of
equal states the latest is the best, since its rate was lower."""
FEWEST_WARMUP_STEPS = 20
"""Fewest default warm-up steps: Adam's second moments average over far more than 5% of a short run, and with fewer
steps a handful of gradients sizes the first full ones."""
WARMUP_RATIO = 0.05
FACTOR = 3.0
"""Ratio of neighbouring rates in the search."""
NEARLY = 0.9
"""Share of the largest fall of KL that counts as good as all of it. The highest rate that reaches it is taken, since
trials of a few steps favour low rates more than a whole run does."""
MAX_RELATIVE_UPDATE = 0.05
"""Largest ratio of the root mean square of an update to that of the weights: AdamW's first updates have the size of the
rate, and Muon's are scaled to AdamW's."""
SHARE_FOR_ALL_LAYERS = 0.2
"""Factor on the spec's rate for the first trial if all layers are trained: the effects of their updates add up."""


@dataclass(frozen=True)
class Course:
    """State that steers a run, part of every checkpoint. Numbers only, so that it is stored as tensors."""

    peak_rate: float = math.nan
    """Peak learning rate, after warm-up and before decay; NaN: the spec's."""
    rate_scale: float = 1.0
    """Factor on the peak rate, lowered whenever training goes back."""
    warmup_steps: int = -1
    """Steps of the warm-up; -1: `optimizer.warmup_ratio` of the whole run, or 5% if that is not set."""
    restarted_at: int = 0
    """Step after which training last went back, where the rate warms up again; 0: never."""
    start_kl: float = math.nan
    """First measured held-out KL."""
    best_kl: float = math.nan
    """Held-out KL of the best state, which is the last of those within `TIE` of the lowest."""
    best_step: int = -1
    """Step of the best state; -1: nothing has been measured yet."""
    lowest_kl: float = math.nan
    """Lowest KL of the states that could be kept; NaN in checkpoints of older versions."""
    reference_kl: float = math.nan
    """KL when it last fell by more than `early_stopping.min_delta`."""
    num_stale: int = 0
    """Measurements in a row since `reference_kl` last changed."""
    num_rollbacks: int = 0
    ended: int = 0
    """1 if the run is over before its last step."""

    @property
    def is_measured(self) -> bool:
        return self.best_step >= 0

    def numbers(self) -> dict[str, float]:
        return {name: float(value) for name, value in asdict(self).items()}

    @classmethod
    def of(cls, numbers: dict[str, float]) -> Course:
        """Make a course of stored `numbers`."""
        whole = {item.name for item in fields(cls) if item.type == "int"}
        values: dict[str, Any] = {name: int(value) if name in whole else value for name, value in numbers.items()}
        return cls(**values)

    def without_best(self) -> Course:
        """Return the course without a best state, for when its checkpoint is lost."""
        return replace(self, best_kl=math.nan, best_step=-1, lowest_kl=math.nan, reference_kl=math.nan, num_stale=0)

    def with_best(self, kl: float, step: int) -> Course:
        """Return the course with the state of `step`, whose held-out KL is `kl`, as the best."""
        return replace(self, best_kl=kl, best_step=step, lowest_kl=min(kl, self.lowest))

    def is_no_worse(self, kl: float) -> bool:
        """Whether a state with held-out KL `kl` becomes the best. It never does above the start's KL."""
        return kl <= min(self.lowest * (1.0 + TIE), self.start_kl)

    @property
    def lowest(self) -> float:
        """Lowest known held-out KL; infinite if there is none."""
        known = self.best_kl if math.isnan(self.lowest_kl) else self.lowest_kl
        return math.inf if math.isnan(known) else known


@dataclass(frozen=True)
class Progress:
    """Progress of a run."""

    step: int = 0
    """Optimizer steps done."""
    tokens: int = 0
    """Positions counted by the loss."""
    course: Course = field(default_factory=Course)
    held_out_kl: float | None = None
    """Held-out KL of the present state in nats, if measured. Not stored in a checkpoint's tensors."""


@dataclass(frozen=True)
class Turn:
    """Decision after a measurement."""

    course: Course
    """From here on."""
    rollback: CourseCode | None = None
    """Reason to go back to the best state, if training does."""
    end: CourseCode | None = None
    """Reason to end, if training does."""
    is_best: bool = False


def measured(
    course: Course, kl: float, step: int, spec: TrainingSpec, *, is_last: bool = False, may_be_best: bool = True
) -> Turn:
    """Return the turn that follows from the held-out KL `kl` after `step`.

    Going back does not reset the step count: the run's budget and the order of its rows stay as they are.

    Args:
        may_be_best: whether the state can be kept, to go back to it or to become the model.
    """
    if not course.is_measured:
        start = kl if math.isnan(course.start_kl) else course.start_kl
        first = replace(course, start_kl=start, reference_kl=kl).with_best(kl, step)
        return Turn(first, is_best=True, end=CourseCode.LAST_STEP if is_last else None)
    reason = _reason_to_go_back(course, kl, spec)
    if reason is not None:
        return went_back(course, reason, step, spec, is_last=is_last)
    is_best = may_be_best and course.is_no_worse(kl)
    if is_best:
        course = course.with_best(kl, step)
    stopping = spec.early_stopping
    if stopping is not None:
        improved = kl < course.reference_kl - stopping.min_delta
        course = replace(
            course,
            reference_kl=kl if improved else course.reference_kl,
            num_stale=0 if improved else course.num_stale + 1,
        )
        if course.num_stale >= stopping.patience and not is_last:
            return Turn(replace(course, ended=1), end=CourseCode.EARLY_STOPPING, is_best=is_best)
    return Turn(course, end=CourseCode.LAST_STEP if is_last else None, is_best=is_best)


def went_back(course: Course, reason: CourseCode, step: int, spec: TrainingSpec, *, is_last: bool = False) -> Turn:
    """Return the turn back to the best state after `step`: training goes on at a lower rate, or ends if `step` is the
    last or `guard.max_rollbacks` is used up."""
    guard = spec.guard
    assert guard is not None, "nothing goes back without a guard"
    if is_last:
        return Turn(course, rollback=reason, end=CourseCode.LAST_STEP)
    if course.num_rollbacks >= guard.max_rollbacks:
        return Turn(replace(course, ended=1), rollback=reason, end=CourseCode.ROLLBACKS_EXHAUSTED)
    gone = replace(
        course,
        rate_scale=course.rate_scale * guard.rate_factor,
        restarted_at=step,
        num_stale=0,
        num_rollbacks=course.num_rollbacks + 1,
    )
    return Turn(gone, rollback=reason)


def _reason_to_go_back(course: Course, kl: float, spec: TrainingSpec) -> CourseCode | None:
    if spec.guard is None:
        return None
    if not kl <= course.start_kl * (1.0 + _ROUNDING):  # also true for NaN
        return CourseCode.HELD_OUT_KL_ABOVE_START
    if kl > course.best_kl * spec.guard.divergence_factor:
        return CourseCode.HELD_OUT_KL_DIVERGED
    return None


def chosen_step(course: Course, spec: TrainingSpec) -> int | None:
    """Step whose state becomes the model; None for the last."""
    return course.best_step if spec.keep_best and course.is_measured else None


@dataclass(frozen=True)
class CourseNote:
    """Event of kind `course`: what a run did, and why."""

    message: str
    data: CourseData


def rate_note(course: Course, tried: list[TriedRate]) -> CourseNote:
    """Note of the peak rate that was found, where the spec asks for none. `tried`: the trials of the search; empty if
    the rate is only bounded by the size of the trained weights."""
    found = ", ".join(f"{_shown(one['held_out_kl'])} at {one['learning_rate']:.3g}" for one in tried)
    tested = f"from held-out KL {course.start_kl:.4g}, a few steps led to {found}"
    why = tested if tried else "larger updates would ruin the model"
    return CourseNote(
        f"learning rate {course.peak_rate:.3g}: {why}",
        {
            "action": "rate",
            "code": CourseCode.RATE_SEARCHED if tried else CourseCode.RATE_BOUNDED,
            "step": 0,
            "start_kl": course.start_kl,
            "learning_rate": course.peak_rate,
            "tried": tried,
        },
    )


_WHY = {
    CourseCode.HELD_OUT_KL_ABOVE_START: "held-out KL {kl} is above the start's {start}",
    CourseCode.HELD_OUT_KL_DIVERGED: "held-out KL {kl} is far above the best, {best}",
    CourseCode.LOSS_NOT_FINITE: "the loss is not finite",
    CourseCode.EARLY_STOPPING: "held-out KL, now {kl}, no longer falls",
    CourseCode.ROLLBACKS_EXHAUSTED: "held-out KL rose again, and training has gone back as often as it may",
    CourseCode.LAST_STEP: "the last step is done",
}


def turn_notes(turn: Turn, kl: float, step: int, rate: float, chosen: int | None) -> list[CourseNote]:
    """Notes of a turn: up to two, that training goes back and that it ends.

    Args:
        rate: the peak learning rate from here on.
        chosen: if the run ends, the step whose state becomes the model; None for the last.
    """
    course, notes = turn.course, list[CourseNote]()
    figures = {"kl": _shown(_finite(kl)), "start": _shown(course.start_kl), "best": _shown(course.best_kl)}

    def data(action: Literal["rollback", "end"], code: CourseCode) -> CourseData:
        return {
            "action": action,
            "code": code,
            "step": step,
            "held_out_kl": _finite(kl),
            "start_kl": course.start_kl,
            "best_kl": course.best_kl,
            "best_step": course.best_step,
            "learning_rate": rate,
        }

    if turn.rollback is not None:
        on = f", continuing with learning rate {rate:.3g}" if turn.end is None else ""
        message = (
            f"step {step}: {_WHY[turn.rollback].format(**figures)}; back to the state of step {course.best_step}{on}"
        )
        notes.append(CourseNote(message, data("rollback", turn.rollback)))
    if turn.end is not None:
        made = step if chosen is None else chosen
        message = f"step {step}: {_WHY[turn.end].format(**figures)}; the model is that of step {made}"
        if made == course.best_step:
            is_lowest = course.best_kl <= course.lowest
            lowest = "the lowest" if is_lowest else f"within {TIE:.0%} of the lowest ({_shown(course.lowest)})"
            message += f", whose held-out KL is {lowest}, {figures['best']}, from {figures['start']} at the start"
        notes.append(CourseNote(message, {**data("end", turn.end), "chosen_step": made}))
    return notes


def _finite(kl: float) -> float | None:
    return kl if math.isfinite(kl) else None


def _shown(kl: float | None) -> str:
    return "no number" if kl is None else f"{kl:.4g}"


_STEADY = Course()


def learning_rate(spec: OptimizerSpec, step: int, total_steps: int, course: Course = _STEADY) -> float:
    """The rate of optimizer step `step` (0-based): a linear rise over the warm-up, then the schedule down to zero.

    The last step of the warm-up has the full rate. The rate would reach 0 one step after the last, so the last step
    still learns. Peak rate and warm-up of `course`, if set, override the spec's. After going back, the rate is lower
    and warms up again.
    """
    peak = spec.learning_rate if math.isnan(course.peak_rate) else course.peak_rate
    assert peak is not None, "settled before training, see specs.job.resolve_defaults"
    warmup_steps = course.warmup_steps
    if warmup_steps < 0:
        warmup_steps = math.ceil((WARMUP_RATIO if spec.warmup_ratio is None else spec.warmup_ratio) * total_steps)
    rate = _scheduled(spec, peak, step, total_steps, warmup_steps) * course.rate_scale
    since = step - course.restarted_at
    return rate * (since + 1) / warmup_steps if course.restarted_at and since < warmup_steps else rate


def default_warmup_steps(spec: OptimizerSpec, total_steps: int) -> int:
    """Steps of the warm-up: the spec's share of the run, or 5% but at least 20 steps, in short runs a fifth."""
    if spec.warmup_ratio is not None:
        return math.ceil(spec.warmup_ratio * total_steps)
    return max(math.ceil(WARMUP_RATIO * total_steps), min(FEWEST_WARMUP_STEPS, math.ceil(total_steps / 5)))


def _scheduled(spec: OptimizerSpec, peak: float, step: int, total_steps: int, warmup_steps: int) -> float:
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


def highest_rate(matrices: Iterable[Tensor]) -> float:
    """Return the rate at which an update of the median trained matrix has the relative size `MAX_RELATIVE_UPDATE`."""
    sizes = sorted(float(matrix.detach().float().square().mean().sqrt()) for matrix in matrices)
    sizes = [size for size in sizes if size > 0.0]  # a head that starts at zero has no size to compare with
    return MAX_RELATIVE_UPDATE * sizes[len(sizes) // 2] if sizes else math.inf


def first_rate(rate: float, highest: float, trainable: str) -> float:
    """Return the first rate to try, or the rate to train with if there is no search."""
    return min(rate * SHARE_FOR_ALL_LAYERS if trainable == "all" else rate, highest)


def search(
    first: float, start_kl: float, held_out_kl: Callable[[float], float], *, highest: float = math.inf
) -> tuple[float, list[TriedRate]]:
    """Return the rate to train with, and the trials.

    Goes from `first` down by factors of three or, if that is worse, up, until the KL no longer falls, the next rate
    exceeds `highest`, or `MAX_TRIALS` is reached. The lowest rate if none brings the KL below the start's.

    Args:
        start_kl: held-out KL before training.
        held_out_kl: runs a trial at a rate, from the same start each time; held-out KL, not finite if it diverged.
    """
    kls: dict[float, float] = {}

    def kl(rate: float) -> float:
        if rate not in kls:
            found = held_out_kl(rate)
            kls[rate] = found if math.isfinite(found) else math.inf
        return kls[rate]

    rate, factor = first, FACTOR
    if kl(first) >= start_kl or kl(first / FACTOR) < kl(first):
        rate, factor = first / FACTOR, 1.0 / FACTOR
    while len(kls) < MAX_TRIALS and rate * factor <= highest and (kl(rate) >= start_kl or kl(rate * factor) < kl(rate)):
        rate *= factor
    tried: list[TriedRate] = [
        {"learning_rate": one, "held_out_kl": kls[one] if math.isfinite(kls[one]) else None} for one in sorted(kls)
    ]
    fall = start_kl - min(kls.values())
    if fall <= 0.0:
        return min(kls), tried
    return max(one for one, left in kls.items() if start_kl - left >= NEARLY * fall), tried
