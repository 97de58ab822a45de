"""The process of a rank above 0: `python -m swiftkv_platform.engine.rank_process FILE_DESCRIPTOR`."""

from __future__ import annotations

import sys
from multiprocessing.connection import Connection

import torch

from swiftkv_platform.engine.attention import PAGED_ATTENTION
from swiftkv_platform.engine.loading import load_model
from swiftkv_platform.engine.memory import make_cache
from swiftkv_platform.engine.ranks import join_group, run_announced_passes
from swiftkv_platform.specs.engine import EngineConfig


def main() -> None:
    """Load this rank's part of the model that rank 0 names, and follow rank 0 until it exits."""
    connection = Connection(int(sys.argv[1]))
    rank, port, path, fields = connection.recv()
    config = EngineConfig(**fields)
    ranks = join_group(rank, port, config)
    loaded = load_model(path, config, ranks)
    connection.send(rank)  # it is loaded
    loaded.model.set_attn_implementation(PAGED_ATTENTION)
    with torch.inference_mode():
        run_announced_passes(
            connection, loaded.model, lambda blocks: make_cache(loaded, config, num_blocks=blocks), ranks
        )


if __name__ == "__main__":
    main()
