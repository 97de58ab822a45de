"""The model or checkpoint that a job continues from, as control plane and workers know it. No I/O."""

from __future__ import annotations

from typing import Literal

from swiftkv_platform.frozen import FrozenModel


class Parent(FrozenModel):
    """A model or a checkpoint in the object store of the jobs."""

    name: str
    """`mdl_...` or `job_...:ckpt_...`."""
    kind: Literal["model", "checkpoint"]
    key: str
    """Key of its directory, which has a manifest."""
    job_id: str
    """Job that made it."""
    step: int | None = None
    """Step of a checkpoint."""
    sha256: str
    """Digest of its manifest."""
