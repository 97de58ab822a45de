"""Texts and divergences that a student learns by: its KL on public text, on the teacher's and on its own.

    python -m benchmarks.texts [--steps 150] [--seeds 0 1 2] [--arms ...] [--output texts.json]
    python -m benchmarks.texts --short          # a few small steps, one seed: does it run?

The built-in 5.6M teacher, l = 6, g = 1, 8 rows of 256 tokens a step, AdamW at 3e-3. Rows are the standard library's
sources; or they begin with 32 tokens of such a row, and the teacher wrote the rest, at temperature 1; or half of them
do, and a student wrote the rest: the one that the first arm trained, as an earlier job's would. Divergences at
temperature 2: forward KL(teacher || student), reverse KL(student || teacher), and that of Jensen and Shannon. All arms
train on as many tokens; what writing takes comes on top and is reported in seconds.

Held out are rows of public text, and what teacher and student (the arm's own) write to the beginnings of such rows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.reports import benchmark_parser, conditions, write_report
from benchmarks.training_runs import TrainingRuns, one_worker, python_spec
from swiftkv_platform.data.packing import PackedRows, Samples, pack
from swiftkv_platform.distillation import losses
from swiftkv_platform.specs import BUILTIN_TEACHER, JobSpec

PROMPT = 32
"""Tokens of a public row that a written one begins with."""
SWIFTKV = {"num_key_value_layers": 6, "key_value_group_size": 1}
Divergence = Callable[[Tensor, Tensor], Tensor]


def reverse_kl_(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed KL(softmax(logits) || softmax(targets)), [rows, vocab]; `logits` becomes its gradient."""
    log_q = logits.log_softmax(dim=-1)
    ratio = log_q - targets.log_softmax(dim=-1)
    q = log_q.exp()
    divergence = (q * ratio).sum(dim=-1, keepdim=True)
    logits.copy_(q * (ratio - divergence))
    return divergence.double().sum()


def jensen_shannon_(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed Jensen-Shannon divergence of the two distributions, [rows, vocab]; `logits` becomes its gradient."""
    log_q, log_p = logits.log_softmax(dim=-1), targets.log_softmax(dim=-1)
    log_mean = torch.logaddexp(log_q, log_p) - math.log(2.0)
    p, q = log_p.exp(), log_q.exp()
    of_student = (q * (log_q - log_mean)).sum(dim=-1, keepdim=True)
    divergence = 0.5 * of_student + 0.5 * (p * (log_p - log_mean)).sum(dim=-1, keepdim=True)
    logits.copy_(0.5 * q * (log_q - log_mean - of_student))
    return divergence.double().sum()


DIVERGENCES: dict[str, Divergence | None] = {"forward": None, "reverse": reverse_kl_, "JSD": jensen_shannon_}
"""None: the trainer's own."""


@dataclass(frozen=True)
class Arm:
    text: str
    divergence: str

    def __str__(self) -> str:
        return f"{self.text}, {self.divergence}"


BASELINE = Arm("public", "forward")
ARMS = {
    str(arm): arm
    for arm in (
        *(Arm("public", divergence) for divergence in DIVERGENCES),
        Arm("teacher's", "forward"),
        *(Arm("half student's", divergence) for divergence in DIVERGENCES),
    )
}


def rows_of(token_ids: np.ndarray, like: PackedRows) -> PackedRows:
    """Rows of one sample each, [num_rows, max_length], all of which counts but what was given."""
    number, length = token_ids.shape
    counts = np.zeros((number, length), dtype=bool)
    counts[:, PROMPT - 1 : -1] = True
    samples = Samples(token_ids.astype(np.int32).ravel(), counts.ravel(), np.arange(0, number * length + 1, length))
    return pack(samples, np.arange(number), max_length=length, pad_token_id=like.pad_token_id)


def mixed(written: PackedRows, public: PackedRows, number: int) -> PackedRows:
    """Rows of what was written, and the first `number` public ones, whose samples stay apart."""
    members = public.members[: public.row_starts[min(len(public), number)]]
    kept = [slice(*public.samples.starts[[i, i + 1]]) for i in members]
    lengths = np.concatenate([written.samples.lengths, public.samples.lengths[members]])
    samples = Samples(
        tokens=np.concatenate([written.samples.tokens, *(public.samples.tokens[part] for part in kept)]),
        counts=np.concatenate([written.samples.counts, *(public.samples.counts[part] for part in kept)]),
        starts=np.concatenate([[0], np.cumsum(lengths)]),
    )
    return pack(samples, np.arange(len(lengths)), max_length=public.max_length, pad_token_id=public.pad_token_id)


def beginnings(rows: PackedRows, number: int) -> np.ndarray:
    """[number, PROMPT]: how samples of that length and more begin, in their order."""
    samples = rows.samples
    starts = [samples.starts[i] for i in rows.members if samples.starts[i + 1] - samples.starts[i] >= PROMPT]
    return np.stack([np.asarray(samples.tokens[start : start + PROMPT]) for start in starts[:number]])


@torch.no_grad()
def write(student: Any, prompts: np.ndarray, length: int, *, as_teacher: bool, seed: int) -> np.ndarray:
    """Rows [num_rows, length] that begin with `prompts` and go on at temperature 1, ends of text included."""
    torch.manual_seed(seed)
    student.swiftkv(not as_teacher)
    student.generation_config.eos_token_id = None
    parts = []
    for part in torch.from_numpy(prompts.astype(np.int64)).split(64):
        sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
        written = student.generate(part, attention_mask=torch.ones_like(part), max_length=length, **sampling)
        parts.append(written.numpy())
    student.swiftkv(True)
    return np.concatenate(parts)


def _spec(args: argparse.Namespace, seed: int) -> JobSpec:
    model = {"name_or_path": BUILTIN_TEACHER, "dtype": "float32"}
    spec = python_spec("texts", args, seed, short_length=64, model=model, swiftkv=SWIFTKV)
    return JobSpec.model_validate(spec | {"optimizer": {"learning_rate": 3e-3}})


def run_seed(runs: TrainingRuns, args: argparse.Namespace, seed: int, directory: Path) -> list[dict[str, Any]]:
    """A row for each arm."""
    spec = _spec(args, seed)
    length, public = spec.data.max_length, runs.data.train
    batch_size = spec.training.batch_size
    needed = args.steps * int(batch_size or 0)
    held_out = beginnings(runs.data.held_out, -(-args.evaluation_tokens // length))
    prompts = beginnings(public, needed)
    first = runs.student(spec, public, directory / "first")
    student = runs.load(spec, first)
    teachers_held_out = rows_of(write(student, held_out, length, as_teacher=True, seed=seed + 1000), public)
    rows: list[dict[str, Any]] = []
    for name in args.arms:
        arm, began = ARMS[name], time.monotonic()
        if arm.text == "public":
            texts = public
        elif arm.text == "teacher's":
            texts = rows_of(write(student, prompts, length, as_teacher=True, seed=seed), public)
        else:
            own = write(student, prompts[: needed // 2], length, as_teacher=False, seed=seed)
            texts = mixed(rows_of(own, public), public, needed // 2)
        writing = time.monotonic() - began
        divergence = DIVERGENCES[arm.divergence]
        with mock.patch.object(losses, "_kl_", divergence) if divergence else nullcontext():
            trained = first if arm == BASELINE else runs.student(spec, texts, directory / str(len(rows)))
        own_held_out = write(runs.load(spec, trained), held_out, length, as_teacher=False, seed=seed + 2000)
        row = {
            "arm": name,
            "seed": seed,
            "public": runs.kl(spec, trained),
            "teacher's": runs.kl(spec, trained, teachers_held_out),
            "own": runs.kl(spec, trained, rows_of(own_held_out, public)),
            "writing_seconds": writing,
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def summaries(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """By arm the mean KL on each held-out text, and its ratio to the first arm's."""
    found: list[dict[str, Any]] = []
    for arm in dict.fromkeys(row["arm"] for row in rows):
        line: dict[str, Any] = {"arm": arm}
        for text in ("public", "teacher's", "own"):
            mean = statistics.mean(row[text] for row in rows if row["arm"] == arm)
            baseline = statistics.mean(row[text] for row in rows if row["arm"] == rows[0]["arm"])
            line[text] = {"mean": mean, "ratio": mean / baseline}
        found.append(line)
    return found


def main() -> int:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--short", action="store_true", help="few, small steps and one seed")
    parser.add_argument("--steps", type=int, help="of 8 rows of 256 tokens; default: 150, with --short 4")
    parser.add_argument("--evaluation-tokens", type=int, help="of each text; default: 16384, with --short 1024")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0 1 2, with --short 0")
    parser.add_argument("--arms", nargs="+", choices=ARMS, help="default: all; the first is always run")
    args = parser.parse_args()
    args.steps = args.steps or (4 if args.short else 150)
    args.evaluation_tokens = args.evaluation_tokens or (1024 if args.short else 16384)
    args.seeds = args.seeds or ([0] if args.short else [0, 1, 2])
    args.arms = [name for name in ARMS if args.arms is None or name in (str(BASELINE), *args.arms)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-texts-") as name, one_worker(Path(name)):
        runs = TrainingRuns(_spec(args, args.seeds[0]), Path(name) / "runs")
        for seed in args.seeds:
            directory = Path(name) / f"seed-{seed}"
            directory.mkdir()
            rows += run_seed(runs, args, seed, directory)
    lines = summaries(rows)
    for line in lines:
        print(json.dumps(line), flush=True)
    write_report({"conditions": conditions(args), "runs": rows, "summaries": lines}, args.output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
