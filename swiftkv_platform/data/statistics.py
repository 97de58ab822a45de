"""Statistics of a data spec's rows, in numbers and in sentences. Knows neither files nor tokenizers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from swiftkv_platform.data.packing import IntArray, PackedRows
from swiftkv_platform.frozen import FrozenModel

_NOTABLE_LOSS = 0.1
"""Share of dropped documents, or of tokens cut off, above which a source deserves a warning."""


class DocumentLengths(FrozenModel):
    """Tokens of a source's documents, before any is cut."""

    median: int
    p95: int
    longest: int

    @classmethod
    def of(cls, lengths: IntArray) -> DocumentLengths:
        if not len(lengths):
            return cls(median=0, p95=0, longest=0)
        median, p95, longest = np.quantile(lengths, (0.5, 0.95, 1.0), method="lower").tolist()
        return cls(median=median, p95=p95, longest=longest)


class SourceStatistics(FrozenModel):
    """Statistics of one source."""

    name_or_path: str
    formats: dict[str, int]
    """Rows of each row format found."""
    rows: int
    """Rows read, after `sample_count`."""
    documents: int
    """Rows that became training or held-out text."""
    dropped: int
    """Rows without a position that the loss counts: empty, or without an assistant message within `max_length`."""
    tokens: int
    """Tokens of the documents, before any is cut."""
    lengths: DocumentLengths
    split: int
    """Plain texts longer than `max_length`, cut into consecutive samples."""
    truncated: int
    """Conversations longer than `max_length`, cut at its end."""
    truncated_tokens: int
    """Tokens that were cut off them."""
    written_tokens: int = 0
    """Tokens that the teacher wrote, where the source is of prompts."""


class RowStatistics(FrozenModel):
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

    @classmethod
    def of(cls, rows: PackedRows, num_documents: int) -> RowStatistics:
        return cls(
            documents=num_documents,
            samples=len(rows.members),
            tokens=rows.num_tokens,
            counted_tokens=rows.num_counted_tokens,
            rows=len(rows),
            packing_efficiency=rows.packing_efficiency,
        )


class DataStatistics(FrozenModel):
    """Statistics of the data that `prepare_data` found."""

    train: RowStatistics
    held_out: RowStatistics
    """Rows that are reported."""
    steering: RowStatistics | None = None
    """Rows that training is steered by; None where it is not, and of earlier versions, which took reported ones."""
    sources: tuple[SourceStatistics, ...]

    def messages(self) -> Iterator[tuple[str, bool]]:
        """A sentence on each source and each side, and whether it is a warning."""
        for index, source in enumerate(self.sources):
            yield f"data.sources[{index}] {source.name_or_path}: {_describe(source)}", _loses_much(source)
        for name, side in (("training", self.train), ("held out", self.held_out), ("steering", self.steering)):
            if side is None:
                continue
            yield (
                f"{name}: {side.documents} documents, {side.tokens} tokens, {side.counted_tokens} of them counted, in "
                f"{side.rows} rows ({side.packing_efficiency:.1%} full)",
                False,
            )
        if self.steering is not None and not self.steering.rows:
            yield "a single sample is held out, which is reported: nothing steers training, which ends as it ends", True


def _describe(source: SourceStatistics) -> str:
    formats = ", ".join(f"{count} {name}" for name, count in source.formats.items())
    parts = [
        f"{source.rows} rows ({formats})",
        f"{source.documents} documents of {source.tokens} tokens "
        f"(median {source.lengths.median}, 95% below {source.lengths.p95 + 1}, longest {source.lengths.longest})",
    ]
    if source.dropped:
        parts.append(f"{source.dropped} dropped: empty, or no position that counts")
    if source.written_tokens:
        parts.append(f"{source.written_tokens} tokens written by the teacher")
    if source.truncated:
        parts.append(f"{source.truncated} conversations cut, {source.truncated_tokens} tokens lost")
    if source.split:
        parts.append(f"{source.split} texts split")
    return "; ".join(parts)


def _loses_much(source: SourceStatistics) -> bool:
    return source.dropped > _NOTABLE_LOSS * source.rows or source.truncated_tokens > _NOTABLE_LOSS * source.tokens
