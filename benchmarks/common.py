"""Shared command line, report file, tables and random models of the benchmarks."""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from swiftkv_platform.model import convert

UNREPORTED_ARGUMENTS = ("output", "output_dir", "models")
"""Arguments that do not affect results."""


def make_benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--output`; its help begins with the benchmark's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file for the report")
    return parser


def write_report(report: Any, output: Path | None) -> None:
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def format_markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head, *body = [f"| {' | '.join(line)} |" for line in (columns, *rows)]
    return "\n".join([head, "|---" * len(columns) + "|", *body])


def replace_table(file: Path, markers: tuple[str, str], table: str) -> str:
    """Return the text of `file` with `table` between the lines of the markers."""
    before, begin, rest = file.read_text(encoding="utf-8").partition(markers[0])
    _, end, after = rest.partition(markers[1])
    if not begin or not end:
        raise SystemExit(
            f"{file.name} lacks the markers {' and '.join(markers)}; add both lines, and the table is written between"
        )
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


def describe_conditions(args: argparse.Namespace) -> dict[str, Any]:
    """Return arguments, processor, threads and torch version, for the head of a report."""
    return {
        "arguments": {
            key: value.name if isinstance(value, Path) else value
            for key, value in vars(args).items()
            if key not in UNREPORTED_ARGUMENTS
        },
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
    }


def add_shape_arguments(
    parser: argparse.ArgumentParser,
    *,
    layers: int = 16,
    hidden_size: int = 1024,
    intermediate_size: int = 2816,
    heads: int = 16,
    kv_heads: int = 8,
    vocab_size: int = 8192,
    num_key_value_layers: int = 8,
    key_value_group_size: int = 2,
) -> None:
    """Add `--layers`, `--hidden-size` and so on, the shape of a random model and its student, with these defaults."""
    for name, default in list(locals().items())[1:]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)


def make_random_llama(args: argparse.Namespace, max_position_embeddings: int) -> LlamaForCausalLM:
    """Return a float32 Llama of that shape with reproducible random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=args.vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=args.intermediate_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        max_position_embeddings=max_position_embeddings,
    )
    return LlamaForCausalLM(config).eval()


def make_random_student(dense: Any, args: argparse.Namespace) -> Any:
    """Return the student of a model, with l and g from the arguments."""
    return convert(
        dense, num_key_value_layers=args.num_key_value_layers, key_value_group_size=args.key_value_group_size
    )


def measure_product(dtype: torch.dtype, size: int = 2048) -> float:
    """Return the FLOPs per second of one product of two square matrices."""
    left, right = (torch.randn(size, size, dtype=dtype) for _ in range(2))
    started = time.perf_counter()
    F.linear(left, right)
    return 2 * size**3 / (time.perf_counter() - started)


def measure_read(num_bytes: int = 1 << 30) -> float:
    """Return the bytes per second of one sum of a tensor larger than the caches."""
    numbers = torch.ones(num_bytes // 4)
    started = time.perf_counter()
    numbers.sum()
    return num_bytes / (time.perf_counter() - started)
