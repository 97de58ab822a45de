"""Training steps over batches of ever new sizes on a CPU: as they are, or multiples of 64 tokens; speed and memory.

    OMP_NUM_THREADS=2 python -m benchmarks.batch_sizes [--steps 30] [--dtype bfloat16] [--output batch_sizes.json]

The shape is SmolLM2-135M's with random weights; batches are `benchmarks.packed_training`'s, other samples in each. Each
side has a process of its own, since what is measured is what a process keeps; they take turns over `--rounds`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from unittest import mock

import psutil
import torch

from benchmarks.packed_training import add_chats, chat_rows, smollm2_fork, sums
from benchmarks.reports import benchmark_parser, conditions, write_report
from swiftkv_platform.distillation import fork as fork_module
from swiftkv_platform.distillation.optimizer import build_optimizer
from swiftkv_platform.jobs.worker.memory import give_back_freed_tensors
from swiftkv_platform.model import packed_attention
from swiftkv_platform.model.packed_attention import to_tensors
from swiftkv_platform.specs import OptimizerSpec

ROWS_PER_STEP = 4
TOKENS_STEPS = {"as they are": 1, "filled up": packed_attention.TOKENS_STEP}


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Median tokens/s of the second half of the steps, and GiB that the process holds after the first and the last."""
    give_back_freed_tensors()
    multiple, dtype = args.multiple, getattr(torch, args.dtype)
    rows = chat_rows(args)
    fork = smollm2_fork(args)
    optimizer = build_optimizer((p for p in fork.parameters() if p.requires_grad), OptimizerSpec())
    speeds, held = [], []
    for step in range(args.steps):
        first = step * ROWS_PER_STEP % (len(rows) - ROWS_PER_STEP)
        arrays, lengths = rows.end_to_end(range(first, first + ROWS_PER_STEP), multiple=multiple)
        started = time.perf_counter()
        with (
            mock.patch.object(fork_module, "TOKENS_STEP", multiple),
            mock.patch.object(packed_attention, "TOKENS_STEP", multiple),
            torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32),
        ):
            sums(fork, to_tensors(arrays), lengths).backward()
        optimizer.step()
        optimizer.zero_grad()
        speeds.append(sum(lengths) / (time.perf_counter() - started))
        held.append(psutil.Process().memory_info().rss / 2**30)
    return {
        "tokens_per_second": statistics.median(speeds[args.steps // 2 :]),
        "gib_after_first": held[0],
        "gib_after_last": held[-1],
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    add_chats(parser, dtype="bfloat16", counted_share=0.75)
    parser.add_argument("--multiple", type=int, help=argparse.SUPPRESS)  # of a process that measures one side
    args = parser.parse_args()
    args.rows = (args.steps + 1) * ROWS_PER_STEP
    if args.multiple is not None:
        print(json.dumps(measure(args)))
        return
    results: dict[str, list[dict[str, float]]] = {name: [] for name in TOKENS_STEPS}
    for _ in range(args.rounds):
        for name, multiple in TOKENS_STEPS.items():
            command = [sys.executable, "-m", "benchmarks.batch_sizes", *sys.argv[1:], "--multiple", str(multiple)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            results[name].append(json.loads(done.stdout.splitlines()[-1]))
            print(name, results[name][-1], flush=True)
    write_report({**conditions(args), "results": results}, args.output)


if __name__ == "__main__":
    main()
