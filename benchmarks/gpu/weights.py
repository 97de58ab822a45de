"""vLLM on a GPU, dense and SwiftKV, by the form of their weights: bfloat16, FP8 (`--quantization fp8`) and W8A8.

    python -m benchmarks.gpu.weights --vllm-python PATH [--weights bfloat16 fp8 int8] [--rounds 3] [--output FILE]
    python -m benchmarks.gpu.weights --vllm-python PATH --device cpu --tiny --weights bfloat16 int8

A random model of Llama 3.1 8B's shape and its students (half of the layers, g = 1, both forms) are made once. A vLLM
engine with this project's plugin is started for each model and form of weights. All stay in memory and take turns
within a round; ratios are medians over rounds, with the least and the largest. The dense model is vLLM's own class, but
with int8 weights the student in teacher mode. Prefill: prompts that arrive together and are answered with one token
each. Decode: the median time between tokens.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import describe_conditions, format_markdown_table, make_benchmark_parser, write_report
from benchmarks.engine_worker import EngineWorker, make_vllm_arguments
from benchmarks.gpu.models import prepare_models, release_memory
from benchmarks.serving.loads import Figures, Request, make_simultaneous_requests
from benchmarks.serving.systems import make_random_prompts, make_vllm_system, play_round
from swiftkv_platform.model import export

WEIGHT_FORMATS = ("bfloat16", "fp8", "int8")
DENSE, OWN = "dense", "swiftkv_g1_own"


@dataclass(frozen=True)
class Load:
    """Requests that arrive together."""

    figure: str
    """Name of the compared figure; lower is better."""
    num_requests: int
    num_input_tokens: int
    num_output_tokens: int

    @property
    def requests(self) -> list[Request]:
        return make_simultaneous_requests(self.num_requests, self.num_input_tokens, self.num_output_tokens)


@dataclass(frozen=True)
class Sizes:
    """Loads of a run, and engine limits that fit the largest."""

    shape: str
    """Name in `benchmarks.gpu.models.MODEL_SHAPES`."""
    loads: Mapping[str, Load]
    kv_cache_mib: int
    max_num_batched_tokens: int

    @property
    def max_model_len(self) -> int:
        return max(load.num_input_tokens + load.num_output_tokens for load in self.loads.values())

    @property
    def max_num_seqs(self) -> int:
        return max(load.num_requests for load in self.loads.values())


FULL_SIZES = Sizes(
    shape="8b",
    loads={
        "prefill, 2,000 tokens": Load("duration", 16, 2000, 1),
        "prefill, 8,000 tokens": Load("duration", 4, 8000, 1),
        "prefill, 32,000 tokens": Load("duration", 1, 32000, 1),
        "decode, 1 of 2,000 tokens": Load("median_itl_ms", 1, 2000, 65),
        "decode, 16 of 2,000 tokens": Load("median_itl_ms", 16, 2000, 65),
    },
    kv_cache_mib=4700,
    max_num_batched_tokens=8192,
)
"""Took 98 GiB of an H200 in bfloat16 and FP8."""
TINY_SIZES = Sizes(
    shape="tiny",
    loads={
        "prefill, 128 tokens": Load("duration", 2, 128, 1),
        "decode, 2 of 32 tokens": Load("median_itl_ms", 2, 32, 5),
    },
    kv_cache_mib=16,
    max_num_batched_tokens=128,
)


@dataclass(frozen=True)
class ServedModel:
    """A model that vLLM serves."""

    model: str
    weights: str
    directory: Path
    options: Mapping[str, Any]
    """Engine arguments of vLLM that the model needs."""


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    sizes = TINY_SIZES if args.tiny else FULL_SIZES
    with ExitStack() as stack:
        directory = args.models or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weights-")))
        served = prepare_weight_variants(directory, sizes.shape, args)
        with ThreadPoolExecutor(len(served)) as pool:
            workers = list(pool.map(lambda one: stack.enter_context(start_worker(one, sizes, args)), served))
        rows = {name: compare_models(load, served, workers, args) for name, load in sizes.loads.items()}
        report = {**describe_conditions(args), "vllm": workers[0].settings, "rows": rows}
        if args.device == "cuda":
            report["gpu"] = torch.cuda.get_device_name()
    write_report(report, args.output)
    print(format_table(rows))


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_benchmark_parser(__doc__)
    parser.add_argument(
        "--vllm-python", type=Path, metavar="PATH", required=True, help="Python interpreter with vLLM and the plugin"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model, for a test of the code")
    parser.add_argument("--weights", nargs="+", choices=WEIGHT_FORMATS, default=["bfloat16", "fp8"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", type=Path, help="empty directory in which to keep the generated models")
    return parser.parse_args(argv)


def prepare_weight_variants(directory: Path, shape: str, args: argparse.Namespace) -> list[ServedModel]:
    made = prepare_models(shape, directory, dtype=torch.bfloat16, device=args.device, group_sizes=[1])
    release_memory()
    served = []
    for weights in args.weights:
        if weights == "int8":
            integers = export(made[OWN], directory / "int8", teacher=True, quantize="int8")
            served.append(ServedModel(DENSE, weights, integers, {"hf_overrides": {"swiftkv": False}}))
            served.append(ServedModel(OWN, weights, integers, {}))
        else:
            options = {"quantization": "fp8"} if weights == "fp8" else {}
            shown = made if weights == "bfloat16" else (DENSE, OWN)
            served += [ServedModel(name, weights, made[name], options) for name in shown]
    return served


def start_worker(served: ServedModel, sizes: Sizes, args: argparse.Namespace) -> EngineWorker:
    """Start vLLM with a cache of fixed size, so that several engines fit on one GPU."""
    arguments = make_vllm_arguments(
        served.directory,
        kv_cache_bytes=sizes.kv_cache_mib << 20,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
    )
    arguments |= {"gpu_memory_utilization": 0.1, "enforce_eager": args.tiny, **served.options}
    return EngineWorker(args.vllm_python, arguments, num_threads=torch.get_num_threads())


def compare_models(
    load: Load, served: Sequence[ServedModel], workers: Sequence[EngineWorker], args: argparse.Namespace
) -> dict[str, dict[str, Figures]]:
    """Return each model's figure and its ratio to the dense model of the same weights, by weights and model.

    Each round has its own prompts, the same for all models, and starts with another model; the first round warms up.
    """
    # 1. play rounds
    vocab_size = json.loads((served[0].directory / "config.json").read_text())["vocab_size"]
    systems = {
        f"{one.weights} {one.model}": make_vllm_system(worker) for one, worker in zip(served, workers, strict=True)
    }
    rounds = [
        play_round(systems, load.requests, make_random_prompts(load.requests, vocab_size, seed=number), number)
        for number in range(args.rounds + 1)
    ]
    # 2. compare each model with the dense model of the same weights
    figures = [[found[name][load.figure] for found in rounds[1:]] for name in systems]
    dense = {one.weights: values for one, values in zip(served, figures, strict=True) if one.model == DENSE}
    found_by: dict[str, dict[str, Figures]] = {}
    for one, values in zip(served, figures, strict=True):
        ratios = [value / other for value, other in zip(values, dense[one.weights], strict=True)]
        unit = 1.0 if load.figure.endswith("_ms") else 1e3
        found_by.setdefault(one.weights, {})[one.model] = {
            "ms": unit * statistics.median(values),
            "against_dense": statistics.median(ratios),
            "least": min(ratios),
            "largest": max(ratios),
        }
    return found_by


def format_table(rows: Mapping[str, Mapping[str, Mapping[str, Figures]]]) -> str:
    """Format a table of milliseconds by model, with ratios to dense; below 1 is faster."""
    columns = [(weights, model) for weights, found in next(iter(rows.values())).items() for model in found]
    head = ["", *(f"{weights}: {model}" for weights, model in columns)]
    cells = (
        [name, *(_format_cell(model, found[weights][model]) for weights, model in columns)]
        for name, found in rows.items()
    )
    return format_markdown_table(head, cells)


def _format_cell(model: str, row: Figures) -> str:
    plain = f"{row['ms']:.1f} ms"
    if model == DENSE:
        return plain
    return f"{plain} ({row['against_dense']:.3f}x, {row['least']:.3f} to {row['largest']:.3f})"


if __name__ == "__main__":
    main()
