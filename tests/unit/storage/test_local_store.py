"""A directory as an object store: an object that is being written is invisible."""

import multiprocessing.synchronize
import os
from pathlib import Path

import pytest

from swiftkv_platform.errors import StorageError
from swiftkv_platform.storage.object_store import LocalObjectStore


def _keep_writing(root: Path, started: multiprocessing.synchronize.Event) -> None:
    store = LocalObjectStore(root)
    number = 0
    while True:
        store.put_bytes("object", bytes([number % 256]) * 500_000)
        started.set()
        number += 1


def test_a_reader_sees_one_version_whole_whenever_the_writer_dies(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    store = LocalObjectStore(tmp_path)
    for _ in range(3):
        started = context.Event()
        writer = context.Process(target=_keep_writing, args=(tmp_path, started))
        writer.start()
        assert started.wait(30)
        for _ in range(50):
            data = store.get_bytes("object")
            assert len(data) == 500_000
            assert len(set(data)) == 1
        writer.kill()
        writer.join()
        assert len(set(store.get_bytes("object"))) == 1
        assert [info.key for info in store.list("")] == ["object"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_write_permission_is_a_storage_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StorageError, match="cannot write 'a'"):
        LocalObjectStore(tmp_path).put_bytes("a", b"")


def test_an_unwritable_target_is_a_storage_error_and_leaves_nothing(tmp_path: Path) -> None:
    store = LocalObjectStore(tmp_path)
    store.put_bytes("a", b"content")
    with pytest.raises(StorageError, match="cannot download 'a'"):
        store.download_file("a", Path("/dev/full/out"))
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
