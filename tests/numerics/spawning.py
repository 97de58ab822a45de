"""Run workers of a process group, forked from a server that has already imported their modules."""

import multiprocessing
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

_PRELOADED = ["tests.numerics.distillation_worker", "tests.numerics.phases_worker"]
"""Modules that the server imports once; each worker would otherwise spend seconds of CPU on them."""


def run_in_group(function: Callable[..., Any], arguments: tuple[Any, ...], world_size: int, directory: Path) -> Any:
    """Return the result of `function` at rank 0 of `world_size` new processes.

    Raises:
        ProcessExitedException: a worker was killed.
        ProcessRaisedException: a worker raised.
    """
    directory.mkdir(exist_ok=True)
    multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
    mp.start_processes(
        _main, (world_size, function, arguments, str(directory)), nprocs=world_size, start_method="forkserver"
    )
    return pickle.loads((directory / "outcome.pickle").read_bytes())


def _main(rank: int, world_size: int, function: Callable[..., Any], arguments: tuple[Any, ...], directory: str) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # importing DeepSpeed would load the compiler, which takes seconds
    dist.init_process_group("gloo", init_method=f"file://{directory}/group", rank=rank, world_size=world_size)
    outcome = function(*arguments)
    if rank == 0:
        (Path(directory) / "outcome.pickle").write_bytes(pickle.dumps(outcome))
    dist.destroy_process_group()
