"""Locks that a killed process left in the cache of compiled extensions."""

import os
import time
from pathlib import Path

import pytest

from swiftkv_platform.distillation.zero import MAX_BUILD_SECONDS, remove_stale_build_locks


def test_only_locks_of_builds_that_were_cut_off_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    abandoned, held = (tmp_path / "py" / name / "lock" for name in ("old", "new"))
    for lock in (abandoned, held):
        lock.parent.mkdir(parents=True)
        lock.touch()
    long_ago = time.time() - MAX_BUILD_SECONDS - 1.0
    os.utime(abandoned, (long_ago, long_ago))
    remove_stale_build_locks()
    assert [lock.exists() for lock in (abandoned, held)] == [False, True]
    remove_stale_build_locks()
