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
    """Load this rank's part of rank 0's model, and run the passes that rank 0 announces."""
    connection = Connection(int(sys.argv[1]))
    rank, port, path, fields = connection.recv()
    config = EngineConfig(**fields)
    ranks = join_group(rank, port, config)
    loaded = load_model(path, config, ranks)
    connection.send(rank)  # tell rank 0 that the model is loaded
    loaded.model.set_attn_implementation(PAGED_ATTENTION)
    with torch.inference_mode():
        run_announced_passes(
            connection, loaded.model, lambda blocks: make_cache(loaded, config, num_blocks=blocks), ranks
        )


if __name__ == "__main__":
    main()
