"""Refusals before anything runs, and how each names field, value and what is accepted."""

import json
from pathlib import Path
from typing import Any

import pytest

from swiftkv_platform.control_plane.jobs.estimates import JobEstimate, validate_and_estimate
from swiftkv_platform.data.checks import SourceEstimate
from swiftkv_platform.errors import (
    BucketError,
    DataError,
    InvalidInputError,
    ModelError,
    ObjectNotFoundError,
    StorageError,
)
from swiftkv_platform.specs import JobSpec
from tests.support.model_configs import llama_config
from tests.support.requirements import required_module

DATA = "data.sources[0].name_or_path"

BUILTIN = SourceEstimate("builtin:python-stdlib", formats=("text",))


LATENT = llama_config(12, model_type="deepseek_v2", first_k_dense_replace=12, q_lora_rank=None)


def read_nothing(store: str, key: str) -> bytes:
    raise ObjectNotFoundError(f"there is no object {key!r} in {store}")


def check(read_object: Any = read_nothing, **spec: Any) -> JobEstimate:
    return validate_and_estimate(JobSpec.model_validate({"name": "test", **spec}), read_object)


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
    assert estimate.kv_bytes_per_token == 8 * 2 * 8 * 4 * 2, "layers, K and V, heads, head size, bytes"
    assert estimate.prefill_flops_ratio == pytest.approx(0.5, abs=0.05)
    layer = 2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    student = 6 * 64 * 64 + 2 * 2 * 2 * 64 * 32 + 64  # K and V of two groups, of skipped and of deep tokens
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


def refused(kind: type[InvalidInputError], complaint: str, **spec: Any) -> tuple[str | None, Any]:
    """Check a spec that is refused with `complaint`; return the field and value that the error names."""
    with pytest.raises(kind, match=complaint) as caught:
        check(**spec)
    return caught.value.field, caught.value.value


def test_shapes_that_do_not_fit_the_teacher_are_refused(teacher: dict[str, Any]) -> None:
    layers, group = "num_key_value_layers", "key_value_group_size"
    for swiftkv, field in (({layers: 12}, layers), ({layers: 13}, layers), ({layers: 10, group: 3}, group)):
        complaint = r"1\.\.11 are accepted" if field == layers else "."
        found = refused(InvalidInputError, complaint, model=teacher, swiftkv=swiftkv)
        assert found == (f"swiftkv.{field}", swiftkv[field])
    for name, values in ((layers, [6, 12]), (group, [8, 7])):
        found = refused(InvalidInputError, ".", model=teacher, sweep={name: values}, evaluation={"max_kl": 0.2})
        assert found == (f"swiftkv.{name}", max(values)), "every trial of a sweep must fit"
    sweep = {layers: [9, 6], group: [4]}
    estimate = check(model=teacher, sweep=sweep, evaluation={"max_kl": 0.2})
    assert (estimate.num_key_value_layers, estimate.num_kv_cache_layers) == (6, 8), "a group may be too large for some"
    listed = check(model=teacher, swiftkv={"prefill_layers": [0, 1, 2, 3, 5, 7]})
    assert (listed.num_key_value_layers, listed.num_kv_cache_layers) == (8, 12)
    assert listed.prefill_flops_ratio == check(model=teacher, swiftkv={layers: 6}).prefill_flops_ratio, "both have six"
    field = "swiftkv.prefill_layers"
    found = refused(
        InvalidInputError, "a model of 12 layers takes 0 to 10", model=teacher, swiftkv={"prefill_layers": [0, 11]}
    )
    assert found == (field, [0, 11])
    Path(teacher["name_or_path"], "config.json").write_text(json.dumps(LATENT))
    assert refused(ModelError, "MLA", model=teacher, swiftkv={"prefill_layers": [0, 2]}) == (field, [0, 2])
    Path(teacher["name_or_path"], "config.json").write_text(json.dumps(llama_config(12)))
    # 8 of 16 query heads: six lower layers cache 8 heads; six groups above cache 1 (mqa), three 16 (mha).
    assert check(model=teacher, swiftkv={"sharing": "mqa"}).kv_bytes_ratio == pytest.approx(54 / 96)
    assert check(model=teacher, swiftkv={"sharing": "mha", group: 2}).kv_bytes_ratio == 1.0


def test_an_unreadable_model_is_refused(tmp_path: Path) -> None:
    for config, complaint in (
        (None, r"its config.json cannot be read \(No such file or directory\)"),
        ("{", "not JSON"),
        ("\ufeff{}", "not JSON"),  # transformers reads neither
        (json.dumps(llama_config(12)).encode("utf-16"), "not JSON"),
        ("[]", "not a JSON object"),
        ("{}", "its config.json has model_type None"),
        (json.dumps(llama_config(1)), "num_hidden_layers 1"),
        (json.dumps(llama_config(12, hidden_act=3)), "its config.json has hidden_act 3; a name is accepted"),
        (json.dumps(llama_config(1 << 30)), r"num_hidden_layers 1073741824; 1\.\.1024 is accepted"),
        (json.dumps(llama_config(12, model_type="gpt2")), r"gpt2.*deepseek_v2, .*llama"),
        *(
            (json.dumps(llama_config(12, quantization_config={"quant_method": method})), f"{method}.*FP8 as fbgemm_fp8")
            for method in ("gptq", "awq", "bitsandbytes", "mxfp4", "compressed-tensors")
        ),
    ):
        if config is not None:
            (tmp_path / "config.json").write_bytes(config if isinstance(config, bytes) else config.encode())
        sources = [{"name_or_path": str(tmp_path / "missing.jsonl")}]  # the model is checked first
        found = refused(ModelError, complaint, model={"name_or_path": str(tmp_path)}, data={"sources": sources})
        assert found[0] == "model.name_or_path"
    for name in ("/missing/model", "./missing", "a/b/c", "builtin:other", "s3://bucket/missing"):
        refused(ModelError, ".", model={"name_or_path": name})


def test_a_model_in_an_object_store_is_read_there() -> None:
    objects = {("s3://bucket", "a #1?/config.json"): json.dumps(llama_config(4)).encode()}

    def read(store: str, key: str) -> bytes:
        if (store, key) not in objects:
            raise ObjectNotFoundError(f"no object {key!r} in {store}")
        return objects[store, key]

    for name in ("s3://bucket/a #1?", "s3://bucket/a #1?/"):
        assert check(read, model={"name_or_path": name}).num_key_value_layers == 2

    def closed(store: str, key: str) -> bytes:
        raise BucketError(f"cannot read {key!r} in {store}: bucket 'bucket' does not exist; create it")

    with pytest.raises(ModelError, match=r"name_or_path is 's3://bucket/model': .*does not exist; create it"):
        check(closed, model={"name_or_path": "s3://bucket/model"})

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


def refused_data(complaint: str, name: str, **source: Any) -> None:
    with pytest.raises(DataError, match=complaint) as caught:
        check_data(name, **source)
    assert (caught.value.field, caught.value.value) == (DATA, name)


def test_data_that_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    for content, complaint in (
        (None, "no file in a known format"),
        ("", "empty"),
        ("nonsense", "not JSON"),
        ("[1]", "not an object"),
        ('{"body": "x"}', r"has the columns body; .*: messages: messages; sharegpt: conversations"),
    ):
        refused_data(complaint, data_file(tmp_path, content))
    for name in ("/missing.jsonl", "missing/data.parquet", "./data", "builtin:other"):
        refused_data(".", name)


def test_readable_data_is_accepted(tmp_path: Path) -> None:
    for content in (
        '{"text": "x"}\n{"text": "y"}\n',
        '\ufeff\n[{"prompt": "a", "response": "b"}]',
        '{"instruction": "a", "input": "", "output": "b"}',
        '{"text": "' + "x" * (1 << 20) + '"}',  # longer than what is read
    ):
        check_data(data_file(tmp_path, content))
    text = data_file(tmp_path, '{"text": "x"}')
    check_data(text, format="text")
    with pytest.raises(DataError, match=r": messages: messages$"):
        check_data(text, format="messages")
    prompts = data_file(tmp_path, '{"prompt": "x"}')
    check_data(prompts, complete={})  # which the teacher answers
    refused_data(r"prompt_completion: prompt \+ completion", prompts)
    saved, plain = tmp_path / "saved", tmp_path / "plain"
    saved.mkdir()
    (saved / "state.json").write_text("{}")
    (saved / "data-00000-of-00001.arrow").write_bytes(b"rows")
    plain.mkdir()
    (plain / "module.py").write_text("x = 1\n")
    for name in (str(saved), str(plain), "builtin:python-stdlib"):
        check_data(name)


def test_parquet_columns_are_read_from_its_schema(tmp_path: Path) -> None:
    arrow, parquet = required_module("pyarrow"), required_module("pyarrow.parquet")
    file = tmp_path / "data.parquet"
    parquet.write_table(arrow.table({"body": ["x"]}), file)
    with pytest.raises(DataError, match="has the columns body"):
        check_data(str(file))
    file.write_bytes(b"nonsense")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        check_data(str(file))


def test_a_first_look_at_the_data_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "b.json").write_text('[{"messages": [{"role": "user", "content": "x"}], "text": "x"}]')
    (tmp_path / "c.txt").write_text("plain")
    (tmp_path / "d.jsonl").write_text("")
    estimate = check(data={"sources": [{"name_or_path": str(tmp_path)}, {"name_or_path": "org/data"}]})
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert estimate.sources == (
        SourceEstimate(str(tmp_path), 3, size, ("text", "messages"), unread_columns=("text",)),
        SourceEstimate("org/data"),
    )


@pytest.fixture
def gsm8k(tmp_path: Path) -> Path:
    """A directory with the files of `builtin:gsm8k`."""
    directory = tmp_path / "gsm8k"
    directory.mkdir()
    for split in ("train", "test"):
        (directory / f"gsm8k_{split}.jsonl").write_text("{}\n")
    return directory


def check_evaluation_tasks(*tasks: Any) -> None:
    check(model={"name_or_path": "org/model"}, evaluation={"tasks": tasks})


def test_a_task_that_is_not_there_is_refused(gsm8k: Path, tmp_path: Path) -> None:
    file, directory = tmp_path / "task.yaml", tmp_path / "directory.yaml"
    file.write_text("task: own\n")
    directory.mkdir()
    invalid = InvalidInputError
    tasks: list[tuple[Any, type[InvalidInputError], str, str]] = [
        ("builtin:gsm9", invalid, "", "the built-in tasks are builtin:gsm8k and builtin:mmlu"),
        ("builtin:mmlu", invalid, ".data_dir", r"a directory that holds test/\*_test.csv and dev/"),
        ("/nowhere/task.yaml", invalid, "", "no such file"),
        ({"name": str(directory)}, invalid, "", "no such file"),
        ({"name": "builtin:gsm8k", "data_dir": "/nowhere"}, DataError, ".data_dir", "no such directory"),
        ({"name": "builtin:mmlu", "data_dir": str(gsm8k)}, DataError, ".data_dir", r"holds test/\*_test.csv and"),
        ({"name": str(file), "data_dir": "/nowhere"}, DataError, ".data_dir", "no such directory"),
    ]
    for task, error, field, complaint in tasks:
        with pytest.raises(error, match=complaint) as caught:
            check_evaluation_tasks("winogrande", task)
        assert caught.value.field == f"evaluation.tasks[1]{field}"


def test_tasks_that_are_there_or_elsewhere_are_accepted(gsm8k: Path, tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text("task: own\n")
    builtin, remote = (
        {"name": "builtin:gsm8k", "data_dir": str(gsm8k)},
        {"name": "builtin:mmlu", "data_dir": "s3://bucket/m"},
    )
    check_evaluation_tasks(
        "paper", "no_name_of_the_harness_is_known_here", str(file), "s3://bucket/task.yaml", builtin, remote
    )
