"""Losses of the student: sums over positions, chunked so that [tokens, vocab] is never whole in memory.

The functions take hidden states, heads and targets, and know neither the model nor the workers. Each returns the
**sum** over its rows; the caller divides by the number of positions that count on all workers.

The losses on logits compute their gradient in the forward pass, chunk by chunk (the softmax is at hand there), and keep
only [tokens, hidden]. So a step holds a few [chunk, vocab] buffers, whatever the sequence length.

On a CPU a chunk has two sizes: matrix products take many rows, since each reads the whole head; the passes over their
logits take a few rows at a time, which stay in a core's cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from swiftkv_platform.planning.training import FEWEST_ROWS, LOGITS_PER_CHUNK, LOGITS_PER_PASS

ChunkLoss = Callable[[Tensor, slice], tuple[Tensor, Tensor]]
"""(hidden [chunk, hidden], its rows) -> (summed loss, gradient with respect to the logits [chunk, vocab])."""


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
    if it is trained (the exit head), to `student_head`; never to the teacher. Scalar in nats.
    """
    shared = student_head is teacher_head
    teacher, teacher_head = teacher.detach(), teacher_head.detach()
    narrow, wide = teacher_head.dtype, _wide(teacher_head)
    # Dividing hidden states instead of logits saves two passes; in a narrow dtype only powers of two keep them exact.
    early = narrow == wide or math.frexp(temperature)[0] == 0.5
    rows_per_pass = max(1, LOGITS_PER_PASS[_kind(teacher_head)] // len(teacher_head))

    def logits_of(hidden: Tensor, head: Tensor) -> Tensor:
        return F.linear(hidden / temperature if early else hidden, head)

    def chunk_loss(hidden: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        target = teacher[rows].to(narrow)
        if shared:  # one product, which reads the head once
            logits, targets = logits_of(torch.cat((hidden, target)), teacher_head).split(len(hidden))
        else:
            logits, targets = logits_of(hidden, student_head.detach().to(narrow)), logits_of(target, teacher_head)
        if rows_per_pass >= len(hidden):
            logits, targets = logits.to(wide), targets.to(wide)
        losses = []
        for mine, theirs in zip(logits.split(rows_per_pass), targets.split(rows_per_pass), strict=True):
            # On a CPU a few rows are widened at a time: a chunk that is widened as a whole leaves the cache.
            in_pass, targets_in_pass = mine.to(wide), theirs.to(wide)
            if not early:
                in_pass, targets_in_pass = in_pass.div_(temperature), targets_in_pass.div_(temperature)
            losses.append(_kl_(in_pass, targets_in_pass))
            if in_pass is not mine:
                mine.copy_(in_pass)
        return torch.stack(losses).sum(), logits

    return _head_loss(student, student_head.to(narrow), chunk_loss, chunk_size, scale=temperature)


def _kl_(logits: Tensor, targets: Tensor) -> Tensor:
    """Summed KL(softmax(targets) || softmax(logits)), both [rows, vocab] and overwritten: `logits` by its gradient.

    Computed as the sum over the vocabulary of p (targets - logits), plus log Z(logits) - log Z(targets). Both follow
    from the largest probability of each row, so no other logarithm is needed.
    """
    p, q = torch.softmax(targets, dim=-1), torch.softmax(logits, dim=-1)
    normalisers = _normaliser(logits, q) - _normaliser(targets, p)
    differences: Tensor = torch.linalg.vecdot(p, targets.sub_(logits))
    torch.sub(q, p, out=logits)
    divergence: Tensor = (differences.double() + normalisers).sum()
    return divergence


def _normaliser(logits: Tensor, probabilities: Tensor) -> Tensor:
    """Logarithm of the sum of exponentials, [rows], in float64."""
    return logits.amax(dim=-1).double() - probabilities.amax(dim=-1).double().log()


def lm_loss(hidden: Tensor, head: Tensor, targets: Tensor, *, chunk_size: int | None = None) -> Tensor:
    """Sum over positions of the cross-entropy of the next token (table 6a's ablation).

    hidden: [tokens, hidden]; head: [vocab, hidden]; targets: token ids [tokens]. Scalar in nats.
    """

    def chunk_loss(hidden: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        index = targets[rows].unsqueeze(-1)
        log_q = F.log_softmax(F.linear(hidden, head.detach()).to(_wide(head)), dim=-1)
        loss = -log_q.gather(-1, index).sum()
        return loss, log_q.exp_().scatter_add_(-1, index, log_q.new_full((), -1.0).expand(index.shape))

    return _head_loss(hidden, head, chunk_loss, chunk_size)


def hidden_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Sum over positions of the squared difference of two hidden states [tokens, hidden], averaged over features."""
    return (student.float() - teacher.detach().float()).square().mean(dim=-1).sum()


def _wide(head: Tensor) -> torch.dtype:
    """Return the dtype of losses and of passes over logits: float32 or wider."""
    return torch.promote_types(head.dtype, torch.float32)


def _kind(head: Tensor) -> str:
    return "cpu" if head.device.type == "cpu" else "cuda"


def _head_loss(
    hidden: Tensor, head: Tensor, chunk_loss: ChunkLoss, chunk_size: int | None, *, scale: float = 1.0
) -> Tensor:
    """Apply `head` in its own dtype, outside autocast, so that forward and backward use the same products.

    Logits are divided by `scale`: so the loss is the sum of the chunks' losses times scale^2, and its gradient the
    chunks' gradients times scale.
    """
    chunk_size = chunk_size or max(FEWEST_ROWS, LOGITS_PER_CHUNK[_kind(head)] // len(head))
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = _FusedHeadLoss.apply(hidden.to(head.dtype), head, chunk_loss, chunk_size, scale)  # type: ignore[no-untyped-call]
    return loss


class _FusedHeadLoss(torch.autograd.Function):
    """sum(loss(hidden @ head.T)) with both gradients ready when the forward pass ends."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, chunk_loss: ChunkLoss, chunk_size: int, scale: float) -> Tensor:
        wide = _wide(head)
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_head = torch.zeros_like(head, dtype=wide) if needs_head else None
        total = torch.zeros((), dtype=torch.float64, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_size):
            rows = slice(start, start + chunk_size)
            loss, grad_logits = chunk_loss(hidden[rows], rows)
            total += loss
            grad_logits = grad_logits.to(head.dtype)  # [chunk, vocab]
            if grad_hidden is not None:
                grad_hidden[rows] = grad_logits @ head
            if grad_head is not None:
                grad_head += grad_logits.mT @ hidden[rows]
            del grad_logits  # frees memory for the next chunk's
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype, ctx.scale = head.dtype, scale
        return (scale**2 * total).to(wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        grad_hidden, grad_head = ctx.saved_tensors
        grad = grad * ctx.scale
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grad.to(grad_hidden.dtype)
        if grad_head is not None:
            grad_head = (grad_head * grad).to(ctx.head_dtype)
        return grad_hidden, grad_head, None, None, None
