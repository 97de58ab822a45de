"""Time to the first token of a student and of its teacher, the two modes of one artifact, by prompt length: on this
project's engine and, with `--vllm-python`, on vLLM.

    python -m benchmarks.first_token ARTIFACT [--lengths 1024 2048 4096 8000] [--rounds 5]
                                     [--vllm-python .venv-vllm-0.32.0/bin/python] [--output first-token.json]

One prompt of random tokens at a time, nothing cached. All systems take turns within each round; figures are medians
over rounds. Prompts must be shorter than the model's context.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

import swiftkv_platform.model  # registers the classes with transformers  # noqa: F401
from benchmarks.common import describe_conditions, make_benchmark_parser, write_report
from benchmarks.engine import compare_systems, make_engine_system
from benchmarks.engine_worker import EngineWorker, add_vllm_python_argument, make_vllm_arguments
from benchmarks.serving.systems import System, make_vllm_system
from swiftkv_platform.engine import EngineConfig, LLMEngine

KV_CACHE_BYTES = 1 << 30
MODES = {"teacher": False, "student": True}
"""`EngineConfig.swiftkv` by mode of the artifact."""


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    with ExitStack() as stack:
        systems = start_engine_systems(args.artifact) | start_vllm_systems(args, stack)
        vocab_size = AutoConfig.from_pretrained(args.artifact).vocab_size
        rows = {}
        for length in args.lengths:
            timed = compare_systems(systems, (1, length), 1, args.rounds, vocab_size)
            rows[length] = {name: figures["median_ttft_ms"] for name, figures in timed.items()}
            print_row(length, rows[length])
    write_report(describe_conditions(args) | {"median_ttft_ms": rows}, args.output)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_benchmark_parser(__doc__)
    parser.add_argument("artifact", type=Path, help="directory of a student with its teacher")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8000], help="tokens per prompt")
    parser.add_argument("--rounds", type=int, default=5)
    add_vllm_python_argument(parser)
    return parser.parse_args(argv)


def start_engine_systems(artifact: Path) -> dict[str, System]:
    options: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_bytes": KV_CACHE_BYTES, "enable_prefix_caching": False}
    return {
        f"engine, {mode}": make_engine_system(
            LLMEngine.from_pretrained(artifact, EngineConfig(swiftkv=swiftkv, **options))
        )
        for mode, swiftkv in MODES.items()
    }


def start_vllm_systems(args: argparse.Namespace, stack: ExitStack) -> dict[str, System]:
    """Start teacher and student in vLLM, each in its own process; none without `--vllm-python`."""
    if args.vllm_python is None:
        return {}
    arguments = make_vllm_arguments(
        args.artifact,
        kv_cache_bytes=KV_CACHE_BYTES,
        max_model_len=max(args.lengths) + 1,
        max_num_seqs=1,
        max_num_batched_tokens=max(args.lengths),
    )

    def start(swiftkv: bool) -> EngineWorker:
        own = arguments if swiftkv else arguments | {"hf_overrides": {"swiftkv": False}}
        return stack.enter_context(EngineWorker(args.vllm_python, own, num_threads=torch.get_num_threads()))

    return {f"vllm, {mode}": make_vllm_system(start(swiftkv)) for mode, swiftkv in MODES.items()}


def print_row(length: int, medians: dict[str, float]) -> None:
    shown = [f"{name} {milliseconds:,.0f} ms" for name, milliseconds in medians.items()]
    for backend in dict.fromkeys(name.partition(",")[0] for name in medians):
        ratio = medians[f"{backend}, student"] / medians[f"{backend}, teacher"]
        shown.append(f"{backend} {ratio:.3f}")
    print(f"{length:6,} tokens: {'; '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
