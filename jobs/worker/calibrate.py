"""The calibrated start of a job, found by its workers before they train. Knows rows and weights, no store."""

from __future__ import annotations

from pathlib import Path

import torch

from jobs.worker.prepare import open_lazy
from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.distillation.calibration_text import calibration_batches
from swiftkv_platform.model.calibration_stream import calibrate_streamed
from swiftkv_platform.model.directories import MAX_SHARD_BYTES, ShardWriter
from swiftkv_platform.model.workers import Workers
from swiftkv_platform.specs import JobSpec


def calibrate(spec: JobSpec, path: str, rows: PackedRows, directory: Path, *, device: torch.device | str) -> None:
    """Write the calibrated start into `directory`, by the first of the workers of the default process group; each runs
    the teacher over its share of the rows, layer by layer.

    Args:
        path: the teacher.
        rows: the training rows.
    """
    workers = Workers()
    batches = calibration_batches(
        rows,
        spec.swiftkv.calibration_tokens,
        seed=spec.training.seed,
        share=workers.rank,
        num_shares=workers.size,
    )
    source = open_lazy(spec, path, device=device)
    writer = ShardWriter(directory, "calibrated", MAX_SHARD_BYTES)
    for name, tensor in calibrate_streamed(source, batches, workers=workers, device=device):
        writer.add(name, tensor.to(source.model.dtype))
    writer.flush()
