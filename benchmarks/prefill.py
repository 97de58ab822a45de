"""Prefill, dense against SwiftKV, on the same random weights: time, FLOPs and KV bytes by prompt length and by prompts
a forward pass (the paper's figure 2).

    python -m benchmarks.prefill [--lengths 256 512 1024 2048] [--batch-sizes 1] [--output prefill.json]
                                 [--hidden-size 1024 --layers 16 ...]

Both modes alternate within each round, so that both see the same noise of the machine.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import product

import torch

from benchmarks.models import add_shape, random_llama
from benchmarks.reports import benchmark_parser, conditions, write_report
from swiftkv_platform.evaluation.prefill_cost import PrefillCost, measure_prefill
from swiftkv_platform.model import convert


def row(cost: PrefillCost) -> dict[str, object]:
    return {
        **asdict(cost),
        "prefill_flops_ratio": cost.flops_ratio,
        "kv_bytes_ratio": cost.kv_bytes_ratio,
        "speedup": cost.dense.ttft_ms / cost.swiftkv.ttft_ms,
    }


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1], help="prompts a forward pass")
    parser.add_argument("--rounds", type=int, default=5)
    add_shape(parser)
    parser.add_argument("--num-key-value-layers", type=int, default=8)
    parser.add_argument("--key-value-group-size", type=int, default=2)
    args = parser.parse_args()

    student = convert(
        random_llama(args, max(args.lengths)).to(torch.bfloat16),
        num_key_value_layers=args.num_key_value_layers,
        key_value_group_size=args.key_value_group_size,
    )
    student.model.fuse_shared_key_value()
    rows = []
    print(f"{'batch':>6} {'tokens':>7} {'dense ms':>9} {'swiftkv ms':>11} {'speedup':>8} {'FLOPs':>7} {'KV bytes':>9}")
    for batch_size, length in product(args.batch_sizes, args.lengths):
        cost = measure_prefill(student, prompt_length=length, rounds=args.rounds, batch_size=batch_size)
        rows.append({"batch_size": batch_size, **row(cost)})
        speedup = cost.dense.ttft_ms / cost.swiftkv.ttft_ms
        print(
            f"{batch_size:6d} {length:7d} {cost.dense.ttft_ms:9.1f} {cost.swiftkv.ttft_ms:11.1f} {speedup:7.2f}x "
            f"{cost.flops_ratio:6.1%} {cost.kv_bytes_ratio:8.1%}",
            flush=True,
        )
    write_report({**conditions(args), "results": rows}, args.output)


if __name__ == "__main__":
    main()
