"""The optimizers and their learning rate. The rate is a pure function of the step, so a resumed run needs no scheduler
state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from swiftkv_platform.specs import OptimizerSpec


def learning_rate(spec: OptimizerSpec, step: int, total_steps: int) -> float:
    """The rate of optimizer step `step` (0-based): a linear rise over the warm-up, then the schedule down to zero.

    The warm-up takes ceil(warmup_ratio x total_steps) steps; its last one has the full rate. The step after the last
    would have rate 0, so the last one still learns.
    """
    peak = spec.learning_rate
    assert peak is not None, "settled before training, see spec_defaults"
    warmup_steps = math.ceil(spec.warmup_ratio * total_steps)
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
        matrices,
        lr=0.0,
        weight_decay=spec.weight_decay,
        momentum=spec.momentum,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, build_optimizer(rest, spec)] if rest else [muon]


def set_learning_rate(optimizers: Sequence[Optimizer], rate: float) -> None:
    """Use `rate` for the next step of every group."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
