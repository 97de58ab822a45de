"""Copies of a model in a directory, a bucket and a hub repository: complete, resumable, and of models alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftkv_platform.contract.attempts import Manifest
from swiftkv_platform.errors import ConflictError, StorageError
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.artifacts import publish_directory, read_manifest
from swiftkv_platform.storage.local_store import LocalObjectStore
from swiftkv_platform.storage.publishing import publish
from tests.fakes.hub_server import TOKEN, Hub, run_hub
from tests.s3_servers import run_moto

ONE = {"config.json": b"{}", "model.safetensors": b"weights" * 100, "tokenizer/vocab.txt": b"a\nb\n"}
OTHER = {"config.json": b'{"a": 1}', "model-00001-of-00002.safetensors": b"more" * 100}


def card(manifest: Manifest) -> str:
    return f"---\nlibrary_name: transformers\n---\n# {manifest.lineage['job_id']}\n"


@pytest.fixture
def source(tmp_path: Path) -> LocalObjectStore:
    store = LocalObjectStore(tmp_path / "store")
    for key, files in {"one": ONE, "other": OTHER}.items():
        directory = tmp_path / "files" / key
        for name, data in files.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_bytes(data)
        publish_directory(store, directory, key, kind="artifact", lineage={"job_id": key}, metrics={})
    return store


@pytest.fixture(params=["directory", "bucket"])
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "directory":
        yield str(tmp_path / "published" / "model")
        return
    with run_moto() as server:
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server.uri("published/model")


def held(uri: str) -> dict[str, bytes]:
    store = open_store(uri)
    return {info.key: store.get_bytes(info.key) for info in store.list("")}


def test_a_model_is_copied_with_its_card_and_a_newer_one_replaces_it(source: LocalObjectStore, target: str) -> None:
    assert publish(source, "one", target, card=card) == target
    copied = held(target)
    assert {name: copied[name] for name in ONE} == ONE
    assert copied.keys() - ONE.keys() == {"README.md", "manifest.json"}
    assert copied["README.md"].endswith(b"# one\n")
    assert read_manifest(open_store(target), "") == read_manifest(source, "one")
    source.delete("one/model.safetensors")
    publish(source, "one", target, card=card)  # reads nothing that is there already
    assert held(target) == copied
    publish(source, "other", target, card=card)
    assert held(target).keys() == OTHER.keys() | {"README.md", "manifest.json"}


def test_a_copy_that_was_broken_off_is_completed(
    source: LocalObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "published"
    publish(source, "other", str(target), card=card)
    with monkeypatch.context() as patch:
        upload = LocalObjectStore.upload_file

        def fail(self: LocalObjectStore, path: Path, key: str) -> None:
            if key == "model.safetensors":
                raise StorageError("the disk is full")
            upload(self, path, key)

        patch.setattr(LocalObjectStore, "upload_file", fail)
        with pytest.raises(StorageError, match="disk is full"):
            publish(source, "one", str(target), card=card)
    assert not (target / "manifest.json").exists(), "a mixture of two models looks complete"
    publish(source, "one", str(target), card=card)
    assert held(str(target)).keys() == ONE.keys() | {"README.md", "manifest.json"}


def test_what_is_no_model_is_not_written_over(source: LocalObjectStore, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(ConflictError, match="something else than a model") as refused:
        publish(source, "one", str(tmp_path / "thesis"), card=card)
    assert refused.value.field == "publish.to"
    assert held(str(tmp_path / "thesis")) == {"chapter.tex": b"years of work"}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with run_hub() as hub:
        hub.use(monkeypatch, tmp_path / "hub")
        yield hub


def test_a_repository_of_the_hub_gets_one_commit_and_large_files_once(source: LocalObjectStore, hub: Hub) -> None:
    assert publish(source, "one", "hf://acme/model", card=card) == f"{hub.url}/acme/model"
    files = hub.repositories["acme/model"]
    assert {name: files[name] for name in ONE} == ONE
    assert files.keys() - ONE.keys() == {"README.md", "manifest.json"}
    assert (hub.private["acme/model"], hub.uploads, len(hub.commits)) == (True, 1, 1)
    publish(source, "one", "hf://acme/model", card=card)
    assert (hub.uploads, len(hub.commits)) == (1, 1), "nothing has changed"
    publish(source, "other", "hf://acme/model", card=card)
    assert "model.safetensors" not in files, "the weights of the model before are served with this one's"
    assert files["model-00001-of-00002.safetensors"] == OTHER["model-00001-of-00002.safetensors"]


def test_a_hub_that_refuses_is_named_and_gets_no_commit(
    source: LocalObjectStore, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.fail_uploads = 1
    with pytest.raises(StorageError, match="hf://acme/model") as refused:
        publish(source, "one", "hf://acme/model", card=card)
    assert TOKEN not in str(refused.value)
    assert hub.commits == []
    publish(source, "one", "hf://acme/model", card=card)
    assert len(hub.commits) == 1
    monkeypatch.setenv("HF_TOKEN", "hf_stranger")
    with pytest.raises(StorageError, match="HF_TOKEN"):
        publish(source, "one", "hf://acme/secret", card=card)
