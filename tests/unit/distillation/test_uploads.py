"""Uploads behind the training: what waits for what, and what a store that fails leaves behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from swiftkv_platform.attempts import ManifestFile
from swiftkv_platform.distillation.uploads import Progress, Retries, Uploader
from swiftkv_platform.errors import StorageError
from tests.numerics.distillation_worker import group_of_one

AT_ONCE = Retries(tries=3, first_wait_s=0.0)


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with group_of_one(tmp_path_factory.mktemp("group")):
        yield


class Store:
    """Takes checkpoints when it may, and fails as often as it is told to."""

    def __init__(self, *, failures: int = 0, error: type[Exception] = StorageError) -> None:
        self.open = threading.Event()
        self.open.set()
        self.failures = failures
        self.error = error
        self.committed: list[str] = []
        self.lost: list[str] = []

    def upload(self, directory: Path, name: str) -> dict[str, ManifestFile]:
        self.open.wait()
        if self.failures > 0:
            self.failures -= 1
            raise self.error("away")
        return {path.name: ManifestFile(size=path.stat().st_size, sha256="0") for path in directory.iterdir()}

    def commit(self, name: str, files: Mapping[str, ManifestFile], progress: Progress, world_size: int) -> None:
        assert [*files] == ["weights"]
        self.committed.append(name)

    def failed(self, name: str, progress: Progress, error: StorageError) -> None:
        self.lost.append(name)

    def newest(self) -> str | None:
        return self.committed[-1] if self.committed else None

    def fetch(self, key: str, directory: Path) -> None:
        raise NotImplementedError


def staged(tmp_path: Path, name: str) -> Path:
    directory = tmp_path / name
    directory.mkdir()
    (directory / "weights").write_bytes(b"w")
    return directory


def test_training_goes_on_during_an_upload_and_the_end_waits_for_it(tmp_path: Path) -> None:
    store = Store()
    store.open.clear()
    uploader = Uploader(store, AT_ONCE)
    directory = staged(tmp_path, "a")

    uploader.start(directory, "a", Progress(1))
    assert store.committed == []  # `start` came back all the same
    store.open.set()
    uploader.finish()

    assert store.committed == ["a"]
    assert not directory.exists()


def test_a_store_that_comes_back_in_time_loses_nothing(tmp_path: Path) -> None:
    store = Store(failures=2)
    uploader = Uploader(store, AT_ONCE)

    uploader.start(staged(tmp_path, "a"), "a", Progress(1))
    uploader.finish()

    assert (store.committed, store.lost) == (["a"], [])


def test_a_checkpoint_that_cannot_be_stored_is_reported_and_the_one_before_stays(tmp_path: Path) -> None:
    store = Store()
    uploader = Uploader(store, AT_ONCE)
    uploader.start(staged(tmp_path, "a"), "a", Progress(1))
    uploader.finish()

    store.failures = 3
    uploader.start(staged(tmp_path, "b"), "b", Progress(2))
    uploader.start(staged(tmp_path, "c"), "c", Progress(3))
    uploader.finish()

    assert (store.committed, store.lost) == (["a", "c"], ["b"])


def test_the_last_checkpoint_must_arrive(tmp_path: Path) -> None:
    store = Store(failures=3)
    uploader = Uploader(store, AT_ONCE)
    uploader.start(staged(tmp_path, "a"), "a", Progress(1))

    with pytest.raises(StorageError, match="away"):
        uploader.finish()
    assert store.lost == ["a"]


def test_a_defect_is_no_failure_of_the_store(tmp_path: Path) -> None:
    uploader = Uploader(Store(failures=1, error=ValueError), AT_ONCE)
    uploader.start(staged(tmp_path, "a"), "a", Progress(1))

    with pytest.raises(ValueError, match="away"):
        uploader.finish()
