"""One run for whoever has a GPU: correctness first, then the paper's figures 3 and 4 and table 5, dense and SwiftKV.

    python -m benchmarks.gpu [MODEL] [--vllm-python PATH] [--short] [--output-dir DIR]
    python -m benchmarks.gpu --agreement
    python -m benchmarks.gpu --device cpu --tiny

MODEL is the directory of a dense model; without it, one with the shape of Llama 3.1 8B and random weights. Its students
(half of the layers; g = 1 and 4, and g = 1 whose deep tokens keep K and V of their own) are converted from it, not
distilled, since a step costs the same whatever the weights are. With `--vllm-python`, an interpreter that has vLLM and
this project's plugin, vLLM is measured too.

First every engine and model must agree with PyTorch (`agreement.json`), our engine on the steps of
`benchmarks.gpu.steps` too; where one does not, the run ends with status 1. With `--agreement` that is all.
Then each engine writes `lengths`, `rates` and `memory` as JSON and SVG, and their tables, with TTFT and TPOT, into
`ENGINE.md`. Models take turns, one in memory at a time, so the rounds are not interleaved as they are on a CPU.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.engine_worker import add_vllm_python
from benchmarks.gpu import agreement, steps
from benchmarks.gpu.agreement import Answer
from benchmarks.gpu.engines import Limits, Model, Running, Start, own_engine, prepare, release_memory, vllm_engine
from benchmarks.serving import workloads
from benchmarks.serving.__main__ import write
from benchmarks.serving.metrics import Figures, figures
from benchmarks.serving.output import by_row
from benchmarks.serving.parts import summary
from benchmarks.serving.systems import System, random_prompts
from benchmarks.serving.workloads import Request

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
    starts: dict[str, Start] = {"own": own_engine}
    if args.vllm_python is not None:
        starts["vllm"] = vllm_engine(args.vllm_python)
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
        found = run.agreement(starts)
        found["own"] |= steps.agreements(directory, getattr(torch, args.dtype), args.device)
        args.output_dir.mkdir(parents=True, exist_ok=True)
        (args.output_dir / "agreement.json").write_text(json.dumps(run.head() | found, indent=1) + "\n")
        print(agreement.table(found), flush=True)
        if not all(row["agrees"] for rows in found.values() for row in rows.values()):
            sys.exit("an engine disagrees with PyTorch: its speed is not measured")
        if args.agreement:
            return
        for name, start in starts.items():
            text = run.measure(start, args.output_dir / name, fp8=name == "vllm")
            (args.output_dir / f"{name}.md").write_text(text + "\n", encoding="utf-8")
            print(f"-- {name}\n{text}", flush=True)
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
    add_vllm_python(parser)
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
        self._limits = Limits(
            device=args.device,
            dtype=args.dtype,
            max_model_len=loads.max_model_len,
            max_num_seqs=loads.max_num_seqs,
            max_num_batched_tokens=loads.max_num_batched_tokens,
            kv_cache_bytes=loads.kv_cache_mib << 20,
            enforce_eager=args.tiny,
        )
        config = json.loads((models[0].directory / "config.json").read_text())
        self._vocab_size: int = config["vocab_size"]

    def head(self) -> Report:
        """Return the head of a report: the machine and the sizes."""
        gpu = torch.cuda.get_device_name() if self._args.device == "cuda" else None
        machine = {"gpu": gpu, "torch": torch.__version__, "threads": torch.get_num_threads()}
        return {"machine": machine, "dtype": self._args.dtype, "loads": vars(self._loads)}

    def agreement(self, starts: dict[str, Start]) -> dict[str, dict[str, Any]]:
        """Comparison of each engine and model with PyTorch, by engine and model."""
        prompts = self._prompts([Request(0.0, length, 1) for length in self._loads.agreement_lengths], seed=0)
        found: dict[str, dict[str, Any]] = {name: {} for name in starts}
        for model in self._models:
            answers: dict[str, list[Answer]] = {}
            for name, start in starts.items():
                answers[name] = self._answers(start, model, prompts)
            release_memory()
            for name, given in answers.items():
                dtype = getattr(torch, self._args.dtype)
                found[name][model.name] = agreement.judge(model.directory, given, dtype, self._args.device)
        return found

    def measure(self, start: Start, directory: Path, *, fp8: bool) -> str:
        """Figures 3 and 4 and table 5 of one engine: files in `directory`, and their tables.

        Args:
            fp8: measure the last student with an FP8 cache too, in table 5.
        """
        lengths: list[dict[str, list[Figures]]] = [{} for _ in self._loads.lengths]
        rates: list[dict[str, list[Figures]]] = [{} for _ in self._loads.rates]
        loads = [self._all_at_once(length) for length in self._loads.lengths] + [
            self._at_rate(rate) for rate in self._loads.rates
        ]
        for model in self._models:
            runs, _ = self._played(start, model, self._limits, loads)
            for some, rounds in zip(lengths + rates, runs, strict=True):
                some[model.name] = rounds
        memory, blocks = self._memory(start, fp8=fp8)
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

    def _memory(
        self, start: Start, *, fp8: bool
    ) -> tuple[list[dict[str, list[Figures]]], list[dict[str, dict[str, int]]]]:
        """Runs and KV blocks, by limit and model."""
        runs: list[dict[str, list[Figures]]] = [{} for _ in self._loads.memory_mib]
        blocks: list[dict[str, dict[str, int]]] = [{} for _ in self._loads.memory_mib]
        load = [Request(0.0, self._loads.memory_input_tokens, self._loads.output_tokens)] * self._loads.memory_requests
        played = [(model.name, model, "auto") for model in self._models]
        if fp8:
            played.append((f"{self._models[-1].name}_fp8", self._models[-1], "fp8"))
        for mib, some, made in zip(self._loads.memory_mib, runs, blocks, strict=True):
            for name, model, kv_cache_dtype in played:
                limits = replace(self._limits, kv_cache_bytes=mib << 20, kv_cache_dtype=kv_cache_dtype)
                limits = replace(limits, max_model_len=self._loads.memory_input_tokens + self._loads.output_tokens)
                (some[name],), made[name] = self._played(start, model, limits, [load])
        return runs, blocks

    # In separate methods, an engine's last references end before the next engine needs the device's memory.

    def _answers(self, start: Start, model: Model, prompts: list[list[int]]) -> list[Answer]:
        with start(model.directory, self._limits) as running:
            return running.answers(prompts, NUM_AGREEMENT_TOKENS)

    def _played(
        self, start: Start, model: Model, limits: Limits, loads: list[list[Request]]
    ) -> tuple[list[list[Figures]], dict[str, int]]:
        """Rounds of each load, and the KV cache's blocks."""
        with start(model.directory, limits) as running:
            self._warm_up(running)
            rounds = [self._rounds(running.play, requests) for requests in loads]
            return rounds, {"num_blocks": running.num_blocks, "block_size": running.block_size}

    def _report(self, key: str, values: tuple[float, ...], runs: list[dict[str, list[Figures]]]) -> Report:
        rows = [{key: value, **summary(some)} for value, some in zip(values, runs, strict=True)]
        return {"num_output_tokens": self._loads.output_tokens, "rows": rows}

    def _rounds(self, play: System, requests: list[Request]) -> list[Figures]:
        return [figures(play(requests, self._prompts(requests, seed))) for seed in range(self._loads.rounds)]

    def _warm_up(self, running: Running) -> None:
        requests = [Request(0.0, self._loads.memory_input_tokens, 4)] * 2
        running.play(requests, self._prompts(requests, seed=0))

    def _all_at_once(self, length: int) -> list[Request]:
        return [Request(0.0, length, self._loads.output_tokens)] * max(1, self._loads.total_tokens // length)

    def _at_rate(self, rate: float) -> list[Request]:
        loads = self._loads
        num_requests = max(2, round(rate * loads.rate_seconds))
        requests = workloads.uniform(num_requests, loads.rate_input_tokens, loads.output_tokens, seed=0)
        return workloads.at_rate(requests, rate)

    def _prompts(self, requests: list[Request], seed: int) -> list[list[int]]:
        return random_prompts(requests, self._vocab_size, seed)


if __name__ == "__main__":
    main()
