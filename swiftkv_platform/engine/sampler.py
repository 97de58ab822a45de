"""Logits to tokens, for a batch of requests with parameters of their own. Knows no model and no schedule.

Noise belongs to (seed, position), not to the batch: token = argmax(log p + Gumbel noise), which is a draw from p (the
Gumbel-max trick). So a request draws the same tokens whatever else is served, and two distributions over one position,
those of the exit head and of the whole model, are coupled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swiftkv_platform.engine.constraint import Constraint
from swiftkv_platform.engine.outputs import TokenLogprobs
from swiftkv_platform.specs.sampling import SamplingParams


@dataclass(frozen=True)
class SamplingRow:
    """Inputs of the choice of a token from one row of logits."""

    params: SamplingParams
    seed: int
    token_ids: Sequence[int]
    """Everything before the token: prompt and answer so far."""
    num_prompt_tokens: int
    constraint: Constraint | None = None


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """One token for each row of `logits` [num_rows, vocab_size], float32, which is not changed."""
    logits = _constrained(_adjusted(logits, rows), rows)
    random = [i for i, row in enumerate(rows) if row.params.temperature > 0.0]
    if random:
        drawing = [rows[i] for i in random]
        chosen = logits if len(random) == len(rows) else logits[random]
        scores = truncated(chosen, [row.params for row in drawing]) + _noise(drawing, logits)
        logits = scores if len(random) == len(rows) else logits.index_put((torch.tensor(random),), scores)
    tokens: list[int] = logits.argmax(dim=-1).tolist()
    return tokens


def truncated(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Logits [num_rows, vocab_size] over temperature; minus infinity where top-k, top-p or min-p leave a token out."""
    temperatures = torch.tensor([one.temperature for one in params], device=logits.device)
    logits = logits / temperatures[:, None]
    limited = [i for i, one in enumerate(params) if one.top_k or one.top_p < 1.0 or one.min_p > 0.0]
    if not limited:
        return logits

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, device=logits.device)[:, None]

    some = logits[limited]
    ordered, token_ids = some.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[-1], device=logits.device)
    top_k = column([params[i].top_k or ordered.shape[-1] for i in limited])
    ordered = ordered.masked_fill(ranks >= top_k, float("-inf"))
    probs = ordered.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    top_p, min_p = column([params[i].top_p for i in limited]), column([params[i].min_p for i in limited])
    dropped = (mass_before >= top_p) | (probs < min_p * probs[:, :1])
    dropped[:, 0] = False
    kept = ordered.masked_fill(dropped, float("-inf"))
    logits[limited] = torch.empty_like(some).scatter_(-1, token_ids, kept)
    return logits


def logprobs(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return for each row [num_rows, vocab_size] the log-probabilities of its token and of its most probable ones."""
    values = logits.log_softmax(dim=-1)
    best = values.topk(min(max(counts), values.shape[-1]), dim=-1)
    chosen = values.gather(-1, torch.tensor(token_ids, device=values.device)[:, None])[:, 0].tolist()
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        {token: value} | dict(zip(top_ids[:count], top_values[:count], strict=True))
        for token, value, count, (top_ids, top_values) in zip(token_ids, chosen, counts, tops, strict=True)
    ]


def _adjusted(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Logits with biases and penalties; the same tensor where no request has any."""
    changed = [i for i, row in enumerate(rows) if row.params.logit_bias or row.params.has_penalties]
    if changed:
        logits = logits.clone()
    for i in changed:
        params, one = rows[i].params, logits[i]  # a view
        if params.logit_bias:
            biased = torch.tensor(list(params.logit_bias), device=logits.device)
            one[biased] += torch.tensor(list(params.logit_bias.values()), device=logits.device)
        if params.has_penalties:
            _penalise(one, rows[i])
    return logits


def _constrained(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Minus infinity where a grammar forbids a token; the same tensor where no request has a grammar."""
    asking = [(i, row, row.constraint) for i, row in enumerate(rows) if row.constraint is not None]
    if not asking:
        return logits
    bits = [constraint.allowed(row.token_ids[row.num_prompt_tokens :]) for _, row, constraint in asking]
    packed = np.frombuffer(b"".join(bits), dtype=np.uint8).reshape(len(bits), -1)
    unpacked = np.unpackbits(packed, axis=1, count=logits.shape[-1], bitorder="little")  # [num_asking, vocab_size]
    forbidden = torch.from_numpy(unpacked == 0).to(logits.device)
    places = [i for i, _, _ in asking]
    return logits.index_put(
        (torch.tensor(places, device=logits.device),), logits[places].masked_fill(forbidden, float("-inf"))
    )


def _penalise(logits: torch.Tensor, row: SamplingRow) -> None:
    """Change `logits` [vocab_size] in place."""
    params, tokens = row.params, torch.tensor(row.token_ids, device=logits.device)
    if params.repetition_penalty != 1.0:
        seen = tokens.unique()
        values, factor = logits[seen], params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / factor, values * factor)
    answer, counts = tokens[row.num_prompt_tokens :].unique(return_counts=True)
    logits[answer] -= params.frequency_penalty * counts + params.presence_penalty


def _noise(rows: Sequence[SamplingRow], like: torch.Tensor) -> torch.Tensor:
    """Gumbel noise [num_rows, vocab_size], a function of each row's seed and position alone."""
    noise = torch.empty(len(rows), like.shape[-1], device=like.device)
    generator = torch.Generator(device=like.device)
    for values, row in zip(noise, rows, strict=True):
        name = f"{row.seed}/{len(row.token_ids)}".encode()
        generator.manual_seed(int.from_bytes(hashlib.sha256(name).digest()[:8], "big", signed=True))
        values.exponential_(generator=generator)
    return noise.clamp_(min=torch.finfo(noise.dtype).tiny).log_().neg_()
