"""Logits to tokens, for a batch of requests with parameters of their own. Knows no model and no schedule.

Noise belongs to (seed, position), not to the batch: token = argmax(log p + Gumbel noise), which is a draw from p (the
Gumbel-max trick). So a request draws the same tokens whatever else is served, and two distributions over one position,
those of the exit head and of the whole model, are coupled.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swiftkv_platform.engine.constraint import Constraint
from swiftkv_platform.engine.outputs import TokenLogprobs
from swiftkv_platform.engine.transfers import index_tensor, take, to_device
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
    excluded_token_ids: Collection[int] = ()
    """Tokens that it may not be."""


def choose(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """One token for each row of `logits` [num_rows, vocab_size], float32, which is not changed: int64 [num_rows]."""
    logits = _constrained(_adjusted(logits, rows), rows)
    random = [i for i, row in enumerate(rows) if row.params.temperature > 0.0]
    if random:
        drawing = [rows[i] for i in random]
        scores = truncated(take(logits, random), [row.params for row in drawing]) + _noise(drawing, logits)
        logits = _put(logits, random, scores)
    return logits.argmax(dim=-1)


def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    """The tokens that `choose` finds."""
    tokens: list[int] = choose(logits, rows).tolist()
    return tokens


def _put(logits: torch.Tensor, places: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    """`logits` with other `rows` at `places`, ascending."""
    return rows if len(places) == len(logits) else logits.index_copy(0, index_tensor(places, logits.device), rows)


def truncated(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Logits [num_rows, vocab_size] over temperature; minus infinity where top-k, top-p or min-p leave a token out."""
    (temperatures,) = _columns([[one.temperature for one in params]], logits.device)
    logits = logits / temperatures
    limited = [i for i, one in enumerate(params) if one.top_k or one.top_p < 1.0 or one.min_p > 0.0]
    if not limited:
        return logits

    top_k, top_p, min_p = _columns(
        [
            [params[i].top_k or logits.shape[-1] for i in limited],
            [params[i].top_p for i in limited],
            [params[i].min_p for i in limited],
        ],
        logits.device,
    )
    some = take(logits, limited)
    ordered, token_ids = some.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(ranks >= top_k, float("-inf"))
    probs = ordered.softmax(dim=-1)
    mass_before = probs.cumsum(dim=-1) - probs
    dropped = (mass_before >= top_p) | (probs < min_p * probs[:, :1])
    dropped[:, 0] = False
    kept = ordered.masked_fill(dropped, float("-inf"))
    return _put(logits, limited, torch.empty_like(some).scatter_(-1, token_ids, kept))


def _columns(rows: Sequence[Sequence[float]], device: torch.device) -> list[torch.Tensor]:
    """Float32 columns [num_rows, 1] on the device, in one copy."""
    return [column[:, None] for column in to_device([np.array(row, dtype=np.float32) for row in rows], device)]


def logprobs(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return for each row [num_rows, vocab_size] the log-probabilities of its token and of its most probable ones."""
    values = logits.log_softmax(dim=-1)
    best = values.topk(min(max(counts), values.shape[-1]), dim=-1)
    chosen = values.gather(-1, index_tensor(token_ids, values.device)[:, None])
    # Ids and float32 alike are exact in float64, so all of it is read at once.
    found = torch.cat([chosen.double(), best.values.double(), best.indices.double()], dim=-1).tolist()
    size = best.values.shape[-1]
    return [
        {token: row[0]} | {int(top): value for value, top in zip(row[1 : count + 1], row[size + 1 :], strict=False)}
        for token, count, row in zip(token_ids, counts, found, strict=True)
    ]


def _adjusted(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Logits with biases, penalties and exclusions; the same tensor where no request has any."""
    if not any(row.params.logit_bias or row.params.has_penalties or row.excluded_token_ids for row in rows):
        return logits
    logits = logits.clone()
    _add_biases(logits, rows)
    _penalise_repetition(logits, rows)
    _penalise_answers(logits, rows)
    _exclude(logits, rows)
    return logits


def _add_biases(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Change `logits` in place, as the next three do."""
    entries = [(i, token, bias) for i, row in enumerate(rows) for token, bias in (row.params.logit_bias or {}).items()]
    if entries:
        at, tokens, biases = _entries(entries, logits.device)
        logits.index_put_((at, tokens), biases, accumulate=True)


def _penalise_repetition(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = [
        (i, token, row.params.repetition_penalty)
        for i, row in enumerate(rows)
        if row.params.repetition_penalty != 1.0
        for token in set(row.token_ids)
    ]
    if entries:
        at, tokens, factors = _entries(entries, logits.device)
        values = logits[at, tokens]
        logits.index_put_((at, tokens), torch.where(values > 0, values / factors, values * factors))


def _penalise_answers(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = [
        (i, token, row.params.frequency_penalty, count, row.params.presence_penalty)
        for i, row in enumerate(rows)
        if row.params.frequency_penalty or row.params.presence_penalty
        for token, count in Counter(row.token_ids[row.num_prompt_tokens :]).items()
    ]
    if entries:
        at, tokens, frequency, counts, presence = _entries(entries, logits.device)
        logits.index_put_((at, tokens), -(frequency * counts + presence), accumulate=True)


def _exclude(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = [(i, token, float("-inf")) for i, row in enumerate(rows) for token in row.excluded_token_ids]
    if entries:
        at, tokens, values = _entries(entries, logits.device)
        logits.index_put_((at, tokens), values)


def _entries(entries: Sequence[tuple[float, ...]], device: torch.device) -> list[torch.Tensor]:
    """Row and token of each entry, int64, and its other numbers, float32, on the device in one copy."""
    at, tokens, *others = zip(*entries, strict=True)
    indices = [np.array(numbers, dtype=np.int64) for numbers in (at, tokens)]
    return to_device([*indices, *(np.array(numbers, dtype=np.float32) for numbers in others)], device)


def _constrained(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Minus infinity where a grammar forbids a token; the same tensor where no request has a grammar."""
    asking = [(i, row, row.constraint) for i, row in enumerate(rows) if row.constraint is not None]
    if not asking:
        return logits
    bits = [constraint.allowed(row.token_ids[row.num_prompt_tokens :]) for _, row, constraint in asking]
    packed = np.frombuffer(b"".join(bits), dtype=np.uint8).reshape(len(bits), -1)
    unpacked = np.unpackbits(packed, axis=1, count=logits.shape[-1], bitorder="little")  # [num_asking, vocab_size]
    (forbidden,) = to_device([unpacked == 0], logits.device)
    places = [i for i, _, _ in asking]
    return _put(logits, places, take(logits, places).masked_fill(forbidden, float("-inf")))


def _noise(rows: Sequence[SamplingRow], like: torch.Tensor) -> torch.Tensor:
    """Gumbel noise [num_rows, vocab_size], a function of each row's seed and position alone."""
    keys = [_noise_key(row) for row in rows]
    if like.device.type != "cpu":
        return counted_noise(index_tensor(keys, like.device), like.shape[-1])
    noise = torch.empty(len(rows), like.shape[-1])
    generator = torch.Generator()
    for values, key in zip(noise, keys, strict=True):
        generator.manual_seed(key)
        values.exponential_(generator=generator)
    return noise.clamp_(min=torch.finfo(noise.dtype).tiny).log_().neg_()


def _noise_key(row: SamplingRow) -> int:
    name = f"{row.seed}/{len(row.token_ids)}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big", signed=True)


def counted_noise(keys: torch.Tensor, size: int) -> torch.Tensor:
    """Gumbel noise [num_keys, size] of `keys` [num_keys], int64, in as many operators whatever their number: a GPU's
    generators fill one row at a time. Bits are SplitMix64's, the token being the count."""
    bits = keys[:, None] + torch.arange(1, size + 1, device=keys.device) * _INCREMENT
    for shift, factor in _MIXING:
        bits = (bits ^ _shifted(bits, shift)) * factor
    bits = bits ^ _shifted(bits, 31)
    uniform = _shifted(bits, 11).float() * 2.0**-53
    exponential = torch.log1p(-uniform).neg_()
    return exponential.clamp_(min=torch.finfo(torch.float32).tiny).log_().neg_()


_INCREMENT, _MIXING = -0x61C8864680B583EB, ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))
"""SplitMix64's constants, as signed numbers."""


def _shifted(bits: torch.Tensor, count: int) -> torch.Tensor:
    """`bits` moved to the right, zeros coming in: torch's own shift copies the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
