"""Checks before an attempt's first phase, on clusters that are only described."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.jobs.driver import refuse_unshared_store
from swiftkv_platform.storage.addresses import open_store
from swiftkv_platform.storage.object_store import ObjectStore


def cluster(monkeypatch: pytest.MonkeyPatch, *alive: bool) -> None:
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": is_alive} for is_alive in alive])


def directory(path: Path) -> ObjectStore:
    return open_store(str(path))


def test_a_directory_is_no_store_for_several_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, True, False, True)
    with pytest.raises(InvalidInputError, match="the cluster has 2 nodes") as raised:
        refuse_unshared_store(directory(tmp_path))
    assert (raised.value.field, raised.value.value) == ("storage_uri", str(tmp_path))
    monkeypatch.setenv("SWIFTKV_SHARED_DIRECTORY", "1")
    refuse_unshared_store(directory(tmp_path))


def test_one_node_may_use_a_directory_and_several_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster(monkeypatch, True, False)
    refuse_unshared_store(directory(tmp_path))
    cluster(monkeypatch, True, True)
    refuse_unshared_store(open_store("s3://bucket/prefix"))
