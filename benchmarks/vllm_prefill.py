"""SwiftKV in vLLM against the dense model in the same vLLM: reading prompts, decoding, and KV blocks at equal memory.

    python -m benchmarks.vllm_prefill --vllm-python .venv-vllm-0.29.0/bin/python [--output vllm.json] [--short]

The dense model runs in vLLM's own Llama, the student in the plugin that is installed in that environment. Each has a
process of its own; they take turns within each round, and medians over rounds are compared. One random model of 205M
parameters by default, l = 8 of 16 layers, g = 2.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine import compare, longest, print_table, save_models, vllm_system
from benchmarks.models import add_shape
from benchmarks.reports import benchmark_parser, write_report
from benchmarks.vllm_client import VLLMWorker, add_vllm_python, engine_arguments

KV_CACHE_BYTES = 240 << 20
"""Whole blocks of 12 and of 16 layers at the default shape, in bfloat16 and with vLLM's 128 tokens a block on CPUs."""


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        models = dict(zip(("dense", "swiftkv"), save_models(args, directory), strict=True))
        workers = {name: stack.enter_context(start(args, model)) for name, model in models.items()}
        systems = {name: vllm_system(worker) for name, worker in workers.items()}
        report: dict[str, Any] = {
            "machine": {"cpu": platform.processor() or platform.machine(), "threads": args.threads},
            "arguments": {key: value for key, value in vars(args).items() if key not in ("output", "vllm_python")},
            "vllm": {name: worker.made for name, worker in workers.items()},
        }
        loads = {
            "prefill": ((1, args.prompt_length), 1),
            "decode": ((args.batch_size, args.context_length), args.output_length),
        }
        for load, (shape, num_output) in loads.items():
            report[load] = compare(systems, shape, num_output, args.rounds, args.vocab_size)
            print_table(load, report[load])
        report["idle_cpu_seconds"] = {name: worker.idle_cpu_seconds for name, worker in workers.items()}
    report["ratios"] = ratios(report)
    print(json.dumps(report["ratios"]), flush=True)
    write_report(report, args.output)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--short", action="store_true", help="two rounds of each load")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt-length", type=int, default=2048, help="of prefill")
    parser.add_argument("--batch-size", type=int, default=8, help="requests of decode")
    parser.add_argument("--context-length", type=int, default=128, help="prompt tokens of decode")
    parser.add_argument("--output-length", type=int, default=64, help="tokens a request generates in decode")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    add_vllm_python(parser)
    add_shape(parser)
    parser.add_argument("--num-key-value-layers", type=int, default=8)
    parser.add_argument("--key-value-group-size", type=int, default=2)
    args = parser.parse_args(argv)
    if args.vllm_python is None:
        parser.error("--vllm-python is required: an interpreter with vLLM and this project (make vllm-env)")
    if args.short:
        args.rounds = 2
    return args


def start(args: argparse.Namespace, model: Path) -> VLLMWorker:
    arguments = engine_arguments(
        model,
        kv_cache_bytes=KV_CACHE_BYTES,
        max_model_len=longest(args),
        max_num_seqs=args.batch_size,
        max_num_batched_tokens=max(args.prompt_length, args.batch_size),
    )
    return VLLMWorker(args.vllm_python, arguments, num_threads=args.threads)


def ratios(report: dict[str, Any]) -> dict[str, float]:
    """SwiftKV over dense: how many times as fast prompts are read, the time a decoded token takes, KV blocks."""
    prefill, decode, made = report["prefill"], report["decode"], report["vllm"]
    return {
        "prefill_speedup": prefill["dense"]["median_ttft_ms"] / prefill["swiftkv"]["median_ttft_ms"],
        "tpot_ratio": decode["swiftkv"]["median_tpot_ms"] / decode["dense"]["median_tpot_ms"],
        "kv_blocks_ratio": made["swiftkv"]["num_blocks"] / made["dense"]["num_blocks"],
    }


if __name__ == "__main__":
    main()
