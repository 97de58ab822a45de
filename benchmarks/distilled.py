"""A student with a trained exit head, for benchmarks that depend on how often drafts are right.

    python -m benchmarks.distilled --output DIR [--steps 200] [--exit-steps 1500]

The built-in teacher, converted, calibrated and distilled on the standard library's sources, without Ray. Then the exit
head alone is trained on, towards the student that it drafts for: its inputs and targets no longer change, so they are
computed once, and a step costs the two heads alone. `widened` makes its layers dearer without changing what it says.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoTokenizer

from swiftkv_platform.distillation.fork import Fork
from swiftkv_platform.distillation.losses import logits_loss
from swiftkv_platform.distillation.optimizer import build_optimizer, learning_rate, set_learning_rate
from swiftkv_platform.model import convert
from swiftkv_platform.sources.corpus import is_held_out, standard_library_modules
from swiftkv_platform.specs import DistillationSpec, OptimizerSpec

TEACHER = Path(__file__).parents[1] / "swiftkv_platform" / "sources" / "teacher"
CALIBRATION_ROWS = 32
EXIT_LEARNING_RATE = 3e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=200, help="of distillation")
    parser.add_argument("--rows", type=int, default=8, help="a step")
    parser.add_argument("--row-length", type=int, default=512, help="tokens")
    parser.add_argument("--num-key-value-layers", type=int, default=8)
    parser.add_argument("--key-value-group-size", type=int, default=2)
    parser.add_argument("--exit-steps", type=int, default=1500, help="of the exit head alone, after the others")
    parser.add_argument("--exit-rows", type=int, default=2400, help="that it is trained on, again and again")


def training_rows(tokenizer: Any, length: int) -> torch.Tensor:
    """The modules that are not held out, end to end in an order of their own, [num_rows, length]."""
    texts = [module.text for module in standard_library_modules() if not is_held_out(module.name)]
    order = np.random.default_rng(0).permutation(len(texts))
    tokens = list(chain.from_iterable(tokenizer([texts[i] for i in order])["input_ids"]))
    return torch.tensor(tokens[: len(tokens) // length * length]).view(-1, length)


def distil(args: argparse.Namespace, directory: Path) -> Path:
    """Train the student that `args` describe and write it to `directory`; goes on where an earlier call was ended."""
    tokenizer = AutoTokenizer.from_pretrained(TEACHER)
    rows = training_rows(tokenizer, args.row_length)
    torch.manual_seed(0)
    rows = rows[torch.randperm(len(rows))]
    student = convert(
        str(TEACHER),
        num_key_value_layers=args.num_key_value_layers,
        key_value_group_size=args.key_value_group_size,
        early_exit=True,
        calibration=list(rows[:CALIBRATION_ROWS].split(1)),
    )
    fork = Fork(student, DistillationSpec(), dtype=torch.bfloat16)
    spec = OptimizerSpec(learning_rate=3e-3, weight_decay=0.0)
    optimizer = build_optimizer((p for p in fork.parameters() if p.requires_grad), spec)
    positions = torch.arange(args.row_length).expand(args.rows, -1)
    counted = torch.ones(args.rows, args.row_length, dtype=torch.bool)
    counted[:, -1] = False
    state = directory / "training.pt"
    directory.mkdir(parents=True, exist_ok=True)
    first = _restore(state, fork, optimizer) if state.exists() else 0
    started = time.perf_counter()
    for step, batch in islice(enumerate(_batches(rows, args.rows)), first, args.steps):
        set_learning_rate([optimizer], learning_rate(spec, step, args.steps))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            sums = fork(input_ids=batch, position_ids=positions, loss_mask=counted)
        losses = {name: sums[name] / counted.sum() for name in fork.loss_weights}
        torch.stack([fork.loss_weights[name] * loss for name, loss in losses.items()]).sum().backward()
        nn.utils.clip_grad_norm_(fork.parameters(), spec.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 9:
            shown = "  ".join(f"{name} {loss.item():.3f}" for name, loss in losses.items())
            rate = (step + 1 - first) * batch.numel() / (time.perf_counter() - started)
            print(f"step {step + 1} of {args.steps}  {shown}  {rate:.0f} tokens/s", flush=True)
            trained = {name: p for name, p in fork.named_parameters() if p.requires_grad}
            torch.save({"step": step + 1, "trained": trained, "optimizer": optimizer.state_dict()}, state)
    train_exit_head(student, rows[: args.exit_rows], steps=args.exit_steps, batch_size=args.rows)
    student.to(torch.bfloat16).save_pretrained(directory)
    state.unlink(missing_ok=True)
    tokenizer.save_pretrained(directory)
    return directory


def train_exit_head(student: Any, rows: torch.Tensor, *, steps: int, batch_size: int) -> None:
    """Train the exit head on what the student itself says to `rows` [num_rows, length], at temperature 1: the
    confidence that drafts are gated by is the probability that the student says the same."""
    inputs, targets = zip(*(_hidden_states(student, row) for row in rows.split(1)), strict=True)
    spec = OptimizerSpec(learning_rate=EXIT_LEARNING_RATE, weight_decay=0.0, schedule="linear")
    trained = [student.exit_norm.weight, student.exit_head.weight]
    optimizer = build_optimizer(trained, spec)
    chosen, order = np.random.default_rng(0), list[int]()
    for step in range(steps):
        set_learning_rate([optimizer], learning_rate(spec, step, steps))
        while len(order) < batch_size:
            order += chosen.permutation(len(inputs)).tolist()
        batch, order = order[:batch_size], order[batch_size:]
        hidden = student.exit_norm(torch.cat([inputs[row] for row in batch]).float())
        target = torch.cat([targets[row] for row in batch])
        loss = logits_loss(hidden, target, student.exit_head.weight, student.lm_head.weight, temperature=1.0)
        (loss / len(target)).backward()
        nn.utils.clip_grad_norm_(trained, spec.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 99:
            print(f"exit head, step {step + 1} of {steps}  loss {loss.item() / len(target):.3f}", flush=True)


@torch.no_grad()
def _hidden_states(student: Any, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """States after layer l - 1, and the student's last, normalised for its head: [num_tokens, hidden_size] each."""
    decoder = student.model
    with torch.autocast("cpu", dtype=torch.bfloat16):
        context = decoder.begin(row)
        x = decoder.lower(context)
        final = decoder.student_upper(x, context)
    return x[0].to(torch.bfloat16), final[0].to(student.lm_head.weight.dtype)


def _restore(state: Path, fork: Fork, optimizer: torch.optim.Optimizer) -> int:
    """The number of steps done."""
    saved = torch.load(state)
    fork.load_state_dict(saved["trained"], strict=False)
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])


def _batches(rows: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """[size, row_length], epoch after epoch."""
    while True:
        yield from rows[: len(rows) // size * size].split(size)


def widened(model: Any, intermediate_size: int) -> Any:
    """The same function in wider layers: MLPs get neurons whose weights are zero.

    What the model says, and how often its exit head agrees, are unchanged, while a layer costs what one of a larger
    model does, so that the head is as small a share of a pass as there.
    """
    old = model.config.intermediate_size
    if intermediate_size < old:
        raise SystemExit(f"--intermediate-size is {intermediate_size}; the model has {old}, give that or more")
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            linear = getattr(layer.mlp, name)
            out_features, in_features = linear.weight.shape
            shape = (intermediate_size, in_features) if name != "down_proj" else (out_features, intermediate_size)
            weight = linear.weight.new_zeros(shape)
            weight[:out_features, :in_features] = linear.weight.detach()
            linear.weight = nn.Parameter(weight, requires_grad=False)
            linear.out_features, linear.in_features = shape
    model.config.intermediate_size = intermediate_size
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    add_arguments(parser)
    args = parser.parse_args()
    distil(args, args.output)


if __name__ == "__main__":
    main()
