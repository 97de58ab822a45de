"""What may be drawn, how often, and that a seed repeats it."""

from __future__ import annotations

import pytest
import torch

from swiftkv_platform.engine import SamplingParams
from swiftkv_platform.engine.sampler import sample

PROBS = torch.tensor([0.05, 0.5, 0.3, 0.15])
LOGITS = PROBS.log() + 3.0


def draws(params: SamplingParams, count: int, seed: int = 0, logits: torch.Tensor = LOGITS) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [sample(logits, params, generator) for _ in range(count)]


def test_greedy_takes_the_largest_and_draws_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert sample(LOGITS, SamplingParams(temperature=0.0), generator) == 1
    assert torch.equal(generator.get_state(), before)


def test_the_same_seed_draws_the_same_tokens() -> None:
    params = SamplingParams(temperature=1.0)
    assert draws(params, 50, seed=1) == draws(params, 50, seed=1)
    assert draws(params, 50, seed=1) != draws(params, 50, seed=2)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(top_k=1), {1}),
        (SamplingParams(top_k=2), {1, 2}),
        (SamplingParams(top_k=99), {0, 1, 2, 3}),
        (SamplingParams(top_p=0.01), {1}),
        (SamplingParams(top_p=0.6), {1, 2}),
        (SamplingParams(top_p=0.9), {1, 2, 3}),
        (SamplingParams(top_k=3, top_p=0.9), {1, 2, 3}),
        (SamplingParams(top_k=2, top_p=0.6), {1}),
    ],
)
def test_only_kept_tokens_are_drawn(params: SamplingParams, kept: set[int]) -> None:
    assert set(draws(params, 400)) == kept


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_their_probability_says(temperature: float) -> None:
    count = 4000
    expected = (LOGITS / temperature).softmax(-1)
    drawn = torch.tensor(draws(SamplingParams(temperature=temperature), count)).bincount(minlength=4) / count
    # four standard deviations of a binomial share
    assert torch.all((drawn - expected).abs() < 4 * (expected * (1 - expected) / count).sqrt())


def test_top_k_keeps_exactly_k_of_equal_tokens() -> None:
    assert len(set(draws(SamplingParams(top_k=2), 400, logits=torch.zeros(8)))) == 2
