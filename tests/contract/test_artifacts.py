"""Artifacts in object stores: whole or invisible, verified when they are fetched."""

import threading
from pathlib import Path

import pytest

from swiftkv_platform.errors import ArtifactCorruptError, StorageError
from swiftkv_platform.storage.artifacts import (
    StoredDirectory,
    fetch_directory,
    publish_directory,
)
from swiftkv_platform.storage.object_store import ObjectStore, open_store
from tests.support.s3_servers import run_rclone, use


@pytest.fixture
def source(tmp_path: Path) -> Path:
    directory = tmp_path / "source"
    (directory / "nested").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "nested" / "weights.bin").write_bytes(bytes(range(256)) * 4096)
    return directory


def publish(store: ObjectStore, source: Path) -> None:
    publish_directory(store, source, "art", kind="artifact", lineage={"job_id": "job_1"}, metrics={"kl": 0.25})


def test_parts_of_an_artifact_are_read_without_the_rest(store: ObjectStore, source: Path, tmp_path: Path) -> None:
    publish(store, source)
    directory = StoredDirectory(store, "art")
    whole = (source / "nested" / "weights.bin").read_bytes()
    for start, stop in ((0, 1), (300, 70_000), (len(whole) - 9, len(whole)), (0, len(whole))):
        assert directory.read("nested/weights.bin", start, stop) == whole[start:stop]
    directory.fetch("config.json", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["config.json"]
    for name, start, stop in (("nested/weights.bin", 9, len(whole) + 1), ("other", 0, 1)):
        with pytest.raises(ArtifactCorruptError, match=f"art/{name}"):
            directory.read(name, start, stop)


@pytest.mark.parametrize("change", [-1, 1, None], ids=["short", "long", "missing"])
def test_an_artifact_with_a_file_of_another_size_is_not_opened(
    store: ObjectStore, source: Path, change: int | None
) -> None:
    publish(store, source)
    key = "art/nested/weights.bin"
    directory, data = StoredDirectory(store, "art"), store.get_bytes(key)
    if change is None:
        store.delete(key)
    else:
        store.put_bytes(key, data[:-1] if change < 0 else data + b"x")
    with pytest.raises(ArtifactCorruptError, match=r"art/nested/weights\.bin.*manifest") as caught:
        StoredDirectory(store, "art")
    assert caught.value.value == key
    if change != 1:  # opened before
        with pytest.raises(ArtifactCorruptError, match=r"art/nested/weights\.bin"):
            directory.read("nested/weights.bin", len(data) - 9, len(data))


def test_work_goes_on_after_the_server_was_away(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_rclone(tmp_path / "rclone") as rclone:
        store = open_store(use(rclone.server, monkeypatch))
        store.ping()
        rclone.stop()
        with pytest.raises(StorageError):
            store.ping()
        restart = threading.Timer(0.7, rclone.start)
        restart.start()
        try:
            publish(store, source)
        finally:
            restart.join()
        manifest = fetch_directory(store, "art", tmp_path / "out")
    assert (tmp_path / "out" / "config.json").stat().st_size == manifest.files["config.json"].size
