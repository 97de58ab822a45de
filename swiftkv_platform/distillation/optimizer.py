"""The optimizers and their learning rate. The rate is a pure function of the step and the run's course, so a resumed
run needs no scheduler state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from swiftkv_platform.distillation.course import Course
from swiftkv_platform.specs import OptimizerSpec

FEWEST_WARMUP_STEPS = 20
"""Adam's second moments average over far more steps than a short run's share; with fewer, a handful of gradients sizes
the first full steps."""
WARMUP_RATIO = 0.05
_STEADY = Course()


def learning_rate(spec: OptimizerSpec, step: int, total_steps: int, course: Course = _STEADY) -> float:
    """The rate of optimizer step `step` (0-based): a linear rise over the warm-up, then the schedule down to zero.

    The last step of the warm-up has the full rate. The step after the last would have rate 0, so the last one still
    learns. `course`: its peak rate and warm-up, where it has them, stand for the spec's; after going back, the rate is
    lower and rises over a warm-up once more.
    """
    peak = spec.learning_rate if math.isnan(course.peak_rate) else course.peak_rate
    assert peak is not None, "settled before training, see specs.defaults"
    warmup_steps = course.warmup_steps
    if warmup_steps < 0:
        warmup_steps = math.ceil((WARMUP_RATIO if spec.warmup_ratio is None else spec.warmup_ratio) * total_steps)
    rate = _scheduled(spec, peak, step, total_steps, warmup_steps) * course.rate_scale
    since = step - course.restarted_at
    return rate * (since + 1) / warmup_steps if course.restarted_at and since < warmup_steps else rate


def default_warmup_steps(spec: OptimizerSpec, total_steps: int) -> int:
    """Steps of the warm-up: the spec's share of the run, or 5% and no fewer than 20, of a short run a fifth."""
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


def build_optimizer(parameters: Iterable[nn.Parameter], spec: OptimizerSpec) -> AdamW:
    """AdamW over the trained parameters; weight decay spares vectors (norms and biases)."""
    matrices, vectors = list[nn.Parameter](), list[nn.Parameter]()
    for parameter in parameters:
        shape = getattr(parameter, "ds_shape", parameter.shape)  # ZeRO stage 3 leaves an empty vector in its place
        (matrices if len(shape) >= 2 else vectors).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": spec.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return AdamW([group for group in groups if group["params"]], lr=0.0, betas=spec.betas)  # the step sets the rate


def build_optimizers(named: Iterable[tuple[str, nn.Parameter]], spec: OptimizerSpec) -> list[Optimizer]:
    """Build what `spec.name` asks for: AdamW over everything, or Muon over the matrices and AdamW over the rest.

    Muon (Jordan et al., 2024) orthogonalises the momentum of a matrix by Newton-Schulz iterations. Its step is scaled
    to the root mean square of Adam's (Liu et al., 2025), so both take one learning rate. The exit head is left to
    AdamW, as heads and embeddings are.

    Args:
        named: trained parameters by name; with Muon whole matrices or `DTensor`s, no flat shards.
    """
    if spec.name == "adamw":
        return [build_optimizer((parameter for _, parameter in named), spec)]
    matrices, rest = list[nn.Parameter](), list[nn.Parameter]()
    for name, parameter in named:
        (matrices if parameter.ndim == 2 and "exit_head." not in name else rest).append(parameter)
    muon = Muon(
        matrices, lr=0.0, weight_decay=spec.weight_decay, momentum=spec.momentum, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, build_optimizer(rest, spec)] if rest else [muon]


def set_learning_rate(optimizers: Sequence[Optimizer], rate: float) -> None:
    """Use `rate` for the next step of every group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
