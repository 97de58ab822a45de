"""One source on its way into the token files: its documents, and what became of them. Knows no hold-out, no weights
and no packing.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from swiftkv_platform.data.completions import Answer
from swiftkv_platform.data.documents import DocumentCollector, DocumentEncoder, Draft, Encoded
from swiftkv_platform.data.messages import RowError
from swiftkv_platform.data.rows import SourceRow
from swiftkv_platform.data.statistics import DocumentLengths, SourceStatistics
from swiftkv_platform.errors import DataError
from swiftkv_platform.specs import DataSourceSpec

_DRAFTS_PER_BATCH = 512
_CHARACTERS_PER_BATCH = 1 << 22


@dataclass
class SourceReading:
    """Reads one source into the collector and counts what it does."""

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
        """Raises `DataError` without rows, and for one that cannot be used."""
        for batch in _batches(self._drafts(rows)):
            self._collect(batch)
        return self._statistics()

    def read_written(self, answers: Iterable[Answer]) -> SourceStatistics:
        """Read what the teacher wrote to the prompts of a source. Raises `DataError` without any."""
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
            raise DataError.of(f"{self._path}.name_or_path", name, ", which holds no rows; at least one is needed")
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
        """Yield drafts with the side of the hold-out that the source puts them on."""
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
    """Yield batches worth tokenizing at once, and bounded in characters: tokenizers take some 50 bytes for each."""
    batch, size = list[tuple[Draft, "bool | None"]](), 0
    for draft in drafts:
        batch.append(draft)
        size += draft[0].num_characters
        if len(batch) >= _DRAFTS_PER_BATCH or size >= _CHARACTERS_PER_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
