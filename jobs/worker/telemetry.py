"""Utilisation of a worker, beside its step metrics: arithmetic, share of the device's peak, memory. FLOPs follow
from the model's shape (`planning.training`); time and memory are measured.
"""

from __future__ import annotations

import resource
import sys
from dataclasses import replace
from typing import Any

import torch

from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.distillation.trainer import StepMetrics
from swiftkv_platform.errors import ModelError
from swiftkv_platform.planning.job_setup import training_setup
from swiftkv_platform.planning.machines import PEAK_FLOPS
from swiftkv_platform.planning.training import plan_training
from swiftkv_platform.specs import JobSpec


class Telemetry:
    """Figures of one worker, a step at a time.

    Args:
        flops_per_token: what a position that the loss counts takes of a training step; None where it is not known.
        device: the worker's own.
    """

    def __init__(self, spec: JobSpec, flops_per_token: float | None, device: torch.device) -> None:
        self._device = device
        self._tokens = 0
        self._flops_per_token = flops_per_token
        self._peak = spec.resources.peak_flops_per_second or _known_peak(spec, device)

    def point(self, metrics: StepMetrics) -> dict[str, float]:
        """`memory_bytes` (of the device at its most, on a CPU of the process), and `flops_per_second` and `mfu` (model
        FLOPs utilisation) of this worker, where they can be told."""
        counted, self._tokens = metrics.tokens - self._tokens, metrics.tokens
        figures = {"memory_bytes": float(self._memory())}
        if self._flops_per_token is not None and counted and metrics.tokens_per_second:
            figures["flops_per_second"] = self._flops_per_token * metrics.tokens_per_second / metrics.world_size
            if self._peak is not None:
                figures["mfu"] = figures["flops_per_second"] / self._peak
        return figures

    def begin(self, tokens: int) -> None:
        self._tokens = tokens

    def _memory(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak << 10


def training_flops_per_token(spec: JobSpec, config: Any, rows: PackedRows) -> float | None:
    """Operations that training on `rows` takes, over the positions that the loss counts; each token attends to its own
    sample. What gradient checkpointing repeats is not among them. None for a family that the planner does not know.
    `config`: the student's configuration."""
    setup = replace(
        training_setup(spec), samples=rows.sample_counts, counted_share=rows.num_counted_tokens / rows.num_tokens
    )
    try:
        flops = plan_training(config.to_dict(), setup).flops_per_token
    except ModelError:
        return None
    return (flops.total - flops.recomputation) / setup.counted_share


def _known_peak(spec: JobSpec, device: torch.device) -> float | None:
    if device.type != "cuda" or spec.model.dtype != "bfloat16":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS.items() if part in name), None)
