"""Sampling of tokens from logits, for a batch of requests with different parameters.

Sampling uses the Gumbel-max trick: argmax(log p + Gumbel noise) is a sample from p. The noise depends on (seed,
position), not on the batch. So a request gets the same tokens in any batch, and samples of the exit head and of the
whole model at a position use the same noise.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from swiftkv_platform.engine.batch import copy_to_device, make_index_tensor, select_along_dim
from swiftkv_platform.engine.grammars import Constraint
from swiftkv_platform.engine.outputs import TokenLogprobs
from swiftkv_platform.specs.sampling import SamplingParams


@dataclass(frozen=True)
class SamplingRow:
    """Inputs for choosing a token from a row of logits."""

    params: SamplingParams
    seed: int
    token_ids: Sequence[int]
    """All previous tokens of the sequence: prompt and output so far."""
    num_prompt_tokens: int
    constraint: Constraint | None = None
    excluded_token_ids: Collection[int] = ()


_SamplingMethod = Callable[[torch.Tensor, Sequence[SamplingRow]], torch.Tensor]
"""Function that chooses a token for each row of logits: [num_rows, vocab_size] -> [num_rows]."""


def choose_tokens(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Choose a token per row of `logits`, float32 [num_rows, vocab_size], which stay unchanged. Returns int64
    [num_rows]."""
    # 1. apply biases, penalties and grammars  2. sample the rows of each method together
    logits = _apply_constraints(_adjust_logits(logits, rows), rows)
    by_method: dict[_SamplingMethod, list[int]] = {}
    for i, row in enumerate(rows):
        by_method.setdefault(_get_sampling_method(row.params), []).append(i)
    tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
    for method, indices in by_method.items():
        tokens = _replace_rows(tokens, indices, method(select_along_dim(logits, indices), [rows[i] for i in indices]))
    return tokens


def _replace_rows(values: torch.Tensor, indices: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    """Return `values` after replacing its rows at the ascending `indices` by `rows`."""
    if len(indices) == len(values):
        return rows
    return values.index_copy(0, make_index_tensor(indices, values.device), rows)


def _get_sampling_method(params: SamplingParams) -> _SamplingMethod:
    if params.temperature == 0.0:
        return _sample_greedy
    limited = params.top_k or params.top_p < 1.0 or params.min_p > 0.0
    return _sample_truncated if limited else _sample_from_all_tokens


def _sample_greedy(logits: torch.Tensor, _rows: Sequence[SamplingRow]) -> torch.Tensor:
    return _argmax(logits)


def _argmax(scores: torch.Tensor) -> torch.Tensor:
    """Return the index of each row's largest number; of equal numbers, the first."""
    # NumPy's argmax is vectorized; torch's is not on a CPU.
    return torch.from_numpy(scores.numpy().argmax(axis=-1)) if scores.device.type == "cpu" else scores.argmax(dim=-1)


def _sample_from_all_tokens(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Sample from all tokens. A CPU samples row by row, so that the noise stays in its cache."""
    (temperatures,) = _make_columns([[row.params.temperature for row in rows]], logits.device)
    keys = _compute_noise_keys(rows, logits.device)
    token_ids = torch.arange(logits.shape[-1], device=logits.device)
    step = 1 if logits.device.type == "cpu" else len(rows)
    parts = [slice(start, start + step) for start in range(0, len(rows), step)]
    return torch.cat(
        [_argmax(logits[part] / temperatures[part] + compute_gumbel_noise(keys[part], token_ids)) for part in parts]
    )


def _sample_truncated(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    kept, token_ids = truncate_logits(logits, [row.params for row in rows])
    noise = compute_gumbel_noise(_compute_noise_keys(rows, logits.device), token_ids)
    best = (kept + noise).argmax(dim=-1, keepdim=True)
    return token_ids.gather(-1, best).squeeze(-1)


def truncate_logits(logits: torch.Tensor, params: Sequence[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the candidates' logits / temperature, and their ids: both [num_rows, num_candidates].

    They are in descending order, equal logits by id. Tokens excluded by top-k, top-p or min-p have a logit of minus
    infinity or are left out.
    """
    size = logits.shape[-1]
    temperatures, top_k, top_p, min_p = _make_columns(
        [
            [one.temperature for one in params],
            [min(one.top_k or size, size) for one in params],
            [one.top_p if one.top_p < 1.0 else math.inf for one in params],
            [one.min_p for one in params],
        ],
        logits.device,
    )
    logits = logits / temperatures
    normalizers = logits.logsumexp(dim=-1, keepdim=True)
    if logits.device.type == "cpu":
        largest_k = max((min(one.top_k, size) for one in params), default=0)
        ordered, token_ids = _select_above_floors(
            logits, _compute_floors(logits, normalizers, top_k, top_p, min_p, largest_k)
        )
    else:  # GPUs sort fast, and reading the number of candidates would wait for the GPU
        ordered, token_ids = logits.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(ordered.shape[-1], device=logits.device)
    ordered = ordered.masked_fill(ranks >= top_k, float("-inf"))
    # Top-p applies to the tokens that top-k leaves.
    normalizers = torch.where(top_k < size, ordered.logsumexp(dim=-1, keepdim=True), normalizers)
    probs = (ordered - normalizers).exp()
    dropped = (probs.cumsum(dim=-1) - probs >= top_p) | (probs < min_p * probs[:, :1])
    dropped[:, 0] = False
    return ordered.masked_fill(dropped, float("-inf")), token_ids


def _compute_floors(
    logits: torch.Tensor,
    normalizers: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    largest_k: int,
) -> torch.Tensor:
    """Return a logit per row [num_rows, 1] below which no token is a candidate. `largest_k`: the largest top-k.

    All tokens with p < (1 - top_p) / vocab_size together have less than 1 - top_p. So the tokens above them have at
    least top_p, and top-p excludes those below.
    """
    size = logits.shape[-1]
    slack = 0.1  # far more than rounding
    floors = (logits.amax(dim=-1, keepdim=True) + min_p.log()) - slack
    of_top_p = normalizers + ((1.0 - top_p).clamp_(min=0.0) / size).log() - slack
    floors = torch.maximum(floors, of_top_p.masked_fill(top_k < size, float("-inf")))
    if largest_k:
        at = top_k.long().clamp_(max=largest_k) - 1
        kth = logits.topk(largest_k, dim=-1).values.gather(-1, at)
        floors = torch.maximum(floors, kth.masked_fill(top_k == size, float("-inf")))
    return floors


def _select_above_floors(logits: torch.Tensor, floors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all logits >= their row's floor, descending, and their ids: both [num_rows, num_candidates]. Rows with
    fewer such logits get smaller ones too."""
    count = max(1, int((logits >= floors).sum(dim=-1).max()))
    token_ids = logits.topk(count, dim=-1, sorted=False).indices.sort(dim=-1).values
    ordered, order = logits.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True)
    return ordered, token_ids.gather(-1, order)


def _make_columns(rows: Sequence[Sequence[float]], device: torch.device) -> list[torch.Tensor]:
    """Return the lists as float32 columns [num_rows, 1] on the device, with one copy."""
    return [column[:, None] for column in copy_to_device([np.array(row, dtype=np.float32) for row in rows], device)]


def compute_logprobs(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Return the log-probabilities of each row's token and its `counts` most probable tokens. `logits`: [num_rows,
    vocab_size]."""
    values = logits.log_softmax(dim=-1)
    best = values.topk(min(max(counts), values.shape[-1]), dim=-1)
    chosen = values.gather(-1, make_index_tensor(token_ids, values.device)[:, None])
    # Ids and float32 are exact in float64, so one copy from the device is enough.
    found = torch.cat([chosen.double(), best.values.double(), best.indices.double()], dim=-1).tolist()
    size = best.values.shape[-1]
    return [
        {token: row[0]} | {int(top): value for value, top in zip(row[1 : count + 1], row[size + 1 :], strict=False)}
        for token, count, row in zip(token_ids, counts, found, strict=True)
    ]


def _adjust_logits(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Return logits with biases, penalties and exclusions; the same tensor if no request has any."""
    if not any(
        row.params.logit_bias or row.params.has_penalties or row.params.allowed_token_ids or row.excluded_token_ids
        for row in rows
    ):
        return logits
    logits = logits.clone()
    _add_biases(logits, rows)
    _penalize_repetition(logits, rows)
    _penalize_outputs(logits, rows)
    _restrict_to_allowed_tokens(logits, rows)
    _exclude_tokens(logits, rows)
    return logits


def _add_biases(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Add biases to `logits`, in place. The next four functions also work in place."""
    entries = [(i, token, bias) for i, row in enumerate(rows) for token, bias in (row.params.logit_bias or {}).items()]
    if entries:
        at, tokens, biases = _make_entry_tensors(entries, logits.device)
        logits.index_put_((at, tokens), biases, accumulate=True)


def _penalize_repetition(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = [
        (i, token, row.params.repetition_penalty)
        for i, row in enumerate(rows)
        if row.params.repetition_penalty != 1.0
        for token in set(row.token_ids)
    ]
    if entries:
        at, tokens, factors = _make_entry_tensors(entries, logits.device)
        values = logits[at, tokens]
        logits.index_put_((at, tokens), torch.where(values > 0, values / factors, values * factors))


def _penalize_outputs(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = [
        (i, token, row.params.frequency_penalty, count, row.params.presence_penalty)
        for i, row in enumerate(rows)
        if row.params.frequency_penalty or row.params.presence_penalty
        for token, count in Counter(row.token_ids[row.num_prompt_tokens :]).items()
    ]
    if entries:
        at, tokens, frequency, counts, presence = _make_entry_tensors(entries, logits.device)
        logits.index_put_((at, tokens), -(frequency * counts + presence), accumulate=True)


def _restrict_to_allowed_tokens(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = [(i, token, 0.0) for i, row in enumerate(rows) for token in row.params.allowed_token_ids or ()]
    if entries:
        at, tokens, _ = _make_entry_tensors(entries, logits.device)
        kept = logits[at, tokens]
        logits.index_fill_(0, at.unique(), float("-inf"))
        logits.index_put_((at, tokens), kept)


def _exclude_tokens(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = [(i, token, float("-inf")) for i, row in enumerate(rows) for token in row.excluded_token_ids]
    if entries:
        at, tokens, values = _make_entry_tensors(entries, logits.device)
        logits.index_put_((at, tokens), values)


def _make_entry_tensors(entries: Sequence[tuple[float, ...]], device: torch.device) -> list[torch.Tensor]:
    """Return the columns of the entries on the device, with one copy: rows and tokens as int64, the others as
    float32."""
    at, tokens, *others = zip(*entries, strict=True)
    indices = [np.array(numbers, dtype=np.int64) for numbers in (at, tokens)]
    return copy_to_device([*indices, *(np.array(numbers, dtype=np.float32) for numbers in others)], device)


def _apply_constraints(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """Set tokens that grammars forbid to minus infinity. Returns the same tensor if no request has a grammar."""
    constrained = [(i, row, row.constraint) for i, row in enumerate(rows) if row.constraint is not None]
    if not constrained:
        return logits
    bits = [
        constraint.compute_allowed_mask(row.token_ids[row.num_prompt_tokens :]) for _, row, constraint in constrained
    ]
    packed = np.frombuffer(b"".join(bits), dtype=np.uint8).reshape(len(bits), -1)
    unpacked = np.unpackbits(packed, axis=1, count=logits.shape[-1], bitorder="little")  # [num_constrained, vocab_size]
    (forbidden,) = copy_to_device([unpacked == 0], logits.device)
    indices = [i for i, _, _ in constrained]
    return _replace_rows(logits, indices, select_along_dim(logits, indices).masked_fill(forbidden, float("-inf")))


def _compute_noise_keys(rows: Sequence[SamplingRow], device: torch.device) -> torch.Tensor:
    return make_index_tensor([_compute_noise_key(row) for row in rows], device)


def _compute_noise_key(row: SamplingRow) -> int:
    name = f"{row.seed}/{len(row.token_ids)}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big", signed=True)


def compute_gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return Gumbel noise [num_keys, num_tokens] as a function of keys [num_keys] and token ids, [num_tokens] or
    [num_keys, num_tokens], all int64. It can be computed for some tokens only, and is the same on every device.

    u = (SplitMix64(key, counter = token id) >> 11) / 2^53, noise = -log(-log(1 - u)).
    """
    bits = keys[:, None] + (token_ids + 1) * _INCREMENT
    for shift, factor in _MIXING:
        bits = (bits ^ _shift_right(bits, shift)) * factor
    bits = bits ^ _shift_right(bits, 31)
    uniform = _shift_right(bits, 11).float() * 2.0**-53
    exponential = torch.log1p(-uniform).neg_()
    return exponential.clamp_(min=torch.finfo(torch.float32).tiny).log_().neg_()


_INCREMENT, _MIXING = -0x61C8864680B583EB, ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))
"""SplitMix64's constants as signed numbers."""


def _shift_right(bits: torch.Tensor, count: int) -> torch.Tensor:
    """Shift `bits` right and fill with zeros. torch's shift copies the sign bit."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
