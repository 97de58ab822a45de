"""Self-distillation steps of a model on one GPU: tokens/s, TFLOP/s, and peak memory against the plan's.

    python -m benchmarks.gpu.training [MODEL] [--max-length 4096] [--steps 6]

MODEL is the directory of a dense model; without it, one with the shape of Llama 3.1 8B and random weights. A row has
four samples of random tokens; `counted` is the share of positions, at each sample's end, that the loss counts. FLOPs
are the plan's, without recomputation.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.depths import one_worker
from benchmarks.gpu.models import prepare, release_memory
from swiftkv_platform.contract.attempts import AttemptRequest, StopRequest
from swiftkv_platform.data.packing import PackedRows, Samples, pack
from swiftkv_platform.distillation.checkpoint import Checkpointer
from swiftkv_platform.distillation.course import CourseNote, Progress
from swiftkv_platform.distillation.trainer import StepMetrics, Trainer
from swiftkv_platform.jobs.attempt.stored import AttemptCheckpoints
from swiftkv_platform.jobs.worker.setup import open_lazy, spread_fork, task_device
from swiftkv_platform.planning.job import training_setup
from swiftkv_platform.planning.training import plan_training
from swiftkv_platform.specs import JobSpec
from swiftkv_platform.storage.addresses import open_store

ROWS_A_STEP, SAMPLES_A_ROW, WARM_UP_STEPS = 4, 4, 2
CASES = (("shared", "ddp", 1.0), ("own", "fsdp2", 0.5))
"""`decode_key_value`, strategy, share of positions that count."""


@dataclass
class _Clock:
    """Listener of a run that records the seconds of each step."""

    device: torch.device
    seconds: list[float] = field(default_factory=list)
    _began: float = 0.0

    def on_start(self, progress: Progress) -> None:  # noqa: ARG002
        self._began = time.perf_counter()

    def on_course(self, note: CourseNote) -> None:
        """Do nothing: a short run has no course."""

    def on_step(self, metrics: StepMetrics) -> None:  # noqa: ARG002
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.seconds.append(time.perf_counter() - self._began)
        self._began = time.perf_counter()

    def stop_request(self) -> StopRequest:
        return StopRequest.NONE


def job_spec(model: Path, args: argparse.Namespace, form: str, strategy: str) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "steps",
            "model": {"name_or_path": str(model), "dtype": "bfloat16"},
            "swiftkv": {"prefill_reduction": 0.5, "decode_key_value": form},
            "data": {"sources": [{"name_or_path": "rows.jsonl"}], "max_length": args.max_length},
            "optimizer": {"learning_rate": 1e-4},
            "training": {
                "batch_size": ROWS_A_STEP,
                "micro_batch_size": 1,
                "max_steps": args.steps,
                "validation": None,
            },
            "sharding": {"strategy": strategy},
            "resources": {"num_workers": 1, "gpus_per_worker": int(args.device == "cuda")},
        }
    )


def random_rows(max_length: int, num_steps: int, counted: float) -> PackedRows:
    length = max_length // SAMPLES_A_ROW
    num_samples = num_steps * ROWS_A_STEP * SAMPLES_A_ROW
    counts = np.tile(np.arange(length) >= round(length * (1 - counted)), num_samples)
    counts[length - 1 :: length] = False  # no token follows a sample's last one
    tokens = np.random.default_rng(0).integers(0, 500, length * num_samples).astype(np.int32)
    borders = np.arange(0, len(tokens) + 1, length)
    return pack(Samples(tokens, counts, borders), np.arange(num_samples), max_length=max_length, pad_token_id=0)


def measure(model: Path, args: argparse.Namespace, form: str, strategy: str, counted: float) -> str:
    """Measure one case; returns a line of the table."""
    spec, rows = job_spec(model, args, form, strategy), random_rows(args.max_length, args.steps, counted)
    device, request = task_device(spec), AttemptRequest(job_id="bench", attempt=1, spec=spec, run_id="bench")
    parallel, clock = spread_fork(spec, str(model), None, device=device), _Clock(device)
    with tempfile.TemporaryDirectory(prefix="steps-") as directory:
        checkpoints = AttemptCheckpoints(open_store(directory), request, keep=1)
        Trainer(
            parallel,
            rows,
            Checkpointer(parallel, checkpoints, local_rank=0),
            spec,
            total_steps=args.steps,
            listener=clock,
            held_out=None,
        ).run()
    setup = replace(
        training_setup(spec), samples=rows.sample_counts, counted_share=rows.num_counted_tokens / rows.num_tokens
    )
    plan = plan_training(open_lazy(spec, str(model)).model.config.to_dict(), setup)
    seconds, num_tokens = statistics.median(clock.seconds[WARM_UP_STEPS:]), ROWS_A_STEP * args.max_length
    flops = (plan.flops_per_token.total - plan.flops_per_token.recomputation) * num_tokens
    peak = torch.cuda.max_memory_allocated(device) / 2**30 if device.type == "cuda" else float("nan")
    cells = (
        form,
        strategy,
        f"{counted:.0%}",
        f"{seconds:.2f}",
        f"{num_tokens / seconds:,.0f}",
        f"{flops / seconds / 1e12:.0f}",
        f"{peak:.1f}",
        f"{plan.memory.peak / 2**30:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, nargs="?", metavar="MODEL")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model")
    parser.add_argument("--max-length", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=6)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="gpu-") as name, one_worker(Path(name)):
        made = args.model or ("tiny" if args.tiny else "8b")
        [dense, *_] = prepare(made, Path(name), dtype=torch.bfloat16, device=args.device, group_sizes=[1])
        print("| form | strategy | counted | s a step | tokens/s | TFLOP/s | peak GiB | planned GiB |")
        print("|" + " --- |" * 8, flush=True)
        for case in CASES:
            print(measure(dense.directory, args, *case), flush=True)
            release_memory()
            if args.device == "cuda":
                torch.cuda.reset_peak_memory_stats()


if __name__ == "__main__":
    main()
