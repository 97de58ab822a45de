"""Serving side by side: the dense model and its SwiftKV students, on one random model, in one run.

    python -m benchmarks.serving [PART ...] [--output-dir DIR] [--short]

Parts: `lengths` (the paper's figure 3 in small), `memory` (its table 5). Each writes DIR/PART.json and DIR/PART.svg.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import add_shape, conditions, write_report
from benchmarks.serving.output import PLOTS, TABLES
from benchmarks.serving.parts import PARTS, Report
from benchmarks.serving.systems import Systems

SHORT: dict[str, Any] = {
    "rounds": 1,
    "lengths": [512, 2048],
    "length_total_tokens": 2048,
    "memory_mib": [32],
    "num_memory_requests": 6,
    "memory_output_tokens": 96,
}
"""Defaults under `--short`: the same code in a minute or two, for figures that are worth little."""


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    with ExitStack() as stack:
        models = args.models or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="serving-")))
        systems = Systems(args, models)
        for name in args.parts:
            print(f"-- {name}", flush=True)
            report: Report = {}
            for report in PARTS[name](systems, args):
                write(name, conditions(args) | report, args.output_dir)
            print(TABLES[name](report), flush=True)


def write(name: str, report: Report, directory: Path | None) -> None:
    if directory is None:
        return
    directory.mkdir(parents=True, exist_ok=True)
    write_report(report, directory / f"{name}.json")
    PLOTS[name](report, directory / f"{name}.svg")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--output-dir", type=Path, help="directory for JSON and SVG; default: none are written")
    parser.add_argument("--models", type=Path, help="directory that keeps the random models for the next run")
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
    add_shape(parser)
    if parser.parse_args(argv).short:
        parser.set_defaults(**SHORT)
    args = parser.parse_args(argv)
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]!r}; choose from {', '.join(PARTS)}")
    args.parts = args.parts or list(PARTS)
    return args


if __name__ == "__main__":
    main()
