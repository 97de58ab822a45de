"""Command line and report file that benchmarks share."""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import torch


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser with `--output`, whose help begins with the benchmark's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="file for the report, as JSON")
    return parser


def write_report(report: Any, output: Path | None) -> None:
    """Write a report as indented JSON, if a file is named."""
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    """Arguments, processor, threads and torch version of this process: the head of a report."""
    return {
        "arguments": {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(args).items()
            if key != "output"
        },
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
