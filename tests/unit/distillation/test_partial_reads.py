"""Chunks of a checkpoint's tensors: reading some of their rows, the bytes that this takes, and detecting damage."""

import io
from collections import Counter
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from swiftkv_platform.distillation import partial_reads
from swiftkv_platform.distillation.partial_reads import RangedSafetensors, StoredChunk, read_chunks
from swiftkv_platform.errors import ArtifactCorruptError


class File:
    """A file of chunks that records the length of each read."""

    def __init__(self, *tensors: Tensor) -> None:
        self.data, self.chunks = bytearray(), []
        self.read: list[int] = []
        for tensor in tensors:
            saved = io.BytesIO()
            torch.save(tensor, saved)
            self.data += b"other"
            location = len(self.data), saved.tell()
            self.chunks.append(StoredChunk("weight", "f", *location, tensor.shape, tensor.dtype))
            self.data += saved.getvalue()

    def __call__(self, name: str, start: int, stop: int) -> bytes:
        assert name == "f"
        self.read.append(stop - start)
        return bytes(self.data[start:stop])


@pytest.mark.parametrize(
    ("dtype", "shape"), [(torch.float32, (5,)), (torch.bfloat16, (4000, 5)), (torch.int64, (900, 7, 3))]
)
def test_rows_of_a_chunk_are_those_that_were_saved(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (100 * torch.randn(shape)).to(dtype)
    file, last = File(tensor), len(tensor)
    for rows in (slice(0, 1), slice(1, 3), slice(last // 3, last - 1), slice(last - 1, last), slice(0, last)):
        ((_, values),) = read_chunks([(file.chunks[0], rows)], file)
        assert values.equal(tensor[rows])


def test_no_more_is_read_than_rows_and_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the wanted rows and the headers are read, in batches and parts; a scalar is read whole."""
    monkeypatch.setattr(partial_reads, "_MAX_BATCH_BYTES", 1 << 16)
    monkeypatch.setattr(partial_reads, "_MAX_REQUEST_BYTES", 1 << 12)
    tensors = [torch.randn(1000, 64) for _ in range(4)]
    file = File(*tensors, torch.tensor(3.0))
    wanted: list[tuple[StoredChunk, slice | None]] = [(chunk, slice(250, 500)) for chunk in file.chunks[:4]]
    found = dict(read_chunks([*wanted, (file.chunks[4], None)], file))
    for number, tensor in enumerate(tensors):
        assert found[number].equal(tensor[250:500])
    assert found[4] == 3.0
    assert sum(file.read) < 1.1 * sum(tensor.nbytes for tensor in tensors) / 4
    assert max(file.read) <= 1 << 12


def test_ranges_that_follow_each_other_come_together() -> None:
    data, read = bytes(range(60)), []

    def read_range(name: str, start: int, stop: int) -> bytes:
        read.append((name, start, stop))
        return data[start:stop]

    ranges = [("g", 5, 6), ("f", 15, 30), ("f", 0, 10), ("f", 40, 50), ("f", 10, 20)]
    fetched = partial_reads.FetchedRanges(ranges, read_range)
    assert sorted(read) == [("f", 0, 30), ("f", 40, 50), ("g", 5, 6)]
    for name, start, stop in ranges:
        assert bytes(fetched.get_bytes(name, start, stop)) == data[start:stop]


def test_a_chunk_that_is_not_as_it_was_saved_is_refused() -> None:
    """Whichever byte is damaged, the values are right or refused; padding and timestamps do not matter."""
    tensor = torch.randn(6, 4)
    file = File(tensor)
    start, length = file.chunks[0].start, file.chunks[0].length
    found: Counter[str] = Counter()
    for offset in range(start, start + length):
        file.data[offset] ^= 1 << offset % 8
        try:
            ((_, values),) = read_chunks([(file.chunks[0], None)], file)
            found["right" if values.equal(tensor) else "wrong"] += 1
        except ArtifactCorruptError:
            found["refused"] += 1
        file.data[offset] ^= 1 << offset % 8
    assert found["wrong"] == 0
    assert found["refused"] > tensor.nbytes


@pytest.mark.parametrize("damage", ["other form", "no head"])
def test_rows_of_a_chunk_of_another_form_are_refused(damage: str) -> None:
    """Values of the same size in another order are refused, as is a chunk without its header."""
    stored: Any = torch.randn(500, 600).T if damage == "other form" else torch.randn(600, 500)
    file = File(stored)
    chunk = StoredChunk(
        "weight", "f", file.chunks[0].start, file.chunks[0].length, torch.Size((600, 500)), stored.dtype
    )
    if damage == "no head":
        file.data[chunk.start : chunk.start + 300] = bytes(300)
    with pytest.raises(ArtifactCorruptError, match="weight differs from what was saved"):
        list(read_chunks([(chunk, slice(10, 20))], file))


def test_rows_of_a_models_tensor_are_read_without_the_others() -> None:
    stored = {"a": torch.randn(1000, 100), "b": torch.randn(3).to(torch.bfloat16), "c": torch.tensor(4)}
    data, read = save(stored), []

    def read_range(name: str, start: int, stop: int) -> bytes:
        read.append(stop - start)
        return data[start:stop]

    tensors = RangedSafetensors({"model.safetensors": len(data), "config.json": 9}, read_range)
    assert sorted(tensors) == ["a", "b", "c"]
    assert "d" not in tensors
    read.clear()
    assert tensors.read("a", slice(10, 20)).equal(stored["a"][10:20])
    assert read == [4000]
    for name, tensor in stored.items():
        assert tensors[name].equal(tensor)


def test_a_file_that_is_no_model_is_named() -> None:
    for data in (b"", b"no safetensors file at all", save({"a": torch.zeros(9)})[:20]):
        with pytest.raises(ArtifactCorruptError, match=r"'model\.safetensors' of a model"):
            RangedSafetensors({"model.safetensors": len(data)}, lambda _, start, stop, data=data: data[start:stop])
