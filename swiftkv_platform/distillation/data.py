"""Training and held-out rows from a data spec: read, tokenize, hold out, weigh, pack. Knows no model and no worker.

The same spec, files, tokenizer and seed give the same rows on every machine, whatever the number of workers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from swiftkv_platform.distillation.data_formats import RowError, RowReader, find_format
from swiftkv_platform.distillation.data_sources import Fetch, Table, read_source
from swiftkv_platform.distillation.documents import DocumentCollector, DocumentEncoder, Documents, Draft
from swiftkv_platform.distillation.packing import BoolArray, IntArray, PackedRows, pack
from swiftkv_platform.errors import DataError
from swiftkv_platform.specs import DataSourceSpec, DataSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Statistics(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SourceStatistics(_Statistics):
    """What one source gave."""

    name_or_path: str
    formats: tuple[str, ...]
    """Row formats read, one a kind of file."""
    rows: int
    """Rows read, after `sample_count`."""
    documents: int
    """Rows that became training or held-out text."""
    dropped: int
    """Rows without a position that the loss counts: empty, or without an assistant message within `max_length`."""
    split: int
    """Plain texts longer than `max_length`, cut into consecutive samples."""
    truncated: int
    """Conversations longer than `max_length`, cut at its end."""


class RowStatistics(_Statistics):
    """One side of the hold-out."""

    documents: int
    """Documents, each as often as its source's weight repeats it."""
    samples: int
    """Documents, and the parts of split ones."""
    tokens: int
    counted_tokens: int
    """Positions that the loss counts."""
    rows: int
    packing_efficiency: float
    """Share of the rows that is not padding."""


class DataStatistics(_Statistics):
    """What `prepare_data` found."""

    train: RowStatistics
    held_out: RowStatistics
    sources: tuple[SourceStatistics, ...]


@dataclass(frozen=True)
class PreparedData:
    """What a job trains on and is measured on."""

    train: PackedRows
    held_out: PackedRows
    """Empty where nothing is held out."""
    statistics: DataStatistics
    fingerprint: str
    """SHA-256 over every token, border and counted position of both sides, and the settings that shaped them."""


def prepare_data(
    spec: DataSpec, tokenizer: PreTrainedTokenizerBase, *, seed: int, fetch: Fetch | None = None
) -> PreparedData:
    """Read, tokenize and pack every source of `spec`.

    Args:
        tokenizer: the teacher's; one with a `tokenizer.json` where `train_on` is `assistant`.
        seed: decides what `sample_count` and fractional weights keep. Which samples are held out does not depend on it.
        fetch: brings `s3://` sources to this machine.

    Raises:
        DataError: a source is missing, undecodable, empty or without the columns of a known format, or nothing is left
            to train on.
        InvalidInputError: an `s3://` source without `fetch`.
        StorageError: the hub does not answer.
    """
    encoder = DocumentEncoder(tokenizer, max_length=spec.max_length, train_on=spec.train_on)
    collector = DocumentCollector()
    sources = tuple(
        _SourceReading(source, index, encoder, collector).read(seed, fetch) for index, source in enumerate(spec.sources)
    )
    documents = collector.finish(vocab_size=len(tokenizer))
    held_out = documents.held_out | _hold_out(documents, spec.validation_fraction)
    chosen = _weigh(documents, ~held_out, [source.weight for source in spec.sources], seed)
    if not len(chosen):
        raise DataError(
            f"data.sources leaves nothing to train on: of {sum(s.rows for s in sources)} rows {len(documents)} have a "
            f"position that counts under data.train_on {spec.train_on!r}, and {held_out.sum()} of these are held out; "
            "more samples, or data.train_on: all, would do",
            field="data.sources",
        )
    pad_token_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    train, evaluation = (
        pack(
            documents.samples,
            documents.samples_of(side),
            max_length=spec.max_length,
            pad_token_id=pad_token_id,
            packing=spec.packing,
        )
        for side in (chosen, np.flatnonzero(held_out))
    )
    statistics = DataStatistics(
        train=_row_statistics(train, len(chosen)),
        held_out=_row_statistics(evaluation, int(held_out.sum())),
        sources=sources,
    )
    return PreparedData(train, evaluation, statistics, _fingerprint(spec, train, evaluation))


@dataclass
class _SourceReading:
    """Reads one source into the collector and counts what it does."""

    source: DataSourceSpec
    index: int
    encoder: DocumentEncoder
    collector: DocumentCollector
    rows: int = 0
    documents: int = 0
    split: int = 0
    truncated: int = 0
    formats: list[str] = field(default_factory=list)

    @property
    def path(self) -> str:
        return f"data.sources[{self.index}]"

    def read(self, seed: int, fetch: Fetch | None) -> SourceStatistics:
        tables = read_source(self.source, path=self.path, fetch=fetch)
        training = [table for table in tables if not table.held_out]
        taken = _take([len(table.rows) for table in training], self.source.sample_count, (seed, self.index))
        for table, indices in zip(training, taken, strict=True):
            self._read_table(table, indices)
        for table in tables:
            if table.held_out:
                self._read_table(table, None)
        return SourceStatistics(
            name_or_path=self.source.name_or_path,
            formats=tuple(dict.fromkeys(self.formats)),
            rows=self.rows,
            documents=self.documents,
            dropped=self.rows - self.documents,
            split=self.split,
            truncated=self.truncated,
        )

    def _read_table(self, table: Table, indices: IntArray | None) -> None:
        reader = find_format(self.source.format, table.columns, origin=table.origin, path=self.path)
        self.formats.append(reader.format.name)
        for first_row, rows in table.chunks(reader.columns, indices, path=self.path):
            self.rows += len(rows)
            drafts = list(self._drafts(table, reader, first_row, rows, indices))
            for draft, encoded in zip(drafts, self.encoder.encode(drafts), strict=True):
                if not encoded.samples:
                    continue
                self.collector.add(encoded, digest=draft.digest, source=self.index, held_out=table.held_out)
                self.documents += 1
                self.truncated += encoded.was_cut and draft.is_conversation
                self.split += encoded.was_cut and not draft.is_conversation

    def _drafts(
        self, table: Table, reader: RowReader, first_row: int, rows: list[dict[str, Any]], indices: IntArray | None
    ) -> Iterator[Draft]:
        for offset, row in enumerate(rows, start=first_row):
            try:
                content = reader(row)
                if content:
                    yield self.encoder.draft(content)
            except RowError as error:
                number = int(offset if indices is None else indices[offset]) + 1
                raise DataError(
                    f"{self.path}: {table.origin}, row {number}, read as {reader.format.name}: {error}",
                    field=self.path,
                    value=f"{table.origin}:{number}",
                ) from error


def _take(lengths: Sequence[int], count: int | None, key: tuple[int, int]) -> list[IntArray | None]:
    """For tables of `lengths` rows, which to take (ascending) so that `count` are taken of all; None: every row."""
    total = sum(lengths)
    if count is None or count >= total:
        return [None] * len(lengths)
    chosen = np.sort(np.random.default_rng(key).choice(total, size=count, replace=False))
    begins = np.cumsum([0, *lengths])
    return [chosen[(begin <= chosen) & (chosen < end)] - begin for begin, end in pairwise(begins)]


def _hold_out(documents: Documents, fraction: float) -> BoolArray:
    """Documents held out by `fraction`: those whose digest lies in the lowest part of its range, so that a document is
    on the same side in every data set. Of two or more different documents each side gets at least one.
    """
    eligible = ~documents.is_settled
    digests = np.unique(documents.digests[eligible])
    if fraction == 0.0 or len(digests) < 2:
        return np.zeros(len(documents), dtype=np.bool_)
    limit = np.clip(np.searchsorted(digests, np.uint64(fraction * 2.0**64)), 1, len(digests) - 1)
    below: BoolArray = documents.digests < digests[limit]
    return eligible & below


def _weigh(documents: Documents, training: BoolArray, weights: Sequence[float], seed: int) -> IntArray:
    """The documents to train on: each source's as often as the whole part of its weight says, and the share of them
    (at least one) that is left of the weight once more.
    """
    chosen = []
    for source, weight in enumerate(weights):
        own = np.flatnonzero(training & (documents.sources == source))
        whole, part = divmod(weight, 1.0)
        chosen += [own] * int(whole)
        if part and len(own):
            order = np.random.default_rng((seed, source)).permutation(own)
            chosen.append(np.sort(order[: max(round(part * len(own)), 1)]))
    return np.concatenate([np.empty(0, dtype=np.int64), *chosen])


def _row_statistics(rows: PackedRows, documents: int) -> RowStatistics:
    return RowStatistics(
        documents=documents,
        samples=len(rows.members),
        tokens=rows.num_tokens,
        counted_tokens=rows.num_counted_tokens,
        rows=len(rows),
        packing_efficiency=rows.packing_efficiency,
    )


def _fingerprint(spec: DataSpec, train: PackedRows, held_out: PackedRows) -> str:
    settings = {"max_length": spec.max_length, "packing": spec.packing, "train_on": spec.train_on}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    train.update_digest(digest)
    held_out.update_digest(digest)
    return digest.hexdigest()
