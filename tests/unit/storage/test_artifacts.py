"""Artifacts: complete or invisible, idempotent to publish, verified when fetched."""

import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from swiftkv_platform.contract.attempts import MANIFEST, Manifest, ManifestFile
from swiftkv_platform.errors import ArtifactCorruptError, ConflictError, InvalidInputError, StorageError
from swiftkv_platform.storage import artifacts
from swiftkv_platform.storage.artifacts import (
    delete_directory,
    fetch_directory,
    hash_manifest,
    is_complete,
    publish_directory,
    read_manifest,
    write_manifest,
)
from swiftkv_platform.storage.object_store import CHUNK_SIZE, ObjectStore
from tests.support.fakes.object_store import InMemoryObjectStore


class FailingStore(InMemoryObjectStore):
    """A store that fails the n-th upload or write, once."""

    def __init__(self, fail_at: int) -> None:
        super().__init__()
        self._remaining = fail_at
        self._count_lock = threading.Lock()

    def put_bytes(self, key: str, data: bytes, *, if_absent: bool = False) -> None:
        with self._count_lock:
            self._remaining -= 1
            failing = self._remaining == 0
        if failing:
            raise StorageError(f"cannot write {key!r}: injected")
        super().put_bytes(key, data, if_absent=if_absent)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    for name, content in {"a": b"alpha", "b/c": b"gamma" * 1000, "empty": b""}.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


@pytest.fixture
def store() -> InMemoryObjectStore:
    return InMemoryObjectStore()


def publish(store: ObjectStore, source: Path, prefix: str = "art") -> Manifest:
    return publish_directory(store, source, prefix, kind="artifact", lineage={"job_id": "job_1"}, metrics={"kl": 0.5})


def test_the_manifest_names_every_file_and_its_digest_is_that_of_the_stored_bytes(
    store: InMemoryObjectStore, source: Path
) -> None:
    manifest = publish(store, source)
    stored = store.get_bytes(f"art/{MANIFEST}")
    assert json.loads(stored)["files"]["a"] == {"size": 5, "sha256": hashlib.sha256(b"alpha").hexdigest()}
    assert set(manifest.files) == {"a", "b/c", "empty"}
    assert manifest.size == 5005
    assert read_manifest(store, "art") == manifest
    assert hash_manifest(read_manifest(store, "art")) == hashlib.sha256(stored).hexdigest()


@pytest.mark.parametrize("fail_at", [1, 2, 3, 4])
def test_publishing_again_after_a_failure_completes_the_artifact(source: Path, fail_at: int) -> None:
    store = FailingStore(fail_at)
    with pytest.raises(StorageError, match="injected"):
        publish(store, source)
    assert not is_complete(store, "art")
    assert publish(store, source) == read_manifest(store, "art")


def test_a_complete_artifact_is_never_overwritten(store: InMemoryObjectStore, source: Path, tmp_path: Path) -> None:
    first, before = publish(store, source), store.get_bytes(f"art/{MANIFEST}")
    assert publish(store, source) == first
    assert store.get_bytes(f"art/{MANIFEST}") == before, "publishing again changes nothing"
    (source / "a").write_bytes(b"other")
    with pytest.raises(ConflictError, match=r"an artifact with different files \(a\)"):
        publish(store, source)
    fetch_directory(store, "art", tmp_path / "out")
    assert (tmp_path / "out" / "a").read_bytes() == b"alpha"


def test_what_is_no_artifact_is_not_published(store: InMemoryObjectStore, tmp_path: Path) -> None:
    (tmp_path / "nothing").mkdir()
    with pytest.raises(InvalidInputError, match="has no files"):
        publish(store, tmp_path / "nothing")
    for metrics in ({"kl": float("nan")}, {"kl": object()}):
        with pytest.raises(InvalidInputError, match="finite numbers"):
            write_manifest(store, "art", {}, kind="artifact", lineage={}, metrics=metrics)
    for name in ("../evil", "/etc/evil", "a/../../evil", MANIFEST):
        files = {name: ManifestFile(size=1, sha256="0")}
        with pytest.raises(InvalidInputError):
            write_manifest(store, "art", files, kind="artifact", lineage={}, metrics={})
    assert not is_complete(store, "art")


def test_a_manifest_that_leaves_its_directory_is_refused(store: InMemoryObjectStore, tmp_path: Path) -> None:
    for name in ("../evil", "/etc/evil", "a/../../evil", MANIFEST):
        forged = {"kind": "artifact", "created_at": 0.0, "files": {name: {"size": 1, "sha256": "0"}}}
        store.put_bytes(f"art/{MANIFEST}", json.dumps(forged).encode())
        with pytest.raises(ArtifactCorruptError, match="cannot be read"):
            fetch_directory(store, "art", tmp_path / "inner" / "out")


@pytest.mark.parametrize("part_size", [None, 100], ids=["whole", "in parts"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (b"gamma" * 500 + b"Gamma" + b"gamma" * 499, "found 5000 bytes"),
        (b"gamma" * 500, "found 2500 bytes"),
        (b"gamma" * 1001, "found 5005 bytes"),
        (b"", "found 0 bytes"),
        (None, "is missing"),
    ],
)
def test_a_damaged_file_is_named_and_nothing_is_left(
    store: InMemoryObjectStore,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: bytes | None,
    message: str,
    part_size: int | None,
) -> None:
    publish(store, source)
    if part_size is not None:
        monkeypatch.setattr(artifacts, "_PART_SIZE", part_size)
    store.delete("art/b/c") if damage is None else store.put_bytes("art/b/c", damage)
    with pytest.raises(ArtifactCorruptError, match=message) as caught:
        fetch_directory(store, "art", tmp_path / "cache" / "out")
    assert caught.value.value == "art/b/c"
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".out.lock"]


class Together(InMemoryObjectStore):
    """A store that answers reads of `b/c` only once as many are under way as parts are fetched at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.ranges: list[tuple[int, int | None]] = []
        self._all = threading.Barrier(artifacts._MAX_CONCURRENT_PARTS)

    def stream(
        self, key: str, chunk_size: int = CHUNK_SIZE, *, start: int = 0, stop: int | None = None
    ) -> Iterator[bytes]:
        if key == "art/b/c":
            self.ranges.append((start, stop))
            self._all.wait(60)
        return super().stream(key, chunk_size, start=start, stop=stop)


def test_parts_of_a_large_file_are_fetched_at_the_same_time(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Together()
    publish(store, source)
    monkeypatch.setattr(artifacts, "_PART_SIZE", 1300)  # the file has 5,000 bytes
    fetch_directory(store, "art", tmp_path / "out")
    assert (tmp_path / "out" / "b" / "c").read_bytes() == b"gamma" * 1000
    assert sorted(store.ranges) == [(0, 1300), (1300, 2600), (2600, 3900), (3900, None)]


def test_a_foreign_directory_is_not_touched(store: InMemoryObjectStore, source: Path, tmp_path: Path) -> None:
    publish(store, source)
    (tmp_path / "mine").mkdir()
    fetch_directory(store, "art", tmp_path / "mine")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    for destination in (tmp_path / "home", tmp_path / "home" / "thesis.txt"):
        with pytest.raises(ConflictError, match="is not an artifact"):
            fetch_directory(store, "art", destination)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"


def test_several_processes_may_fetch_to_one_place(store: InMemoryObjectStore, source: Path, tmp_path: Path) -> None:
    manifest = publish(store, source)
    with ThreadPoolExecutor(6) as pool:
        fetched = list(pool.map(lambda _: fetch_directory(store, "art", tmp_path / "out"), range(12)))
    assert fetched == [manifest] * 12
    assert sorted(path.name for path in tmp_path.iterdir()) == [".out.lock", "out", "source"]


def test_deleting_starts_with_the_manifest(source: Path) -> None:
    deleted: list[str] = []

    class Recorder(InMemoryObjectStore):
        def delete(self, key: str) -> None:
            deleted.append(key)
            super().delete(key)

    store = Recorder()
    publish(store, source)
    delete_directory(store, "art")
    assert deleted[0] == f"art/{MANIFEST}"
    assert list(store.list("")) == []


def test_a_verified_copy_is_kept_and_another_replaced(store: InMemoryObjectStore, source: Path, tmp_path: Path) -> None:
    publish(store, source)
    out = tmp_path / "out"
    fetch_directory(store, "art", out)
    inode = (out / "a").stat().st_ino
    store.delete("art/a")  # a second download would fail
    fetch_directory(store, "art", out)
    assert (out / "a").stat().st_ino == inode

    store.put_bytes("art/a", b"alpha")
    (out / "a").write_bytes(b"alphX")
    fetch_directory(store, "art", out)
    assert (out / "a").read_bytes() == b"alpha"
    (out / "extra").write_bytes(b"")
    fetch_directory(store, "art", out)
    assert not (out / "extra").exists()
    (source / "a").write_bytes(b"second")
    publish(store, source, "two")
    fetch_directory(store, "two", out)
    assert (out / "a").read_bytes() == b"second", "another artifact replaces the present one"
