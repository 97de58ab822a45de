"""Contract of an object store: a directory, the in-memory fake, and three S3 servers."""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from swiftkv_platform.errors import (
    BucketError,
    ConflictError,
    InvalidInputError,
    ObjectNotFoundError,
    StorageError,
)
from swiftkv_platform.storage.object_store import ObjectInfo, ObjectStore, open_store
from tests.support.rays import free_port
from tests.support.s3_servers import OTHERS, S3, RcloneServer, S3Server, client_environment, use

MULTIPART_BYTES = (9 << 20) + 17  # uploads are split from 8 MiB on


def keys(infos: Iterator[ObjectInfo]) -> list[str]:
    return [info.key for info in infos]


def put_all(store: ObjectStore, *names: str) -> None:
    for name in names:
        store.put_bytes(name, name.encode())


# ---- objects


@pytest.mark.parametrize("data", [b"", b"hello", bytes(range(256)) * 5000], ids=["empty", "small", "1.28MB"])
def test_an_object_comes_back_as_it_was_written(store: ObjectStore, data: bytes) -> None:
    store.put_bytes("a/b.bin", b"older content")
    store.put_bytes("a/b.bin", data)
    assert store.get_bytes("a/b.bin") == data
    assert b"".join(store.stream("a/b.bin", chunk_size=1000)) == data
    assert store.head("a/b.bin") == ObjectInfo("a/b.bin", len(data))
    for start in (1, len(data) // 2, max(len(data) - 1, 1), len(data), len(data) + 1):
        assert b"".join(store.stream("a/b.bin", chunk_size=1000, start=start)) == data[start:]
        for stop in (start, start + 1500, len(data) + 1):
            read = b"".join(store.stream("a/b.bin", chunk_size=1000, start=start, stop=stop))
            assert read == data[start:stop]
    assert b"".join(store.stream("a/b.bin", stop=3)) == data[:3]


def test_names_may_have_spaces_and_letters_of_any_script(store: ObjectStore) -> None:
    name = "data/Übung 1 + 2 & 100%.txt"
    store.put_bytes(name, b"x")
    assert keys(store.list("data")) == [name]
    assert store.get_bytes(name) == b"x"


def test_a_missing_object_is_said_to_be_missing(store: ObjectStore, tmp_path: Path) -> None:
    store.put_bytes("a/b", b"x")
    for missing in ("nope", "a"):
        assert store.head(missing) is None
        with pytest.raises(ObjectNotFoundError, match=missing):
            store.get_bytes(missing)
        with pytest.raises(ObjectNotFoundError, match=missing):
            list(store.stream(missing))
        with pytest.raises(ObjectNotFoundError, match=missing):
            list(store.stream(missing, start=1))
        with pytest.raises(ObjectNotFoundError, match=missing):
            store.download_file(missing, tmp_path / "out" / "file")
    assert list((tmp_path / "out").glob("*")) == []
    store.delete("nope")


def test_if_absent_keeps_what_is_there(store: ObjectStore) -> None:
    store.put_bytes("k", b"first", if_absent=True)
    with pytest.raises(ConflictError, match="'k'"):
        store.put_bytes("k", b"second", if_absent=True)
    assert store.get_bytes("k") == b"first"


# rclone ignores If-None-Match, so that a race may have two winners there (see bucket_store); moto and SeaweedFS obey.
@pytest.mark.parametrize("store", ["local", "memory", *S3[1:], *OTHERS], indirect=True)
def test_of_many_writers_at_once_one_creates_the_object(store: ObjectStore) -> None:
    barrier = threading.Barrier(8)

    def create(writer: int) -> int | None:
        barrier.wait()
        try:
            store.put_bytes("race", str(writer).encode(), if_absent=True)
        except ConflictError:
            return None
        return writer

    with ThreadPoolExecutor(8) as pool:
        winners = [writer for writer in pool.map(create, range(8)) if writer is not None]
    assert [str(writer).encode() for writer in winners] == [store.get_bytes("race")]


def test_files_travel_both_ways(store: ObjectStore, tmp_path: Path) -> None:
    data = bytes(range(251)) * (MULTIPART_BYTES // 251)
    (tmp_path / "in").write_bytes(data)
    store.upload_file(tmp_path / "in", "big/file")
    target = tmp_path / "new" / "out"
    store.download_file("big/file", target)
    store.download_file("big/file", target)
    assert target.read_bytes() == data
    assert list(target.parent.iterdir()) == [target]


@pytest.mark.parametrize("bad", ["", "/a", "a/", "a//b", "../a", "a/./b", "a/..", "a\\b", "a\nb", ".tmp-x", "x" * 1025])
def test_bad_keys_are_refused(store: ObjectStore, bad: str) -> None:
    for call in (store.get_bytes, store.head, store.delete, lambda key: store.put_bytes(key, b"")):
        with pytest.raises(InvalidInputError) as caught:
            call(bad)
        assert caught.value.value == bad


# ---- directories


@pytest.mark.parametrize("store", ["local", "memory", *S3[:2], *OTHERS], indirect=True)
def test_lists_in_key_order_below_a_directory(store: ObjectStore) -> None:
    names = ["a/b-1", "a/b.txt", "a/b/1", "a/b/c/2", "a/b0", "ab", "z"]
    put_all(store, *reversed(names))
    assert keys(store.list("")) == names
    assert keys(store.list("a")) == keys(store.list("a/")) == names[:5]
    assert keys(store.list("a/b")) == ["a/b/1", "a/b/c/2"]
    assert keys(store.list("nothing")) == []
    for position, name in enumerate(names):
        assert keys(store.list("", start_after=name)) == names[position + 1 :]
    assert keys(store.list("a", start_after="a/b/0")) == ["a/b/1", "a/b/c/2", "a/b0"]


def test_seaweedfs_lists_a_directorys_own_objects_in_key_order(
    seaweedfs_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logs and events need no other order. In whole trees it lists `b/1` before `b-1`, unlike S3."""
    store = open_store(use(seaweedfs_server, monkeypatch))
    names = ["b/0", "b/1", "b/1-0", "b/1.5", "b/10", "b/9"]
    put_all(store, *reversed(names))
    assert keys(store.list("b")) == names
    for position, name in enumerate(names):
        assert keys(store.list("b", start_after=name)) == names[position + 1 :]
    put_all(store, "b-1")
    assert sorted(keys(store.list(""))) == ["b-1", *names]


# SeaweedFS lists a directory that is empty until it cleans up, some time later.
@pytest.mark.parametrize("store", ["local", "memory", *S3[:2], *OTHERS], indirect=True)
def test_names_the_directories_that_hold_something(store: ObjectStore) -> None:
    put_all(store, "top", "r/10/x", "r/9/x/y", "r/file", "r/gone/x")
    store.delete("r/gone/x")
    assert store.list_directories("") == ["r"]
    assert store.list_directories("r") == ["10", "9"]
    assert store.list_directories("r/9") == ["x"]
    assert store.list_directories("r/9/x") == store.list_directories("nothing") == []


def test_deletes_a_directory_and_nothing_beside_it(store: ObjectStore) -> None:
    put_all(store, "d/1", "d/e/2", "d.txt", "de/3")
    store.delete_prefix("d")
    store.delete_prefix("never/there")
    assert keys(store.list("")) == ["d.txt", "de/3"]
    with pytest.raises(InvalidInputError):
        store.delete_prefix("")


def test_more_objects_than_one_answer_carries(rclone_server: RcloneServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(use(rclone_server.server, monkeypatch))
    names = [f"many/{number:05d}" for number in range(1005)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda name: store.put_bytes(name, b""), names))
    assert keys(store.list("many")) == names
    store.delete_prefix("many")
    assert keys(store.list("many")) == []


def test_deletes_the_objects_that_are_named(store: ObjectStore) -> None:
    put_all(store, "d/1", "d/2", "d/3")
    store.delete_many(["d/1", "d/3", "d/never"])
    store.delete_many([])
    assert keys(store.list("")) == ["d/2"]


def test_ping_leaves_nothing_behind(store: ObjectStore) -> None:
    store.ping()
    assert keys(store.list("")) == []


# ---- S3 alone


def test_an_s3_address_opens_the_same_store_again(s3_store: ObjectStore) -> None:
    s3_store.put_bytes("a/b", b"x")
    assert keys(open_store(s3_store.uri).list("")) == ["a/b"]
    assert keys(open_store(f"{s3_store.uri}/a").list("")) == ["b"]


def test_a_presigned_url_needs_no_credentials(s3_store: ObjectStore) -> None:
    s3_store.put_bytes("a/b c", b"content")
    url = s3_store.create_presigned_url("a/b c", 60)
    assert url is not None
    assert httpx.get(url).content == b"content"


def test_a_wrong_secret_is_refused_and_not_repeated(
    rclone_server: RcloneServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = use(rclone_server.server, monkeypatch)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret-of-this-server")
    store = open_store(uri)
    for call in (
        store.ping,
        lambda: store.get_bytes("a"),
        lambda: store.put_bytes("a", b""),
        lambda: list(store.list("")),
    ):
        with pytest.raises(BucketError, match="refuses the credentials") as caught:
            call()
        assert "not-the-secret" not in caught.value.message


def test_a_missing_bucket_is_named(s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    store = open_store("s3://no-such-bucket/prefix")
    (tmp_path / "file").write_bytes(b"x")
    calls = (
        store.ping,
        lambda: store.get_bytes("a"),
        lambda: store.put_bytes("a", b""),
        lambda: list(store.list("")),
        lambda: store.upload_file(tmp_path / "file", "a"),
    )
    for call in calls:
        with pytest.raises(BucketError, match="bucket 'no-such-bucket' does not exist"):
            call()


def test_a_profile_has_the_credentials(
    rclone_server: RcloneServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uri = use(rclone_server.server, monkeypatch)
    key, secret = (os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
    (tmp_path / "profiles").write_text(f"[other]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "profiles"))
    monkeypatch.setenv("AWS_PROFILE", "other")
    open_store(uri).ping()


def test_missing_credentials_and_a_server_that_is_away_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in client_environment(free_port()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StorageError, match=r"s3://bucket.*AWS_ENDPOINT_URL"):
        open_store("s3://bucket").ping()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StorageError, match="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"):
        open_store("s3://bucket").put_bytes("a", b"")


def test_pieces_become_one_object_or_none(store: ObjectStore) -> None:
    pieces = [bytes([number]) * (1 << 20) for number in range(10)]  # more than one part of a large upload
    store.upload_chunks(iter(pieces), "a/whole", 10 << 20)
    assert store.get_bytes("a/whole") == b"".join(pieces)
    store.upload_chunks(iter(()), "a/empty", 0)
    assert store.get_bytes("a/empty") == b""

    def interrupted() -> Iterator[bytes]:
        yield from pieces
        raise KeyError("the client has left")

    with pytest.raises(KeyError, match="has left"):
        store.upload_chunks(interrupted(), "a/interrupted", 20 << 20)
    assert [info.key for info in store.list("a")] == ["a/empty", "a/whole"]
