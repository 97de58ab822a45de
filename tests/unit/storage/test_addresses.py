"""Addresses that open a store, and refusals of others."""

from pathlib import Path

import pytest

from swiftkv_platform.errors import InvalidInputError, StorageError
from swiftkv_platform.storage.object_store import open_store
from tests.support.rays import free_port
from tests.support.s3_servers import client_environment


@pytest.fixture(autouse=True)
def _s3_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3", raising=False)
    for name, value in client_environment(free_port()).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("uri", "reopened"),
    [
        ("/data/store", "/data/store"),
        ("file:///data/my%20store", "/data/my store"),
        ("file://localhost/data", "/data"),
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("S3://bucket/a", "s3://bucket/a"),
    ],
)
def test_good_addresses(uri: str, reopened: str) -> None:
    store = open_store(uri)
    assert store.uri == reopened
    assert open_store(store.uri).uri == reopened


def test_relative_and_home_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert open_store("store").uri == str(tmp_path / "store")
    assert open_store("~/store").uri == str(tmp_path / "home" / "store")


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("", "empty"),
        ("ftp://bucket/x", "scheme is unknown"),
        ("https://example.org/x", "scheme is unknown"),
        ("s3://", "names no bucket"),
        ("s3:///prefix", "names no bucket"),
        ("s3://Bad_Bucket/x", "names no bucket"),
        ("s3://bucket/a/../b", "'..'"),
        ("s3://bucket/a?endpoint_override=evil.example", "AWS_ENDPOINT_URL"),
        ("file://host/data", "file URI must have an absolute path"),
    ],
)
def test_bad_addresses_say_what_would_do(uri: str, why: str) -> None:
    with pytest.raises(InvalidInputError, match="s3://bucket/prefix") as caught:
        open_store(uri)
    assert why in caught.value.message
    assert caught.value.field == "storage_uri"


def test_credentials_in_an_address_are_not_repeated() -> None:
    with pytest.raises(InvalidInputError) as caught:
        open_store("s3://key:hunter2@bucket/prefix")
    assert "hunter2" not in caught.value.message
    assert "hunter2" not in str(caught.value.value)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:9000", "ftp://host", "http://user:hunter2@host:9000", "http://"])
def test_a_malformed_endpoint_is_refused(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(InvalidInputError, match="AWS_ENDPOINT_URL must be http://host:port") as caught:
        open_store("s3://bucket")
    assert "hunter2" not in f"{caught.value.message} {caught.value.value}"


def test_an_unusable_directory_fails_the_ping(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StorageError, match=r"file/store cannot be used"):
        open_store(str(tmp_path / "file" / "store")).ping()
