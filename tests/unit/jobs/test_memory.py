"""Memory of a worker's process."""

from __future__ import annotations

import subprocess
import sys

import pytest

KEEP_AND_FREE = """
import sys
from pathlib import Path

import torch

from swiftkv_platform.jobs.worker.memory import give_back_freed_tensors


def anonymous_mib():
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) >> 10


if sys.argv[1] == "given_back":
    give_back_freed_tensors()
torch.ones(16 << 18)  # of 16 MiB, freed at once: it raises the bound of glibc, where that may rise
before = anonymous_mib()
large, small = [], []
for _ in range(16):
    large.append(torch.ones(16 << 18))
    small.append(torch.ones(16 << 10))
del large
print(anonymous_mib() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the C library is glibc on Linux alone")
@pytest.mark.parametrize(("how", "least", "most"), [("given_back", 0, 32), ("kept", 128, 320)])
def test_freed_tensors_are_given_back_to_the_system(how: str, least: int, most: int) -> None:
    """256 MiB of tensors are freed with small ones between them, which stay; as glibc is, all of it stays."""
    done = subprocess.run([sys.executable, "-c", KEEP_AND_FREE, how], capture_output=True, text=True, check=True)
    assert least <= int(done.stdout) <= most
