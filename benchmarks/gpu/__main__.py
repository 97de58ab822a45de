"""Benchmark of our engine on a GPU: correctness first, then the paper's figures 3 and 4, dense and SwiftKV.

    python -m benchmarks.gpu [MODEL] [--short] [--output-dir DIR]
    python -m benchmarks.gpu --agreement
    python -m benchmarks.gpu --device cpu --tiny

MODEL is the directory of a dense model; without it, one with the shape of Llama 3.1 8B and random weights. Its students
(half of the layers; g = 1 and 4, and g = 1 whose deep tokens keep K and V of their own) are converted from it, not
distilled, since a step costs the same whatever the weights are. `benchmarks.gpu.weights` measures them in vLLM.

First our engine must agree with PyTorch on every model (`agreement.json`), and in steps that divide keys;
where it does not, the run ends with status 1. With `--agreement` that is all.
Then it writes `own/lengths` and `rates` as JSON and SVG, and their tables, with TTFT and TPOT, into `own.md`.
Models take turns, one in memory at a time, so the rounds are not interleaved as they are on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import agreement
from benchmarks.gpu.agreement import GreedyOutput, generate_greedily
from benchmarks.gpu.models import prepare_models, release_memory
from benchmarks.serving.__main__ import summarize_runs, write_part
from benchmarks.serving.loads import (
    Figures,
    Request,
    compute_figures,
    make_poisson_requests,
    make_simultaneous_requests,
)
from benchmarks.serving.output import format_rows
from benchmarks.serving.systems import make_engine_system, make_random_prompts
from swiftkv_platform.engine import EngineConfig, LLMEngine
from swiftkv_platform.engine.loading import load_model

Report = dict[str, Any]
Rounds = dict[str, list[Figures]]
"""Figures of each round, by model."""


@dataclass(frozen=True)
class Loads:
    """Sizes of a run. Lengths are in tokens."""

    max_model_len: int
    kv_cache_mib: int
    max_num_batched_tokens: int
    agreement_lengths: tuple[int, ...]
    """Prompt lengths of the comparison with PyTorch."""
    lengths: tuple[int, ...]
    """Prompt lengths of figure 3."""
    total_tokens: int
    """Prompt tokens of each point of figure 3, all requests together."""
    input_tokens: int
    """Prompt length of figure 4."""
    output_tokens: int
    rates: tuple[float, ...]
    """Arrival rates of figure 4, in requests per second."""
    rate_seconds: float
    group_sizes: tuple[int, ...]
    rounds: int


FULL_RUN = Loads(
    max_model_len=40960,
    kv_cache_mib=24 << 10,
    max_num_batched_tokens=8192,
    agreement_lengths=(17, 300, 1999),
    lengths=(2000, 8000, 32000),
    total_tokens=128000,
    input_tokens=2000,
    output_tokens=256,
    rates=(1.0, 4.0, 8.0),
    rate_seconds=15.0,
    group_sizes=(1, 4),
    rounds=2,
)
"""For a GPU with 80 GiB and a model of 8 billion parameters."""
SHORT_RUN = replace(
    FULL_RUN, agreement_lengths=(300, 1999), total_tokens=64000, output_tokens=64, rates=(), group_sizes=(1,), rounds=1
)
"""Sizes for the same model in minutes: only figure 3, each point once."""
TINY_RUN = Loads(
    max_model_len=512,
    kv_cache_mib=8,
    max_num_batched_tokens=128,
    agreement_lengths=(5, 40, 200),
    lengths=(32, 128),
    total_tokens=256,
    input_tokens=64,
    output_tokens=4,
    rates=(20.0,),
    rate_seconds=0.2,
    group_sizes=(1, 2),
    rounds=2,
)
"""Sizes that run the same code in seconds; the figures are meaningless."""
NUM_AGREEMENT_TOKENS = 64
ROW_FIGURES = ("total_token_throughput", "median_ttft_ms", "median_tpot_ms")
ROW_KEYS = {"lengths": ("num_input_tokens", "prompt tokens"), "rates": ("request_rate", "requests/s")}
"""Key and title of each report's first column."""


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    loads = TINY_RUN if args.tiny else SHORT_RUN if args.short else FULL_RUN
    dtype, began = getattr(torch, args.dtype), time.perf_counter()
    with ExitStack() as stack:
        directory = args.models or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-")))
        source = args.model or ("tiny" if args.tiny else "8b")
        models = prepare_models(source, directory, dtype=dtype, device=args.device, group_sizes=list(loads.group_sizes))
        # 1. compare all models with PyTorch
        run = GpuBenchmark(models, args, loads)
        found = run.check_agreement() | agreement.check_small_models(directory, dtype, args.device)
        args.output_dir.mkdir(parents=True, exist_ok=True)
        (args.output_dir / "agreement.json").write_text(
            json.dumps(run.describe_run() | {"own": found}, indent=1) + "\n"
        )
        print(agreement.format_table(found), flush=True)
        if not all(row["agrees"] for row in found.values()):
            sys.exit("the engine disagrees with PyTorch, so its speed is not measured")
        if args.agreement:
            return
        # 2. measure speed
        text = run.measure(args.output_dir / "own")
        (args.output_dir / "own.md").write_text(text + "\n", encoding="utf-8")
        print(text, flush=True)
    print(f"{time.perf_counter() - began:.0f} s in total", flush=True)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model and tiny loads")
    parser.add_argument("--short", action="store_true", help="only figure 3, each point once: minutes")
    parser.add_argument("--agreement", action="store_true", help="only compare with PyTorch, without measuring speed")
    parser.add_argument("--models", type=Path, help="empty directory in which to keep the generated models")
    parser.add_argument("--output-dir", type=Path, default=Path("gpu-report"))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error(
            "--device is cuda, but PyTorch finds no GPU; use --device cpu --tiny to run the same code on a CPU"
        )
    return args


class GpuBenchmark:
    """The measurements of one run."""

    def __init__(self, models: dict[str, Path], args: argparse.Namespace, loads: Loads) -> None:
        self._models = models
        self._args = args
        self._loads = loads
        self._config = EngineConfig(
            device=args.device,
            dtype=args.dtype,
            max_model_len=loads.max_model_len,
            max_num_seqs=64,
            max_num_batched_tokens=loads.max_num_batched_tokens,
            max_num_waiting=1 << 20,
            kv_cache_bytes=loads.kv_cache_mib << 20,
            enable_prefix_caching=False,
            seed=0,
        )
        config = json.loads((models["dense"] / "config.json").read_text())
        self._vocab_size: int = config["vocab_size"]

    def describe_run(self) -> Report:
        """Return the machine and the sizes, for the head of a report."""
        gpu = torch.cuda.get_device_name() if self._args.device == "cuda" else None
        machine = {"gpu": gpu, "torch": torch.__version__, "threads": torch.get_num_threads()}
        return {"machine": machine, "dtype": self._args.dtype, "loads": vars(self._loads)}

    def check_agreement(self) -> dict[str, dict[str, Any]]:
        prompts = self._make_prompts([Request(0.0, length, 1) for length in self._loads.agreement_lengths], seed=0)
        found, dtype = {}, getattr(torch, self._args.dtype)
        for name, model in self._models.items():
            outputs = self._generate_outputs(model, prompts)
            release_memory()
            found[name] = agreement.compare_with_pytorch(model, outputs, dtype, self._args.device)
        return found

    def measure(self, directory: Path) -> str:
        """Write figures 3 and 4 to `directory`; return their tables."""
        loads = self._loads
        played = [
            make_simultaneous_requests(max(1, loads.total_tokens // length), length, loads.output_tokens)
            for length in loads.lengths
        ] + [
            make_poisson_requests(
                rate, max(2, round(rate * loads.rate_seconds)), loads.input_tokens, loads.output_tokens
            )
            for rate in loads.rates
        ]
        by_model = {name: self._play_loads(model, played) for name, model in self._models.items()}
        # From [model][load] to [load][model].
        runs = [dict(zip(by_model, rounds, strict=True)) for rounds in zip(*by_model.values(), strict=True)]
        rows = {
            "lengths": self._make_rows("lengths", loads.lengths, runs[: len(loads.lengths)]),
            "rates": self._make_rows("rates", loads.rates, runs[len(loads.lengths) :]),
        }
        reports = {
            name: self.describe_run() | {"num_output_tokens": loads.output_tokens, "rows": some}
            for name, some in rows.items()
            if some
        }
        for name, report in reports.items():
            write_part(name, report, directory)
        return "\n\n".join(format_rows(report, *ROW_KEYS[name], ROW_FIGURES) for name, report in reports.items())

    # Separate methods drop the last references to an engine before the next one allocates device memory.

    def _generate_outputs(self, model: Path, prompts: list[list[int]]) -> list[GreedyOutput]:
        with self._start_engine(model) as engine:
            return generate_greedily(engine, prompts, NUM_AGREEMENT_TOKENS)

    def _play_loads(self, model: Path, loads: list[list[Request]]) -> list[list[Figures]]:
        """Play each load in rounds; return the figures of each round."""
        with self._start_engine(model) as engine:
            play = make_engine_system(engine)
            warm_up = make_simultaneous_requests(2, self._loads.input_tokens, 4)
            play(warm_up, self._make_prompts(warm_up, seed=0))
            return [
                [
                    compute_figures(play(requests, self._make_prompts(requests, seed)))
                    for seed in range(self._loads.rounds)
                ]
                for requests in loads
            ]

    def _start_engine(self, model: Path) -> closing[LLMEngine]:
        release_memory()
        return closing(LLMEngine(load_model(model, self._config), self._config))

    def _make_rows(self, name: str, values: tuple[float, ...], runs: list[Rounds]) -> list[Report]:
        return [{ROW_KEYS[name][0]: value, **summarize_runs(some)} for value, some in zip(values, runs, strict=True)]

    def _make_prompts(self, requests: list[Request], seed: int) -> list[list[int]]:
        return make_random_prompts(requests, self._vocab_size, seed)


if __name__ == "__main__":
    main()
