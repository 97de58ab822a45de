"""Choosing tokens of a batch, by kind of request: milliseconds a row, beside sorting every row, side by side.

    OMP_NUM_THREADS=1 python -m benchmarks.sampling [--rows 32] [--rounds 9] [--output sampling.json]

Logits are normal numbers of standard deviation 4. `sort` is what top-p takes by its definition: the whole row in order,
and noise for all of it. Kinds take turns within each round, so that all see the same noise of the machine; figures are
medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.reports import benchmark_parser, conditions, write_report
from swiftkv_platform.engine import SamplingParams
from swiftkv_platform.engine.sampler import SamplingRow, choose, noise_of

VOCABULARIES = {"SmolLM2": 49152, "Llama-3": 128256}
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature 1": SamplingParams(temperature=1.0),
    "top-p 0.95": SamplingParams(temperature=0.7, top_p=0.95),
    "top-k 50": SamplingParams(temperature=0.7, top_k=50),
    "min-p 0.05": SamplingParams(temperature=0.7, min_p=0.05),
}


def by_sorting(logits: torch.Tensor, top_p: float) -> torch.Tensor:
    """Draw from the most probable tokens that have `top_p` together, of rows that are sorted whole."""
    ordered, token_ids = (logits / 0.7).sort(dim=-1, descending=True, stable=True)
    probs = ordered.softmax(dim=-1)
    kept = ordered.masked_fill(probs.cumsum(dim=-1) - probs >= top_p, float("-inf"))
    best = (kept + noise_of(torch.arange(len(logits)), token_ids)).argmax(dim=-1, keepdim=True)
    return token_ids.gather(-1, best)


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    results = []
    for name, size in VOCABULARIES.items():
        logits = 4.0 * torch.randn(args.rows, size, generator=torch.Generator().manual_seed(0))
        ways: dict[str, Callable[[], torch.Tensor]] = {
            kind: partial(choose, logits, [SamplingRow(params, seed, (), 0) for seed in range(args.rows)])
            for kind, params in KINDS.items()
        }
        ways["top-p 0.95, sort"] = partial(by_sorting, logits, 0.95)
        seconds: dict[str, list[float]] = {kind: [] for kind in ways}
        for number in range(args.rounds + 1):
            for kind, way in ways.items():
                started = time.perf_counter()
                way()
                if number:  # the first is left out
                    seconds[kind].append(time.perf_counter() - started)
        for kind, values in seconds.items():
            figure = 1e3 * statistics.median(values) / args.rows
            results.append({"vocabulary": size, "kind": kind, "milliseconds_a_row": figure})
            print(f"{name:8} {size:7} {kind:18} {figure:7.3f} ms a row", flush=True)
    write_report({**conditions(args), "results": results}, args.output)


if __name__ == "__main__":
    main()
