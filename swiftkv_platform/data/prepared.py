"""Prepared rows as files, memory-mapped so that neither training nor evaluation loads them; and statistics of rows, as
numbers and as sentences. Knows no source and no tokenizer.

    tokens.bin, counts.bin          `Samples.tokens` (type in data.json) and `Samples.counts`
    samples.npy, texts.npy          `Samples.starts` and `Samples.texts`
    {train,held_out,steering}-*.npy samples of each row
    data.json                       statistics, fingerprint, and metadata of the arrays

A token takes three bytes, or five if the vocabulary needs 32 bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swiftkv_platform.data.packing import BoolArray, IntArray, PackedRows, Samples, TokenArray
from swiftkv_platform.frozen import FrozenModel
from swiftkv_platform.specs import DataSpec

_BYTES_PER_READ = 1 << 22
_SIDES = ("train", "held_out", "steering")
_NOTABLE_LOSS = 0.1
"""Share of dropped documents, or of tokens cut off, above which a source gets a warning."""


class DocumentLengths(FrozenModel):
    """Lengths of a source's documents in tokens, before any is cut."""

    median: int
    p95: int
    longest: int

    @classmethod
    def of(cls, lengths: IntArray) -> DocumentLengths:
        if not len(lengths):
            return cls(median=0, p95=0, longest=0)
        median, p95, longest = np.quantile(lengths, (0.5, 0.95, 1.0), method="lower").tolist()
        return cls(median=median, p95=p95, longest=longest)


@dataclass(frozen=True)
class PreparedData:
    """Rows that a job trains on and is evaluated on."""

    train: PackedRows
    held_out: PackedRows
    """Rows whose metrics are reported. Empty if nothing is held out."""
    steering: PackedRows
    """Further held-out rows, not reported, by which training chooses a learning rate and a state. Empty if nothing is
    chosen, or if only one sample is held out."""
    statistics: DataStatistics
    fingerprint: str
    """SHA-256 over all tokens, sample borders, counted positions and rows, and the settings that shaped them."""

    def save(self, directory: Path) -> None:
        """Write all files to `directory` except the token files, which it holds already."""
        samples = self.train.samples
        np.save(directory / "samples.npy", samples.starts)
        np.save(directory / "texts.npy", np.arange(len(samples)) if samples.texts is None else samples.texts)
        for side in _SIDES:
            rows: PackedRows = getattr(self, side)
            np.save(directory / f"{side}-members.npy", rows.members)
            np.save(directory / f"{side}-rows.npy", rows.row_starts)
        description = {
            "dtype": self.train.samples.tokens.dtype.name,
            "max_length": self.train.max_length,
            "pad_token_id": self.train.pad_token_id,
            "fingerprint": self.fingerprint,
            "statistics": self.statistics.model_dump(mode="json"),
        }
        (directory / "data.json").write_text(json.dumps(description, indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> PreparedData:
        """Load the data saved in `directory`; its files may be deleted while in use. In data of versions without
        `steering`, the reported rows steer training, as they did when its run began."""
        description = json.loads((directory / "data.json").read_text(encoding="utf-8"))
        texts, has_steering = directory / "texts.npy", (directory / "steering-rows.npy").is_file()
        samples = Samples(
            *open_tokens(directory, np.dtype(description["dtype"])),
            np.load(directory / "samples.npy", mmap_mode="r"),
            np.load(texts, mmap_mode="r") if texts.is_file() else None,
        )
        train, held_out, steering = (
            PackedRows(
                samples=samples,
                members=np.load(directory / f"{side}-members.npy", mmap_mode="r"),
                row_starts=np.load(directory / f"{side}-rows.npy", mmap_mode="r"),
                max_length=description["max_length"],
                pad_token_id=description["pad_token_id"],
            )
            for side in (_SIDES if has_steering else ("train", "held_out", "held_out"))
        )
        statistics = DataStatistics.model_validate(description["statistics"])
        return cls(train, held_out, steering, statistics, description["fingerprint"])


def open_tokens(directory: Path, dtype: npt.DTypeLike) -> tuple[TokenArray, BoolArray]:
    """Memory-map the token files of a directory, read-only."""
    return _map(directory / "tokens.bin", dtype), _map(directory / "counts.bin", np.bool_)


def _map(path: Path, dtype: npt.DTypeLike) -> Any:
    if not path.stat().st_size:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def fingerprint(spec: DataSpec, directory: Path, *sides: PackedRows) -> str:
    """Compute `PreparedData.fingerprint`. `directory`: holds the token files."""
    settings = {"max_length": spec.max_length, "packing": spec.packing, "train_on": spec.train_on}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name in ("tokens.bin", "counts.bin"):
        with (directory / name).open("rb") as file:
            while chunk := file.read(_BYTES_PER_READ):
                digest.update(chunk)
    arrays = [array for side in sides for array in (side.members, side.row_starts)]
    for array in (sides[0].samples.starts, *arrays):
        digest.update(str(len(array)).encode())
        digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return digest.hexdigest()


class SourceStatistics(FrozenModel):
    """Statistics of one source."""

    name_or_path: str
    formats: dict[str, int]
    """Number of rows by row format."""
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
    """Tokens cut off conversations."""
    written_tokens: int = 0
    """Tokens that the teacher wrote, for a source of prompts."""


class RowStatistics(FrozenModel):
    """Statistics of the training, held-out or steering rows."""

    documents: int
    """Documents, counted as often as their source's weight repeats them."""
    samples: int
    """Documents, and the parts of split ones."""
    tokens: int
    counted_tokens: int
    """Positions that the loss counts."""
    rows: int
    packing_efficiency: float
    """Share of all positions that is not padding."""

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
    """Statistics of prepared data."""

    train: RowStatistics
    held_out: RowStatistics
    """Statistics of the rows whose metrics are reported."""
    steering: RowStatistics | None = None
    """Statistics of the rows that steer training; None if none do, and in data of versions that used reported rows."""
    sources: tuple[SourceStatistics, ...]

    def messages(self) -> Iterator[tuple[str, bool]]:
        """Yield a sentence on each source and each side, and whether it is a warning."""
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
            yield (
                "a single sample is held out for the report; nothing is measured during training, which keeps its last "
                "step",
                True,
            )


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
