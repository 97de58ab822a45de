"""Serving side by side: the dense model and its SwiftKV students, on one random model, in one run.

    python -m benchmarks.serving [PART ...] [--output-dir DIR] [--short]

Parts: `lengths` (the paper's figure 3 in small), `memory` (its table 5). Each writes DIR/PART.json and DIR/PART.svg,
after every round, so that an interrupted run keeps its results. In a round the systems take turns on the same requests.
Figures are medians over rounds, ratios medians of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import add_shape_arguments, describe_conditions, write_report
from benchmarks.serving.loads import Figures, Request, compute_medians, make_simultaneous_requests, median_ratio
from benchmarks.serving.output import PLOTTERS, TABLE_FORMATTERS
from benchmarks.serving.systems import System, SystemFactory, make_engine_system, play_round
from swiftkv_platform.engine import LLMEngine

Report = dict[str, Any]
Part = Callable[[SystemFactory, argparse.Namespace], Iterator[Report]]
THROUGHPUT_FIGURE = "total_token_throughput"


def measure_lengths(systems: SystemFactory, args: argparse.Namespace) -> Iterator[Report]:
    """Measure the throughput by prompt length, at about equal total tokens, all requests at once (paper, figure 3)."""
    engines = _start_engines(systems, ["dense", get_student_name(args)])
    runs: list[dict[str, list[Figures]]] = [{} for _ in args.lengths]
    counts = [max(1, args.length_total_tokens // length) for length in args.lengths]
    for number in range(args.rounds):
        for length, num_requests, some in zip(args.lengths, counts, runs, strict=True):
            _play_round(
                systems,
                engines,
                make_simultaneous_requests(num_requests, length, args.length_output_tokens),
                number,
                some,
            )
        yield {
            "num_output_tokens": args.length_output_tokens,
            "rows": [
                {"num_input_tokens": length, "num_requests": num_requests, **summarize_runs(some)}
                for length, num_requests, some in zip(args.lengths, counts, runs, strict=True)
            ],
        }


def measure_memory(systems: SystemFactory, args: argparse.Namespace) -> Iterator[Report]:
    """Measure the throughput by size of the KV cache (paper, table 5)."""
    # 1. create an engine for each model and cache size
    names = ["dense", "merge_all_layers", "swiftkv_g1", get_student_name(args), f"{get_student_name(args)}_fp8"]
    engines: list[dict[str, LLMEngine]] = [
        {
            name: systems.make_engine(
                name.removesuffix("_fp8"),
                kv_cache_bytes=mib << 20,
                kv_cache_dtype="fp8" if name.endswith("_fp8") else "auto",
            )
            for name in names
        }
        for mib in args.memory_mib
    ]
    # 2. play rounds on each size
    players = [{name: make_engine_system(engine) for name, engine in some.items()} for some in engines]
    for one in players:
        _warm_up(systems, one)
    runs: list[dict[str, list[Figures]]] = [{} for _ in args.memory_mib]
    requests = make_simultaneous_requests(args.num_memory_requests, args.memory_input_tokens, args.memory_output_tokens)
    for number in range(args.rounds):
        for play, some in zip(players, runs, strict=True):
            _play_round(systems, play, requests, number, some)
        yield {
            "num_requests": args.num_memory_requests,
            "num_input_tokens": args.memory_input_tokens,
            "num_output_tokens": args.memory_output_tokens,
            "rows": [
                {"kv_cache_mib": mib, **summarize_runs(some), "kv_cache": _describe_kv_cache(own, number + 1)}
                for mib, some, own in zip(args.memory_mib, runs, engines, strict=True)
            ],
        }


PARTS: dict[str, Part] = {"lengths": measure_lengths, "memory": measure_memory}


def get_student_name(args: argparse.Namespace) -> str:
    return f"swiftkv_g{args.key_value_group_size}"


def _start_engines(systems: SystemFactory, names: Sequence[str]) -> dict[str, System]:
    engines = {name: make_engine_system(systems.make_engine(name)) for name in dict.fromkeys(names)}
    _warm_up(systems, engines)
    return engines


def _warm_up(systems: SystemFactory, engines: dict[str, System]) -> None:
    requests = make_simultaneous_requests(2, 64, 4)
    for play in engines.values():
        play(requests, systems.make_prompts(requests, seed=0))


def _play_round(
    systems: SystemFactory,
    engines: dict[str, System],
    requests: Sequence[Request],
    number: int,
    runs: dict[str, list[Figures]],
) -> None:
    prompts = systems.make_prompts(requests, seed=number)
    for name, found in play_round(engines, requests, prompts, number).items():
        runs.setdefault(name, []).append(found)
        shown = (f"{figure} {found[figure]:.4g}" for figure in ("completed", "duration", THROUGHPUT_FIGURE))
        print(f"{name:18}", *shown, flush=True)


def _describe_kv_cache(engines: dict[str, LLMEngine], num_rounds: int) -> Report:
    return {
        name: {"num_blocks": engine.num_blocks, "preemptions_per_round": engine.state.num_preemptions / num_rounds}
        for name, engine in engines.items()
    }


def summarize_runs(runs: dict[str, list[Figures]]) -> Report:
    dense = runs["dense"]
    return {
        "results": {name: compute_medians(some) for name, some in runs.items()},
        "against_dense": {
            name: {
                figure: median_ratio(some, dense[: len(some)], figure)
                for figure in (THROUGHPUT_FIGURE, "median_ttft_ms", "median_tpot_ms")
                # No ratio to 0, the time between tokens that arrive together.
                if all(figure in one for one in some) and all(one.get(figure) for one in dense)
            }
            for name, some in runs.items()
        },
        "rounds": runs,
    }


SHORT_DEFAULTS: dict[str, Any] = {
    "rounds": 1,
    "lengths": [512, 2048],
    "length_total_tokens": 2048,
    "memory_mib": [32],
    "num_memory_requests": 6,
    "memory_output_tokens": 96,
}
"""Defaults with `--short`: a minute or two, for rough figures."""


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    with ExitStack() as stack:
        models = args.models or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serving-")))
        systems = SystemFactory(args, models)
        for name in args.parts:
            print(f"-- {name}", flush=True)
            report: Report = {}
            for report in PARTS[name](systems, args):
                write_part(name, describe_conditions(args) | report, args.output_dir)
            print(TABLE_FORMATTERS[name](report), flush=True)


def write_part(name: str, report: Report, directory: Path | None) -> None:
    if directory is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    write_report(report, directory / f"{name}.json")
    PLOTTERS[name](report, directory / f"{name}.svg")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--output-dir", type=Path, help="directory for JSON and SVG files; default: none")
    parser.add_argument("--models", type=Path, help="directory that keeps the random models for later runs")
    parser.add_argument("--short", action="store_true", help="one round of small loads")
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds, at least 1")
    parser.add_argument("--threads", type=int, default=0, help="0: torch's default")
    paper = parser.add_argument_group("the paper's figures")
    paper.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    paper.add_argument("--length-total-tokens", type=int, default=8192, help="prompt tokens per point")
    paper.add_argument("--length-output-tokens", type=int, default=32)
    paper.add_argument("--memory-mib", type=int, nargs="+", default=[192, 32])
    paper.add_argument("--num-memory-requests", type=int, default=12)
    paper.add_argument("--memory-input-tokens", type=int, default=256)
    paper.add_argument("--memory-output-tokens", type=int, default=96)
    engine = parser.add_argument_group("the engine, for all models")
    engine.add_argument("--kv-cache-mib", type=int, default=768, help="MiB of KV cache in all parts except memory")
    engine.add_argument("--max-num-seqs", type=int, default=64)
    engine.add_argument("--max-num-batched-tokens", type=int, default=1024)
    add_shape_arguments(parser)
    if parser.parse_args(argv).short:
        parser.set_defaults(**SHORT_DEFAULTS)
    args = parser.parse_args(argv)
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"unknown part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    args.parts = args.parts or list(PARTS)
    return args


if __name__ == "__main__":
    main()
