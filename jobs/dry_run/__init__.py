"""Dry runs of a job: its real wrapping, training step, calibration and evaluation in its true shape, over fake tensors
and a fake process group. Knows no Ray and reads no weights.

Tensors have shapes and no contents, and stand in host memory, since a CPU build of torch has no CUDA streams:
workspaces of kernels and what an allocator keeps are in none of the figures. Every position counts in the losses, and
every number that is read of a tensor is one.
"""

from swiftkv_platform.jobs.dry_run.run import Collective, DryRun, Memory, dry_run

__all__ = ["Collective", "DryRun", "Memory", "dry_run"]
