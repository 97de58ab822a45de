"""Training and held-out rows from a data spec: read, tokenize, hold out, weigh, pack. Knows no model and no worker.

The same spec, files, tokenizer and seed give the same rows on every machine, for any number of workers. Sources are
streamed and token ids are written to files, so neither has to fit into memory; a source with `streaming` need not fit
on disk either. Training reads rows by number from the mapped files, so the step alone is the position in the data.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from swiftkv_platform.data.completions import Answer, PromptSource, WrittenBy
from swiftkv_platform.data.documents import DocumentCollector, DocumentEncoder, Documents, Draft, Encoded
from swiftkv_platform.data.messages import RowError
from swiftkv_platform.data.opening import RemoteFiles, SourceRow, source_rows
from swiftkv_platform.data.packing import BoolArray, IntArray, pack
from swiftkv_platform.data.prepared import (
    DataStatistics,
    DocumentLengths,
    PreparedData,
    RowStatistics,
    SourceStatistics,
    fingerprint,
)
from swiftkv_platform.errors import DataError
from swiftkv_platform.sources import OPEN, Access
from swiftkv_platform.specs import DataSourceSpec, DataSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DRAFTS_PER_BATCH = 512
_CHARACTERS_PER_BATCH = 1 << 22


def prepare_data(
    spec: DataSpec,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    seed: int,
    remote: RemoteFiles | None = None,
    access: Access = OPEN,
    written: WrittenBy | None = None,
    splits: bool = False,
    steers: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> PreparedData:
    """Read, tokenize and pack every source of `spec`.

    Args:
        tokenizer: the teacher's; needs a `tokenizer.json` if `train_on` is `assistant`.
        directory: an empty one, to write the rows to; `PreparedData.load` opens it again.
        seed: decides which rows `sample_count` and fractional weights keep, but not which samples are held out.
        remote: downloads `s3://` sources.
        access: what sources may read.
        written: the teacher's answers to the prompts of sources with `complete`.
        splits: begin samples with an uncounted prompt, see `DocumentEncoder`.
        steers: set aside a share of the held-out texts to steer training by, see `PreparedData.steering`.
        progress: called after each source with the number of sources read so far and in total.

    Raises:
        DataError: a source is missing, undecodable, empty or without the columns of a known format, or no document is
            left to train on.
        InvalidInputError: an `s3://` source without `remote`.
        StorageError: the hub does not answer.
    """
    encoder = DocumentEncoder(tokenizer, max_length=spec.max_length, train_on=spec.train_on, splits=splits)
    collector = DocumentCollector(directory, vocab_size=max(tokenizer.get_vocab().values()) + 1)
    sources = []
    for index, source in enumerate(spec.sources):
        reading = SourceReading(source, index, encoder, collector)
        if source.complete is None:
            sources.append(reading.read(source_rows(source, index, seed=seed, remote=remote, access=access)))
        else:
            assert written is not None, "the teacher has written before rows are prepared"
            prompts = PromptSource(
                source, index, encoder, teacher=written.teacher, seed=seed, remote=remote, access=access
            )
            sources.append(reading.read_written(prompts.answers(written.store)))
        progress(len(sources), len(spec.sources))
    documents = collector.finish()
    held_out = _held_out_samples(documents, spec.validation_fraction)
    of_document = np.repeat(np.arange(len(documents)), documents.num_samples)
    trained = np.bincount(of_document[~held_out], minlength=len(documents)) > 0
    chosen = _weigh(documents, trained, [source.weight for source in spec.sources], seed)
    if not len(chosen):
        raise DataError(
            f"data.sources leaves nothing to train on: of {sum(s.rows for s in sources)} rows {len(documents)} have a "
            f"position that counts under data.train_on {spec.train_on!r}, {(~trained).sum()} of them held out; "
            "use more samples, or data.train_on: all",
            field="data.sources",
        )
    pad_token_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    samples = documents.samples_of(chosen)
    steering = _steering_samples(documents, held_out) if steers else np.zeros_like(held_out)
    reported = held_out & ~steering
    train, evaluation, steered = (
        pack(documents.samples, side, max_length=spec.max_length, pad_token_id=pad_token_id, packing=spec.packing)
        for side in (samples[~held_out[samples]], np.flatnonzero(reported), np.flatnonzero(steering))
    )
    statistics = DataStatistics(
        train=RowStatistics.of(train, len(chosen)),
        held_out=RowStatistics.of(evaluation, len(np.unique(of_document[reported]))),
        steering=RowStatistics.of(steered, len(np.unique(of_document[steering]))) if steers else None,
        sources=tuple(sources),
    )
    sides = train, evaluation, steered
    prepared = PreparedData(*sides, statistics, fingerprint(spec, directory, *sides))
    prepared.save(directory)
    return prepared


def _held_out_samples(documents: Documents, fraction: float) -> BoolArray:
    """Return [num_samples]: whether a sample is held out, by its source or by `fraction`: documents whose digests lie
    in the lowest part of the range, so that a document is on the same side in every data set. If `fraction` of the
    documents is less than one, samples are held out instead. Of two or more distinct ones each side gets at least one.
    """
    counts = documents.num_samples
    held_out, eligible = np.repeat(documents.held_out, counts), np.repeat(~documents.is_settled, counts)
    digests = np.repeat(documents.digests, counts)
    if fraction * len(np.unique(documents.digests[~documents.is_settled])) < 1.0:
        digests = _apart(documents, digests)
    return held_out | _share(digests, eligible, fraction)


_STEERING_SHARE = 0.25


def _steering_samples(documents: Documents, held_out: BoolArray) -> BoolArray:
    """Return [num_samples]: whether a sample steers training. Takes a quarter of the held-out texts, by a second hash
    of their content, so that it is the same in every data set; of a single text, a quarter of its samples; of a single
    sample, none.
    """
    digests = _scattered(np.repeat(documents.digests, documents.num_samples))
    if len(np.unique(digests[held_out])) < 2:
        digests = _apart(documents, digests)
    return _share(digests, held_out, _STEERING_SHARE)


def _apart(documents: Documents, digests: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Turn digests of documents, repeated to [num_samples], into distinct digests of their samples."""
    within = np.arange(len(digests)) - np.repeat(documents.first_samples[:-1], documents.num_samples)
    return digests ^ _scattered(within)


def _share(digests: npt.NDArray[np.uint64], eligible: BoolArray, fraction: float) -> BoolArray:
    """Return [num_samples]: whether a sample is eligible with a digest in the lowest `fraction` of the range. Of two or
    more distinct digests at least one is taken and one left; of a single one, or for a fraction of 0, none is taken."""
    different = np.unique(digests[eligible])
    if fraction == 0.0 or len(different) < 2:
        return np.zeros_like(eligible)
    limit = np.clip(np.searchsorted(different, np.uint64(fraction * 2.0**64)), 1, len(different) - 1)
    below: BoolArray = digests < different[limit]
    return eligible & below


def _scattered(numbers: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Hash integers to 64 bits by the finaliser of splitmix64, which maps 0 to 0."""
    bits = numbers.astype(np.uint64)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _weigh(documents: Documents, training: BoolArray, weights: Sequence[float], seed: int) -> IntArray:
    """Return the documents to train on, with repeats: those of each source as often as the integer part of its weight,
    and a random share of them, as large as the fractional part (at least one), once more.
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


@dataclass
class SourceReading:
    """Reads one source into the collector and gathers its statistics."""

    source: DataSourceSpec
    index: int
    encoder: DocumentEncoder
    collector: DocumentCollector
    _rows: int = 0
    _formats: Counter[str] = field(default_factory=Counter)
    _lengths: array[int] = field(default_factory=lambda: array("q"))
    _split: int = 0
    _truncated: int = 0
    _truncated_tokens: int = 0
    _written_tokens: int = 0

    def read(self, rows: Iterable[SourceRow]) -> SourceStatistics:
        """Read rows of a source. Raises `DataError` if there are none, or one cannot be used."""
        for batch in _batches(self._drafts(rows)):
            self._collect(batch)
        return self._statistics()

    def read_written(self, answers: Iterable[Answer]) -> SourceStatistics:
        """Read the teacher's answers to the prompts of a source. Raises `DataError` if there are none."""
        held_out = True if self.source.is_held_out else None
        for answer in answers:
            self._rows += 1
            self._formats[answer.format] += 1
            encoded = self.encoder.encode_written(answer.prompt_token_ids, answer.token_ids)
            if answer.token_ids and encoded.samples:
                self._written_tokens += len(answer.token_ids)
                self._add(encoded, answer.digest, held_out=held_out, may_lose_its_end=True)
        return self._statistics()

    def _statistics(self) -> SourceStatistics:
        if not self._rows:
            name = self.source.name_or_path
            raise DataError.for_field(f"{self._path}.name_or_path", name, ", which has no rows; at least one is needed")
        lengths = np.array(self._lengths, dtype=np.int64)
        return SourceStatistics(
            name_or_path=self.source.name_or_path,
            formats=dict(self._formats),
            rows=self._rows,
            documents=len(lengths),
            dropped=self._rows - len(lengths),
            tokens=int(lengths.sum()),
            lengths=DocumentLengths.of(lengths),
            split=self._split,
            truncated=self._truncated,
            truncated_tokens=self._truncated_tokens,
            written_tokens=self._written_tokens,
        )

    @property
    def _path(self) -> str:
        return f"data.sources[{self.index}]"

    def _drafts(self, rows: Iterable[SourceRow]) -> Iterator[tuple[Draft, bool | None]]:
        """Yield drafts, each with whether the source marks it as held out (None if it does not say)."""
        for row in rows:
            self._rows += 1
            self._formats[row.format] += 1
            if not row.content:
                continue
            try:
                draft = self.encoder.draft(row.content)
            except RowError as error:
                raise row.error(error, self._path) from error
            yield draft, row.held_out

    def _collect(self, batch: list[tuple[Draft, bool | None]]) -> None:
        drafts = [draft for draft, _ in batch]
        for (draft, held_out), encoded in zip(batch, self.encoder.encode(drafts), strict=True):
            if not encoded.samples:
                continue
            self._add(encoded, draft.digest, held_out=held_out, may_lose_its_end=draft.is_conversation)

    def _add(self, encoded: Encoded, digest: int, *, held_out: bool | None, may_lose_its_end: bool) -> None:
        self.collector.add(encoded, digest=digest, source=self.index, held_out=held_out)
        self._lengths.append(encoded.num_tokens)
        if encoded.was_cut and may_lose_its_end:
            self._truncated += 1
            self._truncated_tokens += encoded.num_lost
        elif encoded.was_cut:
            self._split += 1


def _batches(drafts: Iterable[tuple[Draft, bool | None]]) -> Iterator[list[tuple[Draft, bool | None]]]:
    """Yield batches to tokenize at once, bounded in characters since tokenizers need about 50 bytes for each."""
    batch, size = list[tuple[Draft, "bool | None"]](), 0
    for draft in drafts:
        batch.append(draft)
        size += draft[0].num_characters
        if len(batch) >= _DRAFTS_PER_BATCH or size >= _CHARACTERS_PER_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
