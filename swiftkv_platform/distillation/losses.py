"""Losses of the student: sums over positions, chunked so that [tokens, vocab] is never whole in memory.

It knows hidden states, heads and targets; it knows neither the model nor how many workers share a batch. Every function
returns the **sum** over its rows: the caller divides by the number of positions that count over all workers.

The losses on logits compute their gradient in the forward pass, chunk by chunk (the softmax is at hand there), and keep
only [tokens, hidden]. So a step holds a few [chunk, vocab] buffers, whatever the sequence length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

LOGITS_PER_CHUNK = 1 << 25
"""Elements of a [chunk, vocab] buffer: 128 MiB in float32."""
LOGITS_PER_CHUNK_ON_CPU = 1 << 19
"""2 MiB, which a core's cache holds: up to 2.7 times as fast as buffers that go through memory."""
_FEWEST_ROWS = 16
"""Fewest rows of a chunk, however large the vocabulary: a product with fewer spends its time on reading the head."""

ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(logits [chunk, vocab] in float32, its rows) -> (summed loss, gradient with respect to the logits)."""


def logits_loss(
    student: Tensor,
    teacher: Tensor,
    student_head: Tensor,
    teacher_head: Tensor,
    *,
    temperature: float,
    chunk_size: int | None = None,
) -> Tensor:
    """Sum over positions of tau^2 KL(teacher || student) at temperature tau (paper, section 3.3).

    student, teacher: normalised hidden states [tokens, hidden]; heads: [vocab, hidden]. Gradients go to `student` and,
    where it is trained (the exit head), to `student_head`; never to the teacher's side. Scalar in nats.
    """
    teacher, teacher_head = teacher.detach(), teacher_head.detach()

    def chunk_loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        target = F.linear(teacher[rows], teacher_head).to(logits.dtype)  # [chunk, vocab]
        log_p = F.log_softmax(target.div_(temperature), dim=-1)
        log_q = F.log_softmax(logits.div_(temperature), dim=-1)
        p = log_p.exp()
        loss = temperature**2 * (p * log_p.sub_(log_q)).sum()
        return loss, log_q.exp_().sub_(p).mul_(temperature)

    return _head_loss(student, student_head.to(teacher_head.dtype), chunk_loss, chunk_size)


def lm_loss(hidden: Tensor, head: Tensor, targets: Tensor, *, chunk_size: int | None = None) -> Tensor:
    """Sum over positions of the cross-entropy of the next token (table 6a's ablation).

    hidden: [tokens, hidden]; head: [vocab, hidden]; targets: token ids [tokens]. Scalar in nats.
    """

    def chunk_loss(logits: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        index = targets[rows].unsqueeze(-1)
        log_q = F.log_softmax(logits, dim=-1)
        loss = -log_q.gather(-1, index).sum()
        return loss, log_q.exp_().scatter_add_(-1, index, log_q.new_full((), -1.0).expand(index.shape))

    return _head_loss(hidden, head, chunk_loss, chunk_size)


def hidden_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Sum over positions of the squared difference of two hidden states [tokens, hidden], averaged over features."""
    return (student.float() - teacher.detach().float()).square().mean(dim=-1).sum()


def _head_loss(hidden: Tensor, head: Tensor, chunk_loss: ChunkLoss, chunk_size: int | None) -> Tensor:
    """Apply `head` in its own dtype, outside autocast: the chunks' products are the same in forward and backward."""
    elements = LOGITS_PER_CHUNK_ON_CPU if head.device.type == "cpu" else LOGITS_PER_CHUNK
    chunk_size = chunk_size or max(_FEWEST_ROWS, elements // head.shape[0])
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = _FusedHeadLoss.apply(hidden.to(head.dtype), head, chunk_loss, chunk_size)  # type: ignore[no-untyped-call]
    return loss


class _FusedHeadLoss(torch.autograd.Function):
    """sum(loss(hidden @ head.T)) with both gradients ready when the forward pass ends."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, chunk_loss: ChunkLoss, chunk_size: int) -> Tensor:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_head = torch.zeros_like(head, dtype=wide) if needs_head else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            loss, grad_logits = chunk_loss(F.linear(hidden[rows], head).to(wide), rows)
            total += loss
            grad_logits = grad_logits.to(head.dtype)  # [chunk, vocab]
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ head
            if grad_head is not None:
                grad_head += grad_logits.mT @ hidden[rows]
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_head is not None:
            grad_head = (grad_head * grad).to(ctx.head_dtype)
        return grad_hidden, grad_head, None, None
