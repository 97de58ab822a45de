"""Figures of a dry run: memory of a worker by phase, and its collectives."""

from __future__ import annotations

from swiftkv_platform.frozen import FrozenModel


class Memory(FrozenModel):
    """Bytes on one worker's device at the peak of a phase, by what they hold."""

    peak: int
    parameters: int
    """Weights, between passes: this worker's shards, or all of them."""
    gradients: int = 0
    """Gradients that the optimizer reads."""
    optimizer: int = 0
    """State of the optimizer."""
    remembered: int = 0
    """Trained weights as they began, while a worker without a GPU tries learning rates."""
    passing: int
    """The rest of the peak: activations, gathered weights, buffers, gradients on their way."""


class Collective(FrozenModel):
    """Calls of one collective by one worker in a step."""

    name: str
    calls: int
    num_bytes: int
    """Bytes of the larger of what goes in and what comes out, of all calls."""


class DryRun(FrozenModel):
    """Collectives and memory of one worker."""

    num_workers: int
    num_micro_batches: int
    """Micro batches of the step that was run: of more than two, the others are like the first."""
    num_parameters: int
    num_trained_parameters: int
    train: Memory
    """A step, when the optimizer has its state."""
    collectives: tuple[Collective, ...]
    calibrate: Memory | None
    """One row through the teacher layer by layer, and the sums of it; None for a copied start."""
    evaluate: Memory
    """Rows through teacher and student, sharded over the workers."""
