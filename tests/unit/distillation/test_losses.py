"""The chunked losses against their definitions, written naively."""

import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from swiftkv_platform.distillation.model import hidden_loss, lm_loss, logits_loss
from tests.support.parameters import pairwise

pytestmark = pytest.mark.slow("measures memory")

TOKENS, HIDDEN, VOCAB = 11, 6, 23


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _naive_kl(student: Tensor, teacher: Tensor, head: Tensor, teacher_head: Tensor, temperature: float) -> Tensor:
    p = F.softmax(teacher @ teacher_head.T / temperature, dim=-1)
    q = F.softmax(student @ head.T / temperature, dim=-1)
    return temperature**2 * (p * (p.log() - q.log())).sum()


@pytest.mark.parametrize(("chunk_size", "temperature"), [(1, 1.0), (4, 2.0), (TOKENS, 1.0), (100, 2.0), (None, 2.0)])
def test_kl_and_both_gradients_equal_the_naive_computation(chunk_size: int | None, temperature: float) -> None:
    teacher, teacher_head = _random(TOKENS, HIDDEN, seed=0), _random(VOCAB, HIDDEN, seed=1)
    inputs = _random(TOKENS, HIDDEN, seed=2).requires_grad_(), _random(VOCAB, HIDDEN, seed=3).requires_grad_()
    options: dict[str, Any] = {"temperature": temperature, "chunk_size": chunk_size}
    loss = logits_loss(inputs[0], teacher, inputs[1], teacher_head, **options)
    expected = _naive_kl(inputs[0], teacher, inputs[1], teacher_head, temperature)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    gradients, naive = (torch.autograd.grad(3.0 * value, inputs) for value in (loss, expected))
    torch.testing.assert_close(gradients, naive, rtol=1e-5, atol=1e-5)


def test_gradients_hold_numerically_in_double_precision() -> None:
    teacher, teacher_head, student, head = (
        _random(size, HIDDEN, seed=seed, dtype=torch.float64)
        for seed, size in enumerate((TOKENS, VOCAB, TOKENS, VOCAB))
    )
    inputs, targets = (student.requires_grad_(), head.requires_grad_()), torch.arange(TOKENS) % VOCAB

    def kl(student: Tensor, head: Tensor) -> Tensor:
        return logits_loss(student, teacher, head, teacher_head, temperature=2.0, chunk_size=4)

    assert torch.autograd.gradcheck(kl, inputs)
    assert torch.autograd.gradcheck(lambda hidden: lm_loss(hidden, teacher_head, targets, chunk_size=4), inputs[:1])


def test_equal_hidden_states_and_no_positions_cost_nothing_and_pull_nowhere() -> None:
    head = _random(VOCAB, HIDDEN, seed=1)
    for num_tokens in (TOKENS, 0):
        student = _random(num_tokens, HIDDEN, seed=0).requires_grad_()
        loss = logits_loss(student, student.detach().clone(), head, head, temperature=2.0)
        loss.backward()
        assert loss.item() == pytest.approx(0.0, abs=1e-6)
        assert student.grad.abs().sum() < 1e-5


def test_no_gradient_reaches_the_teacher_or_a_frozen_head() -> None:
    """Neither loss gives the teacher a gradient; `hidden_loss` is a mean over features, summed over positions."""
    teacher, head = _random(TOKENS, HIDDEN, seed=0).requires_grad_(), _random(VOCAB, HIDDEN, seed=1)
    student = _random(TOKENS, HIDDEN, seed=2).requires_grad_()
    logits_loss(student, teacher, head, head, temperature=2.0).backward()
    assert (teacher.grad, head.grad) == (None, None)
    assert student.grad is not None
    student, teacher = (_random(TOKENS, HIDDEN, seed=seed).requires_grad_() for seed in (0, 1))
    loss = hidden_loss(student, teacher)
    loss.backward()
    assert loss.item() == pytest.approx(math.fsum(((student - teacher) ** 2).flatten().tolist()) / HIDDEN, rel=1e-5)
    assert teacher.grad is None
    assert student.grad is not None


@pytest.mark.parametrize("chunk_size", [3, None])
def test_lm_loss_equals_cross_entropy(chunk_size: int | None) -> None:
    head = _random(VOCAB, HIDDEN, seed=1)
    targets = torch.arange(TOKENS) % VOCAB
    hidden = _random(TOKENS, HIDDEN, seed=2).requires_grad_()
    loss = lm_loss(hidden, head, targets, chunk_size=chunk_size)
    expected = F.cross_entropy(hidden @ head.T, targets, reduction="sum")
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        torch.autograd.grad(loss, hidden), torch.autograd.grad(expected, hidden), rtol=1e-5, atol=1e-5
    )


def test_bfloat16_is_summed_in_float32_at_exact_temperatures() -> None:
    """A bfloat16 sum over 2,000 equal losses would stop growing far below the true one; dividing hidden states
    by a temperature that is no power of two would round them."""
    head = torch.eye(VOCAB, HIDDEN, dtype=torch.bfloat16)
    student, teacher = torch.zeros(2000, HIDDEN, dtype=torch.bfloat16), torch.ones(2000, HIDDEN, dtype=torch.bfloat16)
    loss = logits_loss(student, teacher, head, head, temperature=1.0, chunk_size=1)
    per_position = _naive_kl(student[:1].double(), teacher[:1].double(), head.double(), head.double(), 1.0).item()
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(2000 * per_position, rel=1e-3)
    teacher, student = (_random(40, 64, seed=seed, dtype=torch.bfloat16) for seed in (0, 1))
    head = _random(500, 64, seed=2, dtype=torch.bfloat16)
    for temperature in (2.0, 1.7):
        expected = _chunked_kl(student, teacher, head, head, temperature)
        loss = logits_loss(student, teacher, head, head, temperature=temperature)
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


class _LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made by operations held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._known.add(storage._cdata)
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.live)
        return result

    def _forget(self, key: int, num_bytes: int) -> None:
        self._known.discard(key)
        self.live -= num_bytes


def _peak_bytes(num_tokens: int, *, fused: bool) -> int:
    """Peak bytes of forward and backward with a vocabulary of 128K, student and teacher of the same width."""
    hidden, vocab = 4, 1 << 17
    student = _random(num_tokens, hidden, seed=0).requires_grad_()
    teacher, head = _random(num_tokens, hidden, seed=1), _random(vocab, hidden, seed=2)
    with _LiveBytes() as memory:
        if fused:
            logits_loss(student, teacher, head, head, temperature=2.0).backward()
        else:
            _naive_kl(student, teacher, head, head, 2.0).backward()
    return memory.peak


def test_memory_does_not_grow_with_vocabulary_times_tokens() -> None:
    """From 192 to 768 tokens the logits of one model would take 288 MiB more; the loss keeps [tokens, hidden] only."""
    few, many = _peak_bytes(192, fused=True), _peak_bytes(768, fused=True)
    assert many - few < 64 * (768 - 192) * 4
    assert few < 2.1 * 160 * (1 << 17) * 4, "logits of both models for one chunk"
    assert _peak_bytes(64, fused=False) > 64 * (1 << 17) * 4 * 4, "the measurement sees whole logits"


def _chunked_kl(student: Tensor, teacher: Tensor, head: Tensor, teacher_head: Tensor, temperature: float) -> Tensor:
    """The same loss from two whole `log_softmax`, which takes more passes over the logits."""
    log_p = F.log_softmax(F.linear(teacher, teacher_head).float().div(temperature), dim=-1)
    log_q = F.log_softmax(F.linear(student, head).float().div(temperature), dim=-1)
    return temperature**2 * (log_p.exp() * (log_p - log_q)).sum()


@pytest.mark.parametrize(
    ("shared", "temperature", "distance"), pairwise([True, False], [1.0, 1.7, 2.0], [0.01, 0.3, 3.0])
)
def test_fewer_passes_change_nothing(shared: bool, temperature: float, distance: float) -> None:
    """Loss and gradient are as exact as with more passes, near the teacher and far from it."""
    tokens, hidden, vocab = 50, 64, 20_000
    teacher, head = _random(tokens, hidden, seed=0), _random(vocab, hidden, seed=1) / 4
    student = (teacher + distance * _random(tokens, hidden, seed=2)).requires_grad_()
    own_head = head if shared else head + 0.01 * _random(vocab, hidden, seed=3)
    loss = logits_loss(student, teacher, own_head, head, temperature=temperature) / tokens
    expected = _chunked_kl(student, teacher, own_head, head, temperature) / tokens
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
    exact = student.detach().double().requires_grad_()
    truth = _naive_kl(exact, teacher.double(), own_head.double(), head.double(), temperature) / tokens
    (exact_gradient,) = torch.autograd.grad(truth, exact)
    error, error_before = (
        float((torch.autograd.grad(value, student)[0] - exact_gradient).abs().max()) for value in (loss, expected)
    )
    assert error <= max(1.5 * error_before, 1e-5 * float(exact_gradient.abs().max()))
    bound = max(1.5 * abs(expected.item() - truth.item()), 1e-6 * max(1.0, loss.item()))
    assert abs(loss.item() - truth.item()) <= bound
