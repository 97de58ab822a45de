"""What is refused before anything runs, and how the refusal names field, value and what would do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.errors import DataError, InvalidInputError, ModelError, ObjectNotFoundError, StorageError
from swiftkv_platform.orchestration.validation import Estimate, validate
from swiftkv_platform.specs import JobSpec

DATA = "data.sources[0].name_or_path"


def read_nothing(store: str, key: str) -> bytes:
    raise ObjectNotFoundError(f"there is no object {key!r} in {store}")


def check(read_object: Any = read_nothing, **spec: Any) -> Estimate:
    return validate(JobSpec.model_validate({"name": "test", **spec}), read_object)


@pytest.fixture
def teacher(tmp_path: Path) -> dict[str, Any]:
    """A model of 12 layers, as the spec names it."""
    directory = tmp_path / "teacher"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 12}))
    return {"name_or_path": str(directory)}


def test_the_estimate_is_the_layer_maps(teacher: dict[str, Any]) -> None:
    estimate = check(model=teacher, swiftkv={"key_value_group_size": 4})
    assert estimate == Estimate(12, 6, 8, 0.5, 8 / 12)
    assert check(model=teacher, swiftkv={"prefill_reduction": 0.25}).num_key_value_layers == 9


@pytest.mark.parametrize("layers", [12, 13])
def test_layers_that_the_teacher_does_not_have_are_refused(teacher: dict[str, Any], layers: int) -> None:
    with pytest.raises(InvalidInputError, match=r"1\.\.11 are accepted") as caught:
        check(model=teacher, swiftkv={"num_key_value_layers": layers})
    assert (caught.value.field, caught.value.value) == ("swiftkv.num_key_value_layers", layers)


def test_a_group_larger_than_the_layers_that_share_is_refused(teacher: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check(model=teacher, swiftkv={"num_key_value_layers": 10, "key_value_group_size": 3})
    assert (caught.value.field, caught.value.value) == ("swiftkv.key_value_group_size", 3)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (None, "cannot be read"),
        ("{", "no JSON"),
        ("[]", "no object"),
        ("{}", "num_hidden_layers None"),
        ('{"num_hidden_layers": 1}', "num_hidden_layers 1"),
    ],
)
def test_an_unreadable_model_is_refused(tmp_path: Path, config: str | None, complaint: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=complaint) as caught:
        check(model={"name_or_path": str(tmp_path)})
    assert (caught.value.field, caught.value.value) == ("model.name_or_path", str(tmp_path))


@pytest.mark.parametrize("name", ["/missing/model", "./missing", "a/b/c", "builtin:other", "s3://bucket/missing"])
def test_a_model_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ModelError):
        check(model={"name_or_path": name})


def test_a_model_in_an_object_store_is_read_there() -> None:
    objects = {("s3://bucket/model", "config.json"): b'{"num_hidden_layers": 4}'}
    estimate = check(lambda store, key: objects[store, key], model={"name_or_path": "s3://bucket/model"})
    assert estimate.num_key_value_layers == 2

    def away(store: str, key: str) -> bytes:
        raise StorageError("the store does not answer")

    with pytest.raises(StorageError):
        check(away, model={"name_or_path": "s3://bucket/model"})


def test_a_hub_id_is_left_to_the_worker() -> None:
    assert check(model={"name_or_path": "org/model"}) == Estimate()
    check(model={"name_or_path": "org/model"}, data={"sources": [{"name_or_path": "org/data"}]})


def data_file(path: Path, content: str | None) -> str:
    path.mkdir(parents=True, exist_ok=True)
    if content is not None:
        (path / "data.jsonl").write_text(content)
    return str(path)


def check_data(name: str, **source: Any) -> None:
    check(model={"name_or_path": "org/model"}, data={"sources": [{"name_or_path": name, **source}]})


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no file that can be read"),
        ("", "empty"),
        ("nonsense", "no JSON"),
        ("[1]", "no object"),
        ('{"body": "x"}', r"has the columns body; these would do: text: text; messages: messages"),
    ],
)
def test_data_that_cannot_be_trained_on_is_refused(tmp_path: Path, content: str | None, complaint: str) -> None:
    name = data_file(tmp_path, content)
    with pytest.raises(DataError, match=complaint) as caught:
        check_data(name)
    assert (caught.value.field, caught.value.value) == (DATA, name)


@pytest.mark.parametrize("name", ["/missing.jsonl", "missing/data.parquet", "./data", "builtin:other"])
def test_data_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(DataError) as caught:
        check_data(name)
    assert (caught.value.field, caught.value.value) == (DATA, name)


@pytest.mark.parametrize(
    "content",
    [
        '{"text": "x"}\n{"text": "y"}\n',
        '\ufeff\n[{"prompt": "a", "response": "b"}]',
        '{"instruction": "a", "input": "", "output": "b"}',
        '{"text": "' + "x" * (1 << 20) + '"}',
    ],
    ids=["jsonl", "array with a byte order mark", "alpaca", "a row longer than what is looked at"],
)
def test_readable_data_is_accepted(tmp_path: Path, content: str) -> None:
    check_data(data_file(tmp_path, content))


def test_a_named_format_wants_its_own_columns(tmp_path: Path) -> None:
    name = data_file(tmp_path, '{"text": "x"}')
    check_data(name, format="text")
    with pytest.raises(DataError, match=r"these would do: messages: messages$"):
        check_data(name, format="messages")


def test_parquet_columns_are_read_from_its_schema(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = tmp_path / "data.parquet"
    parquet.write_table(arrow.table({"body": ["x"]}), file)
    with pytest.raises(DataError, match="has the columns body"):
        check_data(str(file))
    file.write_bytes(b"nonsense")
    with pytest.raises(DataError, match="no Parquet file"):
        check_data(str(file))


def test_plain_text_needs_no_columns(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("x = 1\n")
    check_data(str(tmp_path))
    check_data("builtin:python-stdlib")
