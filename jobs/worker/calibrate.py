"""The calibrated start of a job, found by its workers before they train, or before they measure, where an earlier
attempt has trained and its start is gone.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.data.prepared import PreparedData
from swiftkv_platform.distillation.calibration_text import calibration_batches
from swiftkv_platform.jobs.attempt.stored import StoredPreparation
from swiftkv_platform.jobs.worker.prepare import open_lazy
from swiftkv_platform.model.calibration_stream import calibrate_streamed
from swiftkv_platform.model.directories import ShardWriter
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.planning.volumes import MAX_SHARD_BYTES
from swiftkv_platform.specs import JobSpec


def find_start(spec: JobSpec, stored: StoredPreparation, path: str, rows: Path, *, device: torch.device | str) -> None:
    """Have the workers of the default process group find and publish the calibrated start, unless that has been done.

    Args:
        path: the teacher.
        rows: directory of the prepared rows.
    """
    workers = Workers()
    if workers.from_first(workers.is_first and stored.lacks_start):
        with tempfile.TemporaryDirectory(prefix="start-") as directory:
            calibrate(spec, path, PreparedData.load(rows).train, Path(directory), device=device)
            if workers.is_first:
                stored.publish_start(Path(directory))
    workers.gather(None)  # the others wait


def calibrate(spec: JobSpec, path: str, rows: PackedRows, directory: Path, *, device: torch.device | str) -> None:
    """Write the calibrated start into `directory`, by the first of the workers of the default process group; each runs
    the teacher over its share of the rows, layer by layer.

    Args:
        path: the teacher.
        rows: the training rows.
    """
    workers = Workers()
    batches = calibration_batches(
        rows, spec.swiftkv.calibration_tokens, seed=spec.training.seed, share=workers.rank, num_shares=workers.size
    )
    source = open_lazy(spec, path, device=device)
    writer = ShardWriter(directory, "calibrated", MAX_SHARD_BYTES)
    for name, tensor in calibrate_streamed(
        source, batches, workers=workers, refit=spec.swiftkv.is_refitted, device=device
    ):
        writer.add(name, tensor.to(source.model.dtype))
    writer.flush()
