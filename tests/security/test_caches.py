"""Caches of a node: what one tenant's jobs put there reaches no other tenant, and honest jobs go on offline."""

import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest
from huggingface_hub import HfFileSystem

from swiftkv_platform.data.source_rows import open_source
from swiftkv_platform.errors import StorageError, SwiftKVError
from swiftkv_platform.sources import Access, SourceRules
from swiftkv_platform.specs import DataSourceSpec
from tests.support.fakes.hub_server import Hub, go_online, run_hub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub, and the empty caches of a node that all tenants' jobs use."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "home" / "datasets")
    with run_hub() as hub:
        hub.use(monkeypatch, tmp_path / "home" / "hub")
        yield hub


def access(tmp_path: Path, tenant: str) -> Access:
    return SourceRules((str(tmp_path / "{tenant}"),)).build_access(tenant)


def read(tmp_path: Path, tenant: str, name: Path | str, **options: object) -> set[str]:
    source = DataSourceSpec.model_validate({"name_or_path": str(name), **options})
    tables = open_source(source, source_field="data.sources[0]", remote=None, access=access(tmp_path, tenant))
    return {str(row["text"]) for table in tables for _, row in table.read_rows(None)}


def parquet(text: str) -> bytes:
    sink = pa.BufferOutputStream()
    pyarrow.parquet.write_table(pa.table({"text": [text] * 20}), sink)
    return bytes(sink.getvalue())


def lay_out(directory: Path, text: str) -> Path:
    directory.mkdir(parents=True)
    (directory / "train-00000-of-00001.parquet").write_bytes(parquet(text))
    return directory


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_of_a_tenants_directory_have_no_name_for_others(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streaming: bool
) -> None:
    own = lay_out(tmp_path / "a" / "secrets", "secret of a")
    assert read(tmp_path, "a", own, streaming=streaming) == {"secret of a"}
    go_online(monkeypatch, False)
    assert read(tmp_path, "a", own, streaming=streaming) == {"secret of a"}
    for tenant in "ba":
        for name in ("secrets", "x/secrets", "parquet"):
            with pytest.raises(StorageError, match="has prepared no rows of it"):
                read(tmp_path, tenant, name, streaming=streaming)
    assert not list((tmp_path / "home").rglob("*.arrow"))


@pytest.mark.parametrize("name", ["org/wikitext", "wikitext"])
def test_a_directory_called_like_a_data_set_of_the_hub_does_not_replace_it(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    hub.datasets["org/wikitext"] = {"train-00000-of-00001.parquet": parquet("of the hub")}
    assert read(tmp_path, "a", "org/wikitext") == {"of the hub"}
    prepared = tmp_path / "home" / "datasets" / "org___wikitext"
    if name == "wikitext":  # as older versions of `datasets` keep data sets without an organization
        shutil.copytree(prepared, prepared.with_name("wikitext"))
    poison = lay_out(tmp_path / "b" / name.replace("/", "___"), "poison of b")
    assert read(tmp_path, "b", poison) == {"poison of b"}
    go_online(monkeypatch, False)
    for tenant in "ab":
        assert read(tmp_path, tenant, name) == {"of the hub"}
        assert read(tmp_path, tenant, name, streaming=True) == {"of the hub"}


@pytest.mark.parametrize("name", ["org/secret", "org___secret", "ORG/secret", "open/../org/secret", "open___secret/x"])
def test_rows_of_an_organization_that_a_tenant_may_not_name_stay_unread(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for repository in ("org/secret", "open___secret/x"):
        hub.datasets[repository] = {"train-00000-of-00001.parquet": parquet("secret")}
        assert read(tmp_path, "a", repository) == {"secret"}
    go_online(monkeypatch, False)
    closed = SourceRules((str(tmp_path / "{tenant}"),)).build_access("b", ("open",))
    for each in (name, "open/secret___x"):
        source = DataSourceSpec(name_or_path=each)
        with pytest.raises(SwiftKVError, match=r"may not read|prepared no rows"):
            open_source(source, source_field="data.sources[0]", remote=None, access=closed)


@pytest.mark.parametrize("subset", [None, "default", "../org___other/default", "*", ".."])
def test_rows_that_earlier_versions_left_in_the_shared_cache_have_no_name(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subset: str | None
) -> None:
    import datasets

    hub.datasets["org/other"] = {"train-00000-of-00001.parquet": parquet("of the hub")}
    assert read(tmp_path, "a", "org/other") == {"of the hub"}
    datasets.load_dataset(str(lay_out(tmp_path / "a" / "secrets", "secret of a")))  # as they did
    go_online(monkeypatch, False)
    with pytest.raises(SwiftKVError, match="has prepared no rows of it") as caught:
        read(tmp_path, "b", "secrets", subset=subset)
    assert "secret of a" not in str(caught.value)
    options = {} if subset in (None, "default") else {"match": "offline, this machine has default of org/other"}
    with pytest.raises(SwiftKVError, **options) if options else nullcontext():
        assert read(tmp_path, "b", "org/other", subset=subset) == {"of the hub"}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_that_stops_answering_gives_way_to_rows_of_the_hub_alone(
    hub: Hub, tmp_path: Path, streaming: bool
) -> None:
    import datasets

    for repository in ("wikitext", "empty"):
        datasets.load_dataset(str(lay_out(tmp_path / "a" / f"org___{repository}", "secret of a")))
    hub.datasets["org/wikitext"] = {"train-00000-of-00001.parquet": parquet("of the hub")}
    assert read(tmp_path, "b", "org/wikitext") == {"of the hub"}
    hub.datasets["org/wikitext"] = hub.datasets["org/empty"] = {}
    HfFileSystem.clear_instance_cache()
    assert read(tmp_path, "b", "org/wikitext", streaming=streaming) == {"of the hub"}
    with pytest.raises(StorageError, match="has prepared no rows of it"):
        read(tmp_path, "b", "org/empty", streaming=streaming)
