"""Models are imported from buckets: bounded before they are read, and never more than was listed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from swiftkv_platform.control_plane.access.tenants import TenantPolicies
from swiftkv_platform.control_plane.base import Caller
from swiftkv_platform.control_plane.database.session import Database
from swiftkv_platform.control_plane.models.imports import ModelImporter
from swiftkv_platform.control_plane.parsing import make_import_parsers
from swiftkv_platform.errors import ModelError, QuotaExceededError
from swiftkv_platform.settings import Settings
from swiftkv_platform.sources import S3Source
from swiftkv_platform.storage.artifacts import fetch_directory, publish_directory
from swiftkv_platform.storage.downloads import list_bucket
from swiftkv_platform.storage.object_store import LocalObjectStore, ObjectStore
from swiftkv_platform.web.limiters import Client
from tests.support.components import make_components

CALLER = Caller("acme", "ann")


def put_student(store: ObjectStore, directory: Path) -> None:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama_swiftkv"}))
    (directory / "model.safetensors").write_bytes(b"weights" * 500_000)
    publish_directory(store, directory, "student", kind="artifact", lineage={"teacher": "tiny"}, metrics={"kl": 0.1})


def imports(database: Database, directory: Path, quota: int | None = None) -> ModelImporter:
    (directory / "tenants.yaml").write_text(json.dumps({"default": {"max_stored_bytes": quota}}))
    parts = make_components(database, LocalObjectStore(directory / "own"), clock=lambda: 100.0)
    parts = replace(parts, policies=TenantPolicies(directory / "tenants.yaml"))
    return ModelImporter(parts, Settings(_env_file=None), Client(), make_import_parsers())  # type: ignore[call-arg]


def test_a_model_comes_from_a_bucket(database: Database, s3_store: ObjectStore, tmp_path: Path) -> None:
    put_student(s3_store, tmp_path / "made")
    service = imports(database, tmp_path)
    model = service.import_model(f"{s3_store.uri}/student", None, CALLER)
    assert (model.lineage["teacher"], model.metrics, model.job_id) == ("tiny", {"kl": 0.1}, None)
    fetch_directory(service.parts.objects, model.prefix, tmp_path / "fetched")
    for path in (tmp_path / "made").iterdir():
        assert (tmp_path / "fetched" / path.name).read_bytes() == path.read_bytes()


def test_a_model_of_a_bucket_beyond_the_quota_is_not_read(
    database: Database, s3_store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_student(s3_store, tmp_path / "made")
    monkeypatch.setattr(type(s3_store), "stream", lambda *_arguments, **_options: pytest.fail("it is read"))
    with pytest.raises(QuotaExceededError):
        imports(database, tmp_path, quota=1_000_000).import_model(f"{s3_store.uri}/student", None, CALLER)
    assert not (tmp_path / "own").exists()


@pytest.mark.parametrize("size", [1_000, 9_000_000])
def test_an_object_that_is_replaced_after_it_was_listed_is_refused(s3_store: ObjectStore, size: int) -> None:
    s3_store.put_bytes("student/model.safetensors", b"x" * 4_000_000)
    with list_bucket(S3Source(f"{s3_store.uri}/student"), field="source") as [file]:
        s3_store.put_bytes("student/model.safetensors", b"x" * size)
        copied: list[bytes] = []
        with pytest.raises(ModelError, match="changed during the import"):
            copied.extend(file.stream_with_size_check())
    assert sum(map(len, copied)) <= 4_000_000
