"""Tokens that are drawn, and how often; a seed and a position give the same token whatever else is in the batch."""

from typing import Any

import pytest
import torch

from swiftkv_platform.engine import SamplingParams
from swiftkv_platform.engine.sampler import (
    SamplingRow,
    _adjust_logits,
    choose_tokens,
    compute_gumbel_noise,
    compute_logprobs,
    truncate_logits,
)

PROBS = torch.tensor([0.05, 0.5, 0.3, 0.15])
LOGITS = PROBS.log() + 3.0
TOKENS = torch.arange(200_000)


def row(seed: int = 0, position: int = 0, prompt: tuple[int, ...] = (), **params: Any) -> SamplingRow:
    answer = () if prompt else (0,) * position
    return SamplingRow(SamplingParams(**params), seed, prompt + answer, len(prompt))


def draws(count: int, seed: int = 0, logits: torch.Tensor = LOGITS, **params: Any) -> list[int]:
    """Tokens drawn at `count` positions that all have the same logits."""
    tokens: list[int] = choose_tokens(
        logits.expand(count, -1), [row(seed, at, **params) for at in range(count)]
    ).tolist()
    return tokens


def test_greedy_and_equal_tokens() -> None:
    """A temperature too small to divide a float32 by is greedy."""
    logits = torch.tensor([1.0, 3.0, 2.9999, -1.0])
    for temperature in (1e-39, 1e-45, 5e-324, 9e-6):
        assert draws(20, logits=logits, temperature=temperature) == [1] * 20
        assert draws(20, logits=logits - 5.0, temperature=temperature, top_p=0.5) == [1] * 20
        assert SamplingParams(temperature=temperature).temperature == 0.0
    assert draws(3, temperature=0.0) == [1, 1, 1]
    assert draws(2, logits=torch.full((9,), float("-inf")), top_p=0.5) == [0, 0]
    assert len(set(draws(400, logits=torch.zeros(8), top_k=2))) == 2


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    alone = [choose_tokens(LOGITS[None], [row(7, position)])[0] for position in range(20)]
    others = [row(3, 1, top_k=2), row(4, 2, temperature=0.0), row(5, 3, top_p=0.5, frequency_penalty=0.3)]
    among = [choose_tokens(LOGITS.expand(4, -1), [*others, row(7, position)])[-1] for position in range(20)]
    assert among == alone
    assert draws(50, seed=1) != draws(50, seed=2)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 99}, {0, 1, 2, 3}),
        ({"top_p": 0.01}, {1}),
        ({"top_p": 0.6}, {1, 2}),
        ({"top_p": 0.9}, {1, 2, 3}),
        ({"top_k": 3, "top_p": 0.9}, {1, 2, 3}),
        ({"top_k": 2, "top_p": 0.6}, {1}),
        ({"min_p": 0.2}, {1, 2, 3}),
        ({"min_p": 0.5}, {1, 2}),
        ({"min_p": 1.0}, {1}),
        ({"logit_bias": {1: -100.0, 2: -100.0}}, {0, 3}),
    ],
)
def test_only_kept_tokens_are_drawn(params: dict[str, Any], kept: set[int]) -> None:
    assert set(draws(400, **params)) == kept


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_tokens_are_drawn_as_often_as_their_probability_says(temperature: float) -> None:
    count = 4000
    expected = (LOGITS / temperature).softmax(-1)
    drawn = torch.tensor(draws(count, temperature=temperature)).bincount(minlength=4) / count
    # four standard deviations of a binomial share
    assert torch.all((drawn - expected).abs() < 4 * (expected * (1 - expected) / count).sqrt())


def _kept_by_sorting(logits: torch.Tensor, params: SamplingParams) -> set[int]:
    """Tokens that top-k, top-p and min-p keep of one row [vocab_size], by their definitions and in float64."""
    ordered, token_ids = (logits.double() / params.temperature).sort(descending=True, stable=True)
    ordered = ordered[: params.top_k or None]
    probs = ordered.softmax(-1)
    kept = (probs.cumsum(-1) - probs < params.top_p) & (probs >= params.min_p * probs[0])
    kept[0] = True
    return set(token_ids[: len(ordered)][kept].tolist())


@pytest.mark.parametrize("spread", [0.0, 0.1, 3.0, 10.0])
def test_what_is_kept_of_a_large_vocabulary_is_what_its_sorting_keeps(spread: float) -> None:
    several = [
        SamplingParams(**{"temperature": 0.7} | limits)
        for limits in (
            {"top_p": 0.95},
            {"top_p": 0.5, "temperature": 2.0},
            {"top_p": 0.999},
            {"top_k": 50},
            {"top_k": 7, "top_p": 0.9},
            {"top_k": 5000, "top_p": 0.99, "min_p": 0.001},
            {"min_p": 0.05},
            {"min_p": 1e-6, "top_p": 0.97},
        )
    ]
    logits = spread * torch.randn(len(several), 5000, generator=torch.Generator().manual_seed(1))
    logits[:, 100:140] = logits[:, :1]  # ties
    logits[:, 4000:4500] = float("-inf")
    found, token_ids = truncate_logits(logits, several)
    for values, ids, row_logits, params in zip(found, token_ids, logits, several, strict=True):
        kept = ids[values.isfinite()].tolist()
        expected = _kept_by_sorting(row_logits, params)
        # In float32 a sum of thousands of probabilities may pass top_p a token earlier or later.
        assert len(set(kept) ^ expected) <= (2 if params.top_p < 1.0 else 0), params
        torch.testing.assert_close(values[: len(kept)], row_logits[kept] / params.temperature)
    if spread >= 3.0:
        few = several[0], several[3]
        assert truncate_logits(logits[[0, 3]], few)[0].shape[1] < 2500, "most of the vocabulary is not even sorted"


@pytest.mark.parametrize(
    ("params", "tokens", "num_prompt_tokens", "expected"),
    [
        ({"presence_penalty": 1.0}, [1, 1, 2], 0, [2.0, 0.0, -2.0, 0.0]),
        ({"frequency_penalty": 1.0}, [1, 1, 2], 0, [2.0, -1.0, -2.0, 0.0]),
        ({"presence_penalty": 1.0}, [1, 2], 1, [2.0, 1.0, -2.0, 0.0]),  # the prompt does not count
        ({"repetition_penalty": 2.0}, [1, 2], 1, [2.0, 0.5, -2.0, 0.0]),  # the prompt counts
        ({"logit_bias": {3: 4.0}}, [], 0, [2.0, 1.0, -1.0, 4.0]),
        ({"logit_bias": {2: 3.0}, "repetition_penalty": 2.0}, [2], 0, [2.0, 1.0, 1.0, 0.0]),
    ],
)
def test_penalties_and_biases(
    params: dict[str, Any], tokens: list[int], num_prompt_tokens: int, expected: list[float]
) -> None:
    logits = torch.tensor([[2.0, 1.0, -1.0, 0.0]])
    one = SamplingRow(SamplingParams(temperature=0.0, **params), 0, tokens, num_prompt_tokens)
    assert _adjust_logits(logits, [one])[0].tolist() == expected
    assert logits[0].tolist() == [2.0, 1.0, -1.0, 0.0]


def test_logprobs_hold_the_token_and_the_best_ones() -> None:
    first, second = compute_logprobs(LOGITS.expand(2, -1), [0, 1], [2, 0])
    assert list(first) == [0, 1, 2]
    assert list(second) == [1]
    assert [first[token] for token in (0, 1, 2)] == pytest.approx(PROBS[:3].log().tolist(), abs=1e-5)


def test_noise_is_gumbel_noise_that_belongs_to_its_key_and_token() -> None:
    keys = torch.tensor([3, -(1 << 62), 1 << 40])
    noise = compute_gumbel_noise(keys, TOKENS)
    for index, key in enumerate(keys):
        assert torch.equal(noise[index], compute_gumbel_noise(key[None], TOKENS)[0])
        assert torch.equal(noise[index, 5:9], compute_gumbel_noise(key[None], TOKENS[None, 5:9])[0])
    uniform = (-(-noise.double()).exp()).exp().sort(dim=-1).values  # the Gumbel distribution function
    expected = (torch.arange(200_000) + 0.5) / 200_000
    assert (uniform - expected).abs().max() < 0.005  # Kolmogorov-Smirnov statistic, beyond the 0.01% quantile
    assert noise.isfinite().all()
    assert torch.corrcoef(noise)[0, 1:].abs().max() < 0.01
    assert torch.corrcoef(torch.stack([noise[:, :-1].flatten(), noise[:, 1:].flatten()]))[0, 1].abs() < 0.01
    # Noise of neighbouring keys draws tokens by their probabilities.
    tokens = (LOGITS + compute_gumbel_noise(torch.arange(20_000), torch.arange(len(PROBS)))).argmax(dim=-1)
    shares = torch.bincount(tokens, minlength=len(PROBS)) / len(tokens)
    torch.testing.assert_close(shares, PROBS, atol=0.015, rtol=0)
