"""A distillation step over packed samples, by their lengths against by a mask: tokens/s, side by side.

    OMP_NUM_THREADS=2 python -m benchmarks.packed_training [--rows 4] [--row-length 512] [--output packed_training.json]

The shape is SmolLM2-135M's with random weights; samples are as long as those of chats, 133 tokens on average. The step
by a mask also takes logits of 16 positions at a time, in a dozen passes. Both take turns over the same fork, rows and
optimizer, so that both see the same noise of the machine; figures are medians, of wall and of processor time. Losses
and gradients of both are compared first.

`--counted-share` is the share of positions, at each sample's end, that the loss counts (`data.train_on: assistant`);
tokens/s are of all tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.common import add_shape, benchmark_parser, conditions, random_llama, random_student, write_report
from swiftkv_platform.data.packing import PackedRows, Samples, pack
from swiftkv_platform.distillation import fork as fork_module
from swiftkv_platform.distillation.fork import Fork
from swiftkv_platform.distillation.losses import _FusedHeadLoss
from swiftkv_platform.distillation.parallel import build_optimizer
from swiftkv_platform.model.packed_attention import to_tensors
from swiftkv_platform.specs import DistillationSpec, OptimizerSpec

FEWEST_ROWS, LOGITS = 16, 1 << 19
"""Fewest rows of a chunk of logits, and its elements, in the step by a mask."""
Step = Callable[[], Tensor]


def loss_in_passes(
    student: Tensor, teacher: Tensor, student_head: Tensor, teacher_head: Tensor, *, temperature: float
) -> Tensor:
    """Summed tau^2 KL, by logarithms of all probabilities and with a product for each side."""

    def chunk_loss(hidden: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden, student_head.detach()).float()
        target = F.linear(teacher[rows], teacher_head).float()
        log_p = F.log_softmax(target.div_(temperature), dim=-1)
        log_q = F.log_softmax(logits.div_(temperature), dim=-1)
        p = log_p.exp()
        loss = temperature**2 * (p * log_p.sub_(log_q)).sum()
        return loss, log_q.exp_().sub_(p).mul_(temperature)

    chunk_size = max(FEWEST_ROWS, LOGITS // student_head.shape[0])
    with torch.autocast("cpu", enabled=False):
        hidden = student.to(student_head.dtype)
        loss: Tensor = _FusedHeadLoss.apply(hidden, student_head, chunk_loss, chunk_size, 1.0)  # type: ignore[no-untyped-call]
    return loss


def chat_rows(args: argparse.Namespace) -> PackedRows:
    """Make packed samples with lengths distributed like those of chats."""
    generator = np.random.default_rng(0)
    total = 2 * args.rows * args.row_length  # best fit leaves the last rows half empty
    lengths = generator.lognormal(np.log(args.mean_length) - 0.18, 0.6, 1 + 2 * total // args.mean_length)
    lengths = lengths.astype(np.int64).clip(16, args.row_length)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), total))]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    places = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    counts = places >= (1 - args.counted_share) * np.repeat(lengths, lengths)
    counts[starts[1:] - 1] = False
    tokens = generator.integers(0, args.vocab_size, starts[-1]).astype(np.int32)
    samples = Samples(tokens=tokens, counts=counts, starts=starts)
    return pack(samples, np.arange(len(lengths)), max_length=args.row_length, pad_token_id=0)


def sums(fork: Fork, batch: dict[str, Tensor], lengths: tuple[int, ...] | None) -> Tensor:
    """The loss, summed over positions."""
    named = fork(**batch, sample_lengths=lengths)
    loss: Tensor = torch.stack([weight * named[name] for name, weight in fork.loss_weights.items()]).sum()
    return loss


def by_mask(fork: Fork, batch: dict[str, Tensor]) -> Tensor:
    """Forward pass with a mask of the packed samples."""
    config = fork.student.config
    packed, config._attn_implementation = config._attn_implementation, "sdpa"
    try:
        with mock.patch.object(fork_module, "logits_loss", loss_in_passes):
            return sums(fork, batch, None)
    finally:
        config._attn_implementation = packed


def difference(fork: Fork, steps: dict[str, Step]) -> tuple[float, float]:
    """Relative difference of the losses, and of the gradients as a whole."""
    losses, gradients = [], []
    for step in steps.values():
        fork.zero_grad()
        loss = step()
        loss.backward()
        losses.append(float(loss.detach()))
        gradients.append(torch.cat([p.grad.flatten() for p in fork.parameters() if p.grad is not None]))
    masked, packed = gradients
    return abs(losses[1] / losses[0] - 1), float((packed - masked).norm() / masked.norm())


def measure(fork: Fork, steps: dict[str, Step], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return wall and processor seconds of each step, without the first of each kind."""
    optimizer = build_optimizer((p for p in fork.parameters() if p.requires_grad), OptimizerSpec())
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        for name, step in steps.items():
            started, cpu = time.perf_counter(), time.process_time()
            loss = step()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if number:
                seconds[name].append((time.perf_counter() - started, time.process_time() - cpu))
    return seconds


def main() -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--row-length", type=int, default=512)
    parser.add_argument("--mean-length", type=int, default=133)
    parser.add_argument("--counted-share", type=float, default=1.0)
    add_shape(
        parser,
        layers=30,
        hidden_size=576,
        intermediate_size=1536,
        heads=9,
        kv_heads=3,
        vocab_size=49152,
        num_key_value_layers=15,
        key_value_group_size=1,
    )
    args = parser.parse_args()
    rows, dtype = chat_rows(args), getattr(torch, args.dtype)
    fork = Fork(random_student(random_llama(args, args.row_length), args), DistillationSpec(), dtype=dtype)
    arrays, lengths = rows.end_to_end(range(args.rows))
    steps: dict[str, Step] = {
        "by mask": partial(by_mask, fork, to_tensors(rows.batch(range(args.rows)))),
        "by lengths": partial(sums, fork, to_tensors(arrays), lengths),
    }
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        loss, gradient = difference(fork, steps)
        seconds = measure(fork, steps, args.rounds)
    tokens = sum(lengths)
    print(f"{len(lengths)} samples, {tokens} tokens; relative difference of losses {loss}, of gradients {gradient}")
    print(f"{'attention':12} {'tokens/s':>9} {'to mask':>9} {'CPU seconds':>12} {'to mask':>9}")
    medians = {name: list(map(statistics.median, zip(*values, strict=True))) for name, values in seconds.items()}
    wall_by_mask, cpu_by_mask = medians["by mask"]
    results: list[dict[str, Any]] = []
    for name, (wall, cpu) in medians.items():
        speedup, cpu_speedup = wall_by_mask / wall, cpu_by_mask / cpu
        print(f"{name:12} {tokens / wall:9.0f} {speedup:8.2f}x {cpu:12.2f} {cpu_speedup:8.2f}x", flush=True)
        figures = {"tokens_per_second": tokens / wall, "speedup": speedup}
        results.append({"attention": name, **figures, "cpu_seconds": cpu, "cpu_speedup": cpu_speedup})
    differences = {"loss": loss, "gradient": gradient}
    write_report({**conditions(args), "differences": differences, "results": results}, args.output)


if __name__ == "__main__":
    main()
