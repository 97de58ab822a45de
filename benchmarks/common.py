"""Command line, report file, tables and random models that benchmarks share."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from swiftkv_platform.model import convert

NOT_REPORTED = ("output", "output_dir", "models")
"""Arguments that do not affect results."""


def benchmark_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with `--output`; its help begins with the benchmark's docstring."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file for the report")
    return parser


def write_report(report: Any, output: Path | None) -> None:
    """Write a report as indented JSON, if a file is named."""
    if output is not None:
        output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    head, *body = [f"| {' | '.join(line)} |" for line in (columns, *rows)]
    return "\n".join([head, "|---" * len(columns) + "|", *body])


def conditions(args: argparse.Namespace) -> dict[str, Any]:
    """Return the head of a report: arguments, processor, threads and torch version of this process."""
    return {
        "arguments": {
            key: value.name if isinstance(value, Path) else value
            for key, value in vars(args).items()
            if key not in NOT_REPORTED
        },
        "machine": {
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
    }


def add_shape(
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
    """`--layers`, `--hidden-size` and so on of a random model and its student, with these defaults."""
    for name, default in list(locals().items())[1:]:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)


def random_llama(args: argparse.Namespace, max_position_embeddings: int) -> LlamaForCausalLM:
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


def random_student(dense: Any, args: argparse.Namespace) -> Any:
    """Return the student of a model, with l and g from the arguments."""
    return convert(
        dense, num_key_value_layers=args.num_key_value_layers, key_value_group_size=args.key_value_group_size
    )
