"""Prepared rows in memory-mapped files, which training and evaluation read without loading them; statistics of rows.

    tokens.bin, counts.bin          `Samples.tokens` (dtype in data.json) and `Samples.loss_mask`
    samples.npy, texts.npy          `Samples.starts` and `Samples.content_ids`
    {train,held_out,steering}-*.npy samples of each row, and their shared prefixes if there are any
    data.json                       statistics, fingerprint, and metadata of the arrays

A token takes three bytes, or five if the vocabulary needs 32 bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from swiftkv_platform.data.packing import BoolArray, IntArray, PackedRows, Samples, TokenArray
from swiftkv_platform.frozen import FrozenBaseModel
from swiftkv_platform.specs import DataSpec

_BYTES_PER_READ = 1 << 22
_SPLIT_NAMES = ("train", "held_out", "steering")
_WARNING_SHARE = 0.1
"""Share of dropped documents, or of truncated tokens, above which a source gets a warning."""


class DocumentLengths(FrozenBaseModel):
    """Lengths of a source's documents in tokens, before truncation."""

    median: int
    p95: int
    longest: int

    @classmethod
    def from_lengths(cls, lengths: IntArray) -> DocumentLengths:
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
    """Validation rows: held out and not reported; training selects the learning rate and checkpoint by them. Empty
    without validation, or if only one sample is held out."""
    statistics: DataStatistics
    fingerprint: str
    """SHA-256 of all tokens, sample borders, loss masks, rows and data settings."""

    def save(self, directory: Path) -> None:
        """Write all files to `directory` except the token files, which exist already."""
        samples = self.train.samples
        np.save(directory / "samples.npy", samples.starts)
        np.save(
            directory / "texts.npy", np.arange(len(samples)) if samples.content_ids is None else samples.content_ids
        )
        for split in _SPLIT_NAMES:
            rows: PackedRows = getattr(self, split)
            np.save(directory / f"{split}-members.npy", rows.members)
            np.save(directory / f"{split}-rows.npy", rows.row_starts)
            if rows.prefix_lengths is not None:
                np.save(directory / f"{split}-prefixes.npy", rows.prefix_lengths)
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
        """Load the data saved in `directory`; its files may be deleted while in use. Data of older versions has no
        `steering`: there, the reported rows are the validation rows."""
        description = json.loads((directory / "data.json").read_text(encoding="utf-8"))
        texts, has_steering = directory / "texts.npy", (directory / "steering-rows.npy").is_file()
        prefixes = {split: directory / f"{split}-prefixes.npy" for split in _SPLIT_NAMES}
        samples = Samples(
            *open_tokens(directory, np.dtype(description["dtype"])),
            np.load(directory / "samples.npy", mmap_mode="r"),
            np.load(texts, mmap_mode="r") if texts.is_file() else None,
        )
        train, held_out, steering = (
            PackedRows(
                samples=samples,
                members=np.load(directory / f"{split}-members.npy", mmap_mode="r"),
                row_starts=np.load(directory / f"{split}-rows.npy", mmap_mode="r"),
                max_length=description["max_length"],
                pad_token_id=description["pad_token_id"],
                prefix_lengths=np.load(prefixes[split], mmap_mode="r") if prefixes[split].is_file() else None,
            )
            for split in (_SPLIT_NAMES if has_steering else ("train", "held_out", "held_out"))
        )
        statistics = DataStatistics.model_validate(description["statistics"])
        return cls(train, held_out, steering, statistics, description["fingerprint"])


def open_tokens(directory: Path, dtype: npt.DTypeLike) -> tuple[TokenArray, BoolArray]:
    """Return read-only memory maps (token ids, loss targets) of a directory."""
    return _memory_map(directory / "tokens.bin", dtype), _memory_map(directory / "counts.bin", np.bool_)


def _memory_map(path: Path, dtype: npt.DTypeLike) -> Any:
    if not path.stat().st_size:
        return np.empty(0, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r")


def compute_fingerprint(spec: DataSpec, directory: Path, *splits: PackedRows) -> str:
    """Compute `PreparedData.fingerprint`. `directory` has the token files."""
    settings = {"max_length": spec.max_length, "packing": spec.packing, "train_on": spec.train_on}
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for name in ("tokens.bin", "counts.bin"):
        with (directory / name).open("rb") as file:
            while chunk := file.read(_BYTES_PER_READ):
                digest.update(chunk)
    arrays = [array for split in splits for array in (split.members, split.row_starts, split.prefix_lengths)]
    for array in (splits[0].samples.starts, *(array for array in arrays if array is not None)):
        digest.update(str(len(array)).encode())
        digest.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
    return digest.hexdigest()


class SourceStatistics(FrozenBaseModel):
    name_or_path: str
    formats: dict[str, int]
    """Number of rows by row format."""
    rows: int
    """Rows read, after `sample_count`."""
    documents: int
    """Rows that became training or held-out text."""
    dropped: int
    """Rows without loss targets: empty, or without an assistant message within `max_length`."""
    tokens: int
    """Tokens of the documents, before truncation."""
    lengths: DocumentLengths
    split: int
    """Plain texts longer than `max_length`, split into consecutive samples."""
    truncated: int
    """Conversations truncated to `max_length`."""
    truncated_tokens: int
    """Tokens truncated from conversations."""
    written_tokens: int = 0
    """Tokens that the teacher wrote, for a source of prompts."""
    unread_columns: tuple[str, ...] = ()
    """Columns that no row's format reads."""
    left_out: dict[str, int] = {}
    """Number of captured requests that are no rows, by reason."""


class RowStatistics(FrozenBaseModel):
    documents: int
    """Documents, with the repeats of their source's weight."""
    samples: int
    """Documents, or parts of split ones."""
    tokens: int
    """Tokens of the rows: a prefix that samples share counts once."""
    counted_tokens: int
    """Loss targets."""
    rows: int
    packing_efficiency: float
    """Share of all positions that is not padding."""

    @classmethod
    def from_rows(cls, rows: PackedRows, num_documents: int) -> RowStatistics:
        return cls(
            documents=num_documents,
            samples=len(rows.members),
            tokens=rows.num_tokens,
            counted_tokens=rows.num_counted_tokens,
            rows=len(rows),
            packing_efficiency=rows.packing_efficiency,
        )


class DataStatistics(FrozenBaseModel):
    train: RowStatistics
    held_out: RowStatistics
    """Statistics of the rows whose metrics are reported."""
    steering: RowStatistics | None = None
    """Statistics of the validation rows; None without validation, and in data of older versions."""
    sources: tuple[SourceStatistics, ...]
    warning: str | None = None
    """Problem of the chat template, if there are conversations."""

    def format_messages(self) -> Iterator[tuple[str, bool]]:
        """Yield (sentence, whether the sentence is a warning) for each source and each split."""
        for index, source in enumerate(self.sources):
            yield (
                f"data.sources[{index}] {source.name_or_path}: {_describe_source(source)}",
                _exceeds_warning_share(source),
            )
        if self.warning is not None:
            yield self.warning, True
        for name, split in (("training", self.train), ("held out", self.held_out), ("validation", self.steering)):
            if split is None:
                continue
            yield (
                f"{name}: {split.documents} documents, {split.tokens} tokens ({split.counted_tokens} loss targets), "
                f"{split.rows} rows ({split.packing_efficiency:.1%} full)",
                False,
            )
        if self.steering is not None and not self.steering.rows:
            yield (
                "no validation during training: the only held-out sample is reserved for the report; the last step "
                "becomes the model",
                True,
            )


def _describe_source(source: SourceStatistics) -> str:
    parts = [
        f"{source.rows} rows ({format_counts(source.formats)})",
        f"{source.documents} documents, {source.tokens} tokens in total "
        f"(median {source.lengths.median}, 95% below {source.lengths.p95 + 1}, max {source.lengths.longest})",
    ]
    if source.dropped:
        parts.append(f"{source.dropped} dropped (empty, or no loss targets)")
    if source.written_tokens:
        parts.append(f"{source.written_tokens} tokens written by the teacher")
    if source.truncated:
        parts.append(f"{source.truncated} conversations truncated by {source.truncated_tokens} tokens")
    if source.split:
        parts.append(f"{source.split} texts split")
    if source.unread_columns:
        parts.append(f"columns not read: {', '.join(source.unread_columns)}")
    if source.left_out:
        parts.append(f"requests left out: {format_counts(source.left_out)}")
    return "; ".join(parts)


def format_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())


def _exceeds_warning_share(source: SourceStatistics) -> bool:
    return source.dropped > _WARNING_SHARE * source.rows or source.truncated_tokens > _WARNING_SHARE * source.tokens
