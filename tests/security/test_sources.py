"""Data sources and models of a tenant stay within its roots, run no code and reach no socket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.data.opening import read_source
from swiftkv_platform.errors import SwiftKVError
from swiftkv_platform.sources import Access, SourceRules
from swiftkv_platform.specs import DataSourceSpec, JobSpec
from tests.security.hostile_sources import (
    CANARY,
    DATA,
    MODELS,
    Listener,
    Stage,
    lay_out_hub_data,
    lay_out_hub_model,
    listening,
    write_rows,
)

TENANT = "acme"


@pytest.fixture
def listener() -> Iterator[Listener]:
    with listening() as found:
        yield found


@pytest.fixture
def stage(tmp_path: Path, listener: Listener, tiny_teacher: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return Stage.build(tmp_path, listener.url, tiny_teacher)


def access(stage: Stage) -> Access:
    return SourceRules((str(stage.root),)).access(TENANT)


def read_rows(stage: Stage, name: Path | str, **options: Any) -> str:
    """Everything that a job of the tenant reads of a source, once its spec is accepted."""
    source = DataSourceSpec(name_or_path=str(name), **options)
    spec = JobSpec.model_validate({"name": "t", "data": {"sources": [source]}})
    access(stage).check(spec)
    tables = read_source(source, path="data.sources[0]", remote=None, access=access(stage))
    return "".join(str(row) for table in tables for _, row in table.rows(None))


def read_model(stage: Stage, name: Path | str, workspace: Path) -> str:
    """Return what the tenant's job keeps of a model, once its spec is accepted: the text of its tokenizer's files."""
    from swiftkv_platform.jobs.attempt.downloads import teacher_path
    from swiftkv_platform.jobs.worker.prepare import load_student, load_tokenizer

    spec = JobSpec.model_validate({"name": "t", "model": {"name_or_path": str(name), "dtype": "float32"}})
    access(stage).check(spec)
    path = teacher_path(spec.model, workspace, access=access(stage))
    load_student(spec, path)
    load_tokenizer(spec, path).save_pretrained(workspace / "kept")
    return "".join(file.read_text(errors="replace") for file in sorted((workspace / "kept").iterdir()))


@pytest.mark.parametrize("name", DATA)
def test_a_source_neither_leaves_the_root_nor_runs_code(stage: Stage, listener: Listener, name: str) -> None:
    directory = DATA[name](stage)
    for streaming in (False, True):
        if name == "pictures":  # its text may be read, its pictures may not
            assert "own" in read_rows(stage, directory, streaming=streaming)
        else:
            with pytest.raises(SwiftKVError) as caught:
                read_rows(stage, directory, streaming=streaming)
            assert str(caught.value.field).startswith("data.sources[0]")
            assert CANARY not in str(caught.value)
    assert listener.connections == []
    assert not stage.marker.exists()


@pytest.mark.parametrize("lay_out", MODELS)
def test_a_model_neither_leaves_the_root_nor_runs_code(
    stage: Stage, tmp_path: Path, lay_out: Callable[[Stage], Path]
) -> None:
    directory = lay_out(stage)
    with pytest.raises(SwiftKVError) as caught:
        read_model(stage, directory, tmp_path / "work")
    assert caught.value.field == "model.name_or_path"
    assert not stage.marker.exists()


def test_what_is_sound_is_read(stage: Stage, tmp_path: Path) -> None:
    write_rows(stage.root / "rows.jsonl", "own")
    (stage.root / "link.jsonl").symlink_to("rows.jsonl")
    assert read_rows(stage, stage.root / "link.jsonl").count("own") == 8
    (stage.root / "out.jsonl").symlink_to(stage.outside / "canary.jsonl")
    (stage.root / "teacher").symlink_to(Path(stage.teacher), target_is_directory=True)
    with pytest.raises(SwiftKVError, match="may not read"):
        read_rows(stage, stage.root / "out.jsonl")
    with pytest.raises(SwiftKVError, match="may not read"):
        read_model(stage, stage.root / "teacher", tmp_path)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache of a machine that cannot reach the hub."""
    import huggingface_hub.constants
    import transformers.utils.hub

    cache = tmp_path / "hub"
    cache.mkdir()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(transformers.utils.hub.constants, "HF_HUB_CACHE", str(cache))
    return cache


def test_neither_a_model_nor_a_card_of_the_hub_leads_elsewhere(
    stage: Stage, hub_cache: Path, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SwiftKVError) as caught:
        read_model(stage, lay_out_hub_model(stage, hub_cache), tmp_path / "work")
    assert caught.value.field == "model.name_or_path"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("datasets.config.HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(SwiftKVError, match=r"README\.md") as caught:
        read_rows(stage, lay_out_hub_data(stage, hub_cache))
    assert caught.value.field is not None
    assert listener.connections == []
