"""A hub id is a hub id wherever the operator closes local paths, whatever lies in a worker's working directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.sources import teacher_path
from swiftkv_platform import closed_paths
from swiftkv_platform.api.dependencies import worker_environment
from swiftkv_platform.distillation.data_sources import read_source
from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.settings import Settings
from swiftkv_platform.specs import DataSourceSpec

NAME = "org/rows"


@pytest.fixture(autouse=True)
def shadowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    (tmp_path / NAME / "rows.jsonl").write_text('{"text": "another tenant\'s"}\n')
    monkeypatch.chdir(tmp_path)


def test_where_paths_are_closed_a_worker_refuses_what_its_directory_shadows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in worker_environment(Settings(source_roots=(), _env_file=None)).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InvalidInputError, match="hub id") as caught:
        read_source(DataSourceSpec(name_or_path=NAME), path="data.sources[0]", remote=None)
    assert (caught.value.field, caught.value.value) == ("data.sources[0].name_or_path", NAME)
    with pytest.raises(InvalidInputError) as caught:
        teacher_path(NAME, tmp_path)
    assert caught.value.field == "model.name_or_path"
    assert teacher_path("org/elsewhere", tmp_path) == "org/elsewhere"
    [table] = read_source(DataSourceSpec(name_or_path=str(tmp_path / NAME)), path="data.sources[0]", remote=None)
    assert table.count() == 1, "an absolute path was checked by the control plane"


def test_without_rules_a_relative_path_is_one(tmp_path: Path) -> None:
    assert closed_paths.VARIABLE not in worker_environment(Settings(_env_file=None))
    [table] = read_source(DataSourceSpec(name_or_path=NAME), path="data.sources[0]", remote=None)
    assert table.count() == 1
    assert teacher_path(NAME, tmp_path) == NAME
