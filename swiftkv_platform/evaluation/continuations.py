"""Agreement of student and teacher on greedy continuations of held-out prompts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from swiftkv_platform.data.packing import PackedRows
from swiftkv_platform.evaluation.quality import DEFAULT_WORKERS, run_in_evaluation_mode
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.model.packed_attention import to_tensors
from swiftkv_platform.model.tokenizers import get_end_ids
from swiftkv_platform.model.workers import Workers

_MAX_PROMPT_LENGTH = 64
"""Max tokens per prompt; all prompts have one length, so batches need no padding."""
_PADDING_ID = 0
"""Token that `generate()` writes after an end token; not compared."""
_NUM_EXAMPLES = 4


class ContinuationExample(FrozenBaseModel):
    """A prompt with the greedy continuations of teacher and student."""

    prompt: str
    teacher: str
    student: str


class ContinuationQuality(FrozenBaseModel):
    """Agreement of greedy continuations of held-out prompts."""

    num_prompts: int
    prompt_length: int
    """Tokens of a prompt, which is the beginning of a sample."""
    num_tokens: int
    """Tokens to generate; a continuation ends earlier at an end token."""
    matched: float
    """Share of the teacher's tokens before the student's first different token."""
    identical: float
    """Share of the prompts whose continuations are identical."""
    examples: tuple[ContinuationExample, ...] = ()
    """The first prompts and their continuations; empty without a tokenizer."""


@torch.no_grad()
def compare_continuations(
    model: Any,
    rows: PackedRows,
    *,
    num_prompts: int,
    num_tokens: int,
    batch_size: int,
    workers: Workers = DEFAULT_WORKERS,
    decode: Callable[[list[int]], str] | None = None,
) -> ContinuationQuality | None:
    """Continue the beginnings of evenly spaced held-out samples in both modes of a SwiftKV model.

    Args:
        batch_size: prompts per `generate()` call.
        workers: each continues a share of the prompts; all return the total.
        decode: converts token ids to text, for the examples.

    Returns:
        None if `num_prompts` is 0 or all samples are too short.

    Raises:
        ModelError: the model was exported without its teacher.
    """
    prompts = _select_prompts(rows, num_prompts, model.config.max_position_embeddings - num_tokens)
    if prompts is None:
        return None
    end_tokens = list(get_end_ids(model.generation_config.eos_token_id))
    counts = torch.zeros(3, dtype=torch.int64)  # matched, identical, written
    mine = workers.get_share(range(len(prompts)))
    share = -(-len(prompts) // workers.size)
    examples: list[tuple[int, ContinuationExample]] = []
    indices = mine + [0] * (share - len(mine) if workers.in_step else 0)
    with run_in_evaluation_mode(model):
        for start in range(0, len(indices), batch_size):
            batch = prompts[indices[start : start + batch_size]].to(model.device)
            teacher, student = (
                _generate_greedy(model.swiftkv(on), batch, num_tokens, in_step=workers.in_step) for on in (False, True)
            )
            counted = _mask_until_end(teacher, end_tokens)
            same = (teacher == student).cumprod(-1).bool() & counted  # [batch, num_tokens]
            own = slice(0, max(len(mine) - start, 0))
            alike = (same == counted).all(-1)
            if decode is not None:
                both = (_mask_until_end(student, end_tokens), student), (counted, teacher)
                for row, index in enumerate(mine[start : start + batch_size]):
                    written = [decode(tokens[row][mask[row]].tolist()) for mask, tokens in both]
                    prompt = decode(batch[row].tolist())
                    examples.append((index, ContinuationExample(prompt=prompt, teacher=written[1], student=written[0])))
            counts += torch.stack([part[own].sum().cpu() for part in (same, alike, counted)])
    selected = [(index, example) for index, example in examples if index < _NUM_EXAMPLES]
    gathered = sorted(chain.from_iterable(workers.gather(selected)), key=itemgetter(0))
    matched, identical, num_written = torch.stack(workers.gather(counts)).sum(0).tolist()
    return ContinuationQuality(
        num_prompts=len(prompts),
        prompt_length=prompts.shape[1],
        num_tokens=num_tokens,
        matched=matched / num_written,
        identical=identical / len(prompts),
        examples=tuple(example for _, example in gathered),
    )


def _select_prompts(rows: PackedRows, num_prompts: int, longest: int) -> torch.Tensor | None:
    """Return beginnings of samples from evenly spaced rows: [at most num_prompts, prompt_length]."""
    if not num_prompts or not len(rows):
        return None
    samples: list[torch.Tensor] = []
    for index in np.unique(np.linspace(0, len(rows) - 1, num_prompts).round().astype(int)):
        row = to_tensors(rows.make_padded_batch([int(index)]))
        borders = [0, *np.cumsum(rows.get_sample_lengths(int(index))).tolist()]
        for begin, end in pairwise(borders):
            if row["loss_mask"][0, begin:end].any():
                samples.append(row["input_ids"][0, begin:end])
    if not samples:
        return None
    # At least half of the samples are long enough for a prompt and a continuation.
    prompt_length = int(min(_MAX_PROMPT_LENGTH, np.median([len(sample) for sample in samples]) // 2, longest))
    if prompt_length < 1:
        return None
    long_enough = [sample[:prompt_length] for sample in samples if len(sample) >= prompt_length]
    chosen = np.unique(np.linspace(0, len(long_enough) - 1, num_prompts).round().astype(int))
    return torch.stack([long_enough[i] for i in chosen])


def _generate_greedy(model: Any, prompts: torch.Tensor, num_tokens: int, *, in_step: bool) -> torch.Tensor:
    """Return the greedy tokens [batch, num_tokens] after prompts [batch, prompt_length], padded after an end token. The
    model's other generation settings (penalties, beams) are ignored."""
    shipped = model.generation_config
    settings = GenerationConfig(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=shipped.eos_token_id, pad_token_id=_PADDING_ID
    )
    mask = torch.ones_like(prompts)
    model.generation_config = settings  # generate() takes missing settings from the model
    try:
        tokens: torch.Tensor = model.generate(
            prompts, attention_mask=mask, generation_config=settings, synced_gpus=in_step
        )
    finally:
        model.generation_config = shipped
    tokens = tokens[:, prompts.shape[1] :]
    return torch.nn.functional.pad(tokens, (0, num_tokens - tokens.shape[1]), value=_PADDING_ID)


def _mask_until_end(tokens: torch.Tensor, end_tokens: list[int]) -> torch.Tensor:
    """Return a mask of the tokens [batch, num_tokens] up to and including the first end token."""
    ended = torch.isin(tokens, torch.tensor(end_tokens, device=tokens.device, dtype=tokens.dtype))
    return (ended.cumsum(-1) - ended.long()) == 0
