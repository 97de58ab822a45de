"""Origins of a teacher or a data set."""

from __future__ import annotations

from pathlib import Path

import pytest

from swiftkv_platform.errors import ModelError
from swiftkv_platform.jobs.attempt.downloads import teacher_path
from swiftkv_platform.specs import ModelSpec


def test_a_built_in_teacher_lies_in_the_package(tmp_path: Path) -> None:
    path = Path(teacher_path(ModelSpec(), tmp_path))
    assert (path / "config.json").is_file()
    assert (path / "model.safetensors").is_file()


def test_an_unknown_built_in_teacher_names_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="builtin:python-5m") as raised:
        teacher_path(ModelSpec(name_or_path="builtin:gpt"), tmp_path)
    assert (raised.value.field, raised.value.value) == ("model.name_or_path", "builtin:gpt")


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "models/mine", "/models/mine"])
def test_hub_ids_and_directories_stay_what_they_are(name: str, tmp_path: Path) -> None:
    assert teacher_path(ModelSpec(name_or_path=name), tmp_path) == name


def test_a_machine_that_is_not_to_fetch_knows_where_the_teacher_will_be(tmp_path: Path) -> None:
    assert Path(teacher_path(ModelSpec(name_or_path="s3://bucket/teacher"), tmp_path, fetch=False)).parent == tmp_path
    assert not list(tmp_path.iterdir())
