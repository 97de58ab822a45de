"""The cache of artifacts on a machine: fetched once for all processes, verified, bounded, never removed in use."""

import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swiftkv_platform.contract.attempts import MANIFEST, Manifest
from swiftkv_platform.errors import ArtifactCorruptError, StorageError
from swiftkv_platform.storage.artifacts import hash_manifest, publish_directory
from swiftkv_platform.storage.downloads import ArtifactCache
from swiftkv_platform.storage.object_store import LocalObjectStore


class CountingStore(LocalObjectStore):
    """A store that counts the reads of each object."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: Counter[str] = Counter()

    def stream(
        self, key: str, chunk_size: int = 1 << 20, *, start: int = 0, stop: int | None = None
    ) -> Iterator[bytes]:
        self.reads[key] += 1
        return super().stream(key, chunk_size, start=start, stop=stop)


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(tmp_path / "store")


def publish(store: LocalObjectStore, tmp_path: Path, name: str, size: int = 1000) -> Manifest:
    source = tmp_path / "sources" / name
    source.mkdir(parents=True)
    (source / "weights.bin").write_bytes(name.encode() * (size // len(name)))
    return publish_directory(store, source, name, kind="artifact", lineage={}, metrics={})


def copies(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir() if path.is_dir()}


def test_a_copy_is_fetched_once_and_by_content(store: CountingStore, tmp_path: Path) -> None:
    manifest = publish(store, tmp_path, "a")
    for _ in range(2):
        with ArtifactCache(tmp_path / "cache", 10_000).open_copy(store, "a") as (path, found):
            assert path == tmp_path / "cache" / hash_manifest(manifest)
            assert (path / "weights.bin").read_bytes() == b"a" * 1000
            assert (path / MANIFEST).is_file()
            assert found == manifest
    assert store.reads["a/weights.bin"] == 1
    (path / "weights.bin").write_bytes(b"b" * 1000)  # a changed copy is fetched again
    with ArtifactCache(tmp_path / "cache", 10_000).open_copy(store, "a") as (path, _):
        assert (path / "weights.bin").read_bytes() == b"a" * 1000
    assert store.reads["a/weights.bin"] == 2
    (tmp_path / "store" / "a" / "weights.bin").write_bytes(b"c" * 1000)
    with pytest.raises(ArtifactCorruptError), ArtifactCache(tmp_path / "other", 10_000).open_copy(store, "a"):
        raise AssertionError("it must not be used")
    assert copies(tmp_path / "other") == set()


def test_what_is_larger_than_the_cache_is_fetched_for_one_use(store: CountingStore, tmp_path: Path) -> None:
    publish(store, tmp_path, "a")
    for _ in range(2):
        with ArtifactCache(tmp_path / "cache", 999).open_copy(store, "a") as (path, _):
            assert (path / "weights.bin").read_bytes() == b"a" * 1000
        assert not path.exists()
    assert not (tmp_path / "cache").exists()
    assert store.reads["a/weights.bin"] == 2


def test_the_least_recently_used_copies_go_and_none_that_is_held(store: CountingStore, tmp_path: Path) -> None:
    digests = {name: hash_manifest(publish(store, tmp_path, name)) for name in "abcd"}
    cache = ArtifactCache(tmp_path / "cache", 4000)  # a copy takes 1,000 bytes and its manifest
    for name in "abc":
        with cache.open_copy(store, name):
            pass
    with cache.open_copy(store, "a"), cache.open_copy(store, "d"):
        assert copies(tmp_path / "cache") == {digests[name] for name in "acd"}, "b is the least recently used"
    small = ArtifactCache(tmp_path / "cache", 1500)
    with small.open_copy(store, "a"), small.open_copy(store, "b"):
        assert copies(tmp_path / "cache") == {digests["a"], digests["b"]}


def test_threads_that_ask_at_once_share_one_copy_and_hold_it_together(store: CountingStore, tmp_path: Path) -> None:
    publish(store, tmp_path, "a", size=3_000_000)
    all_hold_it = threading.Barrier(4, timeout=30)

    def hold(_: int) -> Path:
        with ArtifactCache(tmp_path / "cache", 10_000_000).open_copy(store, "a") as (path, _):
            all_hold_it.wait()
            return path

    with ThreadPoolExecutor(4) as pool:
        assert len(set(pool.map(hold, range(4)))) == 1
    assert store.reads["a/weights.bin"] == 1


def test_a_copy_that_was_damaged_is_mended_while_another_holds_it(store: CountingStore, tmp_path: Path) -> None:
    publish(store, tmp_path, "a")
    cache = ArtifactCache(tmp_path / "cache", 10_000)
    with cache.open_copy(store, "a") as (path, _):
        intact = (path / "weights.bin").read_bytes()
        (path / "weights.bin").write_bytes(b"damaged")
        with cache.open_copy(store, "a") as (mended, _):
            assert mended == path
            assert (mended / "weights.bin").read_bytes() == intact
        ArtifactCache(tmp_path / "cache", 0)._evict(1, except_name="another")
        assert path.is_dir(), "the first user still holds it"


KILLED = """
import os, sys
from pathlib import Path
from swiftkv_platform.storage import artifacts
from swiftkv_platform.storage.downloads import ArtifactCache
from swiftkv_platform.storage.object_store import LocalObjectStore

class Dying(LocalObjectStore):
    def stream(self, key, chunk_size=1, *, start=0, stop=None):
        yield b"a"
        os._exit(9)

with ArtifactCache(Path(sys.argv[2]), 10_000).open_copy(Dying(Path(sys.argv[1])), "a"):
    pass
"""


@pytest.mark.slow("starts a process")
def test_a_process_that_dies_while_it_fetches_leaves_nothing_that_is_used(store: CountingStore, tmp_path: Path) -> None:
    publish(store, tmp_path, "a")
    arguments = [str(tmp_path / "store"), str(tmp_path / "cache")]
    assert subprocess.run([sys.executable, "-c", KILLED, *arguments], check=False).returncode == 9
    with ArtifactCache(tmp_path / "cache", 10_000).open_copy(store, "a") as (path, _):
        assert (path / "weights.bin").read_bytes() == b"a" * 1000


def test_the_cache_is_of_this_user_alone(store: CountingStore, tmp_path: Path) -> None:
    publish(store, tmp_path, "a")
    cache = tmp_path / "cache"
    with ArtifactCache(cache, 10_000).open_copy(store, "a"):
        assert cache.stat().st_mode & 0o777 == 0o700
    if os.geteuid() == 0:
        os.chown(cache, 12345, 12345)
        with (
            pytest.raises(StorageError, match="belongs to user 12345"),
            ArtifactCache(cache, 10_000).open_copy(store, "a"),
        ):
            pass
