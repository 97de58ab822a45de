"""Copies of a model in a directory, a bucket and a hub repository, and objects that retention removes."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftkv_platform.contract.attempts import Manifest
from swiftkv_platform.control_plane.retention import JobDataKind, RetentionStore, classify_object
from swiftkv_platform.errors import ConflictError, InvalidInputError, StorageError
from swiftkv_platform.storage.artifacts import is_complete, publish_directory, read_manifest
from swiftkv_platform.storage.object_store import LocalObjectStore, ObjectStore, open_store
from swiftkv_platform.storage.publishing import publish
from tests.support.fakes.hub_server import TOKEN, Hub, run_hub
from tests.support.fakes.object_store import InMemoryObjectStore
from tests.support.s3_servers import run_moto

pytestmark = pytest.mark.slow("writes models")

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
    publish(source, "one", target, card=card)  # reads no file that is there already
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
    assert not (target / "manifest.json").exists(), "a mixture of two models must not look complete"
    publish(source, "one", str(target), card=card)
    assert held(str(target)).keys() == ONE.keys() | {"README.md", "manifest.json"}


def test_what_is_no_model_is_not_written_over(source: LocalObjectStore, tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(ConflictError, match="other files than a model") as refused:
        publish(source, "one", str(tmp_path / "thesis"), card=card)
    assert refused.value.field == "publish.to"
    assert held(str(tmp_path / "thesis")) == {"chapter.tex": b"years of work"}


def test_links_lead_no_publication_to_another_tenant(source: LocalObjectStore, tmp_path: Path) -> None:
    """A tenant may write to its own place, and so put links there, even after its spec was checked."""
    mine, theirs = tmp_path / "published" / "mine", tmp_path / "published" / "theirs"
    for directory in (mine, theirs):
        publish(source, "one", str(directory / "model"), card=card, targets=(str(directory),))
    before = held(str(theirs))
    places = {"place": mine / "linked", "inside": mine / "inside", "above": mine / "above" / "model"}
    places["place"].symlink_to(theirs / "model")
    (places["inside"]).mkdir()
    (places["inside"] / "tokenizer").symlink_to(theirs / "model" / "tokenizer")
    (mine / "above").symlink_to(theirs)
    for place in places.values():
        for key in ("one", "other"):
            if key == "one" or place != places["inside"]:  # `other` has no file in a subdirectory
                with pytest.raises((InvalidInputError, ConflictError)) as refused:
                    publish(source, key, str(place), card=card, targets=("s3://bucket", str(mine)))
                assert refused.value.field == "publish.to"
    assert held(str(theirs)) == before
    (mine / "model" / "config.json").unlink()
    (mine / "model" / "config.json").symlink_to(theirs / "model" / "config.json")
    (mine / "model" / "manifest.json").unlink()
    (mine / "model" / "manifest.json").symlink_to(theirs / "model" / "manifest.json")
    publish(source, "other", str(mine / "model"), card=card, targets=(str(mine),))
    assert held(str(theirs)) == before, "a file replaces a link, not its target"


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
    assert "model.safetensors" not in files, "weights of the previous model must go"
    assert files["model-00001-of-00002.safetensors"] == OTHER["model-00001-of-00002.safetensors"]


def test_a_repository_with_something_else_in_it_is_not_written_over(source: LocalObjectStore, hub: Hub) -> None:
    publish(source, "one", "hf://acme/model", card=card)
    for files, refused in (
        ({".gitattributes": b"", "README.md": b"# soon"}, False),
        ({"model.safetensors": b"somebody's"}, True),
    ):
        hub.repositories["acme/other"] = dict(files)
        if refused:
            with pytest.raises(ConflictError, match="has other files than"):
                publish(source, "one", "hf://acme/other", card=card)
            assert hub.repositories["acme/other"] == files
        else:
            publish(source, "one", "hf://acme/other", card=card)


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


ATTEMPT = "jobs/job_1/attempts/1"

TRIAL = "jobs/job_1/trials/l2/jobs/job_1/attempts/1"


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    return InMemoryObjectStore() if request.param == "memory" else LocalObjectStore(tmp_path / "store")


def put(store: ObjectStore, *keys: str) -> None:
    for key in keys:
        store.put_bytes(key, b"abc")


def keys(store: ObjectStore) -> list[str]:
    return [info.key for info in store.list("")]


def test_a_kind_has_its_places_in_every_attempt_and_trial(store: ObjectStore) -> None:
    put(store, f"{ATTEMPT}/logs.txt", f"{TRIAL}/logs.txt", "jobs/job_1/attempts/2/attempt.json")
    put(store, "jobs/job_2/attempts/1/a")
    places = [f"{place}/checkpoints" for place in (ATTEMPT, "jobs/job_1/attempts/2", TRIAL)]
    assert RetentionStore(store).list_locations("job_1", JobDataKind.CHECKPOINTS) == places
    assert RetentionStore(store).list_locations("job_1", JobDataKind.LOGS)[:2] == [
        f"{ATTEMPT}/logs.txt",
        f"{ATTEMPT}/logs.json",
    ]
    assert RetentionStore(store).list_locations("job_9", JobDataKind.LOGS) == []


def test_no_checkpoint_looks_complete_while_its_files_go(store: ObjectStore) -> None:
    place = f"{ATTEMPT}/checkpoints"
    names = [f"{place}/step-{step}" for step in (1, 2)]
    for name in names:
        put(store, f"{name}/a", f"{name}/b", f"{name}/manifest.json")
    RetentionStore(store).remove_objects(place, limit=1)
    assert not any(is_complete(store, name) for name in names)
    assert len(keys(store)) == 3


def test_objects_are_counted_by_kind_part_by_part(store: ObjectStore) -> None:
    put(
        store,
        f"{ATTEMPT}/events/driver/1",
        f"{ATTEMPT}/artifact/a",
        f"{TRIAL}/checkpoints/s/a",
        f"{TRIAL}/checkpoints/s/b",
    )
    put(store, f"{ATTEMPT}/attempt.json", "files/f")
    objects = RetentionStore(store)
    counted = Counter[str]()
    after: str | None = None
    for _ in range(3):
        found, after = objects.list_objects("", limit=2, after=after)
        counted.update(classify_object(info.key) for info in found)
    assert after is None
    assert counted == {"event_objects": 1, "artifacts": 1, "checkpoints": 2, "other": 2}


def test_a_place_is_measured_and_emptied_in_batches_that_can_be_repeated(store: ObjectStore) -> None:
    place, log = f"{ATTEMPT}/events", f"{ATTEMPT}/logs.txt"
    others = [f"{ATTEMPT}/attempt.json", f"{ATTEMPT}/events-not", f"{ATTEMPT}/logs.json"]
    put(store, *(f"{place}/driver/{number}" for number in range(5)), log, *others)
    objects, before, after = RetentionStore(store), keys(store), None
    batches, sizes = [], [(2, 6), (2, 6), (1, 3)]
    for _ in range(3):
        batches.append(objects.count_objects(place, limit=2, after=after))
        after = batches[-1].next
    assert ([(batch.objects, batch.bytes) for batch in batches], after) == (sizes, None)
    assert keys(store) == before
    batches = [objects.remove_objects(place, limit=2) for _ in range(4)]
    assert [(batch.objects, batch.bytes) for batch in batches] == [*sizes, (0, 0)]
    assert batches[2].next is None
    assert objects.count_objects(log, limit=9, after=None).bytes == 3, "a single object can be measured too"
    assert [objects.remove_objects(log, limit=9).objects for _ in range(2)] == [1, 0]
    assert keys(store) == others
