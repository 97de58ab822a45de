"""Statistics of quality gates on tasks, from sample counts alone: default limits, and a forecast of which losses a
spec's gates can detect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.specs import PAPER_TASKS, EvaluationSpec, RowTaskSpec
from swiftkv_platform.specs.evaluation import get_task_name_and_data_dir

DISCORDANT_SHARE = 0.08
"""Assumed share of samples that exactly one of two equally good models solves."""
PASS_PROBABILITY = 0.98
"""Probability that a student without a loss passes all gates on tasks at the default limits. It is above the documented
95% because the normal distribution is an approximation."""
DEFAULT_DROP_RANGE = 1.0, 10.0
"""Range of the default `max_drop` in points. With too few samples for the upper end, gates are inconclusive even for
good students."""
WORSE_STUDENT_LOSS = 3.0
"""Loss in points on every task of the worse student whose pass probability is forecast."""
MAX_FALSE_PASS_PROBABILITY = 0.05
"""Pass probability of a worse student above which plans and `validate` warn."""
DEFAULT_NEEDLE_DROP_RANGE = 5.0, 20.0
"""Range of the default `max_needle_drop` in points."""
NEEDLE_LENGTHS = (1024, 4096)
"""Default lengths of needle prompts for instruction-tuned models, up to the context length."""

_PAPER_TASK_NAMES = tuple(task.name for task in PAPER_TASKS)
_MAX_NEEDLE_GATES = 16
_Z_975 = NormalDist().inv_cdf(0.975)
_SAMPLES_PER_TASK = {
    "arc_challenge": 1172,
    "arc_challenge_llama": 1172,
    "arc_easy": 2376,
    "boolq": 3270,
    "builtin:gsm8k": 1319,
    "builtin:humaneval": 164,
    "builtin:ifeval": 541,
    "builtin:tool-calls": 30,
    "gsm8k": 1319,
    "gsm8k_llama": 1319,
    "hellaswag": 10_042,
    "humaneval": 164,
    "ifeval": 541,
    "openbookqa": 500,
    "piqa": 1838,
    "truthfulqa_mc2": 817,
    "winogrande": 1267,
}
_NUM_SUBJECTS, _ALL_SUBJECTS = 57, 14_042
_MMLU_GROUPS = frozenset({"builtin:mmlu", "mmlu", "mmlu_llama", "mmlu_cot_llama"})
"""MMLU groups. `task_limit` applies to each of their subjects."""


class TaskForecast(FrozenBaseModel):
    """Losses that the gate on one task can detect."""

    task: str
    field: str
    """Dotted path of the limit in the spec."""
    num_samples: int | None
    """Samples of the task; None if unknown before the task runs."""
    limit: float | None
    """Limit in points (0 to 100); None if it depends on an unknown number of samples."""
    excluded: float | None
    """Smallest true loss in points that the samples can exclude, see `compute_min_detectable_drop`."""
    samples_needed: int | None
    """Samples that a student without a loss needs to pass; None if the task has enough, or if unknown."""
    passes_worse: float | None
    """Probability that the gate passes a student that loses `WORSE_STUDENT_LOSS` points; None if unknown."""


def compute_min_detectable_drop(num_samples: int, *, num_gates: int = 1) -> float:
    """Return the smallest true loss that `num_samples` paired samples can exclude, in points (0 to 100).

    A gate passes if the whole 95% interval (Agresti and Min's, `evaluation.paired`) is within the limit. With this loss
    as the limit, a student without a loss passes `num_gates` independent gates with probability `PASS_PROBABILITY` if
    teacher and student differ on `DISCORDANT_SHARE` of the samples.
    """
    share = PASS_PROBABILITY ** (1.0 / num_gates)
    counted = num_samples + 2
    discordant = num_samples * DISCORDANT_SHARE
    margin = _Z_975 * math.sqrt(discordant + 1.0)  # half-width of the interval
    spread = NormalDist().inv_cdf(share) * math.sqrt(discordant)  # of the measured loss
    return min(100.0 * (margin + spread) / counted, 100.0)


def compute_pass_probability(loss: float, *, num_samples: int, limit: float) -> float:
    """Return the probability that a gate with `limit` passes a student with a true loss of `loss` points."""
    discordant = num_samples * max(DISCORDANT_SHARE, loss / 100.0)
    margin = _Z_975 * math.sqrt(discordant + 1.0)
    spread = math.sqrt(discordant - num_samples * (loss / 100.0) ** 2) or 1.0
    return NormalDist().cdf(((limit - loss) / 100.0 * num_samples - margin) / spread)


def compute_false_pass_probability(gates: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the probability that a student with a loss of `WORSE_STUDENT_LOSS` points on every task passes all gates
    on tasks, except needles. None without such gates, or if the samples or limit of one are unknown.

    Args:
        gates: forecasts as plain values.
    """
    chances = [gate.get("passes_worse") for gate in gates if str(gate["field"]).endswith("max_drop")]
    known = [chance for chance in chances if chance is not None]
    return math.prod(known) if chances and len(known) == len(chances) else None


def compute_default_limit(num_samples: int, *, num_gates: int) -> float:
    """Return the limit of `auto` in points for a task that scores shares. `num_gates`: see `count_task_gates`."""
    return _clamp_limit(DEFAULT_DROP_RANGE, compute_min_detectable_drop(num_samples, num_gates=num_gates))


def compute_default_needle_limit(num_samples: int) -> float:
    """Return the default limit for one length of needle prompts, in points. Needles do not count as gates on tasks,
    since only a tokenizer decides whether they exist. They have few samples, so the limit is wide."""
    return _clamp_limit(
        DEFAULT_NEEDLE_DROP_RANGE, compute_min_detectable_drop(num_samples, num_gates=_MAX_NEEDLE_GATES)
    )


def _clamp_limit(bounds: tuple[float, float], loss: float) -> float:
    return min(max(bounds[0], round(loss, 2)), bounds[1])


def find_min_samples_to_exclude(loss: float, *, num_gates: int = 1) -> int | None:
    """Return the min number of samples from which a passed gate rules out a true loss of `loss` points; None if no
    number does."""
    if loss <= 0.0:
        return None
    low, high = 0, 1
    while compute_min_detectable_drop(high, num_gates=num_gates) > loss:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if compute_min_detectable_drop(middle, num_gates=num_gates) > loss:
            low = middle
        else:
            high = middle
    return high


def count_task_gates(spec: EvaluationSpec) -> int:
    """Count the gates on tasks of a spec, without needles. Forecasts and reports share this number."""
    return max(len(_list_task_names(spec)) + len(spec.rows), 1)


def forecast_gates(spec: EvaluationSpec) -> tuple[TaskForecast, ...]:
    """Forecast a spec's gates on tasks. Needles are included only if the spec sets their lengths, since the tokenizer
    decides about the default."""
    counts = [(name, _count_samples(name, spec.task_limit)) for name in _list_task_names(spec)]
    counts += [(task.name, _count_rows(task, spec.task_limit)) for task in spec.rows]
    found = [] if spec.max_drop is None else [_forecast_task_gate(name, samples, spec) for name, samples in counts]
    lengths = spec.needle_lengths or ()
    if spec.max_needle_drop is not None:
        found += [_forecast_needle_gate(length, spec) for length in lengths]
    return tuple(found)


def _forecast_task_gate(name: str, samples: int | None, spec: EvaluationSpec) -> TaskForecast:
    num_gates = count_task_gates(spec)
    limit = spec.max_drop if isinstance(spec.max_drop, float) else None
    if limit is None and samples is not None:
        limit = compute_default_limit(samples, num_gates=num_gates)
    return _make_forecast(name, "max_drop", samples, limit, num_gates)


def _forecast_needle_gate(length: int, spec: EvaluationSpec) -> TaskForecast:
    samples = spec.needle_samples if spec.task_limit is None else min(spec.needle_samples, spec.task_limit)
    asked = spec.max_needle_drop
    limit = asked if isinstance(asked, float) else compute_default_needle_limit(samples)
    return _make_forecast(f"needle_{length}", "max_needle_drop", samples, limit, _MAX_NEEDLE_GATES)


def _make_forecast(name: str, field: str, samples: int | None, limit: float | None, num_gates: int) -> TaskForecast:
    excluded = needed = worse = None
    if samples is not None:
        excluded = round(compute_min_detectable_drop(samples, num_gates=num_gates), 2)
        if limit is not None and excluded > limit:
            needed = find_min_samples_to_exclude(limit, num_gates=num_gates)
        if limit is not None:
            worse = round(compute_pass_probability(WORSE_STUDENT_LOSS, num_samples=samples, limit=limit), 3)
    return TaskForecast(
        task=name,
        field=f"evaluation.{field}",
        num_samples=samples,
        limit=limit,
        excluded=excluded,
        samples_needed=needed,
        passes_worse=worse,
    )


def _list_task_names(spec: EvaluationSpec) -> list[str]:
    """Return the names of the tasks of a spec, with `paper` expanded."""
    named = (get_task_name_and_data_dir(task)[0] for task in spec.tasks)
    return [one for name in named for one in (_PAPER_TASK_NAMES if name == "paper" else (name,))]


def _count_rows(task: RowTaskSpec, limit: int | None) -> int | None:
    """Return the number of rows that a task asks for, up to `limit`; None if it takes all, or scores no shares."""
    count = task.source.sample_count
    if count is None or task.metric == "likelihood":
        return None
    return count if limit is None else min(count, limit)


def _count_samples(name: str, limit: int | None) -> int | None:
    """Return the published number of samples of a task, up to `limit`; None if unknown."""
    if name in _MMLU_GROUPS:
        return _ALL_SUBJECTS if limit is None else min(_NUM_SUBJECTS * limit, _ALL_SUBJECTS)
    known = _SAMPLES_PER_TASK.get(name)
    return known if known is None or limit is None else min(known, limit)
