"""Connections that really break in the middle: nothing is lost, doubled or mixed."""

import json
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from swiftkv_platform.errors import ConflictError, StorageError
from swiftkv_platform.storage.object_store import open_store
from tests.support.requirements import required_module
from tests.support.s3_servers import Front, client_environment, run_moto

pytestmark = pytest.mark.slow
URI = "s3://swiftkv-test"


class FirstRequests:
    """Lets `granted` bytes of the first `count` requests of a method pass, and all of the others."""

    def __init__(self, method: str, count: int, granted: int) -> None:
        self._method, self._count, self._granted = method, count, granted
        self.seen = 0

    def __call__(self, method: str) -> int | None:
        self.seen += method == self._method
        return self._granted if method == self._method and self.seen <= self._count else None


@pytest.fixture
def front(monkeypatch: pytest.MonkeyPatch) -> Iterator[Front]:
    with run_moto() as moto, closing(Front(moto.port)) as front:
        for name, value in client_environment(front.port).items():
            monkeypatch.setenv(name, value)
        yield front


def test_a_download_goes_on_at_the_next_byte(front: Front) -> None:
    store, data = open_store(URI), b"".join(number.to_bytes(4, "big") for number in range(400_000))
    store.put_bytes("big", data)
    front.granted = rule = FirstRequests("GET", 3, 300_000)
    assert b"".join(store.stream("big", chunk_size=50_000)) == data
    assert rule.seen == 4


def test_an_object_replaced_meanwhile_is_not_mixed(front: Front) -> None:
    store = open_store(URI)
    store.put_bytes("big", b"a" * 1_000_000)
    front.granted = FirstRequests("GET", 1, 300_000)
    stream = store.stream("big", chunk_size=50_000)
    first = next(stream)
    store.put_bytes("big", b"b" * 1_000_000)
    with pytest.raises(StorageError, match="replaced while"):
        list(stream)
    assert first == b"a" * 50_000


@pytest.mark.soak("waits until it is given up")
def test_a_download_that_never_gets_on_ends_with_an_error(front: Front) -> None:
    store = open_store(URI, patient=False)
    store.put_bytes("big", b"a" * 5_000_000)
    front.granted = rule = FirstRequests("GET", 1000, 0)
    with pytest.raises(StorageError, match="cannot read 'big'"):
        list(store.stream("big", chunk_size=50_000))
    assert rule.seen < 100


@pytest.mark.soak("waits until it is given up")
def test_a_failed_upload_leaves_no_parts_behind(front: Front, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(20 << 20))
    arrived: list[int] = []

    def rule(method: str) -> int | None:
        arrived.append(method == "PUT")
        return -1 if sum(arrived) > 1 else None

    front.granted = rule
    with pytest.raises(StorageError, match="cannot upload 'big'"):
        open_store(URI, patient=False).upload_file(tmp_path / "file", "big")
    front.granted = lambda _: None
    uploads = httpx.get(f"http://127.0.0.1:{front.port}/swiftkv-test?uploads").text
    assert "ListMultipartUploadsResult" in uploads
    assert "<UploadId>" not in uploads


def test_the_rule_that_ends_what_killed_uploads_leave_is_one_that_s3_takes(front: Front) -> None:
    """S3 accepts the rule of docs/operations.md, which alone ends multipart uploads of a killed process."""
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    [rules] = re.findall(r"`(\{\"Rules\": .+\})`", page)
    address = f"http://127.0.0.1:{front.port}"
    client = required_module("boto3").client("s3", endpoint_url=address, region_name="us-east-1")
    client.put_bucket_lifecycle_configuration(Bucket="swiftkv-test", LifecycleConfiguration=json.loads(rules))
    [rule] = client.get_bucket_lifecycle_configuration(Bucket="swiftkv-test")["Rules"]
    assert (rule["Status"], rule["AbortIncompleteMultipartUpload"]) == ("Enabled", {"DaysAfterInitiation": 7})


def test_a_conditional_write_knows_its_own_object_again(front: Front) -> None:
    store = open_store(URI)
    front.granted = rule = FirstRequests("PUT", 1, -1)
    store.put_bytes("event", b"mine", if_absent=True)
    assert rule.seen == 2
    assert store.get_bytes("event") == b"mine"
    with pytest.raises(ConflictError):
        store.put_bytes("event", b"mine", if_absent=True)
