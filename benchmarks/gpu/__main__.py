"""One run for whoever has a GPU: correctness first, then the paper's figures 3 and 4 and table 5, dense and SwiftKV.

    python -m benchmarks.gpu [MODEL] [--short] [--output-dir DIR]
    python -m benchmarks.gpu --agreement
    python -m benchmarks.gpu --device cpu --tiny

MODEL is the directory of a dense model; without it, one with the shape of Llama 3.1 8B and random weights. Its students
(half of the layers; g = 1 and 4, and g = 1 whose deep tokens keep K and V of their own) are converted from it, not
distilled, since a step costs the same whatever the weights are. `benchmarks.gpu.weights` measures them in vLLM.

First our engine must agree with PyTorch on every model (`agreement.json`), and on the steps of `benchmarks.gpu.steps`;
where it does not, the run ends with status 1. With `--agreement` that is all.
Then it writes `own/lengths`, `rates` and `memory` as JSON and SVG, and their tables, with TTFT and TPOT, into `own.md`.
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

from benchmarks.gpu import agreement, steps
from benchmarks.gpu.agreement import Answer, engine_answers
from benchmarks.gpu.models import Model, prepare, release_memory
from benchmarks.serving import workloads
from benchmarks.serving.__main__ import write
from benchmarks.serving.metrics import Figures, figures
from benchmarks.serving.output import by_row
from benchmarks.serving.parts import summary
from benchmarks.serving.systems import engine_system, random_prompts
from benchmarks.serving.workloads import Request
from swiftkv_platform.engine import EngineConfig, LLMEngine
from swiftkv_platform.engine.loading import load_model

Report = dict[str, Any]


@dataclass(frozen=True)
class Loads:
    """Sizes of a run. Lengths are in tokens."""

    max_model_len: int
    kv_cache_mib: int
    max_num_batched_tokens: int
    agreement_lengths: tuple[int, ...]
    """Prompt lengths of the answers that are compared with PyTorch."""
    lengths: tuple[int, ...]
    """Prompt lengths of figure 3."""
    total_tokens: int
    """Prompt tokens of each point, all requests together."""
    output_tokens: int
    rate_input_tokens: int
    rates: tuple[float, ...]
    """Arrival rates of figure 4, in requests per second."""
    rate_seconds: float
    memory_mib: tuple[int, ...]
    """Limits of the KV cache in table 5."""
    memory_requests: int
    memory_input_tokens: int
    group_sizes: tuple[int, ...]
    rounds: int
    max_num_seqs: int = 64


FULL = Loads(
    max_model_len=40960,
    kv_cache_mib=24 << 10,
    max_num_batched_tokens=8192,
    agreement_lengths=(17, 300, 1999),
    lengths=(2000, 8000, 32000),
    total_tokens=128000,
    output_tokens=256,
    rate_input_tokens=2000,
    rates=(1.0, 4.0, 8.0),
    rate_seconds=15.0,
    memory_mib=(16 << 10, 2 << 10),
    memory_requests=64,
    memory_input_tokens=2000,
    group_sizes=(1, 4),
    rounds=2,
)
"""For a GPU with 80 GiB and a model of 8 billion parameters."""
SHORT = replace(
    FULL,
    agreement_lengths=(300, 1999),
    total_tokens=64000,
    output_tokens=64,
    rates=(),
    memory_mib=(),
    group_sizes=(1,),
    rounds=1,
)
"""Sizes for the same model in minutes: only figure 3, each point once."""
TINY = Loads(
    max_model_len=512,
    kv_cache_mib=8,
    max_num_batched_tokens=128,
    agreement_lengths=(5, 40, 200),
    lengths=(32, 128),
    total_tokens=256,
    output_tokens=4,
    rate_input_tokens=32,
    rates=(20.0,),
    rate_seconds=0.2,
    memory_mib=(1,),
    memory_requests=4,
    memory_input_tokens=64,
    group_sizes=(1, 2),
    rounds=2,
)
"""Sizes that run the same code in seconds; the figures are meaningless."""
NUM_AGREEMENT_TOKENS = 64
FIGURES = ("total_token_throughput", "median_ttft_ms", "median_tpot_ms")


def main(argv: list[str] | None = None) -> None:
    args = parse_arguments(argv)
    loads = TINY if args.tiny else SHORT if args.short else FULL
    began = time.perf_counter()
    with ExitStack() as stack:
        directory = args.models or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gpu-")))
        models = prepare(
            args.model or ("tiny" if args.tiny else "8b"),
            directory,
            dtype=getattr(torch, args.dtype),
            device=args.device,
            group_sizes=list(loads.group_sizes),
        )
        run = Run(models, args, loads)
        found = run.agreement() | steps.agreements(directory, getattr(torch, args.dtype), args.device)
        args.output_dir.mkdir(parents=True, exist_ok=True)
        (args.output_dir / "agreement.json").write_text(json.dumps(run.head() | {"own": found}, indent=1) + "\n")
        print(agreement.table(found), flush=True)
        if not all(row["agrees"] for row in found.values()):
            sys.exit("the engine disagrees with PyTorch: its speed is not measured")
        if args.agreement:
            return
        text = run.measure(args.output_dir / "own")
        (args.output_dir / "own.md").write_text(text + "\n", encoding="utf-8")
        print(text, flush=True)
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model and loads of seconds")
    parser.add_argument("--short", action="store_true", help="only figure 3, each point once: minutes")
    parser.add_argument("--agreement", action="store_true", help="only compare with PyTorch, without measuring speed")
    parser.add_argument("--models", type=Path, help="an empty directory for the generated models, which are kept")
    parser.add_argument("--output-dir", type=Path, default=Path("gpu-report"))
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device is cuda and PyTorch finds no GPU; --device cpu --tiny runs the same code on a CPU")
    return args


class Run:
    """The measurements of one command."""

    def __init__(self, models: list[Model], args: argparse.Namespace, loads: Loads) -> None:
        self._models = models
        self._args = args
        self._loads = loads
        self._config = EngineConfig(
            device=args.device,
            dtype=args.dtype,
            max_model_len=loads.max_model_len,
            max_num_seqs=loads.max_num_seqs,
            max_num_batched_tokens=loads.max_num_batched_tokens,
            max_num_waiting=1 << 20,
            kv_cache_bytes=loads.kv_cache_mib << 20,
            enable_prefix_caching=False,
            seed=0,
        )
        config = json.loads((models[0].directory / "config.json").read_text())
        self._vocab_size: int = config["vocab_size"]

    def head(self) -> Report:
        """Return the head of a report: the machine and the sizes."""
        gpu = torch.cuda.get_device_name() if self._args.device == "cuda" else None
        machine = {"gpu": gpu, "torch": torch.__version__, "threads": torch.get_num_threads()}
        return {"machine": machine, "dtype": self._args.dtype, "loads": vars(self._loads)}

    def agreement(self) -> dict[str, dict[str, Any]]:
        """Comparison of the engine with PyTorch, by model."""
        prompts = self._prompts([Request(0.0, length, 1) for length in self._loads.agreement_lengths], seed=0)
        found, dtype = {}, getattr(torch, self._args.dtype)
        for model in self._models:
            answers = self._answers(model, prompts)
            release_memory()
            found[model.name] = agreement.judge(model.directory, answers, dtype, self._args.device)
        return found

    def measure(self, directory: Path) -> str:
        """Figures 3 and 4 and table 5: files in `directory`, and their tables."""
        lengths: list[dict[str, list[Figures]]] = [{} for _ in self._loads.lengths]
        rates: list[dict[str, list[Figures]]] = [{} for _ in self._loads.rates]
        loads = [self._all_at_once(length) for length in self._loads.lengths] + [
            self._at_rate(rate) for rate in self._loads.rates
        ]
        for model in self._models:
            runs, _ = self._played(model, self._config, loads)
            for some, rounds in zip(lengths + rates, runs, strict=True):
                some[model.name] = rounds
        memory, blocks = self._memory()
        reports = {
            "lengths": self._report("num_input_tokens", self._loads.lengths, lengths),
            "rates": self._report("request_rate", self._loads.rates, rates),
            "memory": self._report("kv_cache_mib", self._loads.memory_mib, memory),
        }
        for row, kv_cache in zip(reports["memory"]["rows"], blocks, strict=True):
            row["kv_cache"] = kv_cache
        reports = {name: report for name, report in reports.items() if report["rows"]}
        for name, report in reports.items():
            write(name, self.head() | report, directory)
        return "\n\n".join(
            by_row(reports[name], key, title, FIGURES)
            for name, key, title in (
                ("lengths", "num_input_tokens", "prompt tokens"),
                ("rates", "request_rate", "requests/s"),
                ("memory", "kv_cache_mib", "MiB of KV cache"),
            )
            if name in reports
        )

    def _memory(self) -> tuple[list[dict[str, list[Figures]]], list[dict[str, dict[str, int]]]]:
        """Runs and KV blocks, by limit and model."""
        runs: list[dict[str, list[Figures]]] = [{} for _ in self._loads.memory_mib]
        blocks: list[dict[str, dict[str, int]]] = [{} for _ in self._loads.memory_mib]
        load = [Request(0.0, self._loads.memory_input_tokens, self._loads.output_tokens)] * self._loads.memory_requests
        length = self._loads.memory_input_tokens + self._loads.output_tokens
        for mib, some, made in zip(self._loads.memory_mib, runs, blocks, strict=True):
            config = self._config.model_copy(update={"kv_cache_bytes": mib << 20, "max_model_len": length})
            for model in self._models:
                (some[model.name],), made[model.name] = self._played(model, config, [load])
        return runs, blocks

    # In separate methods, an engine's last references end before the next engine needs the device's memory.

    def _answers(self, model: Model, prompts: list[list[int]]) -> list[Answer]:
        with _started(model, self._config) as engine:
            return engine_answers(engine, prompts, NUM_AGREEMENT_TOKENS)

    def _played(
        self, model: Model, config: EngineConfig, loads: list[list[Request]]
    ) -> tuple[list[list[Figures]], dict[str, int]]:
        """Rounds of each load, and the KV cache's blocks."""
        with _started(model, config) as engine:
            self._warm_up(engine)
            rounds = [self._rounds(engine, requests) for requests in loads]
            return rounds, {"num_blocks": engine.num_blocks, "block_size": engine.block_size}

    def _report(self, key: str, values: tuple[float, ...], runs: list[dict[str, list[Figures]]]) -> Report:
        rows = [{key: value, **summary(some)} for value, some in zip(values, runs, strict=True)]
        return {"num_output_tokens": self._loads.output_tokens, "rows": rows}

    def _rounds(self, engine: LLMEngine, requests: list[Request]) -> list[Figures]:
        play = engine_system(engine)
        return [figures(play(requests, self._prompts(requests, seed))) for seed in range(self._loads.rounds)]

    def _warm_up(self, engine: LLMEngine) -> None:
        requests = [Request(0.0, self._loads.memory_input_tokens, 4)] * 2
        engine_system(engine)(requests, self._prompts(requests, seed=0))

    def _all_at_once(self, length: int) -> list[Request]:
        return [Request(0.0, length, self._loads.output_tokens)] * max(1, self._loads.total_tokens // length)

    def _at_rate(self, rate: float) -> list[Request]:
        loads = self._loads
        num_requests = max(2, round(rate * loads.rate_seconds))
        requests = workloads.uniform(num_requests, loads.rate_input_tokens, loads.output_tokens, seed=0)
        return workloads.at_rate(requests, rate)

    def _prompts(self, requests: list[Request], seed: int) -> list[list[int]]:
        return random_prompts(requests, self._vocab_size, seed)


def _started(model: Model, config: EngineConfig) -> closing[LLMEngine]:
    release_memory()
    return closing(LLMEngine(load_model(model.directory, config), config))


if __name__ == "__main__":
    main()
