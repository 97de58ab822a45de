"""Refusals before anything runs, and how each names field, value and what is accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.data.checks import SourceEstimate
from swiftkv_platform.errors import DataError, InvalidInputError, ModelError, ObjectNotFoundError, StorageError
from swiftkv_platform.orchestration.estimates import Estimate
from swiftkv_platform.orchestration.validation import validate
from swiftkv_platform.specs import JobSpec
from tests.model_configs import llama_config
from tests.requirements import required_module

DATA = "data.sources[0].name_or_path"
BUILTIN = SourceEstimate("builtin:python-stdlib", formats=("text",))


def read_nothing(store: str, key: str) -> bytes:
    raise ObjectNotFoundError(f"there is no object {key!r} in {store}")


def check(read_object: Any = read_nothing, **spec: Any) -> Estimate:
    return validate(JobSpec.model_validate({"name": "test", **spec}), read_object)


@pytest.fixture
def teacher(tmp_path: Path) -> dict[str, Any]:
    """A model of 12 layers, as the spec names it."""
    directory = tmp_path / "teacher"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(llama_config(12)))
    return {"name_or_path": str(directory)}


def test_the_estimate_is_the_plans(teacher: dict[str, Any]) -> None:
    training = {"max_steps": 10, "batch_size": 4, "micro_batch_size": 2}
    spec = {"swiftkv": {"key_value_group_size": 4}, "training": training, "data": {"max_length": 256}}
    estimate = check(model=teacher, **spec)
    assert (estimate.num_hidden_layers, estimate.num_key_value_layers, estimate.num_kv_cache_layers) == (12, 6, 8)
    assert estimate.kv_bytes_ratio == pytest.approx(8 / 12)
    assert estimate.kv_bytes_per_token == 8 * 2 * 8 * 4 * 2, "layers, K and V, heads, their size, bytes"
    assert estimate.prefill_flops_ratio == pytest.approx(0.5, abs=0.05)
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    student = 6 * 64 * 64 + 2 * 2 * 64 * 32 + 64
    assert estimate.trained_parameters == student
    assert estimate.parameters == 12 * layer + student + 2 * 1024 * 64 + 64
    assert estimate.max_tokens == 10 * 4 * 256
    assert estimate.total_flops == pytest.approx(estimate.max_tokens * (estimate.flops_per_token or 0))
    assert estimate.memory_per_worker is not None
    halved = check(model=teacher, **{**spec, "training": {**training, "micro_batch_size": 1}}).memory_per_worker
    assert halved is not None
    assert halved < estimate.memory_per_worker
    assert estimate.sources == (BUILTIN,)
    assert check(model=teacher, swiftkv={"prefill_reduction": 0.25}).num_key_value_layers == 9


def test_the_estimate_counts_shared_heads(tmp_path: Path) -> None:
    """8 of 16 query heads: six lower layers cache 8 heads; six groups above cache 1 (mqa), three 16 (mha)."""
    (tmp_path / "config.json").write_text(json.dumps(llama_config(12)))
    model = {"name_or_path": str(tmp_path)}
    assert check(model=model, swiftkv={"sharing": "mqa"}).kv_bytes_ratio == pytest.approx(54 / 96)
    assert check(model=model, swiftkv={"sharing": "mha", "key_value_group_size": 2}).kv_bytes_ratio == 1.0


@pytest.mark.parametrize("layers", [12, 13])
def test_layers_that_the_teacher_does_not_have_are_refused(teacher: dict[str, Any], layers: int) -> None:
    with pytest.raises(InvalidInputError, match=r"1\.\.11 are accepted") as caught:
        check(model=teacher, swiftkv={"num_key_value_layers": layers})
    assert (caught.value.field, caught.value.value) == ("swiftkv.num_key_value_layers", layers)


def test_a_group_larger_than_the_layers_that_share_is_refused(teacher: dict[str, Any]) -> None:
    with pytest.raises(InvalidInputError) as caught:
        check(model=teacher, swiftkv={"num_key_value_layers": 10, "key_value_group_size": 3})
    assert (caught.value.field, caught.value.value) == ("swiftkv.key_value_group_size", 3)


@pytest.mark.parametrize("values", [{"num_key_value_layers": [6, 12]}, {"key_value_group_size": [8, 7]}])
def test_a_sweep_whose_trials_do_not_fit_is_refused(teacher: dict[str, Any], values: dict[str, list[int]]) -> None:
    (name,) = values
    with pytest.raises(InvalidInputError) as caught:
        check(model=teacher, sweep=values, evaluation={"max_kl": 0.2})
    assert (caught.value.field, caught.value.value) == (f"swiftkv.{name}", max(values[name]))


def test_a_sweep_may_name_a_group_too_large_for_some_of_its_layers(teacher: dict[str, Any]) -> None:
    sweep = {"num_key_value_layers": [9, 6], "key_value_group_size": [4]}
    estimate = check(model=teacher, sweep=sweep, evaluation={"max_kl": 0.2})
    assert (estimate.num_key_value_layers, estimate.num_kv_cache_layers) == (6, 8)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        (None, "cannot be read"),
        ("{", "no JSON"),
        ("[]", "no object"),
        ("{}", "num_hidden_layers None"),
        ('{"num_hidden_layers": 1}', "num_hidden_layers 1"),
        (json.dumps(llama_config(12, model_type="gpt2")), "gpt2"),
    ],
)
def test_an_unreadable_model_is_refused(tmp_path: Path, config: str | None, complaint: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ModelError, match=complaint) as caught:
        check(model={"name_or_path": str(tmp_path)})
    assert caught.value.field == "model.name_or_path"


@pytest.mark.parametrize("name", ["/missing/model", "./missing", "a/b/c", "builtin:other", "s3://bucket/missing"])
def test_a_model_that_is_not_there_is_refused(name: str) -> None:
    with pytest.raises(ModelError):
        check(model={"name_or_path": name})


def test_a_model_in_an_object_store_is_read_there() -> None:
    objects = {("s3://bucket/model", "config.json"): json.dumps(llama_config(4)).encode()}
    estimate = check(lambda store, key: objects[store, key], model={"name_or_path": "s3://bucket/model"})
    assert estimate.num_key_value_layers == 2

    def away(store: str, key: str) -> bytes:
        raise StorageError("the store does not answer")

    with pytest.raises(StorageError):
        check(away, model={"name_or_path": "s3://bucket/model"})


def test_a_hub_id_is_left_to_the_worker() -> None:
    assert check(model={"name_or_path": "org/model"}).num_hidden_layers is None
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
        ('{"body": "x"}', r"has the columns body; these are accepted: messages: messages; sharegpt: conversations"),
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
    with pytest.raises(DataError, match=r"these are accepted: messages: messages$"):
        check_data(name, format="messages")


def test_parquet_columns_are_read_from_its_schema(tmp_path: Path) -> None:
    arrow, parquet = required_module("pyarrow"), required_module("pyarrow.parquet")
    file = tmp_path / "data.parquet"
    parquet.write_table(arrow.table({"body": ["x"]}), file)
    with pytest.raises(DataError, match="has the columns body"):
        check_data(str(file))
    file.write_bytes(b"nonsense")
    with pytest.raises(DataError, match="no Parquet file"):
        check_data(str(file))


def test_a_first_look_at_the_data_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "b.json").write_text('[{"messages": [], "text": "x"}]')
    (tmp_path / "c.txt").write_text("plain")
    (tmp_path / "d.jsonl").write_text("")
    estimate = check(data={"sources": [{"name_or_path": str(tmp_path)}, {"name_or_path": "org/data"}]})
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert estimate.sources == (
        SourceEstimate(str(tmp_path), 3, size, ("text", "messages")),
        SourceEstimate("org/data"),
    )


def test_prompts_that_the_teacher_completes_need_no_answers(tmp_path: Path) -> None:
    name = data_file(tmp_path, '{"prompt": "x"}')
    check_data(name, complete={})
    with pytest.raises(DataError, match="prompt_completion: completion"):
        check_data(name)


def test_what_datasets_saved_is_left_to_the_worker(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text("{}")
    (tmp_path / "data-00000-of-00001.arrow").write_bytes(b"rows")
    check_data(str(tmp_path))


def test_plain_text_needs_no_columns(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text("x = 1\n")
    check_data(str(tmp_path))
    check_data("builtin:python-stdlib")


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    """A directory with the files of `builtin:gsm8k`."""
    directory = tmp_path / "gsm8k"
    directory.mkdir()
    for split in ("train", "test"):
        (directory / f"gsm8k_{split}.jsonl").write_text("{}\n")
    return directory


def check_tasks(*tasks: Any) -> None:
    check(model={"name_or_path": "org/model"}, evaluation={"tasks": tasks})


@pytest.mark.parametrize(
    ("task", "error", "field", "complaint"),
    [
        ("builtin:gsm9", InvalidInputError, "", "the built-in tasks are builtin:gsm8k and builtin:mmlu"),
        ("builtin:mmlu", InvalidInputError, ".data_dir", r"a directory that holds test/\*_test.csv and dev/"),
        ("/nowhere/task.yaml", InvalidInputError, "", "no such file"),
        ({"name": "{here}"}, InvalidInputError, "", "no such file"),
        ({"name": "builtin:gsm8k", "data_dir": "/nowhere"}, DataError, ".data_dir", "no such directory"),
        ({"name": "builtin:mmlu", "data_dir": "{gsm8k}"}, DataError, ".data_dir", r"holds no test/\*_test.csv"),
        ({"name": "{file}", "data_dir": "/nowhere"}, DataError, ".data_dir", "no such directory"),
    ],
)
def test_a_task_that_is_not_there_is_refused(
    gsm8k: Path, tmp_path: Path, task: Any, error: type[InvalidInputError], field: str, complaint: str
) -> None:
    file, directory = tmp_path / "task.yaml", tmp_path / "directory.yaml"
    file.write_text("task: own\n")
    directory.mkdir()
    places = {"{gsm8k}": str(gsm8k), "{file}": str(file), "{here}": str(directory)}
    named = {key: places.get(value, value) for key, value in task.items()} if isinstance(task, dict) else task
    with pytest.raises(error, match=complaint) as caught:
        check_tasks("winogrande", named)
    assert caught.value.field == f"evaluation.tasks[1]{field}"


def test_tasks_that_are_there_or_elsewhere_are_accepted(gsm8k: Path, tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text("task: own\n")
    builtin, remote = (
        {"name": "builtin:gsm8k", "data_dir": str(gsm8k)},
        {"name": "builtin:mmlu", "data_dir": "s3://b/m"},
    )
    check_tasks("paper", "no_name_of_the_harness_is_known_here", str(file), "s3://bucket/task.yaml", builtin, remote)
