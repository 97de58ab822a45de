"""Batches of text for the calibrated start of a student. Needs only the tokenizer of the model."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from torch import Tensor

from swiftkv_platform.data.packing import PackedRows, select_batch_rows
from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.model.configuration import read_config
from swiftkv_platform.model.packed_attention import to_tensors
from swiftkv_platform.model.tokenizers import load_tokenizer
from swiftkv_platform.specs import DataSourceSpec, DataSpec

_MAX_ROW_LENGTH = 1024
"""Tokens of a row, or the model's context length if that is shorter."""


def read_calibration_text(
    model: str, text: Sequence[str], num_tokens: int, *, train_on: Literal["assistant", "all"] = "all"
) -> Iterator[dict[str, Tensor]]:
    """Yield batches of about `num_tokens` tokens in total from `text`, data sources as in a job's `data.sources`.
    Raises `ModelError` if the model has no tokenizer, `DataError` if text is missing or empty.

    Args:
        train_on: tokens of chats in the rows' `loss_mask`, as in a job's `data`.
    """
    config = read_config(model, field="model")
    tokenizer = load_tokenizer(model, config.vocab_size, field="model")
    sources = tuple(DataSourceSpec(name_or_path=each) for each in text)
    max_length = min(_MAX_ROW_LENGTH, getattr(config, "max_position_embeddings", _MAX_ROW_LENGTH))
    spec = DataSpec(sources=sources, max_length=max_length, validation_fraction=0.0, train_on=train_on)
    with tempfile.TemporaryDirectory(prefix="rows-") as directory:
        rows = prepare_data(spec, tokenizer, Path(directory), seed=0).train
        yield from iter_calibration_batches(rows, num_tokens, seed=0)


def iter_calibration_batches(
    rows: PackedRows, num_tokens: int, *, seed: int, share: int = 0, num_shares: int = 1
) -> Iterator[dict[str, Tensor]]:
    """Yield one row of the first epoch at a time, without padding, until `num_tokens` tokens. Of these rows, a worker
    yields every `num_shares`-th one, starting at its `share`."""
    for index, length in _select_rows(rows, num_tokens, seed)[share::num_shares]:
        yield {name: tensor[:, :length] for name, tensor in to_tensors(rows.make_padded_batch([index])).items()}


def _select_rows(rows: PackedRows, num_tokens: int, seed: int) -> list[tuple[int, int]]:
    """Return (index, number of tokens) of the first rows of an epoch that together have `num_tokens` tokens."""
    lengths, selected = rows.samples.lengths, []
    for index in select_batch_rows(len(rows), batch_size=len(rows), seed=seed, step=0):
        length = int(lengths[rows.get_unshared_samples(index)].sum())
        selected.append((int(index), length))
        num_tokens -= length
        if num_tokens <= 0:
            break
    return selected
