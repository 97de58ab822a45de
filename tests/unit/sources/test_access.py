"""Sources that a tenant's specs may read."""

import re
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.errors import InvalidInputError
from swiftkv_platform.sources import NO_RULES, SourceRules
from swiftkv_platform.sources.names import make_override_absolute, make_paths_absolute, refuse_relative_paths
from swiftkv_platform.specs import JobSpec


@pytest.fixture
def shelves(tmp_path: Path) -> Path:
    """Directories of the tenants acme and other; acme's holds a link into other's."""
    for tenant in ("acme", "other"):
        (tmp_path / tenant / "data").mkdir(parents=True)
    (tmp_path / "acme" / "link").symlink_to(tmp_path / "other" / "data")
    return tmp_path


def spec(model: str = "org/teacher", source: str = "builtin:python-stdlib") -> JobSpec:
    document: dict[str, Any] = {"name": "t", "model": {"name_or_path": model}}
    return JobSpec.model_validate({**document, "data": {"sources": [{"name_or_path": source}]}})


def rules(shelves: Path) -> SourceRules:
    return SourceRules((f"{shelves}/{{tenant}}", "s3://bucket/{tenant}"))


@pytest.mark.parametrize("name", ["org/teacher", "builtin:python-stdlib", "s3://bucket/acme/rows", "{}/acme/data"])
def test_what_lies_below_a_root_is_open(shelves: Path, name: str) -> None:
    rules(shelves).build_access("acme").check_spec(spec(source=name.format(shelves)))


@pytest.mark.parametrize(
    "name",
    [
        "{}/other/data",
        "{}/acme/../other/data",
        "{}/acme/link",
        "{}/acme-not/data",
        "/etc/passwd",
        "~/.ssh",
        "s3://bucket/other/rows",
        "s3://bucket/acme-not/rows",
        "s3://else/acme/rows",
    ],
)
def test_everything_else_is_refused_by_field(shelves: Path, name: str) -> None:
    name = name.format(shelves)
    with pytest.raises(InvalidInputError, match="tenant 'acme' may not read") as caught:
        rules(shelves).build_access("acme").check_spec(spec(source=name))
    assert (caught.value.field, caught.value.value) == ("data.sources[0].name_or_path", name)
    with pytest.raises(InvalidInputError) as caught:
        rules(shelves).build_access("acme").check_spec(spec(model=name))
    assert caught.value.field == "model.name_or_path"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("file:///rows.jsonl", "begins with file://; use a path without this scheme, an s3:// address or a hub id"),
        ("https://example.org/rows.jsonl", "begins with https://"),
        ("S3://bucket/rows", "begins with S3://"),
        ("s3://", "names no bucket"),
        ("s3:///rows", "names no bucket"),
        ("s3://My_Bucket/rows", "names no bucket; 3 to 63 lower-case"),
        ("s3://bucket//rows", "has a key that is empty, absolute"),
        ("s3://bucket/acme/../other/rows", "has a key that has a '.' or '..' segment"),
    ],
)
def test_an_address_that_nothing_fetches_is_refused_whatever_is_open(shelves: Path, name: str, why: str) -> None:
    document = {"name": "t", "evaluation": {"tasks": [{"name": "builtin:mmlu", "data_dir": name}]}}
    given = [(spec(model=name), "model.name_or_path"), (spec(source=name), "data.sources[0].name_or_path")]
    for job, field in [*given, (JobSpec.model_validate(document), "evaluation.tasks[0].data_dir")]:
        for opened in (rules(shelves), NO_RULES):
            with pytest.raises(InvalidInputError, match=re.escape(why)) as caught:
                opened.build_access("acme").check_spec(job)
            assert (caught.value.field, caught.value.value) == (field, repr(name))


def test_without_roots_nothing_local_is_open_and_without_rules_everything(shelves: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"built-in sources .*SWIFTKV_SOURCE_ROOTS"):
        SourceRules(()).build_access("acme").check_spec(spec(source=f"{shelves}/acme/data"))
    NO_RULES.build_access("acme").check_spec(spec(source="/etc/passwd"))


@pytest.mark.parametrize(
    "task",
    [
        {"name": "/elsewhere/task.yaml"},
        {"name": "mine.yml"},
        {"name": "builtin:mmlu", "data_dir": "/etc"},
        {"name": "builtin:mmlu", "data_dir": "s3://bucket/other"},
        {"name": "builtin:mmlu", "data_dir": "org/data"},
    ],
)
def test_tasks_neither_run_code_nor_read_what_is_closed(shelves: Path, task: dict[str, str]) -> None:
    document = {"name": "t", "model": {"name_or_path": "org/teacher"}, "evaluation": {"tasks": [task]}}
    with pytest.raises(InvalidInputError) as caught:
        rules(shelves).build_access("acme").check_spec(JobSpec.model_validate(document))
    assert caught.value.field is not None
    assert caught.value.field.startswith("evaluation.tasks[0]")
    allowed = {"name": "builtin:mmlu", "data_dir": f"{shelves}/acme/data"}
    open_ = {**document, "evaluation": {"tasks": ["gsm8k", allowed]}}
    rules(shelves).build_access("acme").check_spec(JobSpec.model_validate(open_))


RELATIVE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("model.name_or_path", {"model": {"name_or_path": "./teacher"}}),
    ("model.name_or_path", {"model": {"name_or_path": "here/teacher"}}),
    ("model.name_or_path", {"model": {"name_or_path": "~/teacher"}}),
    ("data.sources[0].name_or_path", {"data": {"sources": [{"name_or_path": "rows.jsonl"}]}}),
    ("data.sources[0].name_or_path", {"data": {"sources": [{"name_or_path": "../rows"}]}}),
    ("evaluation.tasks[0]", {"evaluation": {"tasks": ["task.yaml"]}}),
    (
        "evaluation.rows[0].source.name_or_path",
        {"evaluation": {"rows": [{"name": "a", "metric": "contains", "source": {"name_or_path": "a.jsonl"}}]}},
    ),
    ("evaluation.tasks[0].data_dir", {"evaluation": {"tasks": [{"name": "builtin:gsm8k", "data_dir": "samples"}]}}),
)


@pytest.mark.parametrize(("field", "sections"), RELATIVE)
def test_relative_paths_are_the_callers_and_nobody_elses(
    field: str, sections: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "teacher").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    given = JobSpec.model_validate({"name": "t", **sections})
    with pytest.raises(InvalidInputError, match=r"a relative path, .* use an absolute path") as caught:
        refuse_relative_paths(given, relative_paths=True)
    assert caught.value.field == field
    seen = make_paths_absolute(given)
    refuse_relative_paths(seen, relative_paths=True)
    assert str(tmp_path.parent) in seen.model_dump_json()
    assert make_paths_absolute(seen) == seen


def test_other_names_stay_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("org/teacher", "builtin:python-5m", "s3://bucket/model", "/models/teacher"):
        given = spec(name)
        assert make_paths_absolute(given) is given
    assert make_override_absolute("model.name_or_path", "./teacher") == str(tmp_path / "teacher")
    assert make_override_absolute("data.sources", [{"name_or_path": "a.txt"}]) == [
        {"name_or_path": str(tmp_path / "a.txt")}
    ]
    rows = [{"name": "own", "source": {"name_or_path": "a.jsonl"}}, "not a task"]
    absolute = {"name": "own", "source": {"name_or_path": str(tmp_path / "a.jsonl")}}
    assert make_override_absolute("evaluation.rows", rows) == [absolute, "not a task"]
    assert make_override_absolute("training.max_steps", 3) == 3
