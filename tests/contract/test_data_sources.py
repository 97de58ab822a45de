"""Data sources on real S3 servers: objects and prefixes, kept or streamed."""

import hashlib
import json
import uuid
from pathlib import Path

import pytest

from swiftkv_platform.contract.attempts import StoredFile, file_key, new_file_id
from swiftkv_platform.control_plane.jobs.estimates import read_object
from swiftkv_platform.data.preparation import prepare_data
from swiftkv_platform.data.source_rows import RemoteFile, read_source_rows
from swiftkv_platform.errors import DataError, InvalidInputError, ModelError
from swiftkv_platform.jobs.worker.setup import ObjectStoreFiles, resolve_teacher
from swiftkv_platform.sources import Access, S3Source
from swiftkv_platform.sources.teacher_config import read_config_file, read_teacher_config
from swiftkv_platform.specs import DataSourceSpec, DataSpec, ModelSpec
from swiftkv_platform.storage.downloads import download_prefix
from swiftkv_platform.storage.object_store import open_store
from tests.support.captured_traffic import NOON, SOURCE, Traffic
from tests.support.fakes.peft import save_adapter
from tests.support.fakes.tokenizers import byte_tokenizer
from tests.support.requirements import required_module
from tests.support.s3_servers import RcloneServer, S3Server
from tests.support.tiny_models import random_teacher, save_teacher


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.slow) for name in ("rclone", "moto")])
def prefix(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    found: RcloneServer | S3Server = request.getfixturevalue(f"{request.param}_server")
    server = found.server if isinstance(found, RcloneServer) else found
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    address = server.uri(f"data/{uuid.uuid4().hex}")
    store = open_store(address)
    store.put_bytes("deep/a.jsonl", "".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(20)).encode())
    store.put_bytes("b.txt", b"plain")
    store.put_bytes("c.bin", b"no rows")
    return address


@pytest.mark.parametrize("streaming", [False, True])
def test_a_prefix_is_read_and_what_is_streamed_is_not_kept(prefix: str, streaming: bool, tmp_path: Path) -> None:
    source = DataSourceSpec(name_or_path=prefix, streaming=streaming, sample_count=21)
    rows, objects = tmp_path / "rows", tmp_path / "objects"
    rows.mkdir()
    spec = DataSpec(sources=(source,), max_length=64, validation_fraction=0.0)
    prepared = prepare_data(spec, byte_tokenizer(), rows, seed=0, remote=ObjectStoreFiles(objects))
    assert prepared.statistics.sources[0].formats == {"text": 21}
    kept = sorted(path.name for path in objects.rglob("*") if path.is_file())
    assert kept == ([] if streaming else ["a.jsonl", "b.txt"])


def test_one_object_is_read_by_its_name(prefix: str, tmp_path: Path) -> None:
    remote, place = ObjectStoreFiles(tmp_path), S3Source(prefix)
    file = RemoteFile(f"s3://{place.bucket}", f"{place.key}/deep/a.jsonl")
    assert remote.list_files(S3Source(f"{prefix}/deep/a.jsonl")) == [file]
    assert remote.list_files(S3Source(f"{prefix}/deep/")) == [file]
    with pytest.raises(DataError, match="no object exists at"):
        remote.list_files(S3Source(f"{prefix}/nothing"))


ODD = ("a#1.jsonl", "b?x=1#y.jsonl", "c%20d e.jsonl", "[f]*.jsonl", "d#1/g.jsonl", "é&+.JSONL")


def test_a_key_is_taken_character_by_character(prefix: str, tmp_path: Path) -> None:
    place = S3Source(f"{prefix}/odd?#%")
    store, remote = open_store(f"s3://{place.bucket}"), ObjectStoreFiles(tmp_path)
    for key in ODD:
        store.put_bytes(f"{place.key}/{key}", json.dumps({"text": key}).encode())
    assert sorted(file.key for file in remote.list_files(place)) == sorted(f"{place.key}/{key}" for key in ODD)
    for name in (place.name, *(f"{place.name}/{key}" for key in ODD)):
        source = DataSourceSpec(name_or_path=name)
        found = [row.content for row in read_source_rows(source, 0, seed=0, remote=remote)]
        assert sorted(found) == (sorted(ODD) if name == place.name else [name.removeprefix(f"{place.name}/")])
    download_prefix(place.name, tmp_path / "model", DataError, field="model")
    assert len([path for path in (tmp_path / "model").rglob("*") if path.is_file()]) == len(ODD)
    store.put_bytes(f"{place.key}/config.json", b'{"model_type": "odd"}')
    assert read_teacher_config(place.name, read_object) == {"model_type": "odd"}


def test_an_adapter_and_its_base_come_from_a_store(
    prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swiftkv_platform.model.weights.bases.PEFT_CACHE", tmp_path / "cache")
    store, place = open_store(f"s3://{S3Source(prefix).bucket}"), S3Source(prefix)
    base = save_teacher(tmp_path / "base")
    for name, local in (("remote", f"{prefix}/base"), ("local", str(base))):
        save_adapter(random_teacher(), tmp_path / name, local)
        for directory in (tmp_path / name, base):
            for path in directory.iterdir():
                store.upload_file(path, f"{place.key}/{directory.name}/{path.name}")
    access = Access(roots=(prefix, str(base)))
    merged = {}
    for name in ("remote", "local"):
        model, workspace = ModelSpec(name_or_path=f"{prefix}/{name}"), tmp_path / f"work-{name}"
        assert read_teacher_config(model.name_or_path, read_object, access=access) == read_config_file(base)
        workspace.mkdir()
        merged[name] = Path(resolve_teacher(model, workspace, access=access))
        assert merged[name].is_relative_to(workspace if name == "remote" else tmp_path / "cache")
        again = resolve_teacher(model, workspace, access=access, fetch=False)
        assert again == str(merged[name]), "another worker of the machine finds it"
    local, remote = (merged[name] / "model.safetensors" for name in ("local", "remote"))
    assert local.read_bytes() == remote.read_bytes() != (base / "model.safetensors").read_bytes()


def test_a_bucket_that_is_not_there_is_a_fault_of_the_name(prefix: str, tmp_path: Path) -> None:
    name = f"s3://no-such-{S3Source(prefix).bucket}/rows"
    for kind, work in (
        (DataError, lambda: ObjectStoreFiles(tmp_path).list_files(S3Source(name))),
        (ModelError, lambda: download_prefix(name, tmp_path / "model", ModelError, field="model")),
        (ModelError, lambda: read_teacher_config(name, read_object)),
    ):
        with pytest.raises(kind, match=f"is '{name}': .*(does not exist|no such bucket)") as caught:
            work()
        assert caught.value.value == name


def test_a_key_that_no_client_can_name_is_refused_and_not_tried_again(prefix: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="has an empty segment"):
        ObjectStoreFiles(tmp_path).list_files(S3Source(f"{prefix}//deep/a.jsonl"))


@pytest.mark.slow("starts an S3 server")
def test_an_object_that_no_client_can_name_is_told_of(
    moto_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in moto_server.environment.items():
        monkeypatch.setenv(name, value)
    client = required_module("boto3").client("s3", endpoint_url=moto_server.environment["AWS_ENDPOINT_URL"])
    client.put_object(Bucket=moto_server.bucket, Key="unnamed//a.jsonl", Body=b"{}")
    with pytest.raises(
        InvalidInputError, match=r'"unnamed//a.jsonl" contained empty path segment; keys must not contain empty'
    ):
        ObjectStoreFiles(tmp_path).list_files(S3Source(moto_server.uri("unnamed")))
    client.delete_object(Bucket=moto_server.bucket, Key="unnamed//a.jsonl")  # other tests list the whole bucket


def test_an_uploaded_file_is_read_from_its_bucket(prefix: str, tmp_path: Path) -> None:
    file_id, rows = new_file_id(), tmp_path / "rows"
    content = open_store(prefix).get_bytes("deep/a.jsonl")
    key = file_key("acme", file_id)
    open_store(prefix).put_bytes(key, content)
    digest = hashlib.sha256(content).hexdigest()
    stored = StoredFile(uri=f"{open_store(prefix).uri}/{key}", sha256=digest, size=len(content))
    rows.mkdir()
    spec = DataSpec(sources=(DataSourceSpec(name_or_path=file_id),), max_length=64, validation_fraction=0.0)
    access = Access(roots=(), files={file_id: stored})
    prepared = prepare_data(
        spec, byte_tokenizer(), rows, seed=0, remote=ObjectStoreFiles(tmp_path / "objects"), access=access
    )
    assert prepared.statistics.sources[0].formats == {"text": 20}


def test_captured_traffic_is_read_from_its_bucket(prefix: str, tmp_path: Path) -> None:
    traffic, rows = Traffic(open_store(prefix)), tmp_path / "rows"
    for number in range(20):
        traffic.chat(f"question {number}", "say", user=f"user {number % 4}")
    traffic.chat("after the window", "say", time=NOON + 86400.0)
    traffic.delete(user="user 3")
    rows.mkdir()
    source = DataSourceSpec(name_or_path=SOURCE, since="2024-10-04T12:00:05Z", until="2024-10-05")
    spec = DataSpec(sources=(source,), max_length=64, validation_fraction=0.0)
    prepared = prepare_data(
        spec, byte_tokenizer(), rows, seed=0, remote=ObjectStoreFiles(tmp_path / "objects"), access=traffic.access
    )
    assert prepared.statistics.sources[0].formats == {"messages": 12}
