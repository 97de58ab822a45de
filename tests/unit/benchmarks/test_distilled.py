"""The student that benchmarks of drafts run on: its exit head is trained towards the student itself."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.distilled import train_exit_head
from swiftkv_platform.model import convert
from tests.tiny_models import random_teacher


@torch.no_grad()
def divergence(student: Any, rows: torch.Tensor) -> float:
    """Mean KL(student || exit head) in nats."""
    x = student.model.lower(student.model.begin(rows))
    exit_log, student_log = student.exit_logits(x).log_softmax(-1), student(rows).logits.log_softmax(-1)
    return float(F.kl_div(exit_log, student_log, log_target=True, reduction="none").sum(-1).mean())


def test_the_exit_head_learns_what_the_student_says_and_nothing_else_changes() -> None:
    student = convert(random_teacher(), num_key_value_layers=3, key_value_group_size=2, early_exit=True)
    rows = torch.randint(0, 256, (8, 32), generator=torch.Generator().manual_seed(1))
    before = divergence(student, rows)
    others = {name: p.detach().clone() for name, p in student.named_parameters() if not name.startswith("exit_")}
    train_exit_head(student, rows, steps=60, batch_size=4)
    assert divergence(student, rows) < 0.7 * before
    assert all(torch.equal(dict(student.named_parameters())[name], tensor) for name, tensor in others.items())
