"""Dry runs of a job: its real wrapping, training step, calibration and evaluation at full size, over fake tensors and a
fake process group. Needs no Ray and reads no weights.

Tensors have shapes but no contents, and are in host memory, since a CPU build of torch has no CUDA streams: the figures
exclude workspaces of kernels and caches of the allocator. Every position counts in the losses, and every number read
from a tensor is 1.
"""

from swiftkv_platform.jobs.dry_run.run import Collective, DryRun, Memory, dry_run

__all__ = ["Collective", "DryRun", "Memory", "dry_run"]
