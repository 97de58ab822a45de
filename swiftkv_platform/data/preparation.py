"""Prepare training and held-out rows of a data spec: read, tokenize, split, repeat by weight, pack.

The same spec, files, tokenizer and seed give the same rows on every machine, for any number of workers. Sources are
streamed and token ids are written to files, so neither has to fit into memory; a source with `streaming` need not fit
on disk either.
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

from swiftkv_platform.data.completions import Completion, PromptSource, TeacherCompletions
from swiftkv_platform.data.documents import (
    DocumentEncoder,
    Documents,
    DocumentWriter,
    EncodedDocument,
    RenderedDocument,
)
from swiftkv_platform.data.formats import list_unread_columns
from swiftkv_platform.data.messages import RowError
from swiftkv_platform.data.packing import BoolArray, IntArray, pack
from swiftkv_platform.data.prepared import (
    DataStatistics,
    DocumentLengths,
    PreparedData,
    RowStatistics,
    SourceStatistics,
    compute_fingerprint,
    format_counts,
)
from swiftkv_platform.data.source_rows import RemoteFiles, SourceRow, read_source_rows
from swiftkv_platform.errors import DataError
from swiftkv_platform.sources import UNRESTRICTED, Access
from swiftkv_platform.specs import DataSourceSpec, DataSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DOCUMENTS_PER_BATCH = 512
_CHARACTERS_PER_BATCH = 1 << 22


def prepare_data(
    spec: DataSpec,
    tokenizer: PreTrainedTokenizerBase,
    directory: Path,
    *,
    seed: int,
    remote: RemoteFiles | None = None,
    access: Access = UNRESTRICTED,
    completions: TeacherCompletions | None = None,
    mask_prompts: bool = False,
    with_steering: bool = False,
    share_prefixes: bool = False,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> PreparedData:
    """Read, tokenize and pack every source of `spec`.

    Args:
        tokenizer: the teacher's; must have a `tokenizer.json` if `train_on` is `assistant`.
        directory: an empty directory for the rows; `PreparedData.load` opens it again.
        seed: decides which rows `sample_count` and fractional weights select, but not which samples are held out.
        remote: downloads `s3://` sources.
        access: sources that may be read.
        completions: the teacher's completions for sources with `complete`.
        mask_prompts: exclude a leading prompt of each sample from the loss, see `DocumentEncoder`.
        with_steering: use a share of the held-out texts as validation rows, see `PreparedData.steering`.
        share_prefixes: whether training samples with a common prompt share its tokens in a row.
        progress: called after each source with the number of sources read so far and in total.

    Raises:
        DataError: a source is missing, undecodable, empty or without the columns of a known format, or there are no
            training documents.
        InvalidInputError: an `s3://` source without `remote`.
        StorageError: the hub is unavailable.
    """
    # 1. read, render and tokenize every source
    encoder = DocumentEncoder(tokenizer, max_length=spec.max_length, train_on=spec.train_on, mask_prompts=mask_prompts)
    writer = DocumentWriter(directory, vocab_size=max(tokenizer.get_vocab().values()) + 1)
    sources = []
    for index, source in enumerate(spec.sources):
        collector = SourceCollector(source, index, encoder, writer)
        left_out = collector.left_out
        if source.complete is None:
            rows = read_source_rows(source, index, seed=seed, remote=remote, access=access, left_out=left_out)
            sources.append(collector.read_rows(rows))
        else:
            assert completions is not None, "the teacher completes prompts before rows are prepared"
            prompts = PromptSource(
                source,
                index,
                encoder,
                teacher=completions.teacher,
                seed=seed,
                remote=remote,
                access=access,
                left_out=left_out,
            )
            sources.append(collector.read_teacher_completions(prompts.read_teacher_completions(completions.store)))
        progress(len(sources), len(spec.sources))
    documents = writer.finish()
    # 2. hold out samples, and repeat training documents by their source's weight
    held_out = _select_held_out(documents, spec.validation_fraction)
    of_document = np.repeat(np.arange(len(documents)), documents.num_samples)
    trained = np.bincount(of_document[~held_out], minlength=len(documents)) > 0
    chosen = _repeat_by_weight(documents, trained, [source.weight for source in spec.sources], seed)
    if not len(chosen):
        raise DataError(
            f"data.sources has no training documents: of {sum(s.rows for s in sources)} rows, {len(documents)} have "
            f"loss targets under data.train_on {spec.train_on!r}, and {(~trained).sum()} of those are held out; "
            "add samples, or set data.train_on: all",
            field="data.sources",
        )
    # 3. pack the training, reported and validation samples into rows
    pad_token_id = next((i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id) if i is not None), 0)
    samples = documents.select_samples(chosen)
    steering = _select_validation_samples(documents, held_out) if with_steering else np.zeros_like(held_out)
    reported = held_out & ~steering
    train, evaluation, validation = (
        pack(
            documents.samples,
            members,
            max_length=spec.max_length,
            pad_token_id=pad_token_id,
            packing=spec.packing,
            share_prefixes=shares,
        )
        for members, shares in (
            (samples[~held_out[samples]], share_prefixes),
            (np.flatnonzero(reported), False),
            (np.flatnonzero(steering), False),
        )
    )
    # 4. save rows and statistics
    statistics = DataStatistics(
        train=RowStatistics.from_rows(train, len(chosen)),
        held_out=RowStatistics.from_rows(evaluation, len(np.unique(of_document[reported]))),
        steering=RowStatistics.from_rows(validation, len(np.unique(of_document[steering]))) if with_steering else None,
        sources=tuple(sources),
        warning=encoder.warning if any(source.formats.keys() - {"text"} for source in sources) else None,
    )
    splits = train, evaluation, validation
    prepared = PreparedData(*splits, statistics, compute_fingerprint(spec, directory, *splits))
    prepared.save(directory)
    return prepared


def _select_held_out(documents: Documents, fraction: float) -> BoolArray:
    """Return the mask [num_samples] of held-out samples: those that their source holds out, and `fraction` of the other
    documents, by digest, so that a document is in the same split of every data set. If `fraction` of the documents is
    less than one, samples are selected instead, but of undivided documents all or none. With two or more distinct ones,
    each split gets at least one.
    """
    counts = documents.num_samples
    held_out, eligible = np.repeat(documents.held_out, counts), np.repeat(~documents.has_source_split, counts)
    digests = np.repeat(documents.digests, counts)
    if fraction * len(np.unique(documents.digests[~documents.has_source_split])) < 1.0:
        digests = _derive_sample_digests(documents, digests)
    return held_out | _select_share(digests, eligible, fraction)


_STEERING_SHARE = 0.25


def _select_validation_samples(documents: Documents, held_out: BoolArray) -> BoolArray:
    """Return the mask [num_samples] of validation samples: a quarter of the held-out texts, by a second hash of their
    content, so that a text is in the same split of every data set. Of a single text, a quarter of its samples; of a
    single sample, none.
    """
    digests = _hash_integers(np.repeat(documents.digests, documents.num_samples))
    if len(np.unique(digests[held_out])) < 2:
        digests = _derive_sample_digests(documents, digests)
    return _select_share(digests, held_out, _STEERING_SHARE)


def _derive_sample_digests(documents: Documents, digests: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return distinct digests of samples, from their documents' `digests` [num_samples]; those of undivided documents
    stay the same."""
    counts = documents.num_samples
    within = np.arange(len(digests)) - np.repeat(documents.first_samples[:-1], counts)
    return digests ^ _hash_integers(np.where(np.repeat(documents.is_undivided, counts), 0, within))


def _select_share(digests: npt.NDArray[np.uint64], eligible: BoolArray, fraction: float) -> BoolArray:
    """Return the mask [num_samples] of eligible samples with a digest in the lowest `fraction` of the range. Of two or
    more distinct digests, at least one is selected and one is not; of a single one, or for a fraction of 0, none is."""
    different = np.unique(digests[eligible])
    if fraction == 0.0 or len(different) < 2:
        return np.zeros_like(eligible)
    limit = np.clip(np.searchsorted(different, np.uint64(fraction * 2.0**64)), 1, len(different) - 1)
    below: BoolArray = digests < different[limit]
    return eligible & below


def _hash_integers(numbers: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """Hash integers to 64 bits by the finalizer of splitmix64, which maps 0 to 0."""
    bits = numbers.astype(np.uint64)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _repeat_by_weight(documents: Documents, training: BoolArray, weights: Sequence[float], seed: int) -> IntArray:
    """Return the training documents with repeats. A source of weight 2.25 has its documents twice, and a random quarter
    of them (at least one) a third time.
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
class SourceCollector:
    """Writes the documents of one source and collects its statistics."""

    source: DataSourceSpec
    index: int
    encoder: DocumentEncoder
    writer: DocumentWriter
    left_out: Counter[str] = field(default_factory=Counter)
    _rows: int = 0
    _formats: Counter[str] = field(default_factory=Counter)
    _unread_columns: tuple[str, ...] = ()
    _lengths: array[int] = field(default_factory=lambda: array("q"))
    _split: int = 0
    _truncated: int = 0
    _truncated_tokens: int = 0
    _written_tokens: int = 0

    def read_rows(self, rows: Iterable[SourceRow]) -> SourceStatistics:
        for batch in _batch_documents(self._render_rows(rows)):
            self._encode_batch(batch)
        return self._summarize()

    def read_teacher_completions(self, completions: Iterable[Completion]) -> SourceStatistics:
        """Read the teacher's completions of the source's prompts. Raises `DataError` if there are none."""
        held_out = True if self.source.is_held_out else None
        for completion in completions:
            self._count_row(completion)
            encoded = self.encoder.encode_completion(completion.prompt_token_ids, completion.token_ids)
            if completion.token_ids and encoded.samples:
                self._written_tokens += len(completion.token_ids)
                self._add_document(
                    encoded,
                    completion.digest,
                    held_out=held_out,
                    is_conversation=True,
                    is_undivided=completion.conversation is not None,
                )
        return self._summarize()

    def _count_row(self, row: SourceRow | Completion) -> None:
        self._rows += 1
        self._formats[row.format] += 1
        if row.unread_columns != self._unread_columns:
            self._unread_columns = list_unread_columns([*self._unread_columns, *row.unread_columns])

    def _summarize(self) -> SourceStatistics:
        if not self._rows:
            name = self.source.name_or_path
            why = ", which has no rows; at least one is needed"
            if self.left_out:
                why += f" (left out: {format_counts(self.left_out)})"
            raise DataError.for_field(f"{self._source_field}.name_or_path", name, why)
        lengths = np.array(self._lengths, dtype=np.int64)
        return SourceStatistics(
            name_or_path=self.source.name_or_path,
            formats=dict(self._formats),
            rows=self._rows,
            documents=len(lengths),
            dropped=self._rows - len(lengths),
            tokens=int(lengths.sum()),
            lengths=DocumentLengths.from_lengths(lengths),
            split=self._split,
            truncated=self._truncated,
            truncated_tokens=self._truncated_tokens,
            written_tokens=self._written_tokens,
            unread_columns=self._unread_columns,
            left_out=dict(self.left_out),
        )

    @property
    def _source_field(self) -> str:
        return f"data.sources[{self.index}]"

    def _render_rows(self, rows: Iterable[SourceRow]) -> Iterator[tuple[RenderedDocument, SourceRow]]:
        """Yield (rendered document, its row)."""
        for row in rows:
            self._count_row(row)
            if not row.content:
                continue
            try:
                document = self.encoder.render(row.content)
            except RowError as error:
                if row.is_captured:
                    continue
                raise row.make_error(error, self._source_field) from error
            yield document, row

    def _encode_batch(self, batch: list[tuple[RenderedDocument, SourceRow]]) -> None:
        documents = [document for document, _ in batch]
        for (document, row), encoded in zip(batch, self.encoder.encode(documents), strict=True):
            if not encoded.samples:
                continue
            self._add_document(
                encoded,
                document.digest if row.conversation is None else row.conversation,
                held_out=row.held_out,
                is_conversation=document.is_conversation,
                is_undivided=row.is_captured,
            )

    def _add_document(
        self,
        encoded: EncodedDocument,
        digest: int,
        *,
        held_out: bool | None,
        is_conversation: bool,
        is_undivided: bool,
    ) -> None:
        self.writer.add_document(
            encoded, digest=digest, source=self.index, held_out=held_out, is_undivided=is_undivided
        )
        self._lengths.append(encoded.num_tokens)
        if encoded.is_too_long and is_conversation:
            self._truncated += 1
            self._truncated_tokens += encoded.num_truncated_tokens
        elif encoded.is_too_long:
            self._split += 1


def _batch_documents(
    documents: Iterable[tuple[RenderedDocument, SourceRow]],
) -> Iterator[list[tuple[RenderedDocument, SourceRow]]]:
    """Yield batches of (document, its row). Batches are limited in characters, since tokenizers take about 50 bytes per
    character."""
    batch, size = list[tuple[RenderedDocument, SourceRow]](), 0
    for document in documents:
        batch.append(document)
        size += document[0].num_characters
        if len(batch) >= _DOCUMENTS_PER_BATCH or size >= _CHARACTERS_PER_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
