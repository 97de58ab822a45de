"""Other divergences than the trainer's: their values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks.texts import Divergence, jensen_shannon_, reverse_kl_


def _reverse(q: Tensor, p: Tensor) -> Tensor:
    return (q * (q.log() - p.log())).sum()


def _jensen_shannon(q: Tensor, p: Tensor) -> Tensor:
    mean = (p + q) / 2
    return 0.5 * _reverse(q, mean) + 0.5 * _reverse(p, mean)


@pytest.mark.parametrize(("divergence", "definition"), [(reverse_kl_, _reverse), (jensen_shannon_, _jensen_shannon)])
def test_a_divergence_is_its_definition_and_leaves_its_gradient(divergence: Divergence, definition: Divergence) -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(5, 50, dtype=torch.float64).requires_grad_(), torch.randn(5, 50, dtype=torch.float64)
    expected = definition(logits.softmax(-1), targets.softmax(-1))
    expected.backward()
    gradient = logits.detach().clone()

    found = divergence(gradient, targets.clone())

    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close(gradient, logits.grad)
