"""Weights in huge pages: moved tensors keep their values, and their memory is freed."""

import mmap
import weakref
from typing import Any

import pytest
import torch

from swiftkv_platform.engine.kernels.packing import HUGE_PAGE_BYTES, TENSOR_ALIGNMENT, Arena


def test_tensors_are_moved_one_behind_the_other() -> None:
    arena = Arena(1 << 20)
    tensors = [torch.randn(5, 7), torch.arange(9, dtype=torch.int8), torch.randn(64).bfloat16()]
    moved = [arena.move(tensor) for tensor in tensors]
    assert all(torch.equal(one, other) for one, other in zip(moved, tensors, strict=True))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        places = [tensor.data_ptr() for tensor in moved]
        assert places[0] % HUGE_PAGE_BYTES == 0
        assert [place % TENSOR_ALIGNMENT for place in places] == [0, 0, 0]
        assert places[0] < places[1] < places[2] < places[0] + 1024


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="weights stay where they are")
def test_memory_comes_back_with_the_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    # The mapping itself is followed: other things of the process come and go in its resident memory.
    mappings: list[weakref.ref[mmap.mmap]] = []

    class Mapping(mmap.mmap):
        def __init__(self, *args: Any, **options: Any) -> None:
            mappings.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Mapping)
    size = 4 << 20
    arena = Arena(size)
    halves = [arena.move(torch.ones(size // 2, dtype=torch.uint8)) for _ in range(2)]
    del arena
    (mapping,) = mappings
    assert mapping() is not None
    halves.pop()
    assert mapping() is not None
    assert halves[0].all()
    halves.pop()
    assert mapping() is None


def test_what_does_not_fit_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    arena, tensor = Arena(0), torch.zeros(HUGE_PAGE_BYTES + 1, dtype=torch.uint8)
    assert arena.move(tensor) is tensor
    assert arena.move(empty := torch.empty(0)) is empty
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert Arena(1 << 20).move(small := torch.ones(3)) is small, "a machine without huge pages"
