"""A worker's share of some rows, as micro batches. Knows no model and no schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from swiftkv_platform.data.packing import PackedRows, rank_rows
from swiftkv_platform.distillation.parallel import Parallel
from swiftkv_platform.model.packed_attention import TOKENS_STEP, to_tensors
from swiftkv_platform.specs import TrainingSpec

MicroBatch = tuple[dict[str, Tensor], tuple[int, ...]]
"""Tensors of samples end to end, and the lengths of the samples."""


def micro_batches(
    parallel: Parallel, rows: PackedRows, batch: Sequence[int], training: TrainingSpec
) -> list[MicroBatch]:
    """This worker's samples of the rows `batch`, of `micro_batch_size` rows at a time. Every worker has equally many
    micro batches: one whose share is shorter fills it up with a row that no loss counts."""
    mine = rank_rows(batch, parallel.data_rank, parallel.data_size)
    places = [*mine, *batch[: -(-len(batch) // parallel.data_size) - len(mine)]]
    if training.compile:  # compiled layers take batches of one size
        places += [batch[0]] * (-len(places) % training.micro_batch_size)
    made = []
    for start in range(0, len(places), training.micro_batch_size):
        chosen = places[start : start + training.micro_batch_size]
        step = math.lcm(parallel.sequence_parallel_size, TOKENS_STEP)
        multiple = len(chosen) * rows.max_length if training.compile else step
        num_counted = max(len(mine) - start, 0)
        arrays, lengths = rows.end_to_end(chosen, multiple=multiple, num_counted=num_counted)
        tensors = to_tensors(arrays)
        tensors["loss_mask"] = parallel.own_positions(tensors["loss_mask"])
        made.append((tensors, lengths))
    return made
