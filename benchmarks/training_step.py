"""One distillation step, ours against the reference's scheme, over the same student and batch: FLOPs and tokens/s.

    python -m benchmarks.training_step [--compile] [--output training_step.json] [--dtype bfloat16 ...]

The reference's scheme: the whole model twice, as teacher and as student, logits of every position, layers checkpointed
in the backward pass. Layers below l, which carry no gradient, recompute nothing. torch also leaves out the last product
of a layer when it recomputes it ("early stop"): time is measured with that, FLOPs are given with and without. Variants
alternate within each round, so that all see the same noise of the machine; figures are medians. `of peak`: a step's
FLOPs per second relative to those of the machine's fastest large matrix product of the same dtype, measured alongside.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.common import (
    add_shape_arguments,
    describe_conditions,
    make_benchmark_parser,
    make_random_llama,
    make_random_student,
    measure_product,
    write_report,
)
from swiftkv_platform.data.packing import Samples, pack
from swiftkv_platform.distillation import model as distillation_module
from swiftkv_platform.distillation.model import DistillationModel, compile_layers
from swiftkv_platform.distillation.strategy import build_adamw
from swiftkv_platform.engine import kernels
from swiftkv_platform.model.packed_attention import to_tensors
from swiftkv_platform.specs import DistillationSpec, OptimizerSpec

Batch = dict[str, torch.Tensor]
Loss = Callable[[DistillationModel, Batch], torch.Tensor]
"""Forward pass: returns the sum of the loss over the batch."""
TEMPERATURE = 2.0


def reference_loss(distillation_model: DistillationModel, batch: Batch) -> torch.Tensor:
    """Two full forward passes, then KL of their materialized logits."""
    student, mask = distillation_model.student, batch["loss_mask"]
    inputs = {"input_ids": batch["input_ids"], "position_ids": batch["position_ids"], "use_cache": False}
    with torch.no_grad():
        teacher_logits = student.swiftkv(False)(**inputs).logits[mask]
    student_logits = student.swiftkv(True)(**inputs).logits[mask]
    return materialized_kl(student_logits, teacher_logits)


def materialized_kl(student_logits: torch.Tensor, teacher_logits: torch.Tensor) -> torch.Tensor:
    """tau^2 * KL(teacher || student) of logits [tokens, vocab], by autograd."""
    log_q = F.log_softmax(student_logits.float() / TEMPERATURE, dim=-1)
    log_p = F.log_softmax(teacher_logits.float() / TEMPERATURE, dim=-1)
    return TEMPERATURE**2 * F.kl_div(log_q, log_p, log_target=True, reduction="sum")


def our_loss(distillation_model: DistillationModel, batch: Batch) -> torch.Tensor:
    sums = distillation_model(**batch)
    return sum(weight * sums[name] for name, weight in distillation_model.loss_weights.items())


def our_loss_unfused(distillation_model: DistillationModel, batch: Batch) -> torch.Tensor:
    """Our step with the loss of materialized logits, to separate the effect of the fused loss."""

    def kl(
        student: torch.Tensor, teacher: torch.Tensor, head: torch.Tensor, teacher_head: torch.Tensor, **_: Any
    ) -> Any:
        return materialized_kl(F.linear(student, head), F.linear(teacher, teacher_head).detach())

    with mock.patch.object(distillation_module, "logits_loss", kl):
        return our_loss(distillation_model, batch)


class Variant:
    """A student, its optimizer, and one way to compute the loss."""

    def __init__(
        self, args: argparse.Namespace, loss: Loss, *, checkpointed: bool = False, compiled: bool = False
    ) -> None:
        dtype = getattr(torch, args.dtype)
        spec = DistillationSpec(temperature=TEMPERATURE)
        student = make_random_student(make_random_llama(args, args.row_length), args)
        self.distillation_model = DistillationModel(student, spec, dtype=dtype, gradient_checkpointing=checkpointed)
        if compiled:
            compile_layers(self.distillation_model)
        self.loss, self.dtype = loss, dtype
        self.optimizer = build_adamw(
            (p for p in self.distillation_model.parameters() if p.requires_grad), OptimizerSpec()
        )

    def step(self, batch: Batch) -> float:
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype != torch.float32):
            loss = self.loss(self.distillation_model, batch)
        (loss / batch["loss_mask"].sum()).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def build_batch(args: argparse.Namespace) -> Batch:
    """Return rows of two packed samples each, with all positions but the samples' last as targets."""
    half, num_samples = args.row_length // 2, 2 * args.rows
    counts = np.ones(num_samples * half, dtype=np.bool_)
    counts[half - 1 :: half] = False
    samples = Samples(
        tokens=np.random.default_rng(0).integers(0, args.vocab_size, num_samples * half).astype(np.int32),
        loss_mask=counts,
        starts=np.arange(num_samples + 1) * half,
    )
    rows = pack(samples, np.arange(num_samples), max_length=args.row_length, pad_token_id=0)
    return to_tensors(rows.make_padded_batch(range(args.rows)))


def count_flops(variant: Variant, batch: Batch, *, early_stop: bool) -> int:
    """Count a step's FLOPs. Attention runs as matrix products, since the counter does not know the CPU's fused
    kernels."""
    with (
        sdpa_kernel(SDPBackend.MATH),
        mock.patch.object(kernels, "find_packed_operator", return_value=None),
        set_checkpoint_early_stop(early_stop),
        FlopCounterMode(display=False) as counter,
    ):
        variant.step(batch)
    return int(counter.get_total_flops())


def measure(
    variants: dict[str, Variant], batch: Batch, rounds: int, dtype: torch.dtype
) -> tuple[dict[str, list[float]], float]:
    """Return the seconds of each step, without the first of each variant, and the peak in FLOPs per second."""
    for variant in variants.values():
        variant.step(batch)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    peak = 0.0
    for _ in range(rounds):
        peak = max(peak, *(measure_product(dtype) for _ in range(3)))
        for name, variant in variants.items():
            started = time.perf_counter()
            variant.step(batch)
            seconds[name].append(time.perf_counter() - started)
    return seconds, peak


def main() -> None:
    parser = make_benchmark_parser(__doc__)
    parser.add_argument(
        "--compile", action="store_true", help="compile the layers of both models, which takes a minute or two"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--row-length", type=int, default=512)
    # 3.5 x hidden and a fourth of the heads, as in Llama-3.1-8B.
    add_shape_arguments(
        parser,
        layers=12,
        hidden_size=512,
        intermediate_size=1792,
        heads=8,
        kv_heads=2,
        vocab_size=4096,
        num_key_value_layers=6,
        key_value_group_size=1,
    )
    args = parser.parse_args()

    batch = build_batch(args)
    schemes: dict[str, tuple[Loss, bool]] = {
        "reference": (reference_loss, True),
        "forked": (our_loss_unfused, False),
        "forked, fused loss": (our_loss, False),
    }
    # 1. count FLOPs, in float32, since the counter does not know the attention kernel of bfloat16
    in_float32 = argparse.Namespace(**{**vars(args), "dtype": "float32"})
    flops = {
        name: [
            count_flops(Variant(in_float32, loss, checkpointed=ck), batch, early_stop=stop) for stop in (False, True)
        ]
        for name, (loss, ck) in schemes.items()
    }
    # 2. measure the time of eager and compiled steps
    variants = {name: Variant(args, loss, checkpointed=ck) for name, (loss, ck) in schemes.items()}
    if args.compile:
        torch._dynamo.config.recompile_limit = 64  # three variants share the code of their layers
        variants |= {
            f"{name}, compiled": Variant(args, loss, checkpointed=ck, compiled=True)
            for name, (loss, ck) in schemes.items()
        }
    seconds, peak = measure(variants, batch, args.rounds, getattr(torch, args.dtype))
    print_report(args, batch, flops, seconds, peak)


def print_report(
    args: argparse.Namespace, batch: Batch, flops: dict[str, list[int]], seconds: dict[str, list[float]], peak: float
) -> None:
    tokens = batch["input_ids"].numel()
    rates = {name: tokens / statistics.median(values) for name, values in seconds.items()}
    results = []
    print(f"peak: {peak / 1e9:.0f} GFLOP/s in {args.dtype}")
    print(
        f"{'step':28} {'GFLOP':>7} {'ratio':>6} {'early stop':>11} {'tokens/s':>9} {'of peak':>8} {'speedup':>8} "
        f"{'to eager':>9}"
    )
    for name, rate in rates.items():
        scheme = name.removesuffix(", compiled")
        baseline = "reference, compiled" if name.endswith(", compiled") else "reference"
        whole, stopped = (mine / theirs for mine, theirs in zip(flops[scheme], flops["reference"], strict=True))
        utilization = flops[scheme][1] * rate / tokens / peak
        results.append(
            {
                "step": name,
                "flops": flops[scheme][0],
                "flops_ratio": whole,
                "flops_ratio_early_stop": stopped,
                "tokens_per_second": rate,
                "share_of_peak": utilization,
                "speedup": rate / rates[baseline],
                "speedup_to_eager": rate / rates["reference"],
            }
        )
        print(
            f"{name:28} {flops[scheme][0] / 1e9:7.1f} {whole:6.3f} {stopped:11.3f} {rate:9.0f} {utilization:8.0%} "
            f"{rate / rates[baseline]:7.2f}x {rate / rates['reference']:8.2f}x",
            flush=True,
        )
    write_report({**describe_conditions(args), "results": results}, args.output)


if __name__ == "__main__":
    main()
